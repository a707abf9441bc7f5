"""The end of a text, the same in every backend: which ids end it, and that nothing but them follows."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from klero.errors import ModelError, OptionError
from klero.grammar.protocol import TokenText

I32 = npt.NDArray[np.int32]


class EndedMatcher(ABC):
    """A matcher over one of a library that knows num_tokens ids and, as id num_tokens, one end of its own.

    end_ids: the request's; each of them ends the text and is no text here, whatever it spells.
    """

    def __init__(self, num_tokens: int, end_ids: tuple[int, ...]) -> None:
        self._num_tokens = num_tokens
        self._end_ids = [token_id for token_id in dict.fromkeys(end_ids) if 0 <= token_id < num_tokens]
        self._taken: list[int] = []
        self._num_ends = 0

    @abstractmethod
    def _make_mask(self) -> I32:
        """The library's mask, int32 [num_tokens // 32 + 1]."""

    @abstractmethod
    def _take(self, token_id: int) -> bool:
        """Give the library a token below num_tokens; False, and nothing changed, if it may not come."""

    @abstractmethod
    def _take_back(self, num_tokens: int) -> None:
        """Take back the library's last tokens. `_taken` is without them already."""

    @abstractmethod
    def _may_end(self) -> bool:
        """Whether the text may end here."""

    @property
    def has_ended(self) -> bool:
        """Whether an end id was taken."""
        return self._num_ends > 0

    def fill(self, words: I32) -> None:
        """Write the mask into int32 [ceil(num_tokens / 32)]; GrammarError if it cannot be made, or nothing may come."""
        if self._num_ends:
            words[:] = 0
            self.put_ends(words, True)
        else:
            self.finish_mask(self._make_mask(), words)

    def finish_mask(self, made: I32, words: I32) -> None:
        """Write the library's mask as ours: its end becomes the end ids."""
        word, bit = self._num_tokens >> 5, self._num_tokens & 31
        words[:] = made[: len(words)]
        if bit:
            words[word] &= (1 << bit) - 1
        self.put_ends(words, bool(int(made[word]) >> bit & 1))

    def put_ends(self, words: I32, may_end: bool) -> None:
        """Allow the end ids in a mask, or not."""
        for token_id in self._end_ids:
            if may_end:
                words[token_id >> 5] |= SINGLE[token_id & 31]
            else:
                words[token_id >> 5] &= ~SINGLE[token_id & 31]

    def accept(self, token_id: int) -> bool:
        """Take a token; False, and nothing changed, if it may not come here. GrammarError if that cannot be told."""
        if token_id in self._end_ids:
            if not self._num_ends and not self._may_end():
                return False
            self._num_ends += 1
            return True
        if self._num_ends or not 0 <= token_id < self._num_tokens or not self._take(token_id):
            return False
        self._taken.append(token_id)
        return True

    def rewind(self, num_tokens: int) -> None:
        """Take back the last tokens; OptionError, and nothing changed, for more than were taken."""
        if not 0 <= num_tokens <= len(self._taken) + self._num_ends:
            rule = f"must be between 0 and the {len(self._taken) + self._num_ends} tokens taken"
            raise OptionError(f"num_tokens={num_tokens}: {rule}")
        num_ends = min(num_tokens, self._num_ends)
        self._num_ends -= num_ends
        if num_tokens > num_ends:
            del self._taken[num_ends - num_tokens :]
            self._take_back(num_tokens - num_ends)


SINGLE = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)
"""The words with one bit."""


def bytes_of_tokens(text: TokenText, num_tokens: int) -> tuple[list[bytes], list[int]]:
    """Return the bytes of the ids below num_tokens, b"" for one without text, and which of them are special."""
    tokens = []
    for token_id in range(num_tokens):
        try:
            tokens.append(text.bytes_of_token(token_id))
        except ModelError:  # a column of the logits beyond the vocabulary
            tokens.append(b"")
    return tokens, [token_id for token_id, data in enumerate(tokens) if data and text.is_special(token_id)]
