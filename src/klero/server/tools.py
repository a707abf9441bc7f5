"""Tools: they go to the chat template, and the calls that a model writes are read in the form its template declares.

What cannot be done is refused. What looks like a call and is none stays text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from klero.engine import chat as chats
from klero.errors import Fault, ParameterError
from klero.finish import Finish, FinishReason, TokenBytes
from klero.params import SamplingParams
from klero.server.call_forms import FORMS, GUIDED, INNER_MARKS, Call, Form, form_of
from klero.server.schemas import ChatCompletionRequest, Named

if TYPE_CHECKING:
    from klero.engine import LLM

_OBJECT = re.compile(r'\{\s*"name"')


class Use(NamedTuple):
    """What tools come to. tools: for the template; fields: of SamplingParams; form: of calls; None: none are read."""

    tools: list[dict[str, Any]] | None = None
    fields: Mapping[str, Any] = {}
    form: Form | None = None
    names: frozenset[str] = frozenset()


def use_of(request: ChatCompletionRequest, llm: LLM) -> Use:
    """What the tools of a request come to. ParameterError for what cannot be done; RequestError without a template."""
    choice, given = request.tool_choice, request.tools or []
    if not given:
        if choice not in (None, "none"):
            raise _fault("tool_choice", choice, "means nothing without tools; give some, or leave this out")
        return Use()
    tools = [tool.model_dump(exclude_none=True) for tool in given]
    names = [tool.function.name for tool in given]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise _fault("tools", twice, "is the name of two functions; give each its own")
    if choice == "none":
        return Use()
    template = chats.template_of(llm.tokenizer, None, tools)
    if "tools" not in chats.names_in(template):
        rule = (
            "the model's chat template has no place for tools, so it would not see them; serve a model whose template "
            "has, leave tools out, or use response_format"
        )
        raise _fault("tools", f"{len(tools)} tools", rule)
    if isinstance(choice, Named) and choice.name not in names:
        raise _fault("tool_choice", choice.name, f"is none of the tools: {', '.join(names)}")
    if isinstance(choice, Named) or choice == "required":
        wanted = [tool for tool in given if not isinstance(choice, Named) or tool.function.name == choice.name]
        schema = schema_of_calls({tool.function.name: tool.function.parameters for tool in wanted})
        return Use(tools, {"json": schema}, GUIDED, frozenset(tool.function.name for tool in wanted))
    return _freely(request, tools, template, llm)


def _freely(request: ChatCompletionRequest, tools: list[dict[str, Any]], template: str, llm: LLM) -> Use:
    """The model decides whether to call."""
    form = form_of(template)
    if form is None:
        rule = (
            "the chat template does not declare calls in a form that is known here "
            f"({'; '.join(form.name for form in FORMS)}); use tool_choice 'required' or name a function, or 'none'"
        )
        raise _fault("tools", f"{len(tools)} tools", rule)
    if request.parallel_tool_calls is False:
        rule = "nothing stops the model at one call where it decides itself; use tool_choice 'required', which is one"
        raise _fault("parallel_tool_calls", False, rule)
    names = frozenset(tool["function"]["name"] for tool in tools)
    if not any(tool["function"].get("strict") for tool in tools):
        return Use(tools, {}, form, names)
    if form.tag is None or hidden_marks(form, llm):
        rule = f"cannot be held in calls of the form {form.name}; use tool_choice 'required', or leave it out"
        raise _fault("tools", "strict", rule)
    begin, end = form.tag
    structures = [
        {"begin": begin.format(tool["function"]["name"]), "schema": tool["function"].get("parameters", ANY), "end": end}
        for tool in tools
    ]
    return Use(tools, {"structural_tag": {"structures": structures, "triggers": [form.begin]}}, form, names)


ANY = {"type": "object"}
OF_NAMES = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
VALUES = ("const", "enum", "default", "examples")  # keywords that hold values, in which nothing is a reference


def schema_of_calls(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON schema of one call of one of these functions, as {"name", "arguments"}."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in parameters
    ]
    definitions = {name: _moved(schema or ANY, f"#/$defs/{name}") for name, schema in parameters.items()}
    return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "$defs": definitions}


def _moved(schema: Any, place: str, *, named: bool = False) -> Any:
    """A schema that stands at another place of a document: its references to itself follow. named: keys are names."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if named:
        return {name: _moved(value, place) for name, value in schema.items()}
    moved = {
        key: value if key in VALUES else _moved(value, place, named=key in OF_NAMES) for key, value in schema.items()
    }
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


def _fault(field: str, value: Any, rule: str) -> ParameterError:
    return ParameterError([Fault(field, value, rule)])


class CallReader:
    """Reads text as it comes, and tells calls from text; however it is cut, the same comes out.

    Text is released unless a call may have begun in it. Spaces and line breaks behind a call belong to it. What began
    like a call and is none comes out as text, at the latest with the end.
    """

    def __init__(self, form: Form, names: frozenset[str]) -> None:
        self._form, self._names = form, names
        self._held = ""
        self._inside = form is GUIDED
        self._looked = 0  # up to where ends have been tried
        self._behind_call = False
        self._read_all = False  # an answer of which nothing can be a call any more

    def push(self, text: str, *, last: bool = False) -> list[str | Call]:
        """Take more text; last: it is the end."""
        self._held += text
        found: list[str | Call] = []
        if not self._form.begin:
            self._whole(found, last)
        else:
            while self._marked(found, last):
                pass
        return found

    def _whole(self, found: list[str | Call], last: bool) -> None:
        """An answer that is calls from its beginning to its end, or text."""
        start = self._held.lstrip()
        if not self._inside and start and not self._read_all:
            tag = "<|python_tag|>"
            self._inside = start.startswith(("{", tag))
            self._read_all = not self._inside and not tag.startswith(start)
        if last and not self._read_all:
            calls = self._form.parse(self._held, self._names)
            found += calls if calls is not None else self._text_then_call() if self._form is GUIDED else [self._held]
        elif self._read_all:
            found.append(self._held)
        else:
            return
        found[:] = [item for item in found if item]
        self._held = ""

    def _text_then_call(self) -> list[str | Call]:
        """What a model thinks before its grammar begins, and the call behind it."""
        for found in _OBJECT.finditer(self._held):
            calls = self._form.parse(self._held[found.start() :], self._names)
            if calls is not None:
                return [self._held[: found.start()], *calls]
        return [self._held]

    def _marked(self, found: list[str | Call], last: bool) -> bool:
        """One piece of text or one call; False where there is no more to find."""
        return self._in_call(found, last) if self._inside else self._in_text(found, last)

    def _in_text(self, found: list[str | Call], last: bool) -> bool:
        begin = self._form.begin
        if self._behind_call:
            self._held = self._held.lstrip()
            self._behind_call = not self._held
        at = self._held.find(begin)
        if at < 0:
            num_open = 0 if last else _num_open(self._held, begin)
            at = len(self._held) - num_open
        self._inside = self._held.startswith(begin, at)
        if at:
            found.append(self._held[:at])
            self._held = self._held[at:]
        self._looked = len(begin)
        return self._inside

    def _in_call(self, found: list[str | Call], last: bool) -> bool:
        begin, end = self._form.begin, self._form.end
        while (at := self._held.find(end, self._looked)) >= 0:
            body = self._held[len(begin) : at + len(end) * self._form.with_end]
            calls = self._form.parse(body, self._names)
            if calls is not None:
                found += calls
                self._held, self._inside, self._behind_call = self._held[at + len(end) :], False, True
                return True
            self._looked = at + 1
        if last:
            found.append(begin)
            self._held, self._inside = self._held[len(begin) :], False
        return last


def _num_open(text: str, mark: str) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    return next((k for k in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:k])), 0)


def hidden_marks(form: Form, llm: LLM) -> frozenset[int]:
    """The ids of the marks of a form that are special tokens, which text does not show."""
    vocabulary, encode = llm.engine.vocabulary, llm.engine.encode
    if vocabulary is None or encode is None:
        return frozenset()
    texts = [form.begin, form.end, *INNER_MARKS]
    ids = [tuple(encode(text)) for text in texts if text]
    return frozenset(one[0] for one in ids if len(one) == 1 and vocabulary.is_special(one[0]))


class _Marked:
    """A vocabulary in which these special tokens are text."""

    def __init__(self, vocabulary: TokenBytes, shown: frozenset[int]) -> None:
        self._vocabulary, self._shown = vocabulary, shown
        self.bytes_of_token = vocabulary.bytes_of_token

    def is_special(self, token_id: int) -> bool:
        """As there, but for the marks."""
        return token_id not in self._shown and self._vocabulary.is_special(token_id)


class MarkedText:
    """The text of a choice with the marks of calls in it, from its tokens, by the engine's own rules."""

    def __init__(self, llm: LLM, params: SamplingParams, prompt_ids: Sequence[int], shown: frozenset[int]) -> None:
        assert llm.engine.vocabulary is not None
        vocabulary: Any = _Marked(llm.engine.vocabulary, shown)
        self._finish = Finish(
            params, end_token_ids=llm.engine.limits.end_token_ids, prompt_ids=prompt_ids, vocabulary=vocabulary,
            max_tokens=2**62,
        )  # fmt: skip

    def push(self, token_ids: Sequence[int], *, last: bool) -> str:
        """What can be shown of these tokens and those before; last: the choice has ended."""
        self._finish.push_all(token_ids)
        if last:
            self._finish.end(FinishReason.LENGTH)
        return self._finish.delta()
