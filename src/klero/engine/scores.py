"""What a request is told about its tokens: rows of many steps, gathered into flat arrays by sequence.

A prompt's chunk that is scored brings a row of logits for each of its tokens at once: 512 of them, of 128256 columns,
are 262 MB in float32. max_num_batched_tokens bounds that; logits that are returned take as much, and stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from klero.batch import NO_ROWS, StepArrays
from klero.errors import LogitsError, told
from klero.logprobs import Logprobs, join, nothing, score
from klero.params import SamplingParams
from klero.rows.inputs import as_float32, read_logits

if TYPE_CHECKING:
    from klero.engine.request import Choice
    from klero.engine.scheduler import Planned

F32 = npt.NDArray[np.float32]

OF_TOKEN = np.dtype([
    ("token_ids", np.int32), ("sampled", np.float32), ("rank", np.int32), ("raw", np.float32),
    ("processed", np.float32), ("kept_mass", np.float32), ("num_kept", np.int32),
])  # fmt: skip
OF_LIST = {
    "top": ("top_starts", "top_ids", "top"), "listed": ("listed_starts", "listed_ids", "listed"),
    "kept": ("kept_starts", "kept_ids", "kept_probs"),
}  # fmt: skip


def no_rows(num: int, width: int) -> F32:
    """Rows that nobody computed: NaN [num, width], read-only, which take no memory."""
    return np.broadcast_to(np.float32(np.nan), (num, width))


class Growing:
    """An array that grows at its end, in amortised constant time a row."""

    def __init__(self, dtype: npt.DTypeLike, *width: int) -> None:
        self._memory, self._num = np.empty((0, *width), dtype), 0

    def extend(self, values: npt.NDArray[Any]) -> None:
        """Add rows."""
        num = self._num + len(values)
        if num > len(self._memory):
            memory = np.empty((max(num, 2 * self._num), *self._memory.shape[1:]), self._memory.dtype)
            memory[: self._num] = self.values
            self._memory = memory
        self._memory[self._num : num] = values
        self._num = num

    @property
    def values(self) -> npt.NDArray[Any]:
        """All rows; a view until the next `extend`."""
        return self._memory[: self._num]


class GrowingLists:
    """Ids and numbers of which each token has as many as it likes, flat."""

    def __init__(self) -> None:
        self._starts, self._ids, self._values = Growing(np.int64), Growing(np.int32), Growing(np.float32)
        self._starts.extend(np.zeros(1, np.int64))

    def extend(self, starts: npt.NDArray[np.int64], ids: npt.NDArray[np.int32], values: F32) -> None:
        """Add tokens: those of token i are ids[starts[i]:starts[i + 1]], and so with the values."""
        first, last = starts[0], starts[-1]
        self._ids.extend(ids[first:last])
        self._values.extend(values[first:last])
        self._starts.extend(starts[1:] + (self._starts.values[-1] - first))

    def part(self, first: int, last: int) -> tuple[npt.NDArray[Any], ...]:
        """Starts, ids and numbers of tokens first .. last - 1; copies."""
        starts = self._starts.values[first : last + 1]
        where = slice(starts[0], starts[-1])
        return starts - starts[0], self._ids.values[where].copy(), self._values.values[where].copy()


class StepRows:
    """What a step says of the R rows that it sampled. logprobs: None where no row asked. logits: [R, V], as they came.

    Nothing is laid out before a sequence asks for it.
    """

    def __init__(self, logprobs: Logprobs | None, logits: Any) -> None:
        self._logprobs, self._logits = logprobs, logits

    @property
    def logprobs(self) -> Logprobs:
        """Of every row."""
        assert self._logprobs is not None, "a row asked for logprobs, and the sampler gave none"
        return self._logprobs

    @cached_property
    def of_token(self) -> npt.NDArray[Any]:
        """What is one number per row, OF_TOKEN [R]: a sequence copies all of them at once."""
        rows = np.empty(len(self.logprobs), OF_TOKEN)
        for name in OF_TOKEN.names or ():
            rows[name] = getattr(self.logprobs, name)
        return rows

    @cached_property
    def of_list(self) -> dict[str, tuple[Any, ...]]:
        """What is several per row: starts, ids and numbers by name."""
        return {name: tuple(getattr(self.logprobs, part) for part in parts) for name, parts in OF_LIST.items()}

    def logits(self, first: int, last: int) -> F32:
        """Rows first .. last - 1, float32; the others are not converted."""
        return as_float32(read_logits(self._logits[first:last]).rows)


class TokenScores:
    """What one sequence is told about the tokens that it generates. num: of how many, each that was accepted."""

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self.num = 0
        self._asks, self._scores, self._wants_logits = params.asks, params.scores, params.return_generation_logits
        self._of_token, self._logits, self._vocab_size = Growing(OF_TOKEN), Growing(np.float32, vocab_size), vocab_size
        self._lists: dict[str, GrowingLists] = {}  # those that were asked for
        if params.logprobs:
            self._lists["top"] = GrowingLists()
        if params.logprob_token_ids:
            self._lists["listed"] = GrowingLists()
        if params.return_kept or params.return_probs:
            self._lists["kept"] = GrowingLists()

    def extend(self, step: StepRows, rows: range) -> None:
        """Add what a step says of some of its rows."""
        first, last = rows.start, rows.stop
        self.num += len(rows)
        if self._asks:
            self._of_token.extend(step.of_token[first:last])
            for name, lists in self._lists.items():
                starts, ids, values = step.of_list[name]
                lists.extend(starts[first : last + 1], ids, values)
        if self._wants_logits:
            self._logits.extend(step.logits(first, last))

    def forget(self, token_ids: Sequence[int]) -> None:
        """Free everything, and say nothing about these tokens: NaN, rank 0, empty lists."""
        self.num = len(token_ids)
        said = dataclasses.replace(nothing(self.num), token_ids=np.array(token_ids, np.int32))
        step = StepRows(said, None)
        self._of_token, self._logits = Growing(OF_TOKEN), Growing(np.float32, self._vocab_size)
        self._of_token.extend(step.of_token)
        self._lists = {name: GrowingLists() for name in self._lists}
        for name, lists in self._lists.items():
            lists.extend(*step.of_list[name])

    def logprobs(self, first: int = 0) -> Logprobs | None:
        """What is said about the tokens from number `first` on; None where nothing was asked."""
        if not self._asks:
            return None
        of_token = self._of_token.values[first:]
        said = nothing(len(of_token))
        fields: dict[str, Any] = {name: of_token[name].copy() for name in OF_TOKEN.names or ()}
        for name, lists in self._lists.items():
            fields |= zip(OF_LIST[name], lists.part(first, first + len(of_token)), strict=True)
        return dataclasses.replace(said, **fields)

    def cumulative(self) -> float | None:
        """The sum of the tokens' logprobs; None where they were not asked for."""
        return float(self._of_token.values["sampled"].astype(np.float64).sum()) if self._scores else None

    def logits(self) -> F32 | None:
        """The model's own rows of the tokens, float32 [n, V]; None where they were not asked for."""
        if not self._wants_logits:
            return None
        rows = self._logits.values
        return rows.copy() if len(rows) else no_rows(self.num, self._vocab_size)


class PromptPart(NamedTuple):
    """What a chunk says of a prompt. end: so many positions are done then. logprobs: of the tokens that follow them.

    error: what is wrong with the first row that could not be scored, or with the scoring; None: nothing is.
    """

    end: int
    logprobs: Logprobs | None = None
    error: str | None = None


class PromptScores:
    """What a request is told about its prompt: each position once, in whatever chunks it comes.

    num_scored: the positions that are done. It outlives a preemption: what is computed again is not scored again.
    """

    def __init__(self, prompt_ids: Sequence[int], params: SamplingParams, vocab_size: int) -> None:
        self.num_scored = 0
        self._ids, self._num_top = np.array(prompt_ids, np.int32), params.prompt_logprobs
        self._parts: list[Logprobs] = []
        self._wants_logits, self.vocab_size = params.return_context_logits, vocab_size

    @cached_property
    def _context(self) -> F32:
        return np.empty((len(self._ids), self.vocab_size), np.float32)

    @property
    def next_position(self) -> int:
        """The first position whose row is wanted; NO_ROWS when there is none any more."""
        return self.num_scored if self.num_scored < len(self._ids) else NO_ROWS

    def read(self, rows: Any, last_row: Any, padded_from: int | None) -> PromptPart:
        """Score the rows [n, V] of the next n positions, and keep their logits; `take` makes it count.

        last_row: [1, V], of the position after those, the last of the prompt, which is sampled as well; None where that
        is not reached, or not sampled.
        """
        num, first = len(rows), self.num_scored
        if self._wants_logits:  # what is not taken will be written again
            self._context[first : first + num] = as_float32(read_logits(rows).rows)
            if last_row is not None:
                self._context[-1:] = as_float32(read_logits(last_row).rows)
        end = first + num + (last_row is not None)
        if self._num_top is None:
            return PromptPart(end)
        ids = self._ids[first + 1 : first + num + 1]  # the row after the prompt speaks of no token of it
        logprobs = score(rows[: len(ids)], ids, num_top=self._num_top, padded_from=padded_from)
        if logprobs.rank.all():
            return PromptPart(end, logprobs)
        good = int(np.argmin(logprobs.rank))  # what comes after the first bad row would depend on the chunk
        what = f"the model's logits for position {first + 1 + good} hold NaN or +inf, or nothing but -inf"
        return PromptPart(first + good, logprobs.rows(0, good), f"{what}: this prompt token has no logprob")

    def take(self, part: PromptPart) -> None:
        """Let a chunk count, once its step has succeeded."""
        self.num_scored = part.end
        if part.logprobs is not None:
            self._parts.append(part.logprobs)

    def logprobs(self) -> Logprobs | None:
        """Of every prompt token; nothing of the first, and of those whose rows were not computed. None: not asked."""
        if self._num_top is None:
            return None
        num = len(self._ids)
        first, told = nothing(1), sum(map(len, self._parts))
        whole = join([first, *self._parts, nothing(num - 1 - told)])
        return dataclasses.replace(whole, token_ids=self._ids)

    def context(self) -> tuple[F32 | None, npt.NDArray[np.bool_] | None]:
        """Logits [num_prompt, V], NaN where not computed; the mask [num_prompt] of those that were. None: not asked.

        The logits are read-only, and of no size in memory, where nothing was computed.
        """
        if not self._wants_logits:
            return None, None
        if not self.num_scored:
            return no_rows(len(self._ids), self.vocab_size), np.zeros(len(self._ids), np.bool_)
        self._context[self.num_scored :] = np.nan
        return self._context, np.arange(len(self._ids)) < self.num_scored


def read_prompts(
    planned: Sequence[Planned], arrays: StepArrays, logits: Any, padded_from: int | None
) -> list[tuple[Choice, PromptPart]]:
    """Score the prompt rows of a step, laid out as `InputBatch.fill` says; nothing counts before `PromptScores.take`.

    What fails while one prompt is scored (no memory) is that one's `error`. LogitsError: the rows of all cannot be
    read, or have another shape than the step asked for.
    """
    parts, sampled, scored = [], 0, arrays.num_sampled
    for plan in planned:
        choice, num, samples = plan.choice, len(plan.scored), plan.samples
        scores = choice.prompt_scores
        if scores is not None and plan.logits_from < plan.end:
            shape, (num_rows, width) = tuple(logits.shape), (len(arrays.logits_rows), scores.vocab_size)
            if shape != (num_rows, width):
                raise LogitsError(f"logits with shape {shape}: this step has {num_rows} rows of {width}")
            last = logits[sampled : sampled + 1] if samples else None
            try:
                part = scores.read(logits[scored : scored + num], last, padded_from)
            except LogitsError:
                raise
            except Exception as error:
                part = PromptPart(scores.num_scored, error=f"the prompt could not be scored: {told(error)}")
            parts.append((choice, part))
        sampled, scored = sampled + samples, scored + num
    return parts
