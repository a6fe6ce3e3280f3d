"""Interface of samplers: token ids in, tokens and logprobs out, weight updates in between.

    routes ── GenerateRequest ──► Sampler.generate | stream ──► Completion, whole or in pieces
    control ── update_weights, pause, resume, score, describe_state ──►

    EmbeddedSampler    Hone's engine, in this process (embedded.py)
    ApartSampler       Hone's engine, in a process of its own (engine_process.py)
    VllmSampler        a vLLM that this process started (vllm.py)

A sampler lists its optional capabilities in `can`. A request that needs a missing capability is
refused with a message that names the capability. Routes check capabilities, never the class of the
sampler.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from hone.records import Completion, GenerateRequest
from hone.transport.delivery import Message

Capability = Literal[
    "checksum",  # reports a checksum of its weights; otherwise the canary is the only proof
    "adapters",  # LoRA adapters beside the model
    "progress",  # reports tokens generated so far, by request name
    "routing",  # reports the experts of a mixture per token
    "masks",  # reports the tokens that passed top_p, top_k and min_p
    "raw_logprobs",  # logprobs at temperature 1, and unfiltered ones where draws are filtered or penalized
    "forms",  # structured outputs: JSON schema, regular expression, choice, grammar
]
ENGINE_CAN: frozenset[Capability] = frozenset(
    ("checksum", "adapters", "progress", "routing", "masks", "raw_logprobs", "forms")
)
Pause = Literal["keep", "wait", "abort"]
Alternatives = list[tuple[int, float]]
WORDS: dict[Capability, str] = {
    "adapters": "LoRA adapters",
    "routing": "return_routing",
    "masks": "return_sampling_mask",
    "raw_logprobs": "raw_logprobs",
    "forms": "answers of a given form (response_format, structured_outputs, tool_choice)",
}


class Sampler(ABC):
    """Base class of samplers. All methods are called on one event loop."""

    can: ClassVar[frozenset[Capability]] = frozenset()

    @property
    @abstractmethod
    def max_context(self) -> int:
        """Return the maximum number of tokens of a prompt and its completion together."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Return the exclusive upper bound of token ids."""

    @property
    @abstractmethod
    def is_paused(self) -> bool: ...

    @property
    def routing_shape(self) -> tuple[int, int]:
        """Return the blocks with experts, and the experts per token in each, of `Completion.routing`."""
        return 0, 0

    # ------------------------------------------------------------------------------------------ tokens

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the completion of a request; cancelling the call aborts the request.

        Raises ContextFull for a prompt that fills the context length, ValueError for other
        refusals.
        """

    async def stream(
        self, requests: Sequence[GenerateRequest]
    ) -> AsyncGenerator[tuple[int, Completion], None]:
        """Yield (index of the request, new tokens of its completion) as they are generated.

        The last piece of each completion has a finish_reason. Closing the iterator aborts the
        requests. This default implementation yields whole completions. Raises the same errors as
        `generate`.
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
        """Return, for each sequence, the logprobs of all tokens after the first.

        Raises ValueError for invalid tokens.
        """

    @abstractmethod
    async def find_likeliest(
        self, ids: list[int], number: int, adapter: str | None = None
    ) -> tuple[list[float], list[Alternatives]]:
        """Return a sequence's logprobs at temperature 1, and the likeliest tokens at each position.

        Args:
            ids: token ids of the sequence.
            number: likeliest tokens to return per position.
            adapter: name of a loaded LoRA adapter.

        Raises ValueError like `score`.
        """

    # ------------------------------------------------------------------------------------------ weights

    @abstractmethod
    async def update_weights(self, place: Path, version: int, message: Message) -> dict[str, Any]:
        """Load a version of the weights; return the new state, as `describe_state` does.

        Running requests continue with the new weights.

        Args:
            place: directory with at least the model's config.json.
            version: number of the version.
            message: the sender's message, which says how the weights are sent.

        Raises ValueError if the weights are unavailable, and Superseded if the trainer has a later
        version; the old weights then stay.
        """

    @abstractmethod
    async def describe_state(self, each: bool = False) -> dict[str, Any]:
        """Return version, dtype, device, number of completions so far, and checksum.

        The checksum is None if the sampler lacks the capability "checksum". With `each`, add the
        fingerprint of every weight.
        """

    @abstractmethod
    async def pause(self, mode: Pause) -> None:
        """Stop computing; requests are still accepted.

        Args:
            mode: "keep": running requests continue after `resume`; "wait": they finish first;
                "abort": all requests end now with the tokens they have.
        """

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
        """Return the numbers of requests, and the new tokens of named requests.

        `known` maps request names to the number of tokens that the caller has. Keys of the result:
        `running` and `waiting`, numbers of requests; `without_room`, the number of waiting requests
        that lack a slot or KV cache pages; `partials`, the new tokens by request name.
        """
        return {"running": 0, "waiting": 0, "without_room": 0, "partials": {}}

    @abstractmethod
    async def read_metrics(self) -> dict[str, float]:
        """Return values for /metrics, by the names in prometheus.py."""

    def require_capability(self, capability: Capability) -> None:
        """Raise ValueError unless the sampler has the capability."""
        if capability not in self.can:
            raise ValueError(
                f"{WORDS.get(capability, capability)}: this server's backend has no such thing"
            )
