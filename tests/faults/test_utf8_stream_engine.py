"""Cases from the field, kind utf8_stream, through the engine's stream."""

import pytest

from klero import SamplingParams
from klero.engine import LLM
from klero.finish import TokenBytes
from klero.testing.models import ScriptedModel


def streamed(pieces, num_prompt=1, **params):
    """Texts of the deltas when the model says piece after piece; the first `num_prompt` are the prompt."""
    ids = list(range(len(pieces)))
    model = ScriptedModel(ids[num_prompt:], num_prompt, vocab_size=len(pieces), vocabulary=TokenBytes.from_list(pieces))
    llm = LLM(model)
    asked = SamplingParams(max_tokens=len(pieces) - num_prompt, **params)
    deltas = list(llm.stream(ids[:num_prompt], asked))
    (output,) = llm.generate(ids[:num_prompt], asked)
    assert "".join(delta.text for delta in deltas) == output.outputs[0].text
    assert [delta.token_ids for delta in deltas] == [(i,) for i in ids[num_prompt:]]
    return [delta.text for delta in deltas]


def test_U8_01_bytes_of_an_unfinished_character_wait_for_the_next_token():
    assert streamed([b"P", b"\x20\xf0\x9f", b"\x98\x80", b"\xc4", b"\x8f\x21"]) == [" ", "😀", "", "ď!"]


def test_U8_03_what_can_become_no_character_is_replaced_at_once():
    # The second token is U+FFFD itself, the fourth a byte that no character has.
    pieces = [b"P", b"a", b"\xef\xbf\xbd", b"b", b"\xff", b" c"]
    assert streamed(pieces) == ["a", "\ufffd", "b", "\ufffd", " c"]


@pytest.mark.parametrize("echo, texts", [(False, ["€", "!"]), (True, ["He€", "!"])])
def test_U8_04_half_a_character_at_the_end_of_the_prompt(echo, texts):
    # Without echo no prompt text comes; of the two answers that the case allows klero gives the whole character.
    assert streamed([b"He", b"\xe2\x82", b"\xac", b"!"], num_prompt=2, echo=echo) == texts
