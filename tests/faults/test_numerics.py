"""Cases from the field, kind numerics."""

import numpy as np
import pytest

from klero import SamplingParams, explain, sample
from klero.device import HAVE_NUMBA

BACKENDS = ["reference", pytest.param("cpu", marks=pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba"))]
ROW = [3.25, 4.5, 12.75, -1.5]
TEMPERATURES = [1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 5e-324, 0.0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_SM_01_tiny_temperatures_come_to_the_greedy_token(temperature, dtype, backend):
    params = SamplingParams(temperature=temperature)
    drawn = sample(np.array([ROW] * 64, dtype), params, positions=np.arange(64), seeds=1, backend=backend)
    assert set(drawn.token_ids.tolist()) == {2}
    assert set(drawn.status.tolist()) == {0}


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_SM_01_what_is_told_about_the_row_is_finite(temperature):
    explained = explain(np.float16(ROW), SamplingParams(temperature=temperature), seed=1, position=0)
    assert explained.token == 2
    assert all(0 < stage.mass <= 1 for stage in explained.stages)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_SM_01_neighbours_do_not_move(dtype, backend):
    warm = SamplingParams(temperature=0.9)
    rows = np.array([ROW] * 40, dtype)
    right = sample(rows, warm, positions=0, seeds=np.arange(40), backend=backend).token_ids
    for temperature in TEMPERATURES:
        params = [warm, SamplingParams(temperature=temperature)] * 20
        drawn = sample(rows, params, positions=0, seeds=np.arange(40), backend=backend).token_ids
        assert drawn[::2].tolist() == right[::2].tolist()
        assert set(drawn[1::2].tolist()) == {2}


@pytest.mark.parametrize("backend", BACKENDS)
def test_SM_01_a_gap_that_is_small_beside_the_temperature_still_draws(backend):
    """At 1e-6, the smallest temperature that draws, equal tokens share; below it the lowest id is taken."""
    row = np.tile(np.float32([3, 3, 1]), (200, 1))
    at = {"positions": np.arange(200), "seeds": 1, "backend": backend}
    assert set(sample(row, SamplingParams(temperature=1e-6), **at).token_ids.tolist()) == {0, 1}
    assert set(sample(row, SamplingParams(temperature=9.9e-7), **at).token_ids.tolist()) == {0}
