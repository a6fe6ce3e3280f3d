"""Groups: the rollouts of one example, their advantages and training sequences. No I/O.

    rollouts ─ handle truncated and failed ones as configured ─► rewards ─► advantages ─ filters ─► samples

If a group yields no samples, the reason is recorded.
"""

import base64
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hone.config.orchestrator_config import BufferConfig, GroupConfig
from hone.orchestrator.advantage import Advantage, Scored, has_signal, penalize_overlong
from hone.orchestrator.schedule import Task
from hone.records import Completion, Rollout, Sample

DROPPED = ("no_signal", "too_easy", "too_hard", "truncated")  # why tokens have no loss


@dataclass
class Group:
    """The rollouts of one example.

    `failures` counts failed attempts by cause; `dropped` counts tokens without loss by cause.
    """

    task: Task
    rollouts: list[Rollout]
    failures: Counter[str] = field(default_factory=Counter)
    version: int = 0  # of its oldest token
    advantages: list[float] = field(default_factory=list)
    learnt: list[bool] = field(default_factory=list)  # rollouts that are trained on
    samples: list[Sample] = field(default_factory=list)
    unused: str = ""  # why nothing is trained on: no_signal, too_easy, too_hard, failed
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def reward_list(self) -> list[float]:
        return [r.reward for r in self.rollouts if not r.error]

    def oldest_version(self, default: int) -> int:
        """Return the lowest policy version that sampled a token of the group.

        Returns `default` if the group has no tokens.
        """
        found = (t.completion.versions for r in self.rollouts for t in r.turns)
        return min(map(min, filter(None, found)), default=default)


def judge_group(
    group: Group, advantage: Advantage, settings: GroupConfig, buffer: BufferConfig
) -> None:
    """Compute a group's advantages and samples, or record in `unused` why there are none.

    Raises ValueError if the advantage function returns invalid values.
    """
    rollouts = group.rollouts
    for rollout in rollouts:
        if rollout.is_truncated and not rollout.error:
            _handle_truncated(group, rollout, settings)
    group.advantages = [0.0] * len(rollouts)
    group.learnt = [False] * len(rollouts)
    if not group.reward_list:
        group.unused = "failed"
        return
    counts_failed = settings.failed == "zero"
    counted = [i for i, r in enumerate(rollouts) if not r.error or (counts_failed and not r.turns)]
    for agent in dict.fromkeys(rollout.agent for rollout in rollouts if not rollout.error):
        own = [i for i in counted if rollouts[i].agent == agent or rollouts[i].error]
        # The baseline is of one role: the seats of a game have different chances.
        advantages = _compute_advantages([rollouts[i] for i in own], advantage, settings)
        for i, value in zip(own, advantages.tolist(), strict=True):
            group.advantages[i] = value
    signal = has_signal(np.array(group.advantages))
    group.unused = _find_unused_reason(group, settings, buffer, signal)
    _add_samples(group, settings)


def _add_samples(group: Group, settings: GroupConfig) -> None:
    """Add the samples of the rollouts that are trained on to the group.

    The tokens of the other rollouts are counted in `group.dropped`.
    """
    for i, rollout in enumerate(group.rollouts):
        is_masked = settings.truncated == "mask" and rollout.is_truncated
        group.learnt[i] = not (rollout.error or group.unused or is_masked)
        if group.learnt[i]:
            temperature = settings.sampling.temperature
            own = samples_of(rollout, group.advantages[i], temperature, group.task.env)
            for sample in own:
                sample.group = group.task.number
                sample.member = i
            group.samples += own
        elif not rollout.error:
            group.dropped[group.unused or "truncated"] += tokens_of(rollout)


def _handle_truncated(group: Group, rollout: Rollout, settings: GroupConfig) -> None:
    if settings.truncated == "drop":
        rollout.error = "cut off at max_tokens"
        group.dropped["truncated"] += tokens_of(rollout)
    elif settings.truncated == "zero":
        rollout.reward = 0.0


def _compute_advantages(
    rollouts: list[Rollout], advantage: Advantage, settings: GroupConfig
) -> NDArray[np.float64]:
    """Return one advantage per rollout.

    Raises ValueError unless the function returns a finite number for each rollout.
    """
    rewards = np.array([0.0 if rollout.error else rollout.reward for rollout in rollouts])
    lengths = np.array([tokens_of(rollout) for rollout in rollouts], dtype=np.float64)
    longest = settings.sampling.max_tokens
    share = settings.overlong_share
    rewards = penalize_overlong(rewards, lengths, longest, share)
    advantages = np.asarray(advantage(Scored(rewards, lengths, rollouts)), dtype=np.float64)
    if advantages.shape != rewards.shape or not np.isfinite(advantages).all():
        raise ValueError(
            f"orchestrator.advantage {settings.advantage}: gave {advantages.tolist()} for {len(rewards)} rollouts; it "
            "has to give a finite number for each"
        )
    return advantages


def _join_routing(
    known: NDArray[np.int16] | None, completion: Completion, count: int
) -> NDArray[np.int16]:
    """Append the completion's experts of new tokens to `known`, the experts of earlier tokens.

    `count` is the number of tokens that the completion's routing covers, prompt included. Returns
    int16, one row for each of these tokens.
    """
    newest = np.frombuffer(base64.b64decode(completion.routing), dtype=np.int16).reshape(count, -1)
    return newest if known is None else np.concatenate([known, newest[len(known) :]])


def _find_unused_reason(
    group: Group, settings: GroupConfig, buffer: BufferConfig, signal: bool
) -> str:
    if buffer.online_difficulty_filtering:
        mean = float(np.mean(group.reward_list))
        if mean >= (1.0 if buffer.easy_threshold is None else buffer.easy_threshold):
            return "too_easy"
        if mean <= (0.0 if buffer.hard_threshold is None else buffer.hard_threshold):
            return "too_hard"
    return "no_signal" if settings.drop_zero_signal and not signal else ""


def tokens_of(rollout: Rollout) -> int:
    """Return the number of generated tokens."""
    return sum(len(turn.completion.ids) for turn in rollout.turns)


def samples_of(rollout: Rollout, advantage: float, temperature: float, env: str) -> list[Sample]:
    """Convert a rollout to training sequences, from token ids as sampled and not from text.

    If a turn's prompt begins with all tokens of the sequence so far, the turn is appended to this
    sequence; the prompt's new tokens have no loss. Otherwise, as with a template that drops earlier
    thinking, the turn begins a new sequence.
    """
    sequences: list[_Sequence] = []
    for turn in rollout.turns:
        prompt = turn.prompt_ids
        completion = turn.completion
        if not sequences or prompt[: len(sequences[-1].ids)] != sequences[-1].ids:
            sequences.append(_Sequence())
        own = sequences[-1]
        between = prompt[len(own.ids) :]
        if completion.routing:
            own.routing = _join_routing(
                own.routing, completion, len(prompt) + len(completion.ids) - 1
            )
        own.ids += between + completion.ids
        own.mask += [False] * len(between) + [True] * len(completion.ids)
        own.logprobs += [0.0] * len(between) + completion.logprobs
    return [
        Sample(
            np.fromiter(s.ids, np.int64, len(s.ids)),
            np.fromiter(s.mask, np.bool_, len(s.ids)),
            np.fromiter(s.logprobs, np.float64, len(s.ids)),
            advantage,
            temperature,
            env=env,
            routing=s.routing,
        )
        for s in sequences
        if any(s.mask)
    ]


@dataclass
class _Sequence:
    """A sample under construction."""

    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routing: NDArray[np.int16] | None = None
