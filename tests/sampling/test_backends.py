"""klero.sample: kernels and reference draw the same tokens, for every width, dtype, shape of parameters and row."""

import numpy as np
import pytest

from klero import SamplingParams, explain, sample
from klero.device import HAVE_NUMBA
from klero.sampling.fused.reference import sample_row
from klero.testing import assert_bits, assert_set, assert_token, nasty_params, nasty_row, nasty_rows

needs_numba = pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba")
ROWS_OF_WIDTH = {1: 300, 2: 400, 31: 500, 33: 500, 63: 500, 1000: 500, 32000: 48, 128256: 24}


def as_dtype(rows, dtype):
    """The rows in a dtype that klero reads. bfloat16: the upper half of the bits."""
    if dtype == "bfloat16":
        return (rows.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    with np.errstate(over="ignore"):
        return rows.astype(dtype)


def some_counters(num_rows, seed):
    rng = np.random.default_rng([seed, 5])
    positions, children = rng.integers(0, 2**32, (2, num_rows), dtype=np.uint64)
    small = rng.random(num_rows) < 0.7
    positions[small], children[small] = positions[small] % 5000, children[small] % 4
    return {"positions": positions, "children": children, "seeds": rng.integers(0, 2**64, num_rows, dtype=np.uint64)}


def assert_same(a, b):
    assert_token(a.status, b.status, "status")
    assert_token(a.token_ids, b.token_ids, "token_ids")
    assert_token(a.num_kept, b.num_kept, "num_kept")
    assert_token(a.seeds, b.seeds, "seeds")


def check_backends(num_rows, vocab_size, dtype, seed):
    rows = as_dtype(nasty_rows(num_rows, vocab_size, seed), dtype)
    before = rows.copy()
    params = nasty_params(num_rows, vocab_size, seed)
    at = some_counters(num_rows, seed)
    cpu = sample(rows, params, backend="cpu", **at)
    reference = sample(rows, params, backend="reference", **at)
    assert_same(cpu, reference)
    assert_bits(rows, before, "logits")
    assert_token(cpu.seeds, at["seeds"])
    return cpu


@needs_numba
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("vocab_size", ROWS_OF_WIDTH)
def test_kernels_and_reference_draw_the_same(vocab_size, dtype):
    sampled = check_backends(ROWS_OF_WIDTH[vocab_size], vocab_size, dtype, seed=11)
    if vocab_size > 30:
        assert set(sampled.status.tolist()) == {0, 1, 2}
    drawn = sampled.token_ids[sampled.status == 0]
    assert 0 <= drawn.min() <= drawn.max() < vocab_size
    assert (sampled.token_ids[sampled.status != 0] == -1).all()
    assert (sampled.num_kept[sampled.status != 0] == 0).all()
    assert (sampled.num_kept[sampled.status == 0] >= 1).all()


@pytest.mark.deep
@needs_numba
@pytest.mark.parametrize("seed", range(10))
def test_kernels_and_reference_draw_the_same_on_many_more(seed):
    widths = [*ROWS_OF_WIDTH, 255, 256, 257, 511, 513, 5000]
    for vocab_size in widths:
        for dtype in ("float32", "float16", "bfloat16"):
            check_backends(2 * ROWS_OF_WIDTH.get(vocab_size, 200), vocab_size, dtype, 1000 + seed)


@needs_numba
@pytest.mark.parametrize("vocab_size", [1, 2, 33, 255, 256, 257, 1000])
def test_kernels_keep_the_same_ids(vocab_size):
    from tests.lots import kernels

    rows, params = nasty_rows(300, vocab_size, 3, sound=True), nasty_params(300, vocab_size, 3)
    compared = 0
    for i, (row, asked) in enumerate(zip(rows, params, strict=True)):
        explained = explain(row, asked, seed=i, position=i)
        assert_token(explained.token, sample(rows[i : i + 1], asked, seeds=i, positions=i).token_ids[0], f"row {i}")
        if not asked.greedy:
            kept = kernels.kept(row, asked.row)
            assert_set(kept, explained.kept, f"row {i}, {asked}")
            assert (np.diff(kept) > 0).all()
            compared += 1
    assert compared > 50


@needs_numba
def test_wide_rows_keep_the_same_ids():
    from tests.lots import kernels

    for kind in ("peaked", "flat", "nearly flat", "ties", "edges", "normal"):
        row = nasty_row(kind, 50_000, 4)
        for asked in (
            SamplingParams(top_p=0.9), SamplingParams(top_p=0.3), SamplingParams(top_k=50), SamplingParams(min_p=0.02),
            SamplingParams(top_k=40_000, top_p=0.999), SamplingParams(temperature=0.2, top_p=0.99),
        ):  # fmt: skip
            assert_set(kernels.kept(row, asked.row), sample_row(row, asked.row, 1, 2, 0).kept, f"{kind}, {asked}")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_dtypes_are_read_as_the_float32_they_stand_for(backend, dtype):
    if backend == "cpu" and not HAVE_NUMBA:
        pytest.skip("needs Numba")
    rows = as_dtype(nasty_rows(200, 100, 6), dtype)
    wide = rows.astype(np.float32) if dtype == "float16" else (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
    params, at = nasty_params(200, 100, 6), some_counters(200, 6)
    assert_same(sample(rows, params, backend=backend, **at), sample(wide, params, backend=backend, **at))


def test_ml_dtypes_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rows = as_dtype(nasty_rows(200, 100, 7), "bfloat16")
    params, at = nasty_params(200, 100, 7), some_counters(200, 7)
    assert_same(sample(rows.view(ml_dtypes.bfloat16), params, **at), sample(rows, params, **at))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torch_tensors_in_and_out(dtype):
    torch = pytest.importorskip("torch")
    rows = as_dtype(nasty_rows(200, 100, 8), dtype)
    tensor = torch.from_numpy(rows.view(np.int16) if dtype == "bfloat16" else rows)
    tensor = tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
    params, at = nasty_params(200, 100, 8), some_counters(200, 8)
    home, right = sample(tensor, params, **at), sample(rows, params, **at)
    for name in ("token_ids", "status", "num_kept", "seeds"):
        assert isinstance(getattr(home, name), torch.Tensor)
        assert_bits(getattr(home, name).numpy(), getattr(right, name), name)
    grown = tensor.clone().requires_grad_() if dtype == "float32" else tensor
    assert_bits(sample(grown, params, **at).token_ids.numpy(), right.token_ids)
    assert_bits(sample(tensor.t().contiguous().t(), params, **at).token_ids.numpy(), right.token_ids)


def test_anything_with_dlpack():
    class Foreign:
        def __init__(self, array):
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

    rows = nasty_rows(50, 40, 9)
    params, at = nasty_params(50, 40, 9), some_counters(50, 9)
    assert_same(sample(Foreign(rows), params, **at), sample(rows, params, **at))


def test_read_only_logits_are_read():
    rows = nasty_rows(50, 40, 9)
    params, at = nasty_params(50, 40, 9), some_counters(50, 9)
    right = sample(rows, params, **at)
    rows.flags.writeable = False
    assert_same(sample(rows, params, **at), right)


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0xFFFFFFFF, 0x7F800000])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_poisoned_row_ends_alone(backend, bits):
    if backend == "cpu" and not HAVE_NUMBA:
        pytest.skip("needs Numba")
    rows = nasty_rows(24, 700, 10, sound=True)
    params, at = nasty_params(24, 700, 10), some_counters(24, 10)
    right = sample(rows, params, backend=backend, **at)
    for place in (0, 255, 256, 699):
        poisoned = rows.copy()
        poisoned[5::6, place].view(np.uint32)[:] = bits
        poisoned[4::6] = -np.inf
        sampled = sample(poisoned, params, backend=backend, **at)
        assert sampled.status.tolist() == [0, 0, 0, 0, 2, 1] * 4
        good = sampled.status == 0
        assert_bits(sampled.token_ids[good], right.token_ids[good])
        assert_bits(sampled.num_kept[good], right.num_kept[good])
        assert (sampled.token_ids[~good] == -1).all()
        assert (sampled.num_kept[~good] == 0).all()


def test_the_vocabulary_of_one_token():
    for asked in nasty_params(40, 1, 12):
        sampled = sample(np.float32([[-3.0]]), asked, positions=0, seeds=1)
        assert (sampled.token_ids[0], sampled.num_kept[0]) == (0, 1)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_no_rows(backend):
    sampled = sample(np.empty((0, 8), np.float32), [], positions=[], seeds=[], children=[], backend=backend)
    assert [len(array) for array in (sampled.token_ids, sampled.status, sampled.num_kept, sampled.seeds)] == [0] * 4
    assert sample(np.empty((0, 8), np.float32), SamplingParams(temperature=1), positions=3).token_ids.dtype == np.int32


@needs_numba
def test_the_widest_vocabulary():
    row = np.full((1, 2**22), -1, np.float32)
    for asked in (SamplingParams(temperature=1), SamplingParams(top_p=0.5), SamplingParams(top_k=2**21 + 1)):
        cpu = sample(row, asked, positions=1, seeds=2, backend="cpu")
        assert_same(cpu, sample(row, asked, positions=1, seeds=2, backend="reference"))
    assert cpu.num_kept[0] == 2**21 + 1
