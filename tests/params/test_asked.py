"""What the fields about logprobs come to: what is said of sampled tokens, of the prompt, and whether it fits a row."""

import pytest

from klero import ParameterError, SamplingParams
from klero.params.width import check_width

SAID = ("scores", "asks", "scores_prompt")


@pytest.mark.parametrize(
    "fields, said",
    [
        ({}, ()),
        ({"temperature": 1.0, "seed": 1}, ()),
        ({"logprobs": 0}, ("scores", "asks")),
        ({"logprobs": -1}, ("scores", "asks")),
        ({"logprob_token_ids": [0]}, ("scores", "asks")),
        ({"logprob_token_ids": []}, ()),
        ({"return_kept": True}, ("asks",)),
        ({"return_probs": True}, ("asks",)),
        ({"prompt_logprobs": 0}, ("scores_prompt",)),
        ({"return_context_logits": True}, ("scores_prompt",)),
        ({"return_generation_logits": True}, ()),
    ],
    ids=str,
)
def test_what_is_asked(fields, said):
    params = SamplingParams(**fields)
    assert tuple(name for name in SAID if getattr(params, name)) == said


def test_asking_leaves_a_request_greedy():
    fields = {"logprobs": 5, "return_kept": True, "return_probs": True, "prompt_logprobs": -1}
    assert SamplingParams(**fields).row == SamplingParams().row
    assert not SamplingParams(**fields).rewrites


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 8},  # every token, counted
        {"logprobs": -1, "prompt_logprobs": -1},
        {"prompt_logprobs": 8},
        {"logprobs": 0, "logprob_token_ids": range(8)},
    ],
    ids=str,
)
def test_what_fits_a_row_of_8(fields):
    check_width(SamplingParams(**fields), 8)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"logprobs": 9}, "logprobs=9: must be at most 8, the width of the model's logits (-1 is all)"),  # LP-09
        ({"prompt_logprobs": 9}, "prompt_logprobs=9: must be at most 8, the width of the model's logits (-1 is all)"),
        ({"logprob_token_ids": [3, 8]}, "logprob_token_ids=8: ids must be in [0, 7], the width of the model's logits"),
    ],
    ids=str,
)
def test_what_does_not_fit_a_row_of_8(fields, words):
    with pytest.raises(ParameterError) as caught:
        check_width(SamplingParams(**fields), 8)
    assert str(caught.value) == words


def test_everything_that_does_not_fit_is_said_at_once():
    params = SamplingParams(logprobs=9, prompt_logprobs=10, logprob_token_ids=[11], end_token_ids=12, logit_bias={9: 1})
    with pytest.raises(ParameterError) as caught:
        check_width(params, 8)
    assert {fault.field for fault in caught.value.faults} == {
        "logprobs", "prompt_logprobs", "logprob_token_ids", "end_token_ids", "logit_bias",
    }  # fmt: skip
