"""AsyncLLM: the LLM for asyncio, with the requests of all coroutines in one running batch."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
import weakref
from typing import Any

from klero.engine import chat as chats
from klero.engine.embeds import copied
from klero.engine.llm import LLM
from klero.engine.loop import EngineLoop, Ticket
from klero.engine.outputs import RequestOutput
from klero.engine.prompts import Prompt, names_of, parts_of
from klero.engine.stream import DeltaStream
from klero.errors import OptionError, RequestError
from klero.params import SamplingParams


class AsyncLLM:
    """An LLM whose requests join a running batch, from any number of tasks, event loops and threads.

    model: an LLM, which it runs until it is closed (the LLM's own calls are refused meanwhile, and work afterwards); or
    what `LLM` takes, with the same options, and then closing it closes that LLM. A thread of its own steps the engine;
    the event loop only tokenizes. Cancelling a task, or leaving a stream, ends its request before the next step. If the
    model raises, the requests of that step end with finish_reason "error" and the others go on; an exception that no
    request can be blamed for is raised to everyone who waits.
    """

    def __init__(self, model: Any = "smollm2", **options: Any) -> None:
        if isinstance(model, LLM) and options:
            raise OptionError(f"{next(iter(options))}: the LLM is made already; give options where it is made")
        self._owned = not isinstance(model, LLM)
        self.llm: LLM = LLM(model, **options) if self._owned else model
        self._loop = EngineLoop(self.llm.lend(), self.llm._watch.look)
        self._compiling: set[Ticket] = set()  # two may have one name: the second is refused when it is let in
        self._ids, self._prefix = itertools.count(), f"request-{secrets.token_hex(4)}"  # nobody's own name is like it
        self._end = weakref.finalize(self, _close, self._loop, self.llm, self._owned)  # at exit too

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """Generate for one prompt, as `LLM.generate` takes them. params=None is greedy. request_id: for `abort`.

        RequestError or ParameterError for a request that cannot be served. Cancelled, it ends the request.
        """
        ticket = await self._ask(prompt, params, request_id, priority, cache_salt, stream=False)
        self._loop.submit(ticket)
        try:
            news = await ticket.news.get()
        except BaseException:
            self._loop.drop(ticket)
            raise
        if isinstance(news, BaseException):
            raise news
        assert isinstance(news, RequestOutput)
        return news

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> DeltaStream:
        """Generate for one prompt and yield each step's news: `async for delta in llm.stream(...)`."""
        return DeltaStream(self._loop, lambda: self._ask(prompt, params, request_id, priority, cache_salt, stream=True))

    async def chat(
        self,
        messages: chats.Conversation,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        **options: Any,
    ) -> RequestOutput:
        """Answer one conversation; options as those of `LLM.render`, which makes the prompt."""
        return await self.generate(
            self.render(messages, **options), params, request_id=request_id, priority=priority, cache_salt=cache_salt
        )

    def render(self, messages: chats.Conversation, **options: Any) -> list[int]:
        """Return the prompt of one conversation, as `LLM.render` does: for `stream`."""
        return self.llm.render(messages, **options)

    async def abort(self, request_id: str) -> None:
        """End a request before the next step, with what it has; RequestError if none of that name waits or runs."""
        compiling = [ticket for ticket in tuple(self._compiling) if ticket.request_id == request_id]
        for ticket in compiling:
            ticket.aborted = True
        if compiling:
            return
        await asyncio.wrap_future(self._loop.abort(request_id))

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, between two steps; see `LLM.reset_prefix_cache`."""
        await asyncio.wrap_future(self._loop.reset_prefix_cache())

    async def between_steps(self) -> None:
        """Return once the engine is between two steps, or sleeps. RequestError, KleroError if its thread has ended."""
        await asyncio.wrap_future(self._loop.between_steps())

    async def close(self) -> None:
        """End every request with what it has and stop the thread; a second time does nothing."""
        await asyncio.to_thread(self._end)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _ask(
        self, prompt: Any, params: Any, request_id: str | None, priority: int, cache_salt: str | None, *, stream: bool
    ) -> Ticket:
        """A request that may be let in: checked as far as that goes without the engine, its grammar compiled."""
        name = f"{self._prefix}-{next(self._ids)}" if request_id is None else request_id
        names_of(name, 1)
        if params is not None and not isinstance(params, SamplingParams):
            raise RequestError("params: must be SamplingParams; SamplingParams.from_dict reads a dict")
        given, embeds = parts_of(prompt)
        embeds = None if embeds is None else copied(embeds)  # the caller may write to his own at once
        text, ids = given if isinstance(given, str) else None, self.llm.tokenize(given)
        here = asyncio.get_running_loop()
        ticket = Ticket(name, ids, params or SamplingParams(), text, stream, here, embeds, priority, cache_salt)
        await self._compile(ticket)
        return ticket

    async def _compile(self, ticket: Ticket) -> None:
        """Wait for a request's grammar, which neither the event loop nor the others' steps do."""
        guides = self.llm.engine.guides
        ticket.compiled = guides.prepare(ticket.params)
        if ticket.compiled is None or ticket.compiled.done():
            return
        ready = asyncio.wrap_future(ticket.compiled)
        ready.add_done_callback(lambda done: done.cancelled() or done.exception())  # is said at admission
        self._compiling.add(ticket)
        try:
            await asyncio.wait([ready], timeout=guides.grammars.timeout)
        finally:
            self._compiling.discard(ticket)


def _close(loop: EngineLoop, llm: LLM, owned: bool) -> None:
    """Stop the thread, and give the LLM back, or close it where it was made here."""
    if loop.is_here:  # collected by the thread that steps: it cannot wait for its own end
        threading.Thread(target=_close, args=(loop, llm, owned)).start()
        return
    loop.close()
    llm.take_back()
    if owned:
        llm.close()
