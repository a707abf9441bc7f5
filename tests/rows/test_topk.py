"""Exact top-k: worked rows, spans of a row, and the kernel against a stable sort, bit for bit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klero import ParameterError, SamplingParams, sample, score, topk
from klero.device import HAVE_NUMBA
from klero.errors import LogitsError, OptionError
from klero.testing import ROW_KINDS, assert_bits, assert_set, nasty_row, nasty_rows

BACKENDS = ["reference", pytest.param("cpu", marks=pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba"))]
both = pytest.mark.parametrize("backend", BACKENDS)
needs_numba = pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba")
INF, NAN = np.inf, np.nan
SIZES = (1, 2, 7, 8, 31, 255, 256, 257, 511, 512, 513, 1000, 2049, 8192)


def row_of(*values):
    return np.array([values], np.float32)


def of_one(rows, k, backend="auto", **spans):
    """ids and values of the first row."""
    found = topk(rows, k, backend=backend, **spans)
    return found.ids[0].tolist(), found.values[0].tolist()


def assert_same(found, right, what=""):
    assert_bits(found.ids, right.ids, f"ids {what}")
    assert_bits(found.values, right.values, f"values {what}")


def by_definition(row, k, begin=0, end=None):
    """Ids by Python's own sort."""
    columns = range(begin, len(row) if end is None else end)
    return sorted(columns, key=lambda i: (-row[i] if abs(row[i]) >= 2.0**-64 else 0.0, i))[:k]


@both
@pytest.mark.parametrize(
    "row, k, ids, values",
    [
        ((1, 3, 2, 0), 1, [1], [3]),
        ((1, 3, 2, 0), 3, [1, 2, 0], [3, 2, 1]),
        ((1, 3, 2, 0), 4, [1, 2, 0, 3], [3, 2, 1, 0]),
        ((2, 3, 2, 3), 3, [1, 3, 0], [3, 3, 2]),  # ties: the lower id
        ((5, 5, 5, 5), 2, [0, 1], [5, 5]),
        ((-INF, 1, -INF, 2), 3, [3, 1, 0], [2, 1, -INF]),  # -inf takes part, last
        ((-INF, -INF, -INF, -INF), 2, [0, 1], [-INF, -INF]),
        ((1, INF, 2, INF), 3, [1, 3, 2], [INF, INF, 2]),  # +inf is first
        ((1e-30, 0, 2e-30, -1e-30), 4, [0, 1, 2, 3], np.float32([1e-30, 0, 2e-30, -1e-30]).tolist()),  # all count as 0
        ((-1e-30, -1, 1e-19, -0.0), 3, [2, 0, 3], np.float32([1e-19, -1e-30, -0.0]).tolist()),  # 1e-19 > 2^-64
    ],
)
def test_rows_of_four(backend, row, k, ids, values):
    assert of_one(row_of(*row), k, backend) == (ids, values)


@both
def test_values_are_the_bits_of_the_row(backend):
    """-0, subnormals and the sign of both are handed on."""
    row = np.array([[0x80000000, 0x80000001, 0x007FFFFF, 0]], np.uint32).view(np.float32)
    found = topk(row, 4, backend=backend)
    assert (found.ids.dtype, found.values.dtype) == (np.int32, np.float32)
    assert found.ids[0].tolist() == [0, 1, 2, 3]
    assert_bits(found.values, row)


@both
def test_fewer_valid_columns_than_k(backend):
    rows = np.tile(row_of(1, 3, 2, 0), (5, 1))
    found = topk(rows, 3, lengths=[4, 3, 2, 1, 0], backend=backend)
    assert found.ids.tolist() == [[1, 2, 0], [1, 2, 0], [1, 0, -1], [0, -1, -1], [-1, -1, -1]]
    assert found.values.tolist() == [[3, 2, 1], [3, 2, 1], [3, 1, -INF], [1, -INF, -INF], [-INF] * 3]


@both
def test_ids_of_a_window_are_columns_of_the_row(backend):
    rows = np.tile(row_of(1, 3, 2, -INF), (5, 1))
    found = topk(rows, 2, windows=[[0, 4], [2, 4], [0, 1], [3, 3], [1, 2]], backend=backend)
    assert found.ids.tolist() == [[1, 2], [2, 3], [0, -1], [-1, -1], [1, -1]]
    assert found.values.tolist() == [[3, 2], [2, -INF], [1, -INF], [-INF, -INF], [3, -INF]]


@both
@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0xFFFFFFFF])
def test_a_row_with_nan_ends_alone(backend, bits):
    rows = nasty_rows(9, 700, 1, sound=True)
    right = topk(rows, 20, backend=backend)
    for place in (0, 255, 256, 699):
        poisoned = rows.copy()
        poisoned[4, place] = np.array(bits, np.uint32).view(np.float32)
        found = topk(poisoned, 20, backend=backend)
        assert found.ids[4].tolist() == [-1] * 20
        assert np.isnan(found.values[4]).all()
        others = np.arange(9) != 4
        assert_bits(found.ids[others], right.ids[others])
        assert_bits(found.values[others], right.values[others])


@both
@pytest.mark.parametrize("begin, end", [(0, 1), (0, 256), (1, 257), (255, 512), (256, 999), (300, 300), (998, 1000)])
@pytest.mark.parametrize("outside", [NAN, INF])
def test_nothing_outside_of_a_window_is_looked_at(backend, begin, end, outside):
    memory = np.full((3, 5, 1000), outside, np.float32)
    rows = memory[1]
    rows[:, begin:end] = nasty_rows(5, 1000, 2)[:, begin:end]
    if begin < end:
        inside = topk(rows[:, begin:end].copy(), min(40, end - begin), backend=backend)
        found = topk(rows, min(40, end - begin), windows=[[begin, end]] * 5, backend=backend)
        assert_bits(found.values, inside.values)
        assert found.ids.tolist() == np.where(inside.ids >= 0, inside.ids + begin, -1).tolist()
    else:
        assert of_one(rows, 2, backend, windows=[[begin, end]] * 5) == ([-1, -1], [-INF, -INF])
    if begin == 0:
        assert_same(topk(rows, 40, lengths=[end] * 5, backend=backend),
                    topk(rows, 40, windows=[[0, end]] * 5, backend=backend))  # fmt: skip


@both
def test_against_pythons_sort(backend):
    for size in SIZES[:9]:
        rows = nasty_rows(12, size, 3, sound=True)
        for k in {1, min(2, size), size // 2 or 1, size}:
            found = topk(rows, k, backend=backend)
            assert found.ids.tolist() == [by_definition(row.tolist(), k) for row in rows]
            assert_bits(found.values, np.take_along_axis(rows, found.ids.astype(np.int64), 1))


@needs_numba
@given(
    size=st.sampled_from(SIZES), kinds=st.lists(st.sampled_from(tuple(ROW_KINDS)), min_size=1, max_size=5),
    seed=st.integers(0, 2**32), spans=st.sampled_from(["whole", "lengths", "windows"]), narrow=st.booleans(),
)  # fmt: skip
def test_the_kernel_is_the_reference(size, kinds, seed, spans, narrow):
    rng = np.random.default_rng(seed)
    rows = np.stack([nasty_row(kind, size, seed + i) for i, kind in enumerate(kinds)])
    rows = (rows.view(np.uint32) >> 16).astype(np.uint16) if narrow else rows
    k = int(rng.choice([1, rng.integers(1, size + 1), max(1, size - 1), size]))
    given = {
        "whole": {},
        "lengths": {"lengths": rng.integers(0, size + 1, len(kinds))},
        "windows": {"windows": np.sort(rng.integers(0, size + 1, (len(kinds), 2)))},
    }[spans]
    found = topk(rows, k, **given, backend="cpu")
    assert_same(found, topk(rows, k, **given, backend="reference"), f"of {kinds}, {k} of {size}")


@needs_numba
@pytest.mark.parametrize("kind", ["normal", "peaked", "ties", "nearly flat", "banned"])
@pytest.mark.parametrize("k", [1, 2, 50, 255, 256, 257, 3000, 17000, 32000])
def test_wide_rows(kind, k):
    row = nasty_row(kind, 32000, 5)[None]
    assert_same(topk(row, k, backend="cpu"), topk(row, k, backend="reference"))


@both
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_rows_are_the_float32_they_stand_for(backend, dtype):
    torch = pytest.importorskip("torch")
    rows = torch.from_numpy(nasty_rows(40, 300, 6)).to(getattr(torch, dtype))
    found, right = topk(rows, 20, backend=backend), topk(rows.float().numpy(), 20, backend=backend)
    assert (found.ids.dtype, found.values.dtype) == (torch.int32, torch.float32)
    assert_bits(found.ids.numpy(), right.ids)
    assert_bits(found.values.numpy(), right.values)


@both
def test_torch_in_and_out(backend):
    torch = pytest.importorskip("torch")
    rows = nasty_rows(7, 300, 7)
    kept = rows.copy()
    windows = np.sort(np.random.default_rng(8).integers(0, 301, (7, 2)))
    right = topk(rows, 20, windows=windows, backend=backend)
    found = topk(torch.from_numpy(rows), 20, windows=torch.from_numpy(windows), backend=backend)
    assert isinstance(found.values, torch.Tensor)
    assert isinstance(found.ids, torch.Tensor)
    assert_bits(found.ids.numpy(), right.ids)
    assert_bits(found.values.numpy(), right.values)
    assert_bits(rows, kept)
    rows.flags.writeable = False
    assert_same(topk(rows, 20, windows=windows, backend=backend), right)


@needs_numba
@pytest.mark.parametrize("threads", ["2", "3", "64"])
def test_threads_change_nothing(monkeypatch, threads):
    rows, lengths = nasty_rows(33, 700, 9), np.random.default_rng(9).integers(0, 701, 33)
    right = topk(rows, 30, lengths=lengths)
    monkeypatch.setenv("KLERO_NUM_THREADS", threads)
    assert_same(topk(rows, 30, lengths=lengths), right)


@both
def test_it_is_the_samplers_top_k_and_the_top_list_of_score(backend):
    rows = np.stack([nasty_row(kind, 700, 10) for kind in ("normal", "peaked", "ties", "huge", "any bits")])
    found = topk(rows, 9, backend=backend)
    asked = SamplingParams(temperature=1, top_k=9, return_kept=True)
    said = sample(rows, asked, positions=0, seeds=1, backend=backend).logprobs
    for r in range(5):
        assert_set(said.kept_of(r)[0], found.ids[r])
    assert score(rows, [0] * 5, num_top=9, backend=backend).top_ids.tolist() == found.ids.ravel().tolist()


@both
def test_no_rows(backend):
    rows = np.empty((0, 5), np.float32)
    for spans in ({}, {"lengths": []}, {"windows": []}, {"windows": np.empty((0, 2), np.int64)}):
        found = topk(rows, 3, backend=backend, **spans)
        assert (found.values.shape, found.ids.shape) == ((0, 3), (0, 3))


@pytest.mark.parametrize("k", [0, -1, 5, 2**40, 1.0, True, "2", None, [2]])
def test_k_is_an_integer_from_1_to_the_width(k):
    with pytest.raises(ParameterError, match=r"k=.*must be an integer in \[1, 4\], the width of the rows"):
        topk(row_of(1, 3, 2, 0), k)


@pytest.mark.parametrize("lengths", [1, [1, 2], [[1]], [-1], [5], [1.0], [True], ["1"], [[1], []], [2**63]])
def test_lengths_are_one_integer_for_each_row(lengths):
    with pytest.raises(ParameterError, match=r"lengths=.*must be an integer in \[0, 4\] for each of the 1 rows"):
        topk(row_of(1, 3, 2, 0), 1, lengths=lengths)


@pytest.mark.parametrize(
    "windows", [[0, 4], [[0, 5]], [[-1, 3]], [[3, 2]], [[0, 1, 2]], [[0, 1]] * 2, [[0.0, 1.0]], [], [[0, 4], [1]]]
)
def test_windows_are_a_begin_and_an_end_for_each_row(windows):
    with pytest.raises(ParameterError, match=r"windows=.*must be \[begin, end\], 0 <= begin <= end <= 4, for each"):
        topk(row_of(1, 3, 2, 0), 1, windows=windows)


def test_all_faults_at_once():
    with pytest.raises(ParameterError, match=r"a length n is the window \[0, n\]") as raised:
        topk(row_of(1, 3, 2, 0), 0, lengths=[1], windows=[[0, 1]])
    assert [fault.field for fault in raised.value.faults] == ["k", "windows"]
    with pytest.raises(LogitsError, match="one row"):
        topk(np.zeros(4, np.float32), 1)
    with pytest.raises(OptionError, match="backend"):
        topk(row_of(1, 3, 2, 0), 1, backend="gpu")
