"""Cases from the field, kind numerics."""

import numpy as np
import pytest
from tests.faults.rows import BACKENDS, RowsModel

from klero import ParameterError, Sampler, SamplingParams, Seat, explain, sample
from klero.engine import LLM, Engine

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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_SM_10_bans_that_cover_the_allow_list_are_refused_at_once(temperature):
    for bans in ({"bad_words_ids": [[4]]}, {"bad_words_ids": [4]}, {"logit_bias": {4: -np.inf}}):
        with pytest.raises(ParameterError, match="allowed_token_ids"):
            SamplingParams(allowed_token_ids=[4], temperature=temperature, **bans)


def test_SM_10_bad_words_that_cover_the_allow_list_are_refused_at_admission():
    """Only the engine has the tokenizer, so it is the first that can tell."""
    engine = Engine(RowsModel([[0.0] * 6]), encode={"a": [4], " a": [3, 4]}.__getitem__)
    with pytest.raises(ParameterError, match="allowed_token_ids"):
        engine.add_request("r", [1], SamplingParams(allowed_token_ids=[4], bad_words="a"))
    assert engine.num_unfinished == 0
    seat = Seat("r", SamplingParams(allowed_token_ids=[4], bad_words="a"), [1], seed=0, bad_word_ids=((4,),))
    with pytest.raises(ParameterError, match="bad_words and logit_bias do not ban"):
        engine.sampler.setup_step([seat])
    engine.add_request("r", [1], SamplingParams(allowed_token_ids=[3, 4], bad_words="a", max_tokens=1))
    assert engine.step()[0].outputs[0].token_ids == (3,)


TRAP = {"allowed_token_ids": [4, 5], "bad_words_ids": [[4, 5], [4, 4]]}
TOLD = "no token is left for position 2 after the bans of allowed_token_ids, bad_token_ids: every logit is -inf"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_SM_10_a_row_that_is_emptied_later_says_so(temperature, backend):
    """After token 4 nothing may follow. The row beside it draws as it does alone."""
    trap, rows = SamplingParams(temperature=temperature, **TRAP), np.zeros((2, 6), np.float32)
    plain, at = SamplingParams(temperature=1.0), {"seeds": 3, "backend": backend}
    drawn = sample(rows, [trap, plain], prompts=[[1], [1]], outputs=[[4], [4]], **at)
    assert drawn.token_ids.tolist() == [-1, int(sample(rows[1:], plain, positions=2, **at).token_ids[0])]
    assert drawn.status.tolist() == [2, 0]
    assert drawn.messages == {0: TOLD}
    sampler = Sampler(num_slots=1, vocab_size=6, max_len=9, backend=backend)
    (slot,) = sampler.setup_step([Seat("a", trap, [1], seed=3, output_ids=[4])])
    (update,) = sampler.update_requests(sampler.sample_async(sampler.step_of([slot]), rows[:1]))
    assert (update.token_ids, update.finished, update.error) == ((), None, TOLD)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_SM_10_the_request_ends_with_what_it_had(temperature):
    model = RowsModel([[9, 0, 0, 0, 5, -50], [9, 0, 0, 0, 0, 0]])
    trap = SamplingParams(temperature=temperature, seed=1, max_tokens=5, **TRAP)
    trapped, plain = LLM(model).generate([[1], [1]], [trap, SamplingParams(max_tokens=5)])
    assert trapped.outputs[0].token_ids == (4,)
    assert trapped.outputs[0].finish_reason == "error"
    assert trapped.outputs[0].error == TOLD
    assert plain.outputs[0].token_ids == (0,) * 5
    assert plain.outputs[0].finish_reason == "length"
