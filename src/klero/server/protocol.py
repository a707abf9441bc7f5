"""The HTTP/1.1 protocol of uvicorn, one request at a time, with an end for clients that neither send nor read."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import struct
import termios
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from klero.server.errors import bad_request
from klero.server.guard import OUTCOME
from klero.server.json_bytes import dump

MAX_HEADER_BYTES = 2**16
MOST_READ_AWAY = 2**24  # bytes that are read for the sake of the answer alone, as they were sent before it was seen
LOOKS = 4  # at each connection, in the time that a client is given


def protocol_of(read_timeout: float) -> type[HttpToolsProtocol]:
    """A protocol whose connections are cut off where a client does not go on for so many seconds.

    That is: it has connected, or begun a request, and its headers are not complete; it is answered already, and the
    body that it began does not come; or what it is sent has filled the buffers, and it reads nothing of it. Headers of
    more than MAX_HEADER_BYTES are refused with 400.

    A request behind one that is being answered is not read: the connection is closed after the answer, and meanwhile
    looked at, so that a client that leaves is noticed. An upgrade to another protocol is not taken up.
    """
    return type("Protocol", (_Protocol,), {"read_timeout": read_timeout})


class _Protocol(HttpToolsProtocol):
    """Every connection is looked at from its beginning to its end, whatever state it is in: none is forgotten."""

    read_timeout: float

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadline = math.inf  # when what the client owes must be there
        self._num_unread, self._read_at = 0, 0.0  # bytes that it had not read at the last look, and when it last read
        self._deaf = False  # what comes is read away
        self._num_header_bytes = 0
        self._num_before = 0  # bytes that came while the headers were not complete
        self._num_read_away = 0
        self._next_look: asyncio.TimerHandle | None = None

    @property
    def is_answering(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_sending(self) -> bool:
        """Whether something waits to be sent."""
        return self.transport.get_write_buffer_size() > 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._owe(self.read_timeout)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        if self._next_look is not None:
            self._next_look.cancel()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read requests, one after the other."""
        if self._deaf:
            self._num_read_away += len(data)
            if self._num_read_away > MOST_READ_AWAY:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()  # that timer does not know of half a request; the looks do
        self._num_before += len(data)
        try:
            self.parser.feed_data(data)
            if not self._deaf and not self.is_answering and self._num_before > MAX_HEADER_BYTES:
                self.send_400_response("")  # a header that does not end, which the parser would gather for ever
        except httptools.HttpParserUpgrade as upgrade:
            if not self._deaf:
                self._stay(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            if self.is_answering and not self.cycle.more_body:
                self._hear_no_more()
            elif not self._deaf:
                self.send_400_response("")

    def on_message_begin(self) -> None:
        """Wait for the headers of the next request."""
        if self.is_answering:
            self._hear_no_more()
        if self._deaf:
            return
        super().on_message_begin()
        self._num_header_bytes = 0
        self._owe(self.read_timeout)

    def on_url(self, url: bytes) -> None:
        """Count the address among the headers."""
        if not self._deaf:
            self._count(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, unless they are too many."""
        if not self._deaf:
            self._count(len(name) + len(value) + len(": \r\n"))
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Answer the request; its body has a limit of its own, in the guard."""
        if self._deaf:
            return
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("this is no proxy")  # the parser makes a 400 of it
            return  # the request begins in `_stay`
        self._deadline, self._num_before = math.inf, 0
        super().on_headers_complete()
        self.cycle.__class__ = _Cycle  # uvicorn has just made it, and offers no hook to say of which class

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        if not self._deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Take the end of the body."""
        if not self._deaf and not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request, or end the connection where the last one was answered before its end."""
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.cycle.more_body:
            self._linger()
        else:
            self._num_before = 0
            self._owe(self.timeout_keep_alive)

    def resume_writing(self) -> None:
        """It has read."""
        self._num_unread = 0
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP as everything else is refused, and close."""
        body = dump(bad_request("this is no HTTP/1.1, or its headers are too long").body())
        head = "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        if self.is_answering:  # the body was no HTTP, and whoever waits for it is told
            self.transport.close()
        else:
            self._linger()

    def _count(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_BYTES:
            raise ValueError("the headers are too long")  # the parser makes a 400 of it

    def _stay(self, rest: bytes) -> None:
        """Read the same request without its Upgrade, which a server may ignore: the parser skips the body of another
        protocol. rest: what came behind the headers."""
        version = self.parser.get_http_version().encode()
        head = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        head += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join(head) + b"\r\n\r\n" + rest)

    def _hear_no_more(self) -> None:
        """Close after this answer, and go on reading to notice if the client leaves."""
        self._deaf, self.cycle.keep_alive = True, False

    def _linger(self) -> None:
        """Close for writing, and read away what still comes: closed at once, the client may never see the answer."""
        self._deaf = True
        self._owe(self.read_timeout)
        self.flow.resume_reading()
        self.transport.write_eof()

    def _owe(self, seconds: float) -> None:
        self._deadline = self.loop.time() + seconds

    def _look(self) -> None:
        """Cut the client off if it has owed something for too long; else look again in a while."""
        now, num_unread = self.loop.time(), self._unread()
        if num_unread < self._num_unread or not self._num_unread:
            self._read_at = now
        self._num_unread = num_unread
        if now - self._read_at >= self.read_timeout:
            self.transport.abort()
            return
        if now >= self._deadline:
            self.transport.close()  # what it has not read stays to be looked at
        self._next_look = self.loop.call_later(self.read_timeout / LOOKS, self._look)

    def _unread(self) -> int:
        """Bytes on their way that nothing is added to, in the system's buffer too; 0 where more may be sent."""
        size = self.transport.get_write_buffer_size()
        if not size or not (self.flow.write_paused or not self.is_answering or self.transport.is_closing()):
            return 0
        with contextlib.suppress(OSError, ValueError):
            size += _in_system(self.transport.get_extra_info("socket").fileno())
        return size


class _Cycle(RequestResponseCycle):
    """One request and its answer. A client that has left is no error, and the scope says it."""

    _until_closed = False  # HTTP/1.0 has no chunks: the end of the connection is the end of the answer

    async def send(self, message: Any) -> None:
        """Send a part of the answer."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if not self.response_complete and (self.disconnected or self.transport.is_closing()):
            self.disconnected = True
            cast(dict[str, Any], self.scope)[OUTCOME] = "left"
        elif message["type"] == "http.response.start":
            await self._begin(message)
        else:
            await self._go_on(message)

    async def _begin(self, message: Any) -> None:
        self.keep_alive = self.keep_alive and not self.more_body  # who knows what comes of it, and when
        if self.scope["http_version"] == "1.0" and all(name != b"content-length" for name, _ in message["headers"]):
            self._until_closed, self.chunked_encoding = True, False
        await super().send(message)
        if self._until_closed:
            self.expected_content_length = 2**63

    async def _go_on(self, message: Any) -> None:
        if message.get("more_body", False):
            await super().send(message)
            return
        if self.more_body:
            self.keep_alive = True  # it is closed when it has read the answer: see on_response_complete
        if self._until_closed:
            await super().send(message | {"more_body": True})
            self.expected_content_length = 0
            message = message | {"body": b""}
        await super().send(message)


def _in_system(fd: int) -> int:
    """Bytes that the system has not sent, or of which it does not know that they came."""
    (size,) = struct.unpack("i", fcntl.ioctl(fd, termios.TIOCOUTQ, b"\0" * 4))
    return int(size)
