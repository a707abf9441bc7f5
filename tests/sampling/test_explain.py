"""klero.explain: the way of one row, the same token as klero.sample, and the table."""

import numpy as np
import pytest

from klero import LogitsError, ParameterError, SamplingParams, explain, sample
from klero.testing import nasty_params, nasty_rows

ROW = np.float32([2, 1, 0, -1, -np.inf])
ALL = SamplingParams(temperature=0.8, min_p=0.05, top_k=3, top_p=0.9)


def test_every_stage_in_order_with_what_it_left():
    explained = explain(ROW, ALL, seed=5, position=7)
    assert [(stage.name, stage.tokens) for stage in explained.stages] == [
        ("logits", 4), ("min-p", 3), ("top-k", 3), ("top-p", 2),
    ]  # fmt: skip
    w = np.exp((ROW[:4].astype(float) - 2) / 0.8)
    exact = [w[: stage.tokens].sum() / w.sum() for stage in explained.stages]
    assert [stage.mass for stage in explained.stages] == pytest.approx(exact, abs=1e-6)
    assert explained.kept.tolist() == [0, 1]


def test_neutral_filters_are_no_stages():
    explained = explain(ROW, SamplingParams(temperature=1, top_p=1, top_k=5, min_p=0), seed=5, position=7)
    assert [stage.name for stage in explained.stages] == ["logits"]


def test_a_greedy_row_needs_no_seed():
    explained = explain([1.0, 3.0, 3.0], SamplingParams(), position=0)
    assert explained.token == 1
    assert explained.kept.tolist() == [1]
    assert [(stage.name, stage.tokens) for stage in explained.stages] == [("logits", 3), ("greedy", 1)]


def test_the_token_is_the_one_that_sample_draws():
    rows, params = nasty_rows(200, 120, 3), nasty_params(200, 120, 3)
    sampled = sample(rows, params, positions=np.arange(200), seeds=np.arange(200), children=np.arange(200) % 3)
    for i in range(200):
        explained = explain(rows[i], params[i], seed=i, position=i, child=i % 3)
        assert (explained.token, explained.status) == (sampled.token_ids[i], sampled.status[i])
        assert len(explained.kept) == sampled.num_kept[i]
        if explained.status:
            assert (explained.stages, len(explained.kept)) == ((), 0)
        else:
            assert explained.token in explained.kept
            assert explained.stages[-1].tokens == len(explained.kept)
            left = [stage.tokens for stage in explained.stages]
            assert left == sorted(left, reverse=True)


def test_the_table():
    lines = str(explain(ROW, ALL, seed=-1, position=7, child=2)).splitlines()
    assert lines[0].split() == ["stage", "tokens", "mass"]
    assert [" ".join(line.split()[:2]) for line in lines[1:5]] == ["logits 4", "min-p 3", "top-k 3", "top-p 2"]
    assert lines[5].endswith(f"seed {2**64 - 1}, position 7, child 2")
    assert "NaN or +inf" in str(explain([np.nan, 1.0], ALL, seed=1, position=0))
    assert "every logit is -inf" in str(explain([-np.inf, -np.inf], ALL, seed=1, position=0))


def test_every_way_of_giving_a_row():
    right = explain(ROW, ALL, seed=1, position=0).token
    for row in (ROW[None], ROW.tolist(), np.repeat(ROW, 2)[::2], ROW.astype(np.float16)):
        assert explain(row, ALL, seed=1, position=0).token == right
    torch = pytest.importorskip("torch")
    assert explain(torch.from_numpy(ROW), ALL, seed=1, position=0).token == right
    assert explain(torch.from_numpy(ROW).to(torch.bfloat16), ALL, seed=1, position=0).token == right


def test_a_seed_in_params_or_beside_them_not_both_and_not_none():
    seeded = SamplingParams(temperature=1, seed=4)
    assert explain(ROW, seeded, position=0).seed == 4
    with pytest.raises(ParameterError, match="seed=4: stands beside"):
        explain(ROW, seeded, seed=4, position=0)
    with pytest.raises(ParameterError, match="seed=None: must be given"):
        explain(ROW, SamplingParams(temperature=1), position=0)
    with pytest.raises(ParameterError, match="seed="):
        explain(ROW, SamplingParams(temperature=1), seed=2**64, position=0)


@pytest.mark.parametrize("bad", [{"position": -1}, {"position": 0.5}, {"position": 0, "child": -1}])
def test_bad_counters(bad):
    with pytest.raises(ParameterError):
        explain(ROW, ALL, seed=1, **bad)


def test_more_than_one_row_is_refused():
    with pytest.raises(ParameterError, match="one row"):
        explain(np.zeros((2, 5), np.float32), ALL, seed=1, position=0)
    with pytest.raises(LogitsError):
        explain(np.zeros((1, 1, 5), np.float32), ALL, seed=1, position=0)
    with pytest.raises(LogitsError):
        explain(np.zeros(5), ALL, seed=1, position=0)
