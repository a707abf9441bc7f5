"""Bans in NumPy: the definition. Each function returns the ids that its rule bans next, or a mask of all ids."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from klero.params import SamplingParams

IDS = npt.NDArray[np.integer]
Words = Iterable[tuple[int, ...]]


def suffixes(words: Words, history: IDS) -> list[int]:
    """The last ids of all words whose other ids the history ends with."""
    tail = history.tolist()
    return [word[-1] for word in words if len(word) == 1 or tail[1 - len(word) :] == list(word[:-1])]


def min_tokens_words(params: SamplingParams, model_end_ids: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """What may not end the output before min_tokens: end ids (the model's unless ignored), stop ids and sequences."""
    if params.min_tokens == 0:
        return ()
    end_ids = end_ids_of(params, model_end_ids)
    return tuple(dict.fromkeys([*((i,) for i in end_ids), *params.stop_token_ids]))


def end_ids_of(params: SamplingParams, model_end_ids: Iterable[int]) -> tuple[int, ...]:
    """What ends a request: the caller's end ids, and the model's unless they are ignored."""
    return (*params.end_token_ids, *(() if params.ignore_eos else model_end_ids))


def allows_only(mask: npt.NDArray[np.int32], ids: Iterable[int]) -> bool:
    """Whether a mask allows one of these ids at least, and no other."""
    left = mask.view(np.uint32) & ~bitmask(ids, 32 * len(mask)).view(np.uint32)
    return bool(mask.any() and not left.any())


def disallowed(mask: npt.NDArray[np.int32], width: int) -> npt.NDArray[np.bool_]:
    """bool [V]: the tokens whose bit in the mask is 0 (token i: word i >> 5, bit i & 31), and those beyond it."""
    bits = np.unpackbits(np.ascontiguousarray(mask, "<i4").view(np.uint8), bitorder="little")[:width]
    return np.concatenate([bits == 0, np.ones(width - len(bits), bool)])


def bitmask(allowed_ids: Iterable[int], width: int) -> npt.NDArray[np.int32]:
    """The mask that allows these ids alone: int32 [ceil(V / 32)]; ids of padding columns, past it, are left out."""
    bits = np.zeros(-(-width // 32) * 32, np.uint8)
    bits[[i for i in allowed_ids if i < width]] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
