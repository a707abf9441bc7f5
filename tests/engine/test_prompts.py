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


def test_ids_behind_embeddings_come_in_every_shape():
    llm, embeds = LLM(ToyModel()), np.ones((2, 4), np.float32)
    ask = SamplingParams(max_tokens=2)
    for ids in ([0], np.array([0]), (0,), np.array([1, 2]), [], None, np.array([], int)):
        (output,) = llm.generate({"prompt_embeds": embeds, "prompt_token_ids": ids}, ask)
        given = [] if ids is None else list(ids)
        assert list(output.prompt_token_ids) == given
        (again,) = llm.generate([{"prompt_embeds": embeds.tolist(), "prompt_token_ids": given}], ask)
        assert again.outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize(
    "embeds, words",
    [
        (np.ones((2, 5), np.float32), r"shape \(2, 5\), must be \[positions, 4\]"),
        (np.ones(4, np.float32), r"shape \(4,\)"),
        (np.ones((0, 4), np.float32), "at least one position"),
        (np.full((1, 4), np.nan, np.float32), "must be finite"),
        (np.ones((1, 4), complex), "of floats, and this is complex128"),
        (np.ones((1, 4), np.int64), "of floats, and this is int64"),
        ("abcd", "of floats"),
        ([[1.0], [2.0, 3.0]], "of floats"),
    ],
)
def test_embeddings_that_are_none(embeds, words):
    with pytest.raises(RequestError, match=words):
        LLM(ToyModel()).generate({"prompt_embeds": embeds}, SamplingParams(max_tokens=1))
