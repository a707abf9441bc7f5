"""Cases from the field, kind stop_finish, through the engine and its stream."""

import pytest

from klero import SamplingParams
from klero.engine import LLM
from klero.finish import TokenBytes
from klero.testing.models import ScriptedModel


def llm_that_says(pieces, script, end_token_ids=(), special=()):
    """An LLM that says the ids of `script` whatever it is asked, in a vocabulary of these pieces."""
    vocabulary = TokenBytes.from_list(pieces, special=special)
    model = ScriptedModel(script, vocab_size=len(pieces), end_token_ids=end_token_ids, vocabulary=vocabulary)
    return LLM(model)


def streamed(llm, params):
    """The deltas of one request, and its answer, which they must come to."""
    deltas = list(llm.stream([0], params))
    (output,) = llm.generate([0], params)
    for choice in output.outputs:
        mine = [delta for delta in deltas if delta.index == choice.index]
        assert "".join(delta.text for delta in mine) == choice.text
        assert sum((delta.token_ids for delta in mine), ()) == choice.token_ids
        assert (mine[-1].finish_reason, mine[-1].stop_reason) == (choice.finish_reason, choice.stop_reason)
        assert all(delta.finish_reason is None for delta in mine[:-1])
    return [delta.text for delta in deltas], output.outputs


def test_ST_01_no_part_of_a_stop_string_across_tokens_is_sent():
    llm = llm_that_says([b"al", b"pha be", b"ta gam", b"ma"], [0, 1, 2, 3])
    texts, (choice,) = streamed(llm, SamplingParams(stop="beta", max_tokens=16))
    assert texts == ["al", "pha ", ""]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("alpha ", "stop", "beta")
    assert choice.token_ids == (0, 1, 2)


def test_ST_03_only_an_ambiguous_tail_waits_and_comes_out_at_the_end():
    llm = llm_that_says([b"Hello", b" wor", b"ld ST", b"ART"], [0, 1, 2, 3])
    texts, (choice,) = streamed(llm, SamplingParams(stop="STOP!!", max_tokens=4))
    assert texts == ["Hello", " wor", "ld ", "START"]
    assert (choice.text, choice.finish_reason) == ("Hello world START", "length")


def test_ST_06_stops_of_the_caller_leave_the_models_end_ids_on_for_every_child():
    pieces = [b"0", b"1", b"<2>", b"3", b"4", b"5", b"6", b"<7>"]
    llm = llm_that_says(pieces, [5, 6, 7, 5], end_token_ids=[2, 7], special=[2, 7])
    texts, choices = streamed(llm, SamplingParams(stop=["Result:"], n=2, max_tokens=16))
    assert texts == ["5", "5", "6", "6", "", ""]
    assert [choice.token_ids for choice in choices] == [(5, 6, 7)] * 2
    assert [(choice.finish_reason, choice.stop_reason) for choice in choices] == [("stop", None)] * 2


@pytest.mark.parametrize("stop_token_ids, num_kept, end", [([4], 6, ("stop", 4)), ([], 7, ("length", None))])
def test_ST_07_ignore_eos_covers_all_end_ids_of_the_model_and_no_stop_id(stop_token_ids, num_kept, end):
    script = [5, 2, 5, 3, 5, 4, 5]
    llm = llm_that_says([b"%d" % i for i in range(6)], script, end_token_ids=[2, 3])
    _, (choice,) = streamed(llm, SamplingParams(ignore_eos=True, stop_token_ids=stop_token_ids, max_tokens=7))
    assert choice.token_ids == tuple(script[:num_kept])
    assert (choice.finish_reason, choice.stop_reason) == end


def test_ST_09_a_stop_string_sees_the_text_of_a_hidden_special_token():
    llm = llm_that_says([b"", b"", b"", b"", b"", b"a", b"b", b"<|fin|>"], [5, 6, 7, 5, 5], special=[7])
    texts, (choice,) = streamed(llm, SamplingParams(stop="<|fin|>", max_tokens=16))
    assert texts == ["a", "b", ""]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("ab", "stop", "<|fin|>")
    assert len(choice.token_ids) == 3
