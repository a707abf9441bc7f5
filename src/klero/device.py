"""What runs here: whether Numba is there, how kernels are compiled, and the pool that runs row ranges.

Kernels are compiled with `nogil=True`, never `parallel=True` (its thread layers abort under concurrent calls and after
fork) and never fastmath (the arithmetic is pinned). They take a range of rows; `over_rows` spreads ranges over a pool.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any, TypeVar

from klero.errors import OptionError

try:
    import numba

    HAVE_NUMBA = True
except ImportError:  # everything runs on the NumPy reference, slower, with the same bits
    HAVE_NUMBA = False

F = TypeVar("F", bound=Callable[..., Any])
Lock = Any  # threading.RLock() makes one; its class has no public name
Backend = str
BACKENDS = ("auto", "reference", "cpu")


def kernel(function: F) -> F:
    """Compile a kernel: no GIL, no fastmath, cached on disk where a directory can be written."""
    return _compile(function)


def inline(function: F) -> F:
    """Compile a scalar function that every kernel must inline, so that loops over it vectorise."""
    return _compile(function, forceinline=True)


def folded(function: F) -> F:
    """Compile a kernel into those that call it: for what stands between an entry and its steps.

    Numba optimises all that a kernel calls once more with it, at every level of calls; a level less is so much less to
    compile.
    """
    return _compile(function, inline="always")


def _compile(function: F, **options: Any) -> F:
    options |= {"nogil": True, "no_cfunc_wrapper": True}
    try:
        return numba.njit(cache=True, error_model="numpy", **options)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # no writable cache directory: compile in every process
        return numba.njit(error_model="numpy", **options)(function)  # type: ignore[no-any-return]


COMPILING = "klero: compiling kernels for this machine; this happens once, later runs load them from the cache"
_used: set[str] = set()
_TOLD = nullcontext()


def first_use(kind: str) -> AbstractContextManager[None]:
    """Run kernels on rows of a kind (a dtype). The first time they may be compiled: a terminal is told after 2 s."""
    if kind in _used:
        return _TOLD
    _used.add(kind)
    return _telling() if sys.stderr.isatty() else _TOLD


@contextmanager
def _telling() -> Iterator[None]:
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


def _nothing(begin: int, end: int) -> None:
    """The work of a call that is over."""


class _Call:
    """One call of `over_rows`: ranges that the caller and its helpers take, one after the other, until none is left.

    A helper holds its lock while it is at work. Whoever ends the call takes the locks and never gives them back, so
    that it waits for the helpers that have begun, and those that come later find nothing to do.
    """

    def __init__(self, work: Callable[[int, int], None], ranges: list[tuple[int, int]], num_helpers: int) -> None:
        self._work, self._left = work, iter(ranges)  # next() on it is atomic, under the GIL: each goes to one thread
        self.locks = [threading.RLock() for _ in range(num_helpers)]
        self.errors: list[BaseException] = []

    def take(self) -> None:
        """Work off ranges until none is left."""
        for begin, end in self._left:
            self._work(begin, end)

    def help(self, lock: Lock) -> None:
        """Do the same as a helper, unless the call is over; what goes wrong is the caller's to raise."""
        if not lock.acquire(blocking=False):
            return
        try:
            self.take()
        except BaseException as error:
            self.errors.append(error)
            self._drop()
        finally:
            lock.release()

    def end(self) -> None:
        """Give out no more ranges and wait for those begun, also when the wait is interrupted; then raise that."""
        self._drop()
        interrupts: list[BaseException] = []
        for lock in self.locks:
            while True:
                try:
                    lock.acquire()  # again, if an interrupt came right after it: this thread may
                    break
                except BaseException as interrupt:
                    interrupts.append(interrupt)
        self._work = _nothing  # in the queue, until a busy helper comes to it, no rows are to be kept
        if interrupts:
            raise interrupts.pop(0)

    def _drop(self) -> None:
        for _ in self._left:
            pass


class _Pool:
    """Threads that help with calls: started on first use, again after a fork, more of them for more threads.

    They are daemons, which never keep an interpreter from ending; a caller waits for those alone that have begun.
    """

    def __init__(self) -> None:
        self._lock, self._calls, self._size = threading.Lock(), SimpleQueue[tuple[_Call, Lock]](), 0

    def offer(self, call: _Call) -> None:
        """Let helpers take ranges of a call."""
        if self._size < len(call.locks):
            self._grow(len(call.locks))
        for lock in call.locks[: self._size]:
            self._calls.put((call, lock))

    def _grow(self, size: int) -> None:
        with self._lock:
            while self._size < size:
                name = f"klero-rows-{self._size}"
                try:
                    threading.Thread(target=_help, args=(self._calls,), name=name, daemon=True).start()
                except RuntimeError:  # no thread more, or the interpreter ends: those that there are will do
                    return
                self._size += 1


def _help(calls: SimpleQueue[tuple[_Call, Lock]]) -> None:
    """Help with one call after the other, for ever."""
    while True:
        call, lock = calls.get()
        call.help(lock)
        del call, lock  # the arrays of a call must not live until the next one


_pool = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.__init__)  # type: ignore[misc]


def ranges_of(num_rows: int, parts: int, grain: int) -> list[tuple[int, int]]:
    """Ranges (begin, end) for so many threads: a share for each.

    Where shares are large, the last quarter of the rows comes in pieces behind them, for whoever is done first: rows
    cost different times, and cores are slowed down by others.
    """
    begun = num_rows - num_rows // 4 if num_rows >= 4 * grain * parts else num_rows
    bounds = [begun * i // parts for i in range(parts)] + list(range(begun, num_rows, max(1, grain // 2)))
    return list(zip(bounds, [*bounds[1:], num_rows], strict=True))


def over_rows(work: Callable[[int, int], None], num_rows: int, threads: int, *, grain: int = 4) -> None:
    """Call work(begin, end) over ranges that cover num_rows; results must not depend on the ranges.

    The caller works as well, and takes what no helper has begun. What work raises, here or in a helper, is raised once
    nobody is at work any more. Fewer than two grains of rows, or one thread, run here without the pool, as does
    everything while the interpreter ends.
    """
    parts = min(threads, -(-num_rows // grain))
    if parts <= 1 or sys.is_finalizing():
        work(0, num_rows)
        return
    call = _Call(work, ranges_of(num_rows, parts, grain), parts - 1)
    try:
        _pool.offer(call)
        call.take()
    finally:
        call.end()
    if call.errors:
        raise call.errors.pop(0)
