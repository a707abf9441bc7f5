"""Microbatches: nothing is lost, nothing is too large, and the logits are the whole step's."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.batch.steps import BLOCK_SIZE, Part, assert_arrays, before, lay_out, mixed_parts, tables_of

from klero.batch.microbatch import merge, split
from klero.errors import LogitsError, OptionError
from klero.testing.models import PagedToyModel, ToyModel

LIMITS = st.none() | st.integers(1, 14)
OPTIONS = st.fixed_dictionaries(
    {"max_tokens": LIMITS, "max_requests": LIMITS, "apart": st.booleans(), "by_length": st.booleans()}
)

# Slot 3 decodes, slot 0 computes five tokens of its prompt, slot 2 verifies two drafts, slot 1 ends its prompt.
PARTS = [Part(3, 6, 1, 1), Part(0, 0, 5, 0, scored_from=2), Part(2, 3, 3, 3), Part(1, 1, 2, 1)]


def tokens_of(microbatches):
    """The tokens of each microbatch as (slot, position)."""
    return [
        list(zip(np.repeat(m.arrays.slots, np.diff(m.arrays.query_starts)).tolist(), m.arrays.positions.tolist(),
                 strict=True))
        for m in microbatches
    ]  # fmt: skip


def test_a_step_of_eleven_tokens_in_fours():
    """Slot 0 has five tokens: three fill the first microbatch. Slot 2 fits, slot 1 does not and is not cut."""
    step = lay_out(PARTS, tables_of(PARTS))
    assert step.logits_rows.tolist() == [0, 6, 7, 8, 10, 3, 4, 5]
    parts = split(step, max_tokens=4)
    assert tokens_of(parts) == [
        [(3, 6), (0, 0), (0, 1), (0, 2)],
        [(0, 3), (0, 4)],
        [(2, 3), (2, 4), (2, 5)],
        [(1, 1), (1, 2)],
    ]
    assert [m.arrays.seq_lens.tolist() for m in parts] == [[7, 3], [5], [6], [3]]
    assert [m.arrays.num_computed.tolist() for m in parts] == [[6, 0], [3], [3], [1]]
    assert [m.arrays.query_starts.tolist() for m in parts] == [[0, 1, 4], [0, 2], [0, 3], [0, 2]]
    assert [m.arrays.logits_rows.tolist() for m in parts] == [[0, 3], [0, 1], [0, 1, 2], [1]]
    assert [m.arrays.num_sampled for m in parts] == [1, 0, 3, 1]
    assert [m.rows.tolist() for m in parts] == [[0, 5], [6, 7], [1, 2, 3], [4]]


def test_decodes_come_first_when_they_are_apart():
    step = lay_out(PARTS, tables_of(PARTS))
    assert [m.arrays.slots.tolist() for m in split(step, apart=True)] == [[3, 2], [0, 1]]
    assert [m.arrays.slots.tolist() for m in split(step, apart=True, by_length=True)] == [[2, 3], [1, 0]]
    assert [m.arrays.slots.tolist() for m in split(step, max_requests=3, by_length=True)] == [[1, 0, 2], [3]]
    assert [m.arrays.slots.tolist() for m in split(step, max_requests=1)] == [[3], [0], [2], [1]]


def test_a_step_within_the_limits_is_returned_as_it_is():
    step = lay_out(PARTS, tables_of(PARTS))
    for options in ({}, {"max_tokens": 11}, {"max_requests": 4}, {"by_length": True}):
        (only,) = split(step, **options)
        assert only.arrays is step
        assert only.rows.tolist() == list(range(8))
    decodes = lay_out(PARTS[:1] + PARTS[2:3], tables_of(PARTS[:2]))
    assert split(decodes, apart=True)[0].arrays is decodes
    (nothing,) = split(lay_out([], np.zeros((0, 0), np.int32)), max_tokens=1, apart=True)
    assert nothing.rows.tolist() == []


def naive(parts, step, max_tokens, max_requests, apart, by_length):
    """Which tokens each microbatch takes, as (part, its own num_computed, number of tokens)."""
    whole = len(step.input_ids) <= (max_tokens or 10**9) and len(parts) <= (max_requests or 10**9)
    kinds = [parts]
    if apart:
        kinds = [
            [p for p in parts if p.num_sampled == p.num_new],
            [p for p in parts if p.num_sampled != p.num_new],
        ]
    if (whole and min(map(len, kinds)) == 0) or (whole and not apart):
        return [[(p, p.num_computed, p.num_new) for p in parts]]
    microbatches = []
    for kind in kinds:
        microbatches.append([])
        for part in sorted(kind, key=lambda p: p.end) if by_length else kind:
            taken = sum(count for *_, count in microbatches[-1])
            fits = max_tokens is None or taken + part.num_new <= max_tokens or part.num_new > max_tokens
            if not fits or len(microbatches[-1]) == max_requests:
                microbatches.append([])
            for position in range(part.num_computed, part.end):
                if sum(count for *_, count in microbatches[-1]) == max_tokens:
                    microbatches.append([])
                if microbatches[-1] and microbatches[-1][-1][0] is part:
                    _, first, count = microbatches[-1].pop()
                    microbatches[-1].append((part, first, count + 1))
                else:
                    microbatches[-1].append((part, position, 1))
    return [pieces for pieces in microbatches if pieces]


def cut(part, first, count):
    """What a microbatch does of a part: the sampled ones of its tokens are its last."""
    sampled = max(0, first + count - max(first, part.end - part.num_sampled))
    return Part(part.slot, first, count, sampled, part.scored_from, part.embedded)


@given(parts=mixed_parts(), options=OPTIONS, seed=st.integers(0, 9))
def test_every_microbatch_is_what_a_plain_loop_lays_out(parts, options, seed):
    tables = tables_of(parts, seed)
    step = lay_out(parts, tables)
    found = split(step, **options)
    expected = naive(parts, step, **options)
    assert len(found) == len(expected)
    for microbatch, pieces in zip(found, expected, strict=True):
        chosen = [[p.slot for p in parts].index(part.slot) for part, *_ in pieces]
        assert_arrays(microbatch.arrays, lay_out([cut(*piece) for piece in pieces], tables[chosen]))


@given(parts=mixed_parts(), options=OPTIONS)
def test_nothing_is_lost_and_no_limit_is_passed(parts, options):
    step = lay_out(parts, tables_of(parts))
    found = split(step, **options)
    tokens, (whole,) = tokens_of(found), tokens_of(split(step))
    taken = [token for its in tokens for token in its]
    assert sorted(taken) == sorted(whole)
    for slot in step.slots.tolist():
        assert [token for token in taken if token[0] == slot] == [token for token in whole if token[0] == slot]
    rows = [row for m in found for row in m.rows.tolist()]
    assert sorted(rows) == list(range(len(step.logits_rows)))
    decodes = {part.slot for part in parts if part.num_sampled == part.num_new}
    for microbatch, its in zip(found, tokens, strict=True):
        slots = microbatch.arrays.slots.tolist()
        assert 1 <= len(its) <= (options["max_tokens"] or len(its))
        assert len(set(slots)) == len(slots) <= (options["max_requests"] or len(slots))
        if options["apart"]:
            assert set(slots) <= decodes or not set(slots) & decodes


@given(parts=mixed_parts(), max_tokens=LIMITS, max_requests=LIMITS)
def test_in_order_the_microbatches_are_the_step(parts, max_tokens, max_requests):
    step = lay_out(parts, tables_of(parts))
    found = [m.arrays for m in split(step, max_tokens=max_tokens, max_requests=max_requests)]
    for name in ("input_ids", "positions", "slot_mapping"):
        assert np.concatenate([getattr(arrays, name) for arrays in found]).tolist() == getattr(step, name).tolist()
    begins = np.cumsum([0] + [len(arrays.input_ids) for arrays in found[:-1]])
    for kind in (slice(None, None), slice(0, step.num_sampled)):
        rows = [
            arrays.logits_rows[: arrays.num_sampled if kind.stop is not None else None] + begin
            for arrays, begin in zip(found, begins, strict=True)
        ]
        assert sorted(np.concatenate(rows).tolist()) == sorted(step.logits_rows[kind].tolist())


@given(parts=mixed_parts(), options=OPTIONS, paged=st.booleans(), seed=st.integers(0, 9))
def test_the_logits_of_a_toy_model_are_those_of_the_whole_step(parts, options, paged, seed):
    tables, model = tables_of(parts, seed), (PagedToyModel if paged else ToyModel)(vocab_size=6)
    model.allocate(tables.size + 1, BLOCK_SIZE)
    earlier = before(parts)
    if earlier:
        model.forward(lay_out(earlier, tables[[part.num_computed > 0 for part in parts]]))
    step, other = lay_out(parts, tables), copy.deepcopy(model)
    microbatches = split(step, **options)
    merged = merge([other.forward(m.arrays) for m in microbatches], microbatches)
    assert np.array_equal(merged, model.forward(step))
    assert merged.dtype == np.float32
    if paged:
        assert np.array_equal(other._cache, model._cache)


@pytest.mark.parametrize("kind", ["float32", "float16", "torch.float32", "torch.bfloat16"])
def test_merged_rows_are_in_the_step_s_order(kind):
    """Rows of the microbatches: 0, 5 | 6, 7 | 1, 2, 3 | 4."""
    step = lay_out(PARTS, tables_of(PARTS))
    microbatches = split(step, max_tokens=4)
    whole = np.arange(24).reshape(8, 3)
    if kind.startswith("torch."):
        torch = pytest.importorskip("torch")
        with torch.inference_mode():
            whole = torch.from_numpy(whole).to(getattr(torch, kind[6:]))
    else:
        whole = whole.astype(kind)
    merged = merge([whole[m.rows] for m in microbatches], microbatches)
    assert (type(merged), merged.dtype) == (type(whole), whole.dtype)
    assert merged.tolist() == whole.tolist()


def test_one_microbatch_is_not_copied_unless_its_rows_move():
    step = lay_out(PARTS, tables_of(PARTS))
    whole = np.arange(16).reshape(8, 2)
    assert merge([whole], split(step)) is whole
    decodes = [Part(0, 8, 1, 1), Part(1, 2, 1, 1), Part(2, 1, 3)]
    first, second = split(lay_out(decodes, tables_of(decodes)), apart=True, by_length=True)
    assert first.rows.tolist() == [1, 0]
    assert merge([whole[:2]], [first]).tolist() == [[2, 3], [0, 1]]
    assert second.rows.tolist() == []


def test_logits_with_the_rows_of_another_part_are_refused():
    microbatches = split(lay_out(PARTS, tables_of(PARTS)), max_tokens=4)
    parts = [np.zeros((len(m.rows), 3)) for m in microbatches]
    with pytest.raises(LogitsError, match="microbatch 1: 3 rows for 2"):
        merge([parts[0], parts[2], parts[1], parts[3]], microbatches)


@pytest.mark.parametrize("limit", ["max_tokens", "max_requests"])
def test_limits_below_one_are_refused(limit):
    with pytest.raises(OptionError, match=f"{limit}=0"):
        split(lay_out(PARTS, tables_of(PARTS)), **{limit: 0})


def test_sequences_of_one_length_keep_their_order():
    """Forty of them: short lists are sorted stably by any method."""
    parts = [Part(slot, 7 - slot % 2, 1, 1) for slot in range(40)]
    slots = [m.arrays.slots.tolist() for m in split(lay_out(parts, tables_of(parts)), max_requests=20, by_length=True)]
    assert slots == [list(range(1, 40, 2)), list(range(0, 40, 2))]
