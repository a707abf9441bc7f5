"""Keys of blocks: equal where everything before is equal, and not to be forged."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klero.batch.prefix import block_keys, further_keys, identity_of
from klero.errors import RequestError

TOKENS = st.lists(st.integers(0, 3) | st.integers(-(2**31), 2**31 - 1), max_size=24)


def keys_by_hand(token_ids, block_size, identity):
    """The definition, written down again without NumPy."""
    root = block_size.to_bytes(8, "little") + identity
    before = hashlib.blake2b(root, digest_size=32, person=b"klero prefix").digest()
    keys = []
    for i in range(len(token_ids) // block_size):
        block = token_ids[i * block_size : (i + 1) * block_size]
        content = b"".join(token.to_bytes(4, "little", signed=True) for token in block)
        before = hashlib.blake2b(before + content, digest_size=32).digest()
        keys.append(before)
    return keys


@given(TOKENS, st.sampled_from([1, 2, 3, 16]), st.binary(max_size=40), st.integers(0, 24))
def test_keys_are_their_definition(token_ids, block_size, identity, num_known):
    expected = keys_by_hand(token_ids, block_size, identity)
    assert block_keys(token_ids, block_size, identity) == expected
    assert block_keys(np.array(token_ids, np.int32), block_size, identity) == expected
    assert block_keys(token_ids, block_size, identity, expected[:num_known]) == expected


def test_only_full_blocks_have_keys():
    assert [len(block_keys(range(n), 4)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert block_keys(range(5), 4, known=block_keys(range(8), 4)) == block_keys(range(4), 4)


def test_known_keys_are_not_computed_again():
    """Of the first block the tokens are not even looked at."""
    known = block_keys([1, 2, 3, 4], 2)
    assert block_keys([9, 9, 3, 4, 5, 6], 2, known=known[:1]) == block_keys([1, 2, 3, 4, 5, 6], 2)
    assert further_keys([1, 2, 3, 4], 2, 2, b"", known) == []


def test_a_key_depends_on_all_that_came_before():
    """The last block is 5, 6 each time."""
    last = [block_keys([*before, 5, 6], 2)[-1] for before in ([], [1, 2], [2, 1], [1, 2, 1, 2], [5, 6])]
    assert len(set(last)) == len(last)


def test_a_key_depends_on_the_block_size():
    """Sixteen tokens are one block of 16 or the last of two blocks of 8; nor do first blocks agree."""
    assert not set(block_keys(range(16), 16)) & set(block_keys(range(16), 8))
    assert not set(block_keys([7], 1)) & set(block_keys([7, 7], 2))


@given(st.tuples(TOKENS, TOKENS), st.sampled_from([1, 2, 3]), st.tuples(st.binary(max_size=2), st.binary(max_size=2)))
def test_equal_keys_mean_equal_prefixes(sequences, block_size, identities):
    """Whatever two sequences are, key i of one is key j of the other only for the same prefix of the same identity."""
    one, other = sequences
    prefix_of = {}
    for token_ids, identity in itertools.product((one, other), identities):
        for i, key in enumerate(block_keys(token_ids, block_size, identity)):
            prefix = (identity, tuple(token_ids[: (i + 1) * block_size]))
            assert prefix_of.setdefault(key, prefix) == prefix


def test_a_key_is_no_way_into_the_middle_of_another_chain():
    """A client who knows the key of another's block makes it the identity (or salt) of his own request."""
    theirs = block_keys(range(32), 8, identity_of(salt="secret"))
    for stolen in (theirs[0], identity_of(salt=theirs[0]), identity_of(salt=b"secret"), b""):
        assert not set(block_keys(range(8, 32), 8, stolen)) & set(theirs)
        assert not set(block_keys(range(32), 8, stolen)) & set(theirs)


def test_tokens_are_no_way_into_an_identity():
    """The bytes of the first block moved into the identity, and back."""
    tokens = np.arange(8, dtype=np.int32)
    whole = block_keys(tokens, 4, b"")
    assert not set(block_keys(tokens[4:], 4, tokens[:4].tobytes())) & set(whole)
    salted = block_keys(tokens[4:], 4, tokens[:4].tobytes() + b"x")
    assert not set(salted) & set(block_keys(tokens, 4, b"x"))


@pytest.mark.parametrize(
    "one, other",
    [
        ({"salt": "ab", "lora": "c"}, {"salt": "a", "lora": "bc"}),
        ({"salt": "asb", "lora": "c"}, {"salt": "a", "lora": "bsc"}),  # the letters of types alone would not tell
        ({"multimodal": ("asb",)}, {"multimodal": ("a", "b")}),
        ({"salt": "a"}, {"lora": "a"}),
        ({"lora": "a"}, {"multimodal": "a"}),
        ({"salt": ""}, {}),
        ({"salt": "a"}, {"salt": b"a"}),
        ({"lora": 1}, {"lora": "1"}),
        ({"lora": 0}, {"lora": None}),
        ({"multimodal": ("ab",)}, {"multimodal": ("a", "b")}),
        ({"multimodal": (("a",), "b")}, {"multimodal": ("a", ("b",))}),
        ({"multimodal": ("a",)}, {"multimodal": "a"}),
        ({"multimodal": ()}, {"multimodal": None}),
        ({"salt": "a\0b"}, {"salt": "a", "lora": "b"}),
        ({"salt": "\ud800"}, {"salt": "\ud801"}),  # halves of a pair, which JSON can bring
        ({"embeds": np.zeros((2, 3), np.float32)}, {"embeds": np.zeros((3, 2), np.float32)}),
        ({"embeds": np.zeros(2, np.float32)}, {"embeds": np.zeros(2, np.int32)}),
        ({"embeds": np.zeros(2, np.float32)}, {"embeds": np.zeros(1, np.float64)}),
        ({"embeds": np.zeros((2, 0), np.float32)}, {"embeds": np.zeros((3, 0), np.float32)}),
        ({"embeds": np.array([1.0, 2.0])}, {"embeds": np.array([1.0, 3.0])}),
    ],
)
def test_bytes_moved_between_fields_make_another_identity(one, other):
    assert identity_of(**one) != identity_of(**other)
    assert not set(block_keys([1, 2], 1, identity_of(**one))) & set(block_keys([1, 2], 1, identity_of(**other)))


VALUES = st.recursive(
    st.none() | st.text(max_size=3) | st.binary(max_size=3) | st.integers(-300, 300),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
FIELDS = st.tuples(st.none() | st.text(max_size=3) | st.binary(max_size=3), VALUES, VALUES)


@given(FIELDS, FIELDS)
def test_equal_identities_mean_equal_fields(one, other):
    assert (identity_of(*one) == identity_of(*other)) == (one == other)


def test_what_makes_no_difference():
    assert identity_of() == identity_of(None, None, None, None) == b""
    assert identity_of(multimodal=[1, ["a"]]) == identity_of(multimodal=(np.int64(1), ("a",)))
    grid = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert identity_of(embeds=grid.T) == identity_of(embeds=grid.T.copy())
    assert len(identity_of(embeds=np.zeros((1000, 100), np.float32))) < 200  # a hash, not the array


@pytest.mark.parametrize("value", [object(), 1.5, {"a": 1}, ("a", {1}), np.array([None])])
def test_what_says_nothing_of_its_content_is_refused(value):
    """An array of objects has addresses for bytes."""
    with pytest.raises(RequestError, match=r"multimodal: .* says nothing of its content"):
        identity_of(multimodal=value)


@pytest.mark.parametrize(
    "token_ids",
    [
        [2**31], [-(2**31) - 1], [1.0], [True], ["a"], [[1]], [None], np.array([2**32 + 5]),
        np.array([2**31], np.uint32), np.array([[1]], np.int32),
    ],
)  # fmt: skip
def test_ids_that_would_become_others_are_refused(token_ids):
    """2^32 + 5 cut to 32 bits is 5: a request of one would get the K/V of the other."""
    with pytest.raises(RequestError, match="must be integers that fit in int32"):
        block_keys(token_ids, 1)


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.uint8, ">i4", ">i8"])
def test_the_type_of_ids_that_fit_makes_no_difference(dtype):
    assert block_keys(np.arange(8).astype(dtype), 4) == block_keys(range(8), 4)
    assert block_keys(np.arange(16, dtype=np.int32)[::2], 4) == block_keys(range(0, 16, 2), 4)
