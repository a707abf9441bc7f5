"""Cases from the field, kind stop_finish: when a sequence ends and which text of it is sent."""

import pytest

from klero.errors import ParameterError
from klero.finish import Finish, Finished, FinishReason, TokenBytes
from klero.params import SamplingParams

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def streamed(finish, ids):
    """Push ids until the end; the delta after each."""
    deltas = []
    for token_id in ids:
        end = finish.push(token_id)
        deltas.append(finish.delta())
        if end is not None:
            break
    return deltas


def test_ST_01_a_stop_string_across_tokens_is_found_and_no_part_of_it_was_sent():
    vocabulary = TokenBytes.from_list([b"al", b"pha be", b"ta gam", b"ma"])
    finish = Finish(SamplingParams(stop="beta"), end_token_ids=(), vocabulary=vocabulary, max_tokens=16)
    assert streamed(finish, [0, 1, 2, 3]) == ["al", "pha ", ""]
    assert finish.finished == Finished(STOP, "beta")
    assert finish.num_tokens == 3
    assert finish.text == "alpha "


def test_ST_03_only_an_ambiguous_tail_waits():
    vocabulary = TokenBytes.from_list([b"Hello", b" wor", b"ld ST", b"ART"])
    finish = Finish(SamplingParams(stop="STOP!!"), end_token_ids=(), vocabulary=vocabulary, max_tokens=4)
    assert streamed(finish, [0, 1, 2, 3]) == ["Hello", " wor", "ld ", "START"]
    assert finish.finished == Finished(LENGTH)
    assert finish.text == "Hello world START"


@pytest.mark.parametrize("stop", [[""], ["a", ""]])
def test_ST_04_an_empty_stop_string_is_refused(stop):
    with pytest.raises(ParameterError, match="stop") as caught:
        SamplingParams(stop=stop)
    assert caught.value.field == "stop"


@pytest.mark.parametrize("stop, kept", [(None, ()), ([], ()), ("x", ("x",))])
def test_ST_04_no_stop_and_a_single_one_are_accepted(stop, kept):
    assert SamplingParams(stop=stop).stop == kept


def test_ST_06_stops_of_the_caller_leave_the_models_end_ids_on_for_every_child():
    vocabulary = TokenBytes.from_list([b"0", b"1", b"<2>", b"3", b"4", b"5", b"6", b"<7>"], special={2, 7})
    params = SamplingParams(stop=["Result:"], n=2)
    for _child in range(params.n):
        finish = Finish(params, end_token_ids=(2, 7), vocabulary=vocabulary, max_tokens=16)
        assert finish.push_all([5, 6, 7, 5]) == 3
        assert finish.token_ids == (5, 6, 7)
        assert finish.finished == Finished(STOP)
        assert finish.text == "56"


@pytest.mark.parametrize(
    "stop_token_ids, num_kept, finished", [([4], 6, Finished(STOP, 4)), ([], 7, Finished(LENGTH))]
)
def test_ST_07_ignore_eos_covers_all_end_ids_of_the_model_and_no_stop_id(stop_token_ids, num_kept, finished):
    params = SamplingParams(ignore_eos=True, stop_token_ids=stop_token_ids)
    finish = Finish(params, end_token_ids=(2, 3), max_tokens=7)
    ids = (5, 2, 5, 3, 5, 4, 5)
    assert finish.push_all(ids) == num_kept
    assert finish.token_ids == ids[:num_kept]
    assert finish.finished == finished


def test_ST_09_a_stop_string_sees_the_text_of_a_hidden_special_token():
    vocabulary = TokenBytes.from_list([b"", b"", b"", b"", b"", b"a", b"b", b"<|fin|>"], special={7})
    params = SamplingParams(stop="<|fin|>", skip_special_tokens=True)
    finish = Finish(params, end_token_ids=(), vocabulary=vocabulary, max_tokens=16)
    assert finish.push_all([5, 6, 7, 5, 5]) == 3
    assert finish.finished == Finished(STOP, "<|fin|>")
    assert finish.text == "ab"


@pytest.mark.parametrize(
    "max_tokens, kept, reason", [(5, (31, 32, 2), STOP), (2, (31, 32), LENGTH), (3, (31, 32, 2), STOP)]
)
def test_ST_10_an_accepted_run_ends_where_plain_decoding_would(max_tokens, kept, reason):
    finish = Finish(SamplingParams(), end_token_ids=(2,), max_tokens=max_tokens)
    assert finish.push_all([31, 32, 2, 40, 41, 42]) == len(kept)
    assert finish.token_ids == kept
    assert finish.finished == Finished(reason)
