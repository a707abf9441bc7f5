"""Every row of filters.json, on the reference and on the kernels."""

import json

import numpy as np
import pytest
from tests.golden import make_filters
from tests.golden.make import floats, hexes

from klero import SamplingParams, sample
from klero.device import HAVE_NUMBA
from klero.lots.noise import COIN, uniform
from klero.sampling.fused.reference import sample_row

GOLDEN = json.loads(make_filters.PATH.read_text())
ROWS = {row["name"]: row for row in GOLDEN["rows"]}


def test_the_maker_makes_the_file_as_it_is():
    assert make_filters.main(["--check"]) == 0


def test_the_maker_sees_a_changed_value(tmp_path, monkeypatch, capsys):
    changed = tmp_path / "filters.json"
    changed.write_text(make_filters.PATH.read_text().replace('"token":0', '"token":1', 1))
    monkeypatch.setattr(make_filters, "PATH", changed)
    assert make_filters.main(["--check"]) == 1
    assert "filters.json:" in capsys.readouterr().out


@pytest.mark.parametrize("name", ROWS)
def test_row_on_the_reference(name):
    row = ROWS[name]
    seed, position, child = int(row["seed"]), row["position"], row["child"]
    drawn = sample_row(floats(row["logits"]), SamplingParams(**row["params"]).row, seed, position, child)
    assert (drawn.kept.tolist(), drawn.token, dict(drawn.stages)) == (row["kept"], row["token"], row["left"])
    if "coin" in row:
        assert hexes(uniform(seed, position, child, COIN)) == [row["coin"]]


@pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba")
@pytest.mark.parametrize("name", ROWS)
def test_row_on_the_kernels(name):
    row = ROWS[name]
    at = {"positions": row["position"], "children": row["child"], "seeds": int(row["seed"])}
    drawn = sample(floats(row["logits"])[None], SamplingParams(**row["params"]), backend="cpu", **at)
    assert np.asarray(drawn.token_ids).tolist() == [row["token"]]
    assert np.asarray(drawn.num_kept).tolist() == [len(row["kept"])]


def test_every_filter_removes_tokens_somewhere():
    shrunk = set()
    for row in ROWS.values():
        before = sum(bits != "ff800000" for bits in row["logits"])
        for name, left in row["left"].items():
            if left < before:
                shrunk.add(name)
            before = left
    assert shrunk == {
        "typical-p", "top-n-sigma", "epsilon", "eta", "top-a", "min-p", "top-k", "top-p", "xtc",
    }  # fmt: skip
