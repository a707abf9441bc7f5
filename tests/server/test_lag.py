"""The event loop's turns: no request, however much it asks for, keeps the others' streams and /health waiting."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from tests.server.live import Live, toy

from klero.testing.models import PagedToyModel

MOST = 0.2  # seconds of the loop's own processor time; each of these once took from 0.4 to 6
SCHEMA = {"type": "object", "properties": {f"name{i}": {"type": "string"} for i in range(300)}}
BODIES = {
    "a chat with many likeliest tokens": {
        "messages": [{"role": "user", "content": "x"}], "n": 16, "max_tokens": 120, "logprobs": True,
        "top_logprobs": 20,
    },
    "an echo with many likeliest tokens": {
        "prompt": [1 + i % 200 for i in range(600)], "echo": True, "logprobs": 100, "max_tokens": 0,
    },
    "the same as a stream": {
        "prompt": [1 + i % 200 for i in range(600)], "echo": True, "logprobs": 100, "max_tokens": 1, "stream": True,
    },
    "receipts of a prompt": {
        "prompt": [1 + i % 200 for i in range(600)], "prompt_logprobs": 100, "max_tokens": 1,
    },
    "many choices with many biases": {
        "prompt": ["x"] * 4, "n": 64, "max_tokens": 2, "logprobs": 1,
        "logit_bias": {str(i): 0.5 for i in range(257)},
    },
    "many prompts with a long schema": {
        "prompt": ["x"] * 50, "max_tokens": 1, "seed": 1, "json": SCHEMA, "end_token_ids": [256],
    },
    "a long text": {"prompt": "x" * 8000, "max_tokens": 1},
    "many bad words": {"prompt": "x", "max_tokens": 1, "bad_words": [f"{i}" for i in range(2000)]},
}  # fmt: skip


@pytest.fixture(scope="module")
def live():
    model = PagedToyModel(vocab_size=257, max_model_len=9000)
    with Live(lambda: toy(model, block_size=64, num_blocks=4096, max_num_seqs=64)) as live:
        yield live


class Lag:
    """worst: the longest that a server's event loop did something else than turn, in seconds of its thread's processor
    time: what a loaded machine takes from it does not count."""

    def __init__(self, live):
        self._loop, self.worst, self._on = live.server._loop, 0.0, True

    async def _turn(self):
        last = time.thread_time()
        while self._on:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            self.worst, last = max(self.worst, now - last), now

    def __enter__(self):
        self._turns = asyncio.run_coroutine_threadsafe(self._turn(), self._loop)
        return self

    def __exit__(self, *_):
        self._on = False
        self._turns.result(10)


@pytest.mark.parametrize("name", BODIES)
def test_no_body_holds_the_loop_up(live, name):
    body = BODIES[name]
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    live.post(path, {**body, "prompt": "x"} if "prompt" in body else {**body, "n": 1})  # what is made once is made now
    with Lag(live) as lag:
        answer = live.post(path, body)
    assert answer.status_code == 200, answer.text[:500]
    assert lag.worst < MOST
    live.all_free()


def test_a_short_request_does_not_wait_for_a_long_text(live):
    """All texts go through one tokenizer; the event loop never waits for it."""
    long = threading.Thread(target=live.post, args=("/tokenize", {"prompt": "x" * 500_000}))
    with Lag(live) as lag:
        long.start()
        time.sleep(0.05)
        assert live.get("/health").status_code == 200
        long.join()
    assert lag.worst < MOST
