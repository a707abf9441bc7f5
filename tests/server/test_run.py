"""Beginnings and ends of a server: loading, signals, draining, engines that die or hang."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import pytest
from tests.cli.conftest import tiny_model
from tests.engine.gated import Gated
from tests.server.live import Live, events_of, toy

from klero import OptionError
from klero.server import ServerOptions, run
from klero.server.run import Server, name_of

__all__ = ["tiny_model"]
COMPLETIONS = "/v1/completions"
ROOT = Path(__file__).resolve().parents[2]
LONG = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "seed": 1}


class Asking(threading.Thread):
    """Clients, one that streams and one that does not, on a model that waits for the test."""

    def __init__(self, live, **body):
        super().__init__(daemon=True)
        self.live, self.body, self.answer = live, body, None
        before = live.aio.num_asked
        self.start()
        live.wait_until_asked(before + 1)

    def run(self):
        with contextlib.suppress(httpx2.TransportError):
            self.answer = self.live.post(COMPLETIONS, {**LONG, **self.body})


@contextlib.contextmanager
def gated(**options):
    model = Gated(vocab_size=257)
    live = Live(lambda: toy(model), **options)
    live.model = model
    live.start()
    live.wait_for("ready")
    try:
        yield live
    finally:
        model.steps.release(10_000)
        live.server.stop()
        live.join()


def in_loop(live, function):
    """Run something in the server's event loop."""
    done = threading.Event()
    live.server._loop.call_soon_threadsafe(lambda: (function(), done.set()))
    assert done.wait(10)


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


def test_a_step_that_hangs_ends_the_server():
    with gated(step_timeout=0.3) as live:
        asking = [Asking(live, stream=stream) for stream in (True, False)]
        for one in asking:
            one.join(10)
        assert "engine has failed" in events_of(asking[0].answer.text)[-1]["error"]["message"]
        assert asking[1].answer.status_code == 503
        live.join()
        assert (live.code, live.server.service.state) == (1, "failed")


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


class Dying(Gated):
    """A model whose fifth step ends the engine's thread."""

    def forward(self, step):
        if len(self.seen) == 4:
            raise SystemExit
        return super().forward(step)


def test_an_engine_that_dies_ends_the_server(caplog):
    model = Dying(vocab_size=257)
    live = Live(lambda: toy(model))
    live.start()
    live.wait_for("ready")
    asking = [Asking(live, stream=True), Asking(live, stream=True, prompt=["x", "y"]), Asking(live)]
    model.steps.release(3)
    while len(model.seen) < 4:
        time.sleep(0.001)
    time.sleep(0.1)  # step 4 waits at its gate, and every stream has begun
    model.steps.release(10)
    for one in asking:
        one.join(10)
    for one in asking[:2]:
        chunk, *_, last = events_of(one.answer.text)
        assert chunk["choices"]
        assert last["error"]["type"] == "server_error"
    assert asking[2].answer.status_code in (500, 503)
    live.join()
    assert live.code == 1
    assert "the engine's thread has ended" in caplog.text


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


def test_a_failed_server_says_that_it_is_ill():
    with Live() as live:
        in_loop(live, lambda: live.server.service.fail("a test says so"))
        assert (live.get("/health").status_code, live.get("/ready").status_code) == (503, 503)
        assert live.post(COMPLETIONS, LONG).status_code == 503
        assert "a test" not in live.post(COMPLETIONS, LONG).text


def test_a_model_that_cannot_be_loaded_is_raised():
    def make():
        raise OptionError("no such model")

    with pytest.raises(OptionError, match="no such model"):
        Server(ServerOptions(port=0)).run(make)


def test_stopped_while_it_loads_it_ends_at_once():
    gate = threading.Event()
    live = Live(lambda: gate.wait(30))
    live.start()
    live.wait_for("loading")
    live.server.stop()
    live.join()
    gate.set()
    assert live.code == 0


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
            (connection,) = live.server._http.server_state.connections
            until(lambda: connection.transport.get_write_buffer_size())
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


@pytest.mark.parametrize(
    "options, words",
    [
        ({"port": 70_000}, "port=70000"), ({"port": True}, "port=True"), ({"max_n": 0}, "max_n=0: must be"),
        ({"host": ""}, "host=''"), ({"api_key": ""}, "api_key"), ({"api_key": "a b"}, "without spaces"),
        ({"drain_timeout": -1}, "drain_timeout=-1"), ({"step_timeout": 0}, "step_timeout=0"),
        ({"keep_alive": float("inf")}, "keep_alive=inf"), ({"max_logprobs": -2}, "max_logprobs=-2"),
        ({"log_prompts": 1}, "log_prompts=1"), ({"served_model_name": ""}, "served_model_name=''"),
    ],
)  # fmt: skip
def test_options_are_checked(options, words):
    with pytest.raises(OptionError, match=re.escape(words)):
        ServerOptions(**options)


def test_the_key_is_not_shown():
    assert "sesame" not in repr(ServerOptions(api_key="sesame"))


def test_without_the_extra_it_says_what_to_install():
    code = "import sys; sys.modules['fastapi'] = None; import klero.server; klero.server.ServerOptions(); "
    done = subprocess.run([sys.executable, "-c", code + "klero.server.create_app"], capture_output=True, text=True)
    assert "MissingExtra: fastapi is not installed; klero[server] brings it" in done.stderr
    assert done.returncode == 1


def test_a_path_is_no_name(tmp_path):
    assert name_of("smollm2") == "smollm2"
    assert name_of(str(tmp_path)) == tmp_path.name
    assert name_of("llama.cpp:/models/big.gguf") == "big.gguf"
    assert name_of(object()) == "klero"


def start(*command):
    """A process of a server; stderr is read by the test."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)


def url_of(process):
    """Where it serves, once it says so."""
    for line in process.stderr:
        if found := re.search(r"serving (\S+) on (http://\S+)", line):
            return found[2]
    raise AssertionError("it has ended")


def klero(*arguments):
    return start(sys.executable, "-c", "from klero.cli import main; main()", "serve", *arguments)


def until_ready(url):
    end = time.monotonic() + 30
    while httpx2.get(url + "/ready").status_code != 200:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_klero_serve_drains_on_sigterm(tiny_model):
    process = klero(tiny_model, "--port", "0", "--threads", "1")
    url = url_of(process)
    until_ready(url)
    (card,) = httpx2.get(url + "/v1/models").json()["data"]
    assert card["id"] == "model"
    body = {"prompt": "Hi", "max_tokens": 60, "ignore_eos": True, "stream": True, "seed": 1}
    with httpx2.stream("POST", url + COMPLETIONS, json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert [line for line in rest if line][-1] == "data: [DONE]"
    assert process.wait(20) == 0
    assert "Traceback" not in process.stderr.read()


def test_a_server_that_is_killed_leaves_no_client_waiting():
    script = "from tests.server.live import toy; from klero.server import ServerOptions, serve; import sys\n"
    script += "from klero.testing.models import PagedToyModel\n"
    script += "llm = toy(PagedToyModel(vocab_size=257, max_model_len=100_000), num_blocks=None)\n"
    script += "sys.exit(serve(llm, ServerOptions(port=0)))"
    process = start(sys.executable, "-c", script)
    url = url_of(process)
    until_ready(url)
    body = {**LONG, "max_tokens": 50_000, "stream": True}
    with httpx2.stream("POST", url + COMPLETIONS, json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.kill()
        with pytest.raises(httpx2.TransportError):
            list(lines)
    assert process.wait(10) == -signal.SIGKILL
    process.stderr.close()


def test_klero_serve_says_in_a_line_what_is_wrong():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for asked, code, words in [(port, 1, "cannot listen on"), ("70000", 2, "port=70000: must be")]:
            process = klero("--port", asked)
            _, text = process.communicate(timeout=60)
            assert (process.returncode, words in text, "Traceback" in text) == (code, True, False), text
