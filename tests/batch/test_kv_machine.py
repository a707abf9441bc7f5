"""The account of blocks, driven at random, beside memory that is simulated: every sequence finds its own K/V."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from klero.batch.kv import Held, KVAccount
from klero.batch.prefix import identity_of

ZERO = 0
TEXTS = ([0, 1] * 8, [0] * 4 + [1] * 12)  # most prompts begin like one of these, so that prefixes meet
TAILS = st.lists(st.integers(0, 1), min_size=1, max_size=3)
MOST = 6  # sequences at a time
WHICH = st.integers(0, MOST - 1)


@dataclass(eq=False)
class Sequence:
    """cells: the K/V of its computed tokens, each a hash of the one before, the token and the weights.

    planned: the positions that the next step writes. blank: blocks it was given for them in which nothing is kept.
    """

    held: Held
    tokens: list[int]
    cells: list[int] = field(default_factory=list)
    planned: range = range(0)
    blank: set[int] = field(default_factory=set)

    def stop(self):
        """Plan nothing for it any more."""
        self.planned, self.blank = range(0), set()

    @property
    def waits(self):
        return not self.held.block_ids and not self.swapped

    @property
    def swapped(self):
        return bool(self.held.host_ids)

    @property
    def runs(self):
        """It has computed tokens on the device."""
        return bool(self.cells) and not self.swapped


class Memory:
    """K/V as dictionaries: a block is a list of cells. What was never written holds junk."""

    def __init__(self, block_size):
        self.block_size, self.device, self.host = block_size, {}, {}

    def block(self, memory, number):
        return memory.get(number, [f"junk of {number}"] * self.block_size)

    def move(self, moves):
        """Run the moves twice, each kind in order and backwards: one by one or all at once must be the same."""
        targets = [target for _, target in (*moves.copy, *moves.swap_in)] + list(moves.zero)
        assert max(Counter(targets).values(), default=1) == 1
        assert max(Counter(host for _, host in moves.swap_out).values(), default=1) == 1
        assert not {source for source, _ in moves.copy} & {target for _, target in moves.copy}
        ends = []
        for order in (1, -1):
            device, host = dict(self.device), dict(self.host)
            for source, target in moves.swap_out[::order]:
                host[target] = self.block(device, source)
            for source, target in moves.copy[::order]:
                device[target] = self.block(device, source)
            for source, target in moves.swap_in[::order]:
                device[target] = self.block(host, source)
            for target in moves.zero[::order]:
                device[target] = [ZERO] * self.block_size
            ends.append((device, host))
        assert ends[0] == ends[1]
        self.device, self.host = ends[0]

    def write(self, block_ids, position, cell):
        number = block_ids[position // self.block_size]
        block = list(self.block(self.device, number))
        block[position % self.block_size] = cell
        self.device[number] = block

    def read(self, sequence):
        """The cells of a sequence's computed tokens, wherever they are."""
        memory = self.host if sequence.swapped else self.device
        ids = sequence.held.host_ids or sequence.held.block_ids
        return [cell for number in ids for cell in self.block(memory, number)][: len(sequence.cells)]


class KVMachine(RuleBasedStateMachine):
    """Sequences with prefixes in common come, grow, fork, wait, swap and leave; between two steps in any order."""

    @initialize(
        num_blocks=st.sampled_from([24, 16, 10, 6, 3]), block_size=st.sampled_from([4, 3, 2, 1]),
        num_host_blocks=st.sampled_from([9, 5, 2, 0]), caching=st.sampled_from([True, True, True, False]),
        zero_fresh=st.booleans(),
    )  # fmt: skip
    def start(self, num_blocks, block_size, **options):
        self.kv = KVAccount(num_blocks, block_size, **options)
        self.memory, self.sequences = Memory(block_size), []
        self.weights, self.happened = 0, Counter()

    def those(self, kind):
        return [sequence for sequence in self.sequences if getattr(sequence, kind)]

    def pick(self, which, kind=None):
        among = self.those(kind) if kind else self.sequences
        return among[which % len(among)]

    def expected(self, identity, tokens):
        """The cells of these tokens, computed from the first one on with the weights of now."""
        cells, before = [], identity
        for token in tokens:
            before = hash((before, token, self.weights))
            cells.append(before)
        return cells

    def match(self, sequence):
        most = len(sequence.tokens) - 1
        num = self.kv.match(sequence.held, sequence.tokens, most)
        assert num == len(sequence.held.block_ids) * self.kv.blocks.block_size <= max(most, 0)
        sequence.cells = self.expected(sequence.held.identity, sequence.tokens[:num])
        self.happened["hit"] += num > 0

    @precondition(lambda self: len(self.sequences) < MOST)
    @rule(
        text=st.sampled_from(TEXTS), length=st.sampled_from([12, 9, 8, 5, 0]), tail=TAILS,
        num=st.sampled_from([16, 7, 3, 0]), salt=st.sampled_from([None, None, None, None, "salt"]),
    )  # fmt: skip
    def come(self, text, length, tail, num, salt):
        sequence = Sequence(Held(identity=identity_of(salt=salt)), text[:length] + tail)
        self.sequences.append(sequence)
        self.match(sequence)
        self.extend(sequence, num, 0)

    @precondition(lambda self: self.those("waits"))
    @rule(which=WHICH)
    def match_again(self, which):
        self.match(self.pick(which, "waits"))

    @precondition(lambda self: len(self.sequences) < MOST and self.those("runs"))
    @rule(which=WHICH, less=st.integers(0, 3), tail=TAILS)
    def fork(self, which, less, tail):
        self.fork_of(self.pick(which, "runs"), less, tail)

    def fork_of(self, parent, less, tail):
        num = max(0, len(parent.cells) - less)
        held = self.kv.fork(parent.held, num)
        self.sequences.append(Sequence(held, parent.tokens[:num] + list(tail), parent.cells[:num]))

    @precondition(lambda self: len(self.sequences) < MOST and self.those("runs"))
    @rule(which=WHICH, times=st.integers(1, 3), recomputed=st.integers(0, 1))
    def fork_and_grow(self, which, times, recomputed):
        """A fork of the fork each time, before the copy of the first has been made."""
        parent = self.pick(which, "runs")
        for _ in range(min(times, MOST - len(self.sequences))):
            self.fork_of(parent, 0, [1])
            parent = self.sequences[-1]
            self.extend(parent, 1, recomputed)

    @precondition(lambda self: self.sequences)
    @rule(which=WHICH, num=st.integers(1, 6), recomputed=st.sampled_from([0, 0, 0, 1]))
    def grow(self, which, num, recomputed):
        """recomputed: the last token once more, as a fork does that needs its logits."""
        if not self.pick(which).swapped:
            self.extend(self.pick(which), num, recomputed)

    @precondition(lambda self: self.sequences)
    @rule(num=st.integers(1, 4), backwards=st.booleans(), succeeds=st.booleans())
    def turn(self, num, backwards, succeeds):
        """Everyone who fits goes on, who does not gives way, and the step is made."""
        for sequence in self.sequences[:: -1 if backwards else 1]:
            if not sequence.swapped and not self.extend(sequence, num, 0):
                self.give_back(sequence)
        self.step(succeeds)

    def extend(self, sequence, num, recomputed):
        """Let a sequence write `num` tokens more, if there are blocks."""
        first = max(0, len(sequence.cells) - recomputed)
        while len(sequence.tokens) <= first:
            sequence.tokens.append(num % 2)
        end = min(len(sequence.tokens), first + num)
        free, before = self.kv.blocks.num_free, list(sequence.held.block_ids)
        missing = self.kv.missing(sequence.held, first, end)
        assert self.kv.blocks.num_free == free
        assert self.kv.grow(sequence.held, first, end) is (missing <= free)
        if missing > free:
            assert (sequence.held.block_ids, self.kv.blocks.num_free) == (before, free)
            self.happened["full"] += 1
            return False
        assert self.kv.blocks.num_free == free - missing
        assert len(set(sequence.held.block_ids) - set(before)) == missing
        del sequence.cells[first:]
        sequence.planned = range(first, end)
        size = self.kv.blocks.block_size
        sequence.blank |= {block for block in sequence.held.block_ids[-(-first // size) :] if block not in before}
        return True

    @precondition(lambda self: self.those("cells"))
    @rule(which=WHICH, less=st.integers(1, 6), tail=TAILS, grows=st.booleans())
    def rewind(self, which, less, tail, grows):
        """Computed tokens are taken back and others follow; while it is swapped out, too. To grow there says it too."""
        sequence = self.pick(which, "cells")
        num = max(0, len(sequence.cells) - less)
        sequence.tokens[num:] = tail
        del sequence.cells[num:]
        sequence.stop()
        if not grows or sequence.swapped or not self.extend(sequence, len(tail), 0):
            self.kv.rewind(sequence.held, num)

    @precondition(lambda self: self.those("runs"))
    @rule(which=WHICH)
    def swap_out(self, which):
        sequence = self.pick(which, "runs")
        held = sequence.held
        if self.kv.swap_out(held, len(sequence.cells)):
            assert held.block_ids == []
            assert len(held.host_ids) == -(-len(sequence.cells) // self.kv.blocks.block_size)
            sequence.stop()
        else:
            assert self.kv.host is None or self.kv.host.num_free < len(held.block_ids)

    @precondition(lambda self: self.those("swapped"))
    @rule(which=WHICH)
    def swap_in(self, which):
        sequence = self.pick(which, "swapped")
        enough = len(sequence.held.host_ids) <= self.kv.blocks.num_free
        assert self.kv.swap_in(sequence.held) is enough
        assert sequence.swapped is not enough

    @precondition(lambda self: self.sequences)
    @rule(which=WHICH, leaves=st.sampled_from([False, False, True]))
    def release(self, which, leaves):
        """It waits and is computed again, or it leaves."""
        sequence = self.pick(which)
        self.give_back(sequence)
        if leaves:
            self.sequences.remove(sequence)

    def give_back(self, sequence):
        self.kv.release(sequence.held)
        sequence.cells = []
        sequence.stop()

    @precondition(lambda self: self.those("runs"))
    @rule(which=WHICH)
    def computed(self, which):
        """Late, as where the host runs behind: between two steps, whatever has been planned since."""
        sequence = self.pick(which, "runs")
        self.kv.computed(sequence.held, sequence.tokens, len(sequence.cells))

    @precondition(lambda self: sum(len(sequence.cells) for sequence in self.sequences) > 20)
    @rule()
    def forget(self):
        """Not too often: it makes every prefix new."""
        self.kv.forget()
        self.weights += 1

    @precondition(lambda self: any(sequence.planned for sequence in self.sequences))
    @rule(succeeds=st.booleans())
    def step(self, succeeds):
        """Move, compute, write; and register, or leave that for later."""
        moves = self.kv.take_moves()
        self.memory.move(moves)
        self.happened.update({kind: len(listed) for kind, listed in moves._asdict().items()})
        for sequence in self.sequences:
            assert self.memory.read(sequence) == sequence.cells
            for block in sequence.blank if self.kv.zero_fresh else ():
                assert self.memory.device[block] == [ZERO] * self.kv.blocks.block_size
        for sequence in self.sequences:
            held, planned = sequence.held, sequence.planned
            for position in planned:
                block = held.block_ids[position // self.kv.blocks.block_size]
                assert self.is_own(block, sequence, position)
                assert not self.kv.blocks.is_registered(block)
                before = sequence.cells[-1] if sequence.cells else held.identity
                sequence.cells.append(hash((before, sequence.tokens[position], self.weights)))
                self.memory.write(held.block_ids, position, sequence.cells[-1])
            sequence.stop()
        for sequence in self.sequences:
            assert self.memory.read(sequence) == sequence.cells
            if succeeds and sequence.runs:
                self.kv.computed(sequence.held, sequence.tokens, len(sequence.cells))
        self.check_owners(exactly=True)

    def is_own(self, block, sequence, position):
        """Nobody else holds a block that is written, but for a fork that was made since, of what lies before."""
        size = self.kv.blocks.block_size
        others = [other for other in self.sequences if other is not sequence and block in other.held.block_ids]
        return all(len(other.cells) <= position for other in others if other.held.block_ids[position // size] == block)

    @invariant()
    def owners_are_those_who_hold(self):
        self.check_owners(exactly=False)

    def check_owners(self, exactly):
        """Between steps planned moves own blocks as well; once they are taken, nobody else does."""
        for pool, ids_of in ((self.kv.blocks, "block_ids"), (self.kv.host, "host_ids")):
            if pool is None:
                continue
            held = Counter(block for sequence in self.sequences for block in getattr(sequence.held, ids_of))
            owners = {block: pool.num_owners(block) for block in range(pool.num_blocks)}
            assert pool.num_free == list(owners.values()).count(0)
            for block, num in owners.items():
                assert num == held[block] if exactly else num >= held[block]

    def teardown(self):
        if not hasattr(self, "kv"):
            return
        for sequence in self.sequences:
            self.kv.release(sequence.held)
        assert not self.kv.take_moves().any
        self.happened["evicted"] += self.kv.blocks.num_evictions
        for pool in filter(None, (self.kv.blocks, self.kv.host)):
            assert pool.num_free == pool.num_blocks


class Dice:
    """Programs with chances of their own: every rule often enough for copies, hits and swaps to meet in one step."""

    CHANCES: ClassVar = {
        "turn": 20, "grow": 12, "come": 14, "fork_and_grow": 10, "fork": 6, "swap_out": 8, "swap_in": 10, "release": 8,
        "match_again": 6, "computed": 4, "step": 6, "rewind": 3, "forget": 1,
    }  # fmt: skip

    def __init__(self, seed):
        self.random = random.Random(seed)

    def arguments(self, name):
        """What a rule takes."""
        one_of, which = self.random.choice, self.random.randrange(MOST)
        yes, tail = one_of([True, False]), [one_of([0, 1]) for _ in range(one_of([1, 1, 2, 3]))]
        salt, succeeds = one_of([None, None, None, None, None, "salt"]), one_of([True, True, False])
        return {
            "come": (one_of(TEXTS), one_of([12, 9, 8, 5, 0]), tail, one_of([16, 16, 7, 3, 0]), salt),
            "fork": (which, one_of([0, 0, 1, 3]), tail), "fork_and_grow": (which, one_of([1, 2, 3]), yes),
            "grow": (which, one_of([1, 2, 6]), one_of([0, 0, 1])), "rewind": (which, one_of([1, 2, 6]), tail, yes),
            "turn": (one_of([1, 1, 4]), yes, succeeds), "step": (succeeds,), "release": (which, yes), "forget": (),
        }.get(name, (which,))  # fmt: skip

    def may(self, machine, name):
        needs = {"match_again": "waits", "rewind": "cells", "swap_in": "swapped", "step": "planned"}
        needs |= dict.fromkeys(("fork", "fork_and_grow", "swap_out", "computed"), "runs")
        if name in ("come", "fork", "fork_and_grow") and len(machine.sequences) == MOST:
            return False
        return name == "come" or bool(machine.those(needs[name]) if name in needs else machine.sequences)

    def play(self, num_steps):
        """Run a program; return the machine that it ran on."""
        one_of = self.random.choice
        machine = KVMachine()
        machine.start(
            one_of([24, 16, 12, 8, 4]), one_of([4, 3, 2, 1]), num_host_blocks=one_of([9, 5, 2, 0]),
            caching=one_of([True, True, True, False]), zero_fresh=one_of([True, False]),
        )  # fmt: skip
        for name in self.random.choices(list(self.CHANCES), list(self.CHANCES.values()), k=num_steps):
            if self.may(machine, name):
                getattr(machine, name)(*self.arguments(name))
                machine.owners_are_those_who_hold()
        machine.teardown()
        return machine


def play(seeds):
    """Play programs and add up what happened in them, so that none of it can go missing unnoticed."""
    happened = Counter()
    for seed in seeds:
        happened += Dice(seed).play(60).happened
    return happened


def test_dice():
    happened = play(range(600))
    kinds = ("hit", "copy", "swap_out", "swap_in", "zero", "full", "evicted")
    assert min(happened[kind] for kind in kinds) > 300, happened


@pytest.mark.deep
def test_dice_deep():
    play(range(1000, 6000))


TestKV = KVMachine.TestCase
TestKV.settings = settings(max_examples=100, stateful_step_count=40)


@pytest.mark.deep
class TestKVDeep(KVMachine.TestCase):
    settings = settings(max_examples=5000, stateful_step_count=60)
