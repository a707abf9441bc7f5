"""Server-sent events: what a stream sends, and that it ends when its client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from klero.engine import Delta, RequestOutput
from klero.server.answers import Answer
from klero.server.asked import Asked
from klero.server.errors import ApiError, error_of
from klero.server.guard import OUTCOME
from klero.server.json_bytes import dump, in_pieces
from klero.server.service import Service
from klero.server.streams import Streams

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
BUNCH = 8  # deltas that are told at once; between two bunches other streams have their turn
LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\u0085\u2028\u2029"}
"""What JSON lets stand as it is, and many clients take for the end of a line."""


def event(value: Mapping[str, Any]) -> bytes:
    """One event."""
    return _line(dump(value))


def _line(data: bytes) -> bytes:
    """An event of JSON, in one line for every client."""
    if not data.isascii():
        for end, escaped in LINE_ENDS.items():
            data = data.replace(end, escaped)
    return b"data: " + data + b"\n\n"


async def events(asked: Asked, answer: Answer, streams: Streams) -> AsyncGenerator[bytes, None]:
    """Yield the events of streams that were started: chunks as they come, the usage if asked for, and the end.

    News of a prompt that came together are told together, BUNCH at a time. Raises what ends one before its end.
    """
    outputs = dict[int, RequestOutput]()
    async with contextlib.aclosing(streams.read()) as news:
        async for place, deltas in news:
            for i in range(0, len(deltas), BUNCH):
                if i:
                    await asyncio.sleep(0)
                data, refused = _told(answer, place, deltas[i : i + BUNCH])
                if data:
                    yield data
                if refused is not None:
                    raise refused
            if not deltas:
                outputs[place] = output = streams.output(place)
                if answer.holds(place):
                    yield await asyncio.to_thread(_joined, answer.release(place, output))
    if asked.include_usage:
        yield event(answer.usage_chunk([outputs[place] for place in sorted(outputs)]))
    yield DONE


def _told(answer: Answer, place: int, deltas: Sequence[Delta]) -> tuple[bytes, ApiError | None]:
    """The events of deltas, and what ends the stream behind them."""
    told = list[bytes]()
    try:
        for delta in deltas:
            told += map(event, answer.chunks(place, delta))
    except ApiError as error:  # what came before it is said first
        return b"".join(told), error
    return b"".join(told), None


def _joined(chunks: Iterable[Mapping[str, Any]]) -> bytes:
    """The events of chunks that were held, each of which may be long."""
    return b"".join(_line(b"".join(in_pieces(chunk))) for chunk in chunks)


class EventStream(Response):
    """An answer that streams. Whatever ends it early, `streams` are closed: their requests end before the next step.

    An error after the first byte is an event, and the stream ends without [DONE]. A comment is sent when nothing else
    was for `keep_alive` seconds.
    """

    media_type = "text/event-stream"

    def __init__(self, service: Service, asked: Asked, answer: Answer, streams: Streams) -> None:
        self._service, self._asked, self._streams = service, asked, streams
        self._events = events(asked, answer, streams)
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._last = time.monotonic()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it until its end, or until the client leaves."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._while_here(scope, receive, send)
        finally:
            await self._streams.close()  # nothing may have been read of them

    async def _while_here(self, scope: Any, receive: Any, send: Any) -> None:
        sends = asyncio.create_task(self._run(scope, send))
        gone = asyncio.create_task(until_gone(receive))
        keeps = asyncio.create_task(self._keep_alive(send))
        try:
            await asyncio.wait((sends, gone), return_when=asyncio.FIRST_COMPLETED)
            if not sends.done():
                scope[OUTCOME] = "left"
        finally:
            await end_all(sends, gone, keeps)
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


async def end_all(*tasks: asyncio.Task[Any]) -> None:
    """Cancel those of the tasks that run, and wait for all; what they raised is theirs to tell."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
