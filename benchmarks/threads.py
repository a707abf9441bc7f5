"""One thread against two: `python -m benchmarks.threads` (half a minute), `--rounds 40`; a part of `run --full`.

klero reads KLERO_NUM_THREADS at each call, so both are candidates of one process and take turns. The wall clock is what
counts here, and what else the machine does counts with it: the load is told.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import klero
from benchmarks import machine
from benchmarks.cases import (
    BOTH,
    FLAT,
    GREEDY,
    MIN_P,
    ONE_WIDE,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WIDE,
    Rows,
    Setting,
    flat_rows,
    peaked_rows,
)
from benchmarks.timing import Candidate, interleave

ONE_THREAD, TWO_THREADS = "klero, 1 thread", "klero, 2 threads"
THREADS_OF = {ONE_THREAD: "1", TWO_THREADS: "2"}
ROUNDS = 20
VARIABLE = "KLERO_NUM_THREADS"


def rows_of(inputs: Sequence[Rows] = ()) -> list[Rows]:
    """The rows to time, with the settings to time them with; those of `inputs` where it has them."""
    at_hand = {rows.name: rows.values for rows in inputs}
    flat, peaked = at_hand.get(FLAT), at_hand.get("peaked")
    return [
        Rows("peaked", peaked_rows() if peaked is None else peaked, (TEMPERATURE, GREEDY, TOP_K, BOTH, MIN_P)),
        Rows(FLAT, flat_rows() if flat is None else flat, (TOP_P,)),
        Rows(ONE_WIDE, peaked_rows(1, WIDE), (TEMPERATURE,)),
    ]


def candidates_of(rows: Rows, setting: Setting) -> list[Candidate]:
    """The same call with one thread and with two."""
    params, positions = setting.params, itertools.count(1)

    def with_threads(threads: str) -> Callable[[], object]:
        def call() -> object:
            os.environ[VARIABLE] = threads
            return klero.sample(rows.values, params, positions=next(positions))

        return call

    return [
        Candidate((rows.name, setting.name, who), with_threads(threads), len(rows.values))
        for who, threads in THREADS_OF.items()
    ]


def timed(
    inputs: Sequence[Rows], say: Callable[[str], None], rounds: int = ROUNDS
) -> tuple[list[Candidate], dict[str, Any]]:
    """Time them; the candidates, and how busy the machine was."""
    before, asked = machine.load_average(), os.environ.get(VARIABLE)
    made = [c for rows in rows_of(inputs) for setting in rows.settings for c in candidates_of(rows, setting)]
    try:
        share = interleave(made, rounds, lambda message: say(f"two threads: {message}"))
    finally:
        os.environ.pop(VARIABLE, None)
        if asked is not None:
            os.environ[VARIABLE] = asked
    return made, {"load": [before, machine.load_average()], "share": round(share, 3)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Time and print."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.threads", description=about)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args(arguments)
    made, busy = timed([], lambda message: print(message, file=sys.stderr, flush=True), options.rounds)
    print(f"load {busy['load'][0]} before, {busy['load'][1]} after; medians in microseconds a row, wall clock")
    for one, two in zip(made[::2], made[1::2], strict=True):
        ratio = one.stats.median / two.stats.median
        print(f"  {one.key[0]:22} {one.key[1]:20} {one.stats.median:8.1f} {two.stats.median:8.1f}  {ratio:.2f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
