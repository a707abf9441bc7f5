"""The command `klero`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command; without the `cli` extra, say what to install."""
    # OpenMP's spin-waiting turns one busy neighbour into a 30-fold slowdown; it is read when torch loads.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        import tqdm  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        sys.exit(
            "The klero command needs typer and tqdm. klero[engine] brings them and the engine, klero[cli] them alone; "
            "from a clone: pip install -c constraints.txt '.[engine]' (CPU torch first: README, Installing)"
        )
    from klero.cli.app import run

    run()
