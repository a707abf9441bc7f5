"""Streams of an AsyncLLM as a server wants them: let in before a status is sent, and several read as one.

This is the one module of the server that knows how an AsyncLLM talks to its thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from klero.engine import AsyncLLM, Delta, DeltaStream, RequestOutput
from klero.engine.prompts import Prompt
from klero.params import SamplingParams

_NEWS = tuple[int, list[Delta] | BaseException]


async def between_steps(llm: AsyncLLM) -> None:
    """Return once the engine is between two steps, or sleeps; RequestError or KleroError if its thread has ended."""
    await asyncio.wrap_future(llm._loop._call(_nothing))


def _nothing() -> None:
    """What the engine's thread is asked to do."""


class AdmittedStream(DeltaStream):
    """A stream that is let in by `start`, and read by `take`: all that is there, instead of one by one."""

    _end: BaseException | None = None

    async def start(self) -> None:
        """Let the request in. Raises what is wrong with it: RequestError, ParameterError, QueueFullError."""
        try:
            self._asked = asked = await self._llm._submit(*self._wanted, stream=True)
            await between_steps(self._llm)  # whose call stands behind the one that lets the request in
        except BaseException:
            self._leave()
            raise
        if not asked.news.empty():
            news = [asked.news.get_nowait() for _ in range(asked.news.qsize())]
            if isinstance(news[0], BaseException):
                self._over = True
                raise news[0]
            for item in news:  # a step was quicker
                asked.news.put_nowait(item)

    async def take(self) -> list[Delta]:
        """Wait for news and return all there is, in order; [] at the end, when `output` is there. Cancelled, it ends
        the request before the next step."""
        if self._end is not None:
            raise self._end
        if self._over or self._asked is None:
            return []
        queue, deltas = self._asked.news, list[Delta]()
        try:
            news = await queue.get()
        except BaseException:
            self._leave()
            raise
        while isinstance(news, Delta):
            deltas.append(news)
            if queue.empty():
                return deltas
            news = queue.get_nowait()
        self._over = True
        if isinstance(news, BaseException):
            self._end = news
            if not deltas:
                raise news
        else:
            self.output = news
        return deltas


class Streams:
    """The streams of one request, one for each prompt, read as one.

    `start` lets all in, or none: what is wrong with one is raised, and the others are dropped.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        self._streams = [
            AdmittedStream(llm, prompt, one, None, priority, cache_salt)
            for prompt, one in zip(prompts, params, strict=True)
        ]

    def output(self, place: int) -> RequestOutput:
        """The whole answer to a prompt whose end was read."""
        output = self._streams[place].output
        assert output is not None, "asked for before the end"
        return output

    async def start(self) -> None:
        """Let every prompt in; the first error, by the order of the prompts, is raised."""
        results = await asyncio.gather(*(stream.start() for stream in self._streams), return_exceptions=True)
        error = next((result for result in results if isinstance(result, BaseException)), None)
        if error is not None:
            await self.close()
            raise error

    async def read(self) -> AsyncIterator[tuple[int, list[Delta]]]:
        """Yield (place of the prompt, its news) as it comes, and (place, []) once that prompt has ended.

        Raises what ends one before.
        """
        if len(self._streams) == 1:
            (stream,) = self._streams
            while deltas := await stream.take():
                yield 0, deltas
            yield 0, []
            return
        news: asyncio.Queue[_NEWS] = asyncio.Queue()
        pumps = [asyncio.create_task(_pump(i, stream, news)) for i, stream in enumerate(self._streams)]
        running = len(pumps)
        try:
            while running:
                i, item = await news.get()
                if isinstance(item, BaseException):
                    raise item
                running -= not item
                yield i, item
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def close(self) -> None:
        """Drop what still runs."""
        for stream in self._streams:
            await stream.aclose()


async def _pump(i: int, stream: AdmittedStream, news: asyncio.Queue[_NEWS]) -> None:
    """Hand on what a stream brings; the end as []."""
    try:
        while deltas := await stream.take():
            news.put_nowait((i, deltas))
        news.put_nowait((i, []))
    except Exception as error:
        news.put_nowait((i, error))
