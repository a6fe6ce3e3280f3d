"""The nouns: records that travel from room to room. Made once, handed on, never copied field by field.

Example ─ environment ─► Rollout (of Turns) ─ orchestrator ─► Sample ─► Batch ─► trainer
                              ▲
                         Completion ◄─ engine ◄─ GenerateRequest
"""

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]  # an OpenAI chat message: role, content, …


@dataclass(frozen=True)
class Example:
    """One task of an environment. `id` is stable: the same data and arguments give the same ids."""

    id: int
    prompt: list[Message]
    answer: str = ""
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampling:
    """How to draw tokens. Temperature 0 is greedy."""

    temperature: float = 1.0
    max_tokens: int = 128
    seed: int = 0  # the draws of a request depend on its seed and nothing else


@dataclass(frozen=True)
class GenerateRequest:
    prompt_ids: list[int]
    sampling: Sampling
    stop_ids: frozenset[int]


@dataclass
class Completion:
    """What the engine made of one request.

    `logprobs[i]` is log-softmax(logits / T) at `ids[i]`, fp32 (T = 1 when greedy); `versions[i]` is the policy
    version that drew it. `finish_reason`: "stop" (a stop token, kept as the last id), "length" or "abort".
    """

    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str


@dataclass
class Turn:
    """One exchange: the ids that went in, the completion that came out, and its text."""

    prompt_ids: list[int]
    completion: Completion
    text: str


@dataclass
class Rollout:
    """One attempt at an example, scored. `error` says why it has no reward to learn from."""

    example: Example
    turns: list[Turn]
    messages: list[Message]  # what the environment and the model said after the prompt
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None

    @property
    def is_truncated(self) -> bool:
        return bool(self.turns) and self.turns[-1].completion.finish_reason == "length"


@dataclass
class Sample:
    """A sequence to train on. Lists are of equal length; `mask` marks the tokens that the policy drew."""

    ids: list[int]
    mask: list[bool]
    logprobs: list[float]  # of the sampler, 0.0 where mask is False
    advantage: float
    temperature: float


@dataclass
class Batch:
    """The samples of optimiser step `step` (from 1)."""

    step: int
    samples: list[Sample]
