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


def test_the_log_may_say_more():
    assert errors.error_of(OSError("/home/x")).detail == "OSError: /home/x"


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
