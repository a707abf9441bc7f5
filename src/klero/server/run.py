"""Run a server: listen, load, serve, watch the engine, and end as signals and failures ask."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from klero.engine import AsyncLLM
from klero.errors import KleroError
from klero.sampling.stateless import warm_up
from klero.server.app import create_app
from klero.server.options import ServerOptions
from klero.server.protocol import protocol_of

GRACE = 5.0  # seconds for what is sent last, once every request has ended
KEEP_OPEN = 75  # seconds that a connection may rest between requests: longer than pools of clients keep theirs
LOOK = 1.0  # seconds between two looks at the engine
TICK = 0.02  # seconds between two looks at what is still to be sent
SIGNALS = (signal.SIGTERM, signal.SIGINT)
log = logging.getLogger("klero.server")


def serve(model: Any = "smollm2", options: ServerOptions | None = None, **engine: Any) -> int:
    """Serve a model until a signal or a failure ends it; the exit code that says which. stderr says where it listens.

    model, engine: what `AsyncLLM` takes. 0: SIGTERM or SIGINT, after requests that ran have ended or `drain_timeout`
    has passed. 1: the engine's thread died or a step hung, while it drained too, or the HTTP part ended. A step may go
    on still, and a thread that reads a long body: leave by `os._exit`. KleroError for a model that cannot be loaded,
    OSError for an address that cannot be used.
    """
    options = options or ServerOptions()
    if options.log_prompts:
        log.setLevel(logging.INFO)
    if options.served_model_name is None:
        options = replace(options, served_model_name=name_of(model))
    server = Server(options)

    def load() -> AsyncLLM:
        llm = AsyncLLM(model, **engine)
        made = llm.llm.engine
        rows = {"bfloat16": np.uint16, "float16": np.float16}.get(made.dtype, np.float32)
        warm_up(rows, scoring=True)  # else the first request for logprobs holds up all
        made.guides.warm()  # and the first with a grammar
        return llm

    return server.run(load)


def name_of(model: Any) -> str:
    """What clients call a model: the text it is loaded by, of a path the last part, and "klero" for an object."""
    if not isinstance(model, str):
        return "klero"
    path = model.removeprefix("llama.cpp:")
    return Path(path).resolve().name if path != model or os.path.exists(path) else model


class _Uvicorn(uvicorn.Server):
    """uvicorn, which leaves signals to `Server`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class Server:
    """One server on one address, which is taken at once; `run` serves there. url: where clients find it."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.app = create_app(None, options)
        self.service = self.app.state.service
        self._socket = listen(options)
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._http = _Uvicorn(uvicorn.Config(
            self.app, http=protocol_of(options.read_timeout), ws="none", lifespan="off", log_config=None,
            access_log=False, server_header=False, proxy_headers=False, timeout_keep_alive=KEEP_OPEN,
            timeout_graceful_shutdown=int(GRACE),
        ))  # fmt: skip
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_stops = 0
        self._stopped, self._hurried = asyncio.Event(), asyncio.Event()

    def run(self, load: Callable[[], AsyncLLM]) -> int:
        """Serve what `load` makes, in a thread, while clients are told that it is being loaded; see `serve`."""
        with asyncio.Runner(loop_factory=self._http.config.get_loop_factory()) as runner:
            return runner.run(self._run(load))

    def stop(self) -> None:
        """Ask from any thread, and at any time, that the server ends as by SIGTERM; a second time ends what runs at
        once."""
        self._num_stops += 1
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended, and its loop is closed
                self._loop.call_soon_threadsafe(self._note_stops)

    def _note_stops(self) -> None:
        if self._num_stops:
            if self._num_stops == 1 and self.service.num_running:
                running, seconds = self.service.num_running, self.options.drain_timeout
                _say(f"{running} requests are being answered, for {seconds:g} s at most; a second signal ends them")
            self._stopped.set()
            self.service.drain()
        if self._num_stops > 1:
            self._hurried.set()

    async def _run(self, load: Callable[[], AsyncLLM]) -> int:
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(_Executor())
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._loop.add_signal_handler(number, self.stop)
        self._note_stops()  # those that came before
        serving = asyncio.create_task(self._http.serve(sockets=[self._socket]))
        living = asyncio.create_task(self._live(load))
        try:
            await asyncio.wait((serving, living), return_when=asyncio.FIRST_COMPLETED)
            if living.done():
                return living.result()
            self.service.fail(f"its HTTP part has ended: {serving.exception()!r}")
            await self._settled(GRACE)
            return 1
        finally:
            living.cancel()
            for connection in list(self._connections):
                if connection.is_answering or connection.is_sending:  # after all that was waited for them
                    connection.transport.abort()
            self._http.should_exit = True
            await asyncio.gather(serving, living, return_exceptions=True)
            self._socket.close()

    async def _live(self, load: Callable[[], AsyncLLM]) -> int:
        """Load, serve, and end; the exit code."""
        if self._stopped.is_set():
            return 0
        llm = await _first(_in_thread(load), self._until_stopped())
        if llm is None:
            return 0
        self.service.open(llm)
        print(f"klero: serving {self.service.model} on {self.url}", file=sys.stderr, flush=True)
        why = await _first(self._watch(llm), self._drain(llm))
        if why is not None:
            self.service.fail(why)
            await self._settled(GRACE)
            return 1
        with contextlib.suppress(TimeoutError):  # a step that is not hung, and takes longer still
            await asyncio.wait_for(llm.close(), LOOK)
        return 0

    async def _until_stopped(self) -> None:
        await self._stopped.wait()

    async def _watch(self, llm: AsyncLLM) -> str:
        """Look at the engine until it has died or hangs, and say which."""
        timeout = self.options.step_timeout
        while True:
            try:
                await asyncio.wait_for(llm.between_steps(), timeout)
            except TimeoutError:
                return f"a step of the engine takes longer than step_timeout={timeout:g} s"
            except KleroError as error:
                return self._death(error)
            await asyncio.sleep(min(LOOK, timeout))

    def _death(self, error: KleroError) -> str:
        return str(error) if self.options.log_prompts else "the engine's thread has ended"

    async def _drain(self, llm: AsyncLLM) -> str | None:
        """Once the server is stopped, let what runs end, for a while; say if the engine has died meanwhile."""
        await self._stopped.wait()
        if not await self._settled(self.options.drain_timeout, self._hurried):
            log.warning("%d requests end now, unanswered", self.service.num_running)
            self.service.end_running()
            await self._settled(GRACE)
        try:
            await asyncio.wait_for(llm.between_steps(), GRACE)
        except TimeoutError:
            log.warning("a step of the engine takes longer; it is not waited for")
        except KleroError as error:
            return self._death(error)
        return None

    async def _settled(self, seconds: float, hurried: asyncio.Event | None = None) -> bool:
        """Wait until every request is answered, to the last byte that the system takes; False if some are not after so
        many seconds, or once `hurried` is set."""
        assert self._loop is not None
        end = self._loop.time() + seconds
        while self.service.num_running or any(connection.is_sending for connection in self._connections):
            if self._loop.time() >= end or (hurried is not None and hurried.is_set()):
                return False
            await asyncio.sleep(TICK)
        return True

    @property
    def _connections(self) -> set[Any]:
        return self._http.server_state.connections


class _Executor(ThreadPoolExecutor):
    """Threads that the event loop's end does not wait for: one may read a long body."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let them go."""
        super().shutdown(wait=False, cancel_futures=True)


async def _first(*works: Coroutine[Any, Any, Any]) -> Any:
    """What the first of some works comes to; the others are cancelled."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _say(text: str) -> None:
    """Tell who started the server."""
    print(f"klero: {text}", file=sys.stderr, flush=True)


def _is_here(host: str) -> bool:
    """Whether an address is this machine's alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(options: ServerOptions) -> socket.socket:
    """A socket that listens. OSError, with the address in it, where that cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen(2048)
        except BaseException:
            made.close()
            raise
    except OSError as error:
        raise OSError(f"cannot listen on {options.host}:{options.port}: {error.strerror or error}") from error
    made.setblocking(False)
    return made


async def _in_thread(function: Callable[[], Any]) -> Any:
    """Run a function in a thread that nobody waits for when the process ends."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # it cannot be cancelled

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="klero-load", daemon=True).start()
    return await asyncio.wrap_future(future)
