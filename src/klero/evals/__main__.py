"""The harness's own command, which knows klero: python -m klero.evals run --model klero --tasks arc_easy."""

from __future__ import annotations

import sys

from klero.evals.harness import KleroLM

OTHER = ("ls", "validate")
DEFAULTS = {("--batch_size", "-b"): "auto", ("--device",): "cpu"}
"""What the harness would fill in is one sequence at a time, and a GPU."""


def main() -> None:
    """Run it, with klero's defaults where neither the command line nor a --config file may say something else."""
    from lm_eval.__main__ import cli_evaluate

    asked = sys.argv[1:]
    if len(asked) > 1 and asked[0] not in OTHER and not any(part.startswith("--config") for part in asked):
        for names, value in DEFAULTS.items():
            if not any(part.startswith(names) for part in asked):
                sys.argv += [names[0], value]
    cli_evaluate()


assert KleroLM is not None  # importing it registers it
if __name__ == "__main__":
    main()
