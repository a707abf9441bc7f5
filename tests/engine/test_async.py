"""AsyncLLM: one running batch for all tasks, loops and threads; nobody hangs, nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time

import pytest
from tests.engine.gated import Gated
from tests.engine.waiting import HOT, LONG, all_free, alone, small

from klero import AsyncLLM, OptionError, ParameterError, SamplingParams
from klero.engine import LLM
from klero.errors import RequestError
from klero.testing.models import PagedToyModel, ToyModel


def test_requests_join_the_running_batch():
    async def main():
        model = Gated()
        async with small(model) as llm:
            first = asyncio.create_task(llm.generate([1, 2], HOT))
            await model.wait_for_step(1)
            second = asyncio.create_task(llm.generate([3], HOT))
            third = asyncio.create_task(anext(llm.stream([4], HOT)))
            await asyncio.sleep(0.05)
            model.steps.release(100)
            outputs = await asyncio.gather(first, second)
            await third
        return model.seen, outputs

    seen, outputs = asyncio.run(main())
    assert seen[:2] == [1, 3]
    assert [o.outputs[0].token_ids for o in outputs] == [alone([1, 2]), alone([3])]
    assert outputs[1].metrics.seconds_queued >= 0.05  # from the call on, the step that it had to wait for included


def test_many_tasks_of_several_loops_and_threads():
    llm = AsyncLLM(PagedToyModel(), block_size=4, num_blocks=40, max_num_seqs=8)
    results = {}

    def thread(k):
        async def one(i):
            params = SamplingParams(temperature=1.0, seed=i, max_tokens=12)
            if i % 2:
                return (await llm.generate([k, i], params)).outputs[0].token_ids
            stream = llm.stream([k, i], params)
            token_ids = sum([delta.token_ids async for delta in stream], ())
            assert stream.output.outputs[0].token_ids == token_ids
            return token_ids

        async def main():
            return await asyncio.gather(*(one(i) for i in range(6)))

        results[k] = asyncio.run(main())

    threads = [threading.Thread(target=thread, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    asyncio.run(all_free(llm))
    asyncio.run(llm.close())
    for k, lists in results.items():
        for i, token_ids in enumerate(lists):
            assert token_ids == alone([k, i], SamplingParams(temperature=1.0, seed=i, max_tokens=12))
    assert len(results) == 4


def leaves(how):
    """Start a request and leave it while step 3 runs; the sequences of the steps that follow."""

    async def main():
        model = Gated()
        async with small(model) as llm:
            model.steps.release(2)
            stays = asyncio.create_task(llm.generate([9], HOT))
            await model.wait_for_step(3)
            task = asyncio.create_task(how(llm))
            while llm._loop._calls.empty():  # it is asked before step 3 ends
                await asyncio.sleep(0.001)
            model.steps.release(2)
            await model.wait_for_step(5)
            while llm.llm.engine.num_unfinished < 2:
                await asyncio.sleep(0.001)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            del task
            model.steps.release()  # step 5, which it still had a part in
            await model.wait_for_step(6)
            assert llm.llm.engine.num_unfinished == 1
            assert llm.llm.engine.sampler.slots.num_free == llm.llm.engine.sampler.slots.num_slots - 1
            model.steps.release(100)
            assert (await stays).outputs[0].token_ids == alone([9])
            await all_free(llm)
        return model.seen

    return asyncio.run(main())


async def _reads(stream):
    async for _ in stream:
        pass


@pytest.mark.parametrize("how", [lambda llm: llm.generate([1], LONG), lambda llm: _reads(llm.stream([1], LONG))])
def test_a_cancelled_task_frees_its_slots_within_a_step(how):
    assert leaves(how)[4:7] == [2, 1, 1]


def test_leaving_a_stream_frees_its_slots():
    endless = SamplingParams(temperature=1.0, seed=5)  # a million tokens

    async def main():
        async with AsyncLLM(ToyModel(max_model_len=10**6), max_num_seqs=2) as llm:
            async for _ in llm.stream([1], endless):
                break
            await all_free(llm)
            with contextlib.suppress(KeyError):
                async for delta in llm.stream([1], endless):
                    raise KeyError(delta.index)
            await all_free(llm)
            stream = llm.stream([1], endless)
            await anext(stream)
            await stream.aclose()
            await all_free(llm)
            assert [delta async for delta in stream] == []
            assert stream.output is None
            held = llm.stream([1], endless)
            reading = asyncio.create_task(_reads(held))
            await asyncio.sleep(0.01)
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
            await all_free(llm)
            assert [delta async for delta in held] == []
            return (await llm.generate([1], HOT)).outputs[0].token_ids

    assert asyncio.run(main()) == alone([1])


def test_abort_answers_with_what_is_there():
    async def main():
        model = Gated()
        async with small(model) as llm:
            waits = asyncio.create_task(llm.generate([1], LONG, request_id="r"))
            model.steps.release(3)
            await model.wait_for_step(4)
            aborting = asyncio.create_task(llm.abort("r"))
            await asyncio.sleep(0.01)
            model.steps.release()
            await aborting
            output = await waits
            with pytest.raises(RequestError, match="no such request"):
                await llm.abort("r")
            cancelled = asyncio.create_task(llm.abort("x"))
            await asyncio.sleep(0)
            cancelled.cancel()
            model.steps.release(100)
            again = await llm.generate([1], HOT, request_id="r")
        return output, again

    output, again = asyncio.run(main())
    assert output.request_id == "r"
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("abort", alone([1], LONG)[:4])
    assert again.outputs[0].token_ids == alone([1])


def test_what_is_wrong_with_a_request_is_raised_to_its_own_caller():
    async def main():
        async with AsyncLLM(ToyModel()) as llm:
            good = asyncio.create_task(llm.generate([1], HOT, request_id="good"))
            await asyncio.sleep(0)
            for prompt, params, request_id, error, words in [
                ([], HOT, None, RequestError, "empty"),
                ([1.5], HOT, None, RequestError, "integer"),
                ("text", HOT, None, RequestError, "tokenizer"),
                ([1], {"max_tokens": 3}, None, RequestError, "from_dict"),
                ([1], SamplingParams(max_tokens=999), None, ParameterError, "max_tokens"),
                ([1], HOT, 5, RequestError, "non-empty string"),
                (None, HOT, None, RequestError, "must be a text"),
            ]:
                with pytest.raises(error, match=words):
                    await llm.generate(prompt, params, request_id=request_id)
                with pytest.raises(error, match=words):
                    await anext(llm.stream(prompt, params, request_id=request_id))
            return (await good).outputs[0].token_ids

    assert asyncio.run(main()) == alone([1])


def test_two_requests_of_one_name_are_told_apart():
    async def main():
        model = Gated()
        async with small(model) as llm:
            first = asyncio.create_task(llm.generate([1], HOT, request_id="r"))
            await model.wait_for_step(1)
            second = asyncio.create_task(llm.generate([2], HOT, request_id="r"))
            await asyncio.sleep(0)
            model.steps.release(100)
            with pytest.raises(RequestError, match="is running"):
                await second
            return (await first).outputs[0].token_ids

    assert asyncio.run(main()) == alone([1])


def test_an_llm_is_borrowed_and_given_back():
    llm = LLM(ToyModel())
    borrowed = AsyncLLM(llm)
    for use in (
        lambda: llm.generate([1], HOT),
        lambda: next(llm.stream([1], HOT)),
        lambda: llm.abort("r"),
        lambda: AsyncLLM(llm),
        llm.close,
    ):
        with pytest.raises(RequestError, match="an AsyncLLM runs this"):
            use()
    assert asyncio.run(borrowed.generate([1], HOT)).outputs[0].token_ids == alone([1])
    asyncio.run(borrowed.close())
    assert llm.generate([1], HOT)[0].outputs[0].token_ids == alone([1])
    stream = llm.stream([1], HOT)
    next(stream)
    with pytest.raises(RequestError, match="a generate or stream of this LLM runs"):
        AsyncLLM(llm)
    stream.close()
    with pytest.raises(OptionError, match="seed"):
        AsyncLLM(llm, seed=3)


def test_one_that_nobody_holds_ends_its_thread_and_frees_the_model():
    llm = AsyncLLM(ToyModel())
    engine, thread = llm.llm.engine, llm._loop._thread
    assert thread.is_alive()
    del llm
    gc.collect()
    assert not thread.is_alive()
    assert engine.closed


def test_start_returns_once_the_request_is_in():
    async def main():
        async with small(model := Gated()) as llm:
            first, second = llm.stream([1], LONG), llm.stream([2], HOT)
            await first.start()
            await model.wait_for_step(1)
            starting = asyncio.create_task(second.start())
            await asyncio.sleep(0.02)
            assert not starting.done()  # the step that runs ends before
            model.steps.release(1)
            await starting
            assert llm.llm.engine.num_unfinished == 2
            model.steps.release(100)
            with pytest.raises(RequestError, match="must be an integer in"):
                await llm.stream([10**6], HOT).start()
            await first.aclose()
            assert await second.read()

    asyncio.run(main())


def test_read_takes_all_there_is():
    async def main():
        async with small(model := Gated()) as llm:
            stream, model_free = llm.stream([1], HOT), model.steps.release
            await stream.start()
            model_free(100)
            while llm.llm.engine.num_unfinished:
                await asyncio.sleep(0.001)
            deltas = [await stream.read(), await stream.read()]
            assert sum((delta.token_ids for delta in deltas[0]), ()) == alone([1])
            assert deltas[1] == []
            assert stream.output.outputs[0].token_ids == alone([1])
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    asyncio.run(main())


def test_read_tells_what_came_before_an_error_first():
    class Failing(Gated):
        def forward(self, step):
            if len(self.seen) == 2:
                raise KeyError("gone")
            return super().forward(step)

    async def main():
        async with small(model := Failing()) as llm:
            stream = llm.stream([1], LONG)
            await stream.start()
            model.steps.release(100)
            while llm.llm.engine.num_unfinished:
                await asyncio.sleep(0.001)
            deltas = await stream.read()
            assert [delta.finish_reason for delta in deltas][-1] == "error"
            assert sum((delta.token_ids for delta in deltas), ()) == alone([1])[:2]

    asyncio.run(main())


def test_streams_of_an_event_loop_that_is_gone_are_dropped():
    model = Gated()
    llm = small(model)

    async def leave():
        asked = await llm._ask([1], LONG, None, 0, None, stream=True)  # as a DeltaStream that is never collected
        llm._loop.submit(asked)
        await model.wait_for_step(1)
        return asked

    loop = asyncio.new_event_loop()
    asked = loop.run_until_complete(leave())
    loop.close()
    model.steps.release(100)
    asyncio.run(all_free(llm))
    assert len(model.seen) <= 2
    assert asked.event_loop.is_closed()
    assert asyncio.run(llm.generate([1], HOT)).outputs[0].token_ids == alone([1])
    asyncio.run(llm.close())


def test_idle_costs_no_processor_time():
    async def main():
        async with AsyncLLM(ToyModel()) as llm:
            await llm.generate([1], HOT)
            begin = time.process_time()
            await asyncio.sleep(0.3)
            return time.process_time() - begin

    assert asyncio.run(main()) < 0.05


def test_the_event_loop_goes_on_while_a_step_runs():
    async def main():
        model = Gated()
        async with small(model) as llm:
            waits = asyncio.create_task(llm.generate([1], HOT))
            await model.wait_for_step(1)
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert not waits.done()
            model.steps.release(100)
            return (await waits).outputs[0].token_ids

    assert asyncio.run(main()) == alone([1])
