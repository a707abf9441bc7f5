"""Time candidates side by side: many rounds over all of them, so that a slow minute of the machine meets everyone."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

SLICE = 0.03  # seconds a candidate may fill with further calls in a round; one call is always made
MOST_CALLS = 20  # in a round
SLOW = 0.15  # seconds of one call, from which a candidate may sit out rounds


@dataclass(frozen=True)
class Stats:
    """Microseconds a row over all calls of a candidate: wall clock, and the median of this process's processor time.

    On a busy machine the wall clock favours the short call: it often runs undisturbed, a call of a second never does.
    Processor time knows no such luck, so with one thread a ratio is believed only if it holds in both.
    """

    calls: int
    min: float
    p10: float
    median: float
    p90: float
    cpu: float


@dataclass
class Candidate:
    """Something to be timed: `call` handles `num_rows` rows. key: (rows, what is asked, who does it)."""

    key: tuple[str, str, str]
    call: Callable[[], object]
    num_rows: int
    samples: list[tuple[float, float]] = field(default_factory=list)  # (wall, processor)

    def run_slice(self) -> None:
        """Call for a slice of time, and note how long each call took."""
        end = time.perf_counter() + SLICE
        for _ in range(MOST_CALLS):
            begin, cpu = time.perf_counter(), time.process_time()
            self.call()
            used, now = time.process_time() - cpu, time.perf_counter()
            self.samples.append(((now - begin) * 1e6 / self.num_rows, used * 1e6 / self.num_rows))
            if now >= end:
                return

    @property
    def stats(self) -> Stats:
        """Minimum, median and spread so far."""
        wall, cpu = np.array(self.samples).T
        least, low, middle, high = (float(value) for value in np.percentile(wall, [0, 10, 50, 90]))
        return Stats(len(wall), least, low, middle, high, float(np.median(cpu)))


def interleave(
    candidates: Sequence[Candidate], rounds: int, say: Callable[[str], None], *, slow_calls: int | None = None
) -> float:
    """Run a warm-up round and then `rounds` that count, every second one backwards.

    slow_calls: a candidate whose call takes longer than SLOW is called in so many rounds only, spread evenly; None: in
    all. Returns the share of one core that this process got: clearly below the number of threads, others were in the
    way.
    """
    stride_of = {}
    for candidate in candidates:
        candidate.run_slice()
        slow = candidate.samples[-1][0] * candidate.num_rows > SLOW * 1e6
        stride_of[candidate.key] = -(-rounds // slow_calls) if slow_calls is not None and slow else 1
        candidate.samples.clear()
    gc.collect()
    gc.disable()
    try:
        wall, cpu = time.perf_counter(), time.process_time()
        for i in range(rounds):
            say(f"round {i + 1} of {rounds}")
            for candidate in candidates if i % 2 == 0 else reversed(candidates):
                if i % stride_of[candidate.key] == 0:
                    candidate.run_slice()
        return (time.process_time() - cpu) / (time.perf_counter() - wall)
    finally:
        gc.enable()
