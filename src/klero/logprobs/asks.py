"""What R rows ask for, and the arrays that it is written to: one shape for the kernels, the reference and the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from klero.batch.zeros import sparse_zeros
from klero.logprobs.record import FLAT, Logprobs
from klero.params import SamplingParams

EVERY_TOKEN = -1  # of `logprobs` and of `num_top`: as many as there are
ByRow = TypeVar("ByRow", "Asks", "Said")


class Asks(NamedTuple):
    """What each of R rows asks for. scored: bool [R], logprob, rank and receipt of its token. processed: bool [R], the
    mode. num_top: int32 [R]. listed_ids: int32, those of row r at listed_starts[r]:listed_starts[r + 1] (int64
    [R + 1]). kept, probs: bool [R].
    """

    scored: Any
    processed: Any
    num_top: Any
    listed_starts: Any
    listed_ids: Any
    kept: Any
    probs: Any

    @property
    def asking(self) -> npt.NDArray[np.bool_]:
        """Which rows ask for anything, bool [R]."""
        asking: npt.NDArray[np.bool_] = self.scored | self.kept | self.probs
        return asking


class Said(NamedTuple):
    """What is said about R rows, as in `Logprobs`; kept_row: int32 [R], the row of `kept_ids` and `kept_probs` [K, V]
    that a row fills with its num_listed (int64 [R]) tokens, -1 for none."""

    sampled: Any
    rank: Any
    top_starts: Any
    top_ids: Any
    top: Any
    listed: Any
    raw: Any
    processed: Any
    kept_mass: Any
    kept_row: Any
    num_listed: Any
    kept_ids: Any
    kept_probs: Any


def asks_of(params: Sequence[SamplingParams], width: int) -> Asks | None:
    """What these rows ask for; None where nothing is. width: V, without padding, the most that is listed."""
    if not any(one.asks for one in params):
        return None
    scored = np.array([one.scores for one in params])
    tops = [width if one.logprobs == EVERY_TOKEN else one.logprobs or 0 for one in params]
    listed = [one.logprob_token_ids for one in params]
    return Asks(
        scored=scored,
        processed=np.array([one.logprobs_mode == "processed" for one in params]),
        num_top=np.array(tops, np.int32),
        listed_starts=starts_of([len(ids) for ids in listed]),
        listed_ids=np.array([i for ids in listed for i in ids], np.int32),
        kept=np.array([one.return_kept for one in params]),
        probs=np.array([one.return_probs for one in params]),
    )


def room_for(asks: Asks, width: int) -> Said:
    """Where the answer goes. NaN, 0 and -1 stand where nothing will be written."""
    num_rows, starts = len(asks.scored), starts_of(asks.num_top)
    nan = np.full((5, num_rows), np.nan, np.float32)
    lists = asks.kept | asks.probs
    kept_row = np.where(lists, np.cumsum(lists) - 1, -1).astype(np.int32)
    num_lists = int(lists.sum())
    return Said(
        sampled=nan[0], rank=np.zeros(num_rows, np.int32), top_starts=starts,
        top_ids=np.full(starts[-1], -1, np.int32), top=np.full(starts[-1], np.nan, np.float32),
        listed=np.full(len(asks.listed_ids), np.nan, np.float32), raw=nan[1], processed=nan[2], kept_mass=nan[3],
        kept_row=kept_row, num_listed=np.zeros(num_rows, np.int64), kept_ids=sparse_zeros((num_lists, width), np.int32),
        kept_probs=sparse_zeros((num_lists, width), np.float32),
    )  # fmt: skip


def alone(arrays: ByRow, r: int) -> ByRow:
    """Row r as the only one. The arrays are the same memory, so what is said about the one is said about row r."""
    ends = {name: r + 1 + name.endswith("_starts") for name in arrays._fields if name not in FLAT}
    return arrays._replace(**{name: getattr(arrays, name)[r:end] for name, end in ends.items()})


def without_raw(asks: Asks) -> Asks:
    """The same where raw is the mode of every row, but for what is said of the model's own row: receipts and kept."""
    processed, starts = np.ones_like(asks.processed), np.zeros_like(asks.listed_starts)
    return asks._replace(processed=processed, num_top=np.zeros_like(asks.num_top), listed_starts=starts)


def logprobs_of(asks: Asks, said: Said, token_ids: npt.NDArray[np.int32], num_kept: npt.NDArray[np.int32]) -> Logprobs:
    """The record of the rows. num_kept: of all rows; those that asked for no score get 0."""
    lists = [(r, int(said.kept_row[r]), int(said.num_listed[r])) for r in np.flatnonzero(said.kept_row >= 0).tolist()]
    ids = [said.kept_ids[k, :n] for _, k, n in lists]
    probs = [said.kept_probs[k, :n] if asks.probs[r] else np.full(n, np.nan, np.float32) for r, k, n in lists]
    return Logprobs(
        token_ids=token_ids, sampled=said.sampled, rank=said.rank, top_starts=said.top_starts, top_ids=said.top_ids,
        top=said.top, listed_starts=asks.listed_starts, listed_ids=asks.listed_ids, listed=said.listed, raw=said.raw,
        processed=said.processed, kept_mass=said.kept_mass, num_kept=np.where(asks.scored, num_kept, 0),
        kept_starts=starts_of(said.num_listed), kept_ids=np.concatenate([*ids, np.empty(0, np.int32)]),
        kept_probs=np.concatenate([*probs, np.empty(0, np.float32)]),
    )  # fmt: skip


def starts_of(lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Where each of several parts begins in a flat array, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
