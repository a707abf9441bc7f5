"""How a server ends: what is waited for and for how long, second signals, and what fails meanwhile."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

import pytest
from tests.server.live import COMPLETIONS, LONG, Asking, Dying, Live, events_of, gated, toy

from klero.server import ServerOptions, run
from klero.server.run import Server


def test_a_server_that_is_told_to_stop_lets_requests_end():
    with gated() as live:
        asking = [Asking(live, max_tokens=5, stream=stream) for stream in (True, False)]
        live.server.stop()
        live.wait_for("draining")
        assert (live.get("/ready").status_code, live.get("/ready").json()) == (503, {"status": "draining"})
        assert live.get("/health").status_code == 200
        refused = live.post(COMPLETIONS, LONG)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "server_error")
        assert refused.headers["retry-after"]
        live.model.steps.release(1000)
        for one in asking:
            one.join(10)
        assert events_of(asking[0].answer.text)[-1] == "[DONE]"
        assert asking[1].answer.json()["choices"][0]["finish_reason"] == "length"
        live.join()
        assert live.code == 0
        assert live.llm.engine.num_unfinished == 0


@pytest.mark.parametrize("how", ["timeout", "twice"])
def test_what_runs_longer_ends_with_an_error(how):
    with gated(drain_timeout=0.2 if how == "timeout" else 60) as live:
        asking = [Asking(live, stream=stream) for stream in (True, False)]
        live.model.steps.release(3)
        begin = time.monotonic()
        live.server.stop()
        if how == "twice":
            live.wait_for("draining")
            live.server.stop()
        for one in asking:
            one.join(10)
        *_, last = events_of(asking[0].answer.text)
        assert "shutting down" in last["error"]["message"]
        assert asking[1].answer.status_code == 503
        live.model.steps.release(1000)
        live.join()
        assert live.code == 0
        assert time.monotonic() - begin < 10


def test_a_step_that_hangs_while_it_drains_does_too():
    with gated(step_timeout=0.5, drain_timeout=0.1) as live:
        asking = Asking(live)
        live.server.stop()
        live.join(8)  # the step waits longer
        assert live.code == 1
        asking.join(10)
        assert asking.answer.status_code == 503


def test_a_step_that_is_only_long_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(run, "GRACE", 0.2)
    monkeypatch.setattr(run, "LOOK", 0.1)
    with gated(step_timeout=60, drain_timeout=0.1) as live:
        Asking(live)
        live.server.stop()
        live.join(8)
        assert live.code == 0


def test_an_engine_that_dies_while_it_drains_ends_it_with_an_error():
    model = Dying(vocab_size=257)
    live = Live(lambda: toy(model))
    live.start()
    live.wait_for("ready")
    asking = Asking(live)
    live.server.stop()
    live.wait_for("draining")
    model.steps.release(10)
    live.join()
    asking.join(10)
    assert live.code == 1
    assert asking.answer.status_code in (500, 503)


def test_an_http_part_that_dies_ends_the_server(caplog):
    async def broken(_):
        raise OSError("no more sockets")

    with gated() as live:
        asking = Asking(live)
        live.server._http.on_tick = broken
        live.join(8)
        assert live.code == 1
        assert "no more sockets" in caplog.text
        asking.join(10)
        assert asking.answer.status_code == 503


def test_stopped_before_it_runs_it_does_not_begin():
    server = Server(ServerOptions(port=0))
    server.stop()
    assert server.run(lambda: pytest.fail("it was loaded")) == 0


def head(length):
    return (f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {length}\r\n\r\n").encode()  # fmt: skip


def connect(live, sent, room=None):
    client = socket.socket()
    if room is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    client.settimeout(10)
    host, port = live.url.removeprefix("http://").split(":")
    client.connect((host, int(port)))
    client.sendall(sent)
    return contextlib.closing(client)


def everything(client):
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65_536):
            data += part
    return data


def until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_second_signal_ends_a_body_that_is_half_sent(caplog):
    with gated() as live, connect(live, head(100) + b"{") as client:
        until(lambda: live.server.service.num_running)
        begin = time.monotonic()
        live.server.stop()
        live.server.stop()
        answer = everything(client)
        live.join()
        assert time.monotonic() - begin < 3
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nconnection: close\r\n" in answer
    assert live.code == 0
    assert "Exception" not in caplog.text


def test_a_second_signal_ends_one_that_is_read_in_a_thread(monkeypatch, caplog):
    reads, gate = threading.Event(), threading.Event()

    def slow(_):
        reads.set()
        gate.wait(20)

    monkeypatch.setattr("klero.server.app.read_body", slow)
    with gated() as live, connect(live, head(100_000) + b" " * 100_000) as client:
        assert reads.wait(10)
        begin = time.monotonic()
        live.server.stop()
        live.server.stop()
        answer = everything(client)
        live.join()
        assert time.monotonic() - begin < 3
    gate.set()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert live.code == 0
    assert "Exception" not in caplog.text


@contextlib.contextmanager
def small_buffers(**options):
    """A server, and a body whose whole answer is far more than fits the buffers."""
    live = Live(lambda: toy(num_blocks=512), **options)
    live.server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
    with live:
        body = b'{"prompt": "x", "max_tokens": 200, "logprobs": 100, "ignore_eos": true}'
        with connect(live, head(len(body)) + body, room=16_384) as client:
            connections = live.server._http.server_state.connections
            until(lambda: any(one.transport.get_write_buffer_size() for one in list(connections)))
            until(lambda: not live.server.service.num_running)
            yield live, client


def test_an_answer_that_is_being_read_is_drained_too(monkeypatch):
    monkeypatch.setattr(run, "GRACE", 0.2)
    with small_buffers() as (live, client):
        live.server.stop()
        live.wait_for("draining")
        time.sleep(0.6)  # longer than what is left for those that are not waited for
        data = b""
        while not data.endswith(b"}}"):
            data += client.recv(65_536)
        live.join()
        assert (live.code, json.loads(data.partition(b"\r\n\r\n")[2])["object"]) == (0, "text_completion")


def test_a_second_signal_does_not_wait_for_who_does_not_read(monkeypatch, caplog):
    monkeypatch.setattr(run, "GRACE", 0.2)
    with small_buffers() as (live, _):
        begin = time.monotonic()
        live.server.stop()
        live.server.stop()
        live.join()
        assert time.monotonic() - begin < 3
        assert live.code == 0
    assert "Exception" not in caplog.text
