"""A row's token is its own: batch, order, neighbours, padding, threads, layout and backend do not enter."""

import os
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klero import explain, sample
from klero.device import HAVE_NUMBA, over_rows
from klero.params import ROW_DTYPE
from klero.rows.inputs import as_bits
from klero.sampling import fused
from klero.sampling import work as working
from klero.sampling.fused import reference
from klero.testing import assert_token, nasty_params, nasty_rows

needs_numba = pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba")
BACKENDS = st.sampled_from(["auto", "reference"])
WIDTHS = st.sampled_from([1, 2, 5, 31, 33, 255, 256, 257, 700])
SEEDS = st.integers(0, 2**32)
HEIGHTS = st.integers(1, 12)


class Batch:
    """Rows with all that belongs to them, drawn together or in any other company."""

    def __init__(self, num_rows, vocab_size, seed):
        rng = np.random.default_rng(seed)
        self.rows = nasty_rows(num_rows, vocab_size, seed)
        self.params = nasty_params(num_rows, vocab_size, seed)
        self.seeds = rng.integers(0, 2**64, num_rows, dtype=np.uint64)
        self.positions = rng.integers(0, 9000, num_rows)
        self.children = rng.integers(0, 3, num_rows)

    def draw(self, chosen=None, rows=None, backend="auto"):
        """(token, status, number kept) of the chosen rows, int [N, 3]."""
        chosen = np.arange(len(self.rows)) if chosen is None else np.asarray(chosen)
        sampled = sample(
            self.rows[chosen] if rows is None else rows,
            [self.params[i] for i in chosen],
            positions=self.positions[chosen],
            seeds=self.seeds[chosen],
            children=self.children[chosen],
            backend=backend,
        )
        return np.stack([sampled.token_ids, sampled.status, sampled.num_kept], axis=1)


BATCHES = st.builds(Batch, HEIGHTS, WIDTHS, SEEDS)


@given(BATCHES, BACKENDS)
def test_alone_or_together(batch, backend):
    together = batch.draw(backend=backend)
    for i in range(len(batch.rows)):
        assert_token(batch.draw([i], backend=backend), together[i : i + 1], f"row {i} alone")


@given(BATCHES, BACKENDS, st.data())
def test_any_order_any_company_any_number_of_times(batch, backend, data):
    together = batch.draw(backend=backend)
    chosen = data.draw(st.lists(st.integers(0, len(batch.rows) - 1), max_size=20))
    assert_token(batch.draw(np.array(chosen, int), backend=backend), together[chosen])


@given(BATCHES, SEEDS)
def test_neighbours_of_any_kind(batch, other_seed):
    together = batch.draw()
    num_rows, vocab_size = batch.rows.shape
    other = Batch(num_rows, vocab_size, other_seed)
    rows = np.empty((2 * num_rows, vocab_size), np.float32)
    rows[::2], rows[1::2] = batch.rows, other.rows

    def mixed(mine, theirs):
        return [value for pair in zip(mine, theirs, strict=True) for value in pair]

    sampled = sample(
        rows,
        mixed(batch.params, other.params),
        positions=mixed(batch.positions, other.positions),
        seeds=mixed(batch.seeds, other.seeds),
        children=mixed(batch.children, other.children),
    )
    assert_token(sampled.token_ids[::2], together[:, 0])
    assert_token(sampled.status[::2], together[:, 1])


@given(BATCHES, st.integers(1, 40), st.sampled_from([0.0, -np.inf, np.nan, np.inf]))
def test_padding_rows(batch, num_padding, filling):
    together = batch.draw()
    num_rows, vocab_size = batch.rows.shape
    padded = np.full((num_rows + num_padding, vocab_size), filling, np.float32)
    padded[:num_rows] = batch.rows
    sampled = sample(
        padded,
        batch.params + batch.params[:1] * num_padding,
        positions=np.append(batch.positions, np.zeros(num_padding, int)),
        seeds=np.append(batch.seeds, np.zeros(num_padding, np.uint64)),
        children=np.append(batch.children, np.zeros(num_padding, int)),
    )
    assert_token(sampled.token_ids[:num_rows], together[:, 0])


@given(BATCHES, BACKENDS)
def test_memory_layout(batch, backend):
    together = batch.draw(backend=backend)
    num_rows, vocab_size = batch.rows.shape
    wide = np.full((2 * num_rows, 3 * vocab_size), np.nan, np.float32)
    wide[::2, ::3] = batch.rows
    backwards = np.ascontiguousarray(batch.rows[::-1, ::-1])[::-1, ::-1]
    unaligned = np.frombuffer(b"x" + batch.rows.tobytes(), np.float32, offset=1).reshape(batch.rows.shape)
    layouts = {
        "strided": wide[::2, ::3],
        "Fortran": np.asfortranarray(batch.rows),
        "negative strides": backwards,
        "byte-swapped": batch.rows.astype(batch.rows.dtype.newbyteorder()),
        "one column of a cube": np.stack([batch.rows, np.zeros_like(batch.rows)], axis=-1)[..., 0],
        "unaligned": unaligned,
    }
    for name, rows in layouts.items():
        assert_token(batch.draw(rows=rows, backend=backend), together, name)


@given(BATCHES)
def test_backends(batch):
    assert_token(batch.draw(backend="auto"), batch.draw(backend="reference"))


@given(st.builds(Batch, st.integers(1, 60), WIDTHS, SEEDS))
def test_threads(batch):
    right = batch.draw()
    for threads in ("1", "2", "3", "8"):
        with mock.patch.dict(os.environ, KLERO_NUM_THREADS=threads):
            assert_token(batch.draw(), right, f"{threads} threads")


@given(st.builds(Batch, st.integers(1, 30), WIDTHS, SEEDS), st.sampled_from([1, 2, 3, 7]), st.integers(1, 9))
def test_ranges_of_rows(batch, threads, grain):
    right = batch.draw()

    def cut_differently(work, num_rows, _threads):
        over_rows(work, num_rows, threads, grain=grain)

    with mock.patch.object(working, "over_rows", cut_differently):
        assert_token(batch.draw(), right)


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=needs_numba)])
@given(batch=BATCHES, data=st.data())
def test_rows_that_are_not_chosen_are_neither_read_nor_written(backend, batch, data):
    """The sampler's way: all rows of a step lie there, some are drawn."""
    num_rows = len(batch.rows)
    chosen = np.array(sorted(data.draw(st.sets(st.integers(0, num_rows - 1)))), np.int64)
    others = np.setdiff1d(np.arange(num_rows), chosen)
    right = batch.draw()
    rows = batch.rows.copy()
    rows[others] = np.nan
    out = np.full(num_rows, 77, np.int32), np.full(num_rows, 77, np.uint8), np.full(num_rows, 77, np.int32)
    sample_rows = reference.sample_rows if backend == "reference" else fused.cpu_kernel()
    sample_rows(
        *((rows,) if backend == "reference" else (as_bits(rows), rows.shape[1])),
        chosen,
        np.array([params.row for params in batch.params], ROW_DTYPE),
        batch.seeds,
        batch.positions.astype(np.uint32),
        batch.children.astype(np.uint32),
        *out,
    )
    for mine, column in zip(out, (0, 1, 2), strict=True):
        assert_token(mine[chosen], right[chosen, column])
        assert set(mine[others].tolist()) <= {77}


@given(BATCHES)
def test_explain_draws_the_same(batch):
    for i, (token, status, num_kept) in enumerate(batch.draw().tolist()):
        explained = explain(
            batch.rows[i], batch.params[i], seed=int(batch.seeds[i]), position=int(batch.positions[i]),
            child=int(batch.children[i]),
        )  # fmt: skip
        assert (explained.token, explained.status, len(explained.kept)) == (token, status, num_kept)


@given(BATCHES, BACKENDS)
def test_the_same_call_twice(batch, backend):
    before = batch.rows.tobytes()
    assert_token(batch.draw(backend=backend), batch.draw(backend=backend))
    assert batch.rows.tobytes() == before


@needs_numba
def test_flush_to_zero_of_another_library_does_not_enter():
    torch = pytest.importorskip("torch")
    batch = Batch(200, 64, 5)
    right = batch.draw(), batch.draw(backend="reference")
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        assert_token(batch.draw(), right[0])
        assert_token(batch.draw(backend="reference"), right[1])
    finally:
        torch.set_flush_denormal(False)
