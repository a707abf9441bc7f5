"""Schemas: what OpenAPI says of bodies and answers is what the server takes and gives."""

from __future__ import annotations

import contextlib
import functools
import json

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("jsonschema")

import jsonschema
from tests.server.toys import OPTIONS, USER, asked_of, refused, toy

from klero.errors import OptionError
from klero.server import ServerOptions, schemas
from klero.server.errors import ApiError
from klero.server.fields import FIELDS
from klero.server.openapi import ALWAYS, Bounds, bounded, document
from klero.server.tokens import detokenize_of, tokenize_of

REQUESTS = (
    schemas.CompletionRequest, schemas.ChatCompletionRequest, schemas.TokenizeRequest, schemas.DetokenizeRequest,
)  # fmt: skip
BOUNDS = Bounds(257, 256, takes_priority=False)


@pytest.fixture(scope="module")
def llm():
    return toy(max_model_len=256)


@pytest.fixture(scope="module")
def opened():
    return document(OPTIONS, "toy", BOUNDS)


@functools.cache
def validator_of(chat):
    """What checks bodies of one of the two routes."""
    return jsonschema.Draft202012Validator(bounded(schemas.in_line(REQUESTS[chat]), OPTIONS, "toy", BOUNDS))


@pytest.mark.parametrize("model", REQUESTS)
def test_a_body_s_schema_stands_alone_and_names_every_field(model):
    schema = schemas.in_line(model)
    assert "$ref" not in json.dumps(schema)
    assert "$defs" not in schema
    assert schema["additionalProperties"] is False
    jsonschema.Draft202012Validator.check_schema(schema)
    assert set(schema["properties"]) >= set(model.model_fields)


def test_both_routes_show_the_fields_of_the_library():
    completion, chat = (schemas.in_line(model)["properties"] for model in REQUESTS[:2])
    assert set(FIELDS) <= set(completion)
    assert set(FIELDS) - {"echo"} <= set(chat)
    assert chat["logprobs"]["anyOf"][0] == {"type": "boolean"}
    assert completion["max_tokens"]["description"] != chat["max_tokens"]["description"]
    assert "max_completion_tokens" in chat


def test_openai_s_fields_are_all_known():
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase as Chat
    from openai.types.completion_create_params import CompletionCreateParamsBase as Completion

    for theirs, ours in ((Completion, REQUESTS[0]), (Chat, REQUESTS[1])):
        assert {*theirs.__annotations__, "stream"} <= set(schemas.in_line(ours)["properties"])


GOOD = [
    {"prompt": "x"}, {"prompt": ["x", [1]], "n": 2}, {"prompt": [1, 2], "stop": None, "stream": True},
    {"prompt": "x", "logit_bias": {"5": -100}, "stop": ["a"], "seed": 2**64 - 1, "logprobs": 0, "echo": True},
    {"prompt": "x", "json": {"type": "object"}, "response_format": {"type": "text"}, "end_token_ids": 5},
    {"prompt": "x", "model": "toy", "priority": 0, "max_tokens": 255, "stop_token_ids": [256, [0, 1]]},
    {"prompt": "x", "structural_tag": {"triggers": ["<"], "structures": [{"begin": "<", "schema": True, "end": ""}]}},
    {"messages": USER, "tools": [], "tool_choice": "none", "stream": True, "stream_options": {"include_usage": True}},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "logprobs": True, "top_logprobs": 3},
    {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
    {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": None}}},
    {"messages": USER, "metadata": {"a": "b"}, "store": False, "max_completion_tokens": 5},
    {"prompt": "x", "top_p_min": None, "top_p_decay": 0.5, "top_p_reset_id": 1, "logprobs_mode": "raw"},
    {"prompt": "x", "max_tokens": 0, "echo": True, "logprobs": 1}, {"prompt": "x", "return_receipts": False},
    {"messages": USER, "logprobs": True, "logprobs_mode": "processed", "top_logprobs": 0},
]  # fmt: skip
BAD = [
    {}, {"prompt": 5}, {"prompt": []}, {"prompt": [1.5]}, {"prompt": [-1]}, {"prompt": "x", "temperature": -1},
    {"prompt": [-1, 5], "truncate_prompt_tokens": 1}, {"prompt": [257]}, {"prompt": "x", "max_tokens": 256},
    {"prompt": "x", "nobodys": 1}, {"prompt": "x", "stream": 1}, {"prompt": "x", "stop": [""]},
    {"prompt": "x", "logit_bias": {"5": 101}}, {"prompt": "x", "response_format": {"type": "x"}},
    {"prompt": "x", "logit_bias": [[5, 1]]}, {"prompt": "x", "logit_bias": {"a": 1}}, {"prompt": "x", "priority": 1},
    {"prompt": "x", "suffix": "y"}, {"prompt": "x", "embedding_bias": [0] * 256}, {"prompt": "x", "n": 129},
    {"prompt": "x", "logprobs": 101}, {"prompt": "x", "stop": "x" * 4097}, {"prompt": "x", "choice": ["a", "a"]},
    {"prompt": "x", "end_token_ids": [257]}, {"prompt": "x", "structural_tag": {"triggers": [], "structures": []}},
    {"prompt": "x", "response_format": {"type": "text", "x": 1}},
    {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "name": 1}}},
    {"prompt": "x", "top_p_min": 0.5}, {"prompt": "x", "top_p_reset_id": 1, "top_p_decay": None},
    {"prompt": "x", "json_whitespace": 1}, {"prompt": "x", "logprobs_mode": "processed"},
    {"prompt": "x", "stream_options": {}}, {"prompt": "x", "max_tokens": 0}, {"messages": USER, "top_logprobs": 2},
    {"messages": USER, "tool_choice": "auto"}, {"messages": [{"role": "user"}]},
    {"messages": []}, {"messages": [{"role": "user", "content": 5}]}, {"messages": USER, "top_logprobs": 21},
    {"messages": USER, "metadata": {"a": 1}}, {"messages": USER, "store": True}, {"messages": USER, "tool_choice": "x"},
    {"messages": USER, "functions": []}, {"messages": [{"role": "user", "content": "x", "y": 1}]},
    {"messages": USER, "tools": [5]}, {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    {"messages": USER, "tool_choice": {"type": "function", "function": {"name": "a", "x": 1}}},
]  # fmt: skip


@pytest.mark.parametrize("body", GOOD)
def test_what_is_taken_is_in_the_schema(llm, body):
    asked_of(llm, body)
    validator_of("messages" in body).validate(body)


@pytest.mark.parametrize("body", BAD)
def test_what_the_schema_forbids_is_refused(llm, body):
    refused(llm, body)
    assert not validator_of("messages" in body).is_valid(body)


def test_words_have_schemas_too(llm):
    read = {schemas.TokenizeRequest: tokenize_of, schemas.DetokenizeRequest: detokenize_of}
    for model, body, good in (
        (schemas.TokenizeRequest, {"prompt": "x"}, True), (schemas.TokenizeRequest, {"messages": USER}, True),
        (schemas.TokenizeRequest, {"messages": []}, False), (schemas.TokenizeRequest, {"prompt": 5}, False),
        (schemas.DetokenizeRequest, {"tokens": [0, 256]}, True), (schemas.DetokenizeRequest, {"tokens": []}, True),
        (schemas.DetokenizeRequest, {"tokens": [257]}, False), (schemas.DetokenizeRequest, {"tokens": [True]}, False),
    ):  # fmt: skip
        schema = bounded(schemas.in_line(model), OPTIONS, "toy", BOUNDS)
        assert jsonschema.Draft202012Validator(schema).is_valid(body) == good
        with contextlib.nullcontext() if good else pytest.raises(ApiError):
            read[model](body, llm, OPTIONS)


def references(part):
    """Every $ref in a document."""
    if isinstance(part, list):
        return [one for item in part for one in references(item)]
    if not isinstance(part, dict):
        return []
    own = [part["$ref"]] if isinstance(part.get("$ref"), str) else []
    return own + [one for item in part.values() for one in references(item)]


def test_the_document_is_whole(opened):
    named = opened["components"]["schemas"]
    assert {one.rsplit("/", 1)[1] for one in references(opened)} == set(named)
    assert all(one.startswith("#/components/schemas/") for one in references(opened))
    for schema in named.values():
        jsonschema.Draft202012Validator.check_schema({**schema, "components": opened["components"]})
    operations = [one for path in opened["paths"].values() for one in path.values()]
    assert len({one["operationId"] for one in operations}) == len(operations)
    for operation in operations:
        assert "422" not in operation["responses"]
        assert all(answer["description"] and answer["content"] for answer in operation["responses"].values())


def test_statuses_are_those_that_can_come(opened):
    def statuses(path):
        (operation,) = opened["paths"][path].values()
        return {int(status) for status in operation["responses"]}

    assert statuses("/v1/completions") == {200, 400, 401, 404, 408, 413, 415, 429, 500, 503}
    assert statuses("/v1/models") == {200, *ALWAYS, 503}
    assert statuses("/health") == statuses("/ready") == {200, 503}
    assert statuses("/metrics") == {200, *ALWAYS}


def test_bounds_are_those_of_the_server():
    options = ServerOptions(max_n=3, max_stop=2, max_logit_bias=5, max_logprobs=-1, max_prompts=7, api_key="k")
    opened = document(options, "other", Bounds(10, 20, takes_priority=True))
    body = opened["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = body["properties"]
    assert opened["security"] == [{"key": []}]
    assert opened["paths"]["/health"]["get"]["security"] == [{}]
    assert (fields["n"]["maximum"], fields["max_tokens"]["maximum"], fields["logprobs"]["minimum"]) == (3, 19, -1)
    assert fields["model"]["enum"] == ["other", None]
    assert fields["prompt"]["anyOf"][2]["maxItems"] == 7
    assert fields["allowed_token_ids"]["items"]["maximum"] == 9
    assert fields["priority"]["minimum"] == -(2**63)
    loading = document(options, "other")["paths"]["/v1/completions"]["post"]["requestBody"]
    assert "maximum" not in loading["content"]["application/json"]["schema"]["properties"]["max_tokens"]


def test_schemas_and_grammars_have_a_size(llm):
    options = ServerOptions(max_schema_bytes=20)
    for name, fits, beyond in (
        ("json", {"type": "object"}, {"title": "0123456789"}), ("regex", "a" * 20, "a" * 21),
        ("choice", ["a" * 19, "b"], ["a" * 20, "b"]),
        ("regex", "é" * 10, "é" * 10 + "a"), ("json", '{"type": "null"}', '{"type":    "object"}'),
    ):  # fmt: skip
        asked_of(llm, {"prompt": "x", name: fits}, options)
        error = refused(llm, {"prompt": "x", name: beyond}, options)
        assert error.param == name
        assert "at most 20 bytes" in error.message
    format_ = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"description": "long" * 9}}}
    assert refused(llm, {"messages": USER, "response_format": format_}, options).param == "response_format"
    with pytest.raises(OptionError, match="max_schema_bytes=262145: must be at most 262144"):
        ServerOptions(max_schema_bytes=2**18 + 1)
