"""Random histories: requests come, stream, are left, aborted; every token is that of a run alone, nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
import functools

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.engine.free import assert_all_free
from tests.engine.said import assert_same

from klero import AsyncLLM, SamplingParams
from klero.batch import Buckets
from klero.engine import LLM, Engine
from klero.testing.models import PagedToyModel, ToyModel

IDS = st.integers(0, 63)
PROMPTS = st.lists(IDS, min_size=1, max_size=12) | st.lists(IDS, max_size=4).map(lambda ids: [7] * 8 + ids)  # a prefix
BLOCK_SIZE, NUM_BLOCKS = 4, 12  # of 48 tokens; the longest request needs 12 + 20


def params_of(seed, n, max_tokens):
    """Odd seeds ask for logprobs too; no tokens is a prompt that is scored."""
    asked = {"logprobs": 1, "prompt_logprobs": 0} if seed % 2 or not max_tokens else {}
    return SamplingParams(temperature=1.0, seed=seed, n=n, max_tokens=max_tokens, **asked)


PARAMS = st.builds(params_of, st.integers(0, 2**64 - 1), st.integers(1, 3), st.integers(0, 20))


@functools.cache
def run_alone(prompt, seed, n, max_tokens):
    """The answer to a request that runs by itself."""
    return LLM(ToyModel()).generate([prompt], params_of(seed, n, max_tokens))[0]


def alone(*asked):
    """The tokens of each choice of a request that runs by itself."""
    return [choice.token_ids for choice in run_alone(*asked).outputs]


def assert_output(output, prompt, params):
    """All is as in a run alone: all tokens, or the first ones of a request that was aborted; what is said of them."""
    expected = run_alone(tuple(prompt), params.seed, params.n, params.max_tokens)
    assert len(output.outputs) == params.n
    for choice, whole in zip(output.outputs, expected.outputs, strict=True):
        num = len(choice.token_ids)
        assert choice.finish_reason in ("length", "abort"), choice.error
        assert choice.token_ids == whole.token_ids[:num]
        assert choice.finish_reason == "abort" or num == len(whole.token_ids)
        if params.scores:
            assert_same(choice.logprobs, whole.logprobs.rows(0, num))
    if params.scores:
        num = 1 + int(np.count_nonzero(output.prompt_logprobs.rank))
        assert num == len(prompt) or output.outputs[0].finish_reason == "abort"
        assert_same(output.prompt_logprobs.rows(0, num), expected.prompt_logprobs.rows(0, num))
    assert output.metrics.num_generated_tokens == sum(len(choice.token_ids) for choice in output.outputs)


class EngineMachine(RuleBasedStateMachine):
    """The engine itself: add, step, abort, discard, steps that raise."""

    @initialize(
        paged=st.booleans(), max_num_seqs=st.integers(1, 5), budget=st.integers(1, 16), caching=st.booleans(),
        num_host_blocks=st.sampled_from([0, 3, 40]), parts=st.none() | st.integers(1, 4), padded=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
    )  # fmt: skip
    def start(self, paged, max_num_seqs, budget, caching, num_host_blocks, parts, padded, policy):
        model = (PagedToyModel if paged else ToyModel)()
        self.policy = policy
        self.engine = Engine(
            model, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS, enable_prefix_caching=caching, scheduling_policy=policy,
            swap_space=num_host_blocks * model.bytes_per_block(BLOCK_SIZE) / 2**30,
            max_microbatch_tokens=parts, max_microbatch_requests=parts,
            buckets=Buckets.doubling(8, 4) if padded else None,
        )  # fmt: skip
        self.asked, self.streamed, self.count = {}, {}, 0

    @rule(prompt=PROMPTS, params=PARAMS, stream=st.booleans(), priority=st.integers(-1, 1))
    def add(self, prompt, params, stream, priority):
        name = f"r{self.count}"
        self.count += 1
        self.asked[name] = prompt, params
        if stream:
            self.streamed[name] = [()] * params.n
        priority = priority if self.policy == "priority" else 0
        self.engine.add_request(name, prompt, params, stream=stream, priority=priority)

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self.take(self.engine.step())

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data):
        self.take([self.engine.abort(data.draw(st.sampled_from(sorted(self.asked))))])

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def discard(self, data):
        name = data.draw(st.sampled_from(sorted(self.asked)))
        self.engine.discard([name])
        del self.asked[name]
        self.streamed.pop(name, None)

    @precondition(lambda self: self.asked)
    @rule(fail=st.booleans())
    def step_that_raises(self, fail):
        """Run again, the sequences go on as if nothing had been; or those of the step end with an error."""
        forward = self.engine.model.forward
        self.engine.model.forward = None
        with contextlib.suppress(TypeError):
            self.take(self.engine.step())
        self.engine.model.forward = forward
        if fail:
            for output in self.engine.fail("broken"):
                assert {c.finish_reason for c in output.outputs} <= {"error", "length"}
                del self.asked[output.request_id]
                self.streamed.pop(output.request_id, None)
            self.engine.take_deltas()

    def take(self, outputs):
        for delta in self.engine.take_deltas():
            self.streamed[delta.request_id][delta.index] += delta.token_ids
        for output in outputs:
            assert_output(output, *self.asked.pop(output.request_id))
            streamed = self.streamed.pop(output.request_id, None)
            assert streamed in (None, [choice.token_ids for choice in output.outputs])

    @invariant()
    def seats_and_blocks_add_up(self):
        engine = self.engine
        assert set(engine.unfinished) == set(self.asked)
        choices = [choice for request in engine._requests.values() for choice in request.choices]
        seated = [choice.slot for choice in choices if choice.slot is not None]
        assert len(seated) == engine.sampler.slots.num_slots - engine.sampler.slots.num_free == engine.batch.num_seqs
        if engine.kv is not None:
            held = {block for choice in choices for block in choice.held.block_ids}
            assert engine.kv.blocks.num_free == NUM_BLOCKS - len(held)
            if engine.kv.host is not None:
                swapped = {block for choice in choices for block in choice.held.host_ids}
                assert engine.kv.host.num_free == engine.kv.host.num_blocks - len(swapped)

    def teardown(self):
        while self.asked:
            self.take(self.engine.step())
        assert_all_free(self.engine)
        assert not self.streamed


class AsyncMachine(RuleBasedStateMachine):
    """The asynchronous twin, its thread running freely: generate, stream, cancel, leave, abort."""

    @initialize(paged=st.booleans(), max_num_seqs=st.integers(1, 5), budget=st.integers(1, 16))
    def start(self, paged, max_num_seqs, budget):
        self.loop = asyncio.new_event_loop()
        self.llm = AsyncLLM(
            (PagedToyModel if paged else ToyModel)(), max_num_seqs=max_num_seqs, max_num_batched_tokens=budget,
            block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS,
        )  # fmt: skip
        self.tasks, self.count = {}, 0

    def begin(self, work, prompt, params):
        name = f"r{self.count}"
        self.count += 1
        self.tasks[name] = self.loop.create_task(work(name, prompt, params))

    @rule(prompt=PROMPTS, params=PARAMS)
    def generate(self, prompt, params):
        async def work(name, prompt, params):
            assert_output(await self.llm.generate(prompt, params, request_id=name), prompt, params)

        self.begin(work, prompt, params)

    @rule(prompt=PROMPTS, params=PARAMS, leave_after=st.none() | st.integers(1, 9))
    def stream(self, prompt, params, leave_after):
        async def work(name, prompt, params):
            seen, num_deltas = [()] * params.n, 0
            stream = self.llm.stream(prompt, params, request_id=name)
            async for delta in stream:
                seen[delta.index] += delta.token_ids
                num_deltas += 1
                if num_deltas == leave_after:
                    break
            else:
                assert_output(stream.output, prompt, params)
                assert seen == [choice.token_ids for choice in stream.output.outputs]
            for token_ids, whole in zip(seen, alone(tuple(prompt), *self.key(params)), strict=True):
                assert token_ids == whole[: len(token_ids)]

        self.begin(work, prompt, params)

    @staticmethod
    def key(params):
        return params.seed, params.n, params.max_tokens

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def cancel(self, data):
        task = self.tasks.pop(data.draw(st.sampled_from(sorted(self.tasks))))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):  # but what it has found wrong is raised
            self.loop.run_until_complete(task)

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def abort(self, data):
        with contextlib.suppress(ValueError):  # it may have ended, or not begun
            self.loop.run_until_complete(self.llm.abort(data.draw(st.sampled_from(sorted(self.tasks)))))

    @rule(turns=st.integers(1, 5))
    def go_on(self, turns):
        async def some():
            for _ in range(turns):
                await asyncio.sleep(0)

        self.loop.run_until_complete(some())

    def teardown(self):
        engine = self.llm.llm.engine

        async def end():
            await asyncio.wait_for(asyncio.gather(*self.tasks.values()), 30)
            for _ in range(1000):  # what was left ends before the next step
                if engine.num_unfinished == 0:
                    break
                await asyncio.sleep(0.005)
            assert engine.num_unfinished == 0
            await self.llm.close()

        self.loop.run_until_complete(end())
        self.loop.close()
        assert_all_free(engine)


EXAMPLES = settings.default.max_examples
TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=EXAMPLES // 2, stateful_step_count=25)
TestAsyncMachine = AsyncMachine.TestCase
TestAsyncMachine.settings = settings(max_examples=EXAMPLES // 4, stateful_step_count=20)
