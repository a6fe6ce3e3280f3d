"""State of a request in the engine."""

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hone.records import MAX_MASK_IDS, Completion, GenerateRequest


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
    # Sequences with the same prompt, which this one computes for all.
    siblings: list["Sequence"] = field(default_factory=list)
    is_of_one_policy: bool = (
        True  # all of its keys are of the current weights, so others may reuse them
    )
    first_step: int = 0  # engine steps before its first decode step
    versions: list[tuple[int, int]] = field(default_factory=list)
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)
    mask: list[list[int]] = field(default_factory=list)  # ids that could be drawn
    mask_ids: int = 0  # number of ids in it, also of those that were too many to keep
    # Generated tokens that the host has read.
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of those tokens
    remembered: int = 0  # its first pages that are available to others
    routing: NDArray[np.int16] | None = None  # experts of its tokens, once it has ended

    @property
    def prompt_ids(self) -> list[int]:
        return self.request.prompt_ids

    @property
    def is_watched(self) -> bool:
        """Return True if the host must examine every token, for a mask or a stop condition."""
        return self.request.ends is not None or self.request.allows is not None

    @property
    def is_noted(self) -> bool:
        """Return True if the host reads more than the drawn token of each step."""
        return self.request.sampling.top_logprobs > 0 or self.request.sampling.has_mask

    def add_mask(self, ids: list[int]) -> None:
        """Record the ids that could be drawn in a step; drop all of them if they are too many."""
        self.mask_ids += len(ids)
        self.mask.append(ids)
        if self.mask_ids > MAX_MASK_IDS:
            self.mask.clear()

    @property
    def prefix_key(self) -> tuple[int, tuple[int, ...]]:
        """Return what requests with the same prompt have in common: adapter and prompt ids."""
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
        has_mask = self.request.sampling.has_mask and self.mask_ids <= MAX_MASK_IDS
        return Completion(
            self.ids[:count],
            self.logprobs[:count],
            versions,
            reason,
            alternatives,
            routing,
            self.mask[:count] if has_mask else None,
        )
