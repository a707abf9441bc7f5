"""Rules between fields: each is a fault of its own, and says nothing where one of its fields is at fault already."""

import pytest

from klero import ParameterError, SamplingParams

INF = float("inf")


def faults_of(**fields):
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**fields)
    return [fault.field for fault in caught.value.faults]


def test_min_tokens_above_max_tokens_says_both_numbers():
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(ParameterError, match=r"min_tokens=6: .*max_tokens=5"):
        SamplingParams(min_tokens=6, max_tokens=5)
    assert SamplingParams(min_tokens=6).max_tokens is None


def test_no_token_is_generated_only_where_the_prompt_is_scored():
    for fields in ({"prompt_logprobs": 0}, {"prompt_logprobs": -1}, {"return_context_logits": True}):
        assert SamplingParams(max_tokens=0, **fields).max_tokens == 0
    for fields in ({}, {"logprobs": 0}, {"return_context_logits": False}, {"return_generation_logits": True}):
        assert faults_of(max_tokens=0, **fields) == ["max_tokens"]
    with pytest.raises(ParameterError, match=r"max_tokens=0: must be at least 1; .*prompt_logprobs or return_context"):
        SamplingParams(max_new_tokens=0)
    assert faults_of(max_tokens=0, prompt_logprobs=0, min_tokens=1) == ["min_tokens"]


def test_a_mode_of_logprobs_needs_logprobs():
    for fields in ({"logprobs": 0}, {"logprobs": -1}, {"logprob_token_ids": [4]}):
        assert SamplingParams(logprobs_mode="processed", **fields).logprobs_mode == "processed"
    for fields in ({}, {"logprob_token_ids": []}, {"return_kept": True, "return_probs": True}):
        assert faults_of(logprobs_mode="processed", **fields) == ["logprobs_mode"]
    with pytest.raises(ParameterError, match=r"without .* \(logprobs=0 is enough\).* are always raw"):
        SamplingParams(logprobs_mode="processed", prompt_logprobs=1)
    assert SamplingParams(logprobs_mode="raw") == SamplingParams()  # what it is unset


def test_fields_of_the_decay_need_it():
    assert faults_of(top_p_min=0.3) == ["top_p_min"]
    assert faults_of(top_p_reset_id=3, top_p=0.9) == ["top_p_reset_id"]
    assert faults_of(top_p_reset_id=0, top_p_min=1) == ["top_p_min", "top_p_reset_id"]
    with pytest.raises(ParameterError, match=r"top_p_min=0.3: means nothing without top_p_decay"):
        SamplingParams(top_p_min=0.3)
    assert SamplingParams(top_p_decay=1, top_p_min=0.3, top_p_reset_id=3).decay is None  # given, and off


def test_a_rule_between_fields_waits_for_each_of_them():
    assert faults_of(top_p_min=0.3, top_p_decay=0) == ["top_p_decay"]
    assert faults_of(top_p_min=0) == ["top_p_min"]
    assert faults_of(min_tokens=6, max_tokens=-1) == ["max_tokens"]
    assert faults_of(max_tokens=0, prompt_logprobs=-2) == ["prompt_logprobs"]
    assert faults_of(logprobs_mode="processed", logprobs=-2) == ["logprobs"]
    assert faults_of(logprobs_mode="both") == ["logprobs_mode"]
    assert faults_of(min_tokens=6, max_tokens=5, top_k=-2) == ["top_k", "min_tokens"]
    assert faults_of(allowed_token_ids=[4], bad_token_ids=[4, -1]) == ["bad_token_ids"]


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words_ids": [[4]]},  # the case of the field: SM-10
        {"bad_token_ids": [4]},
        {"bad_token_ids": [5, 4, [4, 4]]},
        {"logit_bias": {4: -INF}},
        {"logit_bias": {"4": -INF, "5": 1}},
    ],
    ids=str,
)
def test_bans_that_leave_nothing_to_allow(fields):
    assert faults_of(allowed_token_ids=[4], **fields) == ["allowed_token_ids"]


def test_bans_from_both_sides_leave_nothing_to_allow():
    both = {"bad_token_ids": [4], "logit_bias": {6: -INF}}
    assert faults_of(allowed_token_ids=[4, 6], **both) == ["allowed_token_ids"]
    assert SamplingParams(allowed_token_ids=[4, 5, 6], **both).allowed_token_ids == (4, 5, 6)


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_token_ids": [[4, 4]]},  # depends on the history
        {"bad_token_ids": [5]},
        {"logit_bias": {4: -1e38}},  # a large number is no ban
        {"logit_bias": {5: -INF}},
    ],
    ids=str,
)
def test_bans_that_leave_something(fields):
    assert SamplingParams(allowed_token_ids=[4], **fields).allowed_token_ids == (4,)


@pytest.mark.parametrize(
    "fields",
    [{"logit_bias": {"-1": 5}}, {"logit_bias": {"abc": 1}}, {"allowed_token_ids": []}, {"bad_words_ids": [[-1]]}],
    ids=str,
)
def test_malformed_ids_are_faults_before_any_model(fields):  # BN-03
    assert len(faults_of(**fields)) == 1
