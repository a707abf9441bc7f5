"""Errors: which exception comes to which status, and what of it a client may read."""

from __future__ import annotations

import pytest

pytest.importorskip("pydantic")

from klero.errors import (
    Fault,
    GrammarError,
    KleroError,
    ModelError,
    ParameterError,
    QueueFullError,
    RequestError,
    SlotError,
)
from klero.server import errors
from klero.server.bodies import parsed
from klero.server.schemas import ChatCompletionRequest, DetokenizeRequest


def ended():
    """What AsyncLLM raises once its thread has ended."""
    try:
        raise RequestError("the engine's thread has ended: OSError: /home/x") from KleroError("it has ended")
    except RequestError as error:
        return error


@pytest.mark.parametrize(
    "error, status, param, words",
    [
        (ParameterError([Fault("top_p", 2, "must be less")]), 400, "top_p", "top_p=2: must be less"),
        (GrammarError([Fault("json", "{}", "allows no text")]), 400, "response_format", "response_format='{}': allows"),
        (RequestError("request-0a1b-7: the prompt is empty"), 400, None, "the prompt is empty"),
        (QueueFullError("1024 requests wait"), 429, None, "ask again later"),
        (ended(), 503, None, "the engine has ended; ask again later"),
        (KleroError("/home/x"), 500, None, "its log says why"),
        (ModelError("/home/x"), 500, None, "its log says why"),
        (SlotError("/home/x"), 500, None, "its log says why"),
        (ZeroDivisionError("/home/x"), 500, None, "its log says why"),
        (errors.too_large(7), 413, None, "larger than 7 bytes"),
    ],
)
def test_what_a_client_is_told(error, status, param, words):
    told = errors.error_of(error, {"json": "response_format"})
    body = told.body()["error"]
    assert (told.status, body["param"]) == (status, param)
    assert set(body) == {"message", "type", "param", "code"}
    assert words in body["message"]
    assert "home" not in str(body)
    assert "request-0a1b" not in body["message"]
    assert body["type"] == {429: "rate_limit_error", 500: "server_error", 503: "server_error"}.get(
        status, "invalid_request_error"
    )


def test_headers_say_what_to_do():
    assert errors.queue_full().headers == {"Retry-After": "1"}
    assert errors.unavailable().headers == {"Retry-After": "1"}
    assert errors.method_not_allowed("POST").headers == {"Allow": "POST"}
    assert errors.unauthorized().headers == {"WWW-Authenticate": "Bearer"}
    statuses = [errors.unauthorized(), errors.model_not_found("x"), errors.not_found(), errors.internal()]
    assert [(error.status, error.code) for error in statuses] == [
        (401, "invalid_api_key"), (404, "model_not_found"), (404, "not_found"), (500, "internal_error"),
    ]  # fmt: skip


def test_every_fault_is_told_once_and_very_many_are_counted():
    twice = [Fault("a", 1, "is wrong"), Fault("a", 1, "is wrong"), Fault("b", 2, "too")]
    assert errors.refusal_of(twice).message == "a=1: is wrong; b=2: too"
    many = errors.refusal_of([Fault(f"f{i}", i, "no") for i in range(1000)])
    assert many.message.endswith("; f63=63: no; and 936 more faults")
    assert many.param == "f0"


def tool(**fields):
    return {"type": "function", "function": {"name": "f", **fields}}


@pytest.mark.parametrize(
    "body, words",
    [
        ({"messages": [5]}, ["messages[0]=5: must be an object"]),
        ({"messages": [{"role": "u", "content": "x", "y": 1}]}, ["messages[0].y=1: is not known here; leave it out"]),
        (
            {"messages": [{"content": "x", "name": "n" * 257}]},
            ["messages[0].role: is missing", "is too long; the greatest length is 256"],
        ),
        (
            {"messages": [{"role": "", "content": [{"type": "image_url"}]}]},
            [
                "messages[0].role='': is too short; the least length is 1",
                "messages[0].content[0].type='image_url': must be 'text'",
                "messages[0].content[0].text: is missing",
            ],
        ),
        (
            {"tools": [tool(name="a b"), tool(strict=1), tool(parameters=[]), {"type": "x", "function": 5}]},
            [
                "tools[0].function.name='a b': must match ^[a-zA-Z0-9_-]{1,64}$",
                "tools[1].function.strict=1: must be true or false",
                "tools[2].function.parameters=[]: must be an object",
                "tools[3].type='x': must be 'function'", "tools[3].function=5: must be an object",
            ],
        ),
        ({"priority": 1.5, "user": 5}, ["priority=1.5: must be an integer", "user=5: must be a text"]),
        ({"tokens": 5}, ["tokens=5: must be a list"]),
        ({"tokens": [1, "x"]}, ["tokens[1]='x': must be an integer"]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_body_is_said_in_klero_s_words(body, words):
    model = DetokenizeRequest if "tokens" in body else ChatCompletionRequest
    beside = {} if "tokens" in body else {"messages": [{"role": "user", "content": "x"}]}
    _, faults = parsed({**beside, **body}, model)
    message = errors.refusal_of(faults).message
    assert [one for one in words if one not in message] == []
    assert len(faults) == len(words)
