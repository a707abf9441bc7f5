"""Turns: the calls of several threads on one engine, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from klero.engine.engine import Engine
from klero.engine.outputs import RequestOutput
from klero.errors import RequestError


class Turns:
    """Lets one call at a time have an engine, and does between its steps what other threads ask for.

    A call has the engine from `turn` to the end of the block, and steps it with `step`. Others wait for their turn, but
    `abort` and `close` come through at once: they touch the engine when no step runs.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turn_lock = threading.Lock()
        self._owner: threading.Thread | None = None  # the thread whose call has the engine
        self._step_lock = threading.RLock()  # held while the engine is touched; free between steps
        # What other threads want ended. Reentrant: a stream that is collected may end from inside any line.
        self._asking, self._aborts = threading.RLock(), list[str]()
        self._closing, self._late = False, list[RequestOutput]()  # the answers of requests that close ended
        self._lent = False

    def check_usable(self) -> None:
        """Raise RequestError if the engine is closed or lent."""
        if self._engine.closed:
            raise RequestError("this LLM is closed; make a new one")
        if self._lent:
            raise RequestError("an AsyncLLM runs this LLM; use that, or close it first")

    @contextmanager
    def turn(self, names: list[str], add: Callable[[], None]) -> Iterator[None]:
        """Have the engine for one call: `add` brings its requests, of these names; none outlives an exception."""
        self.check_usable()
        if self._owner is threading.current_thread():
            raise RequestError(
                "this thread is inside a generate (its progress callback) or a stream of this LLM; "
                "wait until it has returned, or close the stream"
            )
        self._wait()
        try:
            with self._step_lock:
                self.check_usable()
                if self._engine.num_unfinished:
                    raise RequestError("the engine runs requests added to it directly; step it until they end")
            self.move_here()
            try:
                with self._step_lock:
                    add()
                yield
            except BaseException:
                with self._step_lock:
                    self._engine.discard(names)
                raise
            finally:
                self._owner = None
                with self._asking:
                    self._aborts.clear()
        finally:
            self._turn_lock.release()

    def _wait(self) -> None:
        """Wait for the turn. RequestError if the engine is closed or lent meanwhile, whoever still has it."""
        while not self._turn_lock.acquire(timeout=0.1):
            self.check_usable()

    def move_here(self) -> None:
        """Note that the call goes on in this thread: an iterator may go from one to another."""
        self._owner = threading.current_thread()

    def step(self, mine: frozenset[str]) -> dict[str, RequestOutput]:
        """Do what other threads asked for, then one step; the answers to my requests."""
        with self._step_lock:
            if self._closing:
                self._shut()
                ended = self._late
            else:
                with self._asking:
                    asked, self._aborts = self._aborts, []
                ended = [self._engine.abort(name) for name in asked if name in self._engine]
                ended += self._engine.step()
        # the caller may have added requests to the engine himself, whose answers are not for this call
        return {output.request_id: output for output in ended if output.request_id in mine}

    def abort(self, request_id: str) -> None:
        """Ask that a request of the running call ends before the next step. RequestError if there is none."""
        self.check_usable()
        with self._asking:
            if self._owner is None or request_id not in self._engine:
                raise RequestError(f"request_id={request_id!r}: no such request is waiting or running")
            self._aborts.append(request_id)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, between two steps of whoever runs."""
        self.check_usable()
        with self._step_lock:
            self._engine.reset_prefix_cache()

    def close(self) -> None:
        """End what runs, with what it has, and close the engine; a second time does nothing."""
        self._closing = True  # whoever comes to the engine first shuts it: the lock alone may go to its owner again
        with self._step_lock:
            if self._lent:
                self._closing = False
                raise RequestError("an AsyncLLM runs this LLM; close that first")
            self._shut()

    def lend(self) -> None:
        """Give the engine to somebody who steps it himself. RequestError if a call has it."""
        self.check_usable()
        if not self._turn_lock.acquire(blocking=False):
            raise RequestError("a generate or stream of this LLM runs; wait until it has returned")
        try:
            with self._step_lock:
                self.check_usable()
                self._lent = True
        except BaseException:
            self._turn_lock.release()
            raise

    def take_back(self) -> None:
        """Let calls have the engine again."""
        self._lent = False
        self._turn_lock.release()

    def _shut(self) -> None:
        if not self._engine.closed:
            self._late = [self._engine.abort(name, "the LLM was closed") for name in self._engine.unfinished]
            self._engine.close()
