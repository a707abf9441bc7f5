import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.finish.reference import half_of, is_half

from klero.finish.utf8 import Utf8Decoder, continues, pending_of_bytes

# One byte of every kind that UTF-8 tells apart, at the borders of its ranges.
KINDS = (
    0x41,
    0x80,
    0x8F,
    0x90,
    0x9F,
    0xA0,
    0xBF,
    0xC1,
    0xC2,
    0xDF,
    0xE0,
    0xE1,
    0xED,
    0xEF,
    0xF0,
    0xF4,
    0xF5,
    0xFF,
)


@given(st.lists(st.binary(max_size=5) | st.sampled_from([bytes([b]) for b in KINDS]), max_size=8))
def test_pieces_join_to_the_whole(pieces):
    decoder = Utf8Decoder()
    texts = [decoder.push(piece) for piece in pieces]
    assert "".join(texts) + decoder.flush() == b"".join(pieces).decode(errors="replace")
    assert decoder.flush() == ""


@pytest.mark.parametrize("length", [1, 2, 3])
def test_bytes_wait_only_while_they_can_become_a_character(length):
    for data in map(bytes, itertools.product(KINDS, repeat=length)):
        decoder = Utf8Decoder()
        text = "".join(decoder.push(bytes([byte])) for byte in data)
        assert decoder.pending == half_of(data), data
        assert pending_of_bytes(data) == half_of(data)
        assert text + decoder.flush() == data.decode(errors="replace")


def test_a_half_is_continued_by_the_bytes_that_keep_it_a_character():
    for half in (b"\xc2", b"\xe2", b"\xe2\x82", b"\xed", b"\xf0\x9f", b"\xf0\x9f\x98", b"\xef\xbf"):
        for byte in range(256):
            joined = half + bytes([byte])
            whole = joined.decode(errors="ignore") != "" and len(joined.decode(errors="replace")) == 1
            assert continues(half, bytes([byte, 0x41])) == (whole or is_half(joined)), joined


def test_a_decoder_can_start_with_waiting_bytes():
    decoder = Utf8Decoder(b"\xe2\x82")
    assert decoder.pending == b"\xe2\x82"
    assert decoder.push(b"\xac") == "€"
