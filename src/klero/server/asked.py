"""From a body to what it asks: prompts as token ids, parameters for each, and how the answer is to look.

Whatever is wrong is told at once, in one 400 that names every field, before anything enters the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from klero.errors import Fault, ParameterError, RequestError
from klero.params import SamplingParams
from klero.params.aliases import ALIASES, resolve_aliases
from klero.params.guided import GUIDED
from klero.params.width import check_width
from klero.server.bodies import SAMPLING, parsed, place_of, read_body, unknown
from klero.server.call_forms import Form
from klero.server.errors import refusal_of
from klero.server.fields import FIELDS, NOT_OVER_HTTP
from klero.server.limits import LISTED, fault_of_waiting, faults_beyond, faults_of_answer
from klero.server.prompts import as_ids, context_of, faults_of_prompt, rendered, room_of
from klero.server.schemas import Body, ChatCompletionRequest, CompletionRequest
from klero.server.tokens import detokenize_of, tokenize_of
from klero.server.tools import Use, use_of

if TYPE_CHECKING:
    from klero.engine import LLM
    from klero.server.options import ServerOptions

__all__ = ["Asked", "chat_of", "completion_of", "detokenize_of", "read_body", "tokenize_of"]

DEFAULTS = {"temperature": 1.0, "top_p": 1.0}
MAX_TOKENS = 16
MOST_TOP_LOGPROBS = 20
NO_ECHO = {"echo": "a conversation has no text to echo; leave it out"}


class Asked(NamedTuple):
    """One request, checked. prompts: token ids of each; params: of each. names: fields as the body spelled them.

    model: None: the one that is served. logprobs: OpenAI's; so many beside each token, None: none. prompt_logprobs:
    the same of the field of that name, whatever echo asks. form, functions: of calls that are to be read.
    """

    kind: Literal["completion", "chat"]
    model: str | None
    prompts: list[list[int]]
    params: list[SamplingParams]
    stream: bool
    include_usage: bool
    priority: int
    cache_salt: str | None
    request_id: str | None
    names: Mapping[str, str]
    logprobs: int | None
    prompt_logprobs: int | None
    echo: bool
    return_token_ids: bool
    return_receipts: bool
    form: Form | None = None
    functions: frozenset[str] = frozenset()

    @property
    def n(self) -> int:
        """Choices of each prompt."""
        return self.params[0].n


def completion_of(body: Mapping[str, Any], llm: LLM, options: ServerOptions) -> Asked:
    """What a body of /v1/completions asks. ApiError 400 with every fault."""
    parts = _split(body, CompletionRequest, NOT_OVER_HTTP)
    request, fields = parts.request, parts.fields
    if request.best_of not in (None, fields.get("n", 1)):
        rule = "must be n: no choices are made to be thrown away; leave it out, or raise n"
        parts.faults.append(Fault("best_of", request.best_of, rule))
    parts.take(request.response_format or {}, "response_format")
    logprobs, prompt_logprobs = fields.get("logprobs"), fields.get("prompt_logprobs")
    echo = fields.get("echo") is True
    if echo and type(logprobs) is int and type(prompt_logprobs) in (int, type(None)):
        fields["prompt_logprobs"] = max(logprobs, logprobs if prompt_logprobs is None else prompt_logprobs)
        if -1 in (logprobs, prompt_logprobs):
            fields["prompt_logprobs"] = -1
        if prompt_logprobs is None:
            parts.names["prompt_logprobs"] = parts.names.get("logprobs", "logprobs")
    parts.score(request.return_receipts)
    params = parts.params(DEFAULTS | {"max_tokens": MAX_TOKENS}, options, num_prompts=len(request.prompt))
    prompts = [] if len(request.prompt) > options.max_prompts else _prompts_of(request.prompt, parts, llm)
    return _asked("completion", parts, request, params, prompts, llm, options,
                  {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs, "echo": echo})  # fmt: skip


def chat_of(body: Mapping[str, Any], llm: LLM, options: ServerOptions) -> Asked:
    """What a body of /v1/chat/completions asks. ApiError 400 with every fault."""
    parts = _split(body, ChatCompletionRequest, NOT_OVER_HTTP | NO_ECHO)
    request, fields = parts.request, parts.fields
    parts.take(request.response_format or {}, "response_format")
    logprobs = _top_logprobs(request, parts, options)
    if logprobs is not None:
        fields["logprobs"] = logprobs
        parts.names["logprobs"] = "logprobs" if request.top_logprobs is None else "top_logprobs"
    use = Use()
    if not parts.broken & {"tools", "tool_choice"}:
        try:
            use = use_of(request, llm)
        except ParameterError as error:
            parts.faults += error.faults
        except RequestError as error:
            parts.faults.append(Fault("tools", None, str(error)))
    if use.form is not None:
        _check_beside(parts)
        parts.take(use.fields, "tools")
    prompt_logprobs = fields.get("prompt_logprobs")
    parts.score(request.return_receipts)
    params = parts.params(DEFAULTS, options)
    prompts: list[list[int]] = []
    if "messages" not in parts.broken:
        extra = {} if request.reasoning_effort is None else {"reasoning_effort": request.reasoning_effort}
        one = rendered(request, use.tools, llm, extra)
        if isinstance(one, Fault):
            parts.faults.append(one)
        else:
            prompts = [one]
    return _asked("chat", parts, request, params, prompts, llm, options,
                  {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs, "echo": False, "form": use.form,
                   "functions": use.names})  # fmt: skip


def _top_logprobs(request: ChatCompletionRequest, parts: _Parts, options: ServerOptions) -> int | None:
    """How many of the most likely tokens stand beside each; None: no logprobs."""
    top, most = request.top_logprobs, MOST_TOP_LOGPROBS
    if options.max_logprobs >= 0:
        most = min(most, options.max_logprobs)
    if top is not None and (type(top) is not int or not 0 <= top <= most):
        parts.faults.append(Fault("top_logprobs", top, f"must be an integer in [0, {most}]"))
        return None
    if top and not request.logprobs:
        parts.faults.append(Fault("top_logprobs", top, "means nothing without logprobs; set logprobs to true"))
    return (top or 0) if request.logprobs else None


def _check_beside(parts: _Parts) -> None:
    """Refuse what would keep the model from calling, or hide its calls."""
    fields = parts.fields
    guided = next((name for name in GUIDED if not _silent(fields.get(name))), None)
    if guided is not None:
        rule = "stands beside tools, whose calls it would forbid; give one of them, or tool_choice 'none'"
        parts.tell([Fault(guided, fields.pop(guided), rule)])
    if fields.get("detokenize") is False:
        parts.faults.append(Fault("detokenize", False, "stands beside tools, whose calls are read from the text"))


@dataclass(eq=False)
class _Parts:
    """A body in parts: what its model has read, the fields of SamplingParams, their names there, and all faults.

    broken: fields of the model that are at fault; there a stand-in is in `request`.
    """

    request: Any
    fields: dict[str, Any]
    names: dict[str, str]
    faults: list[Fault]
    broken: set[str]

    def tell(self, faults: Iterable[Fault]) -> None:
        """Add faults of fields of SamplingParams, by the names that they have in the body."""
        self.faults += [Fault(self.names.get(one.field, one.field), one.value, one.rule) for one in faults]

    def take(self, more: Mapping[str, Any], name: str) -> None:
        """Fields that another one stands for, by its name."""
        for field, value in more.items():
            if not _silent(self.fields.get(field)):
                rule = f"stands beside {self.names.get(field, field)}, which means the same; give one of them"
                self.faults.append(Fault(name, value, rule))
            else:
                self.fields[field] = value
                self.names[field] = name

    def score(self, receipts: bool | None) -> None:
        """Receipts are those of scored tokens."""
        if receipts and self.fields.get("logprobs") is None:
            self.fields["logprobs"] = 0

    def params(
        self, defaults: Mapping[str, Any], options: ServerOptions, num_prompts: int = 1
    ) -> SamplingParams | None:
        """The parameters, and faults where they break a rule: then of the fields that break none, so that these can be
        held to the model all the same; None where that makes no sense.
        """
        beyond = faults_beyond(self.fields, options, num_prompts)
        self.tell(beyond)
        for fault in beyond:
            if fault.field in LISTED:  # far too many may take long to look at one by one
                self.fields.pop(fault.field, None)
        told = {fault.field for fault in beyond}
        try:
            return SamplingParams.from_dict({**defaults, **self.fields})
        except ParameterError as error:
            self.tell(fault for fault in error.faults if fault.field not in told)
            told |= {fault.field for fault in error.faults}
        self.fields = {name: value for name, value in self.fields.items() if name not in told}
        try:
            return SamplingParams.from_dict({**defaults, **self.fields})
        except ParameterError:  # what is left has lost what it stood beside
            return None


def _split(body: Mapping[str, Any], model: type[Body], not_here: Mapping[str, str]) -> _Parts:
    """Take a body apart. null is silence. not_here: fields of SamplingParams that this route refuses, and why."""
    own = set(model.model_fields)
    request, faults = parsed({n: v for n, v in body.items() if n in own and v is not None}, model)
    others = {name: value for name, value in body.items() if name not in own}
    known = {name: value for name, value in others.items() if ALIASES.get(name, name) in FIELDS}
    nobodys = [(name, value) for name, value in others.items() if name not in known and name not in not_here]
    broken = {place_of(fault) for fault in faults}
    for name, why in not_here.items():
        if not (_silent(others.get(name)) or others[name] == []):
            faults.append(Fault(name, others[name], why))
        known.pop(name, None)
    faults += unknown(nobodys, [*own, *SAMPLING])
    given = {name: value for name, value in known.items() if value is not None}
    fields, twice = resolve_aliases(given)
    names = {ALIASES[name]: name for name in given if name in ALIASES}
    return _Parts(request, fields, names, faults + twice, broken)


def _silent(value: Any) -> bool:
    """Whether a field says nothing; 0 is none of that."""
    return value is None or value is False


def _prompts_of(given: Sequence[str | list[int]], parts: _Parts, llm: LLM) -> list[list[int]]:
    """The token ids of every prompt; what cannot be read is a fault."""
    if "prompt" in parts.broken:
        return []
    prompts = []
    for i, prompt in enumerate(given):
        try:
            prompts.append(as_ids(prompt, llm, whole=parts.fields.get("truncate_prompt_tokens") is None))
        except RequestError as error:
            parts.faults.append(Fault(_place(i, len(given)), prompt, str(error)))
    return prompts


def _place(i: int, num: int) -> str:
    return "prompt" if num == 1 else f"prompt[{i}]"


def _asked(
    kind: Literal["completion", "chat"], parts: _Parts, request: Body, params: SamplingParams | None,
    prompts: list[list[int]], llm: LLM, server: ServerOptions, look: dict[str, Any],
) -> Asked:  # fmt: skip
    """Check what is left against the model, and put it together. ApiError with every fault."""
    options = request.stream_options
    if options is not None and not request.stream:
        parts.faults.append(Fault("stream_options", options.model_dump(), "means nothing without stream"))
    if request.priority and not llm.engine.limits.takes_priority:
        rule = "the server takes requests in the order they come; leave it out"
        parts.faults.append(Fault("priority", request.priority, rule))
    each = [] if params is None else _each(kind, params, prompts, parts, llm)
    if each and not parts.faults:
        limits, most = llm.engine.limits, llm.engine.options.max_num_waiting
        parts.tell(faults_of_answer(prompts, each, echo=look["echo"], limits=limits, options=server))
        waiting = fault_of_waiting(each[0].n * len(each), most, len(prompts))
        parts.faults += [] if waiting is None else [waiting]
    if parts.faults:
        raise refusal_of(parts.faults)
    return Asked(
        kind, request.model, prompts, each, bool(request.stream), bool(options and options.include_usage),
        request.priority or 0, request.cache_salt, request.request_id, parts.names,
        return_token_ids=bool(request.return_token_ids), return_receipts=bool(request.return_receipts), **look,
    )  # fmt: skip


def _each(
    kind: str, params: SamplingParams, prompts: list[list[int]], parts: _Parts, llm: LLM
) -> list[SamplingParams]:
    """The parameters of every prompt: seeds spread, and a length that nobody asked for as long as fits."""
    limits = llm.engine.limits
    for check in (llm.words_as_ids, lambda asked: check_width(asked, limits.vocab_size, limits.num_scored)):
        try:
            params = check(params) or params
        except ParameterError as error:
            parts.tell(error.faults)
    defaulted = kind == "completion" and "max_tokens" not in parts.fields
    most, what = context_of(limits)
    if not prompts and params.max_tokens is not None and params.max_tokens > most:
        parts.tell([Fault("max_tokens", params.max_tokens, f"{what}; ask for fewer")])
    each = []
    for i, ids in enumerate(prompts):
        place = "messages" if kind == "chat" else _place(i, len(prompts))
        faults = faults_of_prompt(place, ids, params, None if defaulted else params.max_tokens, llm)
        parts.tell(faults)
        one = params.for_prompt(i)
        if defaulted and not faults and (room := room_of(ids, params, limits)) < MAX_TOKENS:
            one = one.but(max_tokens=room)
        each.append(one)
    return each
