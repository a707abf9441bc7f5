"""A benchmark of lm-evaluation-harness, run on klero.

    pip install -c constraints.txt '.[lm-eval]'      # the CPU build of torch first: README, Installing
    python examples/lm_eval_task.py [MODEL] [TASK ...]

Without a task it takes fifty multiple-choice facts that lie in this repository. A task that comes with the harness,
such as arc_easy, fetches its data set. The harness's own command does the same and more:

    python -m klero.evals run --model klero --model_args pretrained=smollm2 --tasks arc_easy
"""

from __future__ import annotations

import sys
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from klero.evals import KleroLM

FACTS = Path(__file__).resolve().parents[1] / "tests" / "data" / "facts"


def main(model: str = "smollm2", *tasks: str) -> None:
    """Evaluate, and print the harness's table, then what it got wrong of the facts."""
    found = TaskManager(include_path=str(FACTS), include_defaults=bool(tasks))
    results = simple_evaluate(KleroLM(model, num_blocks=512), tasks=list(tasks) or ["facts"], task_manager=found)
    print(make_table(results))
    for sample in results["samples"].get("facts", []):
        if not sample["acc"]:
            fact, scores = sample["doc"], [loglikelihood for loglikelihood, _ in sample["filtered_resps"]]
            chosen = fact["choices"][scores.index(max(scores))]
            print(f"{fact['text']} {fact['choices'][fact['answer']]}, not {chosen}")


if __name__ == "__main__":
    main(*sys.argv[1:])
