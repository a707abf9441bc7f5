"""Figures: what is counted, and when."""

from __future__ import annotations

import re
import threading

import httpx2
import pytest
from tests.engine.gated import Gated
from tests.server.live import Live, toy

COMPLETIONS = "/v1/completions"


def figures(live):
    """The numbers of /metrics by their names with labels."""
    answer = live.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
    return {name: float(number) for name, number in (line.rsplit(" ", 1) for line in lines)}


def test_requests_tokens_and_times_are_counted():
    with Live() as live:
        before = figures(live)
        assert before["klero_kv_blocks"] == 512
        live.complete(prompt="Hello", max_tokens=6, n=2)
        live.events(COMPLETIONS, {"prompt": ["ab", "c"], "max_tokens": 4})
        live.complete(prompt="Hello, you", max_tokens=1)
        live.post(COMPLETIONS, {"prompt": "x", "temperature": -1})
        live.get("/no/such/path")
        with httpx2.stream("POST", live.url + COMPLETIONS, json={"prompt": "x", "stream": True, "max_tokens": 250,
                                                                 "ignore_eos": True}) as answer:  # fmt: skip
            next(answer.iter_lines())
        live.all_free()
        after = figures(live)

        def rose(name):
            return after[name] - before.get(name, 0)

        assert rose('klero_requests_total{outcome="answered",route="/v1/completions"}') == 3
        assert rose('klero_requests_total{outcome="refused",route="/v1/completions"}') == 1
        assert rose('klero_requests_total{outcome="left",route="/v1/completions"}') == 1
        assert rose('klero_requests_total{outcome="refused",route="other"}') == 1
        assert rose("klero_prompt_tokens_total") == 5 + 2 + 1 + 10 + 1
        assert rose("klero_prompt_tokens_cached_total") == 4  # a block of 4, of "Hello"
        assert rose("klero_generated_tokens_total") >= 12 + 8 + 1
        assert rose("klero_time_to_first_token_seconds_count") == 5
        assert rose("klero_time_per_token_seconds_count") == 4  # one token has nothing between
        assert rose("klero_queue_seconds_count") == rose("klero_request_seconds_count") == 5
        ended = {reason: rose(f'klero_choices_total{{reason="{reason}"}}') for reason in ("length", "stop", "abort")}
        assert (ended["length"] + ended["stop"], ended["abort"]) == (2 + 2 + 1, 1)
        assert rose("klero_prefix_cache_hits_total") >= 1
        assert rose("klero_steps_total") >= 11
        assert rose('klero_step_seconds_total{part="forward"}') > 0
        assert rose("klero_step_duration_seconds_count") == rose("klero_steps_total")
        parts = sum(rose(name) for name in after if name.startswith("klero_step_seconds_total"))
        assert rose("klero_step_duration_seconds_sum") == pytest.approx(parts)
        for name in ("sequences_running", "sequences_waiting", "kv_blocks_used"):
            assert after[f"klero_{name}"] == 0
        assert after["klero_http_requests_running"] == 1  # this one


class Failing(Gated):
    """A model that fails where a prompt has token 7."""

    def forward(self, step):
        if 7 in step.input_ids:
            raise OSError("a test says so")
        return super().forward(step)


def test_what_runs_and_what_fails_is_counted_too():
    model = Failing(vocab_size=257)
    with Live(lambda: toy(model)) as live:
        assert live.post(COMPLETIONS, {"prompt": [7], "max_tokens": 5}).status_code == 500
        asking = threading.Thread(target=live.complete, kwargs={"prompt": "abc", "max_tokens": 5, "ignore_eos": True})
        asking.start()
        model.steps.release(2)
        for _ in range(3):
            assert model.at_gate.acquire(timeout=10)
        runs = figures(live)
        assert runs['klero_choices_total{reason="error"}'] == 1
        assert runs["klero_time_to_first_token_seconds_count"] == 1  # of the one that runs
        assert runs["klero_prompt_tokens_total"] == 1 + 3
        assert runs["klero_queue_seconds_count"] == 2
        assert runs["klero_request_seconds_count"] == 1
        model.steps.release(10)
        asking.join(10)
        after = figures(live)
        assert after['klero_requests_total{outcome="failed",route="/v1/completions"}'] == 1
        assert after['klero_choices_total{reason="length"}'] == 1
        live.get("/v1/models/toy")
        assert figures(live)['klero_requests_total{outcome="answered",route="/v1/models/{name}"}'] == 1


def test_every_figure_is_explained(live):
    text = live.get("/metrics").text
    names = set(re.findall(r"^# HELP (\S+) \S", text, re.MULTILINE))
    assert names == set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert all(name.startswith("klero_") for name in names)


def test_two_servers_count_for_themselves(live):
    with Live(lambda: toy(max_num_seqs=2)) as other:
        other.complete(prompt="x", max_tokens=1)
        assert figures(other)['klero_requests_total{outcome="answered",route="/v1/completions"}'] == 1
