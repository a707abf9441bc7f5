"""Streams: those of the prompts of one request, let in together and read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from klero.engine import AsyncLLM, Delta, DeltaStream, RequestOutput
from klero.engine.prompts import Prompt
from klero.params import SamplingParams

_NEWS = tuple[int, list[Delta] | BaseException]


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
            llm.stream(prompt, one, priority=priority, cache_salt=cache_salt)
            for prompt, one in zip(prompts, params, strict=True)
        ]

    def output(self, place: int) -> RequestOutput:
        """The whole answer to a prompt whose end was read."""
        output = self._streams[place].output
        assert output is not None, "asked for before the end"
        return output

    async def start(self) -> None:
        """Let every prompt in; the first error, by the order of the prompts, is raised."""
        try:
            results = await asyncio.gather(*(stream.start() for stream in self._streams), return_exceptions=True)
            error = next((result for result in results if isinstance(result, BaseException)), None)
            if error is not None:
                raise error
        except BaseException:
            await self.close()
            raise

    async def read(self) -> AsyncGenerator[tuple[int, list[Delta]], None]:
        """Yield (place of the prompt, its news) as it comes, and (place, []) once that prompt has ended.

        Raises what ends one before.
        """
        if len(self._streams) == 1:
            (stream,) = self._streams
            while deltas := await stream.read():
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


async def _pump(i: int, stream: DeltaStream, news: asyncio.Queue[_NEWS]) -> None:
    """Hand on what a stream brings; the end as []."""
    try:
        while deltas := await stream.read():
            news.put_nowait((i, deltas))
        news.put_nowait((i, []))
    except Exception as error:
        news.put_nowait((i, error))
