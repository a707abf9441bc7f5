"""The harness's own command, which knows klero: python -m klero.evals run --model klero --tasks arc_easy."""

from __future__ import annotations

import sys

from klero.evals.harness import KleroLM

SAID = ("-b", "--batch_size", "--config")
OTHER = ("ls", "validate")


def main() -> None:
    """Run it. Sequences run together unless the command line says how many; the harness would say one."""
    from lm_eval.__main__ import cli_evaluate

    asked = sys.argv[1:]
    if len(asked) > 1 and asked[0] not in OTHER and not any(part.startswith(SAID) for part in asked):
        sys.argv += ["--batch_size", "auto"]
    cli_evaluate()


assert KleroLM is not None  # importing it registers it
if __name__ == "__main__":
    main()
