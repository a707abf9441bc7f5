"""InputBatch: every record that is refused, and that it changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from tests.batch.batches import PARAMS, A, B, append, batch_of, everything, new

from klero.batch.scheduler_output import ChangedSequence, NewSequence, SchedulerOutput
from klero.batch.seats import Seat, Seats
from klero.errors import BlockError, OptionError, RequestError, SlotError

EMBEDS = np.ones((2, 3), np.float32)
D, E = ("d", 0), ("e", 0)
# The batch of `test_an_error_changes_nothing`: a has tokens 1..4 and blocks 4, 5, of which one step computed 3; b has
# one token, all computed and sampled, so 2 now, and block 6; e two embedded positions and 1 token in blocks 7, 8.
ERRORS = {
    "finished, unknown": ({"finished": (D,)}, RequestError, "finished: .'d', 0. is not in the batch"),
    "finished twice": ({"finished": (A, A)}, RequestError, "finished: .'a', 0. is not in the batch"),
    "preempted, unknown": ({"preempted": (D,)}, RequestError, "preempted: .'d', 0."),
    "preempted, finished": ({"finished": (A,), "preempted": (A,)}, RequestError, "preempted: .'a', 0."),
    "new, in the batch": ({"new": (new("a", [1]),)}, RequestError, "'a', 0. is in the batch already"),
    "new, twice": ({"new": (new("d", [1]), new("d", [2])), "finished": (B,)}, RequestError, "'d', 0. is in the batch"),
    "no slot": ({"new": (new("d", [1]), new("f", [1]))}, SlotError, "no slot for .'f', 0."),
    "no tokens": ({"new": (new("d", []),)}, RequestError, "d.0.: prompt_ids"),
    "no ids": ({"new": (new("d", [100]),)}, RequestError, r"d.0.: prompt_ids: must be token ids.*\[0, 99\]"),
    "too long": ({"new": (new("d", range(13)),)}, RequestError, "13 tokens"),
    "computed too much": ({"new": (new("d", [1, 2], num_computed=3),)}, RequestError, "num_computed=3 of .'d', 0."),
    "embeds missing": (
        {"new": (NewSequence("d", Seat("d", PARAMS, [1], 1, num_embedded=2)),)}, RequestError, "no prompt_embeds"
    ),
    "embeds of another length": (
        {"new": (NewSequence("d", Seat("d", PARAMS, [1], 1, num_embedded=1), prompt_embeds=EMBEDS),)},
        RequestError, "has 2 rows",
    ),
    "embeds of another width": ({"new": (new("d", [1], embeds=EMBEDS[:, :2].copy()),)}, RequestError, "is 2 wide"),
    "embeds of another dtype": ({"new": (new("d", [1], embeds=EMBEDS.astype(np.float64)),)}, RequestError, "float64"),
    "new, a block twice": ({"new": (new("d", [1], (3, 3)),)}, BlockError, "'d', 0. would have block 3 twice"),
    "new, negative block": ({"new": (new("d", [1], (-1,)),)}, BlockError, "'d', 0. would have block -1"),
    "new, too many blocks": ({"new": (new("d", [1], tuple(range(7))),)}, BlockError, "'d', 0. would have 7 blocks"),
    "changed, unknown": ({"changed": (ChangedSequence(D),)}, RequestError, "changed: .'d', 0."),
    "changed, finished": ({"changed": (ChangedSequence(A),), "finished": (A,)}, RequestError, "changed: .'a', 0."),
    "changed, new": ({"new": (new("d", [1]),), "changed": (ChangedSequence(D),)}, RequestError, "is new in this step"),
    "changed twice": ({"changed": (ChangedSequence(A), ChangedSequence(A))}, RequestError, "'a', 0. is there twice"),
    "one block that it has": ({"changed": (ChangedSequence(A, (4,)),)}, BlockError, "'a', 0. would have block 4 twi"),
    "blocks that it has": ({"changed": (ChangedSequence(A, (9, 5)),)}, BlockError, "'a', 0. would have block 5 twice"),
    "resumed, twice": ({"changed": (ChangedSequence(A, (9, 9), resumed=True),)}, BlockError, "block 9 twice"),
    "negative block": ({"changed": (ChangedSequence(B, (-3,)),)}, BlockError, "'b', 0. would have block -3"),
    "huge block": ({"changed": (ChangedSequence(B, (2**31,)),)}, BlockError, "'b', 0. would have block 2147483648"),
    "too many blocks": (
        {"changed": (ChangedSequence(A, tuple(range(10, 15))),)}, BlockError, "'a', 0. would have 7 blocks"
    ),
    "changed, computed": ({"changed": (ChangedSequence(A, num_computed=5),)}, RequestError, "num_computed=5"),
    "changed, less than 0": ({"changed": (ChangedSequence(A, num_computed=-1),)}, RequestError, "num_computed=-1"),
    "tokens beyond": ({"changed": (ChangedSequence(A, new_token_ids=(1,) * 9),)}, RequestError, "no place"),
    "tokens that are none": ({"changed": (ChangedSequence(A, new_token_ids=(100,)),)}, RequestError, "new_token_ids"),
    "drafts that are none": (
        {"num_tokens": {A: 2}, "changed": (ChangedSequence(A, draft_ids=(-1,)),)}, RequestError, "draft_ids of .'a', 0."
    ),
    "drafts, no part": ({"changed": (ChangedSequence(A, draft_ids=(1,)),)}, RequestError, "'a', 0. has drafts"),
    "drafts, not reached": (
        {"num_tokens": {A: 2}, "changed": (ChangedSequence(A, (9,), draft_ids=(1, 2)),)}, RequestError, "takes them all"
    ),
    "drafts, never sampled": (
        {"num_tokens": {E: 2}, "changed": (ChangedSequence(E, draft_ids=(1,)),)}, RequestError, "never sampled"
    ),
    "step, unknown": ({"num_tokens": {A: 1, D: 1}}, RequestError, "num_tokens: .'d', 0."),
    "step, finished": ({"num_tokens": {B: 1, A: 1}, "finished": (A,)}, RequestError, "num_tokens: .'a', 0."),
    "the last step again, finished": (
        {"num_tokens": {A: 1, B: 1, E: 1}, "finished": (A,)}, RequestError, "num_tokens: .'a', 0."
    ),
    "step of 0": ({"num_tokens": {A: 0}}, RequestError, "num_tokens: 0 of .'a', 0.: must be >= 1"),
    "step of more": ({"num_tokens": {B: 1, A: 2}}, RequestError, "num_tokens: 2 of .'a', 0.: it has 4 tokens, 3 of"),
    "step of too many": (
        {"num_tokens": {A: 4, B: 1}, "changed": (ChangedSequence(A, num_computed=0),)},
        RequestError, "num_tokens: 5 in all, and max_num_batched_tokens=4",
    ),
    "no block for it": (
        {"num_tokens": {B: 3}, "changed": (ChangedSequence(B, new_token_ids=(1, 2)),)},
        BlockError, "num_tokens: 3 of .'b', 0.: its 1 blocks hold 2 tokens, and it would have 4",
    ),
    "no place for another": (
        {"num_tokens": {B: 1}, "changed": (ChangedSequence(B, (1, 2, 3, 9, 10), 11, (1,) * 10),)},
        RequestError, "max_len=12 leaves no place for another",
    ),
    "scored, no part": ({"num_tokens": {A: 1}, "scored_from": {B: 0}}, RequestError, "scored_from: .'b', 0."),
    "scored, negative": ({"num_tokens": {A: 1}, "scored_from": {A: -1}}, RequestError, "position -1"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_changes_nothing(case):
    record, error, says = ERRORS[case]
    batch = batch_of(max_num_seqs=4, max_num_batched_tokens=4)
    seated = (
        new("a", [1, 2, 3, 4], (4, 5), num_computed=2), new("b", [2], (6,)),
        new("e", [3], (7, 8), embeds=EMBEDS, samples=False),
    )  # fmt: skip
    batch.update(SchedulerOutput({A: 1, B: 1, E: 2}, new=seated))
    append(batch, b=7)
    before = everything(batch)
    # a harmless finish and a preemption stand beside what is wrong, and must not happen either
    for more in ({}, {"preempted": (E,)}):
        with pytest.raises(error, match=says):
            batch.update(SchedulerOutput(**{"num_tokens": {}} | more | record))
        assert everything(batch) == before
    batch.update(SchedulerOutput({A: 1, B: 1}))
    assert batch.fill()[0].input_ids.tolist() == [4, 7]


def test_blocks_where_there_are_none():
    batch = batch_of(None)
    with pytest.raises(BlockError, match="block_size=None"):
        batch.update(SchedulerOutput(new=(new("a", [1], (1,)),)))
    assert batch.num_seqs == 0


def test_what_the_sizes_must_be():
    with pytest.raises(OptionError, match="max_num_batched_tokens=0"):
        batch_of(max_num_batched_tokens=0)
    with pytest.raises(OptionError, match="block_size=0"):
        batch_of(0)
    with pytest.raises(OptionError, match="max_len=13: the seats are 2 slots for 12 tokens"):
        batch_of(max_len=13, max_num_seqs=2, seats=Seats(2, 12))


def test_seats_that_somebody_else_took():
    """The seats may have another owner beside the batch; when none is left for a newcomer, nothing has changed."""
    batch = batch_of(max_num_seqs=2, seats=Seats(2, 12, 100))
    batch.update(SchedulerOutput({A: 1}, new=(new("a", [1], (3,)),)))
    (foreign,) = batch.seats.setup_step([Seat("foreign", PARAMS, [1], 1)])
    before = everything(batch)
    both = (new("d", [1], (4,)), new("f", [1], (5,)))
    with pytest.raises(SlotError, match=r"no slot for .'f', 0.: others hold seats"):
        batch.update(SchedulerOutput({D: 1}, new=both, finished=(A,)))
    assert everything(batch) == before
    batch.seats.release(foreign)
    batch.update(SchedulerOutput({D: 1}, new=both, finished=(A,)))
    assert batch.num_seqs == 2
