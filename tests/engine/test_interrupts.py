"""Interrupts between any two lines, for whoever drives the engine himself and goes on."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from tests.engine.free import assert_all_free

from klero import AsyncLLM, SamplingParams
from klero.engine import LLM, Engine
from klero.testing.models import PagedToyModel, ToyModel

FILES = (
    "engine/engine.py", "engine/scheduler.py", "engine/request.py", "batch/slots.py", "batch/blocks.py", "batch/kv.py",
    "batch/input_batch.py", "batch/changes.py", "sampling/sampler.py", "finish/rules.py",
)  # fmt: skip
ASKED = {
    "a": ([1, 2, 3], SamplingParams(temperature=1.0, seed=5, max_tokens=5, logprobs=0)),
    "b": ([4] * 6, SamplingParams(temperature=1.0, seed=6, max_tokens=4, n=2, logprobs=0)),
}


class Interrupt:
    """Raise KeyboardInterrupt at line number k of klero's engine, batch and sampler, and at no other."""

    def __init__(self, k):
        self.left = k

    def __enter__(self):
        sys.settrace(self.trace)

    def __exit__(self, *_):
        sys.settrace(None)

    def trace(self, frame, event, _):
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        self.left -= event == "line"
        if self.left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self.trace


def engine_of(model):
    engine = Engine(model(), max_num_seqs=3, block_size=4, num_blocks=12, max_num_batched_tokens=8)
    for name, (prompt, params) in ASKED.items():
        engine.add_request(name, prompt, params, stream=True)
    return engine


def run(engine, k=None):
    """Every answer, whatever happens; the deltas' tokens by request and choice."""
    found, streamed = {}, {}
    with Interrupt(10**9 if k is None else k) as _:
        try:
            found |= {output.request_id: output for output in engine.step()}
            found |= {output.request_id: output for output in engine.step()}
        except KeyboardInterrupt:
            sys.settrace(None)
    while engine.num_unfinished:
        found |= {output.request_id: output for output in engine.step()}
    for delta in engine.take_deltas():
        streamed[delta.request_id, delta.index] = streamed.get((delta.request_id, delta.index), ()) + delta.token_ids
    return found, streamed


@pytest.mark.parametrize("model", [ToyModel, PagedToyModel])
def test_who_goes_on_after_an_interrupt_gets_every_answer(model):
    """Each is the right one, or ends with an error; tokens, logprobs and deltas always tell of the same."""
    right, _ = run(engine_of(model))
    num_broken = 0
    for k in range(0, 2400, 7):
        engine = engine_of(model)
        found, streamed = run(engine, k)
        assert found.keys() == ASKED.keys()
        for name, output in found.items():
            for choice, whole in zip(output.outputs, right[name].outputs, strict=True):
                assert len(choice.logprobs) == len(choice.token_ids)
                if choice.finish_reason == "error":
                    num_broken += 1
                    assert "interrupted" in choice.error
                    continue
                assert choice == whole
                assert np.array_equal(choice.logprobs.sampled, whole.logprobs.sampled)
                assert streamed[name, choice.index] == choice.token_ids
        assert_all_free(engine)
    assert num_broken > 0  # some came while a token was brought


def test_the_prefix_cache_is_reset_between_two_steps_only():
    llm = LLM(PagedToyModel(), block_size=4, num_blocks=64)
    prompt, two = list(range(17)), SamplingParams(max_tokens=2)
    llm.generate([prompt], two)
    llm.reset_prefix_cache()
    assert llm.generate([prompt], two)[0].metrics.num_cached_tokens == 0
    assert llm.generate([prompt], two)[0].metrics.num_cached_tokens == 16
    stream = llm.stream([prompt], SamplingParams(max_tokens=9))
    next(stream)
    llm.reset_prefix_cache()  # what runs keeps its blocks, and they are shared no more
    tokens = [delta.token_ids for delta in stream]
    assert len(tokens) == 8
    assert llm.generate([prompt], two)[0].metrics.num_cached_tokens == 0


async def reset(llm):
    prompt, two = list(range(17)), SamplingParams(max_tokens=2)
    await llm.generate(prompt, two)
    await llm.reset_prefix_cache()
    return (await llm.generate(prompt, two)).metrics.num_cached_tokens


def test_an_async_llm_resets_its_own():
    import asyncio

    async def both():
        async with AsyncLLM(PagedToyModel(), block_size=4, num_blocks=64) as llm:
            return await reset(llm)

    assert asyncio.run(both()) == 0
