"""Bodies that nobody means: each is refused, its fields are named, soon; and the next request is served as before."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import socket
import time

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("jsonschema")

import httpx2
import jsonschema
from hypothesis import given
from hypothesis import strategies as st
from tests.server.toys import OPTIONS, toy

from klero.server.asked import Asked, chat_of, completion_of, detokenize_of, read_body, tokenize_of
from klero.server.errors import ApiError
from klero.server.openapi import Bounds, document

SOON = 10.0  # seconds for an answer to the worst of bodies beside other tests; alone the slowest takes 1.5
HELLO = {"prompt": "Hello", "seed": 5, "max_tokens": 6}
ROUTES = {
    "/v1/completions": completion_of, "/v1/chat/completions": chat_of, "/tokenize": tokenize_of,
    "/detokenize": detokenize_of,
}  # fmt: skip
DOCUMENT = document(OPTIONS, "toy", Bounds(257, 256, takes_priority=False))
RIGHT = {
    "/v1/completions": {"prompt": '"x"'}, "/v1/chat/completions": {"messages": '[{"role": "user", "content": "x"}]'},
    "/tokenize": {"prompt": '"x"'}, "/detokenize": {"tokens": "[1]"},
}  # fmt: skip
JSON = [
    "null", "true", "false", "0", "-1", "1", "1.5", "-0.5", "-0.0", "1e-400", "1e308", "9" * 400, '""', '"x"', '"5"',
    '"\\u0000"', '"' + "a" * 5000 + '"', "[]", "[[]]", "[null]", "[true]", "[1.5]", "[-1]", "[1, 1]", '["", "x"]',
    "[257]", "[" + "9" * 400 + "]", "{}", '{"a": null}', '{"5": true}', '{"5": 1e300}', '{"-5": 1}', '{"type": "x"}',
    '{"type": ["text"]}', '[{"role": 5}]', '[{"role": "user", "content": [5]}]', "[[1, [2]]]", '{"role": "user"}',
    "[" + "1," * 5000 + "1]", "{" + ",".join(f'"{i}": 1' for i in range(5000)) + "}",
]  # fmt: skip
"""Values of every kind; which are wrong for a field its schema says."""
MEANINGLESS = {
    "NaN": "is no number of JSON", "[1, -Infinity]": "is no number of JSON", "1e400": "is beyond binary64",
    '{"5": -1e999}': "is beyond binary64", "9" * 5000: "is an integer of 5000 digits",
    "[-" + "8" * 5000 + "]": "is an integer of 5001 digits", '"\\ud800"': "half of a surrogate pair",
    '[["x\\udfffx"]]': "half of a surrogate pair", '{"\\ud800": 1}': "half of a surrogate pair",
    '{"a": 1, "a": 2}': "is twice a key", '[{"a": {"b": 1, "b": 1}}]': "is twice a key",
    "[" * 200 + "]" * 200: "is nested more than 128 deep", '{"a":' * 150 + "1" + "}" * 150: "nested more than 128 deep",
}  # fmt: skip
"""Values that no field takes, and what is said of them."""


@pytest.fixture(scope="module")
def llm():
    return toy(max_model_len=256)


def body_of(literals):
    """A body of fields as JSON texts."""
    return ("{" + ",".join(f"{json.dumps(name)}: {literal}" for name, literal in literals.items()) + "}").encode()


def answer_to(llm, path, body):
    """What a body comes to: what it asks, or the error that refuses it."""
    try:
        return ROUTES[path](read_body(body), llm, OPTIONS)
    except ApiError as error:
        return error


def properties_of(path):
    """The schema of each field; that of a model's name is the route's to check."""
    body = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return {**body["properties"], "model": {"type": ["string", "null"]}}


def is_wrong(schema, literal):
    return literal in MEANINGLESS or not jsonschema.Draft202012Validator(schema).is_valid(json.loads(literal))


def names(message, field):
    return re.search(rf"(^|; ){re.escape(field)}(=|\.|\[|: )", message) is not None


VALUES = [*JSON, *MEANINGLESS]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("each", [8, pytest.param(1, marks=pytest.mark.deep)])
def test_each_field_refuses_and_names_each_value_that_is_wrong(llm, path, each):
    """Field by field, value by value: an eighth of them, another for each field, or all."""
    checked = 0
    for i, (name, schema) in enumerate(properties_of(path).items()):
        for literal in VALUES[i % each :: each]:
            answer = answer_to(llm, path, body_of({**RIGHT[path], name: literal}))
            if is_wrong(schema, literal):
                checked += 1
                assert isinstance(answer, ApiError), (name, literal[:80])
                assert answer.status == 400
                assert names(answer.message, name), (name, literal[:80], answer.message)
                assert MEANINGLESS.get(literal, "") in answer.message
                assert not re.search(r"should|valid |permitted|instance", answer.message), answer.message
                assert len(answer.message) < 10_000
            json.dumps(answer.message if isinstance(answer, ApiError) else "", allow_nan=False).encode()
    assert checked * each > 20 * len(properties_of(path))


@st.composite
def bodies(draw):
    """A route, and fields of it with values of any kind."""
    path = draw(st.sampled_from(list(ROUTES)))
    values = st.sampled_from(VALUES)
    return path, draw(st.dictionaries(st.sampled_from(list(properties_of(path))), values, max_size=12))


@given(bodies(), st.dictionaries(st.sampled_from(["nobodys", "temprature", "é", "a" * 64]), st.just("1")))
def test_a_body_with_several_wrong_fields_names_all(llm, body, unknown):
    path, fields = body
    answer = answer_to(llm, path, body_of({**RIGHT[path], **fields, **unknown}))
    wrong = [name for name, literal in fields.items() if is_wrong(properties_of(path)[name], literal)]
    wrong += unknown
    if wrong:
        assert isinstance(answer, ApiError)
        assert (answer.status, answer.type) == (400, "invalid_request_error")
        assert [name for name in wrong if not names(answer.message, name)] == []
    elif isinstance(answer, ApiError):
        assert answer.status == (404 if answer.param == "model" else 400)
        assert any(names(answer.message, name) for name in properties_of(path)), answer.message
    else:
        assert isinstance(answer, Asked | dict)


@pytest.mark.deep
@given(bodies())
def test_many_bodies(llm, body):
    test_a_body_with_several_wrong_fields_names_all.hypothesis.inner_test(llm, body, {})


def test_a_name_that_comes_twice_or_is_no_text_is_told_beside_the_others(llm):
    raw = b'{"prompt": "x", "seed": 1, "seed": 1, "\\ud800": 1, "top_p": NaN, "n": 0}'
    error = answer_to(llm, "/v1/completions", raw)
    assert "seed=...: is twice in the body" in error.message
    assert all(names(error.message, name) for name in ("seed", "\\ud800", "top_p", "n"))


FILL = 2**22 - 100  # bytes, just below the limit


def json_of(**body):
    return json.dumps(body).encode()


WORST = {
    "lists, deep": lambda: b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "objects, deep": lambda: b'{"logit_bias": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    "lists, deep, without an end": lambda: b'{"stop": ' + b"[" * FILL,
    "a million digits": lambda: b'{"prompt": "x", "seed": ' + b"9" * 10**6 + b"}",
    "a million digits behind a point": lambda: b'{"prompt": "x", "n": 0.' + b"9" * 10**6 + b"}",
    "10,000 stop strings": lambda: json_of(prompt="x", stop=[f"stop {i}" for i in range(10_000)]),
    "a long stop string": lambda: json_of(prompt="x", stop="s" * (FILL - 40)),
    "1 MB of bias": lambda: json_of(prompt="x", logit_bias={str(i): 1 for i in range(80_000)}),
    "a long prompt": lambda: json_of(prompt="x" * (FILL - 20)),
    "a long prompt of ids": lambda: json_of(prompt=[7] * 1_300_000),
    "an unknown field with a long name": lambda: json_of(prompt="x", **{"temperatura" * 300_000: 1}),
    "messages with unknown fields": lambda: json_of(messages=[{f"x{i}": 1 for i in range(200)}] * 1400),
    "a message with a long name": lambda: json_of(messages=[{"role": "user", "x" * 4_000_000: 1}]),
    "UTF-16": lambda: json.dumps(HELLO).encode("utf-16"),
    "UTF-16 without a mark": lambda: json.dumps(HELLO).encode("utf-16-le"),
    "a mark of UTF-8": lambda: b"\xef\xbb\xbf" + json.dumps(HELLO).encode(),
    "no UTF-8": lambda: b'{"prompt": "\xff"}',
    "half a character": lambda: b'{"prompt": "\xc3"}',
    "surrogates in UTF-8": lambda: b'{"prompt": "\xed\xa0\x80"}',
}
WORST_TOO = {
    "many integers of many digits": lambda: b'{"prompt": [' + b",".join([b"9" * 4000] * 1000) + b"]}",
    "long stop id sequences": lambda: json_of(prompt="x", stop_token_ids=[[1] * 2000] * 690),
    "long bad words": lambda: json_of(prompt="x", bad_words=["a b" * 250] * 5000),
    "a list as bias": lambda: json_of(prompt="x", logit_bias=[[i % 257, 1] for i in range(300_000)]),
    "many ids": lambda: json_of(prompt="x", allowed_token_ids=[300] * 800_000),
    "many biases": lambda: json_of(prompt="x", embedding_bias=[0.5] * 800_000),
    "many choices of text": lambda: json_of(prompt="x", choice=["a"] * 800_000),
    "a large schema": lambda: json_of(prompt="x", json={"enum": [0] * 1_000_000}),
    "very many prompts": lambda: json_of(prompt=["x"] * 800_000),
    "unknown fields": lambda: ("{" + ",".join(f'"x{i}":1' for i in range(300_000)) + "}").encode(),
    "messages that are none": lambda: json_of(messages=[5] * 800_000),
    "parts that are none": lambda: json_of(messages=[{"role": "user", "content": [{}] * 900_000}]),
    "calls that are none": lambda: json_of(messages=[{"role": "a", "tool_calls": [{}] * 900_000}]),
    "tools that are none": lambda: json_of(messages=[], tools=[{"type": "x"}] * 200_000),
}
"""The same, of what costs a second to make and to refuse."""


@pytest.fixture(scope="module")
def before(live):
    return live.complete(**HELLO)["choices"]


@pytest.mark.parametrize("kind", [*WORST, *(pytest.param(kind, marks=pytest.mark.deep) for kind in WORST_TOO)])
def test_the_worst_of_bodies_are_refused_soon(live, before, kind):
    body = (WORST | WORST_TOO)[kind]()
    assert len(body) <= 2**22
    began = time.monotonic()
    answer = live.post(path_of(body), body)
    assert time.monotonic() - began < SOON
    assert answer.status_code == 400, answer.text[:200]
    assert len(answer.content) < 20_000
    assert live.complete(**HELLO)["choices"] == before


def path_of(body):
    return "/v1/chat/completions" if b'"messages"' in body[:20] else "/v1/completions"


@pytest.mark.deep
def test_many_of_them_at_once_do_not_take_the_server_down(live, before):
    """64 bodies of 4 MB at a time, three of each kind."""
    made = [body() for body in (WORST | WORST_TOO).values()] * 3
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda body: httpx2.post(
            live.url + path_of(body), content=body, headers={"content-type": "application/json"}, timeout=120
        ).status_code, made))  # fmt: skip
        assert live.complete(**HELLO)["choices"] == before
    assert set(answers) == {400}
    live.all_free()


def test_a_body_beyond_the_limit_is_a_413(live):
    answer = live.post("/v1/completions", b'{"prompt": "' + b"x" * 2**22 + b'"}')
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def exchange(live, data):
    """What a server answers to bytes: statuses and bodies. It must close the connection, as the last request asks."""
    host, port = live.url.removeprefix("http://").split(":")
    received = bytearray()
    with socket.create_connection((host, int(port)), timeout=SOON) as connection:
        connection.sendall(data)
        with contextlib.suppress(ConnectionResetError):  # it closes without having read what it refuses
            while chunk := connection.recv(65536):
                received += chunk
    answers = []
    while received:
        head, _, rest = bytes(received).partition(b"\r\n\r\n")
        length = int(re.search(rb"(?i)content-length: ([0-9]+)", head)[1])
        answers.append((int(head.split()[1]), json.loads(rest[:length])))
        received = rest[length:]
    return answers


def request(*headers, body=b"", line="POST /tokenize HTTP/1.1", last=True):
    """The bytes of a request. last: the server is to close the connection behind its answer."""
    lines = [line, "Host: x", "Content-Type: application/json", *headers, *(["Connection: close"] if last else [])]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


HI = b'{"prompt": "Hi"}'
LENGTH = f"Content-Length: {len(HI)}"
SPOKEN = {
    "chunks": (
        request("Transfer-Encoding: chunked", body=b"8\r\n%b\r\n8\r\n%b\r\n0\r\n\r\n" % (HI[:8], HI[8:])), [200]),
    "two at once": (request(LENGTH, body=HI, last=False) * 2, [200]),  # the second is not read: closed after the first
    "one that is none behind": (request(LENGTH, body=HI, last=False) + b"no HTTP", [200]),
    "HTTP/1.0": (request(LENGTH, body=HI, line="POST /tokenize HTTP/1.0", last=False), [200]),
    "chunks of no number": (request("Transfer-Encoding: chunked", body=b"x\r\n" + HI), [400]),
    "a length that is none": (request("Content-Length: many", body=HI), [400]),
    "a length below 0": (request("Content-Length: -1", body=HI), [400]),
    "a length beyond 64 bits": (request("Content-Length: " + "9" * 30, body=HI), [400]),
    "a length that is too large": (request("Content-Length: 99999999", body=HI), [413]),
    "two lengths": (request(LENGTH, "Content-Length: 3", body=HI), [400]),
    "a length and chunks": (request(LENGTH, "Transfer-Encoding: chunked", body=b"0\r\n\r\n"), [400]),
    "a length that is too small": (request("Content-Length: 3", body=HI), [400]),
    "packed": (request(LENGTH, "Content-Encoding: gzip", body=HI), [415]),
    "no body": (request(), [400]),
    "no HTTP": (b"\x16\x03\x01\x00\xff\r\n\r\n", [400]),
    "an unknown method": (request(line="FETCH /tokenize HTTP/1.1"), [400]),
    "a header that is none": (request("no header", LENGTH, body=HI), [400]),
    "long headers": (request(*[f"X-{i}: {'x' * 1000}" for i in range(100)], LENGTH, body=HI), [400]),
    "a long path": (request(LENGTH, body=HI, line=f"POST /{'x' * 2**17} HTTP/1.1"), [400]),
    "an upgrade": (request(LENGTH, "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__", body=HI), [200]),
    "another address": (request(LENGTH, body=HI, line="POST http://other/tokenize HTTP/1.1"), [200]),
    "a slash too many": (request(LENGTH, body=HI, line="POST /tokenize/ HTTP/1.1"), [404]),
    "a byte too many in the path": (request(LENGTH, body=HI, line="POST /tokenize%ff HTTP/1.1"), [404]),
}  # fmt: skip


@pytest.mark.parametrize("kind", SPOKEN)
def test_http_is_spoken_strictly(live, before, kind):
    data, statuses = SPOKEN[kind]
    answers = exchange(live, data)
    assert [status for status, _ in answers] == statuses, answers
    for status, body in answers:
        if status == 200:
            assert body["tokens"] == [39, 72]
        else:
            assert set(body["error"]) == {"message", "type", "param", "code"}
    assert live.complete(**HELLO)["choices"] == before
