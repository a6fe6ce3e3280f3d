"""What a Tinker server does: training runs on one frozen base, their snapshots and samples.

event loop: sessions, order of calls, promises      compute thread: passes, steps, saves, sampling
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from hone.engine.engine import Engine
from hone.inference.engine_service import EngineService
from hone.models.adapters import Adapter, read_adapter
from hone.models.lora import HEAD, adapter_tensors, write_adapter
from hone.models.weight_proof import find_likeliest, score_sequence
from hone.records import Completion, GenerateRequest, Sampling
from hone.session.frozen_base import FrozenBase
from hone.session.session_data import AdamParams, Datum
from hone.session.training_session import TrainingSession, copy_adapter
from hone.tinker.call_order import CallOrder
from hone.tinker.checkpoints import Checkpoint, CheckpointStore, count_bytes, expiry, wall_clock
from hone.tinker.messages import encode_forward_output, encode_samples
from hone.tinker.promises import Promises, Result
from hone.tinker.request_bodies import (
    CreateModel,
    CreateSamplingSession,
    LoadWeights,
    LoraSettings,
    OptimStep,
    Sample,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
)
from hone.tinker.snapshot_samplers import SnapshotSamplers

LORA_ALPHA = 32.0  # that of the hosted service: the best learning rate does not depend on the rank
MOST_RANK = 512
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
STATE_FOLDER = "state"
EPHEMERAL = "ephemeral-"  # names of snapshots that were saved without one
EPHEMERAL_SECONDS = 86400.0  # until they are deleted, unless their session ends earlier
SESSION_SECONDS = 3600.0  # without a heartbeat, until a session's models are dropped
log = logging.getLogger("hone.tinker")


@dataclass
class ClientSession:
    """A client process: what it has created, and when it was heard last."""

    user_metadata: dict[str, Any] | None
    runs: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)
    heard_at: float = field(default_factory=time.monotonic)


@dataclass
class TrainingRun:
    """A model in training.

    Attributes:
        session: the adapter with its gradients and optimizer; None until it is made.
        creation_id: request id of its creation, since calls are repeated.
    """

    run_id: str
    user_metadata: dict[str, Any] | None
    order: CallOrder
    session: TrainingSession | None = None
    creation_id: str = ""
    used_at: float = field(default_factory=wall_clock)
    saves: int = 0


@dataclass
class SamplerTarget:
    """What a sampling session samples from.

    Attributes:
        path: the snapshot's `tinker://` path; None: the base model.
        directory: where its adapter is.
        requests: promise and sample ids of each call, since calls are repeated.
    """

    path: str | None = None
    directory: Path | None = None
    requests: dict[int, tuple[str, list[str]]] = field(default_factory=dict)


class UnknownId(Exception):
    """Raised for a session, model or sampler that the server does not have."""


class TrainingRuns:
    """The state of a Tinker server. All methods run on its event loop.

    Attributes:
        base: the frozen model.
        names: names by which clients may ask for it.
    """

    def __init__(
        self,
        base: FrozenBase,
        service: EngineService,
        store: CheckpointStore,
        names: list[str],
        snapshots: SnapshotSamplers,
    ) -> None:
        self.base = base
        self.service = service
        self.store = store
        self.names = names
        self.promises = Promises()
        self.snapshots = snapshots
        self.sessions: dict[str, ClientSession] = {}
        self.runs: dict[str, TrainingRun] = {}
        self.samplers: dict[str, SamplerTarget] = {}
        self._writes: dict[str, asyncio.Task[None]] = {}  # of snapshots that are being written

    @property
    def engine(self) -> Engine:
        return self.service.engine

    @property
    def max_context(self) -> int:
        return self.engine.max_model_len

    @property
    def tokenizer_id(self) -> str:
        """Return what clients load the tokenizer from: the directory, or the hub id."""
        directory = Path(self.base.name)
        return str(directory.absolute()) if directory.is_dir() else self.base.name

    # ------------------------------------------------------------------------------- sessions

    def open_session(self, user_metadata: dict[str, Any] | None) -> str:
        self._drop_silent_sessions()
        session_id = secrets.token_hex(8)
        self.sessions[session_id] = ClientSession(user_metadata)
        return session_id

    def find_session(self, session_id: str) -> ClientSession:
        """Return a session, which counts as heard. Raises UnknownId."""
        session = self.sessions.get(session_id)
        if session is None:
            raise UnknownId(f"there is no session {session_id}: it ended, or the server restarted")
        session.heard_at = time.monotonic()
        return session

    def close_session(self, session_id: str) -> None:
        """Drop a session with its models and samplers; checkpoints with names stay."""
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        for run_id in session.runs:
            self.runs.pop(run_id, None)
            for checkpoint in self.store.list_checkpoints(run_id):
                if checkpoint.name.startswith(EPHEMERAL):
                    self.store.delete(checkpoint.path)
        for sampler_id in session.samplers:
            self.samplers.pop(sampler_id, None)

    def _drop_silent_sessions(self) -> None:
        limit = time.monotonic() - SESSION_SECONDS
        for name in [name for name, one in self.sessions.items() if one.heard_at < limit]:
            self.close_session(name)

    def check_base(self, name: str | None) -> None:
        """Raise ValueError if a client asks for another model."""
        if name is not None and name not in self.names:
            raise ValueError(f"base_model {name!r} is not served; {', '.join(self.names)} is")

    # ---------------------------------------------------------------------------------- models

    def create_model(self, body: CreateModel) -> str:
        """Begin to make a model; return the request id."""

        async def make_model(run: TrainingRun) -> Result:
            self.check_base(body.base_model)
            if body.optimizer_config.get("type", "adamw") != "adamw":
                raise ValueError(
                    f"optimizer_config: {body.optimizer_config['type']!r} is not adamw"
                )
            lora = self._lora_keys(body.lora_config)
            seed = body.lora_config.seed
            run.session = await self.service.run_on_engine(
                lambda: TrainingSession(
                    self.base, lora=lora, seed=secrets.randbits(31) if seed is None else seed
                )
            )
            return Result.from_json({"model_id": run.run_id, "type": "create_model"})

        return self._begin_run(body.session_id, body.model_seq_id, body.user_metadata, make_model)

    def _begin_run(
        self,
        session_id: str,
        number: int,
        user_metadata: dict[str, Any] | None,
        make: Callable[[TrainingRun], Coroutine[Any, Any, Result]],
    ) -> str:
        """Begin a training run, once; return the request id. `make` sets its session."""
        session = self.find_session(session_id)
        run_id = f"{session_id}:train:{number}"
        if run_id not in self.runs:
            run = TrainingRun(run_id, user_metadata, CallOrder())
            self.runs[run_id] = run
            session.runs.append(run_id)
            run.creation_id = self._promise(lambda: make(run))
        return self.runs[run_id].creation_id

    def _lora_keys(self, asked: LoraSettings) -> dict[str, Any]:
        """Return keys of `trainer.lora`. Raises ValueError for what cannot be trained."""
        if not 1 <= asked.rank <= MOST_RANK:
            raise ValueError(f"lora_config: rank {asked.rank} is not from 1 to {MOST_RANK}")
        spec = self.base.loaded.model.spec
        can_merge = self.snapshots.merges_head
        # An adapter of experts cannot be chosen by request
        names = [n for n in spec.linear_shapes if can_merge or spec.count_linears(n) == 1]
        targets = [
            name for name in names if (asked.train_attn if name in ATTENTION else asked.train_mlp)
        ]
        if asked.train_unembed and can_merge:
            targets.append(HEAD)
        elif asked.train_unembed:
            log.warning("train_unembed: not with --no-merge; the other layers are trained")
        if not targets:
            raise ValueError("lora_config: there is no layer to train")
        return {"rank": asked.rank, "alpha": LORA_ALPHA, "targets": targets}

    def load_weights(self, body: LoadWeights) -> str:
        """Begin to load a checkpoint, into a new model or one that exists; return the request id."""
        if body.session_id is None or body.model_seq_id is None:
            run = self.find_run(body.model_id or "")

            def load_state() -> dict[str, Any]:
                checkpoint, place = self.store.find(body.path)
                _session_of(run).load_state(_state_of(checkpoint, place), body.optimizer)
                return {"path": body.path, "type": "load_weights"}

            return self._call_in_order(run, body.seq_id, lambda: self._compute_json(load_state))

        def make_loaded(run: TrainingRun) -> dict[str, Any]:
            self.check_base(body.base_model)
            checkpoint, place = self.store.find(body.path)
            self.check_base(checkpoint.base_model)
            made = TrainingSession(self.base, lora=checkpoint.lora)
            made.load_state(_state_of(checkpoint, place), body.optimizer)
            run.session = made
            return {"path": body.path, "model_id": run.run_id, "type": "load_weights"}

        return self._begin_run(
            body.session_id,
            body.model_seq_id,
            body.user_metadata,
            lambda run: self._compute_json(partial(make_loaded, run)),
        )

    def find_run(self, run_id: str) -> TrainingRun:
        """Return a model in training. Raises UnknownId."""
        run = self.runs.get(run_id)
        if run is None:
            raise UnknownId(
                f"there is no model {run_id} in training: its session ended, or the server restarted; "
                "continue from a saved state"
            )
        self.find_session(run_id.partition(":")[0])
        run.used_at = wall_clock()
        return run

    # -------------------------------------------------------------------------------- training

    def run_pass(
        self,
        run_id: str,
        seq_id: int,
        read: Callable[[], tuple[list[Datum], str, dict[str, float]]],
        is_training: bool,
    ) -> str:
        """Begin forward_backward or forward; return the request id. `read` decodes the data."""
        run = self.find_run(run_id)

        async def compute() -> Result:
            data, loss, settings = read()

            def run_passes() -> bytes:
                session = _session_of(run)
                work = session.forward_backward if is_training else session.forward
                return encode_forward_output(work(data, loss, **settings))

            return Result(await self.service.run_on_engine(run_passes))

        return self._call_in_order(run, seq_id, compute)

    def run_optim_step(self, body: OptimStep) -> str:
        run = self.find_run(body.model_id)

        def take_step() -> dict[str, Any]:
            found = body.params
            adam = AdamParams(
                lr=found.learning_rate,
                betas=(found.beta1, found.beta2),
                eps=found.eps,
                weight_decay=found.weight_decay,
                max_norm=found.grad_clip_norm or None,
            )
            return {"metrics": _session_of(run).optim_step(adam), "type": "optim_step"}

        return self._call_in_order(run, body.seq_id, lambda: self._compute_json(take_step))

    # ------------------------------------------------------------------------------------ saves

    def save_weights(self, body: SaveWeights) -> str:
        """Begin to save a state to continue from; return the request id."""
        run = self.find_run(body.model_id)

        def save_state() -> dict[str, Any]:
            name = body.path or f"step-{_session_of(run).steps}"
            found = self._describe(run, "weights", name, body.ttl_seconds, body.user_metadata)

            def write_state(place: Path) -> None:
                self._write_adapter(run, adapter_tensors(_session_of(run).model), place)
                _session_of(run).save_state(place / STATE_FOLDER)

            self.store.write_checkpoint(found, write_state, body.overwrite)
            return {"path": found.path, "type": "save_weights"}

        return self._call_in_order(run, body.seq_id, lambda: self._compute_json(save_state))

    def save_external(self, body: SaveExternal) -> str:
        """Begin to export the adapter in peft's format, for downloads; return the request id."""
        run = self.find_run(body.model_id)

        def export_adapter() -> dict[str, Any]:
            if body.age_encryption_recipients:
                raise ValueError("age_encryption_recipients: this server does not encrypt files")
            found = self._describe(run, "external_weights", body.path, body.ttl_seconds, None)
            tensors = adapter_tensors(_session_of(run).model)
            self.store.write_checkpoint(
                found, lambda place: self._write_adapter(run, tensors, place)
            )
            size = count_bytes(self.store.locate(found))
            return {"path": found.path, "size_bytes": size, "type": "save_weights_external"}

        return self._call_in_order(run, body.seq_id, lambda: self._compute_json(export_adapter))

    def save_for_sampler(self, body: SaveForSampler) -> str:
        """Begin to save a snapshot to sample from; return the request id."""
        run = self.find_run(body.model_id)
        session_id = run.run_id.partition(":")[0]

        is_ephemeral = body.path is None
        if body.path is None:
            run.saves += 1
            name = f"{EPHEMERAL}{'inflight' if body.kind == 'inflight' else run.saves}"
        else:
            name = body.path

        def take_snapshot() -> tuple[Checkpoint, dict[str, Tensor], Adapter]:
            model = _session_of(run).model
            found = self._describe(
                run, "sampler_weights", name, body.ttl_seconds, body.user_metadata
            )
            if is_ephemeral:
                found = replace(found, expires=wall_clock() + EPHEMERAL_SECONDS)
            tensors = {key: x.clone() for key, x in adapter_tensors(model).items()}
            return found, tensors, copy_adapter(model)

        async def save_snapshot() -> Result:
            if not is_ephemeral and name.startswith(EPHEMERAL):
                raise ValueError(f"path: names that begin with {EPHEMERAL} are the server's own")
            found, tensors, adapter = await self.service.run_on_engine(take_snapshot)
            if (earlier := self._writes.get(found.path)) is not None:
                await asyncio.wait([earlier])
            # Beside the compute thread, which goes on. Nobody else reads these tensors.
            write = asyncio.ensure_future(
                asyncio.to_thread(
                    self.store.write_checkpoint,
                    found,
                    lambda place: self._write_adapter(run, tensors, place),
                    is_ephemeral,
                )
            )
            if is_ephemeral:  # it samples from memory meanwhile
                self._writes[found.path] = write
                write.add_done_callback(partial(self._note_write, found.path))
            else:
                await write
            if body.kind == "inflight":
                await self.snapshots.replace_adapter(found.path, adapter)
            else:
                self.snapshots.keep_adapter(found.path, adapter)
            if body.sampling_session_seq_id is None:
                return Result.from_json({"path": found.path, "type": "save_weights_for_sampler"})
            sampler_id = self._add_sampler(session_id, body.sampling_session_seq_id, found)
            return Result.from_json(
                {"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"}
            )

        return self._call_in_order(run, body.seq_id, save_snapshot)

    def _note_write(self, path: str, write: "asyncio.Task[None]") -> None:
        if self._writes.get(path) is write:
            del self._writes[path]
        if not write.cancelled() and (error := write.exception()) is not None:
            log.warning("%s could not be written, and samples from memory only: %s", path, error)

    def _describe(
        self,
        run: TrainingRun,
        kind: str,
        name: str,
        ttl_seconds: int | None,
        user_metadata: dict[str, str] | None,
    ) -> Checkpoint:
        lora = _session_of(run).lora
        assert lora is not None
        keys = {"rank": lora.rank, "alpha": lora.alpha, "targets": lora.targets}
        return Checkpoint(
            run.run_id,
            kind,
            name,
            self.names[0],
            keys,
            wall_clock(),
            expiry(ttl_seconds),
            user_metadata,
        )

    def _write_adapter(self, run: TrainingRun, tensors: dict[str, Tensor], place: Path) -> None:
        session = _session_of(run)
        assert session.lora is not None
        write_adapter(tensors, session.lora, session.model.spec, session.name, place)

    # --------------------------------------------------------------------------------- sampling

    def open_sampler(self, body: CreateSamplingSession) -> str:
        """Return the id of a sampling session. Raises KeyError for an unknown checkpoint."""
        if body.model_path is None:
            self.check_base(body.base_model)
            return self._add_sampler(body.session_id, body.sampling_session_seq_id)
        checkpoint, _ = self.store.find(body.model_path)
        self.check_base(checkpoint.base_model)
        return self._add_sampler(body.session_id, body.sampling_session_seq_id, checkpoint)

    def _add_sampler(self, session_id: str, number: int, of: Checkpoint | None = None) -> str:
        session = self.find_session(session_id)
        sampler_id = f"{session_id}:sample:{number}"
        if sampler_id not in self.samplers:
            session.samplers.append(sampler_id)
            target = SamplerTarget()
            if of is not None:
                target = SamplerTarget(of.path, self.store.locate(of))
            self.samplers[sampler_id] = target
        return sampler_id

    def sample(self, body: Sample) -> tuple[str, list[str]]:
        """Begin to sample; return the request id and an id for each sample."""
        target = self.samplers.get(body.sampling_session_id or "")
        if target is None:
            raise UnknownId(
                f"there is no sampling session {body.sampling_session_id}: its session ended, or the "
                "server restarted"
            )
        if body.seq_id is not None and (known := target.requests.get(body.seq_id)) is not None:
            return known
        request_id = self._promise(lambda: self._sample_result(target, body))
        ids = [f"{request_id}-{k}" for k in range(body.num_samples)]
        if body.seq_id is not None:
            target.requests[body.seq_id] = (request_id, ids)
        return request_id, ids

    async def _sample_result(self, target: SamplerTarget, body: Sample) -> Result:
        body.check_supported()
        prompt = body.prompt_ids()

        write = self._writes.get(target.path or "")
        if write is not None and not self.snapshots.has_adapter(target.path):
            await asyncio.wait([write])

        def load() -> Adapter:
            assert target.directory is not None
            return read_adapter(target.directory)

        async with self.snapshots.use_snapshot(target.path, load) as adapter:
            return await self._sample_with(adapter, prompt, body)

    async def _sample_with(self, adapter: str | None, prompt: list[int], body: Sample) -> Result:
        asked = body.sampling_params
        sampling = Sampling(
            temperature=asked.temperature,
            max_tokens=asked.max_tokens or max(1, self.max_context - len(prompt)),
            seed=secrets.randbits(31) if asked.seed is None else asked.seed,
            top_p=asked.top_p,
            top_k=max(0, asked.top_k),
            # Else they are at temperature 1 anyway, and cost less.
            raw_logprobs=asked.temperature not in (0.0, 1.0),
            top_logprobs=body.topk_sample_logprobs,
        )
        stop_ids, texts = asked.split_stops(self.base.loaded.tokenizer.stop_ids)
        requests = [
            GenerateRequest(
                prompt,
                replace(sampling, seed=sampling.seed + k),
                frozenset(stop_ids),
                ends=self._stop_at(texts) if texts else None,
                adapter=adapter,
            )
            for k in range(body.num_samples)
        ]
        completions: list[Completion] = await asyncio.gather(*map(self.service.generate, requests))
        scores: list[float | None] | None = None
        likeliest = None
        if body.prompt_logprobs or body.topk_prompt_logprobs:
            found, likeliest = await self.service.run_on_engine(
                lambda: self._score_prompt(adapter, prompt, body.topk_prompt_logprobs)
            )
            last = (
                len(found) if body.prompt_logprobs_last_n is None else body.prompt_logprobs_last_n
            )
            hidden = len(found) - min(last, len(found))
            scores = [None] * (1 + hidden) + list(found[hidden:])
        return Result(encode_samples(completions, body.topk_sample_logprobs, scores, likeliest))

    def _score_prompt(
        self, adapter: str | None, prompt: list[int], top: int
    ) -> tuple[list[float], list[list[tuple[int, float]]] | None]:
        """Return logprobs of the prompt's tokens after the first, and the likeliest at each."""
        if len(prompt) < 2:
            return [], None
        model = self.engine.model
        with self.engine.adapters.used_by_all(adapter, len(prompt) - 1):
            if not top:
                return score_sequence(model, prompt), None
            own, others = find_likeliest(model, prompt, top)
            return own, [[], *others]

    def _stop_at(self, texts: list[str]) -> Callable[[list[int]], int | None]:
        """Return a function that ends a completion at the token that completes one of the texts."""
        longest = max(map(len, texts))
        decode = self.base.loaded.tokenizer.decode
        seen = 0

        def find_end(ids: list[int]) -> int | None:
            nonlocal seen
            for count in range(seen + 1, len(ids) + 1):
                # Each token has at least one byte; a text of n characters has at most 4 n.
                tail = decode(ids[max(0, count - 4 * longest - 4) : count], False)
                if any(text in tail for text in texts):
                    return count
            seen = len(ids)
            return None

        return find_end

    # --------------------------------------------------------------------------------- plumbing

    async def _compute_json(self, work: Callable[[], dict[str, Any]]) -> Result:
        return Result.from_json(await self.service.run_on_engine(work))

    def _promise(self, work: Callable[[], Any]) -> str:
        request_id = self.promises.open_promise()
        self.promises.keep_promise(request_id, work())
        return request_id

    def _call_in_order(self, run: TrainingRun, seq_id: int | None, work: Callable[[], Any]) -> str:
        """Run a call after those of lower numbers; a repeated one is computed once."""
        if seq_id is None:
            return self._promise(work)
        if (known := run.order.find_request(seq_id)) is not None:
            return known
        request_id = self.promises.open_promise()
        run.order.add_call(
            seq_id,
            request_id,
            start=lambda: self.promises.keep_promise(request_id, work()),
            fail=lambda message: self.promises.resolve(
                request_id, Result.from_error(message, "server")
            ),
        )
        return request_id


def _session_of(run: TrainingRun) -> TrainingSession:
    if run.session is None:
        raise ValueError(f"model {run.run_id} could not be created")
    return run.session


def _state_of(checkpoint: Checkpoint, place: Path) -> Path:
    """Return where a checkpoint's state is. Raises ValueError if it has none."""
    if checkpoint.kind != "weights":
        raise ValueError(
            f"{checkpoint.path} holds weights for sampling; a state to continue from is saved by save_state"
        )
    return place / STATE_FOLDER
