"""The order of rewriting and each rule, on rows that fit on a line."""

import numpy as np
import pytest

from klero import SamplingParams
from klero.rewrite import Context, rewrite_row
from klero.rewrite.bans.reference import bitmask

NEVER = -np.inf


def after(logits, prompt=(), output=(), *, ends=(), words=(), mask=None, **fields):
    """The rewritten row, rounded for the eye."""
    at = Context(SamplingParams(**fields), np.int32(prompt), np.int32(output), tuple(ends), tuple(words), mask)
    return [round(float(logit), 6) for logit in rewrite_row(np.float32(logits), at).logits]


def test_repetition_once_per_token_and_by_the_sign():
    assert after([2, -1, 0.5, 3], [0], [0, 0, 1], repetition_penalty=1.5) == [1.333333, -1.5, 0.5, 3]


def test_the_reciprocal_is_rounded_once():
    """float32(1 / 1.1) is 0x3f68ba2f; float32(1) / float32(1.1) would be one place below."""
    row = rewrite_row(np.float32([1, 9]), Context(SamplingParams(repetition_penalty=1.1), np.int32([0]))).logits
    assert row.view(np.uint32)[0] == 0x3F68BA2F


@pytest.mark.parametrize("logit, count, right", [(2, 2, 0.666667), (-1, 1, -1.95), (0, 3, -1.25)])
def test_all_three_penalties(logit, count, right):
    asked = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    assert after([logit, 9], [], [0] * count, **asked) == [right, 9]


@pytest.mark.parametrize("ignored, of_7, of_9", [(None, 0, 0), (0, -2, -1), (2, 0, -1), (3, 0, 0)])
def test_what_of_the_prompt_counts(ignored, of_7, of_9):
    row = after(np.zeros(10), [7, 7, 9], [], frequency_penalty=1, prompt_ignore_length=ignored)
    assert (row[7], row[9]) == (of_7, of_9)


def test_repetition_sees_the_whole_prompt():
    assert after([3, 3, 3], [0, 1], [], repetition_penalty=2, prompt_ignore_length=5) == [1.5, 1.5, 3]


def test_bias_comes_before_penalties():
    assert after([-0.5, 9], [0], [], logit_bias={0: 1}, repetition_penalty=2) == [0.25, 9]


def test_a_dense_bias_comes_before_a_listed_one():
    big = 2.0**24  # 1 is lost when it is added to this, and not when it is added after it has gone
    assert after([1, 0], embedding_bias=[big, 5], logit_bias={0: -big}) == [0, 5]


def test_what_is_banned_stays_banned():
    assert after([NEVER, 1], logit_bias={0: 100}) == [NEVER, 1]
    assert after([NEVER, 1], [0], [0], repetition_penalty=0.5, frequency_penalty=-2) == [NEVER, 1]
    assert after([1, 1], logit_bias={0: NEVER}) == [NEVER, 1]


def test_an_overflow_becomes_the_largest_finite_value():
    most = float(np.finfo(np.float32).max)
    assert after([3e38, -3e38], logit_bias={0: 3e38, 1: -3e38}) == [most, -most]
    assert after([3e38, -3e38], [0], [], repetition_penalty=1e-30)[0] == most
    assert after([3e38, -3e38], [0, 1], [], repetition_penalty=1e6)[1] == -most


def test_tiny_logits_are_zero_before_the_sign_is_asked():
    at = Context(SamplingParams(repetition_penalty=1e6), np.int32([0]))
    assert rewrite_row(np.float32([-5e-20, 1]), at).logits.tolist() == [0, 1]  # times 1e6 it would be no zero


BAD = [(4,), (1, 2), (3, 1, 2)]


@pytest.mark.parametrize("history, banned", [([], {4}), ([1], {4, 2}), ([3, 1], {4, 2}), ([1, 3], {4}), ([2], {4})])
def test_bad_sequences_ban_their_last_id(history, banned):
    for split in range(len(history) + 1):  # a match may start in the prompt
        row = after(np.zeros(5), history[:split], history[split:], bad_token_ids=BAD)
        assert {i for i, logit in enumerate(row) if logit == NEVER} == banned


@pytest.mark.parametrize(
    "history, banned", [([5, 6, 7, 5, 6], {7}), ([5, 6], set()), ([5], set()), ([], set()), ([1, 1, 1], {1})]
)
def test_no_trigram_twice(history, banned):
    row = after(np.zeros(10), history[:1], history[1:], no_repeat_ngram_size=3)
    assert {i for i, logit in enumerate(row) if logit == NEVER} == banned


def test_min_tokens_bans_ends_and_stops_in_the_output_alone():
    asked = {"min_tokens": 2, "stop_token_ids": [5, [1, 2]], "end_token_ids": [6]}

    def banned(prompt, output, **more):
        row = after(np.zeros(8), prompt, output, ends=[7], **asked, **more)
        return {i for i, logit in enumerate(row) if logit == NEVER}

    assert banned([1], []) == {5, 6, 7}  # the 1 of the prompt begins no stop sequence
    assert banned([0], [1]) == {5, 6, 7, 2}
    assert banned([0], [1, 1]) == set()
    assert banned([0], [1], ignore_eos=True) == {5, 6, 2}


@pytest.mark.parametrize(
    "allowed, more, left",
    [
        ([2], {}, [2]),  # BN-10: the grammar is at its end and min_tokens yields
        ([2, 4], {"end_token_ids": [4]}, [2, 4]),
        ([4], {"end_token_ids": [4], "ignore_eos": True}, [4]),
        ([2, 3], {}, [3]),  # the text may end here or go on: it goes on
        ([2, 4], {}, [4]),
        ([2, 4], {"end_token_ids": [4], "ignore_eos": True}, [2]),  # 2 is no end
        ([3], {"stop_token_ids": [3]}, []),  # a stop id is no end of the grammar
        ([], {}, []),
        (range(6), {}, [0, 1, 3, 4, 5]),
    ],
)
def test_BN_10_min_tokens_yields_where_a_mask_allows_nothing_but_the_end(allowed, more, left):
    row = after(np.zeros(6), [0], [5], ends=[2], mask=bitmask(allowed, 6), min_tokens=8, **more)
    assert [i for i, logit in enumerate(row) if logit != NEVER] == left


def test_what_an_empty_mask_says_is_not_the_end():
    def awaits(allowed, output=()):
        asked = SamplingParams(min_tokens=1)
        return Context(asked, np.int32([0]), np.int32(output), (2,), mask=bitmask(allowed, 6)).awaits_min_tokens

    assert [awaits([2]), awaits([]), awaits([2, 3]), awaits([3], [1])] == [False, True, True, False]


def test_a_mask_that_is_too_narrow_for_the_end_allows_none():
    mask = np.int32([0])
    assert after(np.zeros(40), ends=[35], mask=mask, min_tokens=1) == [NEVER] * 40
    assert after(np.zeros(40), ends=[3, 35], mask=bitmask([3], 32), min_tokens=1)[3] == 0


def test_allow_lists_and_masks_meet():
    assert after([1, 2, 3, 4], allowed_token_ids=[1, 2]) == [NEVER, 2, 3, NEVER]
    assert after([1, 2, 3, 4], allowed_token_ids=[1, 2], mask=bitmask([0, 2], 4)) == [NEVER, NEVER, 3, NEVER]
    assert after(np.zeros(40), mask=np.int32([-1]))[31:33] == [0, NEVER]  # beyond the mask


def test_stages_and_rules_are_told():
    at = Context(SamplingParams(logit_bias={0: 1, 1: NEVER}, bad_token_ids=[2]), mask=np.int32([-1]))
    row = rewrite_row(np.float32([1, 2, 3]), at)
    assert row.stages == (("logit_bias", 2, 2), ("grammar and masks", 0, 2), ("bad_token_ids", 1, 1))
    assert row.rules == ("logit_bias", "bad_token_ids")


def test_a_processor_sees_real_ids_and_lifts_no_ban():
    seen = []

    def lift(token_ids, row):
        seen.append(token_ids.tolist())
        row[:] = 5

    def double(token_ids, row):
        return row * 2

    row = after([1, 2, 3], [1], [0, 2], bad_token_ids=[1], logits_processors=[lift, double])
    assert row == [10, NEVER, 10]
    assert seen == [[1, 0, 2]]


class Panic(BaseException):
    """What bindings of other languages raise: no Exception."""


def panic(token_ids, row):
    raise Panic


@pytest.mark.parametrize(
    "processor, says",
    [
        (lambda ids, row: 1 / 0, "raised ZeroDivisionError"),
        (lambda ids, row: row[:2], r"shape \(2,\); it must return a row \(3,\)"),
        (lambda ids, row: row * np.nan, "NaN or \\+inf"),
        (lambda ids, row: row + np.inf, "NaN or \\+inf"),
        (lambda ids, row: "text", "must return real numbers"),
        (lambda ids, row: row + 1j, "must return real numbers"),
        (panic, "raised Panic"),
    ],
)
def test_a_processor_that_fails_is_told(processor, says):
    at = Context(SamplingParams(logits_processors=[processor]))
    error = rewrite_row(np.float32([1, 2, 3]), at).error
    assert error is not None
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(error)
