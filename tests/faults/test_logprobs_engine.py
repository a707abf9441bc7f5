"""Cases from the field, kind logprobs, through the engine."""

from __future__ import annotations

import pytest

from klero import ParameterError, SamplingParams
from klero.engine import LLM, Engine
from klero.testing.models import ToyModel


def test_LP_07_zero_is_not_off():
    """None: nothing; 0: one number per token, and a list of at most the token itself."""
    llm = LLM(ToyModel())
    off, zero = (
        llm.generate([[1]], SamplingParams(max_tokens=3, logprobs=num, prompt_logprobs=num))[0] for num in (None, 0)
    )
    assert off.outputs[0].logprobs is None
    assert off.prompt_logprobs is None
    (choice,) = zero.outputs
    assert len(choice.logprobs) == 3
    assert [list(choice.logprobs[i]) for i in range(3)] == [[token] for token in choice.token_ids]
    assert choice.logprobs.top_ids.tolist() == []
    assert len(zero.prompt_logprobs) == 1


def test_LP_09_more_than_the_vocabulary_is_refused_before_it_enters():
    engine = Engine(ToyModel(vocab_size=8))
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(ParameterError, match=rf"{name}.* at most 8"):
            engine.add_request("wide", [1], SamplingParams(max_tokens=2, **{name: 9}))
    engine.add_request("other", [1], SamplingParams(max_tokens=2, logprobs=2))
    outputs = engine.step() + engine.step()
    (choice,) = outputs[0].outputs
    assert choice.finish_reason == "length"
    assert [len(choice.logprobs.top_of(i)[0]) for i in range(2)] == [2, 2]
