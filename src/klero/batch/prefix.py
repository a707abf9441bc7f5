"""Prefix keys: a name for what a full K/V block holds, which depends on all tokens up to its end.

Two sequences may share a block only if their K/V are equal, and so only if all tokens up to its end, and whatever else
the K/V depend on, are equal. A key is a hash of all of that; who could make two of them meet could read another's
prefix, or slip another a false one. Keys are therefore BLAKE2b of 32 bytes: a meeting costs 2^128 hashes. With 16 bytes
it would cost 2^64, which is within reach of one who chooses the prompts and works at home, and the time is the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from klero.errors import RequestError

KEY_BYTES = 32
TokenIds = Sequence[int] | npt.NDArray[np.integer]


def block_keys(token_ids: TokenIds, block_size: int, identity: bytes = b"", known: Sequence[bytes] = ()) -> list[bytes]:
    """Return one key for each full block of a sequence.

    token_ids: int32 (a list takes twice as long), or integers that fit. identity: what else its K/V depend on, see
    `identity_of`. known: the first of these keys, if they were computed before; they are believed. Each key hashes the
    one before and the tokens of its block; before the first stands a root that hashes identity and block size, in a
    domain of its own. Raises RequestError for ids that are no int32.
    """
    num_full = len(token_ids) // block_size
    return [*known[:num_full], *further_keys(token_ids, num_full, block_size, identity, known)]


def further_keys(
    token_ids: TokenIds, num_blocks: int, block_size: int, identity: bytes, known: Sequence[bytes]
) -> list[bytes]:
    """Return the keys of the blocks from len(known) to num_blocks - 1. Looks at the tokens of these blocks alone."""
    first = len(known)
    if first >= num_blocks:
        return []
    raw = _bytes_of(token_ids[first * block_size : num_blocks * block_size])
    before = known[-1] if first else _root(identity, block_size)
    blank = hashlib.blake2b(digest_size=KEY_BYTES)
    keys = []
    for start in range(0, len(raw), 4 * block_size):
        hasher = blank.copy()  # half the time of a new one
        hasher.update(before)
        hasher.update(raw[start : start + 4 * block_size])
        before = hasher.digest()
        keys.append(before)
    return keys


def identity_of(
    salt: str | bytes | None = None,
    lora: Any = None,
    multimodal: Any = None,
    embeds: npt.NDArray[Any] | None = None,
) -> bytes:
    """Write down what the K/V of a sequence depend on beside its token ids; b"" where there is nothing.

    Each may be None, text, bytes, an integer, an array, or a tuple or list of these. Type and length stand before every
    value, so that different things are never written alike, however they are cut; arrays enter by dtype, shape and a
    hash of their bytes. The salt is the client's own: it shares with those alone who have it. Raises RequestError for
    anything else, because its content cannot be told.
    """
    values = {"salt": salt, "lora": lora, "multimodal": multimodal, "embeds": embeds}
    if all(value is None for value in values.values()):
        return b""
    return b"".join(_written(name, value) for name, value in values.items())


def _written(name: str, value: Any) -> bytes:
    """One value: a letter for its type, the length of what follows, what follows."""
    if value is None:
        kind, content = b"n", b""
    elif isinstance(value, str):
        kind, content = b"s", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes):
        kind, content = b"b", value
    elif isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        kind, content = b"i", str(int(value)).encode()
    elif isinstance(value, (tuple, list)):
        kind, content = b"t", b"".join(_written(name, item) for item in value)
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufcSU":
        about = _written(name, (value.dtype.str, value.dtype.name, value.shape))
        kind, content = b"a", about + hashlib.blake2b(value.tobytes(), digest_size=KEY_BYTES).digest()
    else:
        raise RequestError(
            f"{name}: {type(value).__name__} says nothing of its content, so no prefix can be shared by it; give text, "
            "bytes, an integer, an array or a tuple of these"
        )
    return kind + len(content).to_bytes(8, "little") + content


def _root(identity: bytes, block_size: int) -> bytes:
    """What stands before the first block. Its domain is its own: no identity that someone chose gives another's key."""
    content = block_size.to_bytes(8, "little") + identity
    return hashlib.blake2b(content, digest_size=KEY_BYTES, person=b"klero prefix").digest()


def _bytes_of(token_ids: TokenIds) -> bytes:
    """Token ids as int32, little-endian on every machine."""
    ids = np.asarray(token_ids)
    if ids.dtype != np.int32 or ids.ndim != 1:
        low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < low or ids.max() > high:
            raise RequestError("token_ids: must be integers that fit in int32; check them before they enter a batch")
    return ids.astype("<i4").tobytes()
