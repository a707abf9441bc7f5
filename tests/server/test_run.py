"""Beginnings and ends of a server: loading, signals, draining, engines that die or hang."""

from __future__ import annotations

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
from tests.server.live import COMPLETIONS, LONG, Asking, Dying, Live, events_of, gated, toy

from klero import OptionError
from klero.server import ServerOptions
from klero.server.run import Server, name_of

__all__ = ["tiny_model"]
ROOT = Path(__file__).resolve().parents[2]


def in_loop(live, function):
    """Run something in the server's event loop."""
    done = threading.Event()
    live.server._loop.call_soon_threadsafe(lambda: (function(), done.set()))
    assert done.wait(10)


def test_a_step_that_hangs_ends_the_server():
    with gated(step_timeout=0.3) as live:
        asking = [Asking(live, stream=stream) for stream in (True, False)]
        for one in asking:
            one.join(10)
        assert "engine has failed" in events_of(asking[0].answer.text)[-1]["error"]["message"]
        assert asking[1].answer.status_code == 503
        live.join()
        assert (live.code, live.server.service.state) == (1, "failed")


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


def test_klero_serve_says_in_a_line_what_is_wrong(monkeypatch, capsys):
    from klero.cli.app import run

    monkeypatch.setattr("klero.cli.serve._leave", sys.exit)  # it would end this process
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for asked, code, words in [(port, 1, "cannot listen on"), ("70000", 2, "port=70000: must be")]:
            monkeypatch.setattr(sys, "argv", ["klero", "serve", "--port", asked])
            with pytest.raises(SystemExit) as ended:
                run()
            last = capsys.readouterr().err.splitlines()[-1]
            assert (ended.value.code, last.startswith("klero: "), words in last) == (code, True, True), last
