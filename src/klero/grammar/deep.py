"""Work that recurses deeply, on threads with a stack for it."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

STACK_BYTES = 2**28
"""What is not touched takes no memory."""
NUM_THREADS = 2


class _Threads:
    """Threads that are started once and stay: the size of a stack is one setting for the whole process, and a thread
    that somebody else starts while it is set has a stack as large."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_started = False
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()

    def start(self) -> None:
        with self._lock:
            if self._is_started:
                return
            before = threading.stack_size(STACK_BYTES)
            try:
                for _ in range(NUM_THREADS):
                    threading.Thread(target=self._run, name="klero-compile", daemon=True).start()
            finally:
                threading.stack_size(before)
            self._is_started = True

    def put(self, work: Callable[[], Any]) -> Future[Any]:
        self.start()
        future: Future[Any] = Future()
        self._work.put((work, future))
        return future

    def _run(self) -> None:
        while True:
            work, future = self._work.get()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            del work, future  # while it waits, nothing is kept


_threads = _Threads()


def start_threads() -> None:
    """Start the threads now, where no other thread is likely to start at the same time."""
    _threads.start()


def on_large_stack(work: Callable[[], T]) -> T:
    """Return what `work` returns, or raise what it raises, from a thread with a large stack. Not from within one."""
    result: T = _threads.put(work).result()
    return result


def _forget_threads() -> None:
    """A process that is forked has none of the threads."""
    global _threads
    _threads = _Threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
