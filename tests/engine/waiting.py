"""What tests of AsyncLLM share."""

from __future__ import annotations

import asyncio

from klero import AsyncLLM, SamplingParams
from klero.engine import LLM
from klero.testing.models import ToyModel

HOT = SamplingParams(temperature=1.0, seed=5, max_tokens=12)
LONG = SamplingParams(temperature=1.0, seed=5, max_tokens=200)


def alone(prompt, params=HOT):
    """The tokens of a request that runs by itself."""
    return LLM(ToyModel()).generate([prompt], params)[0].outputs[0].token_ids


async def all_free(llm):
    """Wait until the engine holds nothing; it must, soon."""
    engine = llm.llm.engine
    for _ in range(500):
        if engine.num_unfinished == 0 and engine.sampler.slots.num_free == engine.sampler.slots.num_slots:
            assert engine.kv is None or engine.kv.blocks.num_free == engine.kv.blocks.num_blocks
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{engine.num_unfinished} requests are left")


def small(model):
    return AsyncLLM(model, block_size=4, num_blocks=64)
