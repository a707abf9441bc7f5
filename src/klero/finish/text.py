"""Text of one sequence, token by token: whole characters, stop strings held back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, cast

from klero.finish.patterns import ROOT, Patterns
from klero.finish.utf8 import Utf8Decoder, continues, pending_of_bytes

if TYPE_CHECKING:
    from klero.finish.vocabulary import TokenBytes
    from klero.params import SamplingParams


class _Mark(NamedTuple):
    """Where a token's text began: enough to take the token back."""

    num_units: int
    pending: bytes
    gap: str


class TextStream:
    """Turn tokens into text that can be sent, and find stop strings in it.

    *Matched* text is the text of all tokens, special ones included; *shown* text is what the client gets of
    it. Stop strings are found in matched text, never in the prompt, wherever tokens begin and end; the match
    that ends first wins, the longest of those that end together. Spaces put around special tokens are shown
    only.

    Shown text is *released* unless it may have to be taken back: the longest tail that is a proper prefix of
    a stop string is held until it is disproved, matched or the text ends (with include_stop_str_in_output
    nothing is). A special token ends an unfinished character before it. If the prompt ends in half a
    character and the output begins with its rest, the whole character is output; a half that the output does
    not carry on is prompt text, so it is output only as the U+FFFD that `echo` needs to continue
    `text_of_prompt`.

    Time per token is amortised O(its text); `text` is O(all text).
    """

    def __init__(
        self, vocabulary: TokenBytes, params: SamplingParams, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._vocabulary = vocabulary
        self._stop_strings = cast("tuple[str, ...]", params.stop)  # normalised by SamplingParams
        self._stops = _patterns_of_stops(self._stop_strings)
        self._node = ROOT
        self._hide_special = params.skip_special_tokens
        self._spaces = params.spaces_between_special_tokens and not params.skip_special_tokens
        self._keep_stop = params.include_stop_str_in_output
        self._silent = not params.detokenize
        half = _half_of_prompt(vocabulary, prompt_ids)
        self._decoder = Utf8Decoder(half if params.echo else b"")
        self._prompt_half = b"" if params.echo else half
        # Whether the text so far ends in a special token; None: there is no text yet.
        self._after_special: bool | None = None
        if params.echo and prompt_ids:
            self._after_special = vocabulary.is_special(prompt_ids[-1])
        self._gap = ""
        # A unit is what is shown of one matched character, or of a whole token if there are no stop strings.
        self._units: list[str] = []
        self._num_released = 0
        self._marks: deque[_Mark] = deque()
        self._released: list[str] = []
        self._num_delivered = 0

    @property
    def text(self) -> str:
        """All text released so far; final once `finish` was called or a stop string was found."""
        return "".join(self._released)

    def delta(self) -> str:
        """Return the text released since the last call."""
        new = "".join(self._released[self._num_delivered :])
        self._num_delivered = len(self._released)
        return new

    def push(self, token_id: int, *, may_stop: bool = True, num_tail_tokens: int = 0) -> str | None:
        """Add a token's text; return the stop string that ended the text in it, or None.

        `may_stop=False` ignores a match that this token completes (min_tokens), for good. The text of the
        last `num_tail_tokens` tokens, this one included, is held so that `drop` can take it back; the number
        grows by at most one per token. ModelError, with nothing changed, for an id without text.
        """
        data = self._vocabulary.bytes_of_token(token_id)
        special = self._vocabulary.is_special(token_id)
        self._mark(num_tail_tokens)
        found = self._push_special(data, may_stop) if special else self._push_plain(data, may_stop)
        if found is not None:
            self._close_at_match(found)
        self._release()
        return found

    def drop(self, num_tokens: int) -> None:
        """Take back the text of the last `num_tokens` tokens, which the last `push` held; then `finish`."""
        if num_tokens:
            mark = self._marks[-num_tokens]
            del self._units[mark.num_units - self._num_released :]
            self._decoder = Utf8Decoder(mark.pending)
            self._gap = mark.gap

    def finish(self) -> None:
        """End the text: an unfinished character becomes U+FFFD, what is held comes out."""
        self._add(self._decoder.flush(), shown=True, may_stop=False)
        self._node = ROOT
        self._marks.clear()
        self._release()

    def _mark(self, num_tail_tokens: int) -> None:
        """Remember where the next token's text begins; forget all but the last `num_tail_tokens` marks."""
        if not num_tail_tokens:
            self._marks.clear()
            return
        position = self._num_released + len(self._units)
        self._marks.append(_Mark(position, self._decoder.pending, self._gap))
        while len(self._marks) > num_tail_tokens:
            self._marks.popleft()

    def _push_plain(self, data: bytes, may_stop: bool) -> str | None:
        if data and self._prompt_half:
            if continues(self._prompt_half, data):
                data = self._prompt_half + data
            self._prompt_half = b""
        if data:
            self._space_before(special=False)
        return self._add(self._decoder.push(data), shown=True, may_stop=may_stop)

    def _push_special(self, data: bytes, may_stop: bool) -> str | None:
        self._prompt_half = b""
        broken = self._add(self._decoder.flush(), shown=True, may_stop=may_stop)
        if broken is not None:
            return broken
        if data:
            self._space_before(special=True)
        return self._add(data.decode(errors="replace"), shown=not self._hide_special, may_stop=may_stop)

    def _space_before(self, *, special: bool) -> None:
        """Put one space between a shown special token and its neighbour, in front of the next character."""
        if self._spaces and self._after_special is not None and (special or self._after_special):
            self._gap = " "
        self._after_special = special

    def _add(self, text: str, *, shown: bool, may_stop: bool) -> str | None:
        if not self._stops:
            if text:
                self._append(text, shown)
            return None
        for character in text:
            self._node = self._stops.step(self._node, character)
            self._append(character, shown)
            end = self._stops.end_of_node(self._node)
            if end is not None and may_stop:
                return self._stop_strings[end]
        return None

    def _append(self, text: str, shown: bool) -> None:
        self._units.append(self._gap + text if shown else "")
        self._gap = ""

    def _close_at_match(self, stop: str) -> None:
        if not self._keep_stop:
            del self._units[-len(stop) :]
        self._decoder = Utf8Decoder()
        self._node = ROOT
        self._marks.clear()

    def _release(self) -> None:
        num_held = 0
        if not self._keep_stop:
            num_held = self._stops.num_open[self._node]
            if self._marks:
                num_held = max(num_held, self._num_released + len(self._units) - self._marks[0].num_units)
        num_ready = len(self._units) - num_held
        if num_ready <= 0:
            return
        ready = "".join(self._units[:num_ready])
        del self._units[:num_ready]
        self._num_released += num_ready
        if ready and not self._silent:
            self._released.append(ready)


def text_of_prompt(vocabulary: TokenBytes, params: SamplingParams, prompt_ids: Sequence[int]) -> str:
    """Return the prompt's text for `echo`, under the same rules as the output's.

    Half a character at its end is left to the output, so that with echo=True this text and the output's join
    to the text of all tokens.
    """
    stream = TextStream(vocabulary, params.but(stop=(), detokenize=True))
    for token_id in prompt_ids:
        stream.push(token_id)
    return stream.text


def _half_of_prompt(vocabulary: TokenBytes, prompt_ids: Sequence[int]) -> bytes:
    """Return the bytes of the unfinished character at the prompt's end; a special token there finishes it."""
    tail = b""
    for token_id in reversed(prompt_ids):
        if vocabulary.is_special(token_id) or len(tail) >= 3:
            break
        tail = vocabulary.bytes_of_token(token_id) + tail
    return pending_of_bytes(tail)


@lru_cache(maxsize=256)
def _patterns_of_stops(stops: tuple[str, ...]) -> Patterns[str]:
    return Patterns(stops)
