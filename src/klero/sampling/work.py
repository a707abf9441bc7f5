"""One batch of rows on its way to tokens: each row takes the cheapest road that does all that it asks.

plain: temperature, filters of the fused path, greedy; the kernel reads the model's row and nothing else. patched: bias,
penalties, bans and masks, seen through by the same kernel; rows that want logprobs, kept ids or probabilities take this
road too, and what they want is said on it. hosted: custom processors and filters of one's own; the row
is rewritten by the reference, one such row after the other, and sampled by it too where it has filters of its own. The
token does not depend on the road, and what a row asks for changes no other's road.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from klero.batch import History
from klero.device import Backend, first_use, num_threads, over_rows
from klero.logprobs import Asks, Logprobs, alone, logprobs_of, raw_kernel, room_for, without_raw
from klero.logprobs.asks import starts_of
from klero.logprobs.reference import say_row
from klero.params import RowParams, SamplingParams
from klero.rewrite import Context, RuleArrays, Rules, rewrite_row
from klero.rows.inputs import as_bits, as_float32
from klero.sampling import fused
from klero.sampling.fused import reference
from klero.sampling.status import BAD, EMPTY, FAILED, NO_TOKEN, OK, message

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
WIDE = 2**21  # columns from which it pays to split a row (docs/performance.md): below, calling a thread costs more


class Patched(NamedTuple):
    """What rewrites the patched rows. slots: int32 [R]; masks: int32 [M, W]; mask_of_row: int32 [R], -1 none."""

    rules: RuleArrays
    slots: I32
    masks: I32
    mask_of_row: I32


@dataclass(frozen=True)
class Sampled:
    """What R rows came to; arrays live where the logits live (NumPy, or torch for torch logits).

    token_ids: int32 [R], -1 where the status is not 0. status: uint8 [R], 0 ok, 1 NaN or +inf in the row, 2 every token
    is -inf, 3 a processor, a filter or a matcher of the caller's failed. num_kept: int32 [R], tokens that survived the
    filters (greedy: 1). seeds: uint64 [R], the seed of each row. messages: what is wrong, by row, where the status is
    not 0. logprobs: what is said about the R tokens, NumPy arrays on the host; None where no row asked for anything.
    probs: the distributions that tokens were drawn from, of rows with `return_probs`; None where no row has it.
    """

    token_ids: Any
    status: Any
    num_kept: Any
    seeds: Any
    messages: Mapping[int, str] = field(default_factory=dict)
    logprobs: Logprobs | None = None
    probs: Probs | None = None


class Probs(NamedTuple):
    """What filters left of R rows: ids int32, ascending, and probabilities float32, those of row r at
    starts[r]:starts[r + 1] (int64 [R + 1]); none where it did not ask for them."""

    starts: I64
    ids: I32
    values: F32


def is_hosted(params: SamplingParams) -> bool:
    """Whether the rows of a request need the reference to rewrite them or to filter them."""
    return bool(params.logits_processors) or params.has_own_filters


@functools.cache
def _no_rules() -> Patched:
    """What rewrites nothing in a batch of one row."""
    slots, rules = np.zeros(1, np.int32), Rules(1, 0, History(1, 1))
    return Patched(rules.arrays(), slots, *rules.masks(slots))


@dataclass
class Work:
    """R rows and what is asked of each, and what they came to.

    rows: from `read_logits`, [R, >= width]; columns from `width` on are padding and never read. params: ROW_DTYPE [R].
    token_ids, status, num_kept: as in `Sampled`, unset where not chosen yet. messages: what is wrong, by row.
    """

    rows: npt.NDArray[Any]
    width: int
    params: npt.NDArray[Any]
    seeds: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.uint32]
    children: npt.NDArray[np.uint32]
    backend: Backend
    asks: Asks | None = None
    messages: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num_rows = len(self.rows)
        self.token_ids, self.num_kept = np.empty(num_rows, np.int32), np.empty(num_rows, np.int32)
        self.status = np.empty(num_rows, np.uint8)
        self._said = None if self.asks is None else room_for(self.asks, self.width)

    @property
    def asked(self) -> tuple[npt.NDArray[Any], ...]:
        """What the kernels take by row."""
        return self.params, self.seeds, self.positions, self.children

    @property
    def out(self) -> tuple[npt.NDArray[Any], ...]:
        """What the kernels fill by row."""
        return self.token_ids, self.status, self.num_kept

    def sampled(self, home: Callable[[npt.NDArray[Any]], Any] = np.asarray) -> Sampled:
        """What the rows came to, as arrays of the caller's kind."""
        made = home(self.token_ids), home(self.status), home(self.num_kept), home(self.seeds)
        if self.asks is None:
            return Sampled(*made, self.messages)
        return Sampled(*made, self.messages, self.logprobs, self.probs)

    @functools.cached_property
    def logprobs(self) -> Logprobs | None:
        """What is said about the tokens."""
        if self.asks is None or self._said is None:
            return None
        said = logprobs_of(self.asks, self._said, self.token_ids, self.num_kept)
        return replace(said, num_kept=np.where(self.asking, self.num_kept, 0))

    @functools.cached_property
    def probs(self) -> Probs | None:
        """The distributions of the rows that asked for them; a kept set that was asked for alone is left out."""
        if self.asks is None or self.logprobs is None or not self.asks.probs.any():
            return None
        said, asked = self.logprobs, self.asks.probs
        if asked[self.asks.kept].all():
            return Probs(said.kept_starts, said.kept_ids, said.kept_probs)
        lengths = np.diff(said.kept_starts)
        theirs = np.repeat(asked, lengths)
        return Probs(starts_of(lengths * asked), said.kept_ids[theirs], said.kept_probs[theirs])

    @property
    def asking(self) -> npt.NDArray[np.bool_]:
        """Which rows want more than a token."""
        return np.zeros(len(self.rows), bool) if self.asks is None else self.asks.asking

    def run_plain(self, chosen: I64) -> None:
        """Sample rows that nothing rewrites."""
        if self.backend == "reference":
            reference.sample_rows(as_float32(self.rows)[:, : self.width], chosen, *self.asked, *self.out)
        else:
            self._run_kernel(chosen, as_bits(self.rows), num_threads())
        self._explain(chosen)

    def _run_kernel(self, chosen: I64, bits: npt.NDArray[Any], threads: int) -> None:
        """The kernel over ranges of rows; over ranges of the columns where there are fewer rows than threads."""
        if len(chosen) < threads and self.width >= WIDE:
            with first_use("wide " + self.rows.dtype.name):
                for r in chosen.tolist():
                    fused.wide_kernel()(bits, self.width, r, *self.asked, *self.out, threads)
        else:
            kernel = fused.cpu_kernel()
            self._over("", chosen, lambda part: kernel(bits, self.width, part, *self.asked, *self.out))

    def run_patched(self, chosen: I64, patched: Patched, context_of: Callable[[int], Context]) -> None:
        """Sample rows whose rules a kernel applies. context_of: the same rules of a row, for messages."""
        bits, asking = as_bits(self.rows), self.asking[chosen]
        rules, slots, masks, mask_of_row = patched
        taken = *self.asked, slots, rules, masks, mask_of_row, *self.out
        for kind, part, kernel_of, more in (
            ("rewritten ", chosen[~asking], fused.rewriting_kernel, ()),
            ("scored ", chosen[asking], fused.scoring_kernel, (self.asks, self._said)),
        ):
            if part.size:
                kernel = kernel_of()
                self._over(kind, part, lambda rows: kernel(bits, self.width, rows, *taken, *more))  # noqa: B023
        self._explain(chosen, context_of)

    def run_hosted(self, contexts: Mapping[int, Context]) -> None:
        """Sample rows that are rewritten one by one, by row."""
        for r, at in contexts.items():
            raw = as_float32(self.rows[r : r + 1])[0, : self.width]
            if np.isnan(raw).any() or np.isposinf(raw).any():
                self._set(r, NO_TOKEN, BAD, 0, message(BAD, int(self.positions[r])))
                continue
            row = rewrite_row(raw, at)
            if row.error is not None:
                self._set(r, NO_TOKEN, FAILED, 0, row.error)
                continue
            self._sample_hosted(r, raw, row.logits, at)
            if self.status[r] in (BAD, EMPTY):
                self.messages[r] = message(int(self.status[r]), int(self.positions[r]), row.rules)

    def _sample_hosted(self, r: int, raw: F32, logits: F32, at: Context) -> None:
        """Sample one row that was rewritten: by the kernels, unless its filters need the reference."""
        if self.backend != "reference" and not at.params.has_own_filters:
            self._sample_rewritten(r, logits)
            return
        row = RowParams(*self.params[r].item())
        at_row = int(self.seeds[r]), int(self.positions[r]), int(self.children[r])
        drawn = reference.sample_row(logits, row, *at_row, filters=at.params.filters)
        self._set(r, drawn.token, drawn.status, len(drawn.kept), drawn.message)
        if drawn.status == OK and self.asks is not None and self._said is not None:
            say_row(raw, logits, np.sort(drawn.kept), row, drawn.token, self.asks, self._said, r)

    def _sample_rewritten(self, r: int, logits: F32) -> None:
        """Sample one row that was rewritten, by the kernels. What is raw is said of the model's own row."""
        one, only, bits = slice(r, r + 1), np.zeros(1, np.int64), as_bits(logits[None])
        asked, out = [column[one] for column in self.asked], [column[one] for column in self.out]
        if self.asks is None or self._said is None or not self.asks.asking[r]:
            with first_use("float32"):
                fused.cpu_kernel()(bits, self.width, only, *asked, *out)
            return
        asks, said, rules = alone(self.asks, r), alone(self._said, r), _no_rules()
        wanted = asks if asks.processed[0] else without_raw(asks)
        with first_use("scored float32"):
            fused.scoring_kernel()(
                bits, self.width, only, *asked, rules.slots, rules.rules, rules.masks, rules.mask_of_row, *out,
                wanted, said,
            )  # fmt: skip
        if self.status[r] == OK and asks.scored[0]:
            with first_use("given tokens " + self.rows.dtype.name):
                raw_kernel()(as_bits(self.rows), self.width, r, r + 1, self.token_ids, self.asks, self._said)

    def refuse(self, r: int, what: str) -> None:
        """Give a row no token, because of its grammar."""
        self._set(r, NO_TOKEN, FAILED, 0, what)

    def _set(self, r: int, token: int, status: int, num_kept: int, what: str | None = None) -> None:
        self.token_ids[r], self.status[r], self.num_kept[r] = token, status, num_kept
        if what:
            self.messages[r] = what

    def _over(self, kind: str, chosen: I64, work: Callable[[I64], None]) -> None:
        """Run a kernel over ranges of the chosen rows."""
        with first_use(kind + self.rows.dtype.type.__name__):
            over_rows(lambda begin, end: work(chosen[begin:end]), len(chosen), num_threads())

    def _explain(self, chosen: I64, context_of: Callable[[int], Context] | None = None) -> None:
        """Say what is wrong with the rows that got no token."""
        if not np.count_nonzero(self.status.take(chosen)):  # OK is 0
            return
        for r in chosen[self.status[chosen] != OK].tolist():
            status, rules = int(self.status[r]), tuple[str, ...]()
            if status == EMPTY and context_of is not None:
                rules = rewrite_row(as_float32(self.rows[r : r + 1])[0, : self.width], context_of(r)).rules
            self.messages[r] = message(status, int(self.positions[r]), rules)
