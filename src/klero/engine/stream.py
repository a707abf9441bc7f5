"""DeltaStream: the deltas of one request of an AsyncLLM, as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from klero.engine.loop import EngineLoop, Ticket
from klero.engine.outputs import Delta, RequestOutput
from klero.errors import RequestError


class DeltaStream:
    """The deltas of one request, as an asynchronous iterator; `start`, or the first of them, lets it in.

    output: the whole answer once the stream has ended, None before. Leaving it early (`aclose`, cancellation, or nobody
    holding it any more) ends the request before the next step.
    """

    def __init__(self, loop: EngineLoop, ask: Callable[[], Awaitable[Ticket]]) -> None:
        self._loop, self._ask = loop, ask
        self._ticket: Ticket | None = None
        self._over = self._reading = False
        self._error: BaseException | None = None  # came right behind deltas that were read
        self.output: RequestOutput | None = None

    async def start(self) -> None:
        """Let the request in, and return once it is: before its first step. A second time does nothing.

        Raises what is wrong with it: RequestError, ParameterError, QueueFullError.
        """
        if self._ticket is not None or self._over:
            return
        try:
            ticket = await self._ask()
            if self._over:  # closed while its grammar was compiled
                return
            self._ticket = ticket
            if not await asyncio.wrap_future(self._loop.submit(ticket)):
                news = ticket.news.get_nowait()
                assert isinstance(news, BaseException)
                raise news
        except BaseException:
            self._leave()
            raise

    async def read(self) -> list[Delta]:
        """Wait for news and return all there is, in order; [] once the stream has ended.

        Raises what ends the request before its end, after what came before it. RequestError while another task reads.
        """
        self._begin()
        try:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            news = await self._next()
            deltas = list[Delta]()
            while isinstance(news, Delta):
                deltas.append(news)
                if self._ticket is None or self._ticket.news.empty():
                    return deltas
                news = self._ticket.news.get_nowait()
            if isinstance(news, BaseException) and deltas:
                self._over, self._error = True, news
            else:
                self._finish(news)
            return deltas
        finally:
            self._reading = False

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> Delta:
        self._begin()
        try:
            news = await self._next()
            if isinstance(news, Delta):
                return news
            self._finish(news)
        finally:
            self._reading = False
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the request if it runs; the stream is over, for a task that waits in it too."""
        self._leave()
        if self._reading and self._ticket is not None:
            self._ticket.news.put_nowait(RequestError("the stream was closed"))  # wakes that task

    def __del__(self) -> None:
        self._leave()

    def _begin(self) -> None:
        if self._reading:
            raise RequestError("another task reads this stream; give each task a stream of its own")
        self._reading = True

    async def _next(self) -> Delta | RequestOutput | BaseException | None:
        """The next news; None at the end, whoever brought it about."""
        if self._ticket is None:
            await self.start()
        if self._over or self._ticket is None:
            return None
        try:
            news = await self._ticket.news.get()
        except BaseException:
            self._leave()
            raise
        return None if self._over else news  # closed by another task meanwhile

    def _finish(self, news: RequestOutput | BaseException | None) -> None:
        """Take the last of the news."""
        self._over = True
        if isinstance(news, BaseException):
            raise news
        self.output = news if news is not None else self.output

    def _leave(self) -> None:
        if not self._over:
            self._over = True
            if self._ticket is not None:
                self._loop.drop(self._ticket)
