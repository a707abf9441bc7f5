"""How likely given tokens are: one pass over each sequence, and no token drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from klero.errors import OptionError, RequestError
from klero.params import SamplingParams

if TYPE_CHECKING:
    from klero.engine import LLM, Progress, RequestOutput

PARAMS = SamplingParams(max_tokens=0, prompt_logprobs=1)  # the most likely token tells whether the given one is it


class Pair(NamedTuple):
    """Tokens, and the index of the first that is scored, one of theirs; those before it are given. Nothing comes before
    token 0, so it never has a score."""

    token_ids: Sequence[int]
    first: int


@dataclass(frozen=True, eq=False)
class Scored:
    """What the model says of the tokens of a pair, by its own rows: natural logarithms, whatever would be sampled.

    token_ids: int32 [N]. logprobs: float32 [N], NaN for the first and where the model failed. greedy: bool [N], the
    token is the one that a greedy request takes. first: as in the pair; what counts is from there on, without the very
    first. error: why the model failed, else None. reproducible: the same numbers in any company.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    greedy: npt.NDArray[np.bool_]
    first: int
    error: str | None
    reproducible: bool

    @property
    def _counted(self) -> slice:
        return slice(max(self.first, 1), None)

    @property
    def count(self) -> int:
        """How many tokens count."""
        return len(self.token_ids[self._counted])

    @property
    def total(self) -> float:
        """The log-likelihood of the tokens that count: their logprobs added up in binary64. NaN where none counts, and
        where the model failed."""
        return self.logprobs[self._counted].sum(dtype=np.float64).item() if self.count else math.nan

    @property
    def is_greedy(self) -> bool | None:
        """Whether a greedy request would take every token that counts. None where none counts, and where the model
        failed."""
        return bool(self.greedy[self._counted].all()) if self.count and self.error is None else None


def score_pairs(llm: LLM, pairs: Sequence[Pair], *, progress: Callable[[Progress], None] | None = None) -> list[Scored]:
    """Score every pair, all in one batch. RequestError or ParameterError names a pair that cannot be; [] for none."""
    for i, pair in enumerate(pairs):
        _check(i, pair)
    if not pairs:
        return []
    outputs = llm.generate([list(pair.token_ids) for pair in pairs], PARAMS, progress=progress)
    return [_scored(output, pair.first) for output, pair in zip(outputs, pairs, strict=True)]


def _check(i: int, pair: Pair) -> None:
    """Refuse what is no pair, and one of which nothing is scored."""
    if not isinstance(pair, Pair):
        raise RequestError(f"pairs[{i}]={pair!r}: must be a Pair; join_pair(llm, context, continuation) makes one")
    if not isinstance(pair.first, Integral) or not 0 <= pair.first < len(pair.token_ids):
        rule = f"must be an integer in [0, {len(pair.token_ids) - 1}], the index of the first token that is scored"
        rule = rule if len(pair.token_ids) else "there is no token to score"
        raise RequestError(f"pairs[{i}].first={pair.first!r}: {rule}")


def join_pair(llm: LLM, context: str, continuation: str) -> Pair:
    """The tokens of both texts as one, of which those of the continuation are scored.

    They are the tokens of the whole text. A token that lies across the border belongs to the continuation, so that no
    part of the continuation goes unscored.
    """
    whole = llm.tokenize(context + continuation)
    alone = llm.tokenize(context) if context else ()
    first = 0
    while first < min(len(alone), len(whole)) and alone[first] == whole[first]:
        first += 1
    return Pair(whole, first)


def windows(token_ids: Sequence[int], prefix: int, room: int) -> Iterator[Pair]:
    """Cut a text of any length into pairs of at most `room` tokens, which score each token once; prefix stands first.

    The last one has as much context as fits, the others one token. room: at least 2, else OptionError.
    """
    if room < 2:
        raise OptionError(f"room={room}: must be at least 2, for a token and one before it")
    whole = [prefix, *token_ids]
    for begin in range(1, len(whole), room - 1):
        end = min(begin + room - 1, len(whole))
        start = max(end - room, 0)
        yield Pair(whole[start:end], begin - start)


def _scored(output: RequestOutput, first: int) -> Scored:
    said, choice = output.prompt_logprobs, output.outputs[0]
    assert said is not None, "prompt_logprobs was asked for"
    greedy = np.zeros(len(said), np.bool_)
    has_top = np.flatnonzero(np.diff(said.top_starts))
    greedy[has_top] = said.top_ids[said.top_starts[has_top]] == said.token_ids[has_top]
    failed = choice.finish_reason in ("error", "abort")
    error = (choice.error or choice.finish_reason) if failed else None
    return Scored(said.token_ids, said.sampled, greedy, first, error, choice.reproducible)
