"""Matchers: those of the slots of a batch, and the masks of a step, made in the background."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import numpy as np
import numpy.typing as npt

from klero.errors import STOPS, Fault, GrammarError, told
from klero.grammar.masks import Masks, words_of
from klero.grammar.protocol import Matcher

I32 = npt.NDArray[np.int32]
IDS = npt.NDArray[np.integer]
Errors = dict[int, str]


class Matchers:
    """One matcher for each slot that has one. num_tokens: how many tokens a mask speaks of.

    `begin` lets a thread fill the masks of a step while the model computes; `masks` waits for it. Whoever changes a
    matcher waits for that thread first. A matcher that raises costs its own slot every further token, and no other.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._of_slot: dict[int, Matcher] = {}
        self._failed: Errors = {}
        self._begun: tuple[IDS, Future[tuple[Masks, Errors]]] | None = None

    def start(self, index: int, matcher: Matcher, output_ids: Sequence[int]) -> None:
        """Give a slot its matcher, which is at its start; GrammarError if it does not take what was generated."""
        self._settle()
        for token_id in output_ids:
            if not matcher.accept(token_id):
                rule = "was generated before, and the grammar does not allow it there; leave out the grammar"
                raise GrammarError([Fault("output_ids", token_id, rule)])
        self._of_slot[index] = matcher

    def reset(self, index: int) -> None:
        """Forget a slot."""
        if index in self._of_slot:
            self._settle()
            del self._of_slot[index]
            self._failed.pop(index, None)

    def append(self, indices: IDS, token_ids: IDS) -> None:
        """Take one token for each of these slots."""
        if not self._of_slot:
            return
        self._settle()
        for index, token_id in zip(indices.tolist(), token_ids.tolist(), strict=True):
            matcher = self._of_slot.get(index)
            if matcher is None or index in self._failed:
                continue
            refused = f"grammar: token {token_id} may not come here"
            error = _tried(lambda: None if matcher.accept(token_id) else refused)  # noqa: B023  called at once
            if error is not None:
                self._failed[index] = error

    def rewind(self, index: int, num_tokens: int) -> None:
        """Take back the last tokens of a slot."""
        if index in self._of_slot:
            self._settle()
            self._of_slot[index].rewind(num_tokens)

    def begin(self, slot_of_row: IDS) -> None:
        """Let a thread make the masks of rows that these slots have next."""
        self._settle()
        if any(index in self._of_slot for index in slot_of_row.tolist()):
            self._begun = slot_of_row, self._thread.submit(self._fill, slot_of_row)

    def masks(self, slot_of_row: IDS) -> tuple[Masks, Errors]:
        """The masks of these rows, and what went wrong, by row; as they were begun, or made now."""
        begun, self._begun = self._begun, None
        if begun is not None:
            rows, future = begun
            made = future.result()
            if np.array_equal(rows, slot_of_row):
                return made
        return self._fill(slot_of_row)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="klero-masks")

    def _settle(self) -> None:
        """Wait until nothing is filled any more, and drop what was."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun[1].exception()

    def _restricts(self, index: int) -> bool:
        """Whether the mask of a slot may say anything."""
        matcher = self._of_slot.get(index)
        return matcher is not None and not getattr(matcher, "allows_all", False)

    def _fill(self, slot_of_row: IDS) -> tuple[Masks, Errors]:
        of_slot = self._of_slot
        rows = [r for r, index in enumerate(slot_of_row.tolist()) if self._restricts(index)] if of_slot else []
        if not rows:
            return Masks.none(len(slot_of_row), self._num_tokens), {}
        indices = slot_of_row[rows].tolist()
        words = np.zeros((len(rows), words_of(self._num_tokens)), np.int32)
        errors = fill_all([of_slot[index] for index in indices], words)
        of_row = np.full(len(slot_of_row), -1, np.int32)
        of_row[rows] = np.arange(len(rows))
        failed = zip(rows, indices, errors, strict=True)
        wrong = {r: what for r, index, error in failed if (what := self._failed.get(index) or error) is not None}
        return Masks(words, of_row), wrong


def fill_all(matchers: Sequence[Matcher], words: I32) -> list[str | None]:
    """Fill row m of words, int32 [M, W], by matcher m; what is wrong with it, or None. Its row is 0 then.

    Matchers with the same `batch`, the backend that made them, are filled by it at once, which may use threads.
    """
    matchers = [getattr(matcher, "acting", matcher) for matcher in matchers]
    errors: list[str | None] = [None] * len(matchers)
    groups: dict[int, list[int]] = {}
    for m, matcher in enumerate(matchers):
        batch = getattr(matcher, "batch", None)
        if batch is None:
            errors[m] = _tried(lambda: matcher.fill(words[m]))  # noqa: B023  called at once
        else:
            groups.setdefault(id(batch), []).append(m)
    for group in groups.values():
        theirs = [matchers[m] for m in group]
        part = np.zeros((len(group), words.shape[1]), np.int32)
        for m, error in zip(group, theirs[0].batch.fill_all(theirs, part), strict=True):  # type: ignore[attr-defined]
            errors[m] = None if error is None else str(error)
        words[group] = part
    for m, error in enumerate(errors):
        if error is not None:
            words[m] = 0
    return errors


def fill_drafts(matcher: Matcher, draft_ids: Sequence[int], words: I32) -> int:
    """Fill the masks of a sequence with K drafts, int32 [K + 1, W]: row j after the first j of them.

    Returns how many rows there are: a draft that the grammar forbids ends them, its own row being the last, because
    what follows it cannot be accepted. Rows behind are 0. The matcher is where it was.
    """
    words[:] = 0
    num_taken = 0
    try:
        for draft_id in draft_ids:
            matcher.fill(words[num_taken])
            if not matcher.accept(draft_id):
                return num_taken + 1
            num_taken += 1
        matcher.fill(words[num_taken])
        return num_taken + 1
    finally:
        if num_taken:
            matcher.rewind(num_taken)


def _tried(work: Callable[[], str | None]) -> str | None:
    """What is wrong, said or raised; whatever a caller's matcher raises is its own row's."""
    try:
        return work()
    except STOPS:
        raise
    except BaseException as error:
        return f"grammar: {error if isinstance(error, GrammarError) else told(error)}"
