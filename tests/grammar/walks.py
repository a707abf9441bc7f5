"""A vocabulary of bytes, and walks through a grammar over it: texts read token by token, texts written at random."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from klero.finish import TokenBytes

END = 256
BYTES = TokenBytes.from_list([bytes([byte]) for byte in range(256)] + [b"<end>"], special=[END])
NUM_BYTES = 257
"""Token i is byte i; 256 is the end."""

CLOSING = b'"}]'
LIKELY = b'"}]{[:,0123456789-.eE\\u/tfn aAzZ_\n'


def allowed(matcher: Any, num_tokens: int) -> npt.NDArray[np.bool_]:
    """Which ids may come next, one flag each. Bits beyond the vocabulary must be 0."""
    words = np.full(-(-num_tokens // 32), -1, np.int32)
    matcher.fill(words)
    flags = np.unpackbits(words.view(np.uint8), bitorder="little").astype(np.bool_)
    assert not flags[num_tokens:].any(), "a bit beyond the vocabulary is set"
    return flags[:num_tokens]


def num_read(matcher: Any, token_ids: Sequence[int], num_tokens: int) -> int:
    """How many of these tokens the grammar takes before one that it does not. The mask and `accept` must agree."""
    for index, token_id in enumerate(token_ids):
        may = bool(allowed(matcher, num_tokens)[token_id])
        assert matcher.accept(token_id) == may, f"mask and accept disagree on token {token_id} after {index}"
        if not may:
            return index
    return len(token_ids)


def reads(matcher: Any, token_ids: Sequence[int], num_tokens: int, end_id: int) -> bool:
    """Whether the grammar takes all of these tokens and then the end."""
    if num_read(matcher, token_ids, num_tokens) < len(token_ids):
        return False
    return bool(allowed(matcher, num_tokens)[end_id])


def fragments(value: Any) -> Iterator[bytes]:
    """What a schema says, as pieces of text that a writer may copy: every string and number in it, plain, quoted, as a
    property and escaped."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from fragments(key)
            yield from fragments(below)
    elif isinstance(value, list):
        for below in value:
            yield from fragments(below)
    elif isinstance(value, str):
        quoted = json.dumps(value, ensure_ascii=False)
        yield from (text.encode(errors="replace") for text in (quoted, quoted + ":", quoted[1:]))
        if value and value[0].isascii():
            yield f'"\\u{ord(value[0]):04x}{quoted[2:]}'.encode(errors="replace")
    elif value is not None:
        yield str(value).lower().encode()


def write(
    matcher: Any, chance: random.Random, pieces: Sequence[bytes] = (), patience: int = 40, limit: int = 400
) -> tuple[bytes, bool]:
    """Write a text of bytes at random, and whether it came to its end within `limit` bytes.

    pieces: copied where they fit. After `patience` bytes whatever closes is preferred, so that most texts end.
    """
    text, copied = bytearray(), b""
    while len(text) < limit:
        flags = allowed(matcher, NUM_BYTES)
        ids = np.flatnonzero(flags)
        assert len(ids), f"nothing may follow {bytes(text)!r}"
        closing = len(text) >= patience
        if flags[END] and (len(ids) == 1 or closing or chance.random() < 0.3):
            return bytes(text), True
        if not copied and not closing and pieces and chance.random() < 0.4:
            copied = chance.choice(pieces)
        if copied and flags[copied[0]]:
            byte, copied = copied[0], copied[1:]
        else:
            copied, byte = b"", _pick(flags, ids[ids != END], chance, closing)
        assert matcher.accept(byte), f"byte {byte} was allowed after {bytes(text)!r} and is not taken"
        text.append(byte)
    return bytes(text), False


def _pick(flags: npt.NDArray[np.bool_], ids: npt.NDArray[np.int64], chance: random.Random, closing: bool) -> int:
    for likely, probability in ((CLOSING, 0.8 if closing else 0.2), (LIKELY, 0.7)):
        fitting = [byte for byte in likely if flags[byte]]
        if fitting and chance.random() < probability:
            return chance.choice(fitting)
    return int(chance.choice(ids))
