"""Work that recurses deeply, on a thread with a stack for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
_lock = threading.Lock()


def on_large_stack(work: Callable[[], T], stack_bytes: int) -> T:
    """Return what `work` returns, or raise what it raises, from a thread of its own with so large a stack."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="klero-compile", daemon=True)
    with _lock:  # the size is one for the process; it is read when a thread starts
        before = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return future.result()
