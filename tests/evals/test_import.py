"""What the package needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from klero.errors import MissingExtra


def test_scoring_needs_no_harness():
    code = "import sys, klero.evals; print([m for m in ('lm_eval', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_the_harness_the_extra_is_named(monkeypatch):
    import klero.evals

    monkeypatch.delitem(sys.modules, "klero.evals.harness", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(MissingExtra, match=r"klero\[lm-eval\] .*txt '\.\[lm-eval\]' \(the CPU build of torch"):
        klero.evals.KleroLM  # noqa: B018  looking it up loads it


def test_the_names_are_these():
    import klero.evals

    assert dir(klero.evals) == ["KleroLM", "Pair", "Scored", "join_pair", "score_pairs", "windows"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        klero.evals.nothing  # noqa: B018
