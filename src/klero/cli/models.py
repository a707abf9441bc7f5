"""klero models: what was checked here, what is refused, and what can be fetched by name."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence


def models() -> None:
    """List the architectures that were checked, those that are refused, and the models that have a name of their own.

    Any other causal language model of transformers is probed when it is loaded: it runs, or an error says why not.
    """
    from klero.engine.models.checked import CHECKED, REFUSED
    from klero.engine.models.fetch import FETCHABLE

    print("named models (klero fetch NAME)")
    print_table([(one.name, one.title) for one in FETCHABLE.values()])
    print("\nchecked architectures (deterministic: in float32 on the CPU, whatever else runs)")
    rows = [(one.name, "deterministic" if one.deterministic else "-", one.kind) for one in CHECKED]
    print_table(sorted(rows, key=lambda row: row[0].lower()))
    print("\nrefused architectures, and why")
    for reason in dict.fromkeys(one.reason for one in REFUSED):
        _print_filled(reason, 2)
        _print_filled(", ".join(sorted((one.name for one in REFUSED if one.reason == reason), key=str.lower)), 6)
    print("\nany other causal language model of transformers is probed when it is loaded")


def _print_filled(text: str, indent: int) -> None:
    """Print a text over as many lines as the terminal makes it."""
    width = max(shutil.get_terminal_size().columns, 40)
    print(textwrap.fill(text, width, initial_indent=" " * indent, subsequent_indent=" " * indent))


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows with their columns aligned, indented by two."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
