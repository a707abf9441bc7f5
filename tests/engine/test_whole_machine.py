"""Scheduler, account of blocks and batch together, beside memory that is simulated and a naive model of all three."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.batch.test_kv_machine import ZERO
from tests.batch.test_machine import compare, poison
from tests.engine.whole import END, VOCAB, Asked, Cells, Naive, NaiveBatch, Speculating, chain, request_of

from klero.batch import InputBatch, KVAccount, SchedulerOutput, Seats
from klero.engine.options import EngineOptions
from klero.engine.scores import PromptPart
from klero.finish import FinishReason

TEXT = (0, 1, 2, 0, 1, 1, 0, 2, 2)
MAX_LEN, MOST = 20, 12  # tokens of a sequence; sequences at a time
WHICH = st.integers(0, MOST - 1)
PROMPTS = st.builds(  # most begin alike, so that prefixes meet
    lambda length, tail: (*TEXT[:length], *tail), st.integers(0, 9), st.lists(st.integers(0, 2), min_size=1, max_size=3)
)
ASKED = st.builds(
    Asked, PROMPTS, st.sampled_from([3, 1, 2]), st.sampled_from([14, 9, 5, 1, 0]), st.sampled_from([False, True]),
    st.sampled_from([0, 0, 0, 2, 5]), st.sampled_from([None, None, None, "salt"]), st.integers(-1, 1),
)  # fmt: skip
HAPPENED: Counter[str] = Counter()  # in all programs of a test, so that nothing can go missing unnoticed
OFTEN = (
    "own", "cached", "forked", "swapped", "copy", "swap_out", "swap_in", "zero", "evicted", "preempted", "resumed",
    "unseated", "chunks", "mixed", "accepted", "rejected", "bad", "failed", "weights",
    "aborted waiting", "aborted running", "aborted preempted",
)  # fmt: skip


class WholeMachine(RuleBasedStateMachine):
    """Requests come, run, give way, are aborted; steps fail, rows are bad, the weights change."""

    @initialize(
        max_num_seqs=st.sampled_from([5, 4, 3, 2, 1]), budget=st.sampled_from([16, 8, 32, 5, 3, 2, 1]),
        size=st.sampled_from([2, 1, 3, 4]), room=st.sampled_from([20, 24, 16, 32]),
        num_host_blocks=st.sampled_from([40, 3, 0]), caching=st.sampled_from([True, True, False]),
        zero_fresh=st.booleans(), policy=st.sampled_from(["priority", "priority", "fcfs"]),
        shares=st.sampled_from([True, True, True, False]), speculates=st.booleans(), first=st.lists(ASKED, max_size=4),
    )  # fmt: skip
    def start(
        self, max_num_seqs, budget, size, room, num_host_blocks, caching, zero_fresh, policy, shares, speculates, first
    ):
        """room: tokens that all blocks hold."""
        options = EngineOptions(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, block_size=size, scheduling_policy=policy
        )
        self.kv = KVAccount(
            -(-room // size), size, num_host_blocks=num_host_blocks, caching=caching, zero_fresh=zero_fresh
        )
        self.scheduler = Speculating(
            options, self.kv, (END,), shares=shares,
            propose=lambda choice: self.seqs[choice.id].proposed() if speculates else (),
        )  # fmt: skip
        self.seats, sizes = Seats(max_num_seqs, MAX_LEN, VOCAB), {"max_len": MAX_LEN, "block_size": size}
        self.batch = InputBatch(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, seats=self.seats, **sizes)
        self.naive, self.memory = NaiveBatch(size, shares=shares), Cells(size)
        self.seqs = self.naive.seqs
        self.most = min(max_num_seqs, budget)
        self.longest, self.by_priority = min(MAX_LEN, self.kv.blocks.num_blocks * size), policy == "priority"
        self.count, self.weights, self.happened = 0, 0, Counter()
        for asked in first:
            self.add(asked)

    # --- rules

    @rule(asked=ASKED, times=st.integers(1, 3))
    def ask(self, asked, times):
        """Requests come that begin alike."""
        for _ in range(times):
            if len(self.seqs) + asked.n <= MOST:
                self.add(asked)
            asked = asked._replace(ids=asked.ids + asked.ids[:2], priority=-asked.priority)

    @precondition(lambda self: 0 < len(self.seqs) < MOST)
    @rule(which=WHICH, more=st.integers(-4, 3), priority=st.integers(-1, 1))
    def ask_on(self, which, more, priority):
        """A request begins with what another one has, or will have."""
        self.add(self.pick(which).again(more, priority))

    def add(self, asked):
        if not self.by_priority:
            asked = asked._replace(priority=0)
        request = request_of(self.count, asked, self.longest)
        for choice in request.choices:
            self.scheduler.add(choice)
            self.seqs[choice.id] = Naive.of(choice, self.count, ("root", asked.salt))
        self.count += 1

    def pick(self, which):
        seqs = list(self.seqs.values())
        return seqs[which % len(seqs)]

    @rule(times=st.integers(1, 12))
    def step(self, times):
        for _ in range(times):
            self.run()

    @precondition(lambda self: self.seqs)
    @rule(which=WHICH, kind=st.sampled_from(["preempt", "abort", "row", "late", "fail", "drop", "weights"]))
    def trouble(self, which, kind):
        """Sequences lose their blocks, are aborted, compute junk, are cut short; or what was computed is void."""
        self.happened[{"row": "bad", "late": "bad", "fail": "failed"}.get(kind, kind)] += 1
        match kind:
            case "preempt":
                self.preempt(which)
            case "abort" | "drop":
                self.abort(which, told=kind == "abort")
            case "row" | "late":
                self.run(bad=(which, kind == "row"))
            case "fail":
                self.run(fails_after=["schedule", "update", "moves", "forward"][which % 4])
                self.start_over()
            case "weights":  # what was begun before must not be cached: others begin like that
                asked = self.pick(which).again(3, 0)
                self.kv.forget()
                self.weights += 1
                self.add(asked)
                self.step(times=which % 8)
                self.add(asked)

    def preempt(self, which):
        """Some give their blocks back, whatever their rank; one may be aborted before the batch is told."""
        forced = self.naive.running()[which % 2 :: 1 + which % 3]
        for seq in forced:
            self.scheduler.preempt(seq.choice)
        if forced and which % 4 > 1:
            self.abort(list(self.seqs.values()).index(forced[0]), told=True)
        self.run(forced=forced)

    def abort(self, which, told):
        """A client leaves, with an answer or without."""
        request = self.pick(which).choice.request
        ended = [seq for seq in self.seqs.values() if seq.choice.request is request]
        for seq in ended:
            kind = "running" if seq.choice.running else "preempted" if seq.seated or seq.lost else "waiting"
            self.happened[f"aborted {kind}"] += 1
            if told:
                seq.choice.finished = seq.choice.finish.end(FinishReason.ABORT)
        self.end(ended)

    # --- one step

    def run(self, bad=None, fails_after=None, forced=()):
        """Schedule, lay out, move, compute, draw; every part is compared.

        bad: which sequence of the step computes junk, and whether its row shows it, so that it ends with an error;
        else that is seen late, when its blocks are cached by now, and its whole request ends. fails_after: the part
        that was the last one before an exception. forced: who was preempted from outside.
        """
        before = [seq for seq in self.naive.running() if seq not in forced]
        plan = self.scheduler.schedule()
        output = plan.output
        if not self.seqs:
            assert output == SchedulerOutput(), "nothing to do, and nothing to tell"
            return
        parts = self.naive.receive(output)
        self.naive.check_plan(
            plan, before, budget=self.batch.max_num_batched_tokens, most=self.most, num_free=self.kv.blocks.num_free
        )
        self.note(plan, parts)
        if fails_after == "schedule":
            return
        self.batch.update(output)
        self.seat(output)
        arrays, step = self.laid_out(parts)
        if fails_after == "update":
            return
        self.memory.move(output.moves)
        if fails_after == "moves":
            return
        junk = parts[bad[0] % len(parts)] if bad else None
        self.forward(arrays, parts, junk)
        if fails_after is None:
            self.draw(plan, step, parts, junk, seen=bool(bad and bad[1] and junk.sampled))

    def seat(self, output):
        """Tell the choices where they sit; nobody moves."""
        for id in output.finished:
            self.seqs[id].choice.slot = None
        for id, seq in self.seqs.items():
            if seq.seated and seq.choice.slot is None:
                seq.choice.slot = self.batch.slot_of(id)
                seq.slot = seq.choice.slot.index

    def laid_out(self, parts):
        """Fill the arrays over nonsense, and compare every one."""
        poison(self.batch)
        arrays, step = self.batch.fill()
        expected_arrays, expected_step = self.naive.lay_out(parts, self.batch)
        compare(arrays, expected_arrays)
        compare(step, expected_step)
        return arrays, step

    def forward(self, arrays, parts, junk):
        """Read through the block tables, then write through the slot mapping, as a model does."""
        size = self.naive.size
        for k, seq in enumerate(parts):
            table, num = arrays.block_tables[k].tolist(), int(arrays.num_computed[k])
            found = self.memory.cells(table, num)
            name = next((name for name, cells in self.naive.history_of(seq, self.weights) if found == cells[:num]), "")
            assert name, f"{seq.choice.id} finds what is not its own: {found}"
            assert name != "own" or num == len(seq.cells)
            self.happened[name if num else "nothing"] += 1
            seq.cells = found
            if self.kv.zero_fresh:
                for place in seq.fresh:
                    assert self.memory.cells([table[place]], size) == [ZERO] * size
        for k, seq in enumerate(parts):
            for t in range(arrays.query_starts[k], arrays.query_starts[k + 1]):
                block, offset = divmod(int(arrays.slot_mapping[t]), size)
                assert not self.kv.blocks.is_registered(block)
                token = int(arrays.input_ids[t])
                if arrays.is_embedded is not None and arrays.is_embedded[t]:
                    token = tuple(arrays.inputs_embeds[t].tolist())
                before = seq.cells[-1] if seq.cells else seq.root
                seq.cells += chain(before, [token], f"junk of {seq.choice.id}" if seq is junk else self.weights)
                self.memory.write([block], offset, seq.cells[-1])
        for seq in self.naive.running():
            assert self.memory.cells(seq.blocks, len(seq.cells)) == seq.cells

    def draw(self, plan, step, parts, junk, *, seen):
        """Draw, tell account and scheduler what was computed, and end who has ended.

        seen: the row of `junk` is bad. Else, if there is one, its request ends as soon as the step has counted.
        """
        for planned, seq in zip(plan.planned, parts, strict=True):
            if not seq.drafts:
                self.scheduler.computed(planned, good=not (seen and seq is junk))
        ended = [seq for seq in parts if seq is junk]
        if junk is not None and not seen:
            ended += self.naive.siblings(junk)
        for seq in ended:
            seq.choice.finished = seq.choice.finish.end(FinishReason.ERROR)
        for slot in step.slots:
            seq = next(seq for seq in parts if seq.choice.slot == slot)
            if seq not in ended:
                self.bring(seq)
        for planned, seq in zip(plan.planned, parts, strict=True):
            if seq.drafts:  # those that were rejected count as not computed
                end = len(seq.tokens) - (seq not in ended)  # the last one that was drawn is not computed
                good = planned._replace(num_new=end - planned.num_computed)
                self.scheduler.computed(good, good=not (seen and seq is junk))
            if seq.scored is not None and seq.scored < seq.num_prompt:
                seq.scored = min(seq.end, seq.num_prompt)
                seq.choice.prompt_scores.take(PromptPart(seq.scored))
        self.end([seq for seq in parts if seq not in ended and self.has_ended(seq)] + ended)

    def bring(self, seq):
        """Give a sequence its tokens: the batch's history and the rules of its end."""
        taken = seq.take()
        self.happened["accepted"] += len(taken) - 1
        self.happened["rejected"] += len(seq.drafts) - (len(taken) - 1)
        for k, token in enumerate(taken):
            self.seats.append(np.array([seq.slot], np.int32), np.array([token], np.int32))
            seq.choice.finished = seq.choice.finish.push(token)
            assert (seq.choice.finished is not None) == (seq.ended and k == len(taken) - 1)

    def has_ended(self, seq):
        """Whether it has drawn its last token, or computed its last where it draws none."""
        if seq.choice.draws:
            return seq.ended
        if len(seq.cells) == len(seq.tokens):
            seq.choice.finished = seq.choice.finish.end(FinishReason.LENGTH)
        return seq.choice.finished is not None

    def end(self, seqs):
        """Sequences leave: their blocks come back, then their seats, in one record."""
        for seq in seqs:
            self.scheduler.remove(seq.choice)
        seated = [seq for seq in seqs if seq.seated]
        for seq in seqs:
            seq.choice.slot = None
            del self.seqs[seq.choice.id]
        if seated:
            self.batch.update(SchedulerOutput(finished=tuple(seq.choice.id for seq in seated)))
            self.laid_out([])

    def start_over(self):
        """Memory holds anything, and so may the batch."""
        self.scheduler.start_over(seq.choice for seq in self.seqs.values())
        assert sorted(self.batch.keep(())) == list(range(self.batch.num_slots))
        self.memory.device, self.memory.host = {}, {}
        for seq in self.seqs.values():
            seq.cells = []
            seq.leave()
            seq.lost = []

    def note(self, plan, parts):
        """Count what happened."""
        output = plan.output
        self.happened.update({kind: len(listed) for kind, listed in output.moves._asdict().items()})
        self.happened["preempted"] += len(output.preempted)
        self.happened["unseated"] += len(output.finished)
        self.happened["resumed"] += sum(change.resumed for change in output.changed)
        self.happened["chunks"] += sum(seq.end < len(seq.tokens) for seq in parts)
        self.happened["mixed"] += len({seq.num_new == 1 for seq in parts}) > 1

    # --- what holds at all times

    @invariant()
    def owners_are_those_who_hold(self):
        helds = [seq.choice.held for seq in self.seqs.values()]
        for pool, lists in (
            (self.kv.blocks, [held.block_ids for held in helds]), (self.kv.host, [held.host_ids for held in helds]),
        ):  # fmt: skip
            owners = Counter(block for blocks in lists for block in blocks)
            num_blocks = 0 if pool is None else pool.num_blocks
            assert owners.keys() <= set(range(num_blocks))
            for block in range(num_blocks):
                assert pool.num_owners(block) == owners[block]
            assert pool is None or pool.num_free == num_blocks - len(owners)

    @invariant()
    def blocks_are_shared_where_their_content_is_equal(self):
        size, seen = self.naive.size, {}
        for seq in self.seqs.values():
            assert seq.choice.held.block_ids == seq.blocks, "the batch was told"
            assert len(set(seq.blocks)) == len(seq.blocks)
            assert self.memory.cells(seq.blocks, len(seq.cells)) == seq.cells
            for place, block in enumerate(seq.blocks):
                cells = seq.cells[place * size : (place + 1) * size]
                other_place, other = seen.setdefault(block, (place, cells))
                num = min(len(cells), len(other))
                assert (place, cells[:num]) == (other_place, other[:num])
                assert other is cells or num, "a block is shared for nothing"

    @invariant()
    def seats_are_those_who_sit(self):
        batch, history = self.batch, self.seats.history
        by_slot = {seq.slot: seq for seq in self.seqs.values() if seq.seated}
        assert batch.index_of == {seq.choice.id: slot for slot, seq in by_slot.items()}
        assert self.seats.num_free == batch.num_slots - len(by_slot)
        computed, width = batch.computed_now().tolist(), batch.block_tables.shape[1]
        for slot in range(batch.num_slots):
            seq = by_slot.get(slot)
            ids = [] if seq is None else [token for token in seq.tokens if not isinstance(token, tuple)]
            blocks, cells = ([], []) if seq is None else (seq.blocks, seq.cells)
            assert history.tokens(slot).tolist() == ids
            assert batch.block_tables[slot].tolist() == blocks + [0] * (width - len(blocks))
            assert (computed[slot], batch.num_blocks_of_slot[slot]) == (len(cells), len(blocks))

    @invariant()
    def the_scheduler_knows_who_runs(self):
        by_rank = sorted(self.seqs.values(), key=lambda seq: seq.rank)
        assert self.scheduler.running == [seq.choice for seq in by_rank if seq.runs]
        assert self.scheduler.waiting == [seq.choice for seq in by_rank if not seq.runs]
        for seq in by_rank:
            swapped = len(seq.lost) if seq.choice.held.host_ids else 0
            assert seq.choice.num_computed == (len(seq.cells) if seq.runs else swapped)
            assert seq.choice.token_array().tolist() == [0 if isinstance(t, tuple) else t for t in seq.tokens]

    def teardown(self):
        """Some programs go on until all have ended, the others drop all."""
        if not hasattr(self, "seqs") or sys.exc_info()[0]:  # what failed is told, and not what follows from it
            return
        for _ in range(1000):
            if self.seqs and self.count % 2:
                self.run()
        assert not self.seqs or self.count % 2 == 0
        self.end(list(self.seqs.values()))
        for pool in filter(None, (self.kv.blocks, self.kv.host)):
            assert pool.num_free == pool.num_blocks
        assert self.seats.num_free == self.batch.num_slots
        assert not self.batch.block_tables.any()
        assert not self.kv.take_moves().any
        self.happened["evicted"] += self.kv.blocks.num_evictions
        HAPPENED.update(self.happened)


class TestWhole(WholeMachine.TestCase):
    """A few hundred programs, in which everything happened."""

    settings = settings(max_examples=200, stateful_step_count=30)

    def runTest(self):
        HAPPENED.clear()
        super().runTest()
        assert min(HAPPENED[kind] for kind in OFTEN) > 4, HAPPENED


class DeepMachine(WholeMachine):
    """The same, longer."""


TestWholeDeep = pytest.mark.deep(DeepMachine.TestCase)
TestWholeDeep.settings = settings(max_examples=5000, stateful_step_count=60)
