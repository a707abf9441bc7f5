"""What callers write: prompts in every shape, sizes, and what progress tells them."""

from __future__ import annotations

import numpy as np
import pytest

from klero import SamplingParams
from klero.engine import LLM
from klero.errors import RequestError
from klero.testing.models import PagedToyModel, ToyModel


def test_progress_counts_requests_and_tokens():
    seen = []
    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=4)]
    LLM(ToyModel()).generate([[1], [2]], params, progress=seen.append)
    assert [(p.done, p.total, p.num_tokens) for p in seen] == [(0, 2, 2), (1, 2, 4), (1, 2, 5), (2, 2, 6)]


def test_prompts_come_in_every_shape():
    llm = LLM(ToyModel())
    greedy = SamplingParams(max_tokens=2)
    one = llm.generate([1, 2], greedy)[0].outputs[0].token_ids
    assert [o.outputs[0].token_ids for o in llm.generate([[1, 2], np.array([1, 2])], greedy)] == [one, one]
    assert llm.generate(np.array([1, 2]), greedy)[0].outputs[0].token_ids == one
    assert llm.generate([], greedy) == []
    two = llm.generate([np.array([1]), (2, 3)], greedy)
    assert [o.prompt_token_ids for o in two] == [(1,), (2, 3)]
    for prompt, words in [
        ("text", "tokenizer"),
        ("a\ud800", "surrogate"),
        (5, "must be a text"),
        ({1: 2}, "a prompt as a dict: 1: unknown"),
        ([None], "None: must be an integer"),
        ([[1.7]], "1.7: must be an integer"),
        ([[np.True_]], "must be an integer"),
    ]:
        with pytest.raises(RequestError, match=words):
            llm.generate(prompt, greedy)
    with pytest.raises(RequestError, match="from_dict"):
        llm.generate([1], {"max_tokens": 3})
    with pytest.raises(RequestError, match="2 for 3 prompts"):
        llm.generate([[1], [2], [3]], [greedy, greedy])


@pytest.mark.parametrize("option", ["max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_sizes_are_checked(option, value):
    with pytest.raises(ValueError, match=option):
        LLM(PagedToyModel(), **{option: value})
