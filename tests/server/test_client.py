"""The official `openai` client against a live server, sync and async, and many clients at once."""

from __future__ import annotations

import asyncio
import json
import random

import httpx2
import pytest
from tests.server.live import Live, events_of, toy

from klero import SamplingParams
from klero.testing.models import PagedToyModel

openai = pytest.importorskip("openai")
HELLO = [{"role": "user", "content": "Hello"}]
SEEDED = {"seed": 7, "max_tokens": 12}
COMPLETIONS = "/v1/completions"


@pytest.fixture(autouse=True)
def free(live):
    yield
    live.all_free()


@pytest.fixture(scope="module")
def client(live):
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def run_async(live, function):
    async def main():
        async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
            return await function(client)

    return asyncio.run(main())


def alone(prompt, **fields):
    """The choice of a request that no server sees."""
    return toy().generate([prompt], SamplingParams(temperature=1.0, top_p=1.0, **fields))[0].outputs[0]


def test_models(client):
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").owned_by == "klero"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completions(client, live):
    whole = client.completions.create(model="toy", prompt="Hello", n=2, logprobs=2, echo=True, **SEEDED)
    expected = toy().generate(["Hello"], SamplingParams(temperature=1.0, n=2, **SEEDED))[0].outputs
    assert [choice.text for choice in whole.choices] == ["Hello" + choice.text for choice in expected]
    assert whole.choices[0].logprobs.token_logprobs[0] is None
    stream = client.completions.create(model="toy", prompt="Hello", n=2, stream=True, **SEEDED)
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert ["Hello" + text for text in texts] == [choice.text for choice in whole.choices]

    async def both(client):
        one = await client.completions.create(model="toy", prompt="Hello", **SEEDED)
        stream = await client.completions.create(model="toy", prompt="Hello", stream=True, **SEEDED)
        return one.choices[0].text, "".join([chunk.choices[0].text async for chunk in stream])

    assert run_async(live, both) == (texts[0], texts[0])


def test_chat(client, live):
    ask = {"model": "toy", "messages": HELLO, "logprobs": True, "top_logprobs": 2, **SEEDED}
    whole = client.chat.completions.create(**ask)
    expected = alone("[user]Hello[assistant]", **SEEDED)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (expected.text, "length")
    assert len(whole.choices[0].logprobs.content) == 12
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (22, 12)
    *chunks, last = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    assert (last.choices, last.usage.completion_tokens) == ([], 12)
    assert chunks[-1].choices[0].finish_reason == "length"

    async def streamed(client):
        stream = await client.chat.completions.create(model="toy", messages=HELLO, stream=True, **SEEDED)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert run_async(live, streamed) == expected.text


def test_the_client_s_own_streams_add_up(client):
    ask = {"model": "toy", "messages": HELLO, "extra_body": {"choice": ["abc", "xyz"]}, "seed": 7}
    with client.chat.completions.stream(**ask) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == client.chat.completions.create(**ask).choices[0].message.content


def test_what_openai_does_not_have_goes_into_extra_body(client):
    body = {"top_k": 3, "min_p": 0.01, "return_token_ids": True}
    (choice,) = client.completions.create(model="toy", prompt="Hello", extra_body=body, **SEEDED).choices
    assert tuple(choice.token_ids) == alone("Hello", top_k=3, min_p=0.01, **SEEDED).token_ids


def test_structured_output(client):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(model="toy", messages=HELLO, response_format=form, max_tokens=40)
    assert isinstance(json.loads(answer.choices[0].message.content)["a"], bool)


def test_errors_are_the_client_s_own(client, live):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="toy", prompt="x", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")

    async def refused(client):
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="toy", messages=[], stream=True)

    run_async(live, refused)


async def _one(http, url, i, rng, counts):
    """One of many clients: what it asks and what becomes of it is decided by its number."""
    kind = rng.choices(("reads", "leaves", "slow", "wrong"), (80, 10, 5, 5))[0]
    body = {"prompt": [i % 250, i // 250], "seed": i, "max_tokens": counts, "stream": True, "return_token_ids": True}
    if kind == "wrong":
        answer = await http.post(url, json={**body, "top_p": 7})
        assert answer.status_code == 400
        return None
    text = ""
    async with http.stream("POST", url, json=body) as answer:
        assert answer.status_code == 200
        async for part in answer.aiter_text():
            text += part
            if kind == "leaves" and len(text) > rng.randint(0, 2000):
                return None
            if kind == "slow":
                await asyncio.sleep(0.005)
    *chunks, done = events_of(text)
    assert done == "[DONE]"
    parts = [chunk["choices"][0] for chunk in chunks]
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    return parts[-1]["finish_reason"], tuple(token_id for part in parts for token_id in part["token_ids"])


def many(live, clients, counts, seed):
    """So many clients at once; what each was answered."""

    async def main():
        limits, rng = httpx2.Limits(max_connections=None), random.Random(seed)
        async with httpx2.AsyncClient(timeout=120, limits=limits) as http:
            rngs = [random.Random(rng.random()) for _ in range(clients)]
            return await asyncio.gather(
                *(_one(http, live.url + COMPLETIONS, i, rngs[i], counts) for i in range(clients))
            )

    return asyncio.run(main())


def loaded(clients, counts, rounds):
    """Rounds of many clients; memory in use after each."""

    def make():
        return toy(PagedToyModel(vocab_size=257, end_token_ids=(256,)), num_blocks=16 * 16, max_num_seqs=16)

    prompts = [[i % 250, i // 250] for i in range(clients)]
    params = [SamplingParams(temperature=1.0, top_p=1.0, seed=i, max_tokens=counts) for i in range(clients)]
    expected = [(output.outputs[0].finish_reason, output.outputs[0].token_ids)
                for output in toy().generate(prompts, params)]  # fmt: skip
    memory = []
    with Live(make) as live:
        for seed in range(rounds):
            answers = many(live, clients, counts, seed)
            live.all_free(30)
            told = [(i, answer) for i, answer in enumerate(answers) if answer is not None]
            assert len(told) > clients // 2
            assert told == [(i, expected[i]) for i, _ in told]
            memory.append(_resident())
    return memory


def _resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])


def test_no_answer_is_lost_or_mixed_among_many():
    loaded(clients=30, counts=20, rounds=1)


@pytest.mark.deep
def test_no_answer_is_lost_or_mixed_among_three_hundred():
    memory = loaded(clients=300, counts=50, rounds=5)
    assert memory[4] <= memory[0] * 1.05
