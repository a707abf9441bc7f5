"""The models that have a name of their own, and can be fetched by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from klero.engine.models import smollm2
from klero.errors import ModelError


@dataclass(frozen=True)
class Fetchable:
    """A named model. title: what it is. provide: makes sure that it lies here, complete, and says where.

    kept: where the fetched file belongs that it is made of.
    """

    name: str
    title: str
    provide: Callable[[], Path]
    kept: Callable[[], Path]


FETCHABLE = {smollm2.NAME: Fetchable(smollm2.NAME, smollm2.TITLE, smollm2.provide, smollm2.kept_gguf)}


def fetch(name: str) -> Path:
    """Make sure that a named model loads without a network, and return its directory. ModelError says why not."""
    if name not in FETCHABLE:
        raise ModelError(
            f"model={name!r}: klero fetches {', '.join(FETCHABLE)} and no other; a hub id is downloaded when it is "
            "loaded, and a folder or a GGUF file lies here already"
        )
    return FETCHABLE[name].provide()
