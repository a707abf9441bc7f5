"""Nasty rows and parameters: what breaks samplers, made from a seed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from klero.params import SamplingParams

F32 = npt.NDArray[np.float32]
RowMaker = Callable[[np.random.Generator, int], F32]


def _normal(rng: np.random.Generator, size: int) -> F32:
    return (rng.standard_normal(size) * float(rng.choice([0.5, 2, 4]))).astype(np.float32)


def _peaked(rng: np.random.Generator, size: int) -> F32:
    """A few tokens carry nearly all the mass, as trained models have it."""
    row = (rng.standard_normal(size) * 2 - 8).astype(np.float32)
    row[rng.integers(size, size=min(size, 12))] += rng.uniform(4, 16, min(size, 12)).astype(np.float32)
    return row


def _flat(rng: np.random.Generator, size: int) -> F32:
    return np.full(size, rng.choice([-3.5, 0, 11]), np.float32)


def _nearly_flat(rng: np.random.Generator, size: int) -> F32:
    return (np.float32(1) + rng.integers(0, 3, size) * np.float32(2**-23)).astype(np.float32)


def _ties(rng: np.random.Generator, size: int) -> F32:
    return rng.integers(-4, 5, size).astype(np.float32)


def _banned(rng: np.random.Generator, size: int) -> F32:
    """Many -inf; at least one token is left."""
    row = _normal(rng, size)
    row[rng.random(size) < rng.choice([0.1, 0.7, 0.99])] = -np.inf
    row[rng.integers(size)] = np.float32(0.25)
    return row


def _one_left(rng: np.random.Generator, size: int) -> F32:
    row = np.full(size, -np.inf, np.float32)
    row[rng.integers(size)] = rng.choice([-7, 0, 3e38])
    return row


def _zeros(rng: np.random.Generator, size: int) -> F32:
    """+0, -0, subnormals and other values below 2^-64 (all +0 to klero), and the smallest ones that are not."""
    tiny = [0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x1F7FFFFF, 0x9F7FFFFF]
    bits = np.array(tiny + [0x1F800000, 0x9F800000] * int(rng.integers(0, 2)), np.uint32)
    return bits[rng.integers(len(bits), size=size)].view(np.float32)


def _huge(rng: np.random.Generator, size: int) -> F32:
    """A spread that overflows: differences are -inf though every logit is finite."""
    row = (rng.uniform(-1, 1, size) * np.float32(3.4e38)).astype(np.float32)
    row[rng.random(size) < 0.3] = np.float32(3.4e38)
    return row


def _any_bits(rng: np.random.Generator, size: int) -> F32:
    """Any finite bit pattern."""
    row: F32 = rng.integers(0, 2**32, size, dtype=np.uint32).view(np.float32)
    row[~np.isfinite(row)] = -1
    return row


def _edges(rng: np.random.Generator, size: int) -> F32:
    """Distances from the maximum around the borders of exp32 and of a useful score."""
    distances = np.array([0, 1e-7, 12, 26, 26.01, 26.02, 27.7, 28, 86.9, 87, 87.01, 88, 104], np.float32)
    return np.float32(4) - distances[rng.integers(len(distances), size=size)]


def _empty(rng: np.random.Generator, size: int) -> F32:
    return np.full(size, -np.inf, np.float32)


def _with(bits: int) -> RowMaker:
    def make(rng: np.random.Generator, size: int) -> F32:
        row = _banned(rng, size) if rng.random() < 0.5 else _normal(rng, size)
        row.view(np.uint32)[rng.integers(size)] = bits
        return row

    return make


ROW_KINDS: dict[str, RowMaker] = {
    "normal": _normal,
    "peaked": _peaked,
    "flat": _flat,
    "nearly flat": _nearly_flat,
    "ties": _ties,
    "banned": _banned,
    "one left": _one_left,
    "zeros": _zeros,
    "huge": _huge,
    "any bits": _any_bits,
    "edges": _edges,
    "empty": _empty,
    "+inf": _with(0x7F800000),
    "+nan": _with(0x7FC00000),
    "-nan": _with(0xFFC00000),
    "signalling nan": _with(0x7F800001),
    "negative signalling nan": _with(0xFF800001),
}
"""Makers of one row by name; the last six cannot be drawn."""

SOUND_KINDS = tuple(ROW_KINDS)[:11]


def nasty_row(kind: str, vocab_size: int, seed: int) -> F32:
    """Return one row [V] of a kind of `ROW_KINDS`; the same for the same arguments."""
    return ROW_KINDS[kind](np.random.default_rng([seed, vocab_size]), vocab_size)


def nasty_rows(num_rows: int, vocab_size: int, seed: int, *, sound: bool = False) -> F32:
    """Return [R, V] rows of all kinds in random order. sound: only rows that can be drawn."""
    rng = np.random.default_rng([seed, vocab_size, num_rows])
    kinds = SOUND_KINDS if sound else tuple(ROW_KINDS)
    rows = np.empty((num_rows, vocab_size), np.float32)
    for i in range(num_rows):
        rows[i] = ROW_KINDS[kinds[rng.integers(len(kinds))]](rng, vocab_size)
    return rows


TEMPERATURES = (None, 0.0, 9.9e-7, 1e-6, 1e-3, 0.3, 0.7, 1.0, 1.0, 1.5, 20.0, 1e6)
TOP_PS = (None, None, 0.0, 1e-12, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999999, 1 - 2.0**-33, 1.0)
MIN_PS = (None, None, 0.0, 1e-40, 1e-38, 1e-9, 0.05, 0.3, 0.9, 1.0)


def nasty_params(num_rows: int, vocab_size: int, seed: int) -> list[SamplingParams]:
    """Return R parameters of all shapes: set and unset, neutral, at the edges of their ranges, greedy or not."""
    rng = np.random.default_rng([seed, vocab_size, num_rows, 1])
    v = vocab_size
    top_ks = (None, None, -1, 0, 1, 2, 7, 50, max(v // 3, 1), max(v - 1, 1), v, v + 1, 2**31 - 1, 2**40)
    return [
        SamplingParams(
            temperature=TEMPERATURES[rng.integers(len(TEMPERATURES))],
            top_k=top_ks[rng.integers(len(top_ks))],
            top_p=TOP_PS[rng.integers(len(TOP_PS))],
            min_p=MIN_PS[rng.integers(len(MIN_PS))],
        )
        for _ in range(num_rows)
    ]
