"""AsyncLLM when something breaks, or is closed: whoever waits is told, and the engine goes on where it can."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.engine.gated import Gated
from tests.engine.waiting import HOT, LONG, all_free, alone, small

from klero import AsyncLLM
from klero.errors import KleroError, RequestError
from klero.testing.models import ToyModel


class Breaking(ToyModel):
    """Raises `error` in the step that first sees token 9 of a prompt."""

    error: BaseException = RuntimeError("the model broke")

    def forward(self, step):
        if 9 in step.input_ids[step.positions == 0]:
            raise self.error
        return super().forward(step)


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on():
    async def main():
        async with AsyncLLM(Breaking()) as llm:
            bad = await llm.generate([9], HOT)
            deltas = [delta async for delta in llm.stream([9], HOT)]
            return bad, deltas, await llm.generate([1], HOT)

    bad, deltas, good = asyncio.run(main())
    assert (bad.outputs[0].finish_reason, bad.outputs[0].error) == ("error", "RuntimeError: the model broke")
    assert [(d.finish_reason, d.error) for d in deltas] == [("error", "RuntimeError: the model broke")]
    assert good.outputs[0].token_ids == alone([1])


def test_a_failing_step_leaves_those_who_had_no_part_in_it():
    """One token a step: the request that waits for its turn is not hit."""

    async def main():
        async with AsyncLLM(Breaking(), max_num_batched_tokens=1) as llm:
            return await asyncio.gather(llm.generate([9], HOT), llm.generate([1], HOT))

    bad, good = asyncio.run(main())
    assert bad.outputs[0].finish_reason == "error"
    assert good.outputs[0].token_ids == alone([1])


def test_an_exception_that_no_request_can_be_blamed_for_reaches_everyone():
    async def main():
        async with AsyncLLM(ToyModel()) as llm:
            schedule = llm.llm.engine.scheduler.schedule

            def broken():
                raise ZeroDivisionError("nobody's fault")

            llm.llm.engine.scheduler.schedule = broken
            results = await asyncio.gather(llm.generate([1], HOT), anext(llm.stream([2], HOT)), return_exceptions=True)
            llm.llm.engine.scheduler.schedule = schedule
            await all_free(llm)
            return results, await llm.generate([1], HOT)

    results, good = asyncio.run(main())
    assert [type(result) for result in results] == [ZeroDivisionError] * 2
    assert good.outputs[0].token_ids == alone([1])


def test_when_the_thread_dies_nobody_hangs():
    async def main():
        model = Breaking()
        model.error = SystemExit("out")
        llm = AsyncLLM(model)
        results = await asyncio.gather(llm.generate([9], HOT), anext(llm.stream([9], HOT)), return_exceptions=True)
        with pytest.raises(KleroError, match="out"):
            await llm.generate([1], HOT)
        with pytest.raises(KleroError, match="out"):
            await llm.abort("r")
        await llm.close()
        return results

    results = asyncio.run(main())
    assert isinstance(results[0].__cause__, SystemExit)
    assert all(isinstance(result, KleroError) and "out" in str(result) for result in results)  # asked before, or after


def test_closing_answers_everyone_and_is_final():
    async def main():
        model = Gated()
        llm = small(model)
        waits = asyncio.create_task(llm.generate([1], LONG))
        await model.wait_for_step(1)
        stream = llm.stream([2], LONG)
        reads = asyncio.create_task(anext(stream))
        while llm._loop._calls.empty():
            await asyncio.sleep(0.001)
        model.steps.release(2)
        await model.wait_for_step(3)
        await reads
        closing = asyncio.create_task(llm.close())
        while llm._loop._calls.empty():
            await asyncio.sleep(0.001)
        model.steps.release(100)
        await closing
        await llm.close()
        deltas = [delta async for delta in stream]
        with pytest.raises(RequestError, match="closed"):
            await llm.generate([1], HOT)
        with pytest.raises(RequestError, match="closed"):
            await anext(llm.stream([1], HOT))
        with pytest.raises(RequestError, match="closed"):
            await llm.abort("r")
        assert llm.llm.engine.closed
        return await waits, deltas, model

    output, deltas, model = asyncio.run(main())
    assert (output.outputs[0].finish_reason, output.outputs[0].error) == ("abort", "the AsyncLLM was closed")
    assert [d.finish_reason for d in deltas][-1] == "abort"
    assert len(model.seen) <= 4


class Dying(ToyModel):
    """Ends the thread in its second step, once it is let on."""

    def __init__(self):
        super().__init__()
        self.at_work, self.go_on = threading.Event(), threading.Event()

    def forward(self, step):
        self.at_work.set()
        self.go_on.wait(10)
        raise SystemExit(3)


def test_who_asks_while_the_thread_dies_is_told():
    async def main():
        model = Dying()
        llm = AsyncLLM(model)
        first = asyncio.create_task(llm.generate([1], HOT))
        await asyncio.to_thread(model.at_work.wait, 10)
        second = asyncio.create_task(llm.generate([2], HOT))
        await asyncio.sleep(0)  # it is in the queue now
        model.go_on.set()
        return await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), 10)

    errors = asyncio.run(main())
    assert all(isinstance(error, KleroError) for error in errors)
    assert all("SystemExit: 3" in str(error) for error in errors)


def test_closing_a_stream_ends_it_for_the_task_that_waits_in_it():
    async def main():
        model = Gated()
        async with AsyncLLM(model, block_size=4, num_blocks=64) as llm:
            stream = llm.stream([1], LONG)
            waiting = asyncio.create_task(anext(stream))
            await asyncio.to_thread(model.at_gate.acquire)
            with pytest.raises(RequestError, match="another task reads"):
                await anext(stream)
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await asyncio.wait_for(waiting, 10)
            for _ in range(9):
                model.steps.release()

    asyncio.run(main())


def test_the_end_of_a_stream_that_was_left_is_not_news_of_the_next_of_that_name():
    async def main():
        async with AsyncLLM(ToyModel()) as llm:
            stream = llm.stream([1], LONG, request_id="x")
            await anext(stream)
            await stream.aclose()
            return [delta async for delta in llm.stream([1], HOT, request_id="x")]

    deltas = asyncio.run(main())
    assert [reason for delta in deltas if (reason := delta.finish_reason)] == ["length"]
    assert tuple(i for delta in deltas for i in delta.token_ids) == alone([1])


def test_names_that_are_made_up_meet_nobodys_own():
    async def main():
        async with AsyncLLM(ToyModel()) as llm:
            own = [llm.generate([1], HOT, request_id=f"request-{n}") for n in range(3)]
            return await asyncio.gather(*own, *(llm.generate([1], HOT) for _ in range(3)))

    assert [output.outputs[0].token_ids for output in asyncio.run(main())] == [alone([1])] * 6
