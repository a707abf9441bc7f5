"""Padded steps: static shapes, the same answers, and nobody's state touched."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.batch.steps import BLOCK_SIZE, Part, assert_arrays, before, lay_out, mixed_parts, tables_of

from klero import SamplingParams
from klero.batch import Slot, Step
from klero.batch.microbatch import merge, split
from klero.batch.padded import Buckets, Scratch, pad
from klero.errors import OptionError
from klero.sampling.sampler import COLUMNS, Sampler, Seat
from klero.testing.models import PagedToyModel, ToyModel

BUCKETS = Buckets(tokens=(1, 4, 16, 80), rows=(1, 2, 4, 80))


def test_a_small_step_laid_out():
    """Slot 3 decodes its seventh token, slot 1 scores a prompt of two: three tokens in four, three rows in four."""
    parts = [Part(3, 6, 1, 1), Part(1, 0, 2, 0, scored_from=0)]
    padded = pad(lay_out(parts, np.array([[2, 5], [4, 0]], np.int32)), BUCKETS, scratch=Scratch(BUCKETS, 3))
    arrays = padded.arrays
    assert (padded.num_tokens, padded.num_seqs, padded.num_rows) == (3, 2, 3)
    assert arrays.positions.tolist() == [6, 0, 1, 0]
    assert arrays.slot_mapping.tolist() == [22, 16, 17, -1]
    assert arrays.query_starts.tolist() == [0, 1, 3]
    assert arrays.seq_lens.tolist() == [7, 2]
    assert arrays.num_computed.tolist() == [6, 0]
    assert arrays.block_tables.tolist() == [[2, 5, 0], [4, 0, 0]]
    assert arrays.slots.tolist() == [3, 1]
    assert arrays.logits_rows.tolist() == [0, 1, 2, 3]  # the last is the padding token's
    assert arrays.num_sampled == 1


def test_padding_sequences_have_no_tokens():
    """Four tokens need no padding, so that the padding row is that of token 0."""
    parts = [Part(2, 0, 2, 1), Part(0, 4, 1, 1), Part(1, 5, 1, 1)]
    padded = pad(lay_out(parts, tables_of(parts)), BUCKETS, scratch=Scratch(BUCKETS, 2))
    assert padded.arrays.query_starts.tolist() == [0, 2, 3, 4, 4]
    assert padded.arrays.seq_lens.tolist() == [2, 5, 6, 0]
    assert padded.arrays.slots.tolist() == [2, 0, 1, -1]
    assert padded.arrays.block_tables[3].tolist() == [0, 0]
    assert padded.arrays.logits_rows.tolist() == [1, 2, 3, 0]


@given(parts=mixed_parts(), former=mixed_parts())
def test_the_step_is_in_front_and_nothing_of_a_former_one_shows(parts, former):
    scratch = Scratch(BUCKETS, 6)
    pad(lay_out(former, tables_of(former)), BUCKETS, scratch=scratch)
    tables = tables_of(parts)
    step = lay_out(parts, tables)
    padded = pad(step, BUCKETS, scratch=scratch)
    assert_arrays(pad(step, BUCKETS, scratch=Scratch(BUCKETS, 6)).arrays, padded.arrays)
    arrays, num_tokens, num_seqs, num_rows = padded.arrays, padded.num_tokens, padded.num_seqs, padded.num_rows
    assert (len(arrays.input_ids), len(arrays.slots), len(arrays.logits_rows)) == BUCKETS.fit(
        num_tokens, num_seqs, num_rows
    )
    front = {
        "input_ids": num_tokens, "positions": num_tokens, "slot_mapping": num_tokens, "is_embedded": num_tokens,
        "inputs_embeds": num_tokens, "query_starts": num_seqs + 1, "seq_lens": num_seqs, "num_computed": num_seqs,
        "slots": num_seqs, "logits_rows": num_rows,
    }  # fmt: skip
    behind = {"slot_mapping": -1, "slots": -1, "query_starts": num_tokens}
    for name, length in front.items():
        whole, values = getattr(arrays, name), getattr(step, name)
        if values is None:
            assert whole is None
            continue
        assert whole.dtype == values.dtype
        assert whole[:length].tolist() == values.tolist()
        if name == "logits_rows":
            assert set(whole[length:].tolist()) <= {num_tokens if len(arrays.input_ids) > num_tokens else 0}
        else:
            assert (whole[length:] == behind.get(name, 0)).all()
    assert arrays.block_tables[:num_seqs, : tables.shape[1]].tolist() == tables.tolist()
    assert not arrays.block_tables[num_seqs:].any()
    assert not arrays.block_tables[:, tables.shape[1] :].any()


def test_the_same_shape_is_the_same_memory():
    parts, scratch = [Part(0, 2, 1, 1), Part(1, 0, 2, 1)], Scratch(BUCKETS, 2)
    first = pad(lay_out(parts, tables_of(parts)), BUCKETS, scratch=scratch)
    second = pad(lay_out(parts[::-1], tables_of(parts)), BUCKETS, scratch=scratch)
    for name, array in vars(first.arrays).items():
        if isinstance(array, np.ndarray):
            other = getattr(second.arrays, name)
            assert (array.ctypes.data, array.shape, array.strides) == (other.ctypes.data, other.shape, other.strides)


@given(parts=mixed_parts(), paged=st.booleans(), max_tokens=st.none() | st.integers(1, 9), seed=st.integers(0, 9))
def test_a_toy_model_gives_the_same_logits_and_keeps_the_same_state(parts, paged, max_tokens, seed):
    """Of the whole step, and of its microbatches padded one by one; only the scratch block may differ."""
    tables, model = tables_of(parts, seed), (PagedToyModel if paged else ToyModel)(vocab_size=6)
    model.allocate(tables.size + 1, BLOCK_SIZE)
    earlier = before(parts)
    if earlier:
        model.forward(lay_out(earlier, tables[[part.num_computed > 0 for part in parts]]))
    step, other, scratch = lay_out(parts, tables), copy.deepcopy(model), Scratch(BUCKETS, tables.shape[1] + 1)
    microbatches, logits = split(step, max_tokens=max_tokens), []
    for microbatch in microbatches:
        padded = pad(microbatch.arrays, BUCKETS, scratch=scratch)
        logits.append(other.forward(padded.arrays)[: padded.num_rows])
    assert np.array_equal(merge(logits, microbatches), model.forward(step))
    if paged:
        assert np.array_equal(other._cache, model._cache)
    assert other._states == model._states


def test_the_row_of_a_padding_token_is_not_a_number():
    """So that a test of an engine that reads one fails."""
    parts = [Part(0, 0, 3, 1)]
    for model in (ToyModel(vocab_size=5), PagedToyModel(vocab_size=5)):
        model.allocate(1, BLOCK_SIZE)
        padded = pad(lay_out(parts, tables_of(parts)), Buckets((8,), (3,)), scratch=Scratch(Buckets((8,), (3,)), 1))
        logits = model.forward(padded.arrays)
        assert np.isnan(logits).all(axis=1).tolist() == [False, True, True]


def test_rows_of_a_step_are_padded_behind():
    """Slots 4 and 2 have two rows and one; slot 7, where nobody sits, lends its columns to two more."""
    step = Step(
        slots=(Slot(4, 0), Slot(2, 3)),
        slot_of_row=np.array([4, 4, 2], np.int32),
        position_of_row=np.array([9, 10, 5], np.uint32),
        child_of_row=np.array([1, 1, 0], np.uint32),
        draft_of_row=np.array([0, -1, -1], np.int32),
        row_starts=np.array([0, 2, 3], np.int32),
    )
    padded = step.padded(5, scratch_slot=7)
    assert padded.num_rows == 5
    assert padded.slot_of_row.tolist() == [4, 4, 2, 7, 7]
    assert padded.position_of_row.tolist() == [9, 10, 5, 0, 0]
    assert padded.child_of_row.tolist() == [1, 1, 0, 0, 0]
    assert padded.draft_of_row.tolist() == [0, -1, -1, -1, -1]
    assert (padded.slots, padded.row_starts.tolist()) == (step.slots, [0, 2, 3])
    assert [getattr(padded, name).dtype for name in ("slot_of_row", "position_of_row", "child_of_row")] == [
        np.int32, np.uint32, np.uint32
    ]  # fmt: skip
    assert step.padded(3, scratch_slot=7).slot_of_row.tolist() == [4, 4, 2]
    with pytest.raises(OptionError, match="num_rows=2: the step has 3"):
        step.padded(2, scratch_slot=7)


def test_buckets():
    assert Buckets.doubling(12, 4) == Buckets((1, 2, 4, 8, 12), (1, 2, 4))
    assert Buckets.doubling(1, 1) == Buckets((1,), (1,))
    assert BUCKETS.fit(5, 3, 0) == (16, 4, 1)
    for sizes in ((), (0, 2), (4, 4), (4, 2)):
        with pytest.raises(OptionError, match=r"Buckets\.rows"):
            Buckets((1,), sizes)


@pytest.mark.parametrize("buckets, says", [(Buckets((2,), (9,)), "3 tokens"), (Buckets((9,), (2,)), "3 sequences"),
                                           (Buckets((9,), (3,)), "5 blocks")])  # fmt: skip
def test_what_is_larger_than_every_bucket_is_refused(buckets, says):
    parts = [Part(slot, 16 * (slot == 1), 1, 1) for slot in range(3)]
    with pytest.raises(OptionError, match=says):
        pad(lay_out(parts, tables_of(parts)), buckets, scratch=Scratch(buckets, 4))


def test_more_rows_than_every_bucket_are_refused():
    parts, buckets = [Part(0, 0, 5, 5)], Buckets((8,), (4,))
    with pytest.raises(OptionError, match="5 rows"):
        pad(lay_out(parts, tables_of(parts)), buckets, scratch=Scratch(buckets, 2))


PARAMS = (
    SamplingParams(temperature=1.0, repetition_penalty=1.3, no_repeat_ngram_size=2),
    SamplingParams(temperature=0.7, top_p=0.9, top_p_decay=0.8, logprobs=2),
    SamplingParams(),
    SamplingParams(temperature=1.0, filters=(len,)),
)


def state_of(sampler):
    """Everything that outlives a step, by slot."""
    columns = {name: sampler.columns[name].tolist() for name in COLUMNS}
    arrays = {} if sampler.rules is None else sampler.rules.arrays()._asdict()
    rules = {name: array.tolist() for name, array in arrays.items() if isinstance(array, np.ndarray)}
    tokens = [sampler.history.tokens(index).tolist() for index in range(5)]
    return columns, rules, tokens, sampler.slots.num_free


@pytest.mark.parametrize("scratch_slot", [4, 1])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_no_sequence_s_state_is_touched_by_a_padding_row(backend, scratch_slot):
    """Four slots of five are seated. Padding reads the columns of the fifth, or of a slot that somebody has."""
    plain, padded = (Sampler(num_slots=5, vocab_size=9, max_len=12, backend=backend) for _ in range(2))
    for sampler in (plain, padded):
        seats = [Seat(str(n), params, [n, 2, 3], seed=n) for n, params in enumerate(PARAMS)]
        slots = sampler.setup_step(seats)
    for turn in range(4):
        chosen = slots[turn % 2 :]
        logits = np.random.default_rng(turn).normal(size=(len(chosen), 9)).astype(np.float32)
        behind = np.full((7 - len(chosen), 9), np.nan if turn else 1.0, np.float32)
        expected = plain.update_requests(plain.sample_async(plain.step_of(chosen), logits))
        step = padded.step_of(chosen).padded(7, scratch_slot)
        found = padded.update_requests(padded.sample_async(step, np.concatenate([logits, behind])))
        assert found == expected
        assert state_of(padded) == state_of(plain)
    assert padded.history.lengths.tolist() == [5, 7, 7, 7, 0]
