"""The tiny model of the commands."""

from __future__ import annotations

from tests.cli.conftest import tiny_model

__all__ = ["tiny_model"]
