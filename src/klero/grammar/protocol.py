"""What a grammar is to the rest of klero: matchers, what makes them, and the texts of tokens.

A mask is int32 [W], W = ceil(num_tokens / 32): bit i & 31 of word i >> 5 is 1 where token i may come next. Bits past
num_tokens are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from klero.errors import GrammarError
from klero.grammar.source import Source

I32 = npt.NDArray[np.int32]


class Matcher(Protocol):
    """What one sequence may still say: three methods, that a user can write too.

    The mask is a function of the tokens taken so far, and of nothing else. A matcher that can go no further, because
    its grammar is too complex there, raises GrammarError from `fill` or `accept`; its row alone ends with the error.
    """

    def fill(self, words: I32) -> None:
        """Write the mask, every word of it. End ids are allowed where the text may end; after one, only they are."""
        ...

    def accept(self, token_id: int) -> bool:
        """Take a token; False, and nothing changed, if it may not come here. An end id is a token like others."""
        ...

    def rewind(self, num_tokens: int) -> None:
        """Take back the last tokens, end ids among them; OptionError for more than were taken."""
        ...


class Compiled(Protocol):
    """A grammar that can be followed any number of times."""

    def matcher(self, end_ids: tuple[int, ...]) -> Matcher:
        """Make a matcher at the beginning of the text. It shares nothing that changes with any other."""
        ...


class Backend(Protocol):
    """What compiles grammars, and fills the masks of many matchers at once."""

    def compile(self, source: Source) -> Compiled:
        """Compile a grammar; GrammarError for one that is malformed, unsatisfiable, too large or not supported."""
        ...

    def fill_all(self, matchers: Sequence[Matcher], masks: I32) -> list[GrammarError | None]:
        """Write matcher r's mask into row r of int32 [R, W], in parallel where it can.

        Called for matchers that have this backend as their attribute `batch`; the others fill one by one, and a backend
        without such matchers needs no fill_all.

        One that fails has its error in the list and a row of zeros; the others are as if it were not there.
        """
        ...


class TokenText(Protocol):
    """Which bytes token ids stand for; `klero.finish.TokenBytes` is one."""

    def bytes_of_token(self, token_id: int) -> bytes:
        """Return the bytes of an id; ModelError for an id that has no text."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Say whether an id is a special token, which is no text."""
        ...
