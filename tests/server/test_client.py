"""The official `openai` client against a live server, sync and async, and many clients at once."""

from __future__ import annotations

import asyncio
import random

import httpx2
import pytest
from pydantic import BaseModel
from tests.server.live import Live, events_of, toy
from tests.server.shapes import held
from tests.server.toys import make_tokenizer as tokenizer_with_tools
from tests.server.toys import saying

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
    body = {"top_k": 3, "min_p": 0.01, "return_token_ids": True, "return_receipts": True, "request_id": "mine"}
    answer = client.completions.create(model="toy", prompt="Hello", extra_body=body, **SEEDED)
    (choice,) = answer.choices
    expected = alone("Hello", top_k=3, min_p=0.01, **SEEDED)
    assert tuple(choice.token_ids) == expected.token_ids
    assert answer.model_extra == {"request_id": "mine"}
    extra = choice.model_extra
    assert [receipt["token_id"] for receipt in extra.pop("receipts")] == extra["token_ids"]
    assert extra == {"seed": 7, "reproducible": True, "stop_reason": None, "token_ids": [*expected.token_ids],
                     "prompt_token_ids": [39, 68, 75, 75, 78]}  # fmt: skip


ALL = {"return_token_ids": True, "return_receipts": True, "prompt_logprobs": 1, "request_id": "mine"}
CASES = [
    ("completions", {"prompt": "Hello"}),
    ("completions", {"prompt": ["a", "b"], "n": 2, "logprobs": 2, "echo": True, "stop": ["e", "\ufffd"], **ALL}),
    ("completions", {"prompt": [[1, 2], [3]], "logprobs": 0, "max_tokens": 0, "echo": True}),
    ("chat/completions", {"messages": HELLO}),
    ("chat/completions", {"messages": HELLO, "n": 2, "logprobs": True, "top_logprobs": 2, **ALL}),
    ("chat/completions", {"messages": HELLO, "response_format": {"type": "json_object"}, "max_tokens": 3}),
]


@pytest.mark.parametrize("route, body", CASES)
def test_answers_and_chunks_are_the_client_s_types_and_nothing_beside(live, route, body):
    from openai.types import Completion
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    whole, chunk = (Completion, Completion) if "prompt" in body else (ChatCompletion, ChatCompletionChunk)
    body = {**SEEDED, **body}
    held(whole, live.post("/v1/" + route, body).json())
    *chunks, done = live.events("/v1/" + route, {**body, "stream_options": {"include_usage": True}})
    assert done == "[DONE]"
    models = [held(chunk, one) for one in chunks]
    assert models[-1].usage.total_tokens == models[-1].usage.prompt_tokens + models[-1].usage.completion_tokens


def test_the_model_is_the_client_s_type(live):
    from openai.types import Model

    (card,) = live.get("/v1/models").json()["data"]
    assert held(Model, card).max_model_len == 256


def test_raw_responses_and_streams_of_bytes(client):
    raw = client.completions.with_raw_response.create(model="toy", prompt="Hello", **SEEDED)
    text = alone("Hello", **SEEDED).text
    assert (raw.status_code, raw.parse().choices[0].text) == (200, text)
    ask = {"model": "toy", "prompt": "Hello", "stream": True, **SEEDED}
    with client.completions.with_streaming_response.create(**ask) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        *chunks, done = events_of("".join(answer.iter_text()))
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


def test_a_stream_that_is_closed_early_frees_what_it_held(client, live):
    ask = {"model": "toy", "prompt": "Hello", "max_tokens": 200, "extra_body": {"ignore_eos": True}, "stream": True}
    stream = client.completions.create(**ask)
    next(iter(stream))
    stream.close()
    live.all_free()
    with client.completions.create(**ask) as stream:
        next(iter(stream))
    live.all_free()


def test_what_changes_nothing_is_taken_and_what_would_is_refused_by_its_name(client):
    labels = {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k", "store": False,
              "service_tier": "auto", "modalities": ["text"], "max_completion_tokens": 12, "seed": 7}  # fmt: skip
    answer = client.chat.completions.create(model="toy", messages=HELLO, **labels)
    assert answer.choices[0].message.content == alone("[user]Hello[assistant]", **SEEDED).text
    refused = {"store": True, "service_tier": "flex", "modalities": ["audio"], "verbosity": "low", "audio": {},
               "prediction": {"type": "content", "content": "x"}, "web_search_options": {},
               "reasoning_effort": "low", "functions": [{"name": "f"}], "nonsense": 1}  # fmt: skip
    for name, value in refused.items():
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="toy", messages=HELLO, extra_body={name: value})
        assert caught.value.param == name
    for name, value in {"suffix": "x", "best_of": 3}.items():
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="toy", prompt="x", **{name: value})
        assert caught.value.param == name


def test_bias_and_penalties_are_the_library_s(client):
    fields = {"logit_bias": {"66": 2.5, "67": -100}, "presence_penalty": 1.5, "frequency_penalty": -0.5, "top_p": 0.9}
    (choice,) = client.completions.create(model="toy", prompt="Hello", **fields, **SEEDED).choices
    bias = {66: 2.5, 67: -100.0}
    params = SamplingParams(temperature=1.0, **{**fields, "logit_bias": bias}, **SEEDED)
    assert choice.text == toy().generate(["Hello"], params)[0].outputs[0].text


def test_an_answer_can_be_sent_back_as_the_client_has_it(client):
    message = client.chat.completions.create(model="toy", messages=HELLO, **SEEDED).choices[0].message
    asked = [{"model": "toy", "messages": [*HELLO, one, *HELLO], **SEEDED} for one in (message, message.model_dump())]
    texts = [client.chat.completions.create(**one).choices[0].message.content for one in asked]
    assert texts == [alone(f"[user]Hello[assistant]{message.content}[user]Hello[assistant]", **SEEDED).text] * 2


class Answer(BaseModel):
    yes: bool


def test_structured_output(client):
    """Parsed by the client's own helpers, whole and as a stream of events."""
    ask = {"model": "toy", "messages": HELLO, "response_format": Answer, "max_tokens": 40}
    assert isinstance(client.chat.completions.parse(**ask, seed=3).choices[0].message.parsed, Answer)
    with client.chat.completions.stream(**ask, seed=3) as stream:
        events = list(stream)
    (done,) = [event for event in events if event.type == "content.done"]
    deltas = "".join(event.delta for event in events if event.type == "content.delta")
    assert Answer.model_validate_json(deltas) == done.parsed
    assert done.parsed == client.chat.completions.parse(**ask, seed=3).choices[0].message.parsed


class look(BaseModel):
    at: str


CALLS = (
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}<{{ call.function.name }}>{% endfor %}"
    "{% endfor %}{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}"
    '{# <tool_call>{"name": n, "arguments": {}}</tool_call> #}'
)


def test_tools_are_called_and_parsed_by_the_client():
    tokenizer = tokenizer_with_tools(CALLS)
    # The client asks for strict arguments, so a grammar holds them, in compact JSON.
    said = 'I look.<tool_call>\n{"name": "look", "arguments": {"at":"sea"}}\n</tool_call>'
    tool = openai.pydantic_function_tool(look)
    ask = {"model": "toy", "messages": HELLO, "temperature": 0}
    with (
        Live(lambda: saying(said, len("Hello(look)"), tokenizer, max_model_len=512)) as live,
        openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        parsed = client.chat.completions.parse(**ask, tools=[tool]).choices[0]
        assert (parsed.finish_reason, parsed.message.content) == ("tool_calls", "I look.")
        (call,) = parsed.message.tool_calls
        assert call.function.parsed_arguments == look(at="sea")
        with client.chat.completions.stream(**ask, tools=[tool]) as stream:
            events = list(stream)
        (done,) = [one for one in events if one.type == "tool_calls.function.arguments.done"]
        assert (done.name, done.parsed_arguments) == ("look", look(at="sea"))
        final = stream.get_final_completion().choices[0]
        assert final.message.tool_calls[0].function.arguments == call.function.arguments
        result = {"role": "tool", "tool_call_id": call.id, "content": "blue"}
        for message in (parsed.message, final.message):  # come back as they are
            again = {**ask, "messages": [*HELLO, message, result], "max_tokens": 1}
            usage = client.chat.completions.create(**again).usage
            assert usage.prompt_tokens == len("HelloI look.<look>blue")


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
