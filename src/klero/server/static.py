"""The page at /: its files, read once, and headers that let it load nothing else and talk to this server alone."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).with_name("page")
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # kept, and asked about each time: an update is never a mixture
}


class File(NamedTuple):
    """One file of the page. tag: says which bytes it has."""

    data: bytes
    content_type: str
    tag: str


def _read(path: Path) -> File:
    data = path.read_bytes()
    return File(data, TYPES[path.suffix], f'"{hashlib.sha256(data).hexdigest()[:32]}"')


FILES = {
    "/" if path.name == "index.html" else f"/page/{path.name}": _read(path)
    for path in sorted(FOLDER.iterdir())
    if path.suffix in TYPES
}
"""Every path of the page, and what is there."""


def add_page(app: Starlette) -> None:
    """Serve the page. Its routes are for browsers, and no part of the OpenAPI schema."""
    for path, file in FILES.items():
        app.router.add_route(path, _giving(file), include_in_schema=False)


def _giving(file: File) -> Callable[[Request], Awaitable[Response]]:
    """A route that gives a file; 304 without it where the client has the same bytes."""
    headers = {**HEADERS, "etag": file.tag}

    async def give(request: Request) -> Response:
        held = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
        if file.tag in held:
            return Response(status_code=304, headers=headers)
        return Response(file.data, headers={**headers, "content-type": file.content_type})

    return give
