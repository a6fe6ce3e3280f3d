"""Serve the policy on loopback as an OpenAI-compatible API, with one URL per rollout.

    POST /SECRET/v1/chat/completions ─► the rollout's client.chat ─► the answer; the turn is recorded

Environments in other processes send their model requests to this API.
"""

import asyncio
import contextlib
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from hone.environments.environment import ModelClient
from hone.http_limits import bounded_config
from hone.records import ContextFull, Message, Sampling, Turn

# Keys that would change sampling, with their neutral values; the run decides how to sample.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": ([], ""),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "tool_choice": ("auto", "none"),
    "chat_template_kwargs": ({},),
    "prediction": (),
    "audio": (),
}


@dataclass
class RolloutAccess:
    """URL, model client and recorded turns of one rollout that uses the endpoint.

    Attributes:
        request: messages of the latest request that was answered.
        sessions: by turn, the session that the request named, which is an agent's of verifiers 0.4.
        is_open: False once the rollout has ended; later answers are not its turns.
        is_full: True if a request left no space for an answer within the context length.
        failure: error of the client that the latest refused request met.
    """

    url: str
    client: ModelClient
    sampling: Sampling
    turns: list[Turn] = field(default_factory=list)
    request: list[Message] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    is_full: bool = False
    is_open: bool = True
    failure: Exception | None = None
    seconds: float = 0.0
    model_seconds: float = 0.0

    def turns_of(self, session: str | None) -> list[Turn]:
        """Return the turns of a session; None: all turns."""
        named = zip(self.turns, self.sessions, strict=True)
        return [turn for turn, own in named if session is None or own == session]


class _Server(uvicorn.Server):
    def capture_signals(self) -> Any:
        return contextlib.nullcontext()  # the program handles signals


class PolicyEndpoint:
    """OpenAI-compatible server of the policy on 127.0.0.1, started when first used."""

    def __init__(self) -> None:
        self.accesses: dict[str, RolloutAccess] = {}  # by their secret
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def open_access(
        self, client: ModelClient, sampling: Sampling
    ) -> AsyncIterator[RolloutAccess]:
        # A secret of its own: programs of one rollout must not reach another's.
        secret = secrets.token_urlsafe(16)
        url = f"http://127.0.0.1:{await self._get_port()}/{secret}/v1"
        access = RolloutAccess(url, client, sampling)
        self.accesses[secret] = access
        start = time.perf_counter()
        try:
            yield access
        finally:
            access.seconds = time.perf_counter() - start
            access.is_open = False
            del self.accesses[secret]

    async def close(self) -> None:
        server = self._server
        serving = self._serving
        self._server = None
        self._serving = None
        if (
            server is not None
            and serving is not None
            and serving.get_loop() is asyncio.get_running_loop()
        ):
            server.should_exit = True
            await serving

    async def _get_port(self) -> int:
        if self._serving is None or self._serving.get_loop() is not asyncio.get_running_loop():
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            self._socket.bind(("127.0.0.1", 0))
            self._socket.listen(2048)
            routes = [
                Route(
                    "/{secret}/v1/chat/completions",
                    self._answer_chat,
                    methods=["POST"],
                ),
                Route("/{secret}/v1/models", self._list_models),
            ]
            settings = bounded_config(
                Starlette(routes=routes),
                timeout_graceful_shutdown=3,
            )
            self._server = _Server(settings)
            self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        port: int = self._socket.getsockname()[1]
        return port

    def _find_access(self, request: Request) -> RolloutAccess | None:
        return self.accesses.get(request.path_params["secret"])

    async def _list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    async def _answer_chat(self, request: Request) -> Response:
        access = self._find_access(request)
        if access is None:
            return _build_refusal(404, "there is no such rollout any more")
        body = json.loads(await request.body())
        for key, neutral in NEUTRAL.items():
            if body.get(key) not in (None, *neutral):
                return _build_refusal(
                    400,
                    f"{key} = {body[key]!r} is not supported where a policy is trained; leave it out",
                )
        wanted = body.get("max_completion_tokens") or body.get("max_tokens")
        sampling = access.sampling
        if wanted is not None:
            sampling = replace(sampling, max_tokens=min(int(wanted), sampling.max_tokens))
        start = time.perf_counter()
        try:
            tools = None if body.get("tool_choice") == "none" else body.get("tools") or None
            turn = await access.client.chat(body["messages"], sampling, tools)
        except ContextFull as error:
            access.is_full = True
            return _build_refusal(400, str(error))
        except (ValueError, RuntimeError) as error:
            access.failure = error
            return _build_refusal(400, str(error))
        except ConnectionError as error:
            return _build_refusal(503, str(error))
        finally:
            access.model_seconds += time.perf_counter() - start
        if not access.is_open:  # it ended while the model answered
            return _build_refusal(404, "there is no such rollout any more")
        access.turns.append(turn)
        access.request = body["messages"]
        access.sessions.append(request.headers.get("x-session-id", ""))
        answer = _encode_completion(turn)
        return _stream_answer(answer) if body.get("stream") else JSONResponse(answer)


def _encode_completion(turn: Turn) -> dict[str, Any]:
    done = turn.completion
    reason = (
        "tool_calls" if turn.tool_calls and done.finish_reason == "stop" else done.finish_reason
    )
    used = {"prompt_tokens": len(turn.prompt_ids), "completion_tokens": len(done.ids)}
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "message": turn.assistant_message,
                "finish_reason": reason,
                "logprobs": None,
            }
        ],
        "usage": used | {"total_tokens": sum(used.values())},
    }


def _stream_answer(answer: dict[str, Any]) -> Response:
    """Return an event stream with the whole message in one chunk, for clients that stream."""
    choice = answer["choices"][0]
    calls = [
        {"index": i, **call} for i, call in enumerate(choice["message"].get("tool_calls") or [])
    ]
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    head = {key: answer[key] for key in ("id", "created", "model")} | {
        "object": "chat.completion.chunk"
    }
    chunks = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        {**head, "choices": [], "usage": answer["usage"]},
    ]
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
    return StreamingResponse(iter(lines), media_type="text/event-stream")


def _build_refusal(status: int, message: str) -> Response:
    return JSONResponse(
        {"error": {"message": message, "type": "invalid_request_error", "code": status}}, status
    )
