"""Logprobs in NumPy, one row at a time: the definition (docs/draw.md, 8)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from klero.logprobs.asks import Asks, Said
from klero.lots.mass import canonical, lse, masses, scaled, weights
from klero.params import RowParams
from klero.rows.topk.reference import top

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
ONE = np.float32(1)


def mass_of(logits: F32, maximum: np.float32, reciprocal: np.float32 = ONE) -> int:
    """Q of some tokens, by the weights that a maximum gives them."""
    return int(masses(weights(scaled(logits, maximum, reciprocal))).sum(dtype=np.uint64))


def row_logprobs(logits: F32, reciprocal: np.float32 = ONE) -> F32:
    """The logarithm of the softmax of a row over T = 1 / reciprocal. logits: canonical [N], one of them above -inf."""
    maximum = logits.max()
    return np.asarray(scaled(logits, maximum, reciprocal) - lse(mass_of(logits, maximum, reciprocal)))


def processed_logprobs(logits: F32, kept: I64, reciprocal: np.float32) -> F32:
    """The logarithm of the distribution that is drawn from: -inf but for the kept ids. logits: rewritten, [V]."""
    out = np.full(len(logits), -np.inf, np.float32)
    out[kept] = row_logprobs(logits[kept], reciprocal)
    return out


def kept_mass(logits: F32, kept: I64, reciprocal: np.float32) -> np.float32:
    """ln of the kept share of the rewritten row; -inf where the kept weigh nothing beside its largest logit."""
    maximum = logits.max()
    mass = mass_of(logits[kept], maximum, reciprocal)
    if mass == 0:
        return np.float32(-np.inf)
    return np.float32(lse(mass) - lse(mass_of(logits, maximum, reciprocal)))


def kept_probs(logits: F32, kept: I64, reciprocal: np.float32) -> F32:
    """q * (1 / Q) of the kept ids, weighed from their own largest logit."""
    q = masses(weights(scaled(logits[kept], logits[kept].max(), reciprocal)))
    total = q.sum(dtype=np.uint64).astype(np.float32)
    return np.asarray(q.astype(np.float32) * np.float32(ONE / total))


def rank(values: F32, token: int) -> int:
    """1 + the tokens strictly greater. values: canonical logits, or logprobs."""
    return 1 + int(np.count_nonzero(values > values[token]))


def raw_row(raw: F32) -> tuple[F32, F32]:
    """The row that raw logprobs speak of, and its logprobs. raw: float32 [V], without NaN and +inf."""
    logits = canonical(raw)
    return logits, row_logprobs(logits)


def say_raw(raw: F32, token: int, asks: Asks, said: Said, r: int) -> None:
    """Logprob, rank, top list and listed ids of a token in the model's own row."""
    logits, logprobs = raw_row(raw)
    said.raw[r] = logprobs[token]
    if not asks.processed[r]:
        _say(logits, logprobs, token, asks, said, r)


def say_row(
    raw: F32, logits: F32, kept: I64, row: RowParams, token: int, asks: Asks, said: Said, r: int
) -> None:
    """Everything that row r asks for. raw: the model's, logits: rewritten, canonical, [V]; kept: ids, ascending."""
    reciprocal = np.float32(row.reciprocal)
    if asks.scored[r]:
        say_raw(raw, token, asks, said, r)
        logprobs = processed_logprobs(logits, kept, reciprocal)
        said.processed[r] = logprobs[token]
        said.kept_mass[r] = 0 if row.greedy else kept_mass(logits, kept, reciprocal)
        if asks.processed[r]:
            _say(only(logits, kept), logprobs, token, asks, said, r)
    k = said.kept_row[r]
    if k >= 0:
        said.num_listed[r] = len(kept)
        said.kept_ids[k, : len(kept)] = kept
        said.kept_probs[k, : len(kept)] = kept_probs(logits, kept, reciprocal)


def only(logits: F32, kept: I64) -> F32:
    """A row whose other tokens are gone."""
    out = np.full(len(logits), -np.inf, np.float32)
    out[kept] = logits[kept]
    return out


def _say(logits: F32, logprobs: F32, token: int, asks: Asks, said: Said, r: int) -> None:
    said.sampled[r], said.rank[r] = logprobs[token], rank(logits, token)
    part = slice(said.top_starts[r], said.top_starts[r + 1])
    said.top_ids[part] = ids = top(logits, int(asks.num_top[r]))
    said.top[part] = logprobs[ids]
    part = slice(asks.listed_starts[r], asks.listed_starts[r + 1])
    said.listed[part] = logprobs[asks.listed_ids[part]]
