"""Schemas: what OpenAPI says of bodies is what the server takes."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("jsonschema")

import jsonschema
from tests.server.toys import USER, asked_of, refused, toy

from klero.server import schemas
from klero.server.fields import FIELDS

REQUESTS = (
    schemas.CompletionRequest, schemas.ChatCompletionRequest, schemas.TokenizeRequest, schemas.DetokenizeRequest,
)  # fmt: skip


@pytest.fixture(scope="module")
def llm():
    return toy()


@pytest.mark.parametrize("model", REQUESTS)
def test_a_body_s_schema_stands_alone_and_names_every_field(model):
    body = schemas.request_body(model)["requestBody"]
    schema = body["content"]["application/json"]["schema"]
    assert body["required"]
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
    {"messages": USER, "tools": [], "tool_choice": "none", "stream": True, "stream_options": {"include_usage": True}},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "logprobs": True, "top_logprobs": 3},
    {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
    {"messages": USER, "metadata": {"a": "b"}, "store": False, "max_completion_tokens": 5},
]  # fmt: skip
BAD = [
    {}, {"prompt": 5}, {"prompt": []}, {"prompt": [1.5]}, {"prompt": [-1]}, {"prompt": "x", "temperature": -1},
    {"prompt": "x", "nobodys": 1}, {"prompt": "x", "stream": 1}, {"prompt": "x", "stop": [""]},
    {"prompt": "x", "logit_bias": {"5": 101}}, {"prompt": "x", "response_format": {"type": "x"}},
    {"prompt": "x", "suffix": "y"},
    {"messages": []}, {"messages": [{"role": "user", "content": 5}]}, {"messages": USER, "top_logprobs": 21},
    {"messages": USER, "metadata": {"a": 1}}, {"messages": USER, "store": True}, {"messages": USER, "tool_choice": "x"},
    {"messages": USER, "functions": []}, {"messages": [{"role": "user", "content": "x", "y": 1}]},
]  # fmt: skip


@pytest.mark.parametrize("body", GOOD)
def test_what_is_taken_is_in_the_schema(llm, body):
    asked_of(llm, body)
    jsonschema.validate(body, schemas.in_line(REQUESTS["messages" in body]))


@pytest.mark.parametrize("body", BAD)
def test_what_the_schema_forbids_is_refused(llm, body):
    refused(llm, body)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(body, schemas.in_line(REQUESTS["messages" in body]))
