"""JSON as it is sent: compact, in UTF-8, and without NaN."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

PIECE = 64  # entries of a list that are written without a break
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def dump(value: Any) -> bytes:
    """JSON, compact, in UTF-8. ValueError for NaN and infinities, which no answer has."""
    return _encode(value).encode()


def in_pieces(value: Any) -> Iterator[bytes]:
    """The same bytes in pieces, none of more than PIECE entries of a list: other threads may run between them."""
    if isinstance(value, dict):
        for i, (name, item) in enumerate(value.items()):
            yield (b"," if i else b"{") + dump(name) + b":"
            yield from in_pieces(item)
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and len(value) > PIECE:
        for i in range(0, len(value), PIECE):
            yield (b"," if i else b"[") + dump(value[i : i + PIECE])[1:-1]
        yield b"]"
    else:
        yield dump(value)
