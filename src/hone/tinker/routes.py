"""HTTP routes of Tinker's API, as its SDK 0.38 calls them.

A call that computes answers with a request id at once; POST retrieve_future, which is held open,
returns the result. Refusals are 4xx with {"detail": …}, since the SDK repeats what fails with 5xx.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from pydantic import BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send

from hone.inference.app import KeyGuard, PageGuard, RequestLimit
from hone.models.lora import HEAD
from hone.tinker.checkpoints import (
    Checkpoint,
    as_iso,
    describe_checkpoint,
    list_files,
    wall_clock,
)
from hone.tinker.download_links import LINK_SECONDS, DownloadLinks
from hone.tinker.messages import decode_datum, decode_settings, parse_message
from hone.tinker.promises import Gone
from hone.tinker.request_bodies import (
    CreateModel,
    CreateSamplingSession,
    CreateSession,
    GetInfo,
    Heartbeat,
    LoadWeights,
    OptimStep,
    RetrieveFuture,
    Sample,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    Ttl,
    WeightsInfo,
)
from hone.tinker.training_runs import ATTENTION, TrainingRun, TrainingRuns, UnknownId

PREFIX = "/api/v1"
DOWNLOADS = f"{PREFIX}/downloads"
KEY_PREFIX = "tml-"  # without it the SDK refuses a key
POLL_SECONDS = 25.0  # how long a request for a result is held open; the SDK gives up after 45
MOST_PENDING = 8192  # promises; beyond, the SDK is told to wait
BODY_BYTES = 2**26
log = logging.getLogger("hone.tinker")
Body = TypeVar("Body", bound=BaseModel)


def build_app(runs: TrainingRuns, api_key: str | None = None) -> FastAPI:
    """Build the app. With `api_key`, clients send it in X-API-Key after "tml-", or as a bearer token."""
    app = FastAPI(title="hone tinker", docs_url=None, redoc_url=None, openapi_url=None)
    _add_refusals(app)
    _add_sessions(app, runs)
    _add_training(app, runs)
    _add_sampling(app, runs)
    _add_checkpoints(app, runs)
    links = DownloadLinks()
    _add_downloads(app, runs, links)
    # The last one is asked first: keys, before a body is read.
    app.add_middleware(RequestLimit, most_bytes=lambda: BODY_BYTES)
    if api_key is not None:
        app.add_middleware(KeyGuard, api_key=api_key)
        app.add_middleware(TinkerKey, api_key=api_key, links=links)
    else:
        app.add_middleware(PageGuard)

    @app.get("/health")
    @app.get(f"{PREFIX}/healthz")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


class TinkerKey:
    """Middleware that turns the SDK's header X-API-Key, or a signed link, into a bearer token."""

    def __init__(self, app: ASGIApp, api_key: str, links: DownloadLinks) -> None:
        self.app = app
        self.api_key = api_key
        self.links = links

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            key = headers.get(b"x-api-key", b"").removeprefix(KEY_PREFIX.encode())
            if self._is_signed(scope):
                key = self.api_key.encode()
            if key and b"authorization" not in headers:
                bearer = b"Bearer " + key
                scope = {**scope, "headers": [*scope["headers"], (b"authorization", bearer)]}
        await self.app(scope, receive, send)

    def _is_signed(self, scope: Scope) -> bool:
        path = scope["path"]
        is_download = scope["method"] == "GET" and path.startswith(f"{DOWNLOADS}/")
        return is_download and self.links.is_valid(path, scope["query_string"].decode("latin-1"))


def _refuse(status: int, message: str) -> JSONResponse:
    return JSONResponse({"detail": message}, status_code=status)


def _add_refusals(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def refuse_body(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return _refuse(422, f"{where}: {first['msg']}")

    @app.exception_handler(UnknownId)
    async def refuse_unknown(request: Request, error: UnknownId) -> JSONResponse:
        return _refuse(404, str(error))

    @app.exception_handler(KeyError)
    async def refuse_missing(request: Request, error: KeyError) -> JSONResponse:
        return _refuse(404, str(error.args[0]))

    @app.exception_handler(ValueError)
    async def refuse_value(request: Request, error: ValueError) -> JSONResponse:
        return _refuse(400, str(error))


def _promised(request_id: str, **more: Any) -> dict[str, Any]:
    return {"request_id": request_id, **more}


def _post(app: FastAPI, path: str, body_class: type[Body], answer: Callable[[Body], Any]) -> None:
    """Add a route whose body is JSON. `answer` returns the JSON of the answer."""

    async def handle(body: Any) -> Any:
        return answer(body)

    handle.__annotations__["body"] = body_class
    app.post(f"{PREFIX}/{path}")(handle)


# --------------------------------------------------------------------------------- sessions


def _add_sessions(app: FastAPI, runs: TrainingRuns) -> None:
    def list_capabilities() -> dict[str, Any]:
        model = {"max_context_length": runs.max_context, "trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": name, **model} for name in runs.names]}

    @app.get(f"{PREFIX}/get_server_capabilities")
    async def get_server_capabilities() -> dict[str, Any]:
        return list_capabilities()

    # Of the SDK's optional features none is on.
    @app.post(f"{PREFIX}/client/config")
    @app.post(f"{PREFIX}/client/dynamic_config")
    async def configure_client() -> dict[str, Any]:
        return {"use_pyqwest_transport": False}

    @app.post(f"{PREFIX}/telemetry")
    async def accept_telemetry() -> dict[str, str]:
        return {"status": "accepted"}

    def create_session(body: CreateSession) -> dict[str, Any]:
        return {"session_id": runs.open_session(body.user_metadata), "type": "create_session"}

    def hear_session(body: Heartbeat) -> Any:
        try:
            runs.find_session(body.session_id)
        except UnknownId as error:  # the SDK stops its heartbeats
            return _refuse(410, str(error))
        return {}

    _post(app, "create_session", CreateSession, create_session)
    _post(app, "session_heartbeat", Heartbeat, hear_session)

    @app.post(f"{PREFIX}/sessions/{{session_id}}/finish")
    async def finish_session(session_id: str) -> dict[str, Any]:
        runs.close_session(session_id)
        return {}

    @app.get(f"{PREFIX}/sessions")
    async def list_sessions() -> dict[str, Any]:
        return {"sessions": list(runs.sessions)}

    @app.get(f"{PREFIX}/sessions/{{session_id}}")
    async def get_session(session_id: str) -> dict[str, Any]:
        session = runs.sessions.get(session_id)
        if session is None:
            raise UnknownId(f"there is no session {session_id}")
        return {
            "training_run_ids": session.runs,
            "sampler_ids": session.samplers,
            "user_metadata": session.user_metadata,
        }

    async def retrieve_future(body: RetrieveFuture) -> Response:
        try:
            result = await runs.promises.wait_for(body.request_id, POLL_SECONDS)
        except Gone as error:
            return _refuse(410, str(error))
        if result is None:
            return JSONResponse({"type": "try_again", "queue_state": "active"})
        return Response(result.body, media_type=result.content_type)

    app.post(f"{PREFIX}/retrieve_future")(retrieve_future)


# --------------------------------------------------------------------------------- training


def _add_training(app: FastAPI, runs: TrainingRuns) -> None:
    def is_full() -> bool:
        return runs.promises.pending_count >= MOST_PENDING

    @app.middleware("http")
    async def hold_back(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        calls = (f"{PREFIX}/asample", f"{PREFIX}/forward_backward")
        if request.url.path in calls and is_full():
            return _refuse(429, f"{MOST_PENDING} calls wait for their turn; ask again later")
        return await call_next(request)

    @app.post(f"{PREFIX}/forward_backward")
    async def forward_backward(request: Request) -> Any:
        kind = request.headers.get("content-type", "")
        if "protobuf" not in kind:
            return _refuse(415, f"the body is protobuf, found {kind or 'no content type'}")
        message = parse_message("ForwardBackwardRequest", await request.body())

        def read() -> Any:
            data = [decode_datum(one, f"data[{i}]") for i, one in enumerate(message.data)]
            return data, message.loss_fn, decode_settings(message)

        is_training = not message.forward_only
        return _promised(runs.run_pass(message.model_id, message.seq_id, read, is_training))

    _post(app, "create_model", CreateModel, lambda body: _promised(runs.create_model(body)))
    _post(app, "load_weights", LoadWeights, lambda body: _promised(runs.load_weights(body)))
    _post(app, "optim_step", OptimStep, lambda body: _promised(runs.run_optim_step(body)))
    _post(app, "save_weights", SaveWeights, lambda body: _promised(runs.save_weights(body)))

    def save_external(body: SaveExternal) -> dict[str, Any]:
        return _promised(runs.save_external(body))

    _post(app, "save_weights_external", SaveExternal, save_external)

    def get_info(body: GetInfo) -> dict[str, Any]:
        run = runs.find_run(body.model_id)
        if run.session is None or run.session.lora is None:
            raise UnknownId(f"model {body.model_id} is not made yet")
        return {
            "model_id": body.model_id,
            "model_name": runs.names[0],
            "is_lora": True,
            "lora_rank": run.session.lora.rank,
            "model_data": {
                "model_name": runs.names[0],
                "tokenizer_id": runs.tokenizer_id,
            },
            "type": "get_info",
        }

    _post(app, "get_info", GetInfo, get_info)


# --------------------------------------------------------------------------------- sampling


def _add_sampling(app: FastAPI, runs: TrainingRuns) -> None:
    def save_for_sampler(body: SaveForSampler) -> dict[str, Any]:
        return _promised(runs.save_for_sampler(body))

    def create_sampling_session(body: CreateSamplingSession) -> dict[str, Any]:
        sampler_id = runs.open_sampler(body)
        return {"sampling_session_id": sampler_id, "type": "create_sampling_session"}

    def sample(body: Sample) -> dict[str, Any]:
        request_id, ids = runs.sample(body)
        return _promised(request_id, sample_sequence_ids=ids)

    _post(app, "save_weights_for_sampler", SaveForSampler, save_for_sampler)
    _post(app, "create_sampling_session", CreateSamplingSession, create_sampling_session)
    _post(app, "asample", Sample, sample)

    @app.get(f"{PREFIX}/samplers/{{sampler_id}}")
    async def get_sampler(sampler_id: str) -> dict[str, Any]:
        target = runs.samplers.get(sampler_id)
        if target is None:
            raise UnknownId(f"there is no sampler {sampler_id}")
        return {"sampler_id": sampler_id, "base_model": runs.names[0], "model_path": target.path}


# ------------------------------------------------------------------------------ checkpoints


def _add_checkpoints(app: FastAPI, runs: TrainingRuns) -> None:
    store = runs.store

    def describe(found: list[Checkpoint]) -> list[dict[str, Any]]:
        return [describe_checkpoint(one, store.find(one.path)[1]) for one in found]

    def describe_run(run_id: str) -> dict[str, Any]:
        run: TrainingRun | None = runs.runs.get(run_id)
        saved = store.list_checkpoints(run_id)
        if run is None and not saved:
            raise UnknownId(f"there is no training run {run_id}")
        lora = saved[-1].lora if saved else {}
        if run is not None and run.session is not None and run.session.lora is not None:
            lora = {"rank": run.session.lora.rank}
        of_kind = {
            kind: describe([one for one in saved if one.kind == kind][-1:])
            for kind in ("weights", "sampler_weights")
        }
        used_at = run.used_at if run is not None else saved[-1].created
        return {
            "training_run_id": run_id,
            "base_model": runs.names[0],
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": lora.get("rank"),
            "last_request_time": as_iso(used_at),
            "last_checkpoint": next(iter(of_kind["weights"]), None),
            "last_sampler_checkpoint": next(iter(of_kind["sampler_weights"]), None),
            "user_metadata": run.user_metadata if run is not None else None,
        }

    def paginate(found: list[Any], limit: int, offset: int) -> dict[str, int]:
        return {"offset": offset, "limit": limit, "total_count": len(found)}

    @app.get(f"{PREFIX}/training_runs")
    async def list_runs(limit: int = 20, offset: int = 0) -> dict[str, Any]:
        saved = [one.run for one in store.list_checkpoints()]
        found = list(dict.fromkeys([*saved, *runs.runs]))
        shown = [describe_run(one) for one in found[offset : offset + limit]]
        return {"training_runs": shown, "cursor": paginate(found, limit, offset)}

    @app.get(f"{PREFIX}/training_runs/{{run_id}}")
    async def get_run(run_id: str) -> dict[str, Any]:
        return describe_run(run_id)

    @app.get(f"{PREFIX}/training_runs/{{run_id}}/checkpoints")
    async def list_run_checkpoints(run_id: str) -> dict[str, Any]:
        return {"checkpoints": describe(store.list_checkpoints(run_id))}

    @app.get(f"{PREFIX}/checkpoints")
    async def list_all_checkpoints(limit: int = 100, offset: int = 0) -> dict[str, Any]:
        found = store.list_checkpoints()
        shown = describe(found[offset : offset + limit])
        return {"checkpoints": shown, "cursor": paginate(found, limit, offset)}

    @app.delete(f"{PREFIX}/training_runs/{{run_id}}/checkpoints/{{kind}}/{{name}}")
    async def delete_checkpoint(run_id: str, kind: str, name: str) -> Response:
        store.delete(f"tinker://{run_id}/{kind}/{name}")
        return Response(status_code=204)

    @app.put(f"{PREFIX}/training_runs/{{run_id}}/checkpoints/{{kind}}/{{name}}/ttl")
    async def set_ttl(run_id: str, kind: str, name: str, body: Ttl) -> Response:
        store.set_ttl(f"tinker://{run_id}/{kind}/{name}", body.ttl_seconds)
        return Response(status_code=204)

    def get_weights_info(body: WeightsInfo) -> dict[str, Any]:
        found, _ = store.find(body.tinker_path)
        targets = set(found.lora["targets"])
        return {
            "base_model": found.base_model,
            "is_lora": True,
            "lora_rank": found.lora["rank"],
            "train_unembed": HEAD in targets,
            "train_attn": bool(targets & set(ATTENTION)),
            "train_mlp": bool(targets - {*ATTENTION, HEAD}),
        }

    _post(app, "weights_info", WeightsInfo, get_weights_info)


# -------------------------------------------------------------------------------- downloads


def _add_downloads(app: FastAPI, runs: TrainingRuns, links: DownloadLinks) -> None:
    @app.get(
        f"{PREFIX}/training_runs/{{run_id}}/checkpoints/{{kind}}/{{name}}/external_weights_urls"
    )
    async def list_urls(run_id: str, kind: str, name: str, request: Request) -> dict[str, Any]:
        found, place = runs.store.find(f"tinker://{run_id}/{kind}/{name}")
        if found.kind != "external_weights":
            raise ValueError(
                f"{found.path} is not exported; save_weights_external exports a model's weights"
            )
        expires = wall_clock() + LINK_SECONDS
        start = str(request.base_url).rstrip("/")
        folder = f"{DOWNLOADS}/{run_id}/{kind}/{name}"
        urls = {
            file: start + links.sign_path(f"{folder}/{file}", expires) for file in list_files(place)
        }
        return {"urls": urls, "expires": as_iso(expires)}

    @app.get(f"{DOWNLOADS}/{{run_id}}/{{kind}}/{{name}}/{{file}}")
    async def download_file(run_id: str, kind: str, name: str, file: str) -> Response:
        found, place = runs.store.find(f"tinker://{run_id}/{kind}/{name}")
        if found.kind != "external_weights" or file not in list_files(place):
            raise KeyError(f"there is no exported file {file} of {found.path}")
        return FileResponse(place / file)
