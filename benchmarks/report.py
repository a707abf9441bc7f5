"""The result: a table to read, JSON lines to keep. `python -m benchmarks.report [--markdown]`: the last full run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.cases import SETTINGS, Setting
from benchmarks.floors import FLOORS
from benchmarks.machine import ROOT
from benchmarks.timing import Candidate, Stats

RESULTS = ROOT / "benchmarks" / "results" / "runs.jsonl"
FLOOR, KLERO = "floor", "klero"
Key = tuple[str, str, str]  # rows, what is asked, who
Measured = dict[Key, Stats]
Lines = list[Sequence[str]]


def table(measured: Measured) -> Lines:
    """A line for every case, the head first: medians in microseconds a row, by the wall clock.

    cpu: klero's processor time. x floor: klero over its max or mass pass. In brackets: a peer over klero.
    """
    names = list(dict.fromkeys(key[0] for key in measured if key[2] == FLOOR))
    who = [peer for peer in peers.NAMES if any(key[2] == peer for key in measured)]
    lines: Lines = [("rows", "asked", "klero", "p10-p90", "cpu", "x floor", *who)]
    for name in names:
        lines += [
            _line(name, setting, who, measured) for setting in SETTINGS if (name, setting.name, KLERO) in measured
        ]
    return lines


def floors_table(measured: Measured) -> Lines:
    """The floors of all rows, medians in microseconds a row."""
    names = list(dict.fromkeys(key[0] for key in measured if key[2] == FLOOR))
    return [
        ("rows", *FLOORS),
        *((name, *(us(measured[name, floor, FLOOR].median) for floor in FLOORS)) for name in names),
    ]


def _line(name: str, setting: Setting, who: Sequence[str], measured: Measured) -> Sequence[str]:
    """klero and its peers on one case."""
    ours, floor = measured[name, setting.name, KLERO], measured[name, f"{setting.floor} pass", FLOOR]
    cells = []
    for peer in who:
        stats = measured.get((name, setting.name, peer))
        cells.append("" if stats is None else f"{us(stats.median)} ({times(stats.median / ours.median)})")
    spread = f"{us(ours.p10)}-{us(ours.p90)}"
    return name, setting.name, us(ours.median), spread, us(ours.cpu), f"{ours.median / floor.median:.2f}", *cells


def us(value: float) -> str:
    """Microseconds, four digits or so."""
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def times(ratio: float) -> str:
    """A ratio for readers."""
    return f"{ratio:.1f}x" if ratio < 100 else f"{ratio:.0f}x"


def layout(lines: Lines, *, markdown: bool, flush_left: int = 2) -> str:
    """Lines as text in columns, or as a Markdown table; the first `flush_left` columns and the head say words."""
    if markdown:
        head, *rest = ["| " + " | ".join(line) + " |" for line in lines]
        return "\n".join([head, "|" + "---|" * len(lines[0]), *rest])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < flush_left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def heading(run: dict[str, Any]) -> str:
    """What the numbers of a run depend on."""
    about, (before, after) = run["machine"], run["load"]
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items() if number)
    busy = run.get("two_threads")
    also = f"; with two threads load {busy['load'][0]} and {busy['load'][1]}, {busy['share']:.2f} cores" if busy else ""
    return (
        f"{run['run']}, {about['cpu']}, {about['cores']} cores, {about['threads']} thread(s), Python {about['python']},"
        f" {versions}\nload {before} before, {after} after; {run['share']:.2f} cores had while timing{also}"
    )


def append(
    run: dict[str, Any], candidates: Sequence[Candidate], rate: dict[str, Any] | None, path: Path = RESULTS
) -> None:
    """Append one line a candidate, in microseconds a row, and one for LLM.generate, in tokens/s, if it was timed.

    `run` (when, on what, how busy) stands in each.
    """
    records = []
    for candidate in candidates:
        rows, asked, who = candidate.key
        stats = {name: round(value, 3) for name, value in dataclasses.asdict(candidate.stats).items()}
        records.append({"rows": rows, "asked": asked, "who": who, "num_rows": candidate.num_rows, **stats})
    if rate is not None:
        records.append({"rows": "SmolLM2", "asked": "LLM.generate", "who": "klero", **rate})
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps({**record, **run}) + "\n" for record in records)


def last_run(path: Path = RESULTS, *, full: bool = True) -> tuple[dict[str, Any], Measured]:
    """What the last run (the last full one) depended on, and all that it measured. SystemExit if there is none."""
    lines = path.read_text().splitlines() if path.is_file() else []
    records = [json.loads(line) for line in lines]
    records = [record for record in records if record["full"] or not full]
    if not records:
        raise SystemExit(f"no such run in {path}: python -m benchmarks.run --full")
    records = [record for record in records if record["run"] == records[-1]["run"]]
    fields = [field.name for field in dataclasses.fields(Stats)]
    measured = {
        (record["rows"], record["asked"], record["who"]): Stats(**{field: record[field] for field in fields})
        for record in records
        if "p10" in record
    }
    return records[-1], measured


def show(run: dict[str, Any], measured: Measured, *, markdown: bool) -> None:
    """Print what a run measured."""
    print(heading(run), "", layout(table(measured), markdown=markdown), "", sep="\n")
    print(layout(floors_table(measured), markdown=markdown, flush_left=1))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables of the last full run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--short", action="store_true", help="the last run of any kind")
    options = parser.parse_args(arguments)
    show(*last_run(full=not options.short), markdown=options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
