"""klero fetch: a named model into the cache."""

from __future__ import annotations

import time
from typing import Annotated

import typer


def fetch(
    name: Annotated[str, typer.Argument(help='What `klero models` lists under "named models".')] = "smollm2",
) -> None:
    """Fetch a named model into the cache, once, so that it loads without a network; print where it lies."""
    from klero.engine.models import fetch as models

    begin = time.perf_counter()
    directory = models.fetch(name)
    print(f"{name}: {models.FETCHABLE[name].title}")
    print(f"ready after {time.perf_counter() - begin:.1f} s in {directory}")
    kept = models.FETCHABLE[name].kept()
    if kept.is_file():
        print(f"made of {kept}, which is kept for the next version of transformers")
