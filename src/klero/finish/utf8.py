"""Decode UTF-8 that arrives in pieces, never showing half a character."""

from __future__ import annotations

import codecs

_new_decoder = codecs.getincrementaldecoder("utf-8")
_NUM_HALF_BYTES = 3  # a character has at most 4 bytes, so at most 3 can wait for the rest


class Utf8Decoder:
    """Turn pieces of bytes into characters as soon as these are whole.

    Bytes wait only while they are a prefix of some character (at most 3 bytes); bytes that can become none
    give U+FFFD at once, as many as `bytes.decode(errors="replace")` gives. So the pieces' texts, with
    `flush`, join to the decoding of the joined bytes.
    """

    def __init__(self, pending: bytes = b"") -> None:
        self._decoder = _new_decoder("replace")
        self._decoder.setstate((pending, 0))

    @property
    def pending(self) -> bytes:
        """The bytes that wait for the rest of their character."""
        return self._decoder.getstate()[0]

    def push(self, data: bytes) -> str:
        """Return the characters that `data` completes."""
        text = self._decoder.decode(data)
        pending = self.pending
        # CPython lets the first two bytes of a surrogate wait, but no third byte can make them a character.
        if len(pending) == 2 and pending[0] == 0xED and pending[1] >= 0xA0:
            text += self.flush()
        return text

    def flush(self) -> str:
        """End the text here: return U+FFFD for what waits, and wait for nothing."""
        return self._decoder.decode(b"", final=True)


def pending_of_bytes(data: bytes) -> bytes:
    """Return the bytes at the end of `data` that begin a character and lack its rest (0 to 3 bytes)."""
    decoder = Utf8Decoder()
    decoder.push(data[-_NUM_HALF_BYTES:])  # UTF-8 is self-synchronising: what waits begins in here
    return decoder.pending


def continues(half: bytes, data: bytes) -> bool:
    """Say whether the first byte of `data` carries on the unfinished character `half`."""
    joined = half + data[:1]
    decoder = Utf8Decoder()
    return decoder.push(joined).encode() + decoder.pending == joined
