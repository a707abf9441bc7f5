"""klero explain: one row's way to its token, as a table."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import typer

import klero
from klero.cli.fields import FILTERS, REWRITING, SEED, SHAPING, ids_of, takes
from klero.errors import LogitsError, OptionError
from klero.params import SamplingParams


@takes(SHAPING, SEED, FILTERS, REWRITING)
def explain(
    logits: Annotated[str, typer.Argument(help='Numbers, "2,1,0,-1,-inf", or a .npy file with one row.')],
    position: Annotated[
        int | None, typer.Option(help="Index of the token; unset: prompt length + tokens so far.")
    ] = None,
    child: Annotated[int, typer.Option(help="Index of the choice.")] = 0,
    prompt_ids: Annotated[str, typer.Option(help='Ids of the prompt, "1,2".')] = "",
    output_ids: Annotated[str, typer.Option(help="Ids generated so far.")] = "",
    **fields: Any,
) -> None:
    """Follow one row of logits through every stage to its token."""
    params = SamplingParams.from_dict(fields)
    if params.seed is None and not params.greedy:
        raise OptionError("--seed must be given for a row that draws: any integer in [0, 2^64-1]")
    explanation = klero.explain(
        _row(logits), params, position=position, child=child, prompt=ids_of("--prompt-ids", prompt_ids),
        output=ids_of("--output-ids", output_ids),
    )  # fmt: skip
    print(explanation)
    if not explanation.status:
        print("kept:", " ".join(map(str, explanation.kept[:20])) + (" ..." if len(explanation.kept) > 20 else ""))


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
