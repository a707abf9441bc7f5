"""Neighbours of the server's cases: connections, paths and methods, and clients that leave."""

from __future__ import annotations

import json
import socket

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

from tests.faults.served import CHAT, COMPLETIONS


def connected(stage):
    """A connection to the server."""
    host, port = stage.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def request(body, version="1.1", more=(), path=COMPLETIONS, kind="application/json"):
    """The bytes of a POST of a body, or of bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Type: {kind}", *more]
    return "\r\n".join([*head, f"Content-Length: {len(data)}", "", ""]).encode() + data


def test_a_client_that_leaves_while_it_waits_is_never_computed_for(stage):
    gate, before, asked = stage.close_gate(), len(stage.model.seen), stage.aio.num_asked
    many = {"prompt": [1], "n": 16, "max_tokens": 3, "ignore_eos": True, "stream": True}
    with stage.http.stream("POST", stage.url + COMPLETIONS, json=many) as first:
        stage.wait_for_steps(before + 1)
        gate.release()
        stage.wait_for_steps(before + 2)
        for number, stream in enumerate((True, False), 2):
            with connected(stage) as client:
                client.sendall(request({"prompt": [2], "max_tokens": 3, "stream": stream}))
                stage.wait_until_asked(asked + number)
            stage.wait_for_running(1)
        gate.release(100)
        first.read()
    stage.all_free()
    assert stage.model.seen[before:] == [16, 16, 16]


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/v1/models/toy", "/metrics"])
def test_what_may_be_got_may_be_asked_for_its_head(stage, path):
    """Balancers look whether a server lives by HEAD."""
    answer = stage.http.head(stage.url + path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"] == stage.get(path).headers["content-type"]


NOWHERE = ["/v1/completions/", "/v1/chat/completions/", "/v1/models/", "/health/", "/tokenize/", "//evil.example/v1"]


@pytest.mark.parametrize("path", NOWHERE)
def test_a_path_that_is_none_is_told_and_leads_nowhere(stage, path):
    """A redirection would carry the request, and its key, to wherever the Host header says, and without TLS."""
    for method in ("GET", "POST") if path != "/v1/models/" else ("GET",):
        answer = stage.http.request(method, stage.url + path, headers={"host": "evil.example"}, json={"prompt": [1]})
        assert (answer.status_code, "location" in answer.headers) == (404, False)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


METHODS = [
    ("OPTIONS", COMPLETIONS, "POST"), ("PUT", CHAT, "POST"), ("DELETE", "/v1/models", "GET"), ("HEAD", CHAT, "POST"),
]  # fmt: skip


@pytest.mark.parametrize("method, path, allow", METHODS)
def test_methods_that_are_none(stage, method, path, allow):
    answer = stage.http.request(method, stage.url + path, headers={"origin": "http://evil.example"})
    assert (answer.status_code, answer.headers["allow"]) == (405, allow)
    assert not any(name.startswith("access-control") for name in answer.headers)


KINDS = [
    ("application/json; charset=utf-8", 200), ("APPLICATION/JSON", 200), ("application/problem+json", 200),
    ("text/json", 415), ("multipart/form-data", 415), ("", 415),
]  # fmt: skip


@pytest.mark.parametrize("kind, status", KINDS)
def test_what_a_body_is_called(stage, kind, status):
    answer = stage.post(COMPLETIONS, b'{"prompt": [1], "max_tokens": 1}', headers={"content-type": kind})
    assert answer.status_code == status


def read(client, until):
    """What comes on a connection, up to and with `until`, or its end."""
    got = b""
    while until not in got and (part := client.recv(2**16)):
        got += part
    return got


def raw(stage, data, until=b"[DONE]"):
    """What a server sends for these bytes."""
    with connected(stage) as client:
        client.sendall(data)
        return read(client, until)


NOTHING = b"read to the end of the connection"
STREAM = {"prompt": [1], "max_tokens": 2, "stream": True, "seed": 1}


def test_a_request_behind_another_is_no_leaving_and_disturbs_nothing(stage):
    """It was sent before the first was answered. It is not read, and not computed: the connection ends behind the
    first answer, which is whole."""
    asked = stage.aio.num_asked
    got = raw(stage, request(STREAM) + request({**STREAM, "stream": False}), until=NOTHING)
    assert got.count(b"HTTP/1.1 200") == got.count(b"data: [DONE]") == 1
    assert stage.aio.num_asked == asked + 1


def test_a_client_of_the_older_protocol_reads_a_stream_to_the_end_of_the_connection(stage):
    """Proxies speak it; chunks are not known there."""
    got = raw(stage, request(STREAM, "1.0"), until=NOTHING)
    assert b"transfer-encoding" not in got.lower()
    assert got.endswith(b"data: [DONE]\n\n")


def test_a_body_is_sent_once_the_server_asks_for_it(stage):
    data = request(STREAM, more=["Expect: 100-continue"])
    got = raw(stage, data)
    assert got.startswith(b"HTTP/1.1 100 ")
    assert b"data: [DONE]" in got


LARGE = {"prompt": "x" * 300_000}
REFUSED = {
    "no such path": (request(LARGE, path="/nothing"), b"404"), "cut off": (request(b"{"), b"400"),
    "no such method": (request(LARGE, path="/health"), b"405"), "no JSON": (request(LARGE, kind="text/plain"), b"415"),
    "too long": (request(LARGE), b"400"), "too large": (request(b" " * (4 * 2**20 + 1)), b"413"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_the_next_request_on_a_connection_is_answered_or_the_connection_ends(stage, name):
    """Whatever the first was refused for. It ends, and says so, only where the body of the first was not read."""
    first, status = REFUSED[name]
    with connected(stage) as client:
        client.sendall(first)
        answer = read(client, b"}}")
        assert answer.startswith(b"HTTP/1.1 " + status)
        ends = b"connection: close" in answer
        assert not ends or name in ("no such method", "too large")
        if not ends:
            client.sendall(request({**STREAM, "stream": False}))
            assert read(client, b'"usage"').startswith(b"HTTP/1.1 200")
