"""Cases from the field, kind utf8_stream: characters whose bytes arrive in several tokens."""

from klero.finish import Finish, TokenBytes
from klero.params import SamplingParams


def streamed(bytes_of_ids, num_prompt=0):
    """Deltas of all tokens after the first `num_prompt`, which are the prompt; the last one ends the text."""
    num_tokens = len(bytes_of_ids) - num_prompt
    finish = Finish(
        SamplingParams(),
        end_token_ids=(),
        prompt_ids=range(num_prompt),
        vocabulary=TokenBytes.from_list(bytes_of_ids),
        max_tokens=num_tokens,
    )
    deltas = []
    for token_id in range(num_prompt, len(bytes_of_ids)):
        finish.push(token_id)
        deltas.append(finish.delta())
    assert finish.num_tokens == num_tokens
    assert finish.text == "".join(deltas)
    return deltas


def test_U8_01_bytes_of_an_unfinished_character_wait_for_the_next_token():
    assert streamed([b"\x20\xf0\x9f", b"\x98\x80", b"\xc4", b"\x8f\x21"]) == [" ", "😀", "", "ď!"]


def test_U8_03_what_can_become_no_character_is_replaced_at_once():
    # The second token is U+FFFD itself, the fourth a byte that no character has.
    assert streamed([b"a", b"\xef\xbf\xbd", b"b", b"\xff", b" c"]) == ["a", "\ufffd", "b", "\ufffd", " c"]


def test_U8_04_half_a_character_at_the_end_of_the_prompt_brings_no_prompt_text():
    # Of the two answers that the case allows klero gives the one with the whole character.
    assert streamed([b"He", b"\xe2\x82", b"\xac", b"!"], num_prompt=2) == ["€", "!"]
