"""The routes: what each answers, and how it refuses."""

from __future__ import annotations

import json
import threading

import pytest
from tests.server.live import Live, toy

from klero import SamplingParams

SEEDED = {"seed": 5, "max_tokens": 6}


@pytest.fixture(autouse=True)
def free(live):
    yield
    live.all_free()


def test_a_ready_server_says_so(live):
    assert (live.get("/health").status_code, live.get("/health").json()) == (200, {"status": "ok"})
    assert (live.get("/ready").status_code, live.get("/ready").json()) == (200, {"status": "ready"})


def test_the_model_is_listed(live):
    (card,) = live.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("toy", "model", 256)
    assert live.get("/v1/models/toy").json() == card
    missing = live.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def alone(prompt, **fields):
    """The tokens of a request that no server sees."""
    params = SamplingParams(temperature=1.0, top_p=1.0, **fields)
    return toy().generate([prompt], params)[0].outputs[0]


def test_a_completion_is_what_the_library_gives(live):
    answer = live.complete(prompt="Hello", return_token_ids=True, **SEEDED)
    (choice,) = answer["choices"]
    expected = alone("Hello", **SEEDED)
    assert tuple(choice["token_ids"]) == expected.token_ids
    assert (choice["text"], choice["finish_reason"], choice["seed"]) == (expected.text, "length", 5)
    assert (answer["object"], answer["model"]) == ("text_completion", "toy")
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 6)


def test_prompts_may_be_a_list_and_ids(live):
    answer = live.complete(prompt=[[1, 2], [3]], return_token_ids=True, **SEEDED, n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert tuple(answer["choices"][2]["token_ids"]) == alone([3], max_tokens=6, seed=6).token_ids


def test_a_chat_is_answered_by_the_template(live):
    answer = live.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], **SEEDED}).json()
    expected = alone("[user]Hi[assistant]", **SEEDED)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": expected.text, "refusal": None}


def test_words_come_and_go(live):
    tokens = live.post("/tokenize", {"prompt": "Hi"}).json()
    assert (tokens["tokens"], tokens["count"]) == ([39, 72], 2)
    assert live.post("/detokenize", {"tokens": tokens["tokens"]}).json()["prompt"] == "Hi"


def refused(answer, status):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    "body, param, words",
    [
        ({"prompt": "x", "temperature": -1}, "temperature", "temperature=-1"),
        ({"prompt": "x", "nonsense": 1}, "nonsense", "nonsense"),
        ({"prompt": "x", "max_tokens": 10_000}, "max_tokens", "256"),
        ({"prompt": [300]}, "prompt", "257|256"),
        ({"prompt": ["x"] * 129}, "prompt", "128"),
        ({"prompt": ["x"] * 100, "n": 11}, "n", "1100 choices"),
        ({"prompt": "x", "model": "other"}, "model", "other"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(live, body, param, words):
    import re

    answer = live.post("/v1/completions", body)
    error = refused(answer, 404 if "model" in body else 400)
    assert error["param"] == param or str(error["param"]).startswith(param)
    assert re.search(words, error["message"])
    streamed = live.post("/v1/completions", {**body, "stream": True})
    assert (streamed.status_code, streamed.json()["error"]) == (answer.status_code, error)


def test_all_faults_come_at_once(live):
    error = refused(live.post("/v1/completions", {"prompt": "x", "temperature": -1, "top_p": 2, "n": 0}), 400)
    assert all(name in error["message"] for name in ("temperature=-1", "top_p=2", "n=0"))


def test_only_json_is_read(live):
    form = live.post("/v1/completions", b'{"prompt": "x"}', headers={"content-type": "text/plain"})
    assert "application/json" in refused(form, 415)["message"]


def test_paths_and_methods_that_are_none(live):
    assert refused(live.get("/v1/nothing"), 404)
    answer = live.get("/v1/completions")
    assert refused(answer, 405)
    assert answer.headers["allow"] == "POST"
    assert refused(live.post("/health", {}), 405)


def test_the_schema_names_every_path_and_field(live):
    schema = live.get("/openapi.json").json()
    assert set(schema["paths"]) == {
        "/v1/models", "/v1/models/{name}", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize",
        "/health", "/ready", "/metrics",
    }  # fmt: skip
    body = schema["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "temperature", "top_k", "typical_p", "logit_bias", "stream_options"} <= set(body["properties"])


class Failing(type(toy().engine.model)):
    """A model that fails where a prompt has token 7."""

    def forward(self, step):
        if 7 in step.input_ids:
            raise OSError("/secret/path")
        return super().forward(step)


def test_a_failing_model_is_a_500_without_a_word_of_it():
    with Live(lambda: toy(Failing(vocab_size=257))) as live:
        error = refused(live.post("/v1/completions", {"prompt": [7], **SEEDED}), 500)
        assert "secret" not in json.dumps(error)
        stream = live.events("/v1/completions", {"prompt": [7], **SEEDED})
        assert [set(event) for event in stream] == [{"error"}]
        assert live.complete(prompt="ok", **SEEDED)["choices"][0]["finish_reason"] == "length"
        live.all_free()


def test_while_it_loads_it_says_so():
    gate = threading.Event()

    def make():
        gate.wait(30)
        return toy()

    live = Live(make)
    live.start()
    live.wait_for("loading")
    assert live.get("/health").status_code == 200
    assert (live.get("/ready").status_code, live.get("/ready").json()) == (503, {"status": "loading"})
    answer = live.post("/v1/completions", {"prompt": "x"})
    assert "loaded" in refused(answer, 503)["message"]
    assert answer.headers["retry-after"]
    assert refused(live.get("/v1/models"), 503)
    gate.set()
    live.wait_for("ready")
    with live:
        assert live.complete(prompt="x", **SEEDED)


def test_seeds_that_are_made_here_are_numbers_that_javascript_keeps(live):
    seeds = [live.complete(prompt="x", max_tokens=1)["choices"][0]["seed"] for _ in range(20)]
    assert max(seeds) < 2**53
    assert len(set(seeds)) == 20
    again = live.complete(prompt="x", max_tokens=1, seed=2**64 - 1)
    assert again["choices"][0]["seed"] == 2**64 - 1
