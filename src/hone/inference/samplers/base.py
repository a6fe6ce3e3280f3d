"""The door to whatever samples: token ids in, tokens and their logprobs out, new weights from time to time.

    routes ── GenerateRequest ──► Sampler.generate | stream ──► Completion, whole or in pieces
    control ── update, pause, resume, score, state ──►

    EmbeddedSampler    Hone's engine, in this process (embedded.py)
    ApartSampler       the same in a process of its own (engine_process.py)
    VllmSampler        a vLLM that this process started (vllm.py)

What a sampler can do beyond generating, scoring and taking weights it declares in `can`; a request that needs more is
refused in words that say so. Routes ask for capabilities, never for names.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from hone.records import Completion, GenerateRequest
from hone.transport.delivery import Message

Capability = Literal[
    "checksum",  # it tells a checksum of the weights that it computes with; without, the canary is the only proof
    "adapters",  # LoRA adapters beside the model
    "progress",  # it tells what is written so far of requests with a name
    "routing",  # it tells which experts of a mixture its tokens went through
    "raw_logprobs",  # logprobs at temperature 1, and those of the model where draws are filtered or penalised
    "forms",  # answers of a given form: a JSON schema, a regular expression, a choice, a grammar
]
ENGINE_CAN: frozenset[Capability] = frozenset(
    ("checksum", "adapters", "progress", "routing", "raw_logprobs", "forms")
)
Pause = Literal["keep", "wait", "abort"]
Alternatives = list[tuple[int, float]]
WORDS: dict[Capability, str] = {
    "adapters": "LoRA adapters",
    "routing": "return_routing",
    "raw_logprobs": "raw_logprobs",
    "forms": "answers of a given form (response_format, structured_outputs, tool_choice)",
}


class Sampler(ABC):
    """All of it is called on one event loop; what computes is a sampler's own affair."""

    can: ClassVar[frozenset[Capability]] = frozenset()

    @property
    @abstractmethod
    def max_context(self) -> int:
        """Most tokens of a prompt and its completion together."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    @abstractmethod
    def is_paused(self) -> bool: ...

    # ------------------------------------------------------------------------------------------ tokens

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Completion:
        """The completion of a request. Cancelling ends it.

        Raises ContextFull for a prompt that leaves no room, ValueError for what is refused.
        """

    async def stream(
        self, requests: Sequence[GenerateRequest]
    ) -> AsyncGenerator[tuple[int, Completion], None]:
        """Pieces of the completions by their number; the last of each has a finish_reason. Raises as `generate`.

        Closing the iterator ends the requests. This one has no pieces: it hands on each completion when it is there.
        """
        tasks = {asyncio.ensure_future(self.generate(one)): i for i, one in enumerate(requests)}
        try:
            while tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield tasks.pop(task), task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @abstractmethod
    async def score(self, sequences: list[list[int]], temperature: float) -> list[list[float]]:
        """Logprobs of every token after the first. Raises ValueError for what the model cannot read."""

    @abstractmethod
    async def find_likeliest(
        self, ids: list[int], number: int, adapter: str | None = None
    ) -> tuple[list[float], list[Alternatives]]:
        """Return the logprobs of one sequence at temperature 1, and at each place the likeliest tokens with theirs.

        `adapter`: the name of a LoRA adapter that is loaded. Raises ValueError like `score`.
        """

    # ------------------------------------------------------------------------------------------ weights

    @abstractmethod
    async def update_weights(self, place: Path, version: int, message: Message) -> dict[str, Any]:
        """Takes the weights of a version, as the message of their sender says; what runs goes on with them. Gives the
        state after that.

        `place` has at least their config.json. Raises ValueError where they cannot be had, and Superseded; it then
        serves what it served.
        """

    @abstractmethod
    async def describe_state(self, each: bool = False) -> dict[str, Any]:
        """version, dtype, device, completions so far; checksum (None without that capability), and with `each` the
        fingerprint of every weight."""

    @abstractmethod
    async def pause(self, mode: Pause) -> None:
        """Stops computing; requests are still taken. keep: what runs goes on after `resume`; wait: it is finished
        first; abort: what runs and waits ends now, with what it has."""

    @abstractmethod
    async def resume(self) -> None: ...

    # ------------------------------------------------------------------------------------------ what it may have

    @property
    def adapters(self) -> list[str]:
        return []

    async def load_adapter(self, name: str, directory: Path) -> None:
        self.require_capability("adapters")

    async def unload_adapter(self, name: str) -> None:
        self.require_capability("adapters")

    async def report_progress(self, known: dict[str, int]) -> dict[str, Any]:
        """running, waiting, of these without_room; `partials`: of requests by their name what came after so many known
        tokens."""
        return {"running": 0, "waiting": 0, "without_room": 0, "partials": {}}

    @abstractmethod
    async def read_metrics(self) -> dict[str, float]:
        """For /metrics, by the names in metrics.py."""

    def require_capability(self, capability: Capability) -> None:
        """Raises ValueError unless it can do that."""
        if capability not in self.can:
            raise ValueError(
                f"{WORDS.get(capability, capability)}: this server's backend has no such thing"
            )
