"""A shard of the vocabulary is one big block: what kernels say about shards merges to what they say about the row."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klero import SamplingParams, sample
from klero.device import HAVE_NUMBA
from klero.lots.mass import canonical, masses, scaled, weights
from klero.testing import nasty_rows

if not HAVE_NUMBA:
    pytest.skip("needs Numba", allow_module_level=True)

from klero.rows.maxima.cpu import BLOCK, block_maxima, flush_key
from klero.rows.room import NUM_WORDS
from klero.rows.select.cpu import block_masses, gather, logit_of_key
from klero.rows.view.cpu import is_bad
from klero.sampling.draw.cpu import draw_kept, draw_row
from klero.sampling.filters.cpu import needed_mass

KEY_NEG_INF = int(np.uint32(0x807FFFFF).view(np.int32))
SIZES = st.sampled_from([2, 5, 31, 257, 300, 700, 1025])
SEEDS = st.integers(0, 2**32)


def top_of(shards):
    """The key and the logit of the largest token of all shards."""
    top = np.int32(flush_key(max(shard.top for shard in shards)))
    return top, np.float32(logit_of_key(top))


class Shard:
    """Tokens first_id .. first_id + size - 1 of a row, and their block maxima."""

    def __init__(self, row, first_id, end):
        self.row, self.first_id = row[first_id:end].view(np.int32), first_id
        self.maxima = np.empty(-(-(end - first_id) // BLOCK), np.int32)
        top, widest = block_maxima(self.row, self.maxima)
        self.top, self.widest = np.int32(top), np.uint32(widest)  # Numba hands back Python's numbers

    def mass(self, maximum, reciprocal):
        return int(block_masses(self.row, self.maxima, maximum, reciprocal, np.empty(self.maxima.size, np.uint64)))

    def candidates(self, threshold):
        keys, ids = np.empty(self.row.size + 1, np.int32), np.empty(self.row.size + 1, np.int32)
        n = gather(self.row, self.maxima, np.int32(threshold), keys, ids)
        return keys[:n], ids[:n]

    def draw(self, top, maximum, reciprocal, at):
        words = np.empty(NUM_WORDS, np.uint32)
        cut = np.int32(KEY_NEG_INF), -1
        return draw_row(self.row, self.maxima, top, maximum, reciprocal, *cut, self.first_id, *at, words)

    def draw_listed(self, threshold, maximum, reciprocal, at):
        keys, ids = self.candidates(threshold)
        words = np.empty(NUM_WORDS, np.uint32)
        return draw_kept(keys, ids, len(keys), maximum, reciprocal, self.first_id, *at, words)


@st.composite
def cut_rows(draw, sound=True):
    """A row, and the same row in 2 to 5 shards cut anywhere."""
    size, seed = draw(SIZES), draw(SEEDS)
    row = nasty_rows(1, size, seed, sound=sound)[0]
    cuts = draw(st.lists(st.integers(1, size - 1), min_size=1, max_size=4, unique=True))
    borders = [0, *sorted(cuts), size]
    return row, [Shard(row, a, b) for a, b in itertools.pairwise(borders)]


def counters(seed):
    return np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64), np.uint32(seed % 5000), np.uint32(seed % 3)


def best_of(drawn):
    """The larger score, the lower id on a tie."""
    return min(drawn, key=lambda pair: (-pair[0], pair[1]))


RECIPROCALS = st.sampled_from([np.float32(1), np.float32(1) / np.float32(0.3), np.float32(1) / np.float32(30)])


@given(cut_rows(sound=False))
def test_maxima_and_soundness(cut):
    row, shards = cut
    whole = Shard(row, 0, row.size)
    assert max(shard.top for shard in shards) == whole.top
    assert max(shard.widest for shard in shards) == whole.widest
    merged = is_bad(max(shard.top for shard in shards), max(shard.widest for shard in shards))
    assert merged == bool(np.isnan(row).any() or (row == np.inf).any())


@given(cut_rows(), RECIPROCALS)
def test_masses(cut, reciprocal):
    row, shards = cut
    _, maximum = top_of(shards)
    right = int(masses(weights(scaled(canonical(row), maximum, reciprocal))).sum(dtype=np.uint64))
    assert sum(shard.mass(maximum, reciprocal) for shard in shards) == right
    assert Shard(row, 0, row.size).mass(maximum, reciprocal) == right


@given(cut_rows(), st.data())
def test_candidates(cut, data):
    row, shards = cut
    keys, _ = Shard(row, 0, row.size).candidates(KEY_NEG_INF + 1)
    threshold = int(keys[data.draw(st.integers(0, len(keys) - 1))])
    whole = Shard(row, 0, row.size).candidates(threshold)
    parts = [shard.candidates(threshold) for shard in shards]
    assert np.concatenate([keys for keys, _ in parts]).tolist() == whole[0].tolist()
    offsets = [ids + shard.first_id for (_, ids), shard in zip(parts, shards, strict=True)]
    assert np.concatenate(offsets).tolist() == whole[1].tolist()


@given(cut_rows(), RECIPROCALS, SEEDS)
def test_draws(cut, reciprocal, seed):
    row, shards = cut
    at = counters(seed)
    top, maximum = top_of(shards)
    whole = Shard(row, 0, row.size).draw(top, maximum, reciprocal, at)
    parts = [shard.draw(top, maximum, reciprocal, at) for shard in shards]
    assert best_of(parts) == whole
    listed = [shard.draw_listed(KEY_NEG_INF + 1, maximum, reciprocal, at) for shard in shards]
    assert best_of(listed) == whole
    if reciprocal == 1:
        token = sample(
            row[None], SamplingParams(temperature=1), seeds=int(at[0]), positions=int(at[1]), children=int(at[2])
        ).token_ids[0]
        assert whole[1] == token


@given(cut_rows(), SEEDS, st.integers(1, 2**32 - 1))
def test_the_whole_of_top_p(cut, seed, top_p):
    """A nucleus put together from shards alone: top, mass, candidates, cut, draw."""
    row, shards = cut
    at = counters(seed)
    (_, maximum), one = top_of(shards), np.float32(1)
    need = int(needed_mass(np.uint64(sum(shard.mass(maximum, one) for shard in shards)), np.uint64(top_p)))
    listed = [
        (-int(key), shard.first_id + int(i))
        for shard in shards
        for key, i in zip(*shard.candidates(KEY_NEG_INF + 1), strict=True)
    ]
    q = masses(weights(scaled(canonical(row), maximum, one)))
    kept, mass = [], 0
    for _, token in sorted(listed):
        if mass >= need:
            break
        kept.append(token)
        mass += int(q[token])
    params = SamplingParams(temperature=1, top_p=top_p / 2**32)
    sampled = sample(row[None], params, seeds=int(at[0]), positions=int(at[1]), children=int(at[2]))
    assert sampled.num_kept[0] == len(kept)
    assert sampled.token_ids[0] in kept
