"""What klero is to reach, as data, and what the last full run came to: `python -m benchmarks.targets [--markdown]`.

A ratio is one of medians of one run, by the wall clock and by processor time; the worse of both is told and counts.
With two threads it is the wall clock alone.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import report
from benchmarks.cases import (
    BOTH,
    BY_ROWS,
    BY_WIDTH,
    FLAT,
    GREEDY,
    MANY_BFLOAT16,
    MIN_P,
    NARROW,
    ONE_WIDE,
    SETTINGS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WIDE,
    Setting,
    V,
)
from benchmarks.report import FLOOR, KLERO, Key, Lines, Measured
from benchmarks.threads import ONE_THREAD, TWO_THREADS

FILTERS = (BOTH, TOP_P, TOP_K, MIN_P)
HEAD = ("rows", "asked", "wanted", "of", "measured", "")
EVEN = 1.3  # how far sizes may differ
ONE, FEW, R64, LARGEST = BY_ROWS
THIN, RECORDED, _, BROAD = BY_WIDTH


@dataclass(frozen=True)
class Ratio:
    """One number: `over` by `under`, times `scale`. name: what it is of, where a target has several."""

    name: str
    over: Key
    under: Key
    scale: float = 1.0

    def of(self, measured: Measured, *, at_least: bool, wall_only: bool) -> float | None:
        """The worse of the ratios by the wall clock and by processor time; None if it was not timed."""
        over, under = measured.get(self.over), measured.get(self.under)
        if over is None or under is None:
            return None
        ratios = [over.median / under.median * self.scale]
        if not wall_only:
            ratios.append(over.cpu / under.cpu * self.scale)
        return min(ratios) if at_least else max(ratios)


@dataclass(frozen=True)
class Target:
    """A line of the table. All ratios are to be at most `bound`, or at least."""

    rows: str
    asked: str
    of: str
    bound: float
    ratios: tuple[Ratio, ...]
    at_least: bool = False
    wall_only: bool = False

    def line(self, measured: Measured) -> Sequence[str] | None:
        """What was measured, and whether it is met; None where nothing was timed."""
        values = {
            ratio.name: ratio.of(measured, at_least=self.at_least, wall_only=self.wall_only) for ratio in self.ratios
        }
        known = {name: value for name, value in values.items() if value is not None}
        if not known:
            return None
        said = "; ".join(labelled(name, number(value)) for name, value in known.items())
        by = {name: (self.bound / value if self.at_least else value / self.bound) - 1 for name, value in known.items()}
        missed = "; ".join(labelled(name, f"by {math.ceil(100 * share)} %") for name, share in by.items() if share > 0)
        sign = ">=" if self.at_least else "<="
        return (
            self.rows,
            self.asked,
            f"{sign} {self.bound:g}x",
            self.of,
            said,
            f"**missed** {missed}" if missed else "met",
        )


def labelled(name: str, what: str) -> str:
    """What, and of which ratio if a target has several."""
    return f"{name}: {what}" if name else what


def number(value: float) -> str:
    """Three digits."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def floored(rows: str, settings: Sequence[Setting], bound: float, factor: float = 1.0) -> Target:
    """Settings of one floor, at most so many times that floor of the same rows."""
    floor = f"{settings[0].floor} pass"
    name_of = {s: s.name if len(settings) > 1 else "" for s in settings}
    ratios = tuple(Ratio(name_of[s], (rows, s.name, KLERO), (rows, floor, FLOOR)) for s in settings)
    return Target(rows, "; ".join(s.name for s in settings), floor, round(bound * factor, 2), ratios)


def beside(rows: str, other: str, settings: Sequence[Setting], bound: float, scale: float = 1.0) -> Target:
    """The same settings on other rows: at most so many times what a row (with `scale`: a token) of `other` takes."""
    ratios = tuple(Ratio(s.name, (rows, s.name, KLERO), (other, s.name, KLERO), scale) for s in settings)
    return Target(
        rows,
        "all" if settings == SETTINGS else "max-bound",
        f"{other}, a {'row' if scale == 1 else 'token'}",
        bound,
        ratios,
    )


def beaten(peer: str, settings: Sequence[Setting], bound: float, asked: str = "") -> Target:
    """A peer takes at least so many times as long, on 64 peaked rows."""
    ratios = tuple(
        Ratio(s.name if len(settings) > 1 else "", (R64, s.name, peer), (R64, s.name, KLERO)) for s in settings
    )
    return Target(R64, asked or settings[0].name, f"klero, by {peer}", bound, ratios, at_least=True)


def threaded(rows: str, settings: Sequence[Setting], bound: float) -> Target:
    """One thread takes at least so many times as long as two."""
    name_of = {s: s.name if len(settings) > 1 else "" for s in settings}
    ratios = tuple(Ratio(name_of[s], (rows, s.name, ONE_THREAD), (rows, s.name, TWO_THREADS)) for s in settings)
    asked = "; ".join(s.name for s in settings)
    return Target(rows, asked, "two threads, by one", bound, ratios, at_least=True, wall_only=True)


FLOORED = (
    ((GREEDY,), 1.2),
    ((TOP_K, BOTH, MIN_P), 1.8),
    ((TOP_P,), 1.6),
    ((TEMPERATURE,), 1.2),
)
TARGETS = (
    *(floored(R64, settings, bound) for settings, bound in FLOORED),
    floored(FLAT, (TOP_P,), 4),
    beside(MANY_BFLOAT16, LARGEST, (GREEDY, BOTH, MIN_P), 0.8),
    *(floored(rows, settings, bound, EVEN) for rows in (THIN, RECORDED) for settings, bound in FLOORED),
    beside(ONE, R64, SETTINGS, EVEN),
    beside(FEW, R64, SETTINGS, EVEN),  # "flat from 8 to 256" and "linear": no bound was named, so the one of R=1
    beside(LARGEST, R64, SETTINGS, EVEN),
    beside(THIN, R64, SETTINGS, EVEN, V / NARROW),
    beside(BROAD, R64, SETTINGS, EVEN, V / WIDE),
    threaded(R64, (TEMPERATURE,), 1.7),
    threaded(FLAT, (TOP_P,), 1.7),
    threaded(R64, (GREEDY, TOP_K, BOTH, MIN_P), 1.4),
    threaded(ONE_WIDE, (TEMPERATURE,), 1.4),
    beaten("torch sort", (BOTH,), 150),
    beaten("torch sort", (TOP_P,), 75),
    beaten("torch sort", (TEMPERATURE,), 20),
    beaten("warpers", FILTERS, 50, "filters"),
    beaten("warpers", (TEMPERATURE,), 20),
    beaten("llama.cpp", SETTINGS, 4, "all"),
)


def table(measured: Measured) -> Lines:
    """A line for every target of which something was timed, the head first."""
    lines = [target.line(measured) for target in TARGETS]
    return [HEAD, *(line for line in lines if line is not None)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the targets and the last full run. Returns 1 if one is missed."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.targets", description=about)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(arguments)
    run, measured = report.last_run()
    lines = table(measured)
    print(report.heading(run), "", report.layout(lines, markdown=options.markdown, flush_left=len(HEAD)), sep="\n")
    return int(any(line[-1] != "met" for line in lines[1:]))


if __name__ == "__main__":
    sys.exit(main())
