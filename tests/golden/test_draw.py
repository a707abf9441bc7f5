"""Every value of draw.json, on the reference and on the kernels; also for a plain CPU, and without Numba."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.golden import make

from klero import SamplingParams, explain, sample
from klero.device import HAVE_NUMBA
from klero.lots import mass, noise, philox, pinned
from klero.params import seed_bits
from klero.testing import assert_bits, assert_set

GOLDEN = json.loads(make.PATH.read_text())
ROWS = {row["name"]: row for row in GOLDEN["rows"]}
BACKENDS = ["reference", "cpu"] if HAVE_NUMBA else ["reference"]
ROOT = Path(__file__).resolve().parents[2]

REFERENCE = SimpleNamespace(
    exp32=pinned.exp32,
    log32=pinned.log32,
    lot_of_word=noise.lot_of_word,
    lots_of_ids=noise.lots_of_ids,
    uniform=noise.uniform,
    philox4x32=lambda counters, keys: np.stack(
        [philox.philox4x32(c, (int(k[0]), int(k[1]))) for c, k in zip(counters, keys, strict=True)]
    ),
)


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture
def lots(backend):
    if backend == "reference":
        return REFERENCE
    from tests.lots import kernels

    return kernels


def at(case):
    return int(case["seed"]), case["position"], case["child"], case["purpose"]


def test_the_maker_makes_the_file_as_it_is():
    assert make.main(["--check"]) == 0


def test_the_maker_sees_a_changed_value(tmp_path, monkeypatch, capsys):
    changed = tmp_path / "draw.json"
    changed.write_text(make.PATH.read_text().replace('"token":2', '"token":1', 1))
    monkeypatch.setattr(make, "PATH", changed)
    assert make.main(["--check"]) == 1
    assert "draw.json:" in capsys.readouterr().out


def test_exp32(lots):
    golden = GOLDEN["exp32"]
    assert_bits(lots.exp32(make.floats(golden["x"])), make.floats(golden["y"]))


def test_log32(lots):
    golden = GOLDEN["log32"]
    assert_bits(lots.log32(make.floats(golden["x"])), make.floats(golden["y"]))


def test_lots_of_words(lots):
    golden = GOLDEN["gumbel"]
    assert_bits(lots.lot_of_word(make.words(golden["word"])), make.floats(golden["g"]))


def test_philox(lots):
    golden = GOLDEN["philox4x32_10"]
    counters = np.stack([make.words(case["counter"]) for case in golden])
    keys = np.stack([make.words(case["key"]) for case in golden])
    assert_bits(lots.philox4x32(counters, keys), np.stack([make.words(case["words"]) for case in golden]))


@pytest.mark.parametrize("case", GOLDEN["noise"], ids=lambda case: f"seed {case['seed']}")
def test_noise(lots, case):
    assert_bits(lots.lots_of_ids(case["token_id"], *at(case)), make.floats(case["g"]))


@pytest.mark.parametrize("case", GOLDEN["uniform"], ids=lambda case: f"seed {case['seed']}")
def test_uniform(lots, case):
    assert_bits(lots.uniform(*at(case)), make.floats([case["u"]])[0])


def test_lse():
    golden = GOLDEN["lse"]
    assert_bits(np.array([mass.lse(int(q)) for q in golden["Q"]]), make.floats(golden["y"]))


@pytest.mark.parametrize("name", ROWS)
def test_row(backend, name):
    row = ROWS[name]
    raw, params = make.floats(row["logits"]), SamplingParams(**row["params"])
    at_row = {"positions": row["position"], "children": row["child"]}
    drawn = sample(raw[None], params, seeds=int(row["seed"]), backend=backend, **at_row)
    assert drawn.token_ids.tolist() == [row["token"]]
    assert drawn.status.tolist() == [0]
    assert drawn.seeds.tolist() == [seed_bits(int(row["seed"]))]
    assert params.greedy == ("kept" not in row)
    assert drawn.num_kept.tolist() == [row.get("num_kept", 1)]


@pytest.mark.parametrize("name", [name for name in ROWS if "kept" in ROWS[name]])
def test_kept_set(lots, name):
    row = ROWS[name]
    raw, params = make.floats(row["logits"]), SamplingParams(**row["params"])
    if lots is REFERENCE:
        kept = explain(raw, params, seed=int(row["seed"]), position=row["position"], child=row["child"]).kept
    else:
        kept = lots.kept(raw, params.row)
    assert_set(kept, row["kept"])


@pytest.mark.parametrize("name", [name for name in ROWS if "kept" in ROWS[name]])
def test_logprobs_of_section_8(name):
    row = ROWS[name]
    params = SamplingParams(**row["params"])
    made = make.logprobs_of(make.floats(row["logits"]), np.array(row["kept"]), row["token"], params.row.reciprocal)
    assert made == {key: row[key] for key in made}
    assert set(made) == {"processed_logprob", "raw_logprob", "num_kept", "ln_kept_mass"}


NUM_VALUES = 4 + len(GOLDEN["noise"]) + len(GOLDEN["uniform"]) + len(ROWS) + sum("kept" in row for row in ROWS.values())
"""Tests of one backend."""

PLAIN_CPU = """
import sys, pytest
code = pytest.main(sys.argv[1:])
import numba, klero.device
assert numba.config.CPU_NAME == "generic" and klero.device.HAVE_NUMBA
sys.exit(code)
"""

WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
import pytest
code = pytest.main(sys.argv[1:])
import klero.device
assert not klero.device.HAVE_NUMBA and klero.device.choose_backend("auto") == "reference"
assert "klero.lots.noise.cpu" not in sys.modules
sys.exit(code)
"""


def run_again(program, only, **environment):
    """Run this file's tests of one backend in a process of its own; the number that passed."""
    run = subprocess.run(
        [sys.executable, "-c", program, "-q", "-p", "no:cacheprovider", "-k", f"{only} and not again", __file__],
        cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return int(run.stdout.rsplit(" passed", 1)[0].split()[-1])


@pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba")
def test_again_on_kernels_for_a_plain_cpu():
    cache = os.environ["NUMBA_CACHE_DIR"] + "-generic"
    assert run_again(PLAIN_CPU, "cpu", NUMBA_CPU_NAME="generic", NUMBA_CACHE_DIR=cache) == NUM_VALUES


def test_again_where_numba_cannot_be_imported():
    assert run_again(WITHOUT_NUMBA, "reference") == NUM_VALUES
