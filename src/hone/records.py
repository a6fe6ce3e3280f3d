"""Records that packages exchange. Made once and passed on, never copied field by field.

Example ─ environment ─► Rollout (of Turns) ─ orchestrator ─► Sample ─► Batch ─► trainer
                              ▲
                         Completion ◄─ engine ◄─ GenerateRequest
"""

import copy
import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Message = dict[str, Any]  # an OpenAI chat message: role, content, …
# An OpenAI tool: {"type": "function", "function": {"name", "description", "parameters"}}
Tool = dict[str, Any]


class Refused(RuntimeError):
    """A server refused a request and would refuse it again; `status` is the HTTP status, a 4xx."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class ContextFull(ValueError):
    """Raised if a conversation fills the context length, so that no answer fits."""


@dataclass(frozen=True)
class Example:
    """One task of an environment. `id` is stable: the same data and arguments give the same ids.

    `answer` is as in the data: text, a number, a list, an object; "" if there is none.
    """

    id: int
    prompt: list[Message]
    answer: Any = ""
    info: dict[str, Any] = field(default_factory=dict)
    task: str = ""  # name of its environment in a group

    def copy(self) -> "Example":
        """Return a copy whose data a rollout may change."""
        return Example(
            self.id, copy_data(self.prompt), copy_data(self.answer), copy_data(self.info), self.task
        )


def copy_data(value: Any) -> Any:
    """Return a deep copy of JSON-like data, five times faster than copy.deepcopy."""
    kind = type(value)
    if kind is dict:
        return {key: copy_data(one) for key, one in value.items()}
    if kind is list:
        return [copy_data(one) for one in value]
    return value if kind in IMMUTABLE else copy.deepcopy(value)


IMMUTABLE = frozenset((str, int, float, bool, type(None), bytes))


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Temperature 0 is greedy.

    Tokens are drawn with filters (top_p, top_k, min_p), penalties and biases; logprobs are computed
    without them.
    """

    temperature: float = 1.0
    max_tokens: int = 128
    seed: int = 0  # draws depend on this seed alone
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # divides positive logits of tokens in prompt or completion
    presence_penalty: float = 0.0  # subtracted from logits of tokens in the completion
    frequency_penalty: float = 0.0  # … per occurrence
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0  # stop tokens are not drawn earlier
    ignore_eos: bool = False  # stop tokens do not stop
    raw_logprobs: bool = False  # logprobs at temperature 1
    top_logprobs: int = 0  # number of likeliest tokens per position
    returns_mask: bool = False  # report which tokens passed top_p, top_k and min_p

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Sampling":
        """Build a Sampling from the JSON values of `dataclasses.asdict`."""
        return cls(**{**found, "logit_bias": tuple(map(tuple, found["logit_bias"]))})

    @functools.cached_property
    def is_cut(self) -> bool:
        """Return True if unlikely tokens cannot be drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @functools.cached_property
    def is_filtered(self) -> bool:
        """Return True if draws, or logprobs, differ from softmax(logits / T)."""
        return self.is_cut or self.raw_logprobs or self.min_tokens > 0 or self.is_penalised

    @functools.cached_property
    def has_mask(self) -> bool:
        """Return True if the tokens that could be drawn are reported for each position."""
        return self.returns_mask and self.is_cut

    @functools.cached_property
    def is_penalised(self) -> bool:
        penalties = (
            self.repetition_penalty != 1,
            self.presence_penalty != 0,
            self.frequency_penalty != 0,
        )
        return any(penalties) or bool(self.logit_bias)


@dataclass(frozen=True)
class Prompt:
    """A conversation that the assistant continues.

    Attributes:
        messages: OpenAI chat messages.
        tools: OpenAI tools that the assistant may call.
        before: token ids of the first messages, as the model processed them in earlier turns; None if there are none.
        covered: number of messages whose token ids are in `before`.
        template_arguments: arguments of the chat template, such as {"enable_thinking": False}.
    """

    messages: list[Message]
    tools: list[Tool] | None = None
    before: list[int] | None = None
    covered: int = 0
    template_arguments: dict[str, Any] | None = None


def other_seed(seed: int, number: int) -> int:
    """Return a seed that follows from `seed` and `number`, for a later turn or a continuation."""
    return int.from_bytes(
        hashlib.blake2b(f"{seed} {number}".encode(), digest_size=7).digest(), "little"
    )


@dataclass(frozen=True)
class GenerateRequest:
    """Request to the engine: a prompt with sampling parameters.

    Attributes:
        prompt_ids: token ids of the prompt.
        sampling: sampling parameters.
        stop_ids: tokens that end the completion.
        ends: called with the ids generated so far; returns None to continue, or the number of ids
            to keep, to end the completion.
        timeout: seconds until the completion ends with the tokens generated so far.
        adapter: name of a loaded LoRA adapter.
        name: name for progress reports.
        allows: called with the ids generated so far; returns a boolean mask over the vocabulary,
            True for tokens that may come next.
    """

    prompt_ids: list[int]
    sampling: Sampling
    stop_ids: frozenset[int]
    ends: Callable[[list[int]], int | None] | None = None
    timeout: float | None = None  # seconds until it ends with the tokens it has
    adapter: str | None = None  # name of a loaded LoRA adapter
    name: str = ""  # name for progress reports
    allows: Callable[[list[int]], Any] | None = None


MAX_MASK_IDS = 4_000_000  # of one completion: 16 MB


@dataclass
class Completion:
    """The engine's result of one request.

    Attributes:
        ids: generated token ids, a final stop token included.
        logprobs: log-softmax(logits / T) at `ids[i]`, fp32 (T = 1 if greedy or raw).
        versions: policy version that drew `ids[i]`.
        finish_reason: "stop" (a stop token or `ends`), "length", "timeout" or "abort".
        alternatives: the likeliest tokens at each position with logprobs, if requested.
        routing: for a mixture of experts, the experts chosen for each token of prompt and
            completion except the last token, in all blocks: an int16 array in base64, -1 where
            unknown.
        mask: the ids that could be drawn at each position, if requested; None also if they are more
            than MAX_MASK_IDS.
    """

    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    alternatives: list[list[tuple[int, float]]] | None = None
    routing: str = ""
    mask: list[list[int]] | None = None

    def token_range(self, start: int, end: int | None = None) -> "Completion":
        """Return the completion reduced to tokens `start` to `end`."""
        some = slice(start, end)
        alternatives = None if self.alternatives is None else self.alternatives[some]
        ids = self.ids[some]
        logprobs = self.logprobs[some]
        versions = self.versions[some]
        mask = None if self.mask is None else self.mask[some]
        reason, routing = self.finish_reason, self.routing
        return Completion(ids, logprobs, versions, reason, alternatives, routing, mask)


@dataclass
class Turn:
    """One exchange: prompt ids, completion, text and tool calls.

    A call is as in OpenAI's API: {"id", "type": "function", "function": {"name", "arguments": JSON
    string}}.
    """

    prompt_ids: list[int]
    completion: Completion
    text: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Turn":
        """Build a Turn from the JSON values of `dataclasses.asdict`."""
        return cls(**{**found, "completion": Completion(**found["completion"])})

    @property
    def assistant_message(self) -> Message:
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        return {"role": "assistant", "content": self.text, **calls}


@dataclass
class Rollout:
    """One scored attempt at an example. `error` says why it has no usable reward."""

    example: Example
    turns: list[Turn]
    messages: list[Message]  # messages after the prompt, of environment and model
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None
    stop: str = ""  # condition that ended it, such as max_turns_reached
    # Seconds of the model, the environment and scoring.
    timings: dict[str, float] = field(default_factory=dict)
    # State kept for reward functions.
    state: dict[str, Any] = field(default_factory=dict, repr=False)
    agent: str = ""  # role of the agent that it is of, in an environment with several
    # Of an episode with several trained agents: the rollout of each, with its own reward.
    parts: list["Rollout"] = field(default_factory=list)

    @classmethod
    def join_agents(cls, example: Example, parts: list["Rollout"]) -> "Rollout":
        """Return the rollout of an episode of several agents, which are trained on one by one.

        Its reward is the mean of theirs, and its metrics are `agent/metric`, the mean over the
        agents of one role.
        """
        messages = [{**message, "agent": part.agent} for part in parts for message in part.messages]
        joined = cls(example, [turn for part in parts for turn in part.turns], messages)
        joined.reward = sum(part.reward for part in parts) / len(parts)
        found: dict[str, list[float]] = {}
        for part in parts:
            for name, value in part.metrics.items():
                found.setdefault(f"{part.agent}/{name}", []).append(value)
        joined.metrics = {name: sum(values) / len(values) for name, values in found.items()}
        joined.stop = ", ".join(dict.fromkeys(part.stop for part in parts if part.stop))
        joined.parts = parts
        return joined

    def split_agents(self) -> list["Rollout"]:
        """Return the rollouts to train on: those of its agents that said something, or itself."""
        return [part for part in self.parts if part.turns] or [self]

    def to_json(self) -> dict[str, Any]:
        """Return the rollout as JSON values, without state that JSON cannot hold."""
        state = {key: value for key, value in self.state.items() if _is_json(value)}
        parts = {"example": asdict(self.example), "turns": [asdict(turn) for turn in self.turns]}
        parts["parts"] = [part.to_json() for part in self.parts]
        return {**vars(self), **parts, "state": state}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Rollout":
        """Build a Rollout from the values of `to_json`; `example` may be an Example already."""
        example = found["example"]
        example = example if isinstance(example, Example) else Example(**example)
        turns = [Turn.from_json(turn) for turn in found["turns"]]
        parts = [cls.from_json(part) for part in found.get("parts", [])]
        return cls(**{**found, "example": example, "turns": turns, "parts": parts})

    @property
    def is_truncated(self) -> bool:
        return bool(self.turns) and self.turns[-1].completion.finish_reason == "length"


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


@dataclass(eq=False)
class Sample:
    """A training sequence of T tokens. Lists are converted to arrays.

    Attributes:
        ids: token ids, int64, T.
        mask: True for tokens that the policy generated, bool, T.
        logprobs: the sampler's logprobs, float64, T; 0.0 where `mask` is False.
        advantage: advantage of all tokens of the sequence.
        temperature: temperature at which the tokens were sampled.
        teacher_logprobs: a teacher's logprobs for distillation, float64, T.
        env: name of the environment, which may select a loss.
        routing: the experts that the sampler chose, int16, (T - 1) x R, -1 where unknown; R is the
            number of experts per token over all blocks.
        group: number of the sample's group.
        member: index of the sample's rollout in the group.
    """

    ids: "NDArray[np.int64]"
    mask: "NDArray[np.bool_]"
    logprobs: "NDArray[np.float64]"  # of the sampler, 0.0 where mask is False
    advantage: float
    temperature: float
    teacher_logprobs: "NDArray[np.float64] | None" = None  # a teacher's logprobs, for distillation
    env: str = ""  # environment's name, which may select a loss
    # Int16, (tokens - 1) x R: the sampler's experts in all blocks, -1 where unknown.
    routing: Any = None
    group: int = -1  # number of its group
    member: int = 0  # index of its rollout in the group

    def __post_init__(self) -> None:
        import numpy as np

        self.ids = np.asarray(self.ids, np.int64)
        self.mask = np.asarray(self.mask, np.bool_)
        self.logprobs = np.asarray(self.logprobs, np.float64)
        if self.teacher_logprobs is not None:
            self.teacher_logprobs = np.asarray(self.teacher_logprobs, np.float64)

    @property
    def target_count(self) -> int:
        """Return the number of tokens with a loss.

        These are the generated tokens, except a first token of the sequence, which nothing
        predicts.
        """
        return int(self.mask[1:].sum())


@dataclass
class Batch:
    """The samples of optimizer step `step` (from 1)."""

    step: int
    samples: list[Sample]
