"""The optional packages, imported late, with an error that says what to install."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from klero.errors import MissingExtra

_one_at_a_time = threading.RLock()


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
def loading() -> Iterator[None]:
    """Read or write a checkpoint in this block: one thread at a time, and without progress bars.

    transformers builds models under patches that hold for the whole process, so two loads at once, in two
    threads, leave weights without data.
    """
    from transformers.utils import logging

    with _one_at_a_time:
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            if shown:
                logging.enable_progress_bar()
