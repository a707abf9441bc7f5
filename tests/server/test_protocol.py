"""Connections: what comes behind a request, clients that do not go on or read slowly, upgrades, HTTP/1.0."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time

import pytest
import uvicorn

from klero.server import protocol
from klero.server.guard import OUTCOME
from klero.server.protocol import protocol_of

TIMEOUT = 0.4
BIG = b"x" * 3_000_000


class Served:
    """An application behind the protocol, with small buffers. seen: the bodies of /echo; left: outcomes of
    /wait and /fill."""

    def __init__(self):
        self.seen, self.left, self.began = [], [], threading.Event()
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)  # those that are accepted have it too
        self.address = listening.getsockname()
        config = uvicorn.Config(
            self.app, http=protocol_of(TIMEOUT), ws="none", lifespan="off", log_config=None, interface="asgi3",
            timeout_keep_alive=TIMEOUT, timeout_graceful_shutdown=1, server_header=False, proxy_headers=False,
        )  # fmt: skip
        self.http = uvicorn.Server(config)
        self._thread = threading.Thread(target=self.http.run, args=([listening],), daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.http.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()

    async def app(self, scope, receive, send):
        path, body = scope["path"], b""
        while scope["method"] == "POST":
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            if not message["more_body"]:
                break
        if path in ("/wait", "/fill"):
            await self.wait(scope, receive, send)
            return
        self.seen.append(body)
        answer = BIG if path == "/big" else json.dumps(body.decode()).encode()
        headers = [(b"content-length", b"%d" % len(answer))] if path != "/stream" else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def wait(self, scope, receive, send):
        """Send parts until the client has left, and a little longer."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self.began.set()
        part = b"part" * (5000 if scope["path"] == "/fill" else 1)
        gone = asyncio.ensure_future(receive())
        while not gone.done():
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"the end"})
        self.left.append(scope.get(OUTCOME))

    def connect(self, sent, room=65_536):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        client.settimeout(8)
        client.connect(self.address)
        client.sendall(sent)
        return contextlib.closing(client)


@pytest.fixture(scope="module")
def served():
    with Served() as server:
        yield server


def everything(client, pause=0.0):
    """What comes until the connection is closed."""
    data = b""
    while part := client.recv(65_536):
        data += part
        time.sleep(pause)
    return data


def ask(path, body=b"", more="", version="1.1", method="POST"):
    length = f"Content-Length: {len(body)}\r\n" if "Transfer" not in more else ""
    return f"{method} {path} HTTP/{version}\r\nHost: x\r\n{more}{length}\r\n".encode() + body


def until(condition):
    end = time.monotonic() + 8
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("more", [b"", b"\r\n", b"\r\n\r\n", b"G"])
def test_a_connection_that_rests_is_closed_whatever_comes_behind_the_answer(served, more):
    with served.connect(ask("/echo", b"a")) as client:
        assert client.recv(65_536).endswith(b'"a"')
        client.sendall(more)
        assert everything(client) == b""


def test_one_that_rests_takes_the_next_request(served):
    with served.connect(ask("/echo", b"a")) as client:
        for body in (b"b", b"c", b"d"):
            assert b"connection: close" not in client.recv(65_536)
            client.sendall(b"\r\n" + ask("/echo", body))
        assert client.recv(65_536).endswith(b'"d"')


def test_an_answer_before_the_end_of_the_body_is_the_last_and_arrives(served):
    head = ask("/echo", more="Transfer-Encoding: chunked\r\n", method="GET")
    with served.connect(head) as client:
        answer = client.recv(65_536)
        assert b"\r\nconnection: close\r\n" in answer
        for _ in range(20):  # what is sent after it is no reason for the system to drop it
            client.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")
        assert everything(client) == b""


def test_a_request_behind_another_is_not_answered_and_the_client_is_told(served):
    before = len(served.seen)
    with served.connect(ask("/echo", b"a") + ask("/echo", b"b") + ask("/echo", b"c")) as client:
        answer = everything(client)
    assert (answer.count(b"HTTP/1.1 200"), served.seen[before:]) == (1, [b"a"])
    assert b"\r\nconnection: close\r\n" in answer
    assert answer.endswith(b'"a"')


@pytest.mark.parametrize("behind", [b"", ask("/echo", b"b"), b"\x16\x03\x01 no HTTP\r\n\r\n", b"POST /half"])
def test_a_client_that_leaves_is_noticed_whatever_it_sent_behind(served, caplog, behind):
    before = len(served.left)
    served.began.clear()
    with caplog.at_level(logging.WARNING), served.connect(ask("/wait", b"a")) as client:
        assert served.began.wait(5)
        client.sendall(behind)
        assert b"400 Bad" not in client.recv(65_536)
        client.close()
        until(lambda: len(served.left) > before)
    assert served.left[-1] == "left"
    assert not caplog.text


@pytest.mark.parametrize("behind", [b"", ask("/echo", b"b")])
def test_one_that_does_not_read_is_cut_off(served, behind):
    before = len(served.left)
    with served.connect(ask("/fill", b"a"), room=4096) as client:
        client.sendall(behind)
        until(lambda: len(served.left) > before)
        assert served.left[-1] == "left"


def test_nor_is_one_waited_for_that_does_not_read_the_last_answer(served):
    connections = served.http.server_state.connections
    with served.connect(ask("/big", more="Connection: close\r\n"), room=4096):
        until(lambda: any(connection.is_sending for connection in list(connections)))
        until(lambda: not any(connection.is_sending for connection in list(connections)))


def test_a_slow_reader_gets_all_of_it(served):
    with served.connect(ask("/big", more="Connection: close\r\n"), room=16_384) as client:
        begin = time.monotonic()
        answer = everything(client, pause=0.005)
        assert answer.endswith(b"\r\n\r\n" + BIG)
        assert time.monotonic() - begin > 1.5 * TIMEOUT  # else it was not slow


UPGRADE = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
@pytest.mark.parametrize("cut", [None, 20, -3, -5])
def test_an_upgrade_is_not_taken_up_and_the_body_arrives(served, protocol, cut):
    sent = ask("/echo", b"hello", UPGRADE.replace("h2c", protocol))
    with served.connect(sent[:cut]) as client:
        if cut is not None:
            time.sleep(0.02)
            client.sendall(sent[cut:])
        answer = client.recv(65_536)
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b'"hello"')
        client.sendall(ask("/echo", b"again"))
        assert client.recv(65_536).endswith(b'"again"')


def test_nor_with_chunks(served):
    sent = ask("/echo", b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", UPGRADE + "Transfer-Encoding: chunked\r\n")
    with served.connect(sent) as client:
        assert client.recv(65_536).endswith(b'"hello"')


def test_it_is_no_proxy(served):
    with served.connect(b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n") as client:
        assert everything(client).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("path", ["/echo", "/stream"])
def test_http_1_0_has_no_chunks(served, path):
    with served.connect(ask(path, b"hello", version="1.0")) as client:
        head, _, body = everything(client).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert b"\r\nconnection: close" in head
    assert body == b'"hello"'


@pytest.mark.parametrize("head", [b"POST /echo HTTP/1.1\r\nX: ", b"GET /", b"POST /echo HTTP/1.1\r\n"])
def test_headers_without_an_end_are_refused_before_they_are_gathered(served, head):
    line = b"a" * 8192 if not head.endswith(b"1.1\r\n") else b"a: b\r\n" * 1365
    with served.connect(b"") as client:
        client.sendall(head)
        with contextlib.suppress(ConnectionError):
            for _ in range(9):  # 72 KiB
                client.sendall(line)
        assert b" 400 " in everything(client)[:20]


def test_what_is_read_away_has_an_end(served, monkeypatch):
    monkeypatch.setattr(protocol, "MOST_READ_AWAY", 100_000)
    def flood(client):
        for _ in range(1000):
            client.sendall(b"x" * 10_000)
            time.sleep(0.001)

    with served.connect(b"no HTTP\r\n\r\n") as client, pytest.raises(ConnectionError):
        flood(client)
