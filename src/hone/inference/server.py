"""The server: an engine behind the OpenAI chat API.

    GET  /health                 200 once the model is loaded; the only route without a key
    GET  /v1/models              the model, under the name it was given, and its adapters
    POST /v1/chat/completions    not streaming; with logprobs and token ids on request; ends when the client hangs up
    and the control routes of inference/control.py

Every refusal is a 4xx with a message in the OpenAI error form.
"""

import asyncio
import hmac
import logging
import os
import signal
import socket
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from hone import STARTED
from hone.config.inference import InferenceConfig
from hone.config.sections import API_KEY_VARIABLE, LOOPBACK
from hone.engine.engine import Engine
from hone.engine.memory import room
from hone.engine.rehearsal import rehearse
from hone.inference.control import Served, add_control
from hone.inference.protocol import ChatRequest, Written, chat_response, error_body
from hone.inference.service import EngineService
from hone.kernels.gpu.compiling import together
from hone.records import Completion, GenerateRequest, other_seed
from hone.text.stops import StopStrings

log = logging.getLogger("hone.inference")
T = TypeVar("T")


def build_app(served: Served, api_key: str | None = None) -> FastAPI:
    service = served.service
    app = FastAPI(title="hone inference", docs_url=None, redoc_url=None, openapi_url=None)

    if api_key is not None:
        app.add_middleware(KeyGuard, api_key=api_key)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        if "json" not in request.headers.get("content-type", "json"):
            return _refuse(400, "the body is JSON: send the header Content-Type: application/json")
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        message = first["msg"].removeprefix("Value error, ")
        return _refuse(400, f"{where}: {message}" if where else message)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return _refuse(error.status_code, f"{error.detail}: {request.method} {request.url.path}")

    add_control(app, served, is_guarded=api_key is not None)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {"object": "model", "created": 0, "owned_by": "hone", "max_model_len": served.engine.max_model_len}
        adapters = [{"id": name, **card, "parent": served.name} for name in served.engine.adapters.loaded]
        return {"object": "list", "data": [{"id": served.name, **card}, *adapters]}

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, connection: Request) -> Response:
        names = [served.name, *served.engine.adapters.loaded]
        if body.model not in names:
            known = ", ".join(map(repr, names))
            return _refuse(404, f"model {body.model!r} is not served here; this server has {known}", param="model")
        tokenizer = served.tokenizer
        try:
            prompt = body.prompt()
            prompt_ids = tokenizer.prompt_ids(prompt, **(body.chat_template_kwargs or {}))
            requests = _requests(body, prompt_ids, served)
            completions = await unless_gone(connection, *(service.generate(request) for request in requests))
            if body.so_far:
                completions = [joined(one, rest) for one, rest in zip(body.so_far, completions, strict=True)]
        except ValueError as error:
            return _refuse(400, str(error))
        except HungUp:
            return Response(status_code=499)  # nobody reads it
        return JSONResponse(chat_response(body, prompt, prompt_ids, completions, tokenizer))

    return app


class KeyGuard:
    """Lets requests through that carry the key as a bearer token, and those to /health."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app, self.expected = app, f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                message = "wrong or missing API key (header `Authorization: Bearer KEY`)"
                await _refuse(401, message, "authentication_error")(scope, receive, send)
                return
        await self.app(scope, receive, send)


class HungUp(Exception):
    """The client has gone."""


async def unless_gone(connection: Request, *work: Coroutine[Any, Any, T]) -> list[T]:
    """The results, in order. When the client hangs up first, all of it is cancelled. Raises HungUp."""
    results = asyncio.gather(*work)
    hung_up = asyncio.ensure_future(connection.receive())  # after the body this says only that the client is gone
    hung_up.add_done_callback(lambda _: results.cancel())
    try:
        return await results
    except asyncio.CancelledError:
        me = asyncio.current_task()
        if not hung_up.done() or me is None or me.cancelling():
            raise  # the server is being ended
        raise HungUp from None
    finally:
        hung_up.cancel()


def _requests(body: ChatRequest, prompt_ids: list[int], served: Served) -> list[GenerateRequest]:
    wanted, max_model_len = body.max_completion_tokens or body.max_tokens, served.engine.max_model_len
    if body.max_total_tokens is not None:
        max_model_len = min(max_model_len, body.max_total_tokens)
        wanted = max(1, min(wanted or max_model_len, max_model_len - len(prompt_ids)))
    if wanted is not None and len(prompt_ids) + wanted > max_model_len:
        raise ValueError(
            f"This model's maximum context length is {max_model_len} tokens, but {len(prompt_ids) + wanted} were "
            f"requested ({len(prompt_ids)} in the messages, {wanted} in the completion)"
        )
    seed = body.seed if body.seed is not None else int.from_bytes(os.urandom(7), "little")
    tokenizer, stop_ids = served.tokenizer, served.stop_ids | set(body.stop_token_ids or ())
    vocab_size = served.engine.model.spec.vocab_size

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    def request(i: int) -> GenerateRequest:
        before, draws = body.so_far[i].ids if body.so_far else [], seed + i
        if before:  # draws of its own: those of its first tokens are used up
            draws = other_seed(draws, len(before))
        return GenerateRequest(
            prompt_ids + before,
            body.sampling(max(1, (wanted or max_model_len) - len(before)), draws, vocab_size),
            stop_ids,
            StopStrings(decode, body.stop) if body.stop else None,
            body.timeout,
            None if body.model == served.name else body.model,
            f"{body.request_name}/{i}" if body.request_name else "",
        )

    return [request(i) for i in range(body.n or 1)]


def joined(before: Written, rest: Completion) -> Completion:
    """A completion that was begun elsewhere, whole."""
    return Completion(
        before.ids + rest.ids, before.logprobs + rest.logprobs, before.versions + rest.versions, rest.finish_reason,
        routing=rest.routing,
    )  # fmt: skip


def _refuse(status: int, message: str, kind: str = "invalid_request_error", param: str | None = None) -> JSONResponse:
    return JSONResponse(error_body(status, message, kind, param), status_code=status)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, before any weight is loaded. Raises ValueError when the address cannot be had."""
    # The protocol is named: asyncio turns Nagle's algorithm off, which costs 40 ms an answer, only where it sees TCP.
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ValueError(
            f"server.port: cannot listen on {host}:{port}: {error.strerror}; "
            "stop what listens there or choose another with --server.port"
        ) from None
    return sock


def serve(config: InferenceConfig) -> None:
    """Loads the model and serves it until interrupted."""
    api_key = config.api_key or os.environ.get(API_KEY_VARIABLE) or None
    host = config.server.host or ("127.0.0.1" if api_key is None else "0.0.0.0")
    if api_key is None and host not in LOOPBACK:
        log.warning("serving on %s without an API key: whoever reaches this address can use the model", host)
    sock = bind(host, config.server.port)

    from hone.models.loading import load

    loaded = load(config.model, seed=config.seed)
    length = config.max_model_len
    engine = Engine(loaded.model, max_model_len=length, **room(config, loaded.model, length))
    with together():
        rehearse(engine, engine.max_batch_size)
    service = EngineService(engine)
    served = Served(service, loaded.tokenizer, config.model.name)
    for name, directory in config.adapters.items():
        served.load_adapter(name, directory)
    app = build_app(served, api_key)
    sock.listen(2048)  # from now on who connects is answered, if only when the event loop runs
    url = f"http://{'localhost' if host in ('127.0.0.1', '0.0.0.0') else host}:{sock.getsockname()[1]}/v1"
    log.info("Serving %s at %s (ready after %.1f s)", config.model.name, url, time.perf_counter() - STARTED)
    # No proxy headers: who may control the server is told by the connection. Open requests get some seconds to end.
    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, proxy_headers=False, timeout_graceful_shutdown=3
    )
    server = uvicorn.Server(settings)

    def stop(*_: object) -> None:
        server.force_exit = server.should_exit  # the second time at once
        server.should_exit = True

    signal.signal(signal.SIGTERM, stop)  # uvicorn sets its handlers on the main thread only, and that computes
    signal.signal(signal.SIGINT, stop)
    service.run_beside(server.serve(sockets=[sock]))
