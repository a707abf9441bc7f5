"""EngineLoop: one thread steps an engine for requests that come from any number of event loops."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeAlias

from klero.engine.engine import Engine
from klero.engine.outputs import Delta, RequestOutput
from klero.errors import KleroError, RequestError
from klero.grammar.protocol import Compiled
from klero.params import SamplingParams

News: TypeAlias = Delta | RequestOutput | BaseException


@dataclass(eq=False)
class Ticket:
    """A request on its way, and where its news goes: `news` is filled in the event loop that asked, in order.

    The last of the news is a RequestOutput, or the exception that ended it. compiled: its grammar, once that was waited
    for. aborted: it is to end as soon as it is let in.
    """

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    prompt: str | None
    stream: bool
    event_loop: asyncio.AbstractEventLoop
    prompt_embeds: Any = None
    priority: int = 0
    cache_salt: str | None = None
    compiled: Future[Compiled] | None = None
    aborted: bool = False
    news: asyncio.Queue[News] = field(default_factory=asyncio.Queue)
    arrived: float = field(default_factory=perf_counter)


class EngineLoop:
    """Steps an engine in a thread of its own as long as it has requests, and sleeps when it has none.

    Whatever others want (`submit`, `abort`, `drop`, `close`) is done between steps, so they may call from any thread.
    Requests join and leave the running batch. A step that raises ends the requests that had a part in it, with an error
    in their answers; where that is not known, every request, with the exception itself. look: called after every step.
    """

    def __init__(self, engine: Engine, look: Callable[[], None]) -> None:
        self._engine, self._look = engine, look
        self._tickets: dict[str, Ticket] = {}  # by request id; touched by the thread alone
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        # Nothing enters the queue once it has been emptied for the last time. Reentrant: a stream that is collected may
        # drop its request from inside any line.
        self._gate = threading.RLock()
        self._end: KleroError | None = None  # why nothing runs any more
        self._thread = threading.Thread(target=self._run, name="klero-engine", daemon=True)
        self._thread.start()

    def submit(self, ticket: Ticket) -> Future[bool]:
        """Let a request in before the next step; the future says whether it is in. What is wrong with it is news."""
        told: Future[bool] = Future()
        told.set_running_or_notify_cancel()  # it cannot be cancelled
        self._call(lambda: self._admit(ticket)).add_done_callback(
            lambda call: told.set_result(not self._tell(ticket, call) and call.result())
        )
        return told

    def between_steps(self) -> Future[None]:
        """Done once the engine is between two steps, or sleeps."""
        return self._call(_nothing)

    def abort(self, request_id: str) -> Future[None]:
        """End a request before the next step, with what it has. The future has a RequestError for an unknown one."""
        return self._call(lambda: self._finish([self._engine.abort(request_id)]))

    def reset_prefix_cache(self) -> Future[None]:
        """Forget every cached prefix before the next step."""
        return self._call(self._engine.reset_prefix_cache)

    def drop(self, ticket: Ticket) -> None:
        """End a request that nobody waits for any more; nothing if it has ended."""
        with contextlib.suppress(RequestError):  # everything has ended already
            self._call(lambda: self._drop(ticket))

    def close(self) -> None:
        """End every request with what it has, and the thread; wait for it. A second time does nothing."""
        with contextlib.suppress(RequestError):  # it has ended already
            self._call(self._stop)
        if not self.is_here:
            self._thread.join()

    @property
    def is_here(self) -> bool:
        """Whether this is the thread that steps."""
        return threading.current_thread() is self._thread

    def _call(self, function: Callable[[], Any]) -> Future[Any]:
        """Have a function run between steps. RequestError once the thread has ended."""
        future: Future[Any] = Future()
        with self._gate:
            if self._end is not None:
                raise RequestError(str(self._end)) from self._end
            self._calls.put((function, future))
        return future

    def _run(self) -> None:
        try:
            while self._end is None:
                self._do_calls()
                if self._engine.num_unfinished:
                    self._step()
            self._leave(self._end)
        except BaseException as error:  # SystemExit, or klero's own fault: nobody may be left waiting
            reason = KleroError(f"the engine's thread has ended: {type(error).__name__}: {error}")
            reason.__cause__ = error  # an event loop that is handed a SystemExit would end itself
            self._leave(reason)

    def _do_calls(self) -> None:
        """Do what was asked for; with nothing to step, wait for it."""
        wait = not self._engine.num_unfinished
        while True:
            try:
                function, future = self._calls.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
                    if not isinstance(error, Exception):
                        raise

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            outputs = self._engine.fail(f"{type(error).__name__}: {error}")
            if not outputs:
                self._fail_all(error)
        self._finish(outputs)
        self._look()

    def _admit(self, ticket: Ticket) -> bool:
        try:
            self._engine.add_request(
                ticket.request_id, ticket.prompt_ids, ticket.params,
                prompt=ticket.prompt, stream=ticket.stream, arrived=ticket.arrived, prompt_embeds=ticket.prompt_embeds,
                priority=ticket.priority, cache_salt=ticket.cache_salt, compiled=ticket.compiled,
            )  # fmt: skip
        except Exception as error:  # klero's own for what is wrong with it; anything else must not be lost either
            self._send([(ticket, error)])
            return False
        self._tickets[ticket.request_id] = ticket
        if ticket.aborted:
            self._finish([self._engine.abort(ticket.request_id)])
        return True

    def _tell(self, ticket: Ticket, call: Future[Any]) -> bool:
        """Send why a request was never let in, if the thread has ended before it came to that; whether it has."""
        error = call.exception()
        if error is not None:
            self._send([(ticket, error if isinstance(error, Exception) else KleroError(f"{type(error).__name__}"))])
        return error is not None

    def _drop(self, ticket: Ticket) -> None:
        if self._tickets.get(ticket.request_id) is ticket:
            del self._tickets[ticket.request_id]
            self._engine.abort(ticket.request_id)
            self._finish([])  # its last delta belongs to nobody: a later request may have the same name

    def _stop(self) -> None:
        self._finish([self._engine.abort(name, "the AsyncLLM was closed") for name in self._engine.unfinished])
        self._end = RequestError("the AsyncLLM is closed; make a new one")

    def _finish(self, outputs: Iterable[RequestOutput]) -> None:
        """Send what the engine has brought: deltas first, then the answers that end them."""
        news: list[tuple[Ticket, News]] = []
        for delta in self._engine.take_deltas():
            if delta.request_id in self._tickets:  # else it was dropped
                news.append((self._tickets[delta.request_id], delta))
        for output in outputs:
            if output.request_id in self._tickets:
                news.append((self._tickets.pop(output.request_id), output))
        self._send(news)

    def _fail_all(self, error: BaseException) -> None:
        """End every request with an exception, and free whatever they hold."""
        tickets, self._tickets = list(self._tickets.values()), {}
        try:
            self._engine.discard(self._engine.unfinished)
        finally:
            self._send([(one, error) for one in tickets])

    def _send(self, news: list[tuple[Ticket, News]]) -> None:
        """Wake each event loop once, for all that is its own."""
        of_loop: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, News]]] = {}
        for ticket, item in news:
            of_loop.setdefault(ticket.event_loop, []).append((ticket, item))
        for event_loop, items in of_loop.items():
            try:
                event_loop.call_soon_threadsafe(_deliver, items)
            except RuntimeError:  # that event loop is closed, so nobody waits there
                for ticket, _ in items:
                    self._drop(ticket)

    def _leave(self, reason: KleroError) -> None:
        """End for good: whoever waits, for news or for a call, is told why."""
        with self._gate:
            self._end = reason
        try:
            self._fail_all(reason)
        finally:  # whatever else fails: whoever has a call in the queue is told
            while not self._calls.empty():
                _, future = self._calls.get()
                if future.set_running_or_notify_cancel():
                    future.set_exception(reason)


def _nothing() -> None:
    """What between_steps asks for."""


def _deliver(items: list[tuple[Ticket, News]]) -> None:
    for ticket, item in items:
        ticket.news.put_nowait(item)
