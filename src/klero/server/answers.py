"""Answers in OpenAI's shapes, whole and as streams, out of one mould: a whole answer is a stream of one delta."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import klero
from klero.engine import Delta, RequestOutput
from klero.logprobs import Logprobs
from klero.server.asked import Asked
from klero.server.call_forms import Call
from klero.server.errors import internal, unavailable
from klero.server.logprobs import EVERY_TOKEN, Legacy, TokenTexts, chat_logprobs, receipts
from klero.server.tools import CallReader, MarkedText, marks_hidden

if TYPE_CHECKING:
    from klero.engine import LLM, CompletionOutput
    from klero.finish import StopReason

PREFIX = {"completion": "cmpl-", "chat": "chatcmpl-"}
OBJECTS = {
    ("completion", True): "text_completion", ("completion", False): "text_completion",
    ("chat", True): "chat.completion", ("chat", False): "chat.completion.chunk",
}  # fmt: skip
PIECE = 64  # entries of a list that are written without a break
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
VOCABULARY = 2**17  # about so many entries are every token
TELLABLE = ("no token is left for position", "the model's logits for position")
"""How errors of a choice begin that are about its request, and not about the server."""


def new_id(kind: Literal["completion", "chat"]) -> str:
    """A name for an answer that no other has."""
    return PREFIX[kind] + secrets.token_hex(16)


def fingerprint_of(llm: LLM, model: str) -> str:
    """A name for what decides an answer beside the request: the version, the model and how it computes."""
    engine = llm.engine
    dtype = str(getattr(getattr(engine.model, "module", None), "dtype", ""))
    facts = [klero.__version__, model, engine.limits.vocab_size, engine.max_model_len, engine.reproducible, dtype]
    return "fp_" + hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def dump(value: Any) -> bytes:
    """JSON, compact, in UTF-8. ValueError for NaN and infinities, which no answer has."""
    return _encode(value).encode()


def in_pieces(value: Any) -> Iterator[bytes]:
    """The same bytes in pieces, none of more than PIECE entries of a list: other threads may run between them."""
    if isinstance(value, dict):
        for i, (name, item) in enumerate(value.items()):
            yield (b"," if i else b"{") + dump(name) + b":"
            yield from in_pieces(item)
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and len(value) > PIECE:
        for i in range(0, len(value), PIECE):
            yield (b"," if i else b"[") + dump(value[i : i + PIECE])[1:-1]
        yield b"]"
    else:
        yield dump(value)


class News(NamedTuple):
    """What is new of a choice. All of it, for an answer that is no stream."""

    text: str
    token_ids: Sequence[int]
    finish_reason: str | None
    stop_reason: StopReason
    error: str | None
    seed: int
    reproducible: bool
    logprobs: Logprobs | None


class Answer:
    """The answer to one request. model: what clients call it; created: when, in seconds; fingerprint: as above.

    One is for one answer, whole or as a stream: choices keep where they stand.
    """

    def __init__(
        self, asked: Asked, llm: LLM, *, model: str, answer_id: str, created: int, fingerprint: str
    ) -> None:  # fmt: skip
        self._asked, self._id = asked, answer_id
        self._envelope: dict[str, Any] = {
            "id": answer_id, "created": created, "model": model, "system_fingerprint": fingerprint,
        }  # fmt: skip
        if asked.request_id is not None:
            self._envelope["request_id"] = asked.request_id
        hidden = frozenset[int]() if asked.form is None else marks_hidden(asked.form, llm)
        self._choices = [
            [Choice(asked, llm, i, j, answer_id, hidden) for j in range(params.n)]
            for i, params in enumerate(asked.params)
        ]
        self._held: dict[int, list[Delta]] = {}  # deltas by prompt, until its logprobs are there
        self._echoes_logprobs = asked.echo and asked.logprobs is not None

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer to all prompts, in their order. ApiError where a choice has no end of its own."""
        return self._around(True, list(self._wholes(outputs))) | {"usage": usage_of(outputs)}

    def written(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The same as JSON. One choice after the other, so that no more of them stand in memory as objects."""
        empty = self._around(True, []) | {"usage": usage_of(outputs)}
        head, _, tail = dump(empty).rpartition(b'"choices":[]')  # nothing behind it is a client's text
        choices = (b"".join(in_pieces(choice)) for choice in self._wholes(outputs))
        return b"".join((head, b'"choices":[', b",".join(choices), b"]", tail))

    def _wholes(self, outputs: Sequence[RequestOutput]) -> Iterator[dict[str, Any]]:
        for output in outputs:
            for one in output.outputs:
                refuse(one)  # before any of them is looked at
        for i, output in enumerate(outputs):
            for choice, one in zip(self._choices[i], output.outputs, strict=True):
                yield choice.whole(choice.take(_news_of(one), output))

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

    def ended(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The events that were held, once a prompt has ended: one by one, as each may be long."""
        for delta in self._held.pop(prompt_index, ()):
            yield self._chunk(prompt_index, delta, output)

    def usage_chunk(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The last event of a stream whose usage was asked for."""
        return self._around(False, []) | {"usage": usage_of(outputs)}

    def _chunk(self, prompt_index: int, delta: Delta, output: RequestOutput | None) -> dict[str, Any]:
        choice = self._choices[prompt_index][delta.index]
        chunk = self._around(False, [choice.chunk(choice.take(_news_of(delta), output))])
        return chunk | {"usage": None} if self._asked.include_usage else chunk

    def _around(self, whole: bool, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._envelope, "object": OBJECTS[self._asked.kind, whole], "choices": choices}


def _news_of(one: CompletionOutput | Delta) -> News:
    refuse(one)
    return News(
        one.text, one.token_ids, one.finish_reason, one.stop_reason, one.error, one.seed, one.reproducible, one.logprobs
    )


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


class Said(NamedTuple):
    """What a choice says of its news: text, calls, logprobs in the route's shape, and what klero adds."""

    text: str
    calls: list[dict[str, Any]]
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    extras: dict[str, Any]
    first: bool


class Choice:
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

    def take(self, news: News, output: RequestOutput | None) -> Said:
        """What comes of news. output: the prompt's, where it has ended; with its logprobs."""
        first, self._first = self._first, False
        ended = news.finish_reason is not None
        text, calls = self._read(news, ended)
        reason = "tool_calls" if news.finish_reason == "stop" and self._num_calls else news.finish_reason
        return Said(text, calls, self._logprobs(news, output, first), reason, self._extras(news, output, first), first)

    def whole(self, said: Said) -> dict[str, Any]:
        """The choice of an answer that is no stream."""
        if self._asked.kind == "completion":
            return self._shaped({"text": said.text}, said)
        message: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": None}
        if said.calls:
            calls = [{name: value for name, value in call.items() if name != "index"} for call in said.calls]
            message |= {"content": said.text or None, "tool_calls": calls}
        return self._shaped({"message": message}, said)

    def chunk(self, said: Said) -> dict[str, Any]:
        """The choice of an event."""
        if self._asked.kind == "completion":
            return self._shaped({"text": said.text}, said)
        delta: dict[str, Any] = {"role": "assistant"} if said.first else {}
        if said.text or not said.calls:
            delta["content"] = said.text
        if said.calls:
            delta["tool_calls"] = said.calls
        return self._shaped({"delta": delta}, said)

    def _shaped(self, part: dict[str, Any], said: Said) -> dict[str, Any]:
        return {
            "index": self._index, **part, "logprobs": said.logprobs, "finish_reason": said.finish_reason, **said.extras
        }

    def _read(self, news: News, ended: bool) -> tuple[str, list[dict[str, Any]]]:
        """Text and calls."""
        if self._calls is None:
            return news.text, []
        text = news.text if self._marked is None else self._marked.push(news.token_ids, last=ended)
        found = self._calls.push(text, last=ended)
        calls = [self._call(item) for item in found if isinstance(item, Call)]
        return "".join(item for item in found if isinstance(item, str)), calls

    def _call(self, call: Call) -> dict[str, Any]:
        """A call in OpenAI's shape. Its name is made of the answer's, and nine letters: some templates take no more."""
        place, self._num_calls = self._num_calls, self._num_calls + 1
        name = hashlib.sha256(f"{self._answer_id}/{self._index}/{place}".encode()).hexdigest()[:9]
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": place, "id": name, "type": "function", "function": function}

    def _logprobs(self, news: News, output: RequestOutput | None, first: bool) -> dict[str, Any] | None:
        if self._asked.logprobs is None or news.logprobs is None:
            return None
        if self._legacy is None:
            return chat_logprobs(self._texts, news.token_ids, news.logprobs, self._asked.logprobs)
        lists = {}
        if first and self._asked.echo and output is not None and output.prompt_logprobs is not None:
            lists = self._legacy.of_prompt(output.prompt_token_ids, output.prompt_logprobs)
        new = self._legacy.of_output(news.token_ids, news.logprobs)
        return {name: lists.get(name, []) + values for name, values in new.items()}

    def _extras(self, news: News, output: RequestOutput | None, first: bool) -> dict[str, Any]:
        """What klero says beside OpenAI's fields."""
        asked, params = self._asked, self._params
        stop = list(news.stop_reason) if isinstance(news.stop_reason, tuple) else news.stop_reason
        extras: dict[str, Any] = {"stop_reason": stop}
        if first:
            extras |= {"seed": news.seed, "reproducible": news.reproducible}
        if asked.return_token_ids:
            extras |= {"prompt_token_ids": list(self._prompt_ids)} if first else {}
            extras["token_ids"] = list(news.token_ids)
        if news.logprobs is not None and (
            asked.return_receipts or params.logprob_token_ids or params.return_kept or params.return_probs
        ):
            extras["receipts"] = receipts(news.logprobs, 0)
        if news.finish_reason is not None and self._tells_prompt and output is not None:
            assert asked.prompt_logprobs is not None
            assert output.prompt_logprobs is not None
            extras["prompt_logprobs"] = receipts(output.prompt_logprobs, asked.prompt_logprobs)
        return extras
