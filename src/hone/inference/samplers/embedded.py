"""Sampler over Hone's engine, which runs on this process's compute thread (`engine_service.py`)."""

import gc
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from hone.config.sections import Implementation
from hone.engine.engine import Engine
from hone.inference.engine_service import EngineService
from hone.inference.prometheus import of_engine
from hone.inference.samplers.base import ENGINE_CAN, Alternatives, Pause, Sampler
from hone.inference.samplers.partial_completions import Streams
from hone.kernels import cpu
from hone.models.families import parse_model_config
from hone.models.hf import empty_model
from hone.models.spec import ModelSpec, model_config_of, model_config_text
from hone.models.weight_proof import Proof, find_likeliest, score_sequences
from hone.records import Completion, GenerateRequest
from hone.transport.delivery import Message
from hone.transport.transports import Receivers


class EmbeddedSampler(Sampler):
    can = ENGINE_CAN

    def __init__(self, service: EngineService, implementation: Implementation = "auto") -> None:
        """Serve the engine of `service`.

        `implementation`: what computes a model of another architecture that is delivered later.
        """
        self.service = service
        self.implementation = implementation
        self.streams = Streams(self.generate, self.find_partials)
        # Of the served model.
        self.receivers = Receivers()
        self.proof = Proof(service.engine.model)
        self._described: tuple[str, ModelSpec] | None = None  # the last parsed description

    @property
    def engine(self) -> Engine:
        return self.service.engine

    @property
    def max_context(self) -> int:
        return self.engine.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.engine.model.spec.vocab_size

    @property
    def routing_shape(self) -> tuple[int, int]:
        return self.engine.model.spec.routing_shape

    @property
    def is_paused(self) -> bool:
        return self.service.is_paused

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self.service.generate(request)

    def stream(
        self, requests: Sequence[GenerateRequest]
    ) -> AsyncGenerator[tuple[int, Completion], None]:
        return self.streams.stream_requests(requests)

    async def score(self, sequences: list[list[int]], temperature: float) -> list[list[float]]:
        self._check_sequences(sequences)
        if len(sequences) == 1 and temperature == 1.0:
            return [await self.service.run_on_engine(lambda: self.proof.score(sequences[0]))]
        return await self.service.run_on_engine(
            lambda: score_sequences(self.engine.model, sequences, temperature)
        )

    async def find_likeliest(
        self, ids: list[int], number: int, adapter: str | None = None
    ) -> tuple[list[float], list[Alternatives]]:
        self._check_sequences([ids])

        def compute() -> tuple[list[float], list[Alternatives]]:
            engine = self.engine
            with engine.adapters.used_by_all(adapter, len(ids) - 1):
                return find_likeliest(engine.model, ids, number)

        return await self.service.run_on_engine(compute)

    def _check_sequences(self, sequences: list[list[int]]) -> None:
        spec = self.engine.model.spec
        if any(
            max(ids) >= spec.vocab_size or len(ids) > spec.max_position_embeddings
            for ids in sequences
        ):
            raise ValueError(
                f"ids: at most {spec.max_position_embeddings}, each below {spec.vocab_size}"
            )

    async def update_weights(self, place: Path, version: int, message: Message) -> dict[str, Any]:
        """Load weights; if their architecture differs, replace the model and abort all requests."""
        return await self.service.run_on_engine(lambda: self._load_update(place, version, message))

    def _load_update(self, place: Path, version: int, message: Message) -> dict[str, Any]:
        engine = self.engine
        spec = self._read_spec(place)
        model = engine.model
        weight = engine.model.embed.weight
        if spec != model.spec:
            model = empty_model(spec, weight.dtype, weight.device)
        proof = self.proof if model is engine.model else Proof(model)
        self.receivers.receive_version(
            message, version, place, proof.tensors, proof.follow_arrivals()
        )
        if model is engine.model:
            engine.set_version(version)
        else:
            engine.abort_all()
            self.service.engine = engine.with_model(model, version)
            self.proof = proof
            del engine
            gc.unfreeze()  # the old engine is in reference cycles, and gc.freeze has excluded it from collection
            gc.collect()
        return self._read_state(each=False)

    def _read_spec(self, place: Path) -> ModelSpec:
        """Return the spec of the delivered model; parse its config.json only if it changed."""
        text = model_config_text(place)
        if self._described is None or self._described[0] != text:
            shape = model_config_of(text, place)
            spec = parse_model_config(shape, str(place / "config.json"), self.implementation)
            self._described = text, spec
        return self._described[1]

    async def describe_state(self, each: bool = False) -> dict[str, Any]:
        return await self.service.run_on_engine(lambda: self._read_state(each))

    def _read_state(self, each: bool) -> dict[str, Any]:
        model = self.engine.model
        of_each = self.proof.weight_fingerprints()
        return {
            "version": self.engine.version,
            "implementation": model.spec.implementation,
            "checksum": self.proof.combine_checksum(of_each),
            "device": cpu.words(model.embed.weight.device.type),
            "dtype": str(model.embed.weight.dtype).removeprefix("torch."),
            "completions": self.engine.completions,
            **({"fingerprints": self.proof.by_name(of_each)} if each else {}),
        }

    async def pause(self, mode: Pause) -> None:
        await self.service.pause(mode)

    async def resume(self) -> None:
        await self.service.resume()

    @property
    def adapters(self) -> list[str]:
        return list(self.engine.adapters.loaded)

    async def load_adapter(self, name: str, directory: Path) -> None:
        await self.service.run_on_engine(lambda: self.engine.load_adapter(name, directory))

    async def unload_adapter(self, name: str) -> None:
        await self.service.run_on_engine(lambda: self.engine.unload_adapter(name))

    async def find_partials(self, known: dict[str, int]) -> dict[str, Completion]:
        """Return the new tokens of named requests, by name.

        `known` maps request names to the number of tokens that the caller has.
        """
        return await self.service.run_on_engine(lambda: self.engine.named_progress(known))

    async def report_progress(self, known: dict[str, int]) -> dict[str, Any]:
        def read_progress() -> dict[str, Any]:
            partials = {name: vars(one) for name, one in self.engine.named_progress(known).items()}
            counts = {
                "running": len(self.engine.running_sequences),
                "waiting": len(self.engine.admission.waiting),
            }
            return {
                **counts,
                "without_room": self.engine.admission.without_room,
                "partials": partials,
            }

        return await self.service.run_on_engine(read_progress)

    async def read_metrics(self) -> dict[str, float]:
        return await self.service.run_on_engine(lambda: of_engine(self.engine))
