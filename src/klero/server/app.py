"""create_app: the routes of the server. Shapes are made in asked.py and answers.py, streams in sse.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

import klero
from klero.engine import LLM, AsyncLLM, RequestOutput
from klero.server.answers import Answer, new_id, num_entries
from klero.server.asked import Asked, chat_of, completion_of, detokenize_of, read_body, tokenize_of
from klero.server.errors import ApiError, error_of, method_not_allowed, model_not_found, not_found, not_json
from klero.server.guard import OUTCOME, Guard
from klero.server.json_bytes import dump
from klero.server.metrics import CONTENT_TYPE
from klero.server.openapi import bounds_of, document
from klero.server.options import ServerOptions
from klero.server.service import Service
from klero.server.sse import EventStream, end_all, until_gone
from klero.server.static import add_page
from klero.server.streams import Streams

LONG = 2**11  # bytes of a body that is read in a thread: tokenizing it would hold up every stream
LONG_ANSWER = 1000  # entries of its lists: such an answer is written in a thread
Kind = Literal["completion", "chat"]
READERS: dict[Kind, Callable[..., Asked]] = {"completion": completion_of, "chat": chat_of}


def create_app(llm: AsyncLLM | None, options: ServerOptions | None = None) -> FastAPI:
    """Make the application of a server: routes, guard and figures.

    llm: what answers; None: `app.state.service.open(llm)` brings it later, and until then clients are told 503. The app
    does not close it. All state is for one event loop.
    """
    options = options or ServerOptions()
    app = FastAPI(title="klero", version=klero.__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    service = app.state.service = Service(options)
    routes = Routes(service)
    add_routes(app, routes)
    add_page(app)
    paths = [route.path for route in app.routes if hasattr(route, "path")]
    app.add_exception_handler(HTTPException, routes.not_served)
    app.add_middleware(Guard, service=service, routes=paths)
    if llm is not None:
        service.open(llm)
    return app


def add_routes(app: FastAPI, routes: Routes) -> None:
    """Say what answers each path; what they take and answer is said in openapi.py."""
    for path, method, endpoint in (
        ("/v1/models", "GET", routes.models),
        ("/v1/models/{name:path}", "GET", routes.model),
        ("/v1/completions", "POST", routes.completions),
        ("/v1/chat/completions", "POST", routes.chat_completions),
        ("/tokenize", "POST", routes.tokenize),
        ("/detokenize", "POST", routes.detokenize),
        ("/health", "GET", routes.health),
        ("/ready", "GET", routes.ready),
        ("/metrics", "GET", routes.metrics),
    ):
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    app.openapi = routes.openapi  # type: ignore[method-assign]


class Routes:
    """What answers each path. Everything that is wrong becomes an ApiError, and that OpenAI's error object."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._num_reading = 0  # bodies that are read in threads

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, with the model's bounds once it is there."""
        service = self._service
        try:
            bounds = bounds_of(service.llm.llm.engine.limits)
        except ApiError:
            bounds = None
        return document(service.options, service.model, bounds)

    async def health(self) -> Response:
        """Whether the server lives: 200 while it loads and drains too, 503 once its engine has failed."""
        failed = self._service.state == "failed"
        return _json({"status": "failed" if failed else "ok"}, 503 if failed else 200)

    async def ready(self) -> Response:
        """Whether requests are taken: 200, or 503 with the reason."""
        service = self._service
        return _json({"status": service.state}, 200 if service.state == "ready" else 503)

    async def metrics(self) -> Response:
        """Figures in the text format of Prometheus."""
        return Response(self._service.metrics.text(), media_type=CONTENT_TYPE)

    async def models(self) -> Response:
        """The model that is served."""
        try:
            return _json({"object": "list", "data": [self._card()]})
        except ApiError as error:
            return _refused(error)

    async def model(self, name: str) -> Response:
        """The same, if that is its name."""
        try:
            self._check_model(name)
            return _json(self._card())
        except ApiError as error:
            return _refused(error)

    async def completions(self, request: Request) -> Response:
        """Continue prompts."""
        return await self._generate(request, "completion")

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._generate(request, "chat")

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or of a conversation."""
        return await self._words(request, tokenize_of)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        return await self._words(request, detokenize_of)

    async def not_served(self, request: Request, error: Any) -> Response:
        """Say what the framework refuses, in OpenAI's shape."""
        if error.status_code == 405:
            return _refused(method_not_allowed((error.headers or {}).get("Allow", "")))
        if error.status_code == 404:
            return _refused(not_found())
        return _refused(ApiError(error.status_code, str(error.detail)))

    async def _words(self, request: Request, read: Callable[..., dict[str, Any]]) -> Response:
        try:
            llm, options = self._service.llm.llm, self._service.options
            return _json(await self._read(await _body_of(request), lambda raw: read(read_body(raw), llm, options)))
        except Exception as error:
            return self._failed(request, error, {})

    async def _generate(self, request: Request, kind: Kind) -> Response:
        """Answer a request for text, whole or as a stream."""
        service, names = self._service, dict[str, str]()
        try:
            llm = service.llm
            asked, answer = await self._read(await _body_of(request), lambda raw: self._begun(kind, raw, llm.llm))
            names = asked.names
            if asked.stream:
                streams = Streams(
                    llm, asked.prompts, asked.params, priority=asked.priority, cache_salt=asked.cache_salt
                )
                await self._while_here(request, streams.start())
                return EventStream(service, asked, answer, streams)
            outputs = await self._while_here(request, _generated(llm, asked))
            long = num_entries(asked, outputs) > LONG_ANSWER
            written = asyncio.to_thread(answer.written, outputs) if long else None
            body = answer.written(outputs) if written is None else await self._run(written)
            return Response(body, media_type="application/json")
        except Exception as error:
            return self._failed(request, error, names)

    def _begun(self, kind: Kind, raw: bytes, llm: LLM) -> tuple[Asked, Answer]:
        """What a body asks, and the answer that is to be filled."""
        service = self._service
        asked = READERS[kind](read_body(raw), llm, service.options)
        if asked.model is not None:
            self._check_model(asked.model)
        return asked, Answer(
            asked, llm, model=service.model, answer_id=new_id(kind), created=int(time.time()),
            fingerprint=service.fingerprint,
        )  # fmt: skip

    async def _read(self, raw: bytes, read: Callable[[bytes], Any]) -> Any:
        """Read a body: a long one in a thread, and any other too while such a one is read, as all wait for the one
        tokenizer."""
        in_thread = len(raw) >= LONG or self._num_reading > 0
        self._num_reading += in_thread
        try:
            return await self._run(asyncio.to_thread(read, raw)) if in_thread else read(raw)
        finally:
            self._num_reading -= in_thread

    def _check_model(self, name: str) -> None:
        if name != self._service.model:
            raise model_not_found(name)

    def _card(self) -> dict[str, Any]:
        service = self._service
        return {
            "id": service.model, "object": "model", "created": service.created, "owned_by": "klero",
            "max_model_len": service.llm.llm.engine.max_model_len,
        }  # fmt: skip

    async def _while_here(self, request: Request, work: Any) -> Any:
        """Do something for as long as the client is there and the server lets requests run. _Left, ApiError 503."""
        works = asyncio.create_task(self._run(work))
        gone = asyncio.create_task(until_gone(request.receive))
        try:
            await asyncio.wait((works, gone), return_when=asyncio.FIRST_COMPLETED)
            if not works.done():
                raise _Left
            return works.result()
        finally:
            await end_all(works, gone)

    async def _run(self, work: Any) -> Any:
        with self._service.running():
            return await work

    def _failed(self, request: Request, error: Exception, names: Mapping[str, str]) -> Response:
        if isinstance(error, _Left):
            request.scope[OUTCOME] = "left"
            return Response(status_code=499)  # nobody reads it
        told = error_of(error, names)
        if told.status == 500:
            self._service.note(error)
        return _refused(told)


class _Left(Exception):
    """The client has left."""


async def _body_of(request: Request) -> bytes:
    """The body of a request. ApiError 415 for one that is not called JSON, as a form of any page could send it, or
    is packed."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise not_json("content-type", kind, "send JSON, with the header 'Content-Type: application/json'")
    packed = request.headers.get("content-encoding", "identity").strip().lower()
    if packed != "identity":
        raise not_json("content-encoding", packed, "send the body as it is")
    return b"".join([piece async for piece in request.stream()])  # nobody keeps it as long as the request lasts


async def _generated(llm: AsyncLLM, asked: Asked) -> list[RequestOutput]:
    """The answers to all prompts; if one fails, the others are dropped."""
    tasks = [
        asyncio.create_task(llm.generate(prompt, one, priority=asked.priority, cache_salt=asked.cache_salt))
        for prompt, one in zip(asked.prompts, asked.params, strict=True)
    ]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await end_all(*tasks)


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dump(value), status, dict(headers or {}), media_type="application/json")


def _refused(error: ApiError) -> Response:
    return _json(error.body(), error.status, error.headers)
