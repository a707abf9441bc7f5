"""The result: one table to read, JSON lines to keep."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import SETTINGS, Rows
from benchmarks.floors import FLOORS
from benchmarks.machine import ROOT
from benchmarks.timing import Candidate, Stats

RESULTS = ROOT / "benchmarks" / "results" / "runs.jsonl"
HEAD = (
    "rows", "asked", "klero", "p10-p90", "x floor",
    "peer", "us/row", "p10-p90", "ratio", "cpu ratio", "at floor", "target", "met",
)  # fmt: skip
LEFT = ("rows", "asked", "peer", "met")  # flush left
Measured = dict[tuple[str, str, str], Stats]


def table(all_rows: Sequence[Rows], measured: Measured) -> str:
    """All cases against all their peers; medians, in microseconds a row.

    ratio: peer / klero by the wall clock; cpu ratio: by processor time (a target takes both; with several threads read
    the first). x floor: klero / floor. at floor: peer / floor, the ratio of a sampler that costs its max or mass pass
    and no more.
    """
    lines: list[tuple[str, ...]] = [HEAD]
    for rows in all_rows:
        lines += [line for setting in SETTINGS for line in _lines(rows, setting, measured)]
    for rows in all_rows:
        for floor in FLOORS:
            stats = measured[rows.name, floor, "floor"]
            lines.append((rows.name, floor, _us(stats.median), _spread(stats), *[""] * 9))
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    return "\n".join(
        "  ".join(
            f"{cell:<{width}}" if HEAD[i] in LEFT else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _lines(rows: Rows, setting: Any, measured: Measured) -> list[tuple[str, ...]]:
    """One line for every peer of a case."""
    ours = measured.get((rows.name, setting.name, "klero"))
    if ours is None:
        return []
    peers = [key[2] for key in measured if key[:2] == (rows.name, setting.name) and key[2] != "klero"]
    floor = measured[rows.name, f"{setting.floor} pass", "floor"].median
    front = (rows.name, setting.name, _us(ours.median), _spread(ours), f"{ours.median / floor:.2f}")
    lines: list[tuple[str, ...]] = []
    for peer in peers:
        stats = measured[rows.name, setting.name, peer]
        ratio, cpu_ratio = stats.median / ours.median, stats.cpu / ours.cpu
        target, met = "", ""
        if rows.judged and peer == "torch sort" and setting.target is not None:
            target, met = f"{setting.target:g}x", "yes" if min(ratio, cpu_ratio) >= setting.target else "NO"
        ratios = (f"{ratio:.1f}x", f"{cpu_ratio:.1f}x", f"{stats.median / floor:.1f}x")
        lines.append((*front, peer, _us(stats.median), _spread(stats), *ratios, target, met))
    return lines


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _spread(stats: Stats) -> str:
    return f"{_us(stats.p10)}-{_us(stats.p90)}"


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
