"""Guard: what is refused before a route is asked, and what every answer passes on its way out."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import time
from collections.abc import Iterable
from typing import Any

from klero.server.errors import ApiError, internal, too_large, too_slow, unauthorized
from klero.server.json_bytes import dump
from klero.server.service import Service
from klero.server.static import FILES

Scope = dict[str, Any]
Message = dict[str, Any]
OPEN = frozenset({"/health", "/ready", *FILES})
REQUEST_ID = b"x-request-id"
NAME = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
QUIET = frozenset({"/metrics"})  # asked so often that nobody wants a line of each
OUTCOME = "klero.outcome"  # in the scope: what a route says that the status does not
log = logging.getLogger("klero.server")


class Guard:
    """An ASGI application around another: API key, requests at a time, size of bodies, and whatever escapes a route.

    Bodies are read here, whole, and no further than the limit; the application receives them in one piece. The paths in
    OPEN ask for no key. What reads only (GET) counts for nothing, so that a full server can say how it is. Every answer
    has an `x-request-id`: the client's own, or one that is made.
    """

    def __init__(self, app: Any, service: Service, routes: Iterable[str]) -> None:
        self.app, self.service, self._labels = app, service, Labels(routes)
        self._key = None if service.options.api_key is None else service.options.api_key.encode()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope  # the protocol's sends no body
        metrics, path, state = self.service.metrics, scope["path"], _Sending(send, _request_id(scope))
        metrics.began()
        begin = time.monotonic()
        try:
            if path in OPEN:
                await self.app(asked, receive, state)
            else:
                await self._serve(asked, receive, state)
        except ApiError as error:
            await state.error(error)
        except Exception as error:
            self.service.note(error)
            await state.error(internal())
        finally:
            label, outcome = self._labels.of(path), scope.get(OUTCOME) or state.outcome
            metrics.closed(label, outcome)
            if path not in OPEN and label not in QUIET:
                took = time.monotonic() - begin
                log.info("%s %s %s %s %.3f s", state.request_id, asked["method"], label, outcome, took)

    async def _serve(self, scope: Scope, receive: Any, send: _Sending) -> None:
        if self._key is not None and not _brings(scope, self._key):
            raise unauthorized()
        if scope["method"] == "GET":
            await self.app(scope, receive, send)
            return
        self.service.check()
        with self.service.answering():
            with self.service.running():
                body = await self._read(scope, receive)
            if body is None:  # the client left
                scope[OUTCOME] = "left"
                return
            self.service.note_body(scope["path"], send.request_id, body)
            await self.app(scope, _Replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Any) -> bytes | None:
        """The body; None if the client leaves before its end. ApiError 408, 413."""
        limit, seconds = self.service.options.max_body_bytes, self.service.options.read_timeout
        length = _header(scope, b"content-length")
        if length is not None and length.isdigit() and int(length) > limit:
            raise too_large(limit)
        try:
            return await asyncio.wait_for(_collected(receive, limit), seconds)
        except TimeoutError:
            raise too_slow(seconds) from None


class Labels:
    """What figures call a path: its route, or "other", as there may be any number of others."""

    def __init__(self, routes: Iterable[str]) -> None:
        self._whole, self._begun = set[str](), dict[str, str]()
        for route in routes:
            begin, brace, name = route.partition("{")
            if brace:
                self._begun[begin] = f"{begin}{{{name.partition(':')[0].rstrip('}')}}}"
            else:
                self._whole.add(route)

    def of(self, path: str) -> str:
        """The label of a path."""
        if path in self._whole:
            return path
        return next((label for begin, label in self._begun.items() if path.startswith(begin)), "other")


class _Sending:
    """What has been sent of an answer. outcome: what its status says. request_id: sent with it."""

    def __init__(self, send: Any, request_id: str) -> None:
        self._send, self.request_id, self.status = send, request_id, 0

    async def __call__(self, message: Message) -> None:
        """Send one message."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (REQUEST_ID, self.request_id.encode())]
            message = {**message, "headers": headers}
        await self._send(message)

    async def error(self, error: ApiError) -> None:
        """Answer with an error, unless an answer has begun: then its connection is closed before its end."""
        if self.status:
            self.status = error.status
            return
        body = dump(error.body())
        headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
        pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self({"type": "http.response.start", "status": error.status, "headers": pairs})
        await self._send({"type": "http.response.body", "body": body})

    @property
    def outcome(self) -> str:
        if self.status == 0:
            return "left"
        if self.status == 429:
            return "busy"
        return "answered" if self.status < 400 else "refused" if self.status < 500 else "failed"


class _Replay:
    """A body that was read already, and then what the connection says."""

    def __init__(self, body: bytes, receive: Any) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        """The next message of the request."""
        if self._body is None:
            message: Message = await self._receive()
            return message
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


async def _collected(receive: Any, limit: int) -> bytes | None:
    """A body of at most so many bytes, None if it was broken off. ApiError 413."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > limit:
            raise too_large(limit)
        if not message.get("more_body", False):
            return bytes(body)


def _brings(scope: Scope, key: bytes) -> bool:
    """Whether the request brings the key; in the same time whatever it brings instead."""
    scheme, _, token = (_header(scope, b"authorization") or b"").partition(b" ")
    return hmac.compare_digest(token.strip(), key) and scheme.lower() == b"bearer"


def _request_id(scope: Scope) -> str:
    """The client's name for its request, if it is one; else a new one."""
    given = (_header(scope, REQUEST_ID) or b"").decode("latin-1")
    return given if NAME.fullmatch(given) else f"req-{secrets.token_hex(16)}"


def _header(scope: Scope, wanted: bytes) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == wanted), None)
