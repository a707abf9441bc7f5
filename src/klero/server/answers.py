"""Answers in OpenAI's shapes, whole and as streams, out of one mould: a whole answer is a stream of one delta."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from klero.engine import Delta, RequestOutput
from klero.params.guided import GUIDED
from klero.server.asked import Asked
from klero.server.call_forms import Call
from klero.server.errors import internal, unavailable
from klero.server.json_bytes import dump, in_pieces
from klero.server.logprobs import EVERY_TOKEN, Legacy, TokenTexts, chat_logprobs, receipts
from klero.server.tools import CallReader, MarkedText, hidden_marks

if TYPE_CHECKING:
    from klero.engine import LLM, CompletionOutput

PREFIX = {"completion": "cmpl-", "chat": "chatcmpl-"}
OBJECTS = {
    ("completion", True): "text_completion", ("completion", False): "text_completion",
    ("chat", True): "chat.completion", ("chat", False): "chat.completion.chunk",
}  # fmt: skip
VOCABULARY = 2**17  # about so many entries are every token
TELLABLE = (
    "no token is left for position", "the model's logits for position", "grammar: ", *(f"{name}=" for name in GUIDED),
)  # fmt: skip
"""How errors of a choice begin that are about its request, and not about the server."""


def new_id(kind: Literal["completion", "chat"]) -> str:
    """A name for an answer that no other has."""
    return PREFIX[kind] + secrets.token_hex(16)


class Answer:
    """The answer to one request. model: what clients call it; created: when, in seconds; fingerprint: as above.

    One is for one answer, whole or as a stream: choices keep where they stand.
    """

    def __init__(
        self, asked: Asked, llm: LLM, *, model: str, answer_id: str, created: int, fingerprint: str
    ) -> None:  # fmt: skip
        self._asked = asked
        self._envelope: dict[str, Any] = {
            "id": answer_id, "created": created, "model": model, "system_fingerprint": fingerprint,
        }  # fmt: skip
        if asked.request_id is not None:
            self._envelope["request_id"] = asked.request_id
        hidden = frozenset[int]() if asked.form is None else hidden_marks(asked.form, llm)
        self._choices = [
            [ChoiceWriter(asked, llm, i, j, answer_id, hidden) for j in range(params.n)]
            for i, params in enumerate(asked.params)
        ]
        self._held: dict[int, list[Delta]] = {}  # deltas by prompt, until its logprobs are there
        self._echoes_logprobs = asked.echo and asked.logprobs is not None

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer to all prompts, in their order. ApiError where a choice has no end of its own."""
        return self._envelope_of(True) | {"choices": list(self._wholes(outputs)), "usage": usage_of(outputs)}

    def written(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The same as JSON. One choice after the other, so that no more of them stand in memory as objects."""
        choices = b",".join(b"".join(in_pieces(choice)) for choice in self._wholes(outputs))
        head, usage = dump(self._envelope_of(True))[:-1], dump(usage_of(outputs))
        return b"".join((head, b',"choices":[', choices, b'],"usage":', usage, b"}"))

    def _wholes(self, outputs: Sequence[RequestOutput]) -> Iterator[dict[str, Any]]:
        for output in outputs:
            for one in output.outputs:
                refuse(one)  # before any of them is looked at
        for i, output in enumerate(outputs):
            for choice, one in zip(self._choices[i], output.outputs, strict=True):
                yield choice.whole(choice.take(one, output))

    def chunks(self, prompt_index: int, delta: Delta) -> list[dict[str, Any]]:
        """The events of one delta: one, or none while it is held. ApiError where the choice has no end of its own.

        Held until the prompt has ended: with echo and logprobs everything, as the prompt's logprobs come first and are
        told last; with prompt_logprobs the end of the first choice.
        """
        refuse(delta)
        ends = delta.finish_reason is not None and delta.index == 0 and self._asked.prompt_logprobs is not None
        if self._echoes_logprobs or ends:
            self._held.setdefault(prompt_index, []).append(delta)
            return []
        return [self._chunk(prompt_index, delta, None)]

    def holds(self, prompt_index: int) -> bool:
        """Whether events of a prompt are held."""
        return prompt_index in self._held

    def release(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The events that were held, once a prompt has ended: one by one, as each may be long."""
        for delta in self._held.pop(prompt_index, ()):
            yield self._chunk(prompt_index, delta, output)

    def usage_chunk(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The last event of a stream whose usage was asked for."""
        return self._envelope_of(False) | {"choices": [], "usage": usage_of(outputs)}

    def _chunk(self, prompt_index: int, delta: Delta, output: RequestOutput | None) -> dict[str, Any]:
        choice = self._choices[prompt_index][delta.index]
        chunk = self._envelope_of(False) | {"choices": [choice.chunk(choice.take(delta, output))]}
        return chunk | {"usage": None} if self._asked.include_usage else chunk

    def _envelope_of(self, whole: bool) -> dict[str, Any]:
        """What stands before the choices of an answer, or of an event of one."""
        return {**self._envelope, "object": OBJECTS[self._asked.kind, whole]}


def num_entries(asked: Asked, outputs: Sequence[RequestOutput]) -> int:
    """How many entries the lists of an answer have, about: what writing it costs."""
    entries = 0
    for output, params in zip(outputs, asked.params, strict=True):
        if params.asks or asked.return_token_ids:
            beside = 1 + _listed(params.logprobs) + len(params.logprob_token_ids)
            entries += beside * sum(len(one.token_ids) for one in output.outputs)
        if params.prompt_logprobs is not None:
            entries += (1 + _listed(params.prompt_logprobs)) * len(output.prompt_token_ids)
    return entries


def _listed(asked: int | None) -> int:
    return VOCABULARY if asked == EVERY_TOKEN else asked or 0


def refuse(one: CompletionOutput | Delta) -> None:
    """Raise ApiError for a choice that ended in an error (500) or was ended (503): no answer is half of one."""
    if one.finish_reason == "abort":
        raise unavailable("the server ended the request before its answer was whole")
    if one.finish_reason == "error":
        message = one.error or ""
        raise internal(message, message if message.startswith(TELLABLE) else None)


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Tokens of all prompts, each counted once, and of all choices."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_new = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    cached = sum(output.metrics.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip


class Part(NamedTuple):
    """What an answer or an event says of a choice: text, calls, logprobs in the route's shape, and what klero adds."""

    text: str
    calls: list[dict[str, Any]]
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    extras: dict[str, Any]
    first: bool


class ChoiceWriter:
    """One choice as it comes: where its text, logprobs and calls stand. hidden: marks of calls that are no text."""

    def __init__(
        self, asked: Asked, llm: LLM, prompt_index: int, index: int, answer_id: str, hidden: frozenset[int]
    ) -> None:
        self._asked, self._params = asked, asked.params[prompt_index]
        ids = asked.prompts[prompt_index]
        most = self._params.truncate_prompt_tokens
        self._prompt_ids = ids if most is None else ids[-most:]
        self._index = prompt_index * self._params.n + index
        self._tells_prompt = asked.prompt_logprobs is not None and index == 0
        vocabulary = llm.engine.vocabulary
        self._texts = TokenTexts(vocabulary, self._params.skip_special_tokens)
        self._legacy: Legacy | None = None
        if asked.kind == "completion" and asked.logprobs is not None:
            self._legacy = Legacy(
                self._texts, vocabulary, self._params, self._prompt_ids, asked.logprobs, echo=asked.echo
            )
        self._first, self._num_calls, self._answer_id = True, 0, answer_id
        self._calls: CallReader | None = None
        self._marked: MarkedText | None = None
        if asked.form is not None:
            self._calls = CallReader(asked.form, asked.functions)
            if hidden:
                self._marked = MarkedText(llm, self._params, self._prompt_ids, hidden)

    def take(self, new: CompletionOutput | Delta, output: RequestOutput | None) -> Part:
        """What is said of what a delta brings, or of the whole choice where the answer is no stream.

        output: the prompt's, where it has ended; with its logprobs.
        """
        first, self._first = self._first, False
        ended = new.finish_reason is not None
        text, calls = self._read(new, ended)
        reason = "tool_calls" if new.finish_reason == "stop" and self._num_calls else new.finish_reason
        return Part(text, calls, self._logprobs(new, output, first), reason, self._extras(new, output, first), first)

    def whole(self, part: Part) -> dict[str, Any]:
        """The choice of an answer that is no stream."""
        if self._asked.kind == "completion":
            return self._shaped({"text": part.text}, part)
        message: dict[str, Any] = {"role": "assistant", "content": part.text, "refusal": None}
        if part.calls:
            calls = [{name: value for name, value in call.items() if name != "index"} for call in part.calls]
            message |= {"content": part.text or None, "tool_calls": calls}
        return self._shaped({"message": message}, part)

    def chunk(self, part: Part) -> dict[str, Any]:
        """The choice of an event."""
        if self._asked.kind == "completion":
            return self._shaped({"text": part.text}, part)
        delta: dict[str, Any] = {"role": "assistant"} if part.first else {}
        if part.text or not part.calls:
            delta["content"] = part.text
        if part.calls:
            delta["tool_calls"] = part.calls
        return self._shaped({"delta": delta}, part)

    def _shaped(self, said: dict[str, Any], part: Part) -> dict[str, Any]:
        return {
            "index": self._index, **said, "logprobs": part.logprobs, "finish_reason": part.finish_reason, **part.extras
        }

    def _read(self, new: CompletionOutput | Delta, ended: bool) -> tuple[str, list[dict[str, Any]]]:
        """Text and calls."""
        if self._calls is None:
            return new.text, []
        text = new.text if self._marked is None else self._marked.push(new.token_ids, last=ended)
        found = self._calls.push(text, last=ended)
        calls = [self._call(item) for item in found if isinstance(item, Call)]
        return "".join(item for item in found if isinstance(item, str)), calls

    def _call(self, call: Call) -> dict[str, Any]:
        """A call in OpenAI's shape. Its name is made of the answer's, and nine letters: some templates take no more."""
        place, self._num_calls = self._num_calls, self._num_calls + 1
        name = hashlib.sha256(f"{self._answer_id}/{self._index}/{place}".encode()).hexdigest()[:9]
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": place, "id": name, "type": "function", "function": function}

    def _logprobs(
        self, new: CompletionOutput | Delta, output: RequestOutput | None, first: bool
    ) -> dict[str, Any] | None:
        if self._asked.logprobs is None or new.logprobs is None:
            return None
        if self._legacy is None:
            return chat_logprobs(self._texts, new.token_ids, new.logprobs, self._asked.logprobs)
        lists = {}
        if first and self._asked.echo and output is not None and output.prompt_logprobs is not None:
            lists = self._legacy.of_prompt(output.prompt_token_ids, output.prompt_logprobs)
        of_output = self._legacy.of_output(new.token_ids, new.logprobs)
        return {name: lists.get(name, []) + values for name, values in of_output.items()}

    def _extras(self, new: CompletionOutput | Delta, output: RequestOutput | None, first: bool) -> dict[str, Any]:
        """What klero says beside OpenAI's fields."""
        asked, params = self._asked, self._params
        stop = list(new.stop_reason) if isinstance(new.stop_reason, tuple) else new.stop_reason
        extras: dict[str, Any] = {"stop_reason": stop}
        if first:
            extras |= {"seed": new.seed, "reproducible": new.reproducible}
        if asked.return_token_ids:
            extras |= {"prompt_token_ids": list(self._prompt_ids)} if first else {}
            extras["token_ids"] = list(new.token_ids)
        if new.logprobs is not None and (
            asked.return_receipts or params.logprob_token_ids or params.return_kept or params.return_probs
        ):
            extras["receipts"] = receipts(new.logprobs, 0)
        if new.finish_reason is not None and self._tells_prompt and output is not None:
            assert asked.prompt_logprobs is not None
            assert output.prompt_logprobs is not None
            extras["prompt_logprobs"] = receipts(output.prompt_logprobs, asked.prompt_logprobs)
        return extras
