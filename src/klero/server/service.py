"""Service: what the parts of one server share, and whether requests are taken."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from klero.engine import AsyncLLM
from klero.server.errors import ApiError, queue_full, unavailable
from klero.server.fingerprint import fingerprint_of
from klero.server.metrics import Metrics
from klero.server.options import ServerOptions

SEED_BITS = 53  # of seeds that are made here: what JavaScript keeps of a number in JSON
log = logging.getLogger("klero.server")


class Service:
    """The model of a server once it is there, its options and figures, and the requests that run.

    state: "loading", "ready", "draining" or "failed"; why: what a client is told unless it is "ready". model: what
    clients call the model. Everything is for one event loop.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options, self.metrics = options, Metrics()
        self.model = options.served_model_name or "klero"
        self.created, self.fingerprint = int(time.time()), ""
        self.state, self.why = "loading", "the model is being loaded"
        self._llm: AsyncLLM | None = None
        self.num_running = 0  # requests that are being answered, until the transport has the last byte
        self._tasks: set[asyncio.Task[object]] = set()  # those that wait for something, and can be ended
        self._end: ApiError | None = None  # what requests that run are told, once they are ended from here

    def open(self, llm: AsyncLLM) -> None:
        """Take requests."""
        self._llm, self.fingerprint = llm, fingerprint_of(llm.llm)
        self.metrics.watch(llm.llm.engine)
        llm.llm.engine.seeds.num_bits = SEED_BITS
        if self.state == "loading":
            self.state, self.why = "ready", ""

    @property
    def llm(self) -> AsyncLLM:
        """The model. ApiError 503 while it is being loaded, and once requests are taken no more."""
        if self.state != "ready" or self._llm is None:
            raise unavailable(self.why)
        return self._llm

    def check(self) -> None:
        """ApiError 503 unless requests are taken."""
        _ = self.llm

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Answer a request, from its headers on: draining waits for it. ApiError 429 where too many are."""
        if self.num_running >= self.options.max_concurrency:
            raise queue_full()
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1

    @contextmanager
    def running(self) -> Iterator[None]:
        """Wait for something in this task that may take long: a body, a thread, the engine. ApiError 503 where the
        server ends it."""
        task = asyncio.current_task()
        assert task is not None
        if self._end is not None:
            raise self._end
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._end is None:
                raise
            task.uncancel()
            raise self._end from None
        finally:
            self._tasks.discard(task)

    def drain(self) -> None:
        """Take no more requests; those that run go on."""
        if self.state in ("loading", "ready"):
            self.state, self.why = "draining", "the server is shutting down"

    def fail(self, why: str) -> None:
        """The engine is dead or hangs: take no more requests, and end those that run."""
        log.error("the server ends: %s", why)
        self.state, self.why = "failed", "the engine has failed"
        self.end_running()

    def end_running(self) -> None:
        """End every request that runs, with an error."""
        self._end = unavailable(self.why)
        for task in self._tasks:
            task.cancel()

    def note_body(self, path: str, request_id: str, body: bytes) -> None:
        """Log what a client has sent, in one line, where that is asked for."""
        if self.options.log_prompts:
            log.info("%s %s %r", path, request_id, body.decode("utf-8", "replace"))

    def note(self, error: BaseException) -> None:
        """Log what was nobody's wish: the engine's own words; of an exception that nobody expected where it was raised,
        and what it says only where what clients sent may be logged."""
        if isinstance(error, ApiError):
            said = error.detail or error.message  # of an exception its name comes first
            log.error("a request failed: %s", said if self.options.log_prompts else said.partition(":")[0])
            return
        said = f": {error}" if self.options.log_prompts else ""
        where = "".join(traceback.format_tb(error.__traceback__))
        log.error("unexpected %s%s\n%s", type(error).__name__, said, where)
