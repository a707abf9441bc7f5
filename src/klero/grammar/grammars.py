"""Grammars: compiled in the background, each once, and kept."""

from __future__ import annotations

import copy
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from klero.errors import STOPS, Fault, GrammarError, KleroError, told
from klero.grammar.protocol import Backend, Compiled
from klero.grammar.source import Source

TIMEOUT = 30.0  # seconds


class Grammars:
    """A cache of compiled grammars. Any thread may ask.

    make_backend: called once, by the first grammar, as it reads the whole vocabulary. max_entries, max_bytes: what is
    kept, in grammars and in bytes of their sources; the least recently used go first. timeout: seconds from `prepare`
    until `compiled` gives up. What failed is kept as well, so that nobody makes it fail at length again.
    """

    def __init__(
        self,
        make_backend: Callable[[], Backend],
        *,
        max_entries: int = 256,
        max_bytes: int = 2**23,
        timeout: float = TIMEOUT,
        num_threads: int = 1,
    ) -> None:
        self._make_backend = make_backend
        self._backend: Backend | None = None
        self.max_entries, self.max_bytes, self.timeout = max_entries, max_bytes, timeout
        self._found: OrderedDict[Source, tuple[Future[Compiled], float]] = OrderedDict()  # with when it began
        self._num_bytes = 0
        self._lock, self._making = threading.Lock(), threading.Lock()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="klero-grammar")

    def prepare(self, source: Source) -> Future[Compiled]:
        """Compile a grammar in the background, unless that was done; the future has it, or a GrammarError."""
        return self._find(source)[0]

    def compiled(self, source: Source) -> Compiled:
        """A compiled grammar. Raises GrammarError for one that cannot be compiled, or not in time."""
        future, begin = self._find(source)
        try:
            error = future.exception(max(0.0, begin + self.timeout - time.monotonic()))
        except (TimeoutError, CancelledError):
            late = f"takes longer than {self.timeout:g} s to compile; make it smaller"
            rule = "is compiled no more: the engine is closed" if future.cancelled() else late
            raise GrammarError([Fault(source.kind, source.text, rule)]) from None
        if error is not None:
            raise copy.copy(error) from None  # what is kept must not gather everybody's tracebacks
        return future.result()

    def close(self) -> None:
        """Compile nothing any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _find(self, source: Source) -> tuple[Future[Compiled], float]:
        with self._lock:
            found = self._found.get(source)
            if found is None:
                found = self._found[source] = self._threads.submit(self._compile, source), time.monotonic()
                self._num_bytes += len(source.text)
            self._found.move_to_end(source)
            while len(self._found) > self.max_entries or (self._num_bytes > self.max_bytes and len(self._found) > 1):
                self._num_bytes -= len(self._found.popitem(last=False)[0].text)
        return found

    def _compile(self, source: Source) -> Compiled:
        try:
            with self._making:
                if self._backend is None:
                    self._backend = self._make_backend()
            return self._backend.compile(source)
        except (*STOPS, KleroError):
            raise
        except Exception as error:  # a backend of somebody's own may raise anything
            raise GrammarError([Fault(source.kind, source.text, f"cannot be compiled: {told(error)}")]) from error
