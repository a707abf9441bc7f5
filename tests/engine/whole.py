"""A naive model of batch, blocks and scheduler: lists of tokens, of K/V cells and of block numbers, no more."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from tests.batch.test_kv_machine import Memory
from tests.batch.test_machine import both, embedded

from klero import SamplingParams
from klero.batch import ChangedSequence, Held, NewSequence, SchedulerOutput, identity_of
from klero.engine.request import Choice, Request
from klero.engine.scheduler import Plan, Scheduler
from klero.engine.scores import PromptScores
from klero.finish import Finish

VOCAB, END, WIDTH = 4, 3, 2  # ids; the one that ends a sequence; of embeddings


def chain(before, tokens, weights):
    """The cells of tokens: each is a hash of the one before, the token and the weights."""
    cells = []
    for token in tokens:
        before = hash((before, token, weights))
        cells.append(before)
    return cells


class Cells(Memory):
    """Memory that is read by block numbers."""

    def cells(self, block_ids, num):
        """The first `num` cells of these blocks."""
        return [cell for number in block_ids for cell in self.block(self.device, number)][:num]


def embeds_of(num):
    """Embeddings of a prompt, the same for the same number; None for none."""
    return np.arange(num * WIDTH, dtype=np.float32).reshape(num, WIDTH) + num if num else None


def embedding_rows(embeds):
    """Embeddings as tokens."""
    return [] if embeds is None else [tuple(row) for row in embeds.tolist()]


class Asked(NamedTuple):
    """What a client asks; more than fits is cut."""

    ids: tuple[int, ...]
    n: int
    max_tokens: int
    scored: bool
    num_embedded: int
    salt: str | None
    priority: int


def request_of(number, asked: Asked, longest):
    """A request as admission makes it; one of max_tokens=0 has one child, scored; what is scored is not embedded."""
    scored = asked.scored or not asked.max_tokens
    embeds = None if scored else embeds_of(asked.num_embedded)
    ids = asked.ids[: longest - len(embedding_rows(embeds)) - 1]
    max_tokens = min(asked.max_tokens, longest - len(embedding_rows(embeds)) - len(ids))
    params = SamplingParams(temperature=1.0, n=asked.n, max_tokens=max_tokens, prompt_logprobs=0 if scored else None)
    request = Request(f"r{number}", None, ids, params, seed=number, prompt_embeds=embeds, priority=asked.priority)
    for index in range(asked.n if max_tokens else 1):
        finish = Finish(params, end_token_ids=(END,), prompt_ids=ids, vocabulary=None, max_tokens=max_tokens or 1)
        choice = Choice(request, index, finish, held=Held(identity=identity_of(salt=asked.salt, embeds=embeds)))
        if scored and not index:
            choice.prompt_scores = PromptScores(ids, params, VOCAB)
        request.choices.append(choice)
    return request


@dataclass(eq=False)
class Naive:
    """One sequence that has not finished.

    root: what stands before its first cell. tokens: ids, and a tuple of floats where one is embedded. cells: of its
    computed tokens, while it runs; lost: those that it had when it was preempted. blocks: its table, as the records
    told it. scored: positions of the prompt whose rows were given, None where nobody asked. began: tokens that a step
    finds computed; num_new, drafts: what it computes; fresh: places of blocks that it was given and that keep nothing.
    """

    choice: Choice
    root: object
    tokens: list
    rank: tuple[int, int, int]
    scored: int | None = None
    cells: list = field(default_factory=list)
    lost: list = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    seated: bool = False
    slot: int | None = None
    began: int = 0
    num_new: int = 0
    drafts: tuple[int, ...] = ()
    fresh: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, choice, number, root):
        """A sequence that arrives."""
        tokens = [*embedding_rows(choice.request.prompt_embeds), *choice.request.prompt_ids]
        rank = (choice.request.priority, number, choice.index)
        return cls(choice, root, tokens, rank, None if choice.prompt_scores is None else 0)

    @property
    def runs(self):
        return bool(self.blocks)

    @property
    def num_prompt(self):
        return self.choice.num_prompt

    @property
    def num_left(self):
        """Tokens that it may still be given."""
        return self.choice.request.params.max_tokens - (len(self.tokens) - self.num_prompt)

    @property
    def end(self):
        return self.began + self.num_new

    @property
    def sampled(self):
        """The positions of the step whose rows are sampled: the last token, and the drafts behind it."""
        reaches = self.num_new and self.end == len(self.tokens) + len(self.drafts)
        return range(len(self.tokens) - 1, self.end) if reaches and self.num_left else range(0)

    def chance(self, position, what=0):
        """A number that looks random and depends on nothing but these."""
        seed = self.choice.request.seed
        return zlib.crc32(bytes([seed % 4, self.choice.index, position, what]))

    def token_at(self, position):
        """What is drawn for a position."""
        number = self.chance(position)
        return END if number % 29 == 0 else number % 3

    def proposed(self):
        """Drafts for the positions that follow, most of them right."""
        first = len(self.tokens)
        num = min(self.chance(first, 1) % 4, self.num_left - 1)
        right = [self.chance(first + k, 2) % 4 > 0 for k in range(num)]
        return tuple((self.token_at(first + k) + 1 - yes) % VOCAB for k, yes in enumerate(right))

    def again(self, more, priority):
        """A request with the tokens that it has, and `more` that it will draw, as its prompt."""
        num = max(1, len(self.tokens) + more)
        tokens = [*self.tokens, *(self.token_at(position) for position in range(len(self.tokens), num))][:num]
        ids = tuple(token for token in tokens if not embedded(token)) or (0,)
        return Asked(ids, 1, 5, False, self.choice.request.num_embedded, self.root[1], priority)

    def take(self):
        """Append what is drawn: a token, and one more for each draft that it agrees with; return them."""
        taken = []
        for draft in (*self.drafts, None):
            taken.append(self.token_at(len(self.tokens)))
            self.tokens.append(taken[-1])
            if taken[-1] != draft or self.ended:
                break
        del self.cells[len(self.tokens) - 1 :]
        return taken

    @property
    def ended(self):
        return not self.num_left or (len(self.tokens) > self.num_prompt and self.tokens[-1] == END)

    def lose(self):
        """Its blocks are gone."""
        self.lost = self.cells or self.lost
        self.cells, self.blocks = [], []

    def leave(self):
        """Its seat is gone as well."""
        self.lose()
        self.seated, self.slot = False, None

    def given(self, block_ids, size, *, more=False):
        """Take blocks: all that it has from now on, or more of them."""
        before = self.blocks
        self.blocks = [*before, *block_ids] if more else list(block_ids)
        self.fresh = [k for k, block in enumerate(self.blocks) if block not in before and k * size >= self.began]


class NaiveBatch:
    """The sequences by id, as one who reads the records alone would know them."""

    def __init__(self, size, *, shares):
        self.size, self.shares = size, shares
        self.seqs: dict[tuple[str, int], Naive] = {}

    def running(self):
        return [seq for seq in self.seqs.values() if seq.runs]

    def siblings(self, seq):
        """The others of its request."""
        name, index = seq.choice.id
        return [other for id, other in self.seqs.items() if id[0] == name and id[1] != index]

    def receive(self, output: SchedulerOutput):
        """Apply a record in the documented order; return who takes part in the step."""
        for seq in self.seqs.values():
            seq.began, seq.num_new, seq.drafts, seq.fresh = len(seq.cells), 0, (), []
        for id in output.finished:
            assert self.seqs[id].seated
            self.seqs[id].leave()
        for id in output.preempted:
            assert self.seqs[id].seated
            self.seqs[id].lose()
        for new in output.new:
            self.enter(new)
        for change in output.changed:
            self.change(change, output)
        for seq in self.seqs.values():
            if seq.choice.id in output.num_tokens:
                seq.num_new = output.num_tokens[seq.choice.id]
        return [self.seqs[id] for id in output.num_tokens]

    def enter(self, new: NewSequence):
        seq, seat, request = self.seqs[new.id], new.seat, self.seqs[new.id].choice.request
        assert not seq.seated
        rows = embedding_rows(new.prompt_embeds)
        assert [*rows, *seat.prompt_ids, *seat.output_ids] == seq.tokens
        assert len(seat.output_ids) == len(seq.tokens) - seq.num_prompt
        assert (seat.num_embedded, seat.child, new.samples) == (len(rows), seq.choice.index, seq.choice.draws)
        assert (seat.params, seat.finish) == (request.params, seq.choice.finish)
        seq.seated, seq.began = True, new.num_computed
        seq.given(new.block_ids, self.size)

    def change(self, change: ChangedSequence, output: SchedulerOutput):
        """What is not new must not be sent."""
        seq = self.seqs[change.id]
        assert seq.seated
        assert change.new_block_ids or change.draft_ids
        assert change.id in output.num_tokens
        assert not change.new_token_ids
        seq.drafts = change.draft_ids
        if change.num_computed is not None:
            seq.began = change.num_computed
        if change.new_block_ids:
            seq.given(change.new_block_ids, self.size, more=not change.resumed)

    def lay_out(self, parts: list[Naive], batch):
        """The arrays of a step, token by token, and its rows."""
        names = (
            "input_ids", "positions", "slot_mapping", "seq_lens", "num_computed", "block_tables", "slots",
            "logits_rows", "is_embedded", "slot_of_row", "position_of_row", "child_of_row", "draft_of_row",
        )  # fmt: skip
        a, owners, scored, embeds = {name: [] for name in names}, [], [], []
        a["query_starts"], a["row_starts"] = [0], [0]
        longest = max((len(seq.blocks) for seq in parts), default=0)
        for seq in parts:
            for position in range(seq.began, seq.end):
                token = [*seq.tokens, *seq.drafts][position]
                if position in seq.sampled:
                    k = position - seq.sampled[0]
                    row = (seq.slot, position + 1, seq.choice.index, k if k < len(seq.drafts) else -1)
                    for name, value in zip(names[-4:], row, strict=True):
                        a[name].append(value)
                    a["logits_rows"].append(len(a["input_ids"]))
                elif seq.scored is not None and seq.scored <= position < seq.num_prompt:
                    scored.append(len(a["input_ids"]))
                a["input_ids"].append(0 if embedded(token) else token)
                a["positions"].append(position)
                a["is_embedded"].append(embedded(token))
                embeds.append(list(token) if embedded(token) else [0.0] * WIDTH)
                a["slot_mapping"].append(seq.blocks[position // self.size] * self.size + position % self.size)
            if seq.sampled:
                owners.append(batch.slot_of(seq.choice.id))
                a["row_starts"].append(len(a["slot_of_row"]))
            a["query_starts"].append(len(a["input_ids"]))
            for name, value in (("num_computed", seq.began), ("seq_lens", seq.end), ("slots", seq.slot)):
                a[name].append(value)
            a["block_tables"].append([*seq.blocks, *[0] * (longest - len(seq.blocks))])
        return both(a | {"owners": owners}, scored, embeds)

    def history_of(self, seq: Naive, weights):
        """What may stand in the blocks of a sequence that goes on: its own cells; and of one that comes in, also what
        a sibling has, or what anybody would have computed with the weights of now. Name and cells of each."""
        if seq.cells:
            return [("own", seq.cells)]
        found = [("swapped", seq.lost)] if seq.began == len(seq.lost) else []
        if self.shares and len(seq.tokens) == seq.num_prompt and seq.began < seq.num_prompt:
            found += [("forked", other.cells or other.lost) for other in self.siblings(seq)]
        return [*found, ("cached", chain(seq.root, seq.tokens, weights))]

    def follows(self, seq: Naive, before: Iterable[Naive]):
        """Whether it waits for the prompt that the first of its siblings computes."""
        first = self.seqs.get((seq.choice.id[0], 0))
        if not self.shares or first in (None, seq) or len(seq.tokens) > seq.num_prompt or seq.num_prompt == 1:
            return False
        computed = first.began if first.num_new else len(first.lost)
        return (first in before or first.num_new > 0) and computed < first.num_prompt

    def check_plan(self, plan: Plan, before: list[Naive], *, budget, most, num_free):
        """What the scheduler promises. before: who ran. most: how many may. num_free: blocks, once it is planned."""
        parts = [self.seqs[planned.choice.id] for planned in plan.planned]
        gone = [seq for seq in before if seq not in parts]
        entered = [seq for seq in parts if seq not in before]
        out = {*plan.output.preempted, *plan.output.finished}
        assert list(plan.output.num_tokens) == [seq.choice.id for seq in parts]
        assert sum(seq.num_new for seq in parts) <= budget
        assert len(parts) <= most
        assert len([seq for seq in self.seqs.values() if seq.seated]) <= most
        for seq, planned in zip(parts, plan.planned, strict=True):
            assert (planned.num_computed, planned.num_new) == (seq.began, seq.num_new)
            assert planned.samples == bool(seq.sampled)
            assert 1 <= seq.num_new <= len(seq.tokens) - seq.began + len(seq.drafts)
            assert seq.scored is None or min(seq.began, seq.num_prompt) <= seq.scored, "a row was passed over"
            if len(seq.tokens) - len(seq.cells) == 1 and seq.num_left:
                assert seq.sampled, "a decode gets its token"
        for seq in gone:
            assert seq.choice.id in out, "who runs has a part in every step, or gives way"
            assert all(other.rank < seq.rank for other in before if other in parts), "the last in rank gives way"
        waiting = [seq for seq in self.seqs.values() if seq not in parts]
        for seq in entered:
            passed_over = [other for other in waiting if other.rank < seq.rank]
            assert all(self.follows(other, before) for other in passed_over), "first come, first served"
            assert not self.follows(seq, before), "a child waits for its sibling's prompt"
        cut = [seq for seq in parts if seq.end < len(seq.tokens)]
        assert not cut or sum(seq.num_new for seq in parts) == budget, "a chunk is no shorter than it must"
        drafts = sum(len(seq.drafts) for seq in parts)
        assert not entered or len(parts) == 1 or num_free + drafts >= len(parts), "one block for each that runs"
        first = min(self.seqs.values(), key=lambda seq: seq.rank)
        stay = [seq for seq in before if seq.rank[0] == first.rank[0]]  # who need not make way for it
        assert first in parts or ((stay or gone) and first not in before), "the first goes on, or comes in if it can"


class Speculating(Scheduler):
    """Lets whoever is sampled verify drafts, where nobody else needs the tokens and the blocks that they take."""

    def __init__(self, *args, propose, **kwargs):
        super().__init__(*args, **kwargs)
        self.propose, self.drafts = propose, {}

    def preempt(self, choice):
        self.drafts.pop(choice, None)
        super().preempt(choice)

    def _go_on(self, choice, step):
        super()._go_on(choice, step)
        plan = step.planned.get(choice)
        if plan is None or not plan.samples:
            return
        ahead = sum(other not in step.planned and other not in step.to_come for other in self.running)
        drafts = self.propose(choice)[: max(0, step.free - ahead - bool(self.waiting))]
        free = self.kv.blocks.num_free - ahead
        while drafts and self.kv.missing(choice.held, plan.num_computed, plan.end + len(drafts)) > free:
            drafts = drafts[:-1]
        if drafts:
            assert self.kv.grow(choice.held, plan.num_computed, plan.end + len(drafts))
            step.planned[choice] = plan._replace(num_new=plan.num_new + len(drafts))
            step.budget -= len(drafts)
            self.drafts[choice] = drafts

    def _change(self, choice, plan):
        drafts, change = self.drafts.pop(choice, ()), super()._change(choice, plan)
        if not drafts:
            return change
        return (change or ChangedSequence(choice.id))._replace(draft_ids=drafts)
