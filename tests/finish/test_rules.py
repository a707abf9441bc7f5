import numpy as np
import pytest

from klero.errors import KleroError, ModelError, ParameterError
from klero.finish import Finish, Finished, FinishReason, TokenBytes
from klero.params import SamplingParams

LETTERS = TokenBytes.from_list([b"a", b"b", b"c", b"d", b"\xe2\x82", b"\xac", b"<end>"], special={6})
A, B, C, D, HALF, REST, END = range(7)
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def finish_of(*, max_tokens=9, model_ends=(END,), vocabulary=LETTERS, **fields):
    """A `Finish`; `max_tokens` is the resolved limit, `end_token_ids` among the fields the caller's own."""
    params = SamplingParams(**fields)
    return Finish(params, end_token_ids=model_ends, vocabulary=vocabulary, max_tokens=max_tokens)


@pytest.mark.parametrize(
    "fields, ids, num_kept, finished, text",
    [
        ({}, [A, END, B], 2, Finished(STOP), "a"),
        ({"end_token_ids": B}, [A, B, C], 2, Finished(STOP), "a"),
        ({"end_token_ids": B, "ignore_eos": True}, [A, END, B], 3, Finished(STOP), "a"),
        ({"stop_token_ids": [B]}, [A, B, C], 2, Finished(STOP, B), "a"),
        ({"stop_token_ids": [[B, C]]}, [A, B, C, D], 3, Finished(STOP, (B, C)), "a"),
        ({"stop_token_ids": [C, [B, C]]}, [A, B, C], 3, Finished(STOP, (B, C)), "a"),
        ({"stop_token_ids": [[A, A, B]]}, [A, A, A, B], 4, Finished(STOP, (A, A, B)), "a"),
        ({"stop": "bc"}, [A, B, C, D], 3, Finished(STOP, "bc"), "a"),
        # the order for one token
        ({"stop_token_ids": [END], "stop": "<end>"}, [A, END], 2, Finished(STOP), "a"),
        ({"stop_token_ids": [B], "stop": "b"}, [A, B], 2, Finished(STOP, B), "a"),
        ({"stop": "b", "max_tokens": 2}, [A, B], 2, Finished(STOP, "b"), "a"),
        ({"max_tokens": 2}, [A, B, C], 2, Finished(LENGTH), "ab"),
        # kept
        ({"include_stop_str_in_output": True, "stop_token_ids": [B]}, [A, B], 2, Finished(STOP, B), "ab"),
        (
            {"include_stop_str_in_output": True, "stop_token_ids": [[B, C]]},
            [A, B, C],
            3,
            Finished(STOP, (B, C)),
            "abc",
        ),
        ({"include_stop_str_in_output": True}, [A, END], 2, Finished(STOP), "a"),
        (
            {"include_stop_str_in_output": True, "skip_special_tokens": False},
            [A, END],
            2,
            Finished(STOP),
            "a<end>",
        ),
        ({"skip_special_tokens": False}, [A, END], 2, Finished(STOP), "a"),
        # half a character before the stop
        ({}, [A, HALF, END], 3, Finished(STOP), "a�"),
        ({"stop_token_ids": [[REST, B]]}, [A, HALF, REST, B], 4, Finished(STOP, (REST, B)), "a�"),
        ({"max_tokens": 2}, [A, HALF], 2, Finished(LENGTH), "a�"),
    ],
)
def test_the_end_of_a_sequence(fields, ids, num_kept, finished, text):
    finish = finish_of(**fields)
    assert finish.push_all(ids) == num_kept
    assert finish.finished == finished
    assert finish.token_ids == tuple(ids[:num_kept])
    assert finish.num_tokens == num_kept
    assert finish.text == text


def test_the_text_of_a_partial_id_sequence_is_held_and_released_when_disproved():
    finish = finish_of(stop_token_ids=[[B, C, D]])
    deltas = []
    for token_id in (A, B, C, B, C, C, A):
        finish.push(token_id)
        deltas.append(finish.delta())
    assert deltas == ["a", "", "", "bc", "", "bcc", "a"]


def test_a_partial_id_sequence_is_released_at_the_end():
    finish = finish_of(stop_token_ids=[[B, C, D]], max_tokens=3)
    assert finish.push_all([A, B, C]) == 3
    assert finish.text == "abc"


def test_a_stop_id_whose_text_is_kept_is_kept_whole():
    vocabulary = TokenBytes.from_list([b"x", b"abc"])
    fields = {"stop_token_ids": [1], "stop": ["a"], "include_stop_str_in_output": True}
    finish = finish_of(vocabulary=vocabulary, model_ends=(), **fields)
    assert finish.push_all([0, 1]) == 2
    assert finish.finished == Finished(STOP, 1)
    assert finish.text == "xabc"


def test_stop_strings_act_without_detokenize():
    finish = finish_of(stop="bc", detokenize=False)
    assert finish.push_all([A, B, C, D]) == 3
    assert finish.finished == Finished(STOP, "bc")
    assert finish.text == finish.delta() == ""


def test_stops_by_ids_need_no_vocabulary():
    finish = finish_of(vocabulary=None, stop_token_ids=[[70000, 70001]])
    assert finish.push_all([70000, 70001, 5]) == 2
    assert finish.finished == Finished(STOP, (70000, 70001))
    assert finish.text == finish.delta() == ""


def test_stop_strings_need_a_vocabulary():
    with pytest.raises(ParameterError, match="stop_token_ids") as caught:
        finish_of(vocabulary=None, stop="x")
    assert caught.value.field == "stop"


@pytest.mark.parametrize("max_tokens, field", [(0, "max_tokens"), (2, "min_tokens")])
def test_limits_that_cannot_be_met(max_tokens, field):
    with pytest.raises(ParameterError, match=field) as caught:
        finish_of(max_tokens=max_tokens, min_tokens=3)
    assert caught.value.field == field


def test_the_prompt_does_not_count():
    params = SamplingParams(min_tokens=2, stop_token_ids=[[A, B]])
    finish = Finish(params, end_token_ids=[END], prompt_ids=[A] * 100, vocabulary=LETTERS, max_tokens=3)
    assert finish.push_all([C, C, C]) == 3
    assert finish.finished == Finished(LENGTH)


def test_ignore_eos_leaves_the_callers_own_end_ids():
    own = finish_of(min_tokens=1, ignore_eos=True, model_ends=[END, A], end_token_ids=[B])
    assert own.push_all([A, END, B]) == 3
    assert own.finished == Finished(STOP)


@pytest.mark.parametrize(
    "fields", [{"end_token_ids": [C]}, {"stop_token_ids": [C]}, {"stop_token_ids": [[B, C]]}]
)
def test_an_id_that_min_tokens_bans_ends_nothing(fields):
    finish = finish_of(min_tokens=3, **fields)
    assert finish.push_all([A, B, C, B, C]) == 5  # the third token comes while two are there: too few
    assert finish.finished is not None
    assert finish.text.startswith("abc")


def test_the_end_from_outside_releases_what_was_held():
    finish = finish_of(stop=["bcd"], stop_token_ids=[[C, D]])
    finish.push_all([A, B, C])
    assert finish.delta() == "a"
    gone = Finished(FinishReason.ABORT, None, "the client left")
    assert finish.end(FinishReason.ABORT, "the client left") == gone
    assert finish.delta() == "bc"
    assert finish.end(FinishReason.ERROR, "too late").reason == "abort"


def test_a_token_after_the_end_is_an_error():
    finish = finish_of()
    finish.push(END)
    with pytest.raises(KleroError, match="token 0 was pushed after the sequence had finished"):
        finish.push(A)
    assert finish.token_ids == (END,)


def test_an_id_without_text_leaves_everything_as_it_was():
    finish = finish_of(stop_token_ids=[[B, 99]])
    finish.push(A)
    with pytest.raises(ModelError, match="token id 98 "):
        finish.push(98)
    assert finish.token_ids == (A,)
    assert finish.push_all([B, 99]) == 2  # a stop's last id needs no text unless it is shown
    assert finish.text == "a"


def test_ids_of_numpy_become_python_ints():
    finish = finish_of()
    finish.push_all(np.array([A, B], dtype=np.int32))
    assert [type(i) for i in finish.token_ids] == [int, int]


def test_reasons_are_their_strings():
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "error", "abort"]


@pytest.mark.parametrize("grammar", [{"choice": ["ab"]}, {"json": {}}, {"json_object": True}, {"regex": "ab"}])
@pytest.mark.parametrize("fields, end", [({}, END), ({"end_token_ids": [B]}, B), ({"end_token_ids": [B]}, END)])
def test_BN_10_beside_a_grammar_an_end_id_ends_before_min_tokens(grammar, fields, end):
    finish = finish_of(min_tokens=8, **grammar, **fields)
    assert finish.push_all([A, C, end, C]) == 3
    assert finish.finished == Finished(STOP)
    assert finish.text == "ac"


def test_beside_a_grammar_min_tokens_still_holds_for_stops_and_ignored_ends():
    asked = {"min_tokens": 4, "regex": ".*", "stop_token_ids": [B], "stop": "c"}
    assert finish_of(**asked).push_all([B, C, A, B, C]) == 5
    assert finish_of(**asked, ignore_eos=True, end_token_ids=[D]).push_all([END, A, D, A]) == 3


def test_without_a_grammar_min_tokens_is_what_it_was():
    assert finish_of(min_tokens=3, thinking_token_budget=2).push_all([A, END, A, END, A]) == 4
