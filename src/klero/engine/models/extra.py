"""The optional packages, imported late, with an error that says what to install."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from klero.errors import MissingExtra


def require(package: str) -> Any:
    """Return the imported module `package` of the `engine` extra; MissingExtra if it is not installed.

    An ImportError from inside an installed package passes through: that installation is broken, not missing.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise MissingExtra("engine", package) from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars off the terminal while a model loads."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
