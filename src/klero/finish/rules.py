"""When one sequence is finished: end ids, stop ids and sequences, stop strings, length, in this order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from klero.errors import Fault, KleroError, ParameterError
from klero.finish.patterns import ROOT, Patterns
from klero.finish.reasons import Finished, FinishReason
from klero.finish.text import TextStream

if TYPE_CHECKING:
    from klero.finish.vocabulary import TokenBytes
    from klero.params import SamplingParams


class Finish:
    """Decide, token by token, whether one sequence is finished, and keep its ids and its text.

    `end_token_ids`: the model's end ids; the caller's own (params) are added, and only the model's yield to
    ignore_eos. `prompt_ids` is context for the text and never matched or counted. `vocabulary=None`: no text,
    so `text` is "" and stop strings are an error. `max_tokens` is the resolved limit on generated tokens, at
    least 1.

    While fewer than min_tokens tokens are there, the sampler bans what would end the sequence (`klero.rewrite`); if
    one of these ids comes all the same (drawn by someone else), it is a token like any other. A stop string counts
    if the token that completes it is number min_tokens or later; one completed earlier never fires. ParameterError
    for limits that cannot be met and for stop strings without a vocabulary.

    Beside a grammar (`params.guided`) an end id always ends: it comes before min_tokens only where the grammar allows
    nothing else, and after it nothing but end ids could come.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        end_token_ids: Iterable[int],
        prompt_ids: Sequence[int] = (),
        vocabulary: TokenBytes | None = None,
        max_tokens: int,
    ) -> None:
        _check(params, vocabulary, max_tokens)
        model_ids = () if params.ignore_eos else tuple(end_token_ids)
        self._end_ids = frozenset(model_ids) | frozenset(params.end_token_ids)
        self._stop_ids = _patterns_of_ids(params.stop_token_ids)
        self._node = ROOT
        self._min_tokens = params.min_tokens
        self._grammar_ends = params.guided is not None
        self._max_tokens = max_tokens
        self._keep_stop = params.include_stop_str_in_output
        self._stream: TextStream | None = None
        if vocabulary is not None and (params.detokenize or params.stop):
            self._stream = TextStream(vocabulary, params, prompt_ids)
        self._token_ids: list[int] = []
        self._finished: Finished | None = None

    @property
    def finished(self) -> Finished | None:
        """Why the sequence ended; None while it goes on."""
        return self._finished

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids generated so far, the one that ended the sequence included; O(n)."""
        return tuple(self._token_ids)

    def tokens_since(self, first: int) -> list[int]:
        """The tokens so far from number `first` on."""
        return self._token_ids[first:]

    @property
    def num_tokens(self) -> int:
        """How many tokens were generated so far."""
        return len(self._token_ids)

    @property
    def text(self) -> str:
        """The text released so far; the whole text once finished; "" without a vocabulary or detokenize."""
        return "" if self._stream is None else self._stream.text

    def delta(self) -> str:
        """Return the text released since the last call."""
        return "" if self._stream is None else self._stream.delta()

    def push(self, token_id: int) -> Finished | None:
        """Take one accepted token; return why the sequence ended with it, or None.

        KleroError if it has already ended; ModelError, with nothing changed, for an id without text.
        """
        if self._finished is not None:
            raise KleroError(
                f"token {token_id} was pushed after the sequence had finished ({self._finished.reason}); "
                "look at `finished` first and drop what was drawn after it"
            )
        token_id = int(token_id)
        may_stop = self.num_tokens >= self._min_tokens  # the tokens before this one, as for the ban
        node = self._stop_ids.step(self._node, token_id)
        finished: Finished | None
        sequence = self._stop_ids.end_of_node(node)
        if (may_stop or self._grammar_ends) and token_id in self._end_ids:
            finished = Finished(FinishReason.STOP)
            self._stop_at_ids((token_id,))
        elif may_stop and sequence is not None:
            ids = self._stop_ids.patterns[sequence]
            reason = tuple(ids) if len(ids) > 1 else ids[0]
            finished = Finished(FinishReason.STOP, reason)
            self._stop_at_ids(ids)
        else:
            finished = self._go_on(token_id, node)
        self._node = node
        self._token_ids.append(token_id)
        self._finished = finished
        return finished

    def push_all(self, token_ids: Iterable[int]) -> int:
        """Take accepted tokens one by one, as `push`; return how many are kept, the last one included."""
        num_kept = 0
        for token_id in token_ids:
            num_kept += 1
            if self.push(token_id) is not None:
                break
        return num_kept

    def end(self, reason: FinishReason, message: str | None = None) -> Finished:
        """End the sequence from outside (abort, error) with the text it had; an earlier end stands."""
        if self._finished is None:
            self._finished = Finished(FinishReason(reason), None, message)
            if self._stream is not None:
                self._stream.finish()
        return self._finished

    def _stop_at_ids(self, ids: Sequence[int]) -> None:
        """End the text at a stop whose last id, `ids[-1]`, is not in the text yet and whose other ids are."""
        if self._stream is not None:
            if self._keep_stop:
                self._stream.push(ids[-1], may_stop=False)
            else:
                self._stream.drop(len(ids) - 1)
            self._stream.finish()

    def _go_on(self, token_id: int, node: int) -> Finished | None:
        """Add the text of a token that is no stop by its id; return the end by stop string or length."""
        num_tokens = self.num_tokens + 1
        stop = None
        if self._stream is not None:
            num_tail = 0 if self._keep_stop else self._stop_ids.num_open[node]
            may_stop = num_tokens >= self._min_tokens
            stop = self._stream.push(token_id, may_stop=may_stop, num_tail_tokens=num_tail)
        if stop is not None:
            return Finished(FinishReason.STOP, stop)
        if num_tokens < self._max_tokens:
            return None
        if self._stream is not None:
            self._stream.finish()
        return Finished(FinishReason.LENGTH)


def _check(params: SamplingParams, vocabulary: TokenBytes | None, max_tokens: int) -> None:
    faults = []
    if params.stop and vocabulary is None:
        rule = "stop strings are matched on text, and there is no tokenizer; load one, or use stop_token_ids"
        faults.append(Fault("stop", params.stop, rule))
    if max_tokens < 1:
        rule = "at least 1 token must be allowed; leave max_tokens out for as many as fit"
        faults.append(Fault("max_tokens", max_tokens, rule))
    elif params.min_tokens > max_tokens:
        rule = f"more than the {max_tokens} tokens that this request may generate; lower min_tokens"
        faults.append(Fault("min_tokens", params.min_tokens, rule))
    if faults:
        raise ParameterError(faults)


@lru_cache(maxsize=256)
def _patterns_of_ids(sequences: tuple[tuple[int, ...], ...]) -> Patterns[int]:
    return Patterns(sequences)
