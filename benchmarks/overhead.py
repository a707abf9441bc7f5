"""What Python costs around the kernels: `python -m benchmarks.overhead` (half a minute), `--rounds 1000`.

Rows of 32 tokens, so that the kernels are short, and one thread. "Beyond the kernel": what a call takes longer than the
compiled function on the same arrays, ready made, which takes turns with it. Microseconds of processor time, medians;
what starts a process, and what wakes a thread, by the clock. Appends to results/overhead.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import THREADS, machine
from klero import Sampler, SamplingParams, Seat, sample
from klero.device import over_rows
from klero.params import ROW_DTYPE
from klero.rows.inputs import as_bits
from klero.sampling import fused

RESULTS = Path(__file__).parent / "results" / "overhead.jsonl"
WIDTH, SLOTS, MAX_LEN = 32, 64, 4096
STARTS = 7  # processes for each thing that starts one
IMPORT = "import time; begin = time.perf_counter(); import klero; print(time.perf_counter() - begin)"
FIRST = (
    "import time, numpy, klero; rows = numpy.zeros((1, 32), numpy.float32); begin = time.perf_counter();"
    "klero.sample(rows, klero.SamplingParams(temperature=1.0, seed=0), positions=0); print(time.perf_counter() - begin)"
)


class Asked(NamedTuple):
    """What was timed, in microseconds, and the most that is wanted (None: nothing is)."""

    name: str
    us: float
    wanted: float | None

    @property
    def met(self) -> str:
        """Whether it is as quick as wanted."""
        if self.wanted is None:
            return ""
        return "met" if self.us <= self.wanted else f"missed by {self.us - self.wanted:.0f}"


class Times:
    """How long things took, by name, in seconds."""

    def __init__(self) -> None:
        self.of: dict[str, list[float]] = defaultdict(list)

    def call(self, name: str, work: Callable[[], Any], clock: Callable[[], float] = time.thread_time) -> Any:
        """Do it and note how long it took."""
        begin = clock()
        made = work()
        self.of[name].append(clock() - begin)
        return made

    def us(self, name: str) -> float:
        """The median in microseconds."""
        return statistics.median(self.of[name]) * 1e6


def different_params(count: int) -> list[SamplingParams]:
    """Parameter sets of which no two are the same."""
    return [SamplingParams(temperature=0.5 + i / count, top_k=5 + i % 20, top_p=0.9, seed=i) for i in range(count)]


def peaked(num_rows: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Rows [R, 32] in which a few tokens have most of the mass."""
    return np.random.default_rng(7).normal(0, 4, (num_rows, WIDTH)).astype(np.float32)


class Kernel:
    """The compiled function on arrays that are ready."""

    def __init__(self, rows: Any, params: Sequence[SamplingParams]) -> None:
        num_rows = len(rows)
        self._rows, self._chosen = as_bits(rows), np.arange(num_rows)
        self._params = np.array([one.row for one in params], ROW_DTYPE)
        self._seeds = np.arange(num_rows, dtype=np.uint64)
        self._zeros = np.zeros(num_rows, np.uint32)
        self._out = np.empty(num_rows, np.int32), np.empty(num_rows, np.uint8), np.empty(num_rows, np.int32)
        self._call = fused.cpu_kernel()

    def __call__(self, positions: Any = None) -> None:
        positions = self._zeros if positions is None else positions
        self._call(self._rows, WIDTH, self._chosen, self._params, self._seeds, positions, self._zeros, *self._out)


def stateless(times: Times, rounds: int) -> None:
    """klero.sample on one row, on 64 with the same parameters, and on 256 with 256 sets of them."""
    one = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=3)
    for name, num_rows, params in (("1 row", 1, [one]), ("64 rows", 64, [one] * 64), ("256 rows", 256, None)):
        rows, sets = peaked(num_rows), params or different_params(num_rows)
        given = one if params else sets
        calls: list[tuple[str, Callable[[], Any]]] = [
            (name, lambda: sample(rows, given, positions=0)),  # noqa: B023  called at once
            (f"{name}, kernel", Kernel(rows, sets)),
        ]
        for i in range(rounds):
            for what, call in calls[:: 1 if i % 2 else -1]:  # whoever comes second finds the caches warm
                times.call(what, call)


def stateful(times: Times, rounds: int) -> None:
    """The moments of a step for 64 slots in which nobody comes or goes, and the seating of all of them."""
    params, rows = different_params(SLOTS), peaked(SLOTS)
    sampler, kernel = Sampler(num_slots=SLOTS, vocab_size=WIDTH, max_len=MAX_LEN), Kernel(rows, params)
    seats = [Seat(f"{i}", one, np.arange(8), seed=i) for i, one in enumerate(params)]
    slots = sampler.setup_step(seats)
    for i in range(rounds):
        times.call("setup_step", lambda: sampler.setup_step([]))
        step = times.call("step_of", lambda: sampler.step_of(slots))  # noqa: B023  called at once
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("sample_async", lambda: sampler.sample_async(step, rows)),  # noqa: B023
            ("step, kernel", lambda: kernel(step.position_of_row)),  # noqa: B023
        ]
        made = [times.call(what, call) for what, call in calls[:: 1 if i % 2 else -1]]
        state = made[0] or made[1]
        times.call("update_requests", lambda: sampler.update_requests(state))  # noqa: B023
        if i % 50 == 49:
            for slot in slots:
                sampler.release(slot)
            slots = times.call("setup_step, new", lambda: sampler.setup_step(seats))


def threads(times: Times, rounds: int) -> None:
    """over_rows with nothing to do: by the clock, because whoever waits uses no processor."""
    for _ in range(rounds):
        times.call("over_rows", lambda: over_rows(lambda begin, end: None, 64, 2), time.perf_counter)


def started(code: str) -> float:
    """What new processes say that something took, in microseconds; the median."""
    argv = [sys.executable, "-c", code]
    said = [subprocess.run(argv, capture_output=True, text=True, check=True).stdout for _ in range(STARTS + 1)]
    return statistics.median(float(seconds) * 1e6 for seconds in said[1:])  # the first one reads the disk


def judged(times: Times) -> list[Asked]:
    """What was asked, with what is wanted of it."""
    us = times.us
    return [
        Asked("klero.sample, 1 row of 32", us("1 row"), 40),
        Asked("klero.sample, 64 rows, the same parameters", us("64 rows"), None),
        Asked("... beyond the kernel", us("64 rows") - us("64 rows, kernel"), None),
        Asked("klero.sample, 256 rows, 256 SamplingParams", us("256 rows"), None),
        Asked("... beyond the kernel", us("256 rows") - us("256 rows, kernel"), 200),
        Asked("setup_step, 64 new slots", us("setup_step, new"), None),
        Asked("setup_step, nobody new", us("setup_step"), None),
        Asked("step_of, 64 unchanged slots", us("step_of"), None),
        Asked("sample_async, 64 unchanged slots", us("sample_async"), None),
        Asked("... beyond the kernel", us("sample_async") - us("step, kernel"), 60),
        Asked("update_requests, 64 unchanged slots", us("update_requests"), None),
        Asked("over_rows, two threads, nothing to do", us("over_rows"), None),
        Asked("import klero", started(IMPORT), 0.6e6),
        Asked("first sample, kernels in the cache", started(FIRST), 0.5e6),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=about)
    parser.add_argument("--rounds", type=int, default=2000)
    options = parser.parse_args(arguments)
    times = Times()
    for part in (stateless, stateful, threads):
        part(Times(), 50)  # warm: compiled, loaded, caches filled
        gc.collect()
        part(times, options.rounds)
    load, results = machine.load_average(), judged(times)
    print(f"  {'asked':44} {'us':>9} {'wanted':>9}   ({THREADS} thread, load {load})")
    for asked in results:
        wanted = "" if asked.wanted is None else f"{asked.wanted:9.0f}"
        print(f"  {asked.name:44} {asked.us:9.1f} {wanted:9}   {asked.met}")
    record = {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "about": machine.describe(THREADS),
        "load": load,
        "rounds": options.rounds,
        "us": {name: round(times.us(name), 2) for name in times.of},
        "judged": [asked._asdict() | {"us": round(asked.us, 1)} for asked in results],
    }
    with RESULTS.open("a") as file:
        file.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
