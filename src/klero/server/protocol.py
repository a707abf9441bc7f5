"""The HTTP/1.1 protocol of uvicorn, with an end for clients that neither send nor read."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 2**16


def protocol_of(read_timeout: float) -> type[HttpToolsProtocol]:
    """A protocol whose connections are cut off where a client does not go on for so many seconds.

    That is: it has connected, or begun a request, and its headers are not complete; what it is sent fills the buffers
    and does not drain; or the connection is to be closed, and what was sent before is not read. Headers of more than
    MAX_HEADER_BYTES are refused with 400.
    """
    return type("Protocol", (_Protocol,), {"read_timeout": read_timeout})


class _Protocol(HttpToolsProtocol):
    read_timeout: float

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._patience: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        self._go_on()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Wait for the headers of the next request."""
        super().on_message_begin()
        self._num_header_bytes = 0
        self._wait()

    def on_url(self, url: bytes) -> None:
        """Count the address among the headers."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, unless they are too many."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The body has a limit of its own, in the guard."""
        self._go_on()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        """Give the client so long to read what fills the buffer."""
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        """It reads."""
        self._go_on()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Close, and do not wait for ever for a client that does not read the last answer."""
        super().timeout_keep_alive_handler()
        self._wait()

    def shutdown(self) -> None:
        """The same when the server ends."""
        super().shutdown()
        if self.transport.is_closing():
            self._wait()

    def _count(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_BYTES:
            raise ValueError("the headers are too long")  # the parser makes a 400 of it

    def _wait(self) -> None:
        self._go_on()
        self._patience = self.loop.call_later(self.read_timeout, self.transport.abort)

    def _go_on(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
