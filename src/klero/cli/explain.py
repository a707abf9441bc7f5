"""klero explain: one row's way to its token, as a table."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

import klero
from klero.cli.fields import CHANGES, FILTERS, REWRITING, SEED, SHAPING, ids_of, takes
from klero.errors import LogitsError, OptionError
from klero.params import SamplingParams
from klero.rewrite.bans import bitmask


@takes(SHAPING, SEED, FILTERS, REWRITING)
def explain(
    logits: Annotated[str, typer.Argument(help='Numbers, "2,1,0,-1,-inf", or a .npy file with one row.')],
    position: Annotated[
        int | None, typer.Option(help="Index of the token; unset: prompt length + tokens so far.")
    ] = None,
    child: Annotated[int, typer.Option(help="Index of the choice.")] = 0,
    prompt_ids: Annotated[str, typer.Option(help='Ids of the prompt, "1,2".')] = "",
    output_ids: Annotated[str, typer.Option(help="Ids generated so far.")] = "",
    mask_ids: Annotated[
        str | None, typer.Option(rich_help_panel=CHANGES, help='What a grammar or mask allows, "1,2"; unset: all.')
    ] = None,
    min_tokens: Annotated[
        int | None, typer.Option(rich_help_panel=CHANGES, help="No end id before so many; needs --end-token-ids.")
    ] = None,
    end_token_ids: Annotated[str | None, typer.Option(rich_help_panel=CHANGES, help="The model's end ids.")] = None,
    **fields: Any,
) -> None:
    """Follow one row of logits through every stage to its token."""
    params = SamplingParams.from_dict(fields | {"min_tokens": min_tokens})
    if params.seed is None and not params.greedy:
        raise OptionError("--seed must be given for a row that draws: any integer in [0, 2^64-1]")
    row = _row(logits)
    explanation = klero.explain(
        row, params, position=position, child=child, prompt=ids_of("--prompt-ids", prompt_ids),
        output=ids_of("--output-ids", output_ids), mask=None if mask_ids is None else _mask(mask_ids, row.shape[-1]),
        end_token_ids=None if end_token_ids is None else ids_of("--end-token-ids", end_token_ids),
    )  # fmt: skip
    print(explanation)
    if not explanation.status:
        print("kept:", " ".join(map(str, explanation.kept[:20])) + (" ..." if len(explanation.kept) > 20 else ""))


def _mask(given: str, width: int) -> npt.NDArray[np.int32]:
    ids = ids_of("--mask-ids", given)
    if ids and not 0 <= min(ids) <= max(ids) < width:
        raise OptionError(f"--mask-ids {given!r}: must be in [0, {width - 1}], the columns of the logits")
    return bitmask(ids, width)


def _row(given: str) -> Any:
    if given.endswith(".npy"):
        try:
            row = np.load(given, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise LogitsError(f"logits {given}: cannot be read ({error})") from None
        return row.astype(np.float32) if row.dtype == np.float64 else row
    try:
        with np.errstate(over="ignore"):  # 1e39 is +inf in binary32, and the row says so
            return np.array([float(text) for text in given.split(",")]).astype(np.float32)
    except ValueError:
        raise LogitsError(f"logits {given!r}: must be numbers with commas between them, or a .npy file") from None
