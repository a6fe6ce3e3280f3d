"""Control routes of a server: pause it, load new weights, and report which weights it serves.

    POST /pause?mode=keep|wait|abort     stop computing; running requests continue after /resume (keep), finish first
                                         (wait), or end now with the tokens they have (abort)
    POST /update_weights                 {"weight_dir": DIR, "version": N, "model_name": NAME?, "transport": {…}?}:
                                         load a version of the weights between two steps of the engine, from the files
                                         in weight_dir or over the transport that `transport` describes
                                         (transport/weight_transport.py); 409 if the trainer has a later version
    POST /resume                         continue computing
    GET  /version                        version, checksum, device, dtype, model, number of completions so far,
                                         is_paused; with ?each=true also the fingerprint of each weight
    POST /progress                       {"known": {NAME: N}}: numbers of running requests, of waiting requests, and of
                                         waiting requests that lack a slot or KV cache pages (without_room); and for
                                         each named request, its tokens after the first N
    POST /score                          {"ids": […] or a list of such lists, "temperature": 1.0}: logprobs of every
                                         token after the first
    POST /v1/load_lora_adapter           {"lora_name": NAME, "lora_path": DIR}: load or replace an adapter, in peft's
                                         format
    POST /v1/unload_lora_adapter         {"lora_name": NAME}

If the server has an API key, these routes require it; otherwise they only answer requests from this
machine. A tokenizer in the folder `text` beside weight_dir, or in weight_dir itself, replaces the
served tokenizer.
"""

from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, HTTPException, Query, Request
from pydantic import BaseModel, Field

from hone.config.sections import LOOPBACK
from hone.inference.samplers.base import Pause
from hone.inference.served_model import Served
from hone.transport.delivery import Superseded

T = TypeVar("T")


# A model name without control characters, as in requests and logs.
Name = Annotated[
    str, Field(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]+$")
]


CONTROL_PATHS = {  # routes that a client's key does not open
    "/pause",
    "/resume",
    "/update_weights",
    "/progress",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
}


class Update(BaseModel):
    weight_dir: str
    version: int = Field(ge=0)
    model_name: Name | None = None
    transport: dict[str, str] = Field(default={"type": "filesystem"})


class LoadAdapter(BaseModel):
    lora_name: Name
    lora_path: str


class UnloadAdapter(BaseModel):
    lora_name: Name


class Known(BaseModel):
    known: dict[str, int] = Field(default_factory=dict)


Sequence = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2)]


class Ids(BaseModel):
    ids: Sequence | list[Sequence] = Field(min_length=1)
    temperature: float = Field(default=1.0, gt=0, le=100)


async def unless_refused(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; answer 400 if it raises ValueError, 409 if it raises Superseded."""
    try:
        return await work
    except ValueError as error:
        raise HTTPException(400, str(error)) from None
    except Superseded as error:
        raise HTTPException(409, str(error)) from None


def add_control(app: FastAPI, served: Served, is_guarded: bool) -> None:
    """Add the control routes.

    If `is_guarded`, every route already requires an API key. Otherwise the control routes refuse
    requests that do not come from this machine.
    """
    sampler = served.sampler

    async def from_here(request: Request) -> None:  # async: FastAPI would call it in a thread
        # Sent by a browser or through a proxy.
        is_relayed = bool({"origin", "forwarded", "x-forwarded-for"} & set(request.headers))
        if not is_guarded and (
            request.client is None
            or request.client.host.removeprefix("::ffff:") not in LOOPBACK
            or is_relayed
        ):
            raise HTTPException(
                403, "control routes answer to this machine alone, unless the server has an API key"
            )

    guard = [Depends(from_here)]

    @app.post("/pause", dependencies=guard)
    async def pause(mode: Annotated[Pause, Query()] = "keep") -> dict[str, Any]:
        await sampler.pause(mode)
        return {"is_paused": True}

    @app.post("/resume", dependencies=guard)
    async def resume() -> dict[str, Any]:
        await sampler.resume()
        return {"is_paused": False}

    @app.post("/update_weights", dependencies=guard)
    async def update_weights(body: Update) -> dict[str, Any]:
        update = served.update_weights(
            Path(body.weight_dir), body.version, body.model_name, body.transport
        )
        return await unless_refused(update)

    @app.post("/v1/load_lora_adapter", dependencies=guard)
    async def load_lora_adapter(body: LoadAdapter) -> dict[str, Any]:
        return await unless_refused(served.load_adapter(body.lora_name, Path(body.lora_path)))

    @app.post("/v1/unload_lora_adapter", dependencies=guard)
    async def unload_lora_adapter(body: UnloadAdapter) -> dict[str, Any]:
        return await unless_refused(served.unload_adapter(body.lora_name))

    @app.get("/version", dependencies=guard)
    async def version(each: bool = False) -> dict[str, Any]:
        return await served.describe_state(each)

    @app.post("/progress", dependencies=guard)
    async def progress(body: Known) -> dict[str, Any]:
        """Report running and waiting requests, and new tokens of named requests.

        `known` maps NAME/I to the number of tokens that the client already has of completion I of
        the request named NAME.
        """
        return await sampler.report_progress(body.known)

    @app.post("/score", dependencies=guard)
    async def score_sequences(body: Ids) -> dict[str, Any]:
        is_one = isinstance(body.ids[0], int)
        sequences: list[list[int]] = [body.ids] if is_one else body.ids  # type: ignore[list-item,assignment]
        found = await unless_refused(sampler.score(sequences, body.temperature))
        return {"logprobs": found[0] if is_one else found}
