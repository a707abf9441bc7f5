"""Scores of given tokens: what they add up to, which tokens count, and how texts are cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klero import LLM, SamplingParams
from klero.errors import OptionError, RequestError
from klero.evals import Pair, Scored, join_pair, score_pairs, windows
from klero.testing.models import ToyModel


@pytest.fixture(scope="module")
def llm():
    return LLM(ToyModel(vocab_size=50), max_num_batched_tokens=8)


@pytest.fixture(scope="module")
def tiny(tiny_model):
    return LLM(tiny_model, num_blocks=32)


def made(logprobs, greedy, first):
    ids = np.arange(len(logprobs), dtype=np.int32)
    return Scored(ids, np.array(logprobs, np.float32), np.array(greedy), first, None, True)


@pytest.mark.parametrize(
    "first, total, count, is_greedy",
    [(0, -3.5, 3, False), (1, -3.5, 3, False), (2, -2.5, 2, True), (3, -2.0, 1, True)],
)
def test_what_counts_is_from_first_on_and_never_token_0(first, total, count, is_greedy):
    scored = made([np.nan, -1, -0.5, -2], [False, False, True, True], first)
    assert (scored.total, scored.count, scored.is_greedy) == (total, count, is_greedy)


def test_where_no_token_counts_there_is_no_sum(llm):
    for scored in (made([np.nan, -1], [False, True], 2), *score_pairs(llm, [Pair([5], 0)])):
        assert (scored.count, scored.is_greedy) == (0, None)
        assert np.isnan(scored.total)


def test_an_impossible_token_makes_the_sum_so():
    assert made([np.nan, -1, -np.inf], [False, True, False], 1).total == -np.inf


def test_a_sum_is_in_binary64():
    assert made([np.nan, -(2**24), -1, -1], [False] * 4, 1).total == -(2**24) - 2


def test_a_greedy_answer_is_greedy_and_another_is_not(llm):
    prompt = [3, 1, 4, 1, 5]
    (answer,) = llm.generate([prompt], SamplingParams(max_tokens=4, logprobs=0, ignore_eos=True))
    drawn = answer.outputs[0]
    other = (drawn.token_ids[-1] + 1) % 50
    whole = [*prompt, *drawn.token_ids]
    same, changed = score_pairs(llm, [Pair(whole, 5), Pair([*whole[:-1], other], 5)])
    assert same.is_greedy
    assert not changed.is_greedy
    assert changed.greedy[5:].tolist() == [True, True, True, False]
    assert same.logprobs[5:].tobytes() == drawn.logprobs.raw.tobytes()
    assert same.total == drawn.cumulative_logprob
    assert same.reproducible == drawn.reproducible
    assert same.error is None


def test_a_score_does_not_depend_on_where_the_pair_is_split_or_what_else_is_asked(llm):
    ids = [7, 7, 9, 2, 30, 49, 0, 11, 5, 8]
    alone = score_pairs(llm, [Pair(ids, 0)])[0]
    others = score_pairs(llm, [Pair([1, 2], 1), *(Pair(ids, first) for first in range(10)), Pair([5] * 20, 3)])[1:-1]
    assert all(one.logprobs.tobytes() == alone.logprobs.tobytes() for one in others)
    assert [one.count for one in others] == [9, 9, 8, 7, 6, 5, 4, 3, 2, 1]
    assert np.isnan(alone.logprobs[0])


def test_nothing_asked_nothing_done():
    assert score_pairs(None, []) == []


def test_a_pair_that_cannot_be_scored_is_named(llm):
    with pytest.raises(RequestError, match=r"prompts\[1\].*50"):
        score_pairs(llm, [Pair([1], 0), Pair([50], 0)])


@pytest.mark.parametrize(
    "pair, words",
    [
        (Pair([1, 2, 3], -1), r"pairs\[1\].first=-1: must be an integer in \[0, 2\]"),
        (Pair([1, 2, 3], 3), r"pairs\[1\].first=3: must be an integer in \[0, 2\]"),  # nothing would be scored
        (Pair([1, 2, 3], 1.0), r"pairs\[1\].first=1.0: must be an integer"),
        (Pair([], 0), r"pairs\[1\].first=0: there is no token to score"),
        ("text", r"pairs\[1\]='text': must be a Pair; join_pair\(llm, context, continuation\) makes one"),
        (([1, 2], 0), r"must be a Pair"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_pair_is_refused(llm, pair, words):
    with pytest.raises(RequestError, match=words):
        score_pairs(llm, [Pair([1], 0), pair])


def test_a_failed_row_is_an_error_of_its_own():
    class Broken(ToyModel):
        def rows(self, states):
            rows = super().rows(states)
            rows[np.array(states) == broken] = np.nan
            return rows

    from klero.testing.models import state_after

    broken = state_after(state_after(0, 1, 0), 2, 1)
    bad, good = score_pairs(LLM(Broken(vocab_size=8)), [Pair([1, 2, 3], 1), Pair([2, 2, 3], 1)])
    assert "NaN" in bad.error
    assert good.error is None
    assert (np.isnan(bad.total), bad.is_greedy) == (True, None)
    assert np.isfinite(good.total)


def test_texts_are_joined_before_they_are_cut_into_tokens(tiny):
    whole = tiny.tokenize("one two")
    assert join_pair(tiny, "one", " two") == (whole, 3)
    assert join_pair(tiny, "", "one two") == (whole, 0)
    assert join_pair(tiny, "one two", "") == (whole, 7)


def test_a_token_across_the_border_belongs_to_the_continuation():
    class Merging:
        """Two letters a token."""

        def tokenize(self, text):
            return [text[i : i + 2] for i in range(0, len(text), 2)]

    assert join_pair(Merging(), "abc", "def") == (["ab", "cd", "ef"], 1)
    assert join_pair(Merging(), "abcd", "ef") == (["ab", "cd", "ef"], 2)


def test_windows_by_eye():
    assert list(windows([1, 2, 3, 4, 5, 6, 7], 0, 4)) == [([0, 1, 2, 3], 1), ([3, 4, 5, 6], 1), ([4, 5, 6, 7], 3)]
    assert list(windows([1, 2, 3], 0, 4)) == [([0, 1, 2, 3], 1)]
    assert list(windows([], 0, 4)) == []
    with pytest.raises(OptionError, match="room=1: must be at least 2"):
        list(windows([1], 0, 1))


@given(st.integers(0, 60), st.integers(2, 20))
def test_windows_score_each_token_once_with_as_much_context_as_fits(num, room):
    ids = list(range(1, num + 1))
    cut = list(windows(ids, 0, room))
    assert [token for pair in cut for token in pair.token_ids[pair.first :]] == ids
    assert all(pair.first >= 1 and len(pair.token_ids) <= room for pair in cut)
    assert all(len(pair.token_ids) == min(room, num + 1) for pair in cut)
    assert all(list(pair.token_ids) == list(range(pair.token_ids[0], pair.token_ids[-1] + 1)) for pair in cut)
