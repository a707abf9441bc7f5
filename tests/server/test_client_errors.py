"""Errors of the server as the official `openai` client raises them."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
from tests.engine.gated import Gated
from tests.server.live import Live, toy

from klero.testing.models import state_after

openai = pytest.importorskip("openai")


class Failing(Gated):
    """Waits for leave to step, and computes NaN behind a prompt that begins with 0."""

    def rows(self, states):
        rows = super().rows(states)
        rows[[state == self.bad for state in states]] = float("nan")
        return rows

    bad = state_after(0, 0, 0)


def wait_until_idle(live):
    """A client has its answer before the server counts one less that is being answered."""
    end = time.monotonic() + 10
    while live.server.service.num_running:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_each_status_is_a_class_of_the_client_s():
    go, model = threading.Event(), Failing(vocab_size=257)

    def make():
        go.wait(20)
        return toy(model)

    with contextlib.ExitStack() as stack:
        live = Live(make, api_key="sesame", max_concurrency=1)
        live.start()
        stack.callback(live.__exit__)
        stack.callback(model.steps.release, 10_000)
        stack.callback(go.set)
        client = stack.enter_context(openai.OpenAI(base_url=live.url + "/v1", api_key="sesame", max_retries=0))
        ask = {"model": "toy", "prompt": [5], "max_tokens": 2}
        live.wait_for("loading")
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(**ask)
        assert (caught.value.status_code, caught.value.code) == (503, "unavailable")
        go.set()
        live.wait_for("ready")
        with pytest.raises(openai.AuthenticationError) as caught:
            client.with_options(api_key="other").completions.create(**ask)
        assert caught.value.code == "invalid_api_key"
        with client.completions.create(**ask, stream=True) as stream:
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(**ask)
            assert caught.value.response.headers["retry-after"] == "1"
            model.steps.release(10_000)
            assert len(list(stream)) == 2
        wait_until_idle(live)
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(**{**ask, "prompt": [0]})
        assert (caught.value.status_code, caught.value.type) == (500, "server_error")
        wait_until_idle(live)
        with pytest.raises(openai.APIError, match="logits"):
            list(client.completions.create(**{**ask, "prompt": [0]}, stream=True))
