"""Plots of the last full run: `python -m benchmarks.plots`, PNG files in docs/plots. Needs matplotlib (extra `dev`)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import report
from benchmarks.cases import BY_ROWS, BY_WIDTH, SETTINGS, R, Setting, V
from benchmarks.machine import ROOT
from benchmarks.report import FLOOR, KLERO, Measured

PLOTS = ROOT / "docs" / "plots"
STYLES: dict[str, dict[str, Any]] = {  # colours that the colour-blind tell apart too, and a marker for each
    KLERO: {"color": "#0072b2", "marker": "o", "linewidth": 3, "markersize": 8, "zorder": 5},
    "torch sort": {"color": "#d55e00", "marker": "s"},
    "torch topk": {"color": "#e69f00", "marker": "D"},
    "warpers": {"color": "#cc79a7", "marker": "^"},
    "llama.cpp": {"color": "#009e73", "marker": "v"},
    "numpy": {"color": "#56b4e9", "marker": "P"},
    "floor": {"color": "#333333", "linestyle": "--"},
    "read pass": {"color": "#888888", "linestyle": ":"},
}
LABELS = {
    "torch sort": "torch, sort chain (greedy: argmax)",
    "torch topk": "torch.topk chain",
    "warpers": "transformers' warpers",
    "numpy": "NumPy",
    "floor": "floor: max or mass pass",
    "read pass": "floor: reading the row",
}
WORDS = {"font.size": 14, "axes.titlesize": 15, "figure.facecolor": "white", "savefig.facecolor": "white"}


def line_of(who: str, setting: Setting, sizes: Mapping[str, int], measured: Measured) -> list[tuple[int, float]]:
    """Size and microseconds a row of one line in a panel; sizes that were not timed are left out."""
    points = []
    for rows, size in sizes.items():
        key = {
            "floor": (rows, f"{setting.floor} pass", FLOOR),
            "read pass": (rows, "read pass", FLOOR),
        }.get(who, (rows, setting.name, who))
        if key in measured:
            points.append((size, measured[key].median))
    return points


def draw(measured: Measured, sizes: Mapping[str, int], axis: str, title: str, path: Path) -> None:
    """A figure: one panel for each setting, logarithmic both ways, one legend."""
    figure, panels = plt.subplots(2, 3, figsize=(15, 10), sharex=True, sharey=True)
    shown: dict[str, Any] = {}
    for panel, setting in zip(panels.flat, SETTINGS, strict=True):
        for who, style in STYLES.items():
            points = line_of(who, setting, sizes, measured)
            if points:
                (shown[who],) = panel.plot(*zip(*points, strict=True), **({"linewidth": 2, "markersize": 7} | style))
        panel.set(xscale="log", yscale="log", title=setting.name)
        panel.set_xticks(list(sizes.values()), [f"{size:,}" for size in sizes.values()], rotation=20)
        panel.minorticks_off()
        panel.grid(color="#dddddd")
    for panel in panels[1]:
        panel.set_xlabel(axis)
    for panel in panels[:, 0]:
        panel.set_ylabel("microseconds a row")
    order = [who for who in STYLES if who in shown]
    labels = [LABELS.get(who, who) for who in order]
    figure.legend([shown[who] for who in order], labels, loc="lower center", ncols=4, frameon=False)
    figure.suptitle(title, fontsize=18)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main(arguments: Sequence[str] = ()) -> int:
    """Draw both figures and say where they are."""
    run, measured = report.last_run()
    about = run["machine"]
    where = f"{about['cpu']}, {about['threads']} thread"
    figures = (
        (
            "width.png",
            BY_WIDTH,
            "tokens in a row (V)",
            f"{R} peaked rows ({BY_WIDTH['SmolLM2']:,}: SmolLM2's); {where}",
        ),
        ("rows.png", BY_ROWS, "rows (R)", f"Peaked rows of {V:,} tokens; {where}"),
    )
    with plt.rc_context(WORDS):
        for name, sizes, axis, title in figures:
            draw(measured, sizes, axis, title, PLOTS / name)
            print(PLOTS / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
