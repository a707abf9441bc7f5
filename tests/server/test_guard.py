"""What is refused before a route is asked: keys, sizes, numbers, and clients that dawdle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import socket
import threading
import time

import httpx2
import pytest
from tests.engine.gated import Gated
from tests.server.live import Live, toy

from klero.server.guard import Guard, Labels
from klero.testing.models import ToyModel

COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}
SHORT = {"prompt": "x", "max_tokens": 1}


@pytest.fixture(scope="module")
def strict():
    """A server with a key and small limits."""
    with Live(api_key="sesame", max_body_bytes=1000, read_timeout=0.3, max_concurrency=2) as live:
        yield live


def bearer(key):
    return {"authorization": f"Bearer {key}"}


WRONG = [
    {}, bearer("wrong"), bearer("sesame2"), bearer("sesam"), {"authorization": "sesame"},
    {"authorization": "Basic sesame"}, {"authorization": b"Bearer \xff"},
]  # fmt: skip


@pytest.mark.parametrize("headers", WRONG)
@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize", "/nothing"])
def test_without_the_key_nothing_is_told(strict, path, headers):
    answer = strict.post(path, SHORT, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert "sesame" not in answer.text
    assert answer.headers["www-authenticate"] == "Bearer"


def test_with_the_key_it_answers(strict):
    assert strict.post(COMPLETIONS, SHORT, headers=bearer("sesame")).status_code == 200
    assert strict.post(COMPLETIONS, SHORT, headers={"authorization": "bearer  sesame"}).status_code == 200
    assert strict.get("/v1/models").status_code == 401
    assert strict.get("/metrics").status_code == 401


def test_whether_it_lives_may_be_asked_by_anyone(strict):
    assert strict.get("/health").status_code == strict.get("/ready").status_code == 200


def body_of(size):
    body = json.dumps(SHORT).encode()
    return body + b" " * (size - len(body))


def test_bodies_have_a_size(strict):
    assert strict.post(COMPLETIONS, body_of(1000), headers=bearer("sesame")).status_code == 200
    answer = strict.post(COMPLETIONS, body_of(1001), headers=bearer("sesame"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert "1000" in answer.json()["error"]["message"]


def test_bodies_without_a_length_too(strict):
    def chunks(size):
        body = body_of(size)
        yield from (body[i : i + 100] for i in range(0, size, 100))

    for size, status in [(1000, 200), (1001, 413), (500_000, 413)]:
        answer = httpx2.post(strict.url + COMPLETIONS, content=chunks(size), headers=JSON | bearer("sesame"))
        assert answer.status_code == status


def connect(live):
    host, port = live.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    client.settimeout(10)
    return client


def head(length):
    return (f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer sesame\r\nContent-Length: {length}\r\n\r\n").encode()  # fmt: skip


def everything(client):
    """What comes until the connection is closed."""
    data = b""
    while part := client.recv(65536):
        data += part
    return data


def test_a_body_that_does_not_come_is_not_waited_for(strict):
    with connect(strict) as client:
        client.sendall(head(500) + b'{"prompt"')
        answer = everything(client)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"was not sent within 0.3 s" in answer


@pytest.mark.parametrize("sent", [b"", b"POST /v1", b"POST / HTTP/1.1\r\nHost: x\r\n"])
def test_nor_are_headers(strict, sent):
    with connect(strict) as client:
        client.sendall(sent)
        begin = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            assert everything(client) == b""
        assert time.monotonic() - begin < 5


def test_requests_at_a_time_have_a_number():
    model = Gated(vocab_size=257)
    with Live(lambda: toy(model), max_concurrency=2) as live:
        threads = [threading.Thread(target=live.post, args=(COMPLETIONS, SHORT)) for _ in range(2)]
        for thread in threads:
            thread.start()
        live.wait_until_asked(2)
        answer = live.post(COMPLETIONS, SHORT)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        for path in ("/health", "/metrics", "/v1/models"):
            assert live.get(path).status_code == 200
        model.steps.release(100)
        for thread in threads:
            thread.join(10)
        assert live.post(COMPLETIONS, SHORT).status_code == 200


def test_a_client_that_never_reads_is_cut_off():
    lots = {"prompt": "x", "max_tokens": 50_000, "stream": True, "logprobs": 100, "ignore_eos": True}

    def make():
        return toy(ToyModel(vocab_size=257, max_model_len=60_000), max_num_seqs=2)

    live = Live(make, read_timeout=0.3)
    live.server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)  # of its connections
    with live:
        body = json.dumps(lots).encode()
        host, port = live.url.removeprefix("http://").split(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            client.sendall(head(len(body)) + body)
            live.wait_until_asked(1)
            live.all_free(30)
            assert live.llm.engine.num_generated < 40_000  # far from its end
        assert live.complete(**SHORT)["choices"]


def test_what_is_refused_before_its_body_was_read_is_the_last_of_its_connection(strict):
    refused = head(100).replace(b"sesame", b"wrong")
    for sent, status in [(head(1001), b"413"), (refused, b"401"), (head(100).replace(b"POST", b"GET"), b"405")]:
        with connect(strict) as client:
            client.sendall(sent)
            answer = everything(client)
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert b"\r\nconnection: close\r\n" in answer


def test_every_answer_has_a_name(strict):
    for given in ("mine-1", "a" * 128, "7f9c/2:x=+."):
        assert strict.get("/v1/models", headers={"x-request-id": given}).headers["x-request-id"] == given
    others = {strict.get("/health", headers={"x-request-id": given}).headers["x-request-id"] for given in
              ("", "a" * 129, "a b", "<script>", b"\xff")}  # fmt: skip
    assert len(others) == 5
    assert all(re.fullmatch("req-[0-9a-f]{32}", name) for name in others)
    # whatever it is that is refused
    assert strict.post("/nothing", SHORT, headers={"x-request-id": "q"}).headers["x-request-id"] == "q"


def test_paths_are_counted_by_their_routes():
    labels = Labels(["/", "/v1/models", "/v1/models/{name:path}", "/v1/completions"])
    assert labels.of("/v1/models/a/b") == labels.of("/v1/models/") == "/v1/models/{name}"
    for path in ("/", "/v1/models", "/v1/completions"):
        assert labels.of(path) == path
    for path in ("/v1/completions/", "/x", "/v1", "/v1/models-x", "", "/v1/models/{name:path}"[:8]):
        assert labels.of(path) == "other"


def test_a_body_is_logged_where_it_is_asked_for(caplog):
    body = {**SHORT, "prompt": "se\ncret"}
    for on in (False, True):
        caplog.clear()
        with Live(log_prompts=on) as live, caplog.at_level(logging.INFO):
            live.post(COMPLETIONS, body, headers={"x-request-id": "mine"})
        lines = [record.getMessage() for record in caplog.records if "cret" in record.getMessage()]
        assert lines == ([f"/v1/completions mine {json.dumps(body)!r}"] if on else [])


def test_logs_hold_no_prompt(strict, caplog):
    said = "".join(["a ", "secret", " prompt"])

    async def broken(scope, receive, send):
        raise KeyError(said)

    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    guard = Guard(broken, strict.server.service, ())
    asyncio.run(guard({"type": "http", "path": "/health", "method": "GET", "headers": []}, receive, send))
    assert sent[0]["status"] == 500
    assert said.encode() not in sent[1]["body"]
    assert "unexpected KeyError" in caplog.text
    assert "broken" in caplog.text  # where it was
    assert said not in caplog.text


def test_each_request_is_a_line_of_the_log_and_no_content(strict, caplog):
    with caplog.at_level(logging.INFO, "klero.server"):
        key = {"authorization": "Bearer sesame"}
        strict.post("/v1/completions", {"prompt": "secret"}, headers={**key, "x-request-id": "mine"})
        strict.post("/v1/completions/secret", {}, headers={"x-request-id": "other"})
        strict.get("/health")
        strict.get("/metrics", headers=key)
    lines = [record.getMessage() for record in caplog.records]
    mine = [line.rpartition(" answered ")[0] for line in lines if line.startswith("mine")]
    assert mine == ["mine POST /v1/completions"]
    assert any(line.startswith("other POST other refused ") for line in lines)
    assert len(lines) == 2
    assert "secret" not in caplog.text
