"""Scheduler: which sequences compute how many tokens in the next step, and who holds which blocks."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import NamedTuple

from klero.batch import (
    NO_ROWS,
    NOTHING_MOVES,
    ChangedSequence,
    Held,
    KVAccount,
    NewSequence,
    SchedulerOutput,
    SequenceId,
)
from klero.engine.options import EngineOptions
from klero.engine.request import Choice
from klero.errors import KleroError
from klero.finish import FinishReason


class Planned(NamedTuple):
    """What a step does for one sequence: tokens computed before it, tokens it computes, whether it is sampled.

    logits_from: the tokens at this position and later give a row each, to be scored; the sampled one has its own row
    already. NO_ROWS: none.
    """

    choice: Choice
    num_computed: int
    num_new: int
    samples: bool
    logits_from: int = NO_ROWS

    @property
    def end(self) -> int:
        """Tokens computed after the step."""
        return self.num_computed + self.num_new

    @property
    def scored(self) -> range:
        """The positions whose rows are scored."""
        end = self.end - self.samples
        return range(min(max(self.num_computed, self.logits_from), end), end)


class Plan(NamedTuple):
    """A step: what it does for whom, and the same as the batch is told it."""

    planned: tuple[Planned, ...]
    output: SchedulerOutput


class _Step:
    """A step while it is planned. budget: tokens that are left. entering: who takes a seat in it.

    to_come: running prompts whose turn is still to come; each keeps one token of the budget. open: others may enter.
    """

    def __init__(self, budget: int) -> None:
        self.budget, self.open = budget, True
        self.to_come: dict[Choice, None] = {}
        self.planned: dict[Choice, Planned] = {}
        self.entering: set[Choice] = set()

    @property
    def free(self) -> int:
        """Tokens that nobody needs."""
        return self.budget - len(self.to_come)

    def add(self, plan: Planned) -> None:
        self.planned[plan.choice] = plan
        self.budget -= plan.num_new

    def drop(self, choice: Choice) -> None:
        plan = self.planned.pop(choice, None)
        self.budget += 0 if plan is None else plan.num_new
        self.entering.discard(choice)
        self.to_come.pop(choice, None)


class Scheduler:
    """First come, first served, or by priority, under a token budget: decodes first, then prefills in chunks.

    options: max_num_seqs: sequences that are seated; no more run at a time than the budget has tokens, so that each of
    them gets on in every step. max_num_batched_tokens: the budget, tokens a step computes. scheduling_policy: with
    "priority" the lower `Request.priority` goes first, and takes the place of a higher one. kv: the account of blocks;
    None for a model that owns its sequences. shares: the children of a request share the blocks of its prompt, which
    needs a model that copies blocks.

    A sequence is let in when the blocks for all its tokens are free, and one more for each that runs; a prefix that is
    cached, or that a sibling has computed, is shared instead. When blocks run out all the same, whoever ranks last (the
    highest priority number, and of those the youngest) gives its own back and is computed again later, or is swapped to
    host memory and back; its lots depend on positions alone, so its text does not change. The first in rank always goes
    on.

    Bounds: a running decode gets its token in every step, and a running prompt at least one, so that one of P tokens is
    done after P steps at most, unless it is preempted. Nobody is let in before one that ranks before him and waits for
    room, whatever he needs himself; a child that waits for its sibling's prompt may find the room taken. With
    "priority" one of a lower number takes seat and blocks of those of higher ones, if that is enough for it to run.
    """

    def __init__(
        self, options: EngineOptions, kv: KVAccount | None, end_token_ids: tuple[int, ...], *, shares: bool
    ) -> None:
        self.max_num_batched_tokens, self.kv = options.max_num_batched_tokens, kv
        self.max_running = min(options.max_num_seqs, options.max_num_batched_tokens)
        self.waiting: list[Choice] = []  # both by rank
        self.running: list[Choice] = []
        self.num_preemptions = 0
        self._num_arrived = self._num_seated = 0
        self._preempted: dict[SequenceId, None] = {}  # since the last step, of those that are seated
        self._unseated: dict[SequenceId, None] = {}
        self._end_token_ids, self._shares = end_token_ids, shares
        self._by_priority = options.scheduling_policy == "priority"

    def add(self, choice: Choice) -> None:
        """Let a sequence wait for its turn."""
        choice.rank = (choice.request.priority if self._by_priority else 0, self._num_arrived)
        self._num_arrived += 1
        bisect.insort(self.waiting, choice, key=_rank)

    def remove(self, choice: Choice) -> None:
        """Drop a sequence that has finished or was aborted; its blocks come back.

        After an error they are shared no more: it may be that of a row that nothing was drawn from, of a prompt.
        """
        if self.kv is not None and choice.finished is not None and choice.finished.reason is FinishReason.ERROR:
            self.kv.distrust(choice.held)
        _take(self.running if choice.running else self.waiting, choice)
        choice.running = False
        self._num_seated -= choice.seated
        choice.seated = False
        self._preempted.pop(choice.id, None)
        self._free(choice)

    def start_over(self, alive: Iterable[Choice]) -> None:
        """Nobody knows what the batch and the blocks hold: these sequences, and no others, are computed once more."""
        self.waiting = sorted(alive, key=_rank)
        for choice in self.waiting:
            if choice.running:
                self._count_preemption(choice)
            choice.running, choice.seated, choice.slot = False, False, None
            choice.num_computed, choice.held, choice.sent = 0, Held(identity=choice.held.identity), []
        self.running, self._num_seated = [], 0
        self._preempted, self._unseated = {}, {}
        if self.kv is not None:
            self.kv.clear()

    def preempt(self, choice: Choice) -> None:
        """Take a running sequence's blocks; it waits, and is swapped in or computed again from its first token."""
        self._count_preemption(choice)
        _take(self.running, choice)
        choice.running = False
        bisect.insort(self.waiting, choice, key=_rank)
        if choice.seated:
            self._preempted[choice.id] = None
        if self.kv is None or not self.kv.swap_out(choice.held, choice.num_computed):
            self._free(choice)
        choice.sent = []

    def schedule(self) -> Plan:
        """Choose the next step; nothing planned when there is nothing to do."""
        step = _Step(self.max_num_batched_tokens)
        left = [(choice, choice.num_tokens - choice.num_computed) for choice in self.running]
        step.to_come = dict.fromkeys(choice for choice, num_left in left if num_left > 1)
        for choice in [choice for choice, num_left in left if num_left == 1]:
            self._go_on(choice, step)
        place = 0  # in the queue: those before it wait for a sibling's prompt
        while True:
            prompt = next(iter(step.to_come), None)
            head = self.waiting[place] if step.open and place < len(self.waiting) else None
            if prompt is not None and (head is None or prompt.rank < head.rank):
                del step.to_come[prompt]
                self._go_on(prompt, step)
            elif head is None:
                return Plan(tuple(step.planned.values()), self._output(step))
            elif self._follows(head):
                place += 1
            else:
                step.open = self._let_in(head, step, num_before=place)

    def computed(self, plan: Planned, *, good: bool) -> None:
        """Note that a step has succeeded for a sequence; the blocks that it filled can be shared from now on.

        good: its row could be drawn from; else what its blocks hold is shared no more.
        """
        choice, kv = plan.choice, self.kv
        choice.num_computed = plan.end
        if kv is not None and not good:
            kv.distrust(choice.held)
        elif kv is not None and kv.wants(choice.held, plan.end):
            kv.computed(choice.held, choice.token_array(), plan.end)

    def _go_on(self, choice: Choice, step: _Step) -> None:
        """Plan what is left of a running sequence, as far as the budget goes; find blocks at the cost of the last."""
        if not choice.running:  # preempted meanwhile
            return
        num_new = min(choice.num_tokens - choice.num_computed, step.free)
        while self.kv is not None and not self.kv.grow(choice.held, choice.num_computed, choice.num_computed + num_new):
            last = self.running[-1]
            step.open = False  # the blocks that come free belong to those that go on
            step.drop(last)
            self.preempt(last)
            if last is choice:
                return
        step.add(self._plan(choice, num_new))

    def _let_in(self, choice: Choice, step: _Step, num_before: int) -> bool:
        """Let a waiting sequence in, if there are budget, a seat and blocks; False: nobody comes in after it either."""
        if step.free < 1 and len(self.running) < self.max_running:
            return False  # a step later
        while step.free < 1 or not self._fits(choice, num_before):
            if not self._make_way(choice, step, num_before):
                return False
        _take(self.waiting, choice)
        bisect.insort(self.running, choice, key=_rank)
        choice.running = True
        if not choice.seated:
            step.entering.add(choice)
            choice.seated, self._num_seated = True, self._num_seated + 1
        choice.request.clock.start(choice.num_computed)
        step.add(self._plan(choice, min(choice.num_tokens - choice.num_computed, step.free)))
        return True

    def _follows(self, choice: Choice) -> bool:
        """Whether a child waits for the prompt that its first sibling is computing, to share it."""
        first = choice.request.choices[0]
        if not self._shares or choice is first or choice.finish.num_tokens or choice.num_prompt == 1:
            return False
        return first.running and first.num_computed < first.num_prompt

    def _fits(self, choice: Choice, num_before: int) -> bool:
        """Whether there is a seat, and blocks for all tokens, which it takes, and one more for each that runs.

        num_before: those before it who wait for a sibling's prompt, and will take seats.
        """
        if len(self.running) + num_before >= self.max_running or self._lacks_seat(choice):
            return False
        return self.kv is None or self._take_blocks(choice, self.kv)

    def _take_blocks(self, choice: Choice, kv: KVAccount) -> bool:
        """Swap in or share what is computed already, and take blocks for the rest; False, and nothing held, if full."""
        reserve = len(self.running) + 1 if self.running else 0
        if choice.held.host_ids:
            if -(-choice.num_tokens // kv.blocks.block_size) + reserve > kv.blocks.num_free:
                return False
            kv.swap_in(choice.held)
        else:
            self._share(choice, kv)
        if kv.missing(choice.held, choice.num_computed, choice.num_tokens) + reserve > kv.blocks.num_free:
            self._free(choice)
            return False
        return kv.grow(choice.held, choice.num_computed, choice.num_tokens)

    def _share(self, choice: Choice, kv: KVAccount) -> None:
        """Take what is there already: the prompt of a sibling, or a cached prefix; all but the last token of it."""
        most = choice.num_tokens - 1  # of the last one the logits are wanted, and of those that are scored
        if choice.prompt_scores is not None:
            most = min(most, choice.prompt_scores.next_position)
        for other in choice.request.choices if self._shares and not choice.finish.num_tokens else ():
            if other is not choice and other.running and other.num_computed >= choice.num_prompt and most > 0:
                choice.held, choice.num_computed = kv.fork(other.held, most), most
                return
        choice.num_computed = kv.match(choice.held, choice.token_array(), most) if most > 0 and kv.caching else 0

    def _lacks_seat(self, choice: Choice) -> bool:
        return not choice.seated and self._num_seated == self.max_running

    def _make_way(self, choice: Choice, step: _Step, num_before: int) -> bool:
        """Take seat and blocks of the last in rank, if its priority is a higher number; False: nobody's, or in vain."""
        lower = [other for other in self.running if other.rank[0] > choice.rank[0]] if self._by_priority else []
        if not self._would_fit(choice, lower, num_before):
            return False
        last = lower[-1:]
        if self._by_priority and self._lacks_seat(choice) and self._num_seated > len(self.running):
            last += [other for other in reversed(self.waiting) if other.seated and other.rank[0] > choice.rank[0]][:1]
        if not last:
            return False
        self._unseat(max(last, key=_rank), step)
        return True

    def _would_fit(self, choice: Choice, lower: list[Choice], num_before: int) -> bool:
        """Whether seats and blocks would do if all of these gave theirs back; what is shared makes it fit sooner."""
        stay = len(self.running) - len(lower)
        if stay + num_before >= self.max_running:
            return False
        if self.kv is None:
            return True
        needed = -(-choice.num_tokens // self.kv.blocks.block_size) + (stay + 1 if stay else 0)
        return needed <= self.kv.blocks.num_free + sum(len(other.held.block_ids) for other in lower)

    def _unseat(self, choice: Choice, step: _Step) -> None:
        """Take blocks and seat of a sequence; it waits, and enters anew."""
        step.drop(choice)
        if choice.running:
            self.preempt(choice)
        self._preempted.pop(choice.id, None)
        if choice.slot is not None:
            self._unseated[choice.id] = None
        choice.seated, self._num_seated = False, self._num_seated - 1

    def _plan(self, choice: Choice, num_new: int) -> Planned:
        samples = choice.draws and choice.num_computed + num_new == choice.num_tokens
        logits_from = NO_ROWS if choice.prompt_scores is None else choice.prompt_scores.next_position
        return Planned(choice, choice.num_computed, num_new, samples, logits_from)

    def _output(self, step: _Step) -> SchedulerOutput:
        """The step as the batch is told it: what is new since the last one."""
        new, changed = [], []
        for choice, plan in step.planned.items():
            if choice in step.entering:
                new.append(self._enter(choice, plan))
            elif (change := self._change(choice, plan)) is not None:
                changed.append(change)
        finished, preempted = tuple(self._unseated), tuple(self._preempted)
        self._unseated, self._preempted = {}, {}
        return SchedulerOutput(
            {choice.id: plan.num_new for choice, plan in step.planned.items()},
            tuple(new), tuple(changed), finished, preempted,
            NOTHING_MOVES if self.kv is None else self.kv.take_moves(),
            scored_from={choice.id: plan.logits_from for choice, plan in step.planned.items() if plan.scored},
        )  # fmt: skip

    def _enter(self, choice: Choice, plan: Planned) -> NewSequence:
        choice.sent = list(choice.held.block_ids)
        return NewSequence(
            choice.request.request_id, choice.seat(self._end_token_ids), tuple(choice.sent), plan.num_computed,
            samples=choice.draws, prompt_embeds=choice.request.prompt_embeds,
        )  # fmt: skip

    def _change(self, choice: Choice, plan: Planned) -> ChangedSequence | None:
        """What is new about a sequence in the batch; None: nothing."""
        if self.kv is None:
            return None
        ids, sent = choice.held.block_ids, choice.sent
        written = plan.num_computed // self.kv.blocks.block_size
        replaced = not sent or sent[written:] != ids[written : len(sent)]
        if not replaced and len(ids) == len(sent):
            return None
        choice.sent = list(ids)
        if replaced:
            return ChangedSequence(choice.id, tuple(ids), plan.num_computed, resumed=True)
        return ChangedSequence(choice.id, tuple(ids[len(sent) :]))

    def _count_preemption(self, choice: Choice) -> None:
        self.num_preemptions += 1
        choice.request.clock.num_preemptions += 1

    def _free(self, choice: Choice) -> None:
        """Give blocks back; the tokens stay."""
        choice.num_computed = 0
        if self.kv is not None:
            self.kv.release(choice.held)


def _rank(choice: Choice) -> tuple[int, int]:
    return choice.rank


def _take(choices: list[Choice], choice: Choice) -> None:
    """Take a sequence out of a list that is ordered by rank."""
    place = bisect.bisect_left(choices, choice.rank, key=_rank)
    if place == len(choices) or choices[place] is not choice:
        raise KleroError(f"{choice.owner} is not where its rank says")
    del choices[place]
