"""10,000 rows against a softmax in binary64: widths to 128,256, magnitudes to 1e4, raw and processed."""

import numpy as np
import pytest

from klero import SamplingParams, sample, score
from klero.device import HAVE_NUMBA

pytestmark = [pytest.mark.deep, pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba")]
WIDTHS = {8: 4000, 257: 3000, 4096: 1500, 32000: 1000, 128256: 500}


def log_softmax(rows):
    wide = rows.astype(np.float64)
    right = wide - wide.max(1, keepdims=True)
    return right - np.log(np.exp(right).sum(1, keepdims=True))


def worst(found, right):
    """The largest error in units of max(1, |value|)."""
    return float(np.max(np.abs(found - right) / np.maximum(1, np.abs(right))))


@pytest.mark.parametrize("width", WIDTHS)
def test_error_against_binary64(width):
    rng, worst_raw, worst_processed = np.random.default_rng(width), 0.0, 0.0
    for _ in range(WIDTHS[width] // 50):
        spread = 10.0 ** rng.uniform(-2, 4, (50, 1))
        rows = np.clip(rng.standard_normal((50, width)) * spread, -1e4, 1e4).astype(np.float32)
        tokens, r = rng.integers(0, width, 50), np.arange(50)
        worst_raw = max(worst_raw, worst(score(rows, tokens).sampled, log_softmax(rows)[r, tokens]))
        asked = SamplingParams(temperature=0.7, logprobs=0, logprobs_mode="processed")
        drawn = sample(rows, asked, positions=0, seeds=r.tolist())
        scaled = (rows - rows.max(1, keepdims=True)) * np.float32(np.float32(1) / np.float32(0.7))  # the pinned s
        right = log_softmax(scaled)[r, drawn.token_ids]
        worst_processed = max(worst_processed, worst(drawn.logprobs.processed, right))
    print(f"V={width}: worst error raw {worst_raw:.2e}, processed {worst_processed:.2e}")
    assert max(worst_raw, worst_processed) <= 2e-6
