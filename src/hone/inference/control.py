"""Control of a server: pause, new weights, proof of what it serves. Behind the key if there is one, else from this
machine alone.

    POST /pause?mode=keep|wait|abort     stop computing: keep what runs, finish it, or end it
    POST /update_weights                 {"weight_dir": DIR, "version": N, "model_name": NAME?, "transport": {…}?},
                                         between two steps; without transport as files of weight_dir, with the message
                                         of a sender (transport/weights.py) in its way; 409 where the trainer has gone
                                         on to a later version
    POST /resume                         go on
    GET  /version                        version, checksum, device, dtype, model, completions so far, is_paused;
                                         ?each=true: the fingerprint of each weight too
    POST /progress                       {"known": {NAME: N}}: running, waiting, and of named requests the tokens since
    POST /score                          {"ids": […] or several, "temperature": 1.0}: logprobs of every token after the
                                         first
    POST /v1/load_lora_adapter           {"lora_name": NAME, "lora_path": DIR}, in peft's format; again to replace it
    POST /v1/unload_lora_adapter         {"lora_name": NAME}

A directory of another shape of model, or with a tokenizer of its own, replaces model and tokenizer; what runs is ended
first where the shape differs.
"""

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, HTTPException, Query, Request
from pydantic import BaseModel, Field

from hone.config.sections import LOOPBACK
from hone.engine.engine import Engine
from hone.inference.service import EngineService
from hone.kernels import cpu
from hone.models.families import parse_model_config
from hone.models.hf import empty_model, hf_tensors
from hone.models.proof import checksum_of, fingerprints, scores
from hone.models.spec import read_model_config
from hone.text.tokenizer import Tokenizer
from hone.transport.delivery import TEXT, Superseded
from hone.transport.ways import make_receiver
from hone.transport.weights import Message, Receiver

log = logging.getLogger("hone.inference")


class Served:
    """What a server serves: an engine in its service, a tokenizer, a name. Changes with `update`."""

    def __init__(self, service: EngineService, tokenizer: Tokenizer, name: str) -> None:
        self.service, self.name = service, name
        self.receivers: dict[str, Receiver] = {}  # by the kind of their messages
        self._text: tuple[Path, int] | None = None  # that the tokenizer came from
        self.set_tokenizer(tokenizer)

    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.stop_ids = tokenizer, frozenset(tokenizer.stop_ids)

    @property
    def engine(self) -> Engine:
        return self.service.engine

    def update(self, delivered: Path, version: int, name: str | None, message: Message) -> dict[str, Any]:
        """Takes new weights, on the compute thread, as the message says; `delivered` has at least their config.json.
        Raises ValueError where they cannot be loaded."""
        engine = self.engine
        files = [place / "tokenizer.json" for place in (delivered.parent / TEXT, delivered)]
        text = next(((file, file.stat().st_mtime_ns) for file in files if file.is_file()), None)
        tokenizer = Tokenizer(text[0].parent) if text and text != self._text else None
        spec = parse_model_config(read_model_config(delivered), str(delivered / "config.json"))
        model, weight = engine.model, engine.model.embed.weight
        if spec != model.spec:
            model = empty_model(spec, weight.dtype, weight.device)
        kind = message.get("type", "")
        if kind not in self.receivers:
            self.receivers[kind] = make_receiver(kind)
        self.receivers[kind].receive(message, version, delivered, dict(hf_tensors(model)))
        if model is engine.model:
            engine.set_version(version)
        else:
            engine.abort_all()
            self.service.engine = engine.with_model(model, version)
            del engine
            gc.unfreeze()  # the old engine is in reference cycles, and gc.freeze has excluded it from collection
            gc.collect()
        if tokenizer is not None:
            self.set_tokenizer(tokenizer)
            self._text = text
        self.name = name or self.name
        log.info("Took version %d of %s from %s", version, self.name, delivered)
        return self.state()

    def load_adapter(self, name: str, directory: Path) -> dict[str, Any]:
        """Takes a LoRA adapter, on the compute thread; requests name it as their model."""
        if name == self.name:
            raise ValueError(f"lora_name: {name!r} is the name of the model itself")
        self.engine.load_adapter(name, directory)
        log.info("Took adapter %s from %s", name, directory)
        return self.state()

    def unload_adapter(self, name: str) -> dict[str, Any]:
        self.engine.unload_adapter(name)
        return self.state()

    def state(self, each: bool = False) -> dict[str, Any]:
        model = self.engine.model
        of_each = fingerprints(model)
        return {
            "version": self.engine.version,
            "checksum": checksum_of(model, of_each),
            "device": cpu.words(model.embed.weight.device.type),
            "dtype": str(model.embed.weight.dtype).removeprefix("torch."),
            "model": self.name,
            "completions": self.engine.completions,
            "is_paused": self.service.is_paused,
            "adapters": list(self.engine.adapters.loaded),
            **({"fingerprints": of_each} if each else {}),
        }


class Update(BaseModel):
    weight_dir: str
    version: int = Field(ge=0)
    model_name: str | None = None
    transport: dict[str, str] = Field(default={"type": "filesystem"})


class LoadAdapter(BaseModel):
    lora_name: str = Field(min_length=1)
    lora_path: str


class UnloadAdapter(BaseModel):
    lora_name: str


class Known(BaseModel):
    known: dict[str, int] = Field(default_factory=dict)


Sequence = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2)]


class Ids(BaseModel):
    ids: Sequence | list[Sequence] = Field(min_length=1)
    temperature: float = Field(default=1.0, gt=0)


def add_control(app: FastAPI, served: Served, is_guarded: bool) -> None:
    """Adds the control routes; `is_guarded`: every route asks for a key already."""
    service = served.service

    def from_here(request: Request) -> None:
        is_relayed = bool({"origin", "forwarded", "x-forwarded-for"} & set(request.headers))  # a browser, a proxy
        if not is_guarded and (
            request.client is None or request.client.host.removeprefix("::ffff:") not in LOOPBACK or is_relayed
        ):
            raise HTTPException(403, "control routes answer to this machine alone, unless the server has an API key")

    guard = [Depends(from_here)]

    async def changed(change: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The state after a change on the compute thread."""
        try:
            return await service.run(change)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        except Superseded as error:
            raise HTTPException(409, str(error)) from None

    @app.post("/pause", dependencies=guard)
    async def pause(mode: Annotated[Literal["keep", "wait", "abort"], Query()] = "keep") -> dict[str, Any]:
        await service.pause(mode)
        return {"is_paused": True}

    @app.post("/resume", dependencies=guard)
    async def resume() -> dict[str, Any]:
        await service.resume()
        return {"is_paused": False}

    @app.post("/update_weights", dependencies=guard)
    async def update_weights(body: Update) -> dict[str, Any]:
        where = Path(body.weight_dir)
        return await changed(lambda: served.update(where, body.version, body.model_name, body.transport))

    @app.post("/v1/load_lora_adapter", dependencies=guard)
    async def load_lora_adapter(body: LoadAdapter) -> dict[str, Any]:
        return await changed(lambda: served.load_adapter(body.lora_name, Path(body.lora_path)))

    @app.post("/v1/unload_lora_adapter", dependencies=guard)
    async def unload_lora_adapter(body: UnloadAdapter) -> dict[str, Any]:
        return await changed(lambda: served.unload_adapter(body.lora_name))

    @app.get("/version", dependencies=guard)
    async def version(each: bool = False) -> dict[str, Any]:
        return await service.run(lambda: served.state(each))

    @app.post("/progress", dependencies=guard)
    async def progress(body: Known) -> dict[str, Any]:
        """`known`: how many tokens of a request are known already, by its name and number, NAME/I."""

        def look() -> dict[str, Any]:
            engine = served.engine
            partials = {name: vars(one) for name, one in engine.progress(body.known).items()}
            running = len(engine.running)
            return {"running": running, "waiting": len(engine.sequences()) - running, "partials": partials}

        return await service.run(look)

    @app.post("/score", dependencies=guard)
    async def scored(body: Ids) -> dict[str, Any]:
        spec, is_one = served.engine.model.spec, isinstance(body.ids[0], int)
        sequences: list[list[int]] = [body.ids] if is_one else body.ids  # type: ignore[list-item,assignment]
        if any(max(ids) >= spec.vocab_size or len(ids) > spec.max_position_embeddings for ids in sequences):
            raise HTTPException(400, f"ids: at most {spec.max_position_embeddings}, each below {spec.vocab_size}")
        found = await service.run(lambda: scores(served.engine.model, sequences, body.temperature))
        return {"logprobs": found[0] if is_one else found}
