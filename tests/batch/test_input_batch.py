"""InputBatch: the arrays of small steps, checked by eye."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from tests.batch.batches import A, B, C, append, batch_of, lists, new

from klero.batch import Slot, Step
from klero.batch.scheduler_output import BlockMoves, ChangedSequence, SchedulerOutput
from klero.errors import RequestError, SlotError


def test_positions_to_slot_mapping():
    """Block size 16, blocks 5 and 9: positions 0..17 lie at 80..95, 144, 145."""
    batch = batch_of(16, max_len=32)
    batch.update(SchedulerOutput({A: 18}, new=(new("a", range(18), (5, 9)),)))
    arrays, _ = batch.fill()
    assert arrays.slot_mapping.tolist() == [*range(80, 96), 144, 145]
    assert arrays.slot_mapping.dtype == np.int64


def test_a_table_keeps_nothing_of_its_last_owner():
    """Width 6: the owner of 1..5 leaves, that of 6 and 7 enters."""
    batch = batch_of(2, max_len=12, max_num_seqs=1)
    batch.update(SchedulerOutput({A: 10}, new=(new("a", range(10), (1, 2, 3, 4, 5)),)))
    assert batch.block_tables.tolist() == [[1, 2, 3, 4, 5, 0]]
    assert batch.fill()[0].block_tables.tolist() == [[1, 2, 3, 4, 5]]
    batch.update(SchedulerOutput({B: 4}, new=(new("b", range(4), (6, 7)),), finished=(A,)))
    assert batch.block_tables.tolist() == [[6, 7, 0, 0, 0, 0]]
    assert batch.fill()[0].block_tables.tolist() == [[6, 7]]
    assert batch.num_blocks_of_slot.tolist() == [2]


def test_a_small_mixed_step():
    """a decodes its 4th token, b computes two of its three prompt tokens, c a whole prompt of one."""
    batch = batch_of()
    batch.update(SchedulerOutput({A: 3}, new=(new("a", [10, 11, 12], (7, 8)),)))
    append(batch, a=13)
    batch.update(
        SchedulerOutput({A: 1, B: 2, C: 1}, new=(new("b", [20, 21, 22], (3, 4)), new("c", [30], (5,), child=0)))
    )
    arrays, step = batch.fill()
    assert lists(arrays) == {
        "input_ids": [13, 20, 21, 30],
        "positions": [3, 0, 1, 0],
        "slot_mapping": [17, 6, 7, 10],
        "query_starts": [0, 1, 3, 4],
        "num_computed": [3, 0, 0],
        "seq_lens": [4, 2, 1],
        "block_tables": [[7, 8], [3, 4], [5, 0]],
        "slots": [0, 1, 2],
        "logits_rows": [0, 3],
        "num_sampled": 2,
        "inputs_embeds": None,
        "is_embedded": None,
    }
    assert lists(step) == {
        "slots": (batch.slot_of(A), batch.slot_of(C)),
        "slot_of_row": [0, 2],
        "position_of_row": [4, 1],
        "child_of_row": [0, 0],
        "draft_of_row": [-1, -1],
        "row_starts": [0, 1, 2],
    }


def test_the_order_of_a_step_is_that_of_num_tokens_and_slots_do_not_move():
    batch = batch_of()
    batch.update(SchedulerOutput({A: 1, B: 1, C: 1}, new=tuple(new(n, [k], (k,)) for k, n in enumerate("abc"))))
    append(batch, a=5, b=6, c=7)
    batch.update(SchedulerOutput({C: 1, A: 1}, finished=(B,)))
    arrays, step = batch.fill()
    assert arrays.slots.tolist() == [2, 0]
    assert arrays.input_ids.tolist() == [7, 5]
    assert step.slots == (batch.slot_of(C), batch.slot_of(A))
    assert batch.num_seqs == 2
    assert A in batch
    assert B not in batch
    assert [batch.sequence_of(slot).id for slot in step.slots] == [C, A]


def test_the_last_step_counts_as_computed_and_num_computed_says_otherwise():
    batch = batch_of()
    batch.update(SchedulerOutput({A: 2}, new=(new("a", range(6), (1, 2, 3), num_computed=2),)))
    assert batch.num_computed[0] == 2
    batch.update(SchedulerOutput({A: 1}))
    assert batch.fill()[0].positions.tolist() == [4]
    batch.update(SchedulerOutput({A: 3}, changed=(ChangedSequence(A, num_computed=1),)))
    assert batch.fill()[0].positions.tolist() == [1, 2, 3]
    batch.update(SchedulerOutput())
    assert batch.num_computed[0] == 4
    assert batch.fill()[0].input_ids.tolist() == []


def test_preempted_and_resumed():
    """Slot and tokens stay; blocks and what was computed are gone."""
    batch = batch_of()
    batch.update(SchedulerOutput({A: 3}, new=(new("a", [1, 2, 3], (4, 5)),)))
    slot = batch.slot_of(A)
    append(batch, a=9)
    batch.update(SchedulerOutput(preempted=(A,)))
    assert batch.block_tables[0].tolist() == [0] * 6
    assert (batch.num_computed[0], batch.num_blocks_of_slot[0]) == (0, 0)
    batch.update(SchedulerOutput({A: 4}, changed=(ChangedSequence(A, (8, 6), resumed=True),)))
    arrays, step = batch.fill()
    assert arrays.input_ids.tolist() == [1, 2, 3, 9]
    assert arrays.slot_mapping.tolist() == [16, 17, 12, 13]
    assert step.slots == (slot,)


def test_preempted_and_resumed_in_one_record_with_what_was_swapped_in():
    batch = batch_of()
    batch.update(SchedulerOutput({A: 3}, new=(new("a", [1, 2, 3], (4, 5)),)))
    change = ChangedSequence(A, (8, 5), resumed=True, num_computed=2)
    batch.update(SchedulerOutput({A: 1}, changed=(change,), preempted=(A,)))
    assert batch.fill()[0].slot_mapping.tolist() == [10]


def test_a_copy_replaces_a_shared_block():
    """The table is sent anew; what is computed goes on where the last step ended."""
    batch = batch_of()
    batch.update(SchedulerOutput({A: 3}, new=(new("a", [1, 2, 3], (4, 5)),)))
    append(batch, a=9)
    moves = BlockMoves(copy=((5, 7),))
    change = ChangedSequence(A, (4, 7), resumed=True)
    batch.update(SchedulerOutput({A: 1}, changed=(change,), moves=moves))
    arrays, _ = batch.fill()
    assert moves.any
    assert not BlockMoves().any
    assert arrays.slot_mapping.tolist() == [15]
    assert batch.block_tables[0].tolist() == [4, 7, 0, 0, 0, 0]


def test_tokens_that_were_sampled_elsewhere():
    batch = batch_of()
    batch.update(SchedulerOutput({A: 1, B: 1}, new=(new("a", [1], (1, 2)), new("b", [2], (3,)))))
    changed = (ChangedSequence(A, new_token_ids=(7, 8, 9)), ChangedSequence(B, new_token_ids=(5,)))
    batch.update(SchedulerOutput({B: 1, A: 3}, changed=changed))
    arrays, step = batch.fill()
    assert arrays.input_ids.tolist() == [5, 7, 8, 9]
    assert step.position_of_row.tolist() == [2, 4]


def test_drafts():
    """a has 3 tokens, of which one is left to compute, and 2 drafts: 3 rows. b decodes beside it."""
    batch = batch_of(max_len=8)
    batch.update(SchedulerOutput({A: 2, B: 1}, new=(new("a", [1, 2], (1, 2, 3)), new("b", [3], (4,), child=0))))
    append(batch, a=5, b=6)
    batch.update(SchedulerOutput({A: 3, B: 1}, changed=(ChangedSequence(A, draft_ids=(50, 51)),)))
    arrays, step = batch.fill()
    assert arrays.input_ids.tolist() == [5, 50, 51, 6]
    assert arrays.positions.tolist() == [2, 3, 4, 1]
    assert arrays.seq_lens.tolist() == [5, 2]
    assert arrays.logits_rows.tolist() == [0, 1, 2, 3]
    assert arrays.num_sampled == 4
    assert lists(step) | {"slots": None} == {
        "slots": None,
        "slot_of_row": [0, 0, 0, 1],
        "position_of_row": [3, 4, 5, 2],
        "child_of_row": [0, 0, 0, 0],
        "draft_of_row": [0, 1, -1, -1],
        "row_starts": [0, 3, 4],
    }
    assert step.slots == (batch.slot_of(A), batch.slot_of(B))


@pytest.mark.parametrize(
    "taken, computed", [([], 3), ([9], 3), ([50], 4), ([50, 9], 4), ([50, 51, 9], 5), ([50, 51], 5), ([51], 3)]
)
def test_of_drafts_those_count_as_computed_that_the_history_has_taken(taken, computed):
    batch = batch_of(max_len=8)
    batch.update(SchedulerOutput({A: 3}, new=(new("a", [1, 2, 3], (1, 2, 3)),)))
    batch.update(SchedulerOutput({A: 5}, changed=(ChangedSequence(A, num_computed=0, draft_ids=(50, 51)),)))
    for token in taken:
        append(batch, a=token)
    batch.update(SchedulerOutput())
    assert batch.num_computed[0] == computed


def test_scored_rows_come_after_the_sampled_ones():
    """b scores its whole chunk of two; c only decodes; a ends and scores from position 1 on."""
    batch = batch_of(None)
    batch.update(SchedulerOutput({C: 1}, new=(new("c", [30]),)))
    append(batch, c=31)
    seqs = new("a", [10, 11, 12, 13]), new("b", [20, 21, 22])
    batch.update(SchedulerOutput({B: 2, C: 1, A: 4}, new=seqs, scored_from={B: 0, A: 1}))
    arrays, _ = batch.fill()
    assert arrays.input_ids.tolist() == [20, 21, 31, 10, 11, 12, 13]
    assert arrays.num_sampled == 2
    assert arrays.logits_rows.tolist() == [2, 6, 0, 1, 4, 5]


def test_drafts_are_not_scored():
    batch = batch_of(None)
    batch.update(SchedulerOutput(new=(new("a", [1, 2, 3]),)))
    changed = (ChangedSequence(A, draft_ids=(8,)),)
    batch.update(SchedulerOutput({A: 4}, changed=changed, scored_from={A: 0}))
    arrays, _ = batch.fill()
    assert arrays.logits_rows.tolist() == [2, 3, 0, 1]
    assert arrays.num_sampled == 2


def test_a_sequence_that_is_only_scored_is_never_sampled():
    batch = batch_of(None)
    batch.update(SchedulerOutput({A: 3}, new=(new("a", [1, 2, 3], samples=False),), scored_from={A: 1}))
    arrays, step = batch.fill()
    assert arrays.logits_rows.tolist() == [1, 2]
    assert arrays.num_sampled == 0
    assert step.num_rows == 0


def test_embeddings_stand_before_the_ids():
    """Positions 0 to 2 are embedded, 3 and 4 are ids; the prompt comes in two chunks, beside a decode."""
    embeds = np.arange(6, dtype=np.float32).reshape(3, 2) + 1
    batch = batch_of(max_len=8)
    batch.update(SchedulerOutput({B: 1, A: 2}, new=(new("a", [40, 41], (3, 5, 6), embeds=embeds), new("b", [9], (1,)))))
    arrays, step = batch.fill()
    assert arrays.input_ids.tolist() == [9, 0, 0]
    assert arrays.positions.tolist() == [0, 0, 1]
    assert arrays.slot_mapping.tolist() == [2, 6, 7]
    assert arrays.is_embedded.tolist() == [False, True, True]
    assert arrays.inputs_embeds.tolist() == [[0, 0], [1, 2], [3, 4]]
    assert arrays.inputs_embeds.dtype == np.float32
    assert step.slot_of_row.tolist() == [1]
    batch.update(SchedulerOutput({A: 3}))
    arrays, step = batch.fill()
    assert arrays.input_ids.tolist() == [0, 40, 41]
    assert arrays.inputs_embeds.tolist() == [[5, 6], [0, 0], [0, 0]]
    assert step.position_of_row.tolist() == [5]
    append(batch, a=42)
    batch.update(SchedulerOutput({A: 1}))
    arrays, step = batch.fill()
    assert arrays.input_ids.tolist() == [42]
    assert arrays.positions.tolist() == [5]
    assert arrays.inputs_embeds is None
    assert arrays.is_embedded is None
    assert step.position_of_row.tolist() == [6]


def test_a_prompt_of_embeddings_alone():
    batch = batch_of()
    batch.update(SchedulerOutput({A: 2}, new=(new("a", (), (1,), embeds=np.ones((2, 3), np.float32)),)))
    arrays, step = batch.fill()
    assert arrays.input_ids.tolist() == [0, 0]
    assert step.position_of_row.tolist() == [2]


def test_the_children_of_a_request_are_sequences():
    batch = batch_of()
    two = new("a", [1, 2], (1,), child=0), new("a", [1, 2], (1,), child=1)
    batch.update(SchedulerOutput({("a", 1): 2, ("a", 0): 2}, new=two))
    _, step = batch.fill()
    assert step.child_of_row.tolist() == [1, 0]
    assert step.child_of_row.dtype == np.uint32


def test_a_model_without_blocks():
    batch = batch_of(None)
    batch.update(SchedulerOutput({A: 3}, new=(new("a", [1, 2, 3]),)))
    arrays, _ = batch.fill()
    assert arrays.block_tables.shape == (1, 0)
    assert arrays.slot_mapping.tolist() == [-1, -1, -1]


def test_a_step_of_nothing():
    arrays, step = batch_of().fill()
    assert arrays.input_ids.tolist() == []
    assert arrays.query_starts.tolist() == [0]
    assert arrays.block_tables.shape == (0, 0)
    assert step.num_rows == 0


def test_arrays_are_made_once_and_steps_have_their_own():
    batch = batch_of()
    batch.update(SchedulerOutput({A: 1}, new=(new("a", [1], (1,)),)))
    first, step = batch.fill()
    rows = step.position_of_row.copy()
    append(batch, a=7)
    batch.update(SchedulerOutput({A: 1}))
    second, _ = batch.fill()
    for field in fields(first):
        before, after = getattr(first, field.name), getattr(second, field.name)
        if isinstance(before, np.ndarray):
            assert np.shares_memory(before, after), field.name
    assert step.position_of_row.tolist() == rows.tolist()


def test_a_finished_name_enters_again():
    batch = batch_of(max_num_seqs=1)
    batch.update(SchedulerOutput({A: 1}, new=(new("a", [1], (1,)),)))
    old = batch.slot_of(A)
    batch.update(SchedulerOutput({A: 2}, new=(new("a", [8, 9], (2,)),), finished=(A,)))
    assert batch.fill()[0].input_ids.tolist() == [8, 9]
    assert batch.slot_of(A) != old


def test_a_row_belongs_to_who_sits_there_now():
    """b takes the slot that a has left; the step names the turn of b."""
    batch = batch_of(max_num_seqs=1)
    batch.update(SchedulerOutput({A: 1}, new=(new("a", [1], (1,)),)))
    _, former = batch.fill()
    batch.update(SchedulerOutput({B: 1}, new=(new("b", [2], (2,)),), finished=(A,)))
    _, step = batch.fill()
    assert (former.slots[0].index, step.slots[0].index) == (0, 0)
    assert step.slots == (batch.slot_of(B),) != former.slots


def test_two_finished_names_enter_again_in_another_order():
    batch = batch_of(max_num_seqs=2)
    batch.update(SchedulerOutput({A: 1, B: 1}, new=(new("a", [1], (1,)), new("b", [2], (2,)))))
    again = new("b", [4], (4,)), new("a", [3], (3,))
    batch.update(SchedulerOutput({A: 1, B: 1}, new=again, finished=(A, B)))
    arrays, step = batch.fill()
    assert arrays.input_ids.tolist() == [3, 4]
    assert step.slots == (batch.slot_of(A), batch.slot_of(B))


def test_keep_drops_everybody_else():
    batch = batch_of(max_num_seqs=3)
    batch.update(SchedulerOutput({A: 1, B: 2}, new=(new("a", [1], (1,)), new("b", [2, 3], (2,)), new("c", [4], (3,)))))
    assert batch.keep([B, ("never", 0)]) == [0, 2]
    assert batch.index_of == {B: 1}
    assert batch.num_computed.tolist() == [0, 2, 0]
    assert batch.block_tables[:, 0].tolist() == [0, 2, 0]
    assert batch.fill()[0].input_ids.tolist() == []
    batch.update(SchedulerOutput({A: 1}, new=(new("a", [1], (1,)), new("c", [4], (3,)))))


def test_a_slot_names_its_owner_and_nobody_after_him():
    batch = batch_of()
    batch.update(SchedulerOutput({A: 1}, new=(new("a", [1], (1,)),)))
    slot = batch.slot_of(A)
    assert batch.sequence_of(slot).id == A
    batch.update(SchedulerOutput({B: 1}, new=(new("b", [1], (1,)),), finished=(A,)))
    assert batch.slot_of(B).index == slot.index
    for stale in (slot, Slot(99, 0), Slot(-1, 0)):
        with pytest.raises(SlotError, match="has left the batch"):
            batch.sequence_of(stale)


def test_slots_of_strangers():
    batch = batch_of()
    with pytest.raises(RequestError, match=r"'a', 0. is not in the batch"):
        batch.slot_of(A)


def test_rows_of_a_step_without_drafts():
    step = Step.one_row_each((), np.array([]), np.array([]))
    assert step.draft_of_row.dtype == np.int32
