"""klero score: texts in, the logprobs of their tokens out."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from klero.cli import options as o
from klero.cli import show
from klero.cli.requests import is_piped, lines_of
from klero.errors import KleroError, RequestError
from klero.evals.scoring import Pair, Scored, join_pair, score_pairs

if TYPE_CHECKING:
    from klero.engine import LLM, Progress

IDS = ("prompt_token_ids", "token_ids")
KINDS = (("text",), ("prompt", "continuation"), IDS)


@dataclass(frozen=True)
class Given:
    """One line as it was written: the fields of one of KINDS."""

    fields: dict[str, Any]

    def pair(self, llm: LLM) -> Pair:
        """The tokens, and which of them count."""
        match self.fields:
            case {"text": text}:
                return Pair(llm.tokenize(text), 0)
            case {"prompt": prompt, "continuation": continuation}:
                return join_pair(llm, prompt, continuation)
        prompt = self.fields["prompt_token_ids"]
        return Pair([*prompt, *self.fields["token_ids"]], len(prompt))


@o.takes_engine
def score(
    texts: Annotated[
        list[str] | None, typer.Argument(help='Texts to score; "-": the lines of standard input.', show_default=False)
    ] = None,
    model: Annotated[str, typer.Option(help=o.MODEL)] = "smollm2",
    file: Annotated[
        str | None,
        typer.Option(help='JSON lines ("-": standard input), such as {"prompt": ..., "continuation": ...}.'),
    ] = None,
    *,
    engine: o.EngineOptions,
) -> None:
    """Print how likely the model finds texts: one JSON line for each, with the natural logprob of every token.

    Texts come as arguments, as lines of standard input, or as JSON lines with --file. The line of a file says "text",
    or "prompt" and "continuation", or "prompt_token_ids" and "token_ids"; lines of generate --json serve as they are.
    Logprobs are of the continuation, or of a whole text; "-inf" means impossible. A token that lies across the border
    belongs to the continuation. The first token of all has null, since nothing comes before it, and sum and is_greedy
    are null where no token counts. What the model fails on says so in "error"; the exit code stays 0.
    """
    given = read(texts or [], file)
    llm, loading = o.load(model, **engine)
    pairs = _pairs(llm, given)
    begin = time.perf_counter()
    scored = _run(llm, pairs)
    seconds = time.perf_counter() - begin
    for one, said in zip(given, scored, strict=True):
        print(json.dumps(one.fields | _line(said), ensure_ascii=False, allow_nan=False))
    print(f"{_summary(scored, seconds)} (and {loading:.1f} s to load the model)", file=sys.stderr)


def read(texts: list[str], file: str | None) -> list[Given]:
    """What to score, every line checked. RequestError, with all faults at once."""
    if file is not None:
        if texts:
            raise RequestError("texts stand beside --file; give one of them")
        return _of_file(file)
    if not texts and is_piped():
        texts = ["-"]
    if texts.count("-") > 1:
        raise RequestError('the text "-" is standard input, which can be read once; it is given more than once')
    texts = [one for text in texts for one in (_input_lines() if text == "-" else [text])]
    if not texts:
        raise RequestError("no text: give one as an argument or a line of standard input, or --file with JSON lines")
    return [Given({"text": text}) for text in texts]


def _input_lines() -> list[str]:
    """The lines of standard input that hold something."""
    lines = [line.removesuffix("\r") for line in lines_of("-")]
    return [line for line in lines if line]


def _of_file(file: str) -> list[Given]:
    given, faults = [], []
    for number, line in enumerate(lines_of(file), 1):
        if line.strip():
            try:
                given.append(Given(_fields(line)))
            except KleroError as error:
                faults.append(f"line {number}: {error}")
    if faults:
        raise RequestError("\n       ".join(faults))
    if not given:
        raise RequestError(f'--file {file}: holds nothing to score; give JSON lines such as {{"text": ...}}')
    return given


def _fields(line: str) -> dict[str, Any]:
    """The fields of one line of one kind, each of its type."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON ({error})") from None
    kind = next((kind for kind in KINDS if isinstance(fields, dict) and _is(kind, set(fields))), None)
    if kind is None:
        ways = ", or ".join(" and ".join(kind) for kind in KINDS)
        raise RequestError(f"must be an object with {ways}, and nothing else")
    wanted = list if "token_ids" in kind else str
    for name in kind:
        if not isinstance(fields[name], wanted):
            raise RequestError(f"{name}={fields[name]!r}: must be a {'list of ids' if wanted is list else 'text'}")
    if not fields[kind[-1]]:
        raise RequestError(f"{kind[-1]}={fields[kind[-1]]!r}: is empty, so there is nothing to score")
    return {name: fields[name] for name in kind}


def _is(kind: tuple[str, ...], names: set[str]) -> bool:
    """Whether a line with these fields is of a kind. Ids may stand among the other fields that generate prints."""
    return names == set(kind) or (kind is IDS and names >= set(IDS) and names <= show.GENERATED)


def _pairs(llm: LLM, given: list[Given]) -> list[Pair]:
    """The tokens of each; an error says of which."""
    pairs = []
    for i, one in enumerate(given):
        try:
            pairs.append(one.pair(llm))
        except KleroError as error:
            raise RequestError(f"prompts[{i}]: {error}") from None
    return pairs


def _run(llm: LLM, pairs: list[Pair]) -> list[Scored]:
    """All in one batch, behind a progress bar on a terminal."""
    from tqdm import tqdm

    with tqdm(total=len(pairs), unit="text", disable=not sys.stderr.isatty(), leave=False) as bar:

        def show_progress(progress: Progress) -> None:
            bar.update(progress.done - bar.n)

        return score_pairs(llm, pairs, progress=show_progress)


def _line(said: Scored) -> dict[str, Any]:
    """What is printed of one: a logprob for each of token_ids, which follow prompt_token_ids."""
    return {
        "prompt_token_ids": said.token_ids[: said.first].tolist(),
        "token_ids": said.token_ids[said.first :].tolist(),
        "logprobs": [show.number(logprob) for logprob in said.logprobs[said.first :]],
        "sum": show.number(said.total),
        "count": said.count,
        "is_greedy": said.is_greedy,
        "reproducible": said.reproducible,
        "error": said.error,
    }


def _summary(scored: list[Scored], seconds: float) -> str:
    """One line about all texts that did not fail."""
    good = [said for said in scored if said.error is None]
    count = sum(said.count for said in good)
    said = f"{len(scored)} {'text' if len(scored) == 1 else 'texts'}, {count} tokens scored in {seconds:.2f} s"
    if not count:
        return said
    mean = sum(one.total for one in good) / count
    with np.errstate(over="ignore"):
        return f"{said}: {mean:.4f} on average, perplexity {float(np.exp(-mean)):.4g}"
