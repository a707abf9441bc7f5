"""The default model behind HTTP, asked by the official client: what the library says, field for field."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Literal

import pytest
from pydantic import BaseModel
from tests.server.live import Live
from tests.server.shapes import held
from tests.server.toys import put_together

from klero import SamplingParams
from klero.engine import LLM

pytestmark = pytest.mark.smollm2
openai = pytest.importorskip("openai")

MODEL = "smollm2"
FRANCE = "The capital of France is"
HI = [{"role": "user", "content": "Say hi."}]
DRAWN = {"temperature": 1.0, "top_p": 1.0}
PLAIN = SamplingParams(**DRAWN, seed=11, max_tokens=4, n=2, logprobs=3)
MUCH = SamplingParams(
    temperature=0.8, top_p=0.9, seed=12, max_tokens=4, logit_bias={260: 1.5}, presence_penalty=0.5,
    frequency_penalty=0.25, repetition_penalty=1.1, min_p=0.02, logprobs=0,
)  # fmt: skip
CROWD = [dataclasses.replace(SamplingParams(**DRAWN), seed=i, max_tokens=3) for i in range(16)]


class Served:
    """A live server; and what the library answered, before, to the same requests on the same model."""

    def __init__(self):
        self.llm = LLM(MODEL, dtype="float32", num_blocks=128, max_num_seqs=16, max_model_len=256)
        ids = self.llm.tokenizer.encode(FRANCE)
        prompts = [FRANCE, ids, self.llm.render(HI), *([FRANCE] * 16)]
        outputs = self.llm.generate(prompts, [PLAIN, MUCH, dataclasses.replace(PLAIN, n=1), *CROWD])
        self.plain, self.much, self.chat, *self.crowd = [output.outputs for output in outputs]
        self.ids = ids


@pytest.fixture(scope="module")
def served():
    return Served()


@pytest.fixture(scope="module")
def smollm2(served):
    with Live(lambda: served.llm, served_model_name=MODEL) as live:
        yield live
        live.all_free()


@pytest.fixture(scope="module")
def client(smollm2):
    with openai.OpenAI(base_url=smollm2.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def fields_of(params, *names):
    """The fields of a body."""
    return {name: getattr(params, name) for name in names}


BOTH = ("temperature", "top_p", "seed", "max_tokens")


def test_a_completion_is_what_the_library_gives_logprobs_to_the_last_bit(client, served):
    answer = client.completions.create(
        model=MODEL, prompt=FRANCE, n=2, logprobs=3, extra_body={"return_token_ids": True}, **fields_of(PLAIN, *BOTH)
    )
    for choice, expected in zip(answer.choices, served.plain, strict=True):
        assert tuple(choice.token_ids) == expected.token_ids
        assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)
        assert choice.logprobs.token_logprobs == expected.logprobs.sampled.tolist()
        assert [max(top.values()) for top in choice.logprobs.top_logprobs] == [
            max(float(expected.logprobs.top_of(i)[1][0]), float(expected.logprobs.sampled[i])) for i in range(4)
        ]
        assert choice.logprobs.text_offset[0] == len(FRANCE)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens - 8 == len(served.ids)


def test_ids_bias_and_penalties(client, served):
    body = {"min_p": 0.02, "repetition_penalty": 1.1, "return_token_ids": True}
    ask = fields_of(MUCH, *BOTH, "presence_penalty", "frequency_penalty", "logprobs")
    (choice,) = client.completions.create(
        model=MODEL, prompt=served.ids, logit_bias={"260": 1.5}, extra_body=body, **ask
    ).choices
    assert tuple(choice.token_ids) == served.much[0].token_ids
    assert choice.logprobs.token_logprobs == served.much[0].logprobs.sampled.tolist()


def test_a_chat_whole_and_streamed(client, served):
    ask = {"model": MODEL, "messages": HI, "logprobs": True, "top_logprobs": 3, **fields_of(PLAIN, *BOTH)}
    whole = client.chat.completions.create(**ask)
    expected = served.chat[0]
    assert whole.choices[0].message.content == expected.text
    assert [entry.logprob for entry in whole.choices[0].logprobs.content] == expected.logprobs.sampled.tolist()
    *chunks, last = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == expected.text
    assert [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content] == (
        whole.choices[0].logprobs.content
    )
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 4


def test_a_stream_adds_up_to_the_whole_in_every_field(smollm2):
    """With stop strings, receipts and prompt logprobs, and in the client's types."""
    from openai.types import Completion

    body = {"n": 2, "seed": 5, "max_tokens": 4, "stop": [" the", "."], "return_token_ids": True,
            "return_receipts": True, "prompt": [FRANCE, "Water boils at"], "logprobs": 2, "echo": True,
            "prompt_logprobs": 1}  # fmt: skip
    whole = smollm2.complete(**body)
    *chunks, usage, done = smollm2.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert done == "[DONE]"
    assert put_together(chunks, len(whole["choices"])) == whole["choices"]
    details = "prompt_tokens_details"  # what is cached by now
    assert {**usage["usage"], details: 0} == {**whole["usage"], details: 0}
    for answer in (whole, *chunks, usage):
        held(Completion, answer)


def test_a_stop_string_ends_the_text_before_it(client):
    ask = {"model": MODEL, "prompt": "1 2 3 4", "temperature": 0, "max_tokens": 8}
    (choice,) = client.completions.create(**ask, stop=[" 6", "9"]).choices
    assert (choice.text, choice.finish_reason, choice.model_extra["stop_reason"]) == (" 5", "stop", " 6")


class Word(BaseModel):
    word: Literal["hi", "bye"]


def test_structured_output_is_parsed_by_the_client(client):
    ask = {"model": MODEL, "messages": HI, "response_format": Word, "seed": 1, "max_tokens": 20}
    parsed = client.chat.completions.parse(**ask).choices[0].message.parsed
    assert parsed.word in ("hi", "bye")
    with client.chat.completions.stream(**ask) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed
    assert kinds.count("content.done") == 1


LOOK = {"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"at": {"enum": ["sea", "sky"]}}, "required": ["at"],
    "additionalProperties": False}}}  # fmt: skip


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_tools_are_refused_as_its_template_does_not_use_them(client, choice):
    with pytest.raises(openai.BadRequestError, match="has no place for tools") as caught:
        client.chat.completions.create(model=MODEL, messages=HI, tools=[LOOK], tool_choice=choice)
    assert caught.value.param == "tools"


def test_a_prefix_is_computed_once_and_usage_says_so(client):
    ask = {"model": MODEL, "max_tokens": 1, "extra_body": {"cache_salt": "mine"}}
    prompt = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen. "
    first, second = (client.completions.create(prompt=prompt + word, **ask).usage for word in ("So", "But then"))
    assert first.prompt_tokens_details.cached_tokens == 0
    assert 0 < second.prompt_tokens_details.cached_tokens < first.prompt_tokens


def test_a_prompt_is_scored(client, served):
    (choice,) = client.completions.create(
        model=MODEL, prompt=FRANCE + " Paris", max_tokens=0, echo=True, logprobs=1
    ).choices
    assert (choice.text, choice.logprobs.token_logprobs[0]) == (FRANCE + " Paris", None)
    assert choice.logprobs.tokens[-1] == " Paris"
    assert choice.logprobs.token_logprobs[-1] > -3
    assert len(choice.logprobs.tokens) == len(served.ids) + 1


def test_sixteen_streams_at_once_each_as_if_alone(smollm2, served):
    async def one(client, i):
        ask = {"model": MODEL, "prompt": FRANCE, "extra_body": {"return_token_ids": True}}
        stream = await client.completions.create(**ask, **fields_of(CROWD[i], *BOTH), stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
        return tuple(i for chunk in chunks for i in chunk.token_ids), "".join(chunk.text for chunk in chunks)

    async def main():
        async with openai.AsyncOpenAI(base_url=smollm2.url + "/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, i) for i in range(16)))

    assert asyncio.run(main()) == [(choice.token_ids, choice.text) for (choice,) in served.crowd]


def test_a_stream_that_is_closed_frees_what_it_held(client, smollm2):
    with client.completions.create(model=MODEL, prompt=FRANCE, max_tokens=200, stream=True) as stream:
        next(iter(stream))
    smollm2.all_free()
