"""An OpenAI-compatible server on an AsyncLLM; the extra `server` brings what it needs (docs/server.md)."""

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
