"""HTTP routes of the server: the OpenAI API on top of a sampler (Hone's engine or vLLM).

    GET  /health                        200 once the model is loaded; the only route without a key
    GET  /v1/models, /v1/models/NAME    the served model and its adapters, by the names that requests use
    POST /v1/chat/completions           chat completions, whole or streamed; aborted if the client disconnects
    POST /v1/chat/completions/tokens    the same with the token ids of the prompt as `tokens`
    POST /v1/completions                completions of texts or of token ids
    POST /v1/responses                  a conversation in the format of OpenAI's Responses API, text only
    POST /tokenize, /detokenize
    GET  /metrics                       for Prometheus
    GET  /openapi.json                  the routes and their bodies
    and the control routes of inference/control.py

A refused request is answered with a 4xx status and an error body in OpenAI's format.
"""

import asyncio
import hmac
import ipaddress
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hone.config.sections import LOOPBACK
from hone.inference.control import CONTROL_PATHS, add_control
from hone.inference.openai.routes import add_openai, build_refusal
from hone.inference.openapi import install_description
from hone.inference.prometheus import format_metrics
from hone.inference.served_model import Served

BODY, BODY_A_TOKEN = 2**24, 256  # largest body: a minimum, and bytes per token of the context
# Seconds that a client may send or read nothing, and the number of open requests.
STALLED_CLIENT_SECONDS = 60.0
MAX_OPEN_RESPONSES = 8192


def build_app(served: Served, api_key: str | None = None, client_key: str | None = None) -> FastAPI:
    """Build the FastAPI app with all routes.

    `api_key` is accepted on all routes, `client_key` on all but those that control the server.
    Without `api_key`, no route requires a key.
    """
    app = FastAPI(
        title="hone inference", docs_url=None, redoc_url=None, openapi_url="/openapi.json"
    )

    app.add_middleware(
        RequestLimit, most_bytes=lambda: max(BODY, BODY_A_TOKEN * served.sampler.max_context)
    )
    if api_key is not None:  # checked first, before a body is read
        app.add_middleware(KeyGuard, api_key=api_key, client_key=client_key)
    else:
        app.add_middleware(PageGuard)

    @app.exception_handler(RequestValidationError)
    async def answer_invalid_request(
        request: Request, error: RequestValidationError
    ) -> JSONResponse:
        if "json" not in request.headers.get("content-type", "json"):
            return build_refusal(
                400, "the body is JSON: send the header Content-Type: application/json"
            )
        absent = [str(one["loc"][-1]) for one in error.errors() if one["type"] == "missing"]
        if absent:
            return build_refusal(
                400, f"{', '.join(dict.fromkeys(absent))}: required, and not in the request"
            )
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        message = first["msg"].removeprefix("Value error, ")
        return build_refusal(400, f"{where}: {message}" if where else message)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return build_refusal(
            error.status_code, f"{error.detail}: {request.method} {request.url.path}"
        )

    @app.exception_handler(RecursionError)
    async def answer_deep_nesting(request: Request, error: RecursionError) -> JSONResponse:
        return build_refusal(400, "the body is nested too deeply")

    @app.exception_handler(ClientDisconnect)
    async def client_left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # the client is gone

    add_control(app, served, is_guarded=api_key is not None)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def serve_metrics() -> Response:
        return PlainTextResponse(
            format_metrics(await served.sampler.read_metrics()),
            media_type="text/plain; version=0.0.4",
        )

    add_openai(app, served)
    install_description(app, served)
    return app


class KeyGuard:
    """Middleware that requires an API key as a bearer token, except for /health.

    `api_key` is accepted on all routes, `client_key` on all but those that control the server.
    """

    def __init__(self, app: ASGIApp, api_key: str, client_key: str | None = None) -> None:
        self.app = app
        self.expected = f"Bearer {api_key}".encode()
        self.client = None if client_key is None else f"Bearer {client_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            if not scope["path"].isprintable():  # routes match also before a final newline
                await build_refusal(404, "Not Found")(scope, receive, send)
                return
            given = dict(scope["headers"]).get(b"authorization", b"")
            is_owner = hmac.compare_digest(given, self.expected)
            if not is_owner and not (
                self.client is not None and hmac.compare_digest(given, self.client)
            ):
                message = "wrong or missing API key (header `Authorization: Bearer KEY`)"
                await build_refusal(401, message, "authentication_error")(scope, receive, send)
                return
            if not is_owner and scope["path"].rstrip("/") in CONTROL_PATHS:
                message = "this key is for clients: it opens no route that controls the server"
                await build_refusal(403, message, "permission_error")(scope, receive, send)
                return
        await self.app(scope, receive, send)


class PageGuard:
    """Middleware for a server without an API key: refuse requests of foreign web pages.

    A web page can make a browser on this machine send requests to the server. It can also read the
    answers if the page's own domain resolves to 127.0.0.1 (DNS rebinding). So on loopback the Host
    header must be an IP address, localhost or the machine's name. On every address, a request other
    than GET must not come from a page of another machine, and its body must be declared as JSON or
    protobuf, which a page cannot do without a preflight request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.names = {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = (
            self._find_problem(scope)
            if scope["type"] == "http" and scope["path"] != "/health"
            else ""
        )
        if problem:
            await build_refusal(403, problem, "permission_error")(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _find_problem(self, scope: Scope) -> str:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if not self._is_known(scope, host := host_of(f"//{headers.get(b'host', '')}")):
            return f"this server has no API key and answers to no name like {host!r}: use its address or localhost"
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return ""
        origin = headers.get(b"origin")
        if origin is not None and host_of(origin) not in LOOPBACK:
            return f"a page of {origin} may not use this server, which has no API key"
        kind = headers.get(b"content-type", "").partition(";")[0]
        length = headers.get(b"content-length", "0")
        has_body = length != "0" or b"transfer-encoding" in headers
        if has_body and not any(one in kind for one in ("json", "protobuf")):
            return "the body is JSON: send the header Content-Type: application/json"
        return ""

    def _is_known(self, scope: Scope, host: str) -> bool:
        """Return False if a request over loopback has an unknown domain name as `host`.

        DNS rebinding may have made that name resolve to 127.0.0.1.
        """
        reached = (scope.get("server") or ("127.0.0.1",))[0]
        is_local = not is_address(reached) or ipaddress.ip_address(reached).is_loopback
        return not is_local or not host or host in self.names or is_address(host)


def host_of(url: str) -> str:
    """Return the host of a URL in lower case, or "?" if the URL is invalid."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return "?"


def is_address(host: str) -> bool:
    """Return True for an IP address, which DNS cannot redirect."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class RequestLimit:
    """Middleware that limits body size, open requests, and the time a client may stay idle.

    It answers 413 for a body of more than `most_bytes()`, 429 beyond MAX_OPEN_RESPONSES open requests, and 408
    if nothing of a body arrives for STALLED_CLIENT_SECONDS seconds. It disconnects clients that read nothing for
    STALLED_CLIENT_SECONDS seconds.
    """

    def __init__(self, app: ASGIApp, most_bytes: Callable[[], int]) -> None:
        self.app = app
        self.most_bytes = most_bytes
        self.open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            return await self.app(scope, receive, send)
        most = self.most_bytes()
        words = f"the body is over {most} bytes, more than a request can use"
        told = dict(scope["headers"]).get(b"content-length", b"")
        if told.isdigit() and int(told) > most:
            return await build_refusal(413, words)(scope, receive, send)
        if self.open >= MAX_OPEN_RESPONSES:
            busy = f"{MAX_OPEN_RESPONSES} requests are open, more than this server takes; ask again later"
            return await build_refusal(429, busy, "rate_limit_error")(scope, receive, send)
        read = 0
        is_whole = False

        async def receive_bounded() -> Message:
            nonlocal read, is_whole
            if is_whole:  # the next message is the disconnect
                return await receive()
            try:
                async with asyncio.timeout(STALLED_CLIENT_SECONDS):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(
                    408, f"nothing of the body has come for {STALLED_CLIENT_SECONDS:.0f} s"
                ) from None
            read += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if read > most:
                raise HTTPException(413, words)
            return message

        async def read_by_somebody(message: Message) -> None:
            try:
                async with asyncio.timeout(STALLED_CLIENT_SECONDS):
                    await send(message)
            except TimeoutError:
                raise ConnectionError(
                    f"a client has read nothing for {STALLED_CLIENT_SECONDS:.0f} s: disconnected"
                ) from None

        self.open += 1
        try:
            await self.app(scope, receive_bounded, read_by_somebody)
        finally:
            self.open -= 1
