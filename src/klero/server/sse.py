"""Server-sent events: what a stream sends, and that it ends when its client leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.responses import Response

from klero.server.answers import Answer, dump
from klero.server.asked import Asked
from klero.server.errors import ApiError, error_of
from klero.server.guard import OUTCOME
from klero.server.service import Service
from klero.server.streams import Streams

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"


def event(value: Mapping[str, Any]) -> bytes:
    """One event."""
    return b"data: " + dump(value) + b"\n\n"


async def events(service: Service, asked: Asked, answer: Answer, streams: Streams) -> AsyncGenerator[bytes, None]:
    """Yield the events of streams that were started: chunks as they come, the usage if asked for, and the end.

    Each step's news of a prompt come at once. Raises what ends one of them before its end.
    """
    outputs = {}
    async for place, deltas in streams.read():
        chunks, refused = list[dict[str, Any]](), None
        try:
            for delta in deltas:
                chunks += answer.chunks(place, delta)
        except ApiError as error:  # what came before it is said first
            refused = error
        if not deltas:
            outputs[place] = output = streams.output(place)
            service.metrics.answered(output)
            chunks = answer.ended(place, output)
        if chunks:
            yield b"".join(event(chunk) for chunk in chunks)
        if refused is not None:
            raise refused
    if asked.include_usage:
        yield event(answer.usage_chunk([outputs[place] for place in sorted(outputs)]))
    yield DONE


class EventStream(Response):
    """An answer that streams. Whatever ends it early, `streams` are closed: their requests end before the next step.

    An error after the first byte is an event, and the stream ends without [DONE]. A comment is sent when nothing else
    was for `keep_alive` seconds.
    """

    media_type = "text/event-stream"

    def __init__(self, service: Service, asked: Asked, answer: Answer, streams: Streams) -> None:
        self._service, self._asked, self._streams = service, asked, streams
        self._events = events(service, asked, answer, streams)
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._last = time.monotonic()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it until its end, or until the client leaves."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        sends = asyncio.create_task(self._run(scope, send))
        gone = asyncio.create_task(until_gone(receive))
        keeps = asyncio.create_task(self._keep_alive(send))
        try:
            await asyncio.wait((sends, gone), return_when=asyncio.FIRST_COMPLETED)
            if not sends.done():
                scope[OUTCOME] = "left"
        finally:
            await ended(sends, gone, keeps)
            await self._streams.close()  # `sends` may never have begun
        if not sends.cancelled():
            sends.result()

    async def _run(self, scope: Any, send: Any) -> None:
        tail = b""
        try:
            with self._service.running():
                async for data in self._events:
                    self._last = time.monotonic()
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            told = error_of(error, self._asked.names)
            if told.status == 500:
                self._service.note(error)
            scope[OUTCOME], tail = "failed", event(told.body())
        finally:
            await self._events.aclose()
        await send({"type": "http.response.body", "body": tail, "more_body": False})

    async def _keep_alive(self, send: Any) -> None:
        """Break long silences; proxies and clients give up on them."""
        period = self._service.options.keep_alive
        while True:
            silent = time.monotonic() - self._last
            if silent >= period:
                self._last, silent = time.monotonic(), 0.0
                await send({"type": "http.response.body", "body": COMMENT, "more_body": True})
            await asyncio.sleep(period - silent)


async def until_gone(receive: Any) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancel those of the tasks that run, and wait for all; what they raised is theirs to tell."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
