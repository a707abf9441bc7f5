"""What is said about tokens, through AsyncLLM."""

from __future__ import annotations

import asyncio

from tests.engine.said import assert_prompt, assert_same

from klero import AsyncLLM, SamplingParams
from klero.engine import LLM
from klero.logprobs import join
from klero.testing.models import PagedToyModel


def test_answers_and_streams_say_what_generate_says():
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=8, n=2, prompt_logprobs=2, logprobs=3, return_kept=True)
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=2)
    prompt = [1, 2, 3, 4, 5]
    (expected,) = LLM(PagedToyModel()).generate([prompt], params)

    async def read(llm):
        stream = llm.stream(prompt, params)
        deltas = [delta async for delta in stream]
        return deltas, stream.output

    async def main():
        async with AsyncLLM(PagedToyModel(), block_size=4, num_blocks=64, max_num_batched_tokens=3) as llm:
            asked = llm.generate(prompt, params), llm.generate(prompt, scoring), read(llm)
            return await asyncio.gather(*asked)

    output, scored, (deltas, streamed) = asyncio.run(main())
    assert_prompt(scored, prompt, 2)
    for found in (output, streamed):
        assert_prompt(found, prompt, 2)
        for choice, whole in zip(found.outputs, expected.outputs, strict=True):
            assert choice.token_ids == whole.token_ids
            assert_same(choice.logprobs, whole.logprobs)
    for choice in expected.outputs:
        mine = [delta.logprobs for delta in deltas if delta.index == choice.index]
        assert_same(join(mine), choice.logprobs)
