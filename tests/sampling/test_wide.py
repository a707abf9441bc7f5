"""One wide row over several threads: the same as on one, whatever the parts."""

import numpy as np
import pytest

from klero import SamplingParams, sample
from klero.device import HAVE_NUMBA
from klero.sampling import work
from klero.testing import nasty_params, nasty_rows

pytestmark = pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba")


def on_threads(monkeypatch, threads, row, params, at):
    monkeypatch.setenv("KLERO_NUM_THREADS", str(threads))
    return sample(row, params, **at)


def assert_same(a, b):
    for name in ("token_ids", "status", "num_kept"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 255, 257, 1500, 9000])
def test_the_parts_of_a_row_give_what_the_row_gives(size, dtype, monkeypatch):
    monkeypatch.setattr(work, "WIDE", 1)
    rows, params = nasty_rows(60, size, 21), nasty_params(60, size, 21)
    if dtype == "bfloat16":
        rows = (rows.view(np.uint32) >> 16).astype(np.uint16)
    for r in range(60):
        at = {"positions": 100 + r, "seeds": 7}
        alone = on_threads(monkeypatch, 1, rows[r : r + 1], params[r], at)
        for threads in (2, 3, 40):
            assert_same(on_threads(monkeypatch, threads, rows[r : r + 1], params[r], at), alone)


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"min_p": 0.01}, {"top_k": 50}])
def test_rows_wide_enough_are_split_by_themselves(fields, monkeypatch):
    called = []
    split = work.fused.wide_kernel()
    monkeypatch.setattr(work.fused, "wide_kernel", lambda: lambda *args: (called.append(args[2]), split(*args)))
    row = np.random.default_rng(1).standard_normal((1, work.WIDE + 77)).astype(np.float32)
    params, at = SamplingParams(temperature=1.0, **fields), {"positions": 3, "seeds": 5}
    assert_same(on_threads(monkeypatch, 2, row, params, at), on_threads(monkeypatch, 1, row, params, at))
    assert called == [0]


def test_two_rows_on_two_threads_are_not_split(monkeypatch):
    monkeypatch.setattr(work.fused, "wide_kernel", lambda: pytest.fail("split"))
    rows = np.zeros((2, work.WIDE), np.float32)
    assert on_threads(monkeypatch, 2, rows, SamplingParams(temperature=0.0), {"positions": 1}).token_ids.tolist() == [
        0,
        0,
    ]
