"""What runs here: whether Numba is there, how kernels are compiled, and the pool that runs row ranges.

Kernels are compiled with `nogil=True`, never `parallel=True` (its thread layers abort under concurrent calls and after
fork) and never fastmath (the arithmetic is pinned). They take a range of rows; `over_rows` spreads ranges over a pool.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from klero.errors import OptionError

try:
    import numba

    HAVE_NUMBA = True
except ImportError:  # everything runs on the NumPy reference, slower, with the same bits
    HAVE_NUMBA = False

F = TypeVar("F", bound=Callable[..., Any])
Backend = str
BACKENDS = ("auto", "reference", "cpu")


def kernel(function: F) -> F:
    """Compile a kernel: no GIL, no fastmath, cached on disk where a directory can be written."""
    return _compile(function)


def inline(function: F) -> F:
    """Compile a scalar function that every kernel must inline, so that loops over it vectorise."""
    return _compile(function, forceinline=True)


def _compile(function: F, **options: bool) -> F:
    options |= {"nogil": True, "no_cfunc_wrapper": True}
    try:
        return numba.njit(cache=True, error_model="numpy", **options)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # no writable cache directory: compile in every process
        return numba.njit(error_model="numpy", **options)(function)  # type: ignore[no-any-return]


COMPILING = "klero: compiling kernels for this machine; this happens once, later runs load them from the cache"
_used: set[str] = set()


@contextmanager
def first_use(kind: str) -> Iterator[None]:
    """Run kernels on rows of a kind (a dtype). The first time they may be compiled: a terminal is told after 2 s."""
    if kind in _used or not sys.stderr.isatty():
        yield
        return
    _used.add(kind)
    timer = threading.Timer(2.0, print, [COMPILING], {"file": sys.stderr})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def choose_backend(asked: Backend) -> Backend:
    """Resolve "auto" to the fastest backend here; an unknown or missing one is an error with the way out."""
    if asked not in BACKENDS:
        raise OptionError(f"backend={asked!r}: must be one of {', '.join(BACKENDS)}")
    if asked == "cpu" and not HAVE_NUMBA:
        raise OptionError("backend='cpu': numba cannot be imported here; pip install numba, or use backend='auto'")
    if asked == "auto":
        return "cpu" if HAVE_NUMBA else "reference"
    return asked


def num_threads() -> int:
    """Threads for kernels: KLERO_NUM_THREADS, else the cores this process may use."""
    asked = os.environ.get("KLERO_NUM_THREADS")
    if asked is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        threads = int(asked)
    except ValueError:
        threads = 0
    if threads < 1:
        raise OptionError(f"KLERO_NUM_THREADS={asked!r}: must be an integer >= 1")
    return threads


class _Pool:
    """A small thread pool, made on first use, again after a fork, and again for more threads than it has."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner, self._size = 0, 0  # the process that made it, and its threads
        self._executor: ThreadPoolExecutor | None = None

    def executor(self, threads: int) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None or self._owner != os.getpid() or self._size < threads:
                self._executor = ThreadPoolExecutor(threads, thread_name_prefix="klero")
                self._owner, self._size = os.getpid(), threads
            return self._executor


_pool = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.__init__)  # type: ignore[misc]


def over_rows(work: Callable[[int, int], None], num_rows: int, threads: int, *, grain: int = 4) -> None:
    """Call work(begin, end) over ranges that cover num_rows; results must not depend on the ranges.

    The caller works as well. Fewer than two grains of rows, or one thread, run here without the pool.
    """
    parts = min(threads, -(-num_rows // grain))
    if parts <= 1:
        work(0, num_rows)
        return
    bounds = [num_rows * i // parts for i in range(parts + 1)]
    try:
        executor = _pool.executor(threads)
        others = [executor.submit(work, bounds[i], bounds[i + 1]) for i in range(1, parts)]
    except RuntimeError:  # the interpreter is shutting down and starts no threads any more
        work(0, num_rows)
        return
    work(bounds[0], bounds[1])
    for other in others:
        other.result()
