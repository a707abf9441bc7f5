"""Faults that other engines had with logprobs, each with the right result; the library alone."""

import numpy as np
import pytest
from tests.faults.rows import BACKENDS

from klero import SamplingParams, sample, score

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def said(backend, logits, masks=None, **fields):
    """What is said about the token of one row."""
    params = SamplingParams(**fields)
    return sample(np.float32([logits]), params, positions=0, seeds=3, masks=masks, backend=backend).logprobs


def near(values):
    return pytest.approx(values, abs=2e-6)


def test_LP_01_raw_and_processed_are_two_distributions(backend):
    asked = {"temperature": 0.5, "logprobs": -1}
    raw = said(backend, [1.5, 0.75, -0.5, -2.0], **asked)
    processed = said(backend, [1.5, 0.75, -0.5, -2.0], **asked, logprobs_mode="processed")
    assert raw.top.tolist() == near([-0.493414, -1.243414, -2.493414, -3.993414])
    assert processed.top.tolist() == near([-0.217011, -1.717011, -4.217011, -7.217011])


def test_LP_03_removed_tokens_are_minus_infinity_in_memory(backend):
    processed = said(backend, [2, 1, 0, -1], temperature=1, top_k=1, logprobs=3, logprobs_mode="processed")
    assert processed.top.tolist() == [0, -np.inf, -np.inf]
    raw = said(backend, [2, 1, 0, -1], temperature=1, top_k=1, logprobs=3)
    assert np.isfinite(raw.top).all()


def test_LP_06_rank_counts_the_strictly_greater(backend):
    logits = np.float32([[3, 3, 1, 0]])
    assert [score(logits, [i], backend=backend).rank[0] for i in (1, 2)] == [1, 3]
    assert score(logits, [1], backend=backend).sampled[0] == near(-0.781672)
    drawn = said(backend, logits[0], temperature=1, allowed_token_ids=[1], logprobs=0)
    assert (drawn.token_ids[0], drawn.rank[0]) == (1, 1)


def test_LP_09_more_than_the_vocabulary_is_refused_before_the_row(backend):
    with pytest.raises(ValueError, match="logprobs"):
        said(backend, [0.0] * 8, logprobs=9)


def test_LP_12_processed_is_what_was_drawn_from(backend):
    only_1_and_2 = np.int32([[0b0110]])
    asked = {"temperature": 1.0, "logprobs": 4}
    processed = said(backend, [3, 2, 1, 0], only_1_and_2, **asked, logprobs_mode="processed")
    assert dict(zip(processed.top_ids.tolist(), np.exp(processed.top).tolist(), strict=True)) == near(
        {1: 0.731059, 2: 0.268941, 0: 0.0, 3: 0.0}
    )
    raw = said(backend, [3, 2, 1, 0], only_1_and_2, **asked)
    assert np.exp(raw.top).tolist() == near([0.643914, 0.236883, 0.087144, 0.032059])


def test_LP_13_a_greedy_row_reports_a_sorted_list(backend):
    raw = said(backend, [0.1, 5.0, -2.0, 4.0, 4.5], temperature=0, logprobs=3)
    assert raw.token_ids.tolist() == [1]
    assert raw.top_ids.tolist() == [1, 4, 3]
    assert raw.top.tolist() == near([-0.684494, -1.184494, -1.684494])
