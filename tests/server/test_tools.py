"""Tools: to the template, calls out of the text in the form that the template declares; else refused, never dropped."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

from tests.server.toys import (
    TEMPLATE,
    USER,
    asked_of,
    chunks,
    make_tokenizer,
    put_together,
    refused,
    saying,
    toy,
    whole,
)

from klero.server.call_forms import FORMS, GUIDED, HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED, Call, form_of
from klero.server.tools import CallReader, schema_of_calls

AT = {"type": "object", "properties": {"at": {"enum": ["sea", "sky"]}}, "required": ["at"],
      "additionalProperties": False}  # fmt: skip
LOOK = {"type": "function", "function": {"name": "look", "description": "Look there.", "parameters": AT}}
WAIT = {"type": "function", "function": {"name": "wait"}}
NAMES = frozenset({"look", "wait"})
DECLARES = '{# <tool_call>{"name": n, "arguments": {}}</tool_call> #}'  # as templates tell the model in words
HERMES_LIKE = TEMPLATE + DECLARES
MISTRAL_LIKE = TEMPLATE + "{# [TOOL_CALLS] #}"
SEA, WAITS = Call("look", '{"at": "sea"}'), Call("wait", "{}")


def read(form, *pieces):
    """What a reader makes of text that comes in these pieces; texts next to each other joined."""
    reader = CallReader(form, NAMES)
    found = [item for piece in pieces for item in reader.push(piece)] + reader.push("", last=True)
    joined = []
    for item in found:
        if isinstance(item, str) and joined and isinstance(joined[-1], str):
            joined[-1] += item
        else:
            joined.append(item)
    return joined


@pytest.mark.parametrize(
    "text, right",
    [
        ("", []),
        ("no call", ["no call"]),
        ('<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>', [SEA]),
        ('So:\n<tool_call>{"name": "wait", "arguments": {}}</tool_call>\n', ["So:\n", WAITS]),
        (
            '<tool_call>{"name": "wait", "arguments": {}}</tool_call>\n'
            '<tool_call>{"arguments": {"at": "sea"}, "name": "look"}</tool_call> done',
            [WAITS, SEA, "done"],
        ),
        (  # the end mark inside a text of the arguments
            '<tool_call>{"name": "look", "arguments": {"at": "</tool_call>"}}</tool_call>',
            [Call("look", '{"at": "</tool_call>"}')],
        ),
        ("a < b, <tool", ["a < b, <tool"]),
        ('<tool_call>{"name": "look", "argu', ['<tool_call>{"name": "look", "argu']),
        ('<tool_call>{"name": "fly", "arguments": {}}</tool_call>',
         ['<tool_call>{"name": "fly", "arguments": {}}</tool_call>']),
        ("<tool_call>[]</tool_call>", ["<tool_call>[]</tool_call>"]),
        ('<tool_call>{"name": "wait", "arguments": {"a": NaN}}</tool_call>',
         ['<tool_call>{"name": "wait", "arguments": {"a": NaN}}</tool_call>']),
        (  # what is none does not hide the one behind it
            '<tool_call>oops</tool_call><tool_call>{"name": "wait", "arguments": {}}</tool_call>',
            ["<tool_call>oops</tool_call>", WAITS],
        ),
    ],
)  # fmt: skip
def test_hermes(text, right):
    assert read(HERMES, text) == right


@pytest.mark.parametrize(
    "form, text, right",
    [
        (MISTRAL, '[TOOL_CALLS] [{"name": "look", "arguments": {"at": "sea"}}, {"name": "wait", "arguments": {}}]',
         [SEA, WAITS]),
        (MISTRAL, '[TOOL_CALLS][{"name": "wait", "arguments": {"a": [1, "]"]}}] x',
         [Call("wait", '{"a": [1, "]"]}'), "x"]),
        (MISTRAL, "[TOOL_CALLS][]", ["[TOOL_CALLS][]"]),
        (MISTRAL, '[TOOL_CALLS][{"name": "wait", "arguments": {}}, 5]',
         ['[TOOL_CALLS][{"name": "wait", "arguments": {}}, 5]']),
        (MISTRAL_NAMED, '[TOOL_CALLS]look[ARGS]{"at": "sea"}[TOOL_CALLS]wait[CALL_ID]1[ARGS]{}', [SEA, WAITS]),
        (MISTRAL_NAMED, "[TOOL_CALLS]fly[ARGS]{}", ["[TOOL_CALLS]fly[ARGS]{}"]),
        (LLAMA3, ' {"name": "look", "parameters": {"at": "sea"}}', [SEA]),
        (LLAMA3, '<|python_tag|>{"name": "look", "parameters": {"at": "sea"}}; {"name": "wait", "parameters": {}}',
         [SEA, WAITS]),
        (LLAMA3, '{"name": "look", "parameters": {}} and more', ['{"name": "look", "parameters": {}} and more']),
        (LLAMA3, 'So {"name": "wait", "parameters": {}}', ['So {"name": "wait", "parameters": {}}']),
        (LLAMA3, "<|python_tag|>print()", ["<|python_tag|>print()"]),
        (GUIDED, '{"name":"look","arguments":{"at": "sea"}}', [SEA]),
        (GUIDED, '<think>{"name": 5</think>{"name":"look","arguments":{"at": "sea"}}',
         ['<think>{"name": 5</think>', SEA]),
        (GUIDED, '{"name":"look","argum', ['{"name":"look","argum']),
    ],
)  # fmt: skip
def test_other_forms(form, text, right):
    assert read(form, text) == right


PIECES = st.lists(
    st.sampled_from([
        "<tool_call>", "</tool_call>", "<tool", "_call>", '{"name": "wait", "arguments": {}}', '{"name": "look", ',
        '"arguments": {"at": "sea"}}', "[TOOL_CALLS]", "[", "]", "[ARGS]", "wait", "{}", "}", " x", "; ", "\n",
        "<|python_tag|>",
        '{"name": "wait", "parameters": {}}', "{",
    ]),
    max_size=12,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(pieces=PIECES, form=st.sampled_from([*FORMS, GUIDED]), data=st.data())
def test_however_text_is_cut_the_same_comes_out_and_nothing_is_lost(pieces, form, data):
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = read(form, *parts)
    assert found == read(form, text) == read(form, *text)
    if not any(isinstance(item, Call) for item in found):
        assert "".join(found) == text


@pytest.mark.parametrize(
    "template, form",
    [
        (HERMES_LIKE, HERMES),
        (MISTRAL_LIKE, MISTRAL),
        (TEMPLATE + "{# [TOOL_CALLS] [ARGS] #}", MISTRAL_NAMED),
        (TEMPLATE + '{# Environment: ipython {"name": n, "parameters": p} #}', LLAMA3),
        (TEMPLATE + DECLARES + "{# <function=x> #}", None),
        (TEMPLATE, None),
    ],
)
def test_a_template_declares_its_form(template, form):
    assert form_of(template) is form


def test_calls_are_read_from_an_answer_whole_and_streamed():
    tokenizer = make_tokenizer(HERMES_LIKE)
    body = {"messages": USER, "tools": [LOOK, WAIT], "temperature": 0, "seed": 1}
    prompt = asked_of(toy(tokenizer), body).prompts[0]
    assert tokenizer.decode(prompt) == "[user]Hi(look)(wait)[assistant]"
    said = (
        'Well.<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
    )
    llm = saying(said, len(prompt), tokenizer, max_model_len=512)
    (choice,) = whole(llm, body)["choices"]
    calls = choice["message"]["tool_calls"]
    assert choice["message"]["content"] == "Well."
    assert choice["finish_reason"] == "tool_calls"
    assert [call["function"] for call in calls] == [
        {"name": "look", "arguments": '{"at": "sea"}'}, {"name": "wait", "arguments": "{}"}
    ]  # fmt: skip
    assert all(call["type"] == "function" and len(call["id"]) == 9 and call["id"].isalnum() for call in calls)
    assert calls[0]["id"] != calls[1]["id"]
    events = chunks(llm, body)
    assert put_together(events, 1) == [choice]
    assert [call["index"] for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())] == [0, 1]
    assert "tool_call" not in "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    short = whole(llm, {**body, "max_tokens": 40})["choices"][0]
    assert (short["message"]["content"], short["finish_reason"]) == (said[:40], "length")
    one = whole(llm, {**body, "max_tokens": said.index("</tool_call>") + len("</tool_call>")})["choices"][0]
    assert (len(one["message"]["tool_calls"]), one["finish_reason"]) == (1, "length")
    none = whole(llm, {**body, "tool_choice": "none", "truncate_prompt_tokens": 3})
    assert "tool_calls" not in none["choices"][0]["message"]


def test_marks_that_are_special_tokens_are_seen_and_not_shown():
    tokenizer = make_tokenizer(MISTRAL_LIKE, special=("<end>", "[TOOL_CALLS]", "<other>"))
    body = {"messages": USER, "tools": [LOOK], "temperature": 0, "seed": 1}
    prompt = asked_of(toy(tokenizer), body).prompts[0]
    said = tokenizer.encode("d\u00e9j\u00e0<other>[TOOL_CALLS]" + '[{"name": "look", "arguments": {"at": "sky"}}]')
    assert said.count(257) == said.count(258) == 1
    llm = saying(said, len(prompt), tokenizer)
    (choice,) = whole(llm, body)["choices"]
    assert choice["message"]["content"] == "d\u00e9j\u00e0"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": "sky"}'}
    assert put_together(chunks(llm, body), 1) == [choice]


def test_a_required_call_is_held_to_its_schema():
    llm = toy()  # a template whose form nobody knows
    numbers = {"type": "object", "$defs": {"n": {"enum": [1, 22]}}, "properties": {"a": {"$ref": "#/$defs/n"}},
               "required": ["a"], "additionalProperties": False}  # fmt: skip
    tools = [LOOK, {"type": "function", "function": {"name": "sum", "parameters": numbers}}]
    right = {"sum": [{"a": 1}, {"a": 22}], "look": [{"at": "sea"}, {"at": "sky"}]}
    named = {"type": "function", "function": {"name": "sum"}}
    for tool_choice, names in (("required", {"look", "sum"}), (named, {"sum"})):
        body = {"messages": USER, "tools": tools, "tool_choice": tool_choice, "temperature": 9}
        seen = set()
        for seed in (3, 4, 9):  # the first and the last call sum, where they may choose
            (choice,) = whole(llm, {**body, "seed": seed})["choices"]
            (call,) = choice["message"]["tool_calls"]
            assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
            assert json.loads(call["function"]["arguments"]) in right[call["function"]["name"]]
            seen.add(call["function"]["name"])
            assert put_together(chunks(llm, {**body, "seed": seed}), 1) == [choice]
        assert seen == names


def test_a_strict_tool_is_held_to_its_schema_where_the_model_calls_it():
    tokenizer = make_tokenizer(HERMES_LIKE)
    strict = {"type": "function", "function": {**LOOK["function"], "strict": True}}
    asked = asked_of(toy(tokenizer), {"messages": USER, "tools": [strict, WAIT]})
    tag = json.loads(asked.params[0].structural_tag)
    assert tag["triggers"] == ["<tool_call>"]
    assert tag["structures"] == [
        {"begin": '<tool_call>\n{"name": "look", "arguments": ', "schema": AT, "end": "}\n</tool_call>"},
        {"begin": '<tool_call>\n{"name": "wait", "arguments": ', "schema": {"type": "object"},
         "end": "}\n</tool_call>"},
    ]  # fmt: skip
    other = toy(make_tokenizer(MISTRAL_LIKE))
    assert "cannot be held" in refused(other, {"messages": USER, "tools": [strict]}).message


def test_constants_are_values_and_stay():
    value = {"$ref": "#/a"}
    of_names = {"const": {"$ref": "#/$defs/x"}, "enum": {"enum": [value], "default": value}}
    moved = schema_of_calls({"f": {"const": value, "properties": of_names}})["$defs"]["f"]
    assert moved["const"] == value
    assert moved["properties"] == {"const": {"$ref": "#/$defs/f/$defs/x"}, "enum": {"enum": [value], "default": value}}


def test_references_follow_their_schema():
    schema = schema_of_calls({"a": {"$ref": "#"}, "b": {"properties": {"$ref": {"$ref": "#/$defs/x"}}}})
    assert schema["$defs"] == {
        "a": {"$ref": "#/$defs/a"}, "b": {"properties": {"$ref": {"$ref": "#/$defs/b/$defs/x"}}},
    }  # fmt: skip
    assert [one["properties"]["name"]["const"] for one in schema["anyOf"]] == ["a", "b"]


@pytest.mark.parametrize(
    "template, body, param, words",
    [
        (TEMPLATE, {"tools": [LOOK]}, "tools", "does not declare calls"),
        (HERMES_LIKE, {"tools": [LOOK, LOOK]}, "tools", "name of two"),
        (HERMES_LIKE, {"tool_choice": "auto"}, "tool_choice", "without tools"),
        (HERMES_LIKE, {"tool_choice": "auto", "tools": []}, "tool_choice", "without tools"),
        (HERMES_LIKE, {"tool_choice": "maybe", "tools": [LOOK]}, "tool_choice", "must be"),
        (HERMES_LIKE, {"tool_choice": {"type": "function", "function": {"name": "fly"}}, "tools": [LOOK]},
         "tool_choice", "none of"),
        (HERMES_LIKE, {"tools": [LOOK], "parallel_tool_calls": False}, "parallel_tool_calls", "one call"),
        (HERMES_LIKE, {"tools": [{"type": "custom"}]}, "tools[0].type", "function"),
        (HERMES_LIKE, {"tools": [{"type": "function", "function": {"name": "a b"}}]},
         "tools[0].function.name", "must match"),
        (HERMES_LIKE, {"tools": [LOOK], "response_format": {"type": "json_object"}},
         "response_format", "stands beside tools"),
        (HERMES_LIKE, {"tools": [LOOK], "regex": "a"}, "regex", "stands beside tools"),
        (HERMES_LIKE, {"tools": [LOOK], "detokenize": False}, "detokenize", "stands beside tools"),
        ("{{ messages[0].content }}", {"tools": [LOOK], "tool_choice": "required"}, "tools", "has no place for tools"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(template, body, param, words):
    error = refused(toy(make_tokenizer(template)), {"messages": USER, **body})
    assert error.param == param
    assert words in error.message


@pytest.mark.parametrize(
    "form, text",
    [
        (HERMES, '<tool_call>{"name": "look", "arguments": %s}</tool_call>'),
        (MISTRAL, '[TOOL_CALLS][{"name": "look", "arguments": %s, "id": "1"}]'),
        (MISTRAL_NAMED, "[TOOL_CALLS]look[ARGS]%s"),
        (LLAMA3, '<|python_tag|>{"name": "look", "parameters": %s}'),
        (GUIDED, '{"name": "look", "arguments": %s}'),
    ],
)
@pytest.mark.parametrize(
    "arguments", ['{"a": 1e999}', '{"a":"\\ud800"}', '{ "a" : 1.10 , "a":2}', '{"n": 12345678901234567890123}', "{}"]
)
def test_arguments_are_the_models_own_text(form, text, arguments):
    assert read(form, text % arguments) == [Call("look", arguments)]


@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": -Infinity}', '{"a": 1,}', "{", "[]", '"{}"', "{} {}"])
def test_arguments_that_are_no_json_object_are_text(arguments):
    text = f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>'
    assert read(HERMES, text) == [text]


@pytest.mark.parametrize(
    "value",
    [
        '{"name": "look", "name": "look", "arguments": {}}', '{"name": "look", "arguments": {}, "more": 1}',
        '{"name": 1, "arguments": {}}', '{"arguments": {}}', '{"name": "other", "arguments": {}}', "{}", "[]", "",
        '{"name": "look", "arguments": {}} {}', '{"name": "look" "arguments": {}}',
    ],
)  # fmt: skip
def test_what_is_no_call_is_text(value):
    text = f"<tool_call>{value}</tool_call>"
    assert read(HERMES, text) == [text]
