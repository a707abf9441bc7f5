"""Scheduler: which sequences compute how many tokens in the next step."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from klero.batch import Blocks, Scheduled
from klero.engine.request import Choice


class Planned(NamedTuple):
    """One sequence of a step and what the step does for it."""

    choice: Choice
    scheduled: Scheduled


class Scheduler:
    """First come, first served, under a token budget: decodes first, then prefills in chunks.

    max_num_seqs: sequences that are seated. max_num_batched_tokens: tokens a step computes. blocks: None for a model
    that owns its sequences. When blocks run out, the youngest sequence gives its own back, keeps its seat and its
    tokens, and is computed again later; its lots depend on positions alone, so its text does not change.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        blocks: Blocks | None,
        *,
        seat: Callable[[Choice], None],
        forget: Callable[[Choice], None],
    ) -> None:
        self.max_num_seqs, self.max_num_batched_tokens, self.blocks = max_num_seqs, max_num_batched_tokens, blocks
        self.waiting: deque[Choice] = deque()  # preempted ones in front
        self.running: list[Choice] = []  # oldest first
        self.num_preemptions = 0
        self._num_arrived = 0
        self._seat, self._forget = seat, forget

    @property
    def num_seated(self) -> int:
        """Sequences that hold a slot, running or preempted."""
        return len(self.running) + sum(choice.slot is not None for choice in self.waiting)

    def add(self, choice: Choice) -> None:
        """Let a sequence wait for its turn."""
        choice.arrival, self._num_arrived = self._num_arrived, self._num_arrived + 1
        self.waiting.append(choice)

    def remove(self, choice: Choice) -> None:
        """Drop a sequence that has finished or was aborted; its blocks come back."""
        if choice in self.running:
            self.running.remove(choice)
        elif choice in self.waiting:
            self.waiting.remove(choice)
        self._free(choice)

    def schedule(self) -> list[Planned]:
        """Choose the next step; empty when there is nothing to do."""
        budget, preempted = self.max_num_batched_tokens, self.num_preemptions
        planned: list[Planned] = []
        for choice in self._in_turn():
            if budget == 0 or choice not in self.running:  # preempted a moment ago
                continue
            num_new = min(choice.num_tokens - choice.num_computed, budget)
            if self._grow(choice, choice.num_computed + num_new, planned):
                planned.append(self._plan(choice, num_new))
                budget -= num_new
        if self.num_preemptions == preempted:  # else the blocks that came free belong to those that go on
            self._admit(planned, budget)
        return planned

    def _admit(self, planned: list[Planned], budget: int) -> None:
        """Let waiting sequences in while there are seats, blocks and budget."""
        while self.waiting and budget > 0 and self._may_run(self.waiting[0]):
            choice = self.waiting[0]
            num_new = min(choice.num_tokens, budget)
            if choice.slot is None:
                self._seat(choice)
            if self.blocks is not None and not self.blocks.grow(_index(choice), num_new):
                break
            bisect.insort(self.running, self.waiting.popleft(), key=lambda c: c.arrival)
            planned.append(self._plan(choice, num_new))
            budget -= num_new

    def _in_turn(self) -> Iterator[Choice]:
        """Running sequences: decodes, then prefills, each oldest first."""
        yield from [choice for choice in self.running if choice.num_tokens - choice.num_computed == 1]
        yield from [choice for choice in self.running if choice.num_tokens - choice.num_computed > 1]

    def _may_run(self, choice: Choice) -> bool:
        return choice.slot is not None or self.num_seated < self.max_num_seqs

    def _plan(self, choice: Choice, num_new: int) -> Planned:
        samples = choice.num_computed + num_new == choice.num_tokens
        return Planned(choice, Scheduled(_index(choice), choice.num_computed, num_new, samples))

    def _grow(self, choice: Choice, num_tokens: int, planned: list[Planned]) -> bool:
        """Find blocks for a running sequence, at the cost of the youngest; False if it is the youngest itself."""
        while self.blocks is not None and not self.blocks.grow(_index(choice), num_tokens):
            youngest = self.running[-1]
            planned[:] = [plan for plan in planned if plan.choice is not youngest]
            self._preempt(youngest)
            if youngest is choice:
                return False
        return True

    def _preempt(self, choice: Choice) -> None:
        self.num_preemptions += 1
        self.running.remove(choice)
        self.waiting.appendleft(choice)
        self._free(choice)

    def _free(self, choice: Choice) -> None:
        """Give blocks and cached state back; the tokens stay."""
        choice.num_computed = 0
        if choice.slot is not None:
            if self.blocks is not None:
                self.blocks.release(choice.slot.index)
            self._forget(choice)


def _index(choice: Choice) -> int:
    assert choice.slot is not None, f"{choice.owner} has no slot"
    return choice.slot.index
