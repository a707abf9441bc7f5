"""The toy models: what lies in their blocks, and what embeddings stand for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.batch.steps import BLOCK_SIZE, Part, embedding, lay_out, mixed_parts, tables_of, token_id

from klero.batch.scheduler_output import BlockMoves
from klero.testing.models import PagedToyModel, ToyModel, logits_of_state, state_after, token_of_embedding


def expected_row(slot, num_tokens, embedded, vocab_size):
    """By definition: every token folded in, one after the other."""
    state = 0
    for position in range(num_tokens):
        known = position >= embedded
        token = token_id(slot, position) if known else token_of_embedding(embedding(slot, position))
        state = state_after(state, token, position)
    return logits_of_state(state, vocab_size, 4.0)


@given(parts=mixed_parts(), model=st.sampled_from([ToyModel, PagedToyModel]))
def test_a_row_depends_on_its_sequence_alone(parts, model):
    parts = [part._replace(num_computed=0, num_new=part.end) for part in parts]
    tables, model = tables_of(parts), model(vocab_size=5)
    model.allocate(tables.size + 1, BLOCK_SIZE)
    step = lay_out(parts, tables)
    part_of_token = np.repeat(np.arange(len(parts)), np.diff(step.query_starts))
    for row, token in zip(model.forward(step), step.logits_rows, strict=True):
        part, position = parts[part_of_token[token]], step.positions[token]
        assert row.tolist() == expected_row(part.slot, position + 1, part.embedded, 5).tolist()


def test_embeddings_stand_for_a_token_by_their_bytes():
    zero = np.zeros(4, np.float32)
    assert token_of_embedding(zero) != token_of_embedding(-zero)
    assert 0 <= token_of_embedding(zero) < 2**56
    assert ToyModel().hidden_size == len(zero)


def test_moves_come_in_order():
    """Four blocks of one token; 20 goes out before 10 is copied over it; 10 goes on to block 2; 20 comes in to 3."""
    model = PagedToyModel()
    model.allocate(4, 1, num_host_blocks=2)
    model._cache[:] = [10, 20, 30, 40]
    model.move_blocks(BlockMoves(swap_out=((1, 1),), copy=((0, 1), (1, 2)), swap_in=((1, 3),), zero=(0,)))
    assert model._cache.tolist() == [0, 10, 10, 20]
    assert model._host.tolist() == [-9, 20]


@pytest.mark.parametrize("block_size", [1, 4])
def test_what_belongs_to_nobody_goes_to_the_scratch_block(block_size):
    model, part = PagedToyModel(), Part(0, 0, 3, 1)
    model.allocate(3, block_size)
    step = lay_out([part], np.arange(3)[None], block_size)
    longer = {name: np.append(getattr(step, name), 9) for name in ("input_ids", "positions")}
    model.forward(dataclasses.replace(step, slot_mapping=np.append(step.slot_mapping, -1), **longer))
    assert model._cache[:3].tolist() == [token_id(0, position) for position in range(3)]
    assert (model._cache[3:] == -7).all()
    assert model._memory[3 * block_size] == 9
