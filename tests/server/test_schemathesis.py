"""Schemathesis: requests made from the OpenAPI document, right ones and wrong ones, over a socket.

No answer is a 5xx, each is one of those documented, in its shape, in time; what the document forbids is refused; and of
what it allows a good part is served, else it would be looser than the rules.
"""

from __future__ import annotations

import copy
import importlib.util
import time
from collections import Counter

import pytest

if importlib.util.find_spec("schemathesis") is None:
    pytest.skip("schemathesis is not installed", allow_module_level=True)

import jsonschema
from hypothesis import HealthCheck, Phase, assume, given, settings
from tests.server.live import events_of

from klero.server import ServerOptions
from klero.server.openapi import Bounds, document
from klero.server.prompts import ROLES

LONGEST = 5.0  # seconds for an answer, streams to their end
SHORT = Bounds(257, 33, takes_priority=False)  # of right requests, so that answers come soon
RIGHT, WRONG = "positive", "negative"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
SHARES = {
    (COMPLETIONS, RIGHT): 60, (COMPLETIONS, WRONG): 30, (CHATS, RIGHT): 50, (CHATS, WRONG): 10,
    ("/tokenize", RIGHT): 14, ("/tokenize", WRONG): 10, ("/detokenize", RIGHT): 12, ("/detokenize", WRONG): 8,
    ("/v1/models/{name}", RIGHT): 2,
    ("/v1/models", RIGHT): 1, ("/health", RIGHT): 1, ("/ready", RIGHT): 1, ("/metrics", RIGHT): 1,
}  # fmt: skip
"""Of 200 requests."""
SERVED = {COMPLETIONS: 0.45, CHATS: 0.45, "/tokenize": 0.6, "/detokenize": 0.95}
"""Of the right ones at least so many are served: the rest breaks rules that a schema cannot say."""


@pytest.fixture(scope="module")
def documents(live):
    """The document of the server, and one with lower limits."""
    served = live.get("/openapi.json").json()
    lower = document(ServerOptions(max_n=3, max_prompts=3, max_logprobs=5), "toy", SHORT)
    return {WRONG: served, RIGHT: as_the_template_has_it(lower)}


def as_the_template_has_it(document):
    """The same, of a model whose chat template knows no calls of earlier turns and no role of its own, as the toy's."""
    document = copy.deepcopy(document)
    for path in (CHATS, "/tokenize"):
        (body,) = document["paths"][path]["post"]["requestBody"]["content"].values()
        messages = body["schema"]["properties"]["messages"]
        message = messages.get("anyOf", [messages])[0]["items"]
        message["properties"] |= {"tool_calls": {"type": "null"}, "role": {"enum": list(ROLES)}}
        message["anyOf"].pop()
    return document


def simplified(document):
    """The same without the rules between fields, of which Schemathesis can make no requests."""
    document = copy.deepcopy(document)
    for path in (COMPLETIONS, CHATS):
        document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"].pop("allOf")
    return document


def validator_of(document, path):
    """Whether a body follows the document in full."""
    (operation,) = document["paths"][path].values()
    if "requestBody" not in operation:
        return lambda body: True
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    return jsonschema.Draft202012Validator(schema).is_valid


def whole_numbers(value):
    """A body whose 5.0 are 5: JSON Schema has no word for the difference, and the rules ask for it."""
    if isinstance(value, list):
        return [whole_numbers(item) for item in value]
    if isinstance(value, dict):
        return {name: whole_numbers(item) for name, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def test_there_are_200_requests():
    assert sum(SHARES.values()) == 200


def checked():
    """What is asked of every answer."""
    import schemathesis
    from schemathesis.specs.openapi import checks

    return [
        schemathesis.checks.not_a_server_error, checks.status_code_conformance, checks.content_type_conformance,
        checks.response_headers_conformance, checks.response_schema_conformance, checks.negative_data_rejection,
    ]  # fmt: skip


def is_expected(answer):
    """Whether a wrong body was too large, or a request forbids itself every token, which only its choice can tell: the
    one 500 there may be."""
    if answer.status_code == 413:
        return answer.json()["error"]["code"] == "body_too_large"
    return answer.status_code == 500 and "no token is left for position" in answer.json()["error"]["message"]


def ask(live, path, mode, document, num):
    """Ask so many requests of a path; the statuses of the answers."""
    import schemathesis  # here: a worker that does not run it need not load it

    is_right = validator_of(document, path)
    config = schemathesis.Config.from_dict({"max-stream-events": 10**6})  # streams are read to their end
    loaded = schemathesis.openapi.from_dict(simplified(document), config=config)
    (method,) = document["paths"][path]
    strategy = loaded[path][method.upper()].as_strategy(generation_mode=schemathesis.GenerationMode(mode))
    statuses = Counter()  # and how many of the answers were streams

    @settings(
        max_examples=num, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def one(case):
        if mode == RIGHT:
            case.body = whole_numbers(case.body)
            if path in (COMPLETIONS, CHATS):
                vary(case.body, statuses.total())
            assume(is_right(case.body))
        began = time.monotonic()
        answer = case.call(base_url=live.url, timeout=LONGEST)
        assert time.monotonic() - began < LONGEST
        if not is_expected(answer):
            case.validate_response(answer, checks=checked())
        if answer.headers["content-type"][0].startswith("text/event-stream"):
            check_events(document, path, events_of(answer.text))
            statuses["streams"] += 1
        statuses[answer.status_code] += 1

    one()
    return statuses


def test_the_document_follows_openapi_s_own_schema(documents):
    import schemathesis

    opened = documents[WRONG]
    schemathesis.openapi.from_dict(opened).validate()
    with pytest.raises(Exception, match=r"5|responses"):
        schemathesis.openapi.from_dict({**opened, "paths": {"/": {"get": {"responses": 5}}}}).validate()


def check_events(document, path, events):
    """A stream ends with [DONE] or an error, and all else in it is in the document's shape."""
    answers = document["paths"][path]["post"]["responses"]["200"]["content"]
    content = answers["text/event-stream"]["schema"]["properties"]["data"]["anyOf"][1]["contentSchema"]
    schema = {**content, "components": document["components"]}
    if events[-1] == "[DONE]":
        events.pop()
    else:
        assert set(events[-1]) == {"error"}
    for event in events:
        jsonschema.Draft202012Validator(schema).validate(event)


@pytest.mark.parametrize("path, mode", SHARES)
def test_answers_are_as_documented(live, documents, path, mode):
    statuses = ask(live, path, mode, documents[mode], SHARES[path, mode])
    print(path, mode, dict(statuses))
    check_share(path, mode, statuses)
    live.all_free()


def vary(body, number):
    """Make every other answer a stream, and no long ones where no length is asked for."""
    if number % 2:
        body["stream"] = True
    if all(body.get(name) is None for name in ("max_tokens", "max_completion_tokens", "min_tokens")):
        body["max_tokens"] = 8
        body.pop("max_completion_tokens", None)


def check_share(path, mode, statuses):
    if mode is WRONG:
        assert not statuses[200]
    elif path in SERVED:
        num_streams = statuses.pop("streams", 0)
        assert statuses[200] >= SERVED[path] * statuses.total(), statuses
        assert num_streams or path not in (COMPLETIONS, CHATS)


@pytest.mark.deep
@pytest.mark.parametrize("path, mode", SHARES)
def test_ten_times_as_many(live, documents, path, mode):
    statuses = ask(live, path, mode, documents[mode], 10 * SHARES[path, mode])
    print(path, mode, dict(statuses))
    check_share(path, mode, statuses)
    live.all_free()
