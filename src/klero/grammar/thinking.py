"""Thinking: a budget for it, and a grammar that begins where it ends."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from klero.errors import Fault, OptionError, ParameterError

if TYPE_CHECKING:
    from klero.grammar.protocol import Matcher

I32 = npt.NDArray[np.int32]
Mark = tuple[int, ...]


@dataclass(frozen=True)
class Marks:
    """The token ids between which a model thinks. OptionError for an empty mark, or one that contains the other."""

    start: Mark
    end: Mark

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            object.__setattr__(self, name, _mark(name, getattr(self, name)))
        shorter, longer = sorted([self.start, self.end], key=len)
        if _find(longer, shorter, 0) >= 0:
            raise OptionError(
                f"thinking_token_ids={(list(self.start), list(self.end))}: one mark contains the other, so nobody can "
                "tell where thinking ends; give two that differ"
            )


class _Phase(Enum):
    OPEN = "the output so far may be the beginning of the start mark, or of the grammar's text"
    THINKING = "between the marks"
    TEXT = "outside"


OPEN, THINKING, TEXT = _Phase


class _State(NamedTuple):
    """Where a sequence stands; all counts are of output tokens.

    matched: tokens of the awaited mark that the sequence ends with. since: where thinking, or the grammar's text,
    began. thought: thinking tokens of earlier thinking. OPEN alone: ahead, the lengths of all beginnings of the start
    mark that hold the whole output; alive, whether the grammar allows that output too.
    """

    phase: _Phase
    matched: int = 0
    since: int = 0
    thought: int = 0
    ahead: tuple[int, ...] = ()
    alive: bool = True


class Thinking:
    """A matcher that knows when a sequence thinks. It holds thinking to a budget and a grammar to the text behind it.

    marks: between which the model thinks. budget: how many tokens it may think, None: any number. inner: the matcher of
    the grammar, at its start and nobody else's; None: no grammar. prompt_ids: the tokens before the output. num_tokens:
    the vocabulary, W = ceil(num_tokens / 32). end_ids: what ends a text; turn_end_ids: what ends a turn in the prompt.
    OptionError for a mark outside the vocabulary, ParameterError for a grammar whose sequences would end within a mark.

    **When it thinks.** From a start mark to the next end mark, in the prompt and the output together; marks may lie
    across the border between them, and no token belongs to two marks. A start mark while thinking and an end mark
    outside are tokens like others. In the prompt the end of a turn ends thinking: a turn that was cut off while it
    thought is over.

    **While it thinks** every token is allowed, but with a grammar no end id: the text would end without it. Once
    `budget` tokens were generated, the only token allowed is the next one of the end mark: its first, or, where the
    model had begun the mark itself, the one that goes on. The tokens of a whole end mark are no thinking tokens, those
    of a broken one are; neither are tokens of the prompt. So no sequence has more than `budget` thinking tokens.

    **Outside**, without a grammar, every token is allowed, end ids too. A later start mark begins thinking again; what
    was thought before counts, and with the budget spent the end mark follows at once.

    **With a grammar** its text begins behind the first end mark, and from there it decides alone: in its text, marks
    are text. A prompt that ends outside begins that text with the first token, unless there is a budget: then the
    output may begin with the start mark instead (or with the rest of it, where the prompt ends in the middle of one).
    As long as both can be meant, both may go on; a whole start mark is thinking, even if the grammar allows its tokens.

    Rewinding is exact: the states are kept where they change.
    """

    def __init__(
        self,
        marks: Marks,
        budget: int | None,
        inner: Matcher | None,
        prompt_ids: Sequence[int] | npt.NDArray[np.integer],
        num_tokens: int,
        end_ids: Collection[int] = (),
        turn_end_ids: Collection[int] = (),
    ) -> None:
        _check(marks, inner, num_tokens, end_ids)
        self._marks, self._budget, self._inner = marks, budget, inner
        self._end_ids = frozenset(end_ids)
        self._num_tokens = num_tokens
        self._all = _without((), num_tokens)
        self._inside = self._all if inner is None else _without(self._end_ids, num_tokens)
        self._num = 0  # tokens taken
        self._changes = [(0, _begin(marks, budget, inner is not None, prompt_ids, turn_end_ids))]
        self._opening: list[int] = []  # taken while OPEN: the grammar reads it again when a rewind leads back there

    @property
    def allows_all(self) -> bool:
        """Whether every token may come next, so that a mask would say nothing."""
        return self._inner is None and self._forced is None

    @property
    def acting(self) -> Matcher:
        """The matcher that makes the next mask: the grammar's where it decides alone, else this one."""
        return self if self._inner is None or self._state.phase is not TEXT else self._inner

    def fill(self, words: I32) -> None:
        """Write every word of int32 [W]: bit i & 31 of word i >> 5 is set where token i may come next."""
        state, forced, inner = self._state, self._forced, self._inner
        if inner is not None and state.phase is not THINKING and state.alive:
            inner.fill(words)
        elif state.phase is OPEN or forced is not None:
            words[:] = 0
        else:
            words[:] = self._inside if state.phase is THINKING else self._all
        if state.phase is OPEN:
            _allow(words, {self._marks.start[k] for k in state.ahead})
        elif forced is not None:
            _allow(words, {forced})

    def accept(self, token_id: int) -> bool:
        """Take a token; False, and nothing changed, if it may not come here."""
        if not 0 <= token_id < self._num_tokens:
            return False
        state = self._state
        if state.phase is OPEN:
            after = self._open(token_id)
        else:
            after = self._think(token_id) if state.phase is THINKING else self._speak(token_id)
        if after is None:
            return False
        if state.phase is OPEN:
            self._opening.append(token_id)
        self._num += 1
        if after is not state:
            self._changes.append((self._num, after))
        return True

    def rewind(self, num_tokens: int) -> None:
        """Take back the last tokens; OptionError for more than were taken."""
        if not 0 <= num_tokens <= self._num:
            raise OptionError(f"num_tokens={num_tokens}: must be in [0, {self._num}], the tokens taken")
        num, began = self._num, self._text_begins
        self._num -= num_tokens
        while self._changes[-1][0] > self._num:
            self._changes.pop()
        del self._opening[self._num :]
        inner, begins = self._inner, self._text_begins
        if inner is None or num_tokens == 0:
            return
        if began is not None:
            inner.rewind(num_tokens if begins == began else num - began)
        if begins is not None and begins != began:
            for token_id in self._opening:
                inner.accept(token_id)

    @property
    def _state(self) -> _State:
        return self._changes[-1][1]

    @property
    def _text_begins(self) -> int | None:
        """From which token on the grammar has read the output; None: it has read nothing."""
        state = self._state
        return state.since if state.phase is TEXT or (state.phase is OPEN and state.alive) else None

    @property
    def _forced(self) -> int | None:
        """The token of the end mark that must come next; None: nothing must."""
        state = self._changes[-1][1]
        if state.phase is not THINKING or self._budget is None:
            return None
        spent = state.thought + self._num - state.since
        return self._marks.end[state.matched] if spent >= self._budget else None

    def _open(self, token_id: int) -> _State | None:
        state, mark, inner = self._state, self._marks.start, self._inner
        assert inner is not None
        ahead = tuple(k + 1 for k in state.ahead if mark[k] == token_id)
        taken = state.alive and inner.accept(token_id)
        if not ahead:
            return _State(TEXT) if taken else None
        whole = len(mark) in ahead
        if state.alive and (whole or not taken):
            inner.rewind(self._num + taken)
        if whole:
            return _State(THINKING, since=self._num + 1)
        return state._replace(ahead=ahead, alive=taken)

    def _think(self, token_id: int) -> _State | None:
        state, mark = self._state, self._marks.end
        if self._forced not in (None, token_id) or (self._inner is not None and token_id in self._end_ids):
            return None
        matched = _matched(mark, state.matched, token_id)
        if matched < len(mark):
            return state if matched == state.matched else state._replace(matched=matched)
        num = self._num + 1
        if self._inner is not None:
            return _State(TEXT, since=num)
        return _State(TEXT, thought=state.thought + max(0, num - state.since - len(mark)))

    def _speak(self, token_id: int) -> _State | None:
        state, mark = self._state, self._marks.start
        if self._inner is not None:
            return state if self._inner.accept(token_id) else None
        matched = _matched(mark, state.matched, token_id)
        if matched < len(mark):
            return state if matched == state.matched else state._replace(matched=matched)
        return _State(THINKING, since=self._num + 1, thought=state.thought)


def _begin(
    marks: Marks, budget: int | None, guided: bool, prompt_ids: Sequence[int] | npt.NDArray[np.integer],
    turn_end_ids: Collection[int],
) -> _State:  # fmt: skip
    """Where the output begins."""
    ids = np.asarray(prompt_ids, np.int64)
    ends = np.flatnonzero(np.isin(ids, list(turn_end_ids)))
    turn = tuple(ids[ends[-1] + 1 if len(ends) else 0 :].tolist())
    thinking, at = False, 0
    while (place := _find(turn, marks.end if thinking else marks.start, at)) >= 0:
        at = place + len(marks.end if thinking else marks.start)
        thinking = not thinking
    mark, rest = marks.end if thinking else marks.start, turn[at:]
    lengths = tuple(k for k in range(len(mark)) if k <= len(rest) and rest[len(rest) - k :] == mark[:k])
    if thinking:
        return _State(THINKING, matched=lengths[-1])
    if not guided:
        return _State(TEXT, matched=lengths[-1])
    return _State(TEXT) if budget is None else _State(OPEN, ahead=lengths)


def _mark(name: str, ids: Any) -> Mark:
    try:
        mark = tuple(operator.index(i) for i in ids if not isinstance(i, bool))
    except TypeError:
        mark = ()
    if not mark or len(mark) != len(ids) or min(mark) < 0:
        raise OptionError(f"thinking_token_ids: the {name} mark is {ids!r}; must be one or more token ids, each >= 0")
    return mark


def _check(marks: Marks, inner: Matcher | None, num_tokens: int, end_ids: Collection[int]) -> None:
    outside = [i for i in (*marks.start, *marks.end) if i >= num_tokens]
    if outside:
        raise OptionError(f"thinking_token_ids: {outside[0]} is none of the model's {num_tokens} tokens; give its own")
    both = [i for i in (*marks.start, *marks.end) if i in end_ids]
    if both and inner is not None:
        rule = "is a token of a thinking mark, so the text would end before its grammar; leave it or the grammar out"
        raise ParameterError([Fault("end_token_ids", both[0], rule)])


def _find(ids: Mark, mark: Mark, at: int) -> int:
    """Where `mark` stands first in ids[at:]; -1 if nowhere."""
    try:
        while True:
            at = ids.index(mark[0], at)
            if ids[at : at + len(mark)] == mark:
                return at
            at += 1
    except ValueError:
        return -1


def _matched(mark: Mark, matched: int, token_id: int) -> int:
    """How many tokens of `mark` a sequence ends with that ended with `matched` of them and goes on with token_id."""
    if mark[matched] == token_id:
        return matched + 1
    tail = (*mark[:matched], token_id)
    return next(k for k in range(matched, -1, -1) if tail[len(tail) - k :] == mark[:k])


def _without(ids: Collection[int], num_tokens: int) -> I32:
    """int32 [W] that allows the vocabulary without these ids."""
    words = np.full(-(-num_tokens // 32), -1, np.int32)
    bits = words.view(np.uint32)
    if num_tokens % 32:
        bits[-1] = (1 << num_tokens % 32) - 1
    for i in ids:
        if 0 <= i < num_tokens:
            bits[i >> 5] &= ~np.uint32(1 << (i & 31))
    return words


def _allow(words: I32, ids: Collection[int]) -> None:
    bits = words.view(np.uint32)
    for i in ids:
        bits[i >> 5] |= np.uint32(1 << (i & 31))
