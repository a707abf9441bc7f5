"""Philox4x32-10 against its recipe in plain Python integers, and the kernel against the reference."""

import numpy as np
import pytest

from klero.device import HAVE_NUMBA
from klero.lots.philox import philox4x32, words_of_ids
from klero.testing import assert_bits

needs_numba = pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba")
EXTREMES = (0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)


def recipe(counter, key):
    """docs/draw.md, section 4, with unbounded integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b % 2**32, (a >> 32) ^ c3 ^ k1, a % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def inputs(count, seed):
    rng = np.random.default_rng(seed)
    counters = rng.integers(0, 2**32, (count, 4), dtype=np.uint32)
    keys = rng.integers(0, 2**32, (count, 2), dtype=np.uint32)
    for array in (counters, keys):
        extreme = rng.random(array.shape) < 0.2
        array[extreme] = rng.choice(np.array(EXTREMES, np.uint32), int(extreme.sum()))
    return counters, keys


def test_reference_follows_the_recipe():
    counters, keys = inputs(400, 1)
    for counter, key in zip(counters.tolist(), keys.tolist(), strict=True):
        assert tuple(philox4x32(counter, tuple(key)).tolist()) == recipe(counter, key)


@needs_numba
def test_kernel_and_reference_agree_on_every_bit():
    from tests.lots import kernels

    counters, keys = inputs(1_000_000, 2)
    keys[:] = keys[np.arange(len(keys)) >> 14 << 14]  # the reference takes one key at a time
    words = kernels.philox4x32(counters, keys)
    for begin in range(0, len(keys), 2**14):
        part = slice(begin, begin + 2**14)
        assert_bits(words[part], philox4x32(counters[part], tuple(keys[begin].tolist())), f"from {begin}")


def test_where_seed_position_child_purpose_and_token_enter():
    seed, position, child, purpose = 0x0123456789ABCDEF, 17, 5, 3
    ids = [0, 1, 2, 3, 4, 1023, 2**22 - 1]
    key = (0x89ABCDEF, 0x01234567)
    right = [recipe((i >> 2, position, child, purpose), key)[i & 3] for i in ids]
    assert words_of_ids(ids, seed, position, child, purpose).tolist() == right


@needs_numba
def test_words_of_ids_agree_with_the_kernel():
    from tests.lots import kernels

    ids = np.concatenate([np.arange(5000), np.random.default_rng(3).integers(0, 2**22, 50_000)])
    for at in [(0, 0, 0, 0), (2**64 - 1, 2**32 - 1, 2**32 - 1, 4), (3 << 40, 1, 2, 1)]:
        assert_bits(kernels.words_of_ids(ids, *at), words_of_ids(ids, *at))
