"""An OpenAI-compatible server on an AsyncLLM; the extra `server` brings what it needs (docs/server.md).

The road of a request: protocol (a connection), guard (key, size, concurrency), app (which route), bodies and schemas
(strict JSON), asked (prompts as token ids, parameters, every fault at once), then the engine, streams (its news),
answers with logprobs and tools (OpenAI's shapes, whole or in chunks), sse (events). run starts and ends it all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from klero.server.options import ServerOptions

if TYPE_CHECKING:
    from klero.server.app import create_app
    from klero.server.run import serve

__all__ = ["ServerOptions", "create_app", "serve"]


def __getattr__(name: str) -> Any:
    """Load what needs the extra when it is asked for. MissingExtra without it."""
    if name not in ("create_app", "serve"):
        raise AttributeError(f"module 'klero.server' has no attribute {name!r}")
    from klero.errors import MissingExtra

    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingExtra("server", error.name or "fastapi") from error
    from klero.server import app, run

    return app.create_app if name == "create_app" else run.serve
