"""The example of a rollout: which ratios are 1, on a tiny model and on the default one."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from tests.cli.conftest import tiny_model

pytest.importorskip("torch")
pytest.importorskip("transformers")

__all__ = ["tiny_model"]

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "rollout.py"))


def check(said, *, off):
    """off: how far the ratios of a plain forward may be from 1."""
    head, _, *rows, step, after = said.splitlines()
    assert head == "12 answers, 192 tokens"
    assert len(rows) == 8
    mean, largest = zip(*(map(float, row.split()[-2:]) for row in rows), strict=True)
    mixed, forgotten, corrected, replayed, plain, deterministic, with_bans, replayed_with_bans = mean
    assert mixed > 0.05
    assert forgotten > 0.05
    assert max(corrected, replayed, plain, replayed_with_bans) < off
    assert with_bans > 0.01  # the kept mass is of the row after the bans
    assert deterministic == largest[5] == 0
    better, worse = map(
        float, re.fullmatch(r"a step, loss \S+: .* better answers (\S+), of worse (\S+)", step).groups()
    )
    assert better > 1 > worse
    moved, apart = map(float, re.fullmatch(r".* moved by (\S+), and are (\S+) from the trainer's", after).groups())
    assert apart < off < moved


def test_on_a_tiny_model(tiny_model, capsys):
    EXAMPLE["main"](tiny_model, lr=0.5)
    check(capsys.readouterr().out, off=1e-5)


@pytest.mark.smollm2
def test_on_the_default_model(capsys):
    EXAMPLE["main"]()
    check(capsys.readouterr().out, off=1e-4)
