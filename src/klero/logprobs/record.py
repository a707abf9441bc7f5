"""Logprobs: what is said about N tokens, in flat arrays; nothing is made per token until somebody looks."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

FLAT = {"top_ids": "top_starts", "top": "top_starts", "listed_ids": "listed_starts", "listed": "listed_starts",
        "kept_ids": "kept_starts", "kept_probs": "kept_starts"}  # fmt: skip


class Entry(NamedTuple):
    """One token and its logprob. rank: 1 + the tokens strictly more likely, None where it was not asked for."""

    token_id: int
    logprob: float
    rank: int | None


@dataclass(frozen=True, eq=False)
class Logprobs:
    """What is said about N tokens, rows of one step or the tokens of one sequence. Natural logarithms, binary32.

    token_ids: int32 [N], the tokens spoken of, -1 where a row has none. sampled: float32 [N], their logprobs in the
    mode that was asked for; NaN where nothing was asked or there is no token. rank: int32 [N], 1 + the tokens strictly
    greater in the row of that mode, 0 where sampled is NaN.

    top_ids, top: int32, float32, flat: those of token i at top_starts[i]:top_starts[i + 1] (int64 [N + 1]), in the
    total order: larger first, equal ones by lower id. The token itself is among them only where it belongs there.
    listed_ids, listed: the same for `logprob_token_ids`, in the order asked.

    The receipt: raw, processed: float32 [N], the token's logprob in the model's own row and in the distribution that
    it was drawn from. kept_mass: float32 [N], ln of the share of the rewritten row, at its temperature, that the
    filters left; 0 where greedy. num_kept: int32 [N], also where the kept ids alone were asked for; 0: nothing was.
    Tokens that were not drawn have raw alone.

    kept_ids, kept_probs: what the filters left, ascending ids, at kept_starts[i]:kept_starts[i + 1], and their
    probabilities (NaN where `return_kept` was asked alone); empty where neither was. In memory -inf is -inf.

    Token i is counted as in a list: -1 is the last one, IndexError outside.
    """

    token_ids: I32
    sampled: F32
    rank: I32
    top_starts: I64
    top_ids: I32
    top: F32
    listed_starts: I64
    listed_ids: I32
    listed: F32
    raw: F32
    processed: F32
    kept_mass: F32
    num_kept: I32
    kept_starts: I64
    kept_ids: I32
    kept_probs: F32

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, i: int) -> dict[int, Entry]:
        """Everything said about token i by id: the token, the top list, the listed ids. The token has its rank."""
        i = self._index(i)
        entries: dict[int, Entry] = {}
        if self.rank[i] > 0:
            token = int(self.token_ids[i])
            entries[token] = Entry(token, float(self.sampled[i]), int(self.rank[i]))
        for ids, values in ((self.top_of(i)), (self.listed_of(i))):
            for token, value in zip(ids.tolist(), values.tolist(), strict=True):
                if token >= 0 and value == value:
                    entries.setdefault(token, Entry(token, value, None))
        return entries

    def top_of(self, i: int) -> tuple[I32, F32]:
        """Ids and logprobs of the top list of token i."""
        part = self._part(self.top_starts, i)
        return self.top_ids[part], self.top[part]

    def listed_of(self, i: int) -> tuple[I32, F32]:
        """Ids and logprobs of `logprob_token_ids` at token i."""
        part = self._part(self.listed_starts, i)
        return self.listed_ids[part], self.listed[part]

    def kept_of(self, i: int) -> tuple[I32, F32]:
        """Ids and probabilities that the filters left for token i; empty where neither was asked for."""
        part = self._part(self.kept_starts, i)
        return self.kept_ids[part], self.kept_probs[part]

    @property
    def cumulative(self) -> float:
        """The sum of the logprobs of the tokens that have one, in binary64; NaN where none has."""
        values = self.sampled[self.rank > 0]
        return float(values.astype(np.float64).sum()) if len(values) else math.nan

    def rows(self, first: int, last: int) -> Logprobs:
        """The part for tokens first .. last - 1, bounds as in a slice; arrays of its own."""
        first, last, _ = slice(first, last).indices(len(self))
        last = max(first, last)
        fields: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            array = getattr(self, field.name)
            if field.name in FLAT:
                starts = getattr(self, FLAT[field.name])
                fields[field.name] = array[starts[first] : starts[last]].copy() if len(array) else array
            elif field.name.endswith("_starts"):
                fields[field.name] = array[first : last + 1] - array[first]
            else:
                fields[field.name] = array[first:last].copy()
        return Logprobs(**fields)

    def _index(self, i: int) -> int:
        """Where token i is; -1 is the last one."""
        try:
            return range(len(self))[operator.index(i)]
        except TypeError:
            raise TypeError(f"Logprobs[{i!r}]: must be an integer; rows(first, last) takes a part") from None
        except IndexError:
            raise IndexError(f"Logprobs[{i!r}]: there are {len(self)} tokens") from None

    def _part(self, starts: I64, i: int) -> slice:
        """The part of a flat array that belongs to token i."""
        i = self._index(i)
        return slice(starts[i], starts[i + 1])


def join(parts: Sequence[Logprobs]) -> Logprobs:
    """One after the other."""
    if not parts:
        return nothing(0)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(Logprobs):
        arrays = [getattr(part, field.name) for part in parts]
        if field.name.endswith("_starts"):
            arrays = [np.zeros(1, np.int64), *_after_each_other(arrays)]
        fields[field.name] = np.concatenate(arrays)
    return Logprobs(**fields)


def nothing(num: int) -> Logprobs:
    """N tokens of which nothing is said."""
    nan, zeros, starts = np.full(num, np.nan, np.float32), np.zeros(num, np.int32), np.zeros(num + 1, np.int64)
    no_ids, no_values = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Logprobs(
        np.full(num, -1, np.int32), nan, zeros, starts, no_ids, no_values, starts, no_ids, no_values,
        nan, nan, nan, zeros, starts, no_ids, no_values,
    )  # fmt: skip


def _after_each_other(starts: Iterable[I64]) -> Iterable[I64]:
    """The ends of each part, moved behind the parts before it."""
    moved = 0
    for one in starts:
        yield one[1:] + moved
        moved += int(one[-1])
