"""Streams: the whole they add up to, what stands between their events, and their ends."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import defaultdict

import httpx2
import pytest
from tests.engine.gated import Gated
from tests.server.live import Live, events_of, toy

COMPLETIONS = "/v1/completions"


@pytest.fixture(autouse=True)
def free(live):
    yield
    live.all_free()


def joined(chunks):
    """text, token ids, finish_reason and seed of each choice, from the chunks of a completion."""
    choices = defaultdict(lambda: {"text": "", "token_ids": [], "logprobs": [], "finish_reason": None})
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices[part["index"]]
            assert choice["finish_reason"] is None, "news after the end"
            choice["text"] += part["text"]
            choice["token_ids"] += part["token_ids"]
            choice["logprobs"] += part["logprobs"]["token_logprobs"]
            choice["finish_reason"] = part["finish_reason"]
    return dict(choices)


@pytest.mark.parametrize("prompt", ["Hello", [[1, 2], [3], [4, 5, 6]]])
def test_the_stream_adds_up_to_the_whole(live, prompt):
    body = {"prompt": prompt, "n": 3, "seed": 2**63 + 5, "max_tokens": 20, "logprobs": 2, "return_token_ids": True,
            "stop": ["\u0000", "a"]}  # fmt: skip
    whole = live.complete(**body)
    *chunks, done = live.events(COMPLETIONS, body)
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = joined(chunks)
    assert len(choices) == len(whole["choices"])
    for choice in whole["choices"]:
        streamed = choices[choice["index"]]
        assert streamed == {
            "text": choice["text"], "token_ids": choice["token_ids"], "finish_reason": choice["finish_reason"],
            "logprobs": choice["logprobs"]["token_logprobs"],
        }  # fmt: skip


def test_headers_of_a_stream(live):
    answer = live.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"


@pytest.fixture
def gated():
    model = Gated(vocab_size=257)
    with Live(lambda: toy(model), keep_alive=0.05) as live:
        live.model = model
        yield live
        model.steps.release(10_000)


def wait_for_steps(model, number):
    end = time.monotonic() + 10
    while len(model.seen) < number:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_silence_is_broken_by_comments(gated):
    body = {"prompt": "x", "max_tokens": 2, "stream": True}
    with httpx2.stream("POST", gated.url + COMPLETIONS, json=body) as answer:
        assert answer.status_code == 200  # which is said before the first token is there
        lines = answer.iter_lines()
        assert next(lines) == ": keep-alive"
        gated.model.steps.release(10)
        rest = "\n".join(lines)
    assert rest.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize("body", [{"prompt": "x"}, {"prompt": ["x", "y"], "n": 2}])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_everything_within_a_step(gated, body, stream):
    ask = json.dumps({**body, "max_tokens": 200, "stream": stream}).encode()
    host, port = gated.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(ask)}"
        client.sendall(head.encode() + b"\r\n\r\n" + ask)
        wait_for_steps(gated.model, 1)
        gated.model.steps.release(1)
        wait_for_steps(gated.model, 2)
    end = time.monotonic() + 5
    while gated.server.service.num_running:  # the server has not seen yet that it left
        assert time.monotonic() < end
        time.sleep(0.001)
    gated.model.steps.release(1)  # the step that ran meanwhile
    gated.all_free()
    assert len(gated.model.seen) == 2


def test_an_error_in_the_middle_is_an_event_and_the_end():
    class Failing(Gated):
        def forward(self, step):
            if len(self.seen) == 3:
                raise OSError("/secret/path")
            return super().forward(step)

    model = Failing(vocab_size=257)
    model.steps.release(1000)
    with Live(lambda: toy(model)) as live:
        *chunks, last = live.events(COMPLETIONS, {"prompt": "x", "max_tokens": 9})
        assert len(chunks) == 3
        assert set(last["error"]) == {"message", "type", "param", "code"}
        assert "secret" not in json.dumps(last)
        live.all_free()


def test_many_choices_interleave(live):
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 12, "seed": 1}
    *chunks, _ = live.events(COMPLETIONS, body)
    order = [part["index"] for chunk in chunks for part in chunk["choices"]]
    assert {0, 1, 2, 3} == set(order)
    assert order != sorted(order)


def test_a_full_queue_says_when_to_come_again():
    model = Gated(vocab_size=257)
    with Live(lambda: toy(model, max_num_seqs=1, max_num_waiting=1)) as live:
        answers = {}

        def ask(name):
            answers[name] = live.post(COMPLETIONS, {"prompt": "x", "max_tokens": 3, "stream": name != "whole"})

        threads = {name: threading.Thread(target=ask, args=(name,)) for name in ("runs", "waits", "streams", "whole")}
        for number, thread in enumerate(threads.values(), 1):
            thread.start()
            live.wait_until_asked(number)
            wait_for_steps(model, 1)
        model.steps.release(1)  # the three others are let in after it, and no seat is free
        for name in ("streams", "whole"):
            threads[name].join(10)
            assert answers[name].status_code == 429
            assert int(answers[name].headers["retry-after"]) >= 1
            assert answers[name].json()["error"]["type"] == "rate_limit_error"
        model.steps.release(100)
        for name in ("runs", "waits"):
            threads[name].join(10)
            assert events_of(answers[name].text)[-1] == "[DONE]"
        live.all_free()
