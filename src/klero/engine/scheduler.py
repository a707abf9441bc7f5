"""Scheduler: which sequences compute how many tokens in the next step."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from klero.batch import Blocks, Scheduled
from klero.batch.input_batch import NO_ROWS
from klero.engine.request import Choice


class Planned(NamedTuple):
    """One sequence of a step and what the step does for it."""

    choice: Choice
    scheduled: Scheduled


class Scheduler:
    """First come, first served, under a token budget: decodes first, then prefills in chunks.

    max_num_seqs: sequences that are seated; no more run at a time than the budget has tokens, so that each of them gets
    on in every step. max_num_batched_tokens: tokens a step computes. blocks: None for a model that owns its sequences.
    A sequence is let in when the blocks for all its tokens are free, and one more for each that runs. When they run out
    all the same, the youngest gives its own back, keeps its seat and its tokens, and is computed again later; its lots
    depend on positions alone, so its text does not change. The oldest always goes on.
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
        self.max_running = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens, self.blocks = max_num_batched_tokens, blocks
        self.waiting: deque[Choice] = deque()  # preempted ones in front
        self.running: list[Choice] = []  # oldest first
        self.num_preemptions = 0
        self._num_arrived = self._num_seated = 0
        self._seat, self._forget = seat, forget

    def add(self, choice: Choice) -> None:
        """Let a sequence wait for its turn."""
        choice.arrival, self._num_arrived = self._num_arrived, self._num_arrived + 1
        self.waiting.append(choice)

    def remove(self, choice: Choice) -> None:
        """Drop a sequence that has finished or was aborted; its blocks come back."""
        (self.running if choice.running else self.waiting).remove(choice)
        choice.running = False
        self._num_seated -= choice.slot is not None
        self._free(choice)

    def keep(self, alive: Iterable[Choice]) -> None:
        """Forget every sequence but these."""
        kept = set(alive)
        self.running = [choice for choice in self.running if choice in kept]
        self.waiting = deque(choice for choice in self.waiting if choice in kept)
        self._num_seated = sum(choice.slot is not None for choice in kept)

    def preempt(self, choice: Choice) -> None:
        """Take a running sequence's blocks; it waits in front, and is computed again from its first token."""
        self.num_preemptions += 1
        choice.request.clock.num_preemptions += 1
        self.running.remove(choice)
        choice.running = False
        self.waiting.appendleft(choice)
        self._free(choice)

    def schedule(self) -> list[Planned]:
        """Choose the next step; empty when there is nothing to do."""
        budget, preempted = self.max_num_batched_tokens, self.num_preemptions
        planned: dict[int, Planned] = {}
        for choice in self._in_turn():
            num_new = min(choice.num_tokens - choice.num_computed, budget)
            if num_new > 0 and choice.running and self._grow(choice, choice.num_computed + num_new, planned):
                planned[choice.arrival] = self._plan(choice, num_new)
                budget -= num_new
        if self.num_preemptions == preempted:  # else the blocks that came free belong to those that go on
            self._admit(planned, budget)
        return list(planned.values())

    def _in_turn(self) -> Iterator[Choice]:
        """Running sequences: decodes, then prefills, each oldest first."""
        yield from [choice for choice in self.running if choice.num_tokens - choice.num_computed == 1]
        yield from [choice for choice in self.running if choice.num_tokens - choice.num_computed > 1]

    def _admit(self, planned: dict[int, Planned], budget: int) -> None:
        """Let waiting sequences in while there are seats, blocks and budget."""
        while self.waiting and budget > 0 and len(self.running) < self.max_running:
            choice = self.waiting[0]
            if choice.slot is None:
                if self._num_seated == self.max_running:
                    return
                self._seat(choice)
                self._num_seated += 1
            if not self._fits(choice):
                return
            num_new = min(choice.num_tokens, budget)
            bisect.insort(self.running, self.waiting.popleft(), key=lambda c: c.arrival)
            choice.running = True
            choice.request.clock.start()
            planned[choice.arrival] = self._plan(choice, num_new)
            budget -= num_new

    def _fits(self, choice: Choice) -> bool:
        """Take the blocks of all tokens of a waiting sequence, if one more for each running one stays free."""
        if self.blocks is None:
            return True
        index = _index(choice)
        reserve = len(self.running) + 1 if self.running else 0
        if self.blocks.missing(index, choice.num_tokens) + reserve > self.blocks.num_free:
            return False
        return self.blocks.grow(index, choice.num_tokens)

    def _plan(self, choice: Choice, num_new: int) -> Planned:
        samples = choice.draws and choice.num_computed + num_new == choice.num_tokens
        logits_from = NO_ROWS if choice.prompt_scores is None else choice.prompt_scores.next_position
        return Planned(choice, Scheduled(_index(choice), choice.num_computed, num_new, samples, logits_from))

    def _grow(self, choice: Choice, num_tokens: int, planned: dict[int, Planned]) -> bool:
        """Find blocks for a running sequence, at the cost of the youngest; False if it is the youngest itself."""
        while self.blocks is not None and not self.blocks.grow(_index(choice), num_tokens):
            youngest = self.running[-1]
            planned.pop(youngest.arrival, None)
            self.preempt(youngest)
            if youngest is choice:
                return False
        return True

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
