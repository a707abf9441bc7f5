"""Grammars: compiled in the background, each once, and kept."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

from klero.errors import Fault, GrammarError, KleroError, QueueFullError, RequestError, told
from klero.grammar.protocol import Backend, Compiled
from klero.grammar.source import Source


class Grammars:
    """A cache of compiled grammars. Any thread may ask.

    make_backend: called once, by the first grammar, as it reads the whole vocabulary. max_entries, max_bytes: what is
    kept, in grammars and in bytes of their sources; the least recently used go first. max_waiting: grammars that may
    wait to be compiled; num_threads: how many are compiled at a time. timeout: seconds that `compiled` waits. A
    GrammarError is kept as well, so that nobody makes it be found at length again.
    """

    def __init__(
        self,
        make_backend: Callable[[], Backend],
        *,
        max_entries: int = 256,
        max_bytes: int = 2**23,
        max_waiting: int = 1024,
        num_threads: int = 2,
        timeout: float = 30,
    ) -> None:
        self._make_backend = make_backend
        self._backend: Backend | None = None
        self.max_entries, self.max_bytes, self.max_waiting, self.timeout = max_entries, max_bytes, max_waiting, timeout
        self._found: OrderedDict[Source, Future[Compiled]] = OrderedDict()
        self._num_bytes = 0
        self._waiting: deque[tuple[Source, Future[Compiled]]] = deque()
        self._lock, self._making = threading.Lock(), threading.Lock()
        self._num_threads, self._num_working, self._closed = num_threads, 0, False

    def prepare(self, source: Source) -> Future[Compiled]:
        """Compile a grammar in the background, unless that was done; the future has it, or a GrammarError.

        QueueFullError when too many wait, RequestError after `close`.
        """
        with self._lock:
            if self._closed:
                raise RequestError("the engine is closed, so no grammar is compiled; make a new one")
            future = self._found.get(source)
            if future is None:
                future = self._begin(source)
            self._found.move_to_end(source)
            while len(self._found) > self.max_entries or (self._num_bytes > self.max_bytes and len(self._found) > 1):
                self._drop(next(iter(self._found)))
        return future

    def compiled(self, source: Source, future: Future[Compiled] | None = None) -> Compiled:
        """A compiled grammar. future: as `prepare` gave it, not waited for; None: it is prepared, and waited for.

        GrammarError for one that cannot be compiled, or not in time; QueueFullError for one whose turn never came.
        """
        timeout = self.timeout if future is None else 0
        future = self.prepare(source) if future is None else future
        try:
            error = future.exception(timeout)
        except (TimeoutError, CancelledError):
            if not (future.running() or future.done()):
                raise QueueFullError(
                    f"{source.kind}: waited {self.timeout:g} s while grammars of others were compiled; ask again later"
                ) from None
            late = f"was not compiled in {self.timeout:g} s; make it smaller, or ask again later"
            rule = "is compiled no more: the engine is closed" if future.cancelled() else late
            raise GrammarError([Fault(source.kind, source.text, rule)]) from None
        if error is not None:
            raise copy.copy(error) from None  # what is kept must not gather everybody's tracebacks
        return future.result()

    def close(self) -> None:
        """Compile nothing any more."""
        with self._lock:
            self._closed = True
            while self._waiting:
                self._waiting.popleft()[1].cancel()

    def _begin(self, source: Source) -> Future[Compiled]:
        if len(self._waiting) >= self.max_waiting:
            raise QueueFullError(f"{source.kind}: {self.max_waiting} grammars wait to be compiled; ask again later")
        future: Future[Compiled] = Future()
        self._found[source], self._num_bytes = future, self._num_bytes + len(source.text)
        self._waiting.append((source, future))
        if self._num_working < self._num_threads:
            self._num_working += 1
            threading.Thread(target=self._work, name="klero-grammar", daemon=True).start()  # no exit waits for it
        return future

    def _drop(self, source: Source) -> None:
        if self._found.pop(source, None) is not None:
            self._num_bytes -= len(source.text)

    def _work(self) -> None:
        """Compile what waits, and end."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._num_working -= 1
                    return
                source, future = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._compile(source))
            except BaseException as error:  # this thread is nobody's: whatever it is, it is for who waits
                if not isinstance(error, GrammarError):
                    with self._lock:
                        self._drop(source)  # it says nothing about the grammar
                future.set_exception(self._told(source, error))

    def _compile(self, source: Source) -> Compiled:
        with self._making:
            if self._backend is None:
                self._backend = self._make_backend()
        made = self._backend.compile(source)
        if not hasattr(made, "matcher"):
            raise TypeError(f"{type(made).__name__} has no method matcher")
        return made

    def _told(self, source: Source, error: BaseException) -> KleroError:
        if isinstance(error, KleroError):
            return error
        return GrammarError([Fault(source.kind, source.text, f"cannot be compiled: {told(error)}")])
