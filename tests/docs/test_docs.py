"""What the documents show is what happens."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import numpy as np
import pytest

import klero

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ["README.md", "docs/road.md", "docs/batching.md", "docs/draw.md", "docs/grammar.md", "docs/rules.md"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_examples_of_a_document_run(name):
    failed, tried = doctest.testfile(str(ROOT / name), module_relative=False)
    assert failed == 0
    assert tried > 0


@pytest.mark.parametrize("backend, first", [("reference", "| NumPy reference"), ("cpu", "| Numba")])
def test_the_same_token_table_of_the_readme(backend, first):
    line = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(first))
    cells = [[int(token) for token in cell.split("/")] for cell in line.split("|")[2:-1]]
    row = (np.random.default_rng(0).integers(-64, 64, 32000) / 8).astype(np.float32)
    params = klero.SamplingParams(temperature=1.0, top_p=0.95)
    for batch, cell in zip((1, 7, 64), cells, strict=True):
        rows = np.random.default_rng(1).standard_normal((batch, 32000)).astype(np.float32)
        rows[batch // 2] = row
        bfloat16 = (rows.view(np.uint32) >> 16).astype(np.uint16)
        for logits, token in zip((rows, rows.astype(np.float16), bfloat16), cell, strict=True):
            sampled = klero.sample(logits, params, positions=17, seeds=[2026] * batch, backend=backend)
            assert sampled.token_ids[batch // 2] == token


def test_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target


def test_every_make_target_of_the_readme_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"`make ([a-z-]+)`", (ROOT / "README.md").read_text()):
        assert target in targets
