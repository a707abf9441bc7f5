"""Every input of the benchmarks, declared once: rows of logits, and what is asked of them. Seeds are fixed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.recorded import recorded_rows
from klero import SamplingParams

V, R = 128256, 64
WIDE, NARROW, MANY = 262144, 32000, 256
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Setting:
    """One parameter set. floor: the pass over the row that no sampler of its kind can do without, "max" or "mass"."""

    name: str
    floor: str
    greedy: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    @property
    def params(self) -> SamplingParams:
        """The same as klero takes it. Without a seed: rows get fresh ones, as in a server."""
        temperature = 0.0 if self.greedy else self.temperature
        return SamplingParams(temperature=temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)


# Temperature alone is 0.8: at 1 there would be nothing to do, and a peer could leave the division out. The filters are
# timed at temperature 1, where peers do leave it out.
GREEDY = Setting("greedy", "max", greedy=True)
TEMPERATURE = Setting("temperature .8", "mass", temperature=0.8)
TOP_P = Setting("top-p .9", "mass", top_p=0.9)
BOTH = Setting("top-k 50, top-p .9", "max", top_k=50, top_p=0.9)
TOP_K = Setting("top-k 50", "max", top_k=50)
MIN_P = Setting("min-p .05", "max", min_p=0.05)
SETTINGS = (GREEDY, TEMPERATURE, TOP_P, BOTH, TOP_K, MIN_P)


@dataclass(frozen=True)
class Rows:
    """Rows of logits. values: float32 or float16 [R, V], or bfloat16 as its bits, uint16 [R, V].

    settings: what they are timed with. peers: "all", "quick" (those that do not sort whole rows) or "none".
    short: timed in a short run too.
    """

    name: str
    values: npt.NDArray[Any]
    settings: tuple[Setting, ...] = SETTINGS
    peers: str = "all"
    short: bool = False

    @property
    def dtype(self) -> str:
        """What the values are."""
        return "bfloat16" if self.values.dtype == np.uint16 else self.values.dtype.name

    def as_float32(self) -> F32:
        """The values as float32 [R, V]; a copy only for half precision."""
        return widened(self.values) if self.dtype == "bfloat16" else self.values.astype(np.float32, copy=False)


def widened(bits: npt.NDArray[np.uint16]) -> F32:
    """bfloat16 bits as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def flat_rows(num_rows: int = R, vocab_size: int = V, seed: int = 1) -> F32:
    """Standard normal logits: no token stands out, thousands are needed for half of the mass."""
    return np.random.default_rng(seed).standard_normal((num_rows, vocab_size), dtype=np.float32)


# Peaked rows imitate what a language model gives. Compared, at temperature 1, with 192 rows recorded from SmolLM2-135M
# (24 sampled tokens on each of the 8 prompts of recorded.py; V = 49152). 10th / 50th / 90th percentile over the rows:
#                                                      recorded              peaked, V = 128256
#   entropy, nats                                  0.21 / 2.1  / 4.2       0.29 / 1.8  / 4.6
#   tokens for 0.9 of the mass                     1    / 11   / 177       1    / 8    / 489
#   tokens for 0.99 of the mass                    3    / 230  / 3163      3    / 576  / 15600
#   tokens with p >= 0.05 of the most likely one   1    / 4    / 16        1    / 4    / 15
#   largest probability                            0.16 / 0.51 / 0.96      0.19 / 0.54 / 0.94
#   standard deviation of the logits               2.7  / 3.4  / 4.2       2.5  / 3.1  / 3.5
#   largest logit above the mean                   16.0 / 19.7 / 24.9      15.4 / 19.0 / 23.2
#   largest above the 50th largest logit           4.3  / 7.0  / 13.1      5.0  / 7.7  / 11.2
#   largest above the 1000th largest logit         9.0  / 12.2 / 18.2      8.7  / 11.7 / 15.9
# A row is a normal bulk, plus a head of 256 tokens with exponential excess over it (so probabilities fall with a power
# of the rank). Bulk and head differ from row to row, within the ranges below. Heads lie where a byte-pair vocabulary
# has its frequent tokens, at low ids: recorded quartiles 0.009, 0.034, 0.12 of V, those of the log-normal used here.
# With more columns the bulk carries more mass than in the recording: the long side errs against klero, not for it.
HEAD = 256
BULK = (2.4, 3.6)  # standard deviation of the bulk
FOOT = 2.9  # where the head begins, in standard deviations
SLOPE = (1.1, 2.6)  # mean excess of the head over its foot


def peaked_rows(num_rows: int = R, vocab_size: int = V, seed: int = 1) -> F32:
    """Rows with the shape of those of a language model."""
    rng = np.random.default_rng(seed)
    rows = np.empty((num_rows, vocab_size), np.float32)
    for row in rows:
        deviation, slope = rng.uniform(*BULK), rng.uniform(*SLOPE)
        row[:] = rng.standard_normal(vocab_size) * deviation
        place = np.exp(rng.normal(np.log(0.034), 2.0, 4 * HEAD))
        ids = rng.permutation(np.unique((place[place < 1] * vocab_size).astype(np.int64)))[:HEAD]
        row[ids] = FOOT * deviation + slope * rng.standard_exponential(len(ids))
    return rows


def bfloat16_bits(rows: F32) -> npt.NDArray[np.uint16]:
    """Round finite float32 rows to bfloat16, ties to even."""
    bits = rows.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


FLAT, BFLOAT16, FLOAT16, MANY_BFLOAT16 = "flat", "peaked, bfloat16", "peaked, float16", f"peaked, bfloat16, R={MANY}"
ONE_WIDE = f"peaked, R=1, V={WIDE}"  # timed with two threads only
BY_ROWS = {"peaked, R=1": 1, "peaked, R=8": 8, "peaked": R, f"peaked, R={MANY}": MANY}
BY_WIDTH = {f"peaked, V={NARROW}": NARROW, "SmolLM2": 49152, "peaked": V, f"peaked, V={WIDE}": WIDE}


def all_rows(say: Callable[[str], None], *, full: bool) -> list[Rows]:
    """The rows of a run; those recorded from SmolLM2 only where its wheel is installed (say tells if not).

    Of R=1, 8 and 64 the values are the first of those of R=256, in the same memory.
    """
    many = peaked_rows(MANY if full else R)
    peaked = many[:R]
    made = [
        Rows("peaked", peaked, short=True),
        Rows(FLAT, flat_rows(), SETTINGS if full else (TOP_P, BOTH), "all" if full else "none", short=True),
        Rows(BFLOAT16, bfloat16_bits(peaked), peers="quick"),
        Rows(FLOAT16, peaked.astype(np.float16), peers="none"),
        Rows("peaked, R=1", many[:1]),
        Rows("peaked, R=8", many[:8]),
        Rows(f"peaked, R={MANY}", many, peers="quick"),
        Rows(MANY_BFLOAT16, bfloat16_bits(many), (GREEDY, BOTH, MIN_P), "none"),
    ]
    if full:
        made.append(Rows(f"peaked, V={NARROW}", peaked_rows(vocab_size=NARROW)))
        made.append(Rows(f"peaked, V={WIDE}", peaked_rows(vocab_size=WIDE), peers="quick"))
    recorded = recorded_rows(R, say)
    if recorded is not None:
        made.insert(1, Rows("SmolLM2", recorded, short=True))
    return [rows for rows in made if full or rows.short]
