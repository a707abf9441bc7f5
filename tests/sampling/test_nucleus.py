"""top-p of whole rows: bounds that hold, cuts at their borders, samples that mislead."""

import numpy as np
import pytest

from klero import SamplingParams, sample
from klero.device import HAVE_NUMBA
from klero.lots.mass import canonical, masses, scaled, weights
from klero.sampling.filters import needed_mass, top_p, total_order
from klero.testing import assert_bits, nasty_rows

if not HAVE_NUMBA:
    pytest.skip("needs Numba", allow_module_level=True)

from klero.lots.mass.cpu import KEY_NEG_INF
from klero.rows.maxima.cpu import block_maxima, flush_key
from klero.rows.room import carve, room_of
from klero.rows.select.cpu import logit_of_key
from klero.sampling.filters.nucleus.cpu import UNLISTED, bound_masses, cut_flat, keep_top_p, nth_id
from klero.sampling.fused.cpu import list_cut

BELOW_ALL = np.int32(KEY_NEG_INF)


class Opened:
    """A row as the kernels have it: bits, block maxima, scratch."""

    def __init__(self, row):
        self.bits, width = row.view(np.int32), len(row)
        (self.maxima, self.keys, self.ids, self.spare, self.weights, _), _ = carve(room_of(width), width)
        highest, _ = block_maxima(self.bits, self.maxima)
        self.top = np.int32(flush_key(highest))
        self.maximum = np.float32(logit_of_key(self.top))

    def bounds(self, reciprocal):
        return bound_masses(self.bits, self.maxima, self.maximum, np.float32(reciprocal), self.weights)

    def kept(self, cut):
        n, key, last, num_kept = cut
        if n == UNLISTED:
            n = list_cut(self.bits, self.maxima, np.int32(key), last, self.keys, self.ids)
        assert n == num_kept
        return self.ids[:n].tolist()

    def keep(self, p, reciprocal=1.0):
        share, r = np.uint64(round(p * 2**32)), np.float32(reciprocal)
        scratch = self.keys, self.ids, self.spare, self.weights
        return self.kept(keep_top_p(self.bits, self.maxima, self.top, share, r, *scratch))

    def keep_unlisted(self, p, reciprocal=1.0):
        share, r = np.uint64(round(p * 2**32)), np.float32(reciprocal)
        cut = cut_flat(self.bits, self.maxima, self.top, share, r, self.keys, self.spare, self.weights)
        assert cut[0] == UNLISTED
        return self.kept(cut)


def exact_masses(row, reciprocal=1.0):
    logits = canonical(row)
    return masses(weights(scaled(logits, logits.max(), np.float32(reciprocal))))


def expected(row, p, reciprocal=1.0):
    """The ids that the definition keeps, ascending."""
    order = total_order(canonical(row))
    return sorted(order[: top_p(exact_masses(row, reciprocal)[order], round(p * 2**32))].tolist())


def rows_of_all_kinds(size, seed):
    rng = np.random.default_rng([size, seed])
    flat = rng.standard_normal(size).astype(np.float32)
    with_head = flat * 3
    with_head[:20] += rng.standard_exponential(min(20, size)).astype(np.float32) * 8
    banned = np.where(rng.random(size) < 0.5, np.float32(-np.inf), flat)
    banned[0] = 0
    return [
        flat,
        with_head,
        banned,
        np.round(flat * 2),
        np.full(size, 3.5, np.float32),
        flat + np.linspace(3, -3, size, dtype=np.float32),
    ]


@pytest.mark.parametrize("size", [1, 31, 257, 5000, 40000])
@pytest.mark.parametrize("reciprocal", [0.01, 0.7, 1, 1.25, 50])
def test_the_mass_of_a_row_is_within_its_bounds(size, reciprocal):
    for row in [*rows_of_all_kinds(size, 1), *nasty_rows(4, size, 3, sound=True)]:
        mass = int(exact_masses(row, reciprocal).sum(dtype=np.uint64))
        low, high, told = Opened(row).bounds(reciprocal)
        assert low <= mass <= high
        assert high - low <= mass * 2.0**-14 + 2 * size
        assert low - size <= told <= high


@pytest.mark.parametrize("size", [1, 2, 31, 33, 256, 700, 4096, 4097, 20001])
@pytest.mark.parametrize("p", [1e-6, 0.3, 0.9, 0.999, 1 - 2**-30])
def test_listed_or_not_the_cut_is_that_of_the_definition(size, p):
    for row in rows_of_all_kinds(size, 2):
        wanted = expected(row, p)
        assert Opened(row).keep(p) == wanted
        assert Opened(row).keep_unlisted(p) == wanted


def test_four_equal_tokens_at_half_their_mass_are_two():
    """The mass that is needed is that of exactly two, so that no bound of it decides."""
    assert Opened(np.zeros(4, np.float32)).keep(0.5) == [0, 1]
    assert Opened(np.zeros(4, np.float32)).keep_unlisted(0.5) == [0, 1]


def test_a_border_that_only_the_exact_mass_decides():
    """2^k equal tokens: P of them is a whole number of tokens, and P + 2^-32 is one more."""
    row = np.zeros(1024, np.float32)
    for number in (1, 512, 1023):
        assert Opened(row).keep(number / 1024) == list(range(number))
        assert Opened(row).keep(number / 1024 + 2**-32) == list(range(number + 1))


@pytest.mark.parametrize("heads", [-6, 6])
def test_a_sample_that_misleads_costs_time_and_no_token(heads):
    """The first tokens of every block, which are the sample, are unlike all others."""
    row = np.random.default_rng(5).standard_normal(256 * 40).astype(np.float32)
    row.reshape(40, 256)[:, :8] += heads
    for p in (0.1, 0.6, 0.95):
        assert Opened(row).keep_unlisted(p) == expected(row, p)


@pytest.mark.parametrize("size", [5, 40, 300, 2000])
def test_the_nth_token_with_a_key(size):
    row = (np.arange(size) % 3).astype(np.float32)
    opened, ids = Opened(row), np.flatnonzero(row == 1)
    key = np.float32(1).view(np.int32)
    for nth in {1, 2, len(ids) // 2 + 1, len(ids)} & set(range(1, len(ids) + 1)):
        assert nth_id(opened.bits, opened.maxima, key, nth) == ids[nth - 1]


@pytest.mark.parametrize("fields", [{"top_p": 0.8}, {"min_p": 0.001}, {"top_p": 0.5, "min_p": 1e-4}])
def test_flat_rows_of_the_sampler_are_drawn_from_their_cut_with_and_without_lists(fields):
    rows = np.random.default_rng(7).standard_normal((4, 30000)).astype(np.float32)
    rows[1] = np.round(rows[1] * 8) / 8
    for more in ({}, {"xtc_probability": 0.5, "xtc_threshold": 1e-4}, {"logprobs": 3, "return_kept": True}):
        params, at = SamplingParams(temperature=1.0, **fields, **more), {"positions": 3, "seeds": [1, 2, 3, 4]}
        cpu, reference = (sample(rows, params, backend=backend, **at) for backend in ("cpu", "reference"))
        assert cpu.token_ids.tolist() == reference.token_ids.tolist()
        assert cpu.num_kept.tolist() == reference.num_kept.tolist()
        if more.get("return_kept"):
            assert np.array_equal(cpu.logprobs.kept_ids, reference.logprobs.kept_ids)
            assert_bits(cpu.logprobs.kept_probs, reference.logprobs.kept_probs)


def test_needed_mass_of_kernel_and_reference():
    from klero.sampling.filters.cpu import needed_mass as of_kernel

    for mass in (1, 2**40, 2**62 - 1, 123456789012345):
        for share in (1, 2**31, 2**32 - 1):
            assert of_kernel(np.uint64(mass), np.uint64(share)) == needed_mass(mass, share)


@pytest.mark.parametrize("p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("seed", range(4))
def test_bounds_hold_where_masks_are_applied_late(p, seed):
    """Blocks whose mask bans their largest token have a bound for a maximum until they are read."""
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.standard_normal((8, 20, 256)).astype(np.float32) * 3)[:, :, ::-1].reshape(8, 5120)
    masks = np.packbits(rng.random((8, 5120)) < [0.02, 0.5, 0.9, 0.999][seed], axis=1, bitorder="little")
    masks.reshape(8, 20, 32)[:, ::2, :4] = 0  # the largest 32 tokens of every second block
    given = {"positions": 3, "seeds": 9, "masks": masks.view(np.int32)}
    params = SamplingParams(temperature=0.7, top_p=p)
    compiled, reference = (sample(np.ascontiguousarray(rows), params, backend=b, **given) for b in ("cpu", "reference"))
    assert_bits(compiled.num_kept, reference.num_kept)
    assert_bits(compiled.token_ids, reference.token_ids)
