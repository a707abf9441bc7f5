"""InputBatch against a dictionary: random schedulers drive both, and every array of every step must be equal."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from klero import SamplingParams
from klero.batch.input_batch import InputBatch
from klero.batch.scheduler_output import ChangedSequence, NewSequence, SchedulerOutput
from klero.batch.seats import Seat, Seats
from klero.errors import KleroError

NUM_SEQS, NUM_SLOTS, MAX_LEN, BUDGET, VOCAB, WIDTH = 4, 5, 20, 30, 50, 2
PARAMS = SamplingParams(temperature=1.0)
IDS = st.integers(0, VOCAB - 1)
DTYPES = {
    "input_ids": np.int32, "positions": np.int32, "slot_mapping": np.int64, "query_starts": np.int32,
    "num_computed": np.int32, "seq_lens": np.int32, "block_tables": np.int32, "slots": np.int32,
    "logits_rows": np.int64, "inputs_embeds": np.float32, "is_embedded": np.bool_, "slot_of_row": np.int32,
    "position_of_row": np.uint32, "child_of_row": np.uint32, "draft_of_row": np.int32, "row_starts": np.int32,
}  # fmt: skip


@dataclass
class Naive:
    """What a dictionary knows of a sequence. tokens: a row of floats where one is embedded, else an id."""

    tokens: list
    child: int
    samples: bool
    blocks: list = field(default_factory=list)
    computed: int = 0
    num_new: int = 0  # of the last step
    drafts: tuple = ()  # of the last step
    length: int = 0  # when the last step was made

    def count(self):
        """The last step is done: its tokens are computed, and the drafts that are tokens by now."""
        self.computed += self.num_new
        if self.drafts:
            self.computed = self.length
            for draft in self.drafts:
                if self.computed == len(self.tokens) or self.tokens[self.computed] != draft:
                    break
                self.computed += 1
        self.num_new, self.drafts = 0, ()


def embedded(token):
    return isinstance(token, tuple)


def poison(batch):
    """Write nonsense wherever nothing is valid before a step is filled."""
    for array in vars(batch._memory).values():
        array.view(np.uint8)[...] = 0x5A if array.dtype != np.bool_ else 1
    history = batch.seats.history
    for index, length in enumerate(history.lengths):
        history.ids[index, length:] = -77


class BatchMachine(RuleBasedStateMachine):
    """Rules gather what is new; `step` sends it, and compares what comes out."""

    @initialize(block_size=st.sampled_from([None, 1, 2, 3, 8]))
    def start(self, block_size):
        self.size, self.count, self.last = block_size, 0, []
        self.batch = InputBatch(
            max_num_seqs=NUM_SEQS, max_num_batched_tokens=BUDGET, max_len=MAX_LEN, block_size=block_size,
            seats=Seats(NUM_SLOTS, MAX_LEN, VOCAB),
        )  # fmt: skip
        self.seqs, self.slots, self.elsewhere = {}, {}, {}  # by id; elsewhere: tokens that the batch has not got yet
        self.gather()

    def gather(self):
        """Nothing is new."""
        self.new, self.changed, self.finished, self.preempted = {}, {}, [], []

    def alive(self):
        """Who is in the batch and stays."""
        return [id for id in self.seqs if id not in self.finished]

    def fresh_blocks(self, data, held, num):
        """Blocks that a sequence does not have; others may have them."""
        if self.size is None:
            return ()
        room = -(-MAX_LEN // self.size) - len(held)
        free = [block for block in range(24) if block not in held]
        first = data.draw(st.integers(0, 5))
        return tuple((free[first:] + free[:first])[: min(num, room)])

    @precondition(lambda self: len(self.alive()) + len(self.new) < NUM_SEQS)
    @rule(data=st.data())
    def admit(self, data):
        """A sequence enters; perhaps one whose name has just finished."""
        ids, output = data.draw(st.lists(IDS, min_size=1, max_size=9)), data.draw(st.lists(IDS, max_size=3))
        num_embedded, samples = data.draw(st.sampled_from([0, 0, 0, 1, 4])), data.draw(st.integers(0, 3)) > 0
        free = [id for id in self.finished if id not in self.new]
        id = free[0] if free and data.draw(st.booleans()) else (f"r{self.count}", data.draw(st.integers(0, 2)))
        self.count += 1
        rows = np.random.default_rng(self.count).standard_normal((num_embedded, WIDTH)).astype(np.float32)
        if num_embedded == 4:
            ids = []  # embeddings alone
        blocks = self.fresh_blocks(data, [], data.draw(st.sampled_from([20, 9, 4, 1, 0])))
        length = num_embedded + len(ids) + len(output)
        seat = Seat("r", PARAMS, ids, 1, child=id[1], output_ids=output, num_embedded=num_embedded)
        self.new[id] = NewSequence(
            id[0], seat, blocks, min(data.draw(st.integers(0, 3)), length), samples,
            rows if num_embedded else None,
        )  # fmt: skip

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def finish(self, data):
        """A sequence ends, or is aborted: running, preempted or changed."""
        id = data.draw(st.sampled_from(self.alive()))
        self.finished.append(id)
        self.changed.pop(id, None)
        self.preempted = [other for other in self.preempted if other != id]

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def preempt(self, data):
        """A sequence loses its blocks; what was to be new about it as well."""
        id = data.draw(st.sampled_from(self.alive()))
        if id not in self.preempted:
            self.preempted.append(id)
        self.changed.pop(id, None)

    @precondition(lambda self: self.alive())
    @rule(
        data=st.data(), resumed=st.booleans(), num_blocks=st.integers(0, 4), share=st.none() | st.integers(0, 9),
        drafts=st.lists(IDS, max_size=3),
    )  # fmt: skip
    def change(self, data, resumed, num_blocks, share, drafts):
        """Blocks, a rewind or a leap of what is computed, and drafts."""
        id = data.draw(st.sampled_from(self.alive()))
        held = [] if resumed or id in self.preempted else self.seqs[id].blocks
        blocks = self.fresh_blocks(data, held, num_blocks)
        length = len(self.seqs[id].tokens) + len(self.elsewhere.get(id, ()))
        computed = None if share is None else min(share, length)
        self.changed[id] = ChangedSequence(id, blocks, computed, (), tuple(drafts), resumed)

    @rule(data=st.data(), scored=st.booleans(), draws=st.sampled_from(["here", "here", "elsewhere", "fails"]))
    def step(self, data, scored, draws):
        """Send what was gathered with a step over some of the sequences; there are some, as a rule."""
        while len(self.alive()) + len(self.new) < data.draw(st.integers(0, 3)):
            self.admit(data)
        for id, ids in self.elsewhere.items():
            if id in self.alive():
                change = self.changed.get(id, ChangedSequence(id))
                self.changed[id] = change._replace(new_token_ids=ids)
        self.elsewhere = {}
        self.apply()
        num_tokens = self.choose(data)
        scored_from = {id: data.draw(st.integers(0, MAX_LEN)) for id in num_tokens if scored}
        output = SchedulerOutput(
            num_tokens, tuple(self.new.values()), tuple(self.changed.values()), tuple(self.finished),
            tuple(self.preempted), scored_from=scored_from,
        )  # fmt: skip
        self.batch.update(output)
        self.slots = {id: self.batch.slot_of(id).index for id in self.seqs}
        assert len(set(self.slots.values())) == len(self.slots)
        poison(self.batch)
        arrays, step = self.batch.fill()
        expected_arrays, expected_step = self.expected(num_tokens, scored_from)
        compare(arrays, expected_arrays)
        compare(step, expected_step)
        self.gather()
        self.draw(data, step, draws)

    def apply(self):
        """The dictionary after all but the step, in the documented order."""
        for seq in self.seqs.values():
            seq.count()
        for id in self.finished:
            del self.seqs[id]
        for id in self.preempted:
            self.seqs[id].blocks, self.seqs[id].computed = [], 0
        for id, new in self.new.items():
            rows = [] if new.prompt_embeds is None else [tuple(row) for row in new.prompt_embeds.tolist()]
            tokens = [*rows, *new.seat.prompt_ids, *new.seat.output_ids]
            self.seqs[id] = Naive(tokens, id[1], new.samples, list(new.block_ids), new.num_computed)
        for id, (_, block_ids, computed, token_ids, _, resumed) in self.changed.items():
            seq = self.seqs[id]
            seq.blocks = list(block_ids) if resumed else seq.blocks + list(block_ids)
            seq.tokens += token_ids
            if computed is not None:
                seq.computed = computed

    def choose(self, data):
        """Who computes how many tokens: whole prompts, chunks, decodes. Takes back drafts that find no place."""
        num_tokens, budget = {}, BUDGET
        for id in data.draw(st.permutations(sorted(self.seqs))):
            seq, change = self.seqs[id], self.changed.get(id)
            drafts = change.draft_ids if change else ()
            seq.length = len(seq.tokens)
            left, room = seq.length - seq.computed, budget
            if self.size is not None:
                room = min(room, len(seq.blocks) * self.size - seq.computed)
            if not seq.samples or left + len(drafts) > room or seq.length + len(drafts) >= MAX_LEN or not left:
                drafts = ()
            if change:
                self.changed[id] = change._replace(draft_ids=drafts)
            most = min(left + len(drafts), room)
            if seq.samples and seq.length >= MAX_LEN:
                most = min(most, left - 1)  # nothing can follow its last token
            wanted = most if drafts else data.draw(st.sampled_from([BUDGET, BUDGET, 0, 1, 2, 3, 5]))  # all, a chunk
            seq.num_new, seq.drafts = max(0, min(wanted, most)), drafts
            if seq.num_new:
                num_tokens[id], budget = seq.num_new, budget - seq.num_new
        return num_tokens

    def expected(self, num_tokens, scored_from):
        """The arrays of a step, token by token."""
        a = {name: [] for name in DTYPES}
        a["query_starts"], a["row_starts"], a["owners"], scored, embeds = [0], [0], [], [], []
        longest = max((len(self.seqs[id].blocks) for id in num_tokens), default=0)
        for id in num_tokens:
            seq, slot = self.seqs[id], self.slots[id]
            tokens, end = [*seq.tokens, *seq.drafts], seq.computed + seq.num_new
            sampled = range(seq.length - 1, end) if seq.samples and end == len(tokens) else range(0)
            for position in range(seq.computed, end):
                token = tokens[position]
                if position in sampled:
                    k = position - sampled[0]
                    a["logits_rows"].append(len(a["input_ids"]))
                    a["slot_of_row"].append(slot)
                    a["position_of_row"].append(position + 1)
                    a["child_of_row"].append(seq.child)
                    a["draft_of_row"].append(k if k < len(seq.drafts) else -1)
                elif position >= scored_from.get(id, MAX_LEN):
                    scored.append(len(a["input_ids"]))
                a["input_ids"].append(0 if embedded(token) else token)
                a["positions"].append(position)
                a["is_embedded"].append(embedded(token))
                embeds.append(list(token) if embedded(token) else [0.0] * WIDTH)
                where = -1
                if self.size is not None:
                    where = seq.blocks[position // self.size] * self.size + position % self.size
                a["slot_mapping"].append(where)
            if sampled:
                a["owners"].append(self.batch.slot_of(id))
                a["row_starts"].append(len(a["slot_of_row"]))
            a["query_starts"].append(len(a["input_ids"]))
            a["num_computed"].append(seq.computed)
            a["seq_lens"].append(end)
            a["slots"].append(slot)
            a["block_tables"].append([*seq.blocks, *[0] * (longest - len(seq.blocks))])
        return both(a, scored, embeds)

    def draw(self, data, step, draws):
        """Tokens come: to the histories as a sampler does it, by the next record, or not at all."""
        name_of = {slot: id for id, slot in self.slots.items()}
        for slot in step.slots:
            id = name_of[slot.index]
            seq = self.seqs[id]
            taken = [*seq.drafts[: data.draw(st.integers(0, len(seq.drafts)))], data.draw(IDS)]
            if draws == "here":
                for token in taken:
                    self.batch.seats.append(np.array([slot.index], np.int32), np.array([token], np.int32))
                seq.tokens += taken
            elif draws == "elsewhere":
                self.elsewhere[id] = tuple(taken)

    @rule(data=st.data())
    def keep(self, data):
        """After a step that was cut short, or a caller that left: some stay."""
        alive = [id for id in sorted(self.seqs) if data.draw(st.booleans())]
        free = self.batch.keep(alive)
        assert sorted(free) == sorted(set(range(NUM_SLOTS)) - {self.slots[id] for id in alive})
        for seq in self.seqs.values():
            seq.count()
        self.seqs = {id: self.seqs[id] for id in self.seqs if id in alive}
        self.slots = {id: self.slots[id] for id in alive}
        self.gather()

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), kind=st.integers(0, 6))
    def fail(self, data, kind):
        """A record that is wrong somewhere changes nothing, whatever else it says."""
        id = data.draw(st.sampled_from(sorted(self.seqs)))
        stranger, block = ("stranger", 0), (7,) if self.size else ()
        wrong = [
            {"num_tokens": {id: 99}},
            {"num_tokens": {id: 0}},
            {"num_tokens": {stranger: 1}},
            {"num_tokens": {}, "finished": (id, stranger)},
            {"num_tokens": {}, "changed": (ChangedSequence(id, new_token_ids=(1,)), ChangedSequence(stranger))},
            {"num_tokens": {}, "changed": (ChangedSequence(id, (-1,)),)},
            {"num_tokens": {}, "new": (NewSequence("x", Seat("x", PARAMS, [1], 1), block), self.again(id))},
        ][kind]
        with pytest.raises(KleroError):
            self.batch.update(SchedulerOutput(**wrong))

    def again(self, id):
        """A sequence whose name is taken."""
        return NewSequence(id[0], Seat("r", PARAMS, [1], 1, child=id[1]))

    @invariant()
    def columns_are_those_of_the_dictionary(self):
        batch = getattr(self, "batch", None)
        if batch is None:
            return
        history, columns = batch.seats.history, batch.columns
        width = 0 if self.size is None else -(-MAX_LEN // self.size)
        by_slot = {slot: self.seqs[id] for id, slot in self.slots.items()}
        assert batch.num_seqs == len(by_slot)
        for slot in range(NUM_SLOTS):
            seq = by_slot.get(slot, Naive([], 0, False))
            ids = [token for token in seq.tokens if not embedded(token)]
            assert history.tokens(slot).tolist() == ids
            assert batch.block_tables[slot].tolist() == [*seq.blocks, *[0] * (width - len(seq.blocks))]
            assert batch.num_blocks_of_slot[slot] == len(seq.blocks)
            assert batch.num_computed[slot] == seq.computed
            assert columns["num_embedded"][slot] == len(seq.tokens) - len(ids)
            assert (columns["child"][slot], columns["samples"][slot]) == (seq.child, seq.samples)


def both(a, scored, embeds):
    """What was gathered, as the fields of StepArrays and those of Step."""
    a["num_sampled"] = len(a["logits_rows"])
    a["logits_rows"] += scored
    a["inputs_embeds"] = embeds if any(a["is_embedded"]) else None
    a["is_embedded"] = a["is_embedded"] if any(a["is_embedded"]) else None
    step = {name: a[name] for name in ("slot_of_row", "position_of_row", "child_of_row", "draft_of_row")}
    return a, step | {"slots": tuple(a["owners"]), "row_starts": a["row_starts"]}


def compare(record, expected):
    """Every field of StepArrays or Step, with its dtype."""
    for name in (one.name for one in fields(record)):
        value = getattr(record, name)
        if isinstance(value, np.ndarray):
            assert value.dtype == DTYPES[name], name
            value = value.tolist()
        assert value == expected[name], name


class DeepMachine(BatchMachine):
    """The same, longer."""


TestBatch = BatchMachine.TestCase
TestBatch.settings = settings(max_examples=250, stateful_step_count=30)
TestDeep = pytest.mark.deep(DeepMachine.TestCase)
TestDeep.settings = settings(max_examples=5000, stateful_step_count=60)
