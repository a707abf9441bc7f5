"""Matchers: those of the slots of a batch, and the masks of a step, made in the background."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from klero.errors import STOPS, GrammarError, told
from klero.grammar.masks import Masks, words_of
from klero.grammar.protocol import Matcher

I32 = npt.NDArray[np.int32]
IDS = npt.NDArray[np.integer]
Errors = dict[int, str]


class Failure(NamedTuple):
    """Why a slot has no masks any more. num_missed: tokens that its matcher has not taken since; 0: it never began."""

    message: str
    num_missed: int


class Matchers:
    """One matcher for each slot that has one. num_tokens: how many tokens a mask speaks of.

    `begin` lets a thread fill the masks of a step while the model computes; `masks` waits for it. Whoever changes a
    matcher waits for that thread first. What goes wrong with a matcher, whenever it does, is said of the next row of
    its slot, and of no other.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._of_slot: dict[int, Matcher | None] = {}
        self._failed: dict[int, Failure] = {}
        self._begun: tuple[IDS, Future[tuple[Masks, Errors]]] | None = None

    def start(self, index: int, make: Callable[[], Matcher], output_ids: Sequence[int]) -> None:
        """Give a slot the matcher that `make` makes, and let it read what was generated before."""
        self._settle()
        self._of_slot[index] = None

        def begin() -> str | None:
            matcher = self._of_slot[index] = make()
            refused = next((token_id for token_id in output_ids if not matcher.accept(token_id)), None)
            return None if refused is None else f"grammar: token {refused} was generated before, where it may not come"

        if (error := _tried(begin)) is not None:
            self._failed[index] = Failure(error, 0)

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
            matcher, failure = self._of_slot.get(index), self._failed.get(index)
            if failure is not None and failure.num_missed:
                self._failed[index] = failure._replace(num_missed=failure.num_missed + 1)
            elif matcher is not None and failure is None:
                refused = f"grammar: token {token_id} may not come here"
                error = _tried(lambda: None if matcher.accept(token_id) else refused)  # noqa: B023  called at once
                if error is not None:
                    self._failed[index] = Failure(error, 1)

    def rewind(self, index: int, num_tokens: int) -> None:
        """Take back the last tokens of a slot; with the one that its matcher refused, it goes on."""
        matcher, failure = self._of_slot.get(index), self._failed.get(index)
        if matcher is None or (failure is not None and not failure.num_missed):
            return
        self._settle()
        if failure is not None:
            missed = max(0, failure.num_missed - num_tokens)
            num_tokens -= failure.num_missed - missed
            self._failed[index] = failure._replace(num_missed=missed)
            if not missed:
                del self._failed[index]
        if num_tokens:
            matcher.rewind(num_tokens)

    def begin(self, slot_of_row: IDS) -> None:
        """Let a thread make the masks of rows that these slots have next."""
        self._settle()
        if any(index in self._of_slot for index in slot_of_row.tolist()):
            self._begun = slot_of_row, self._thread.submit(self._fill, slot_of_row)

    def masks(self, slot_of_row: IDS) -> tuple[Masks, Errors]:
        """The masks of these rows, and what went wrong, by row; as they were begun, or made now."""
        begun = self._begun
        self._settle()
        if begun is not None and np.array_equal(begun[0], slot_of_row):
            return begun[1].result()
        return self._fill(slot_of_row)

    def close(self) -> None:
        """End the thread; without it, masks are made when they are asked for."""
        self._settle()
        thread = self.__dict__.pop("_thread", None)  # made by the first step that wanted one
        if thread is not None:
            thread.shutdown(wait=False)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="klero-masks")

    def _settle(self) -> None:
        """Wait until nothing is filled any more, and drop what was."""
        if self._begun is not None:
            self._begun[1].exception()
            self._begun = None

    def _restricts(self, index: int) -> bool:
        """Whether the mask of a slot may say anything."""
        return index in self._of_slot and not getattr(self._of_slot[index], "allows_all", False)

    def _fill(self, slot_of_row: IDS) -> tuple[Masks, Errors]:
        rows = [r for r, index in enumerate(slot_of_row.tolist()) if self._restricts(index)] if self._of_slot else []
        if not rows:
            return Masks.none(len(slot_of_row), self._num_tokens), {}
        words = np.zeros((len(rows), words_of(self._num_tokens)), np.int32)
        of_row = np.full(len(slot_of_row), -1, np.int32)
        of_row[rows] = np.arange(len(rows))
        indices = slot_of_row[rows].tolist()
        wrong = {r: self._failed[i].message for r, i in zip(rows, indices, strict=True) if i in self._failed}
        sound = [m for m, r in enumerate(rows) if r not in wrong]
        filled = words[sound]
        errors = fill_all([self._of_slot[indices[m]] for m in sound], filled)  # type: ignore[misc]
        words[sound] = filled
        return Masks(words, of_row), wrong | {
            rows[m]: error for m, error in zip(sound, errors, strict=True) if error is not None
        }


def fill_all(matchers: Sequence[Matcher], words: I32) -> list[str | None]:
    """Fill row m of words, int32 [M, W], by matcher m; what is wrong with it, or None. Its row is 0 then.

    Matchers with the same `batch`, the backend that made them, are filled by it at once, which may use threads.
    """
    matchers = [getattr(matcher, "acting", matcher) for matcher in matchers]
    errors: list[str | None] = [None] * len(matchers)
    groups: dict[int, list[int]] = {}
    for m, matcher in enumerate(matchers):
        groups.setdefault(id(_batch_of(matcher)), []).append(m)
    for group in groups.values():
        theirs, part = [matchers[m] for m in group], np.zeros((len(group), words.shape[1]), np.int32)
        for m, error in zip(group, _filled(theirs, part), strict=True):
            errors[m] = error
        words[group] = part
    for m, error in enumerate(errors):
        if error is not None:
            words[m] = 0
    return errors


def _filled(matchers: list[Matcher], words: I32) -> list[str | None]:
    """Fill the masks of matchers of one batch, or of none; one by one if the batch itself fails."""
    batch = _batch_of(matchers[0])
    if batch is not None:
        found: list[str | None] = []

        def at_once() -> None:
            found.extend(None if error is None else f"grammar: {error}" for error in batch.fill_all(matchers, words))

        if _tried(at_once) is None and len(found) == len(matchers):
            return found
    return [_tried(partial(_fill_one, matcher, words[m])) for m, matcher in enumerate(matchers)]


def _fill_one(matcher: Matcher, words: I32) -> None:
    matcher.fill(words)  # whatever a caller's own returns says nothing


def _batch_of(matcher: Matcher) -> Any:
    """What fills the masks of this matcher and of others at once; None: nobody."""
    try:
        return getattr(matcher, "batch", None)
    except Exception:  # of a caller's own; it fills alone then
        return None


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
