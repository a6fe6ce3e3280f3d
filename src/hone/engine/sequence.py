"""State of a request in the engine."""

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hone.records import Completion, GenerateRequest


@dataclass(eq=False)
class Sequence:
    """A request in the engine. `versions` holds (first token, policy version) pairs."""

    request: GenerateRequest
    on_finish: Callable[[Completion], None]
    max_tokens: int
    deadline: float | None = None  # time.monotonic
    adapter: int = 0  # its number
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    computed: int = 0  # prompt tokens whose keys are in the cache
    # The same prompt, computed with this one
    siblings: list["Sequence"] = field(default_factory=list)
    is_of_one_policy: bool = (
        True  # all of its keys are the present weights', so others may use them again
    )
    first_step: int = 0  # decode steps of the engine before its first
    versions: list[tuple[int, int]] = field(default_factory=list)
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)
    # Tokens of its completion, as far as the host has read them
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # theirs
    remembered: int = 0  # so many of its first pages were given to others for use, those of the completion included
    routing: NDArray[np.int16] | None = None  # experts of its tokens, once it has ended

    @property
    def prompt_ids(self) -> list[int]:
        return self.request.prompt_ids

    @property
    def is_watched(self) -> bool:
        """Return True if the host must examine every token, for a mask or a stop condition."""
        return self.request.ends is not None or self.request.allows is not None

    @property
    def prefix_key(self) -> tuple[int, tuple[int, ...]]:
        """Return the key of the prompt's cache entries: the adapter and the prompt."""
        return self.adapter, tuple(self.request.prompt_ids)

    @property
    def is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def build_completion(self, count: int, reason: str) -> Completion:
        """Build the completion of the first `count` tokens, which the host has read."""
        ends = [*(start for start, _ in self.versions[1:]), count]
        versions: list[int] = []
        for (_, version), end in zip(self.versions, ends, strict=False):
            versions += [version] * (min(end, count) - len(versions))
        alternatives = self.alternatives[:count] if self.request.sampling.top_logprobs else None
        routing = "" if self.routing is None else base64.b64encode(self.routing.tobytes()).decode()
        return Completion(
            self.ids[:count], self.logprobs[:count], versions, reason, alternatives, routing
        )
