"""The example of lm-evaluation-harness, on a tiny model."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from tests.cli.conftest import tiny_model

pytest.importorskip("lm_eval", reason="lm-eval is not installed: make lm-eval")
__all__ = ["tiny_model"]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "lm_eval_task.py"


def test_it_prints_the_table_and_what_was_wrong(tiny_model, capsys):
    runpy.run_path(str(EXAMPLE))["main"](tiny_model)
    table, *_ = said = capsys.readouterr().out.splitlines()
    assert table.startswith("|Tasks|")
    (row,) = [line for line in said if line.startswith("|facts")]
    accuracy = float(re.search(r"\|(0\.\d+)\|", row.replace(" ", "")).group(1))
    wrong = [line for line in said if ", not " in line]
    assert len(wrong) == round(50 * (1 - accuracy))
    assert 25 < len(wrong) < 50  # random weights know nothing
