"""Metrics of a step's groups. Pure functions."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from hone.monitors.value_summaries import summarize_values
from hone.orchestrator.group import DROPPED, Group, tokens_of
from hone.records import Rollout

PARTS = ("model", "environment", "scoring")  # parts of a rollout's seconds
FAILURES = ("reward", "raised", "refused", "timeout", "not_finite", "empty")


@dataclass
class StepGroups:
    """The groups of a step.

    Attributes:
        taken: groups that the step uses, with or without samples.
        replaced: groups without samples, in whose place other groups were sampled.
        again: groups that are reused from earlier steps.
    """

    step: int
    taken: list[Group]
    replaced: list[Group]
    again: list[Group]

    @property
    def sampled(self) -> list[Group]:
        return [*self.taken, *self.replaced]

    @property
    def scored_rollouts(self) -> list[Rollout]:
        return _scored(self.sampled)


def metrics_of(groups: StepGroups, environments: list[str]) -> dict[str, float]:
    """Return the metrics of a step."""
    values = {"progress/step": float(groups.step)} | _rollout_metrics(groups)
    values |= _batch_metrics(groups)
    for env in environments:
        own = [group for group in groups.sampled if group.task.env == env]
        if len(environments) > 1:
            values[f"batch/{env}/groups"] = len(own)
        values |= _environment_metrics(env, _scored(own))
    return values


def _scored(groups: list[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts if not rollout.error]


def _rollout_metrics(groups: StepGroups) -> dict[str, float]:
    rollouts = groups.scored_rollouts
    failures = Counter[str]()
    for group in groups.sampled:
        failures += group.failures
    prompt = [len(r.turns[0].prompt_ids) for r in rollouts]
    completion = [tokens_of(r) for r in rollouts]
    logprob = sum(sum(turn.completion.logprobs) for r in rollouts for turn in r.turns)
    whole = [len(r.turns[-1].prompt_ids) + len(r.turns[-1].completion.ids) for r in rollouts]
    return {
        "progress/samples": len(rollouts),
        "progress/tokens": sum(whole),
        "progress/failed": sum(len(g.rollouts) for g in groups.sampled) - len(rollouts),
        **{f"failures/{cause}": failures[cause] for cause in FAILURES},
        **summarize_values("reward", np.array([r.reward for r in rollouts])),
        "reward/length_correlation": _correlate([r.reward for r in rollouts], completion),
        "logprob/mean": logprob / max(1, sum(completion)),
        **summarize_values("prompt_len", prompt),
        **summarize_values("completion_len", completion),
        "completion_len/total": sum(completion),
        **summarize_values("seq_len", whole),
        "is_truncated/mean": _mean_or_zero([float(r.is_truncated) for r in rollouts]),
        **{
            f"time/rollout/{part}": _mean_or_zero([r.timings.get(part, 0.0) for r in rollouts])
            for part in PARTS
        },
    }


def _batch_metrics(groups: StepGroups) -> dict[str, float]:
    sampled = groups.sampled
    dropped = Counter[str]()
    for group in sampled:
        dropped += group.dropped
    used = [group for group in sampled if not group.unused] + groups.again
    lags = [groups.step - 1 - group.version for group in [*sampled, *groups.again]]
    return {
        "batch/solve_none": _mean_or_zero(
            [max(g.reward_list, default=0.0) <= 0.0 for g in sampled]
        ),
        "batch/solve_all": _mean_or_zero([min(g.reward_list, default=0.0) >= 1.0 for g in sampled]),
        "batch/without_signal": _mean_or_zero([bool(g.unused) for g in sampled]),
        "batch/effective_batch_size": sum(len(g.samples) for g in used),
        "batch/groups_replaced": len(groups.replaced),
        "batch/groups_replayed": len(groups.again),
        "batch/off_policy_level/mean": float(np.mean(lags)),
        "batch/off_policy_level/max": max(lags),
        "tokens/trained": sum(s.target_count for g in used for s in g.samples),
        **{f"tokens/dropped/{cause}": dropped[cause] for cause in DROPPED},
    }


def _environment_metrics(env: str, rollouts: list[Rollout]) -> dict[str, float]:
    values = {f"reward/{env}": _mean_or_zero([r.reward for r in rollouts])} if rollouts else {}
    for name in dict.fromkeys(name for rollout in rollouts for name in rollout.metrics):
        found = [rollout.metrics[name] for rollout in rollouts if name in rollout.metrics]
        values[f"metrics/{env}/{name}"] = sum(found) / len(found)
    return values


def _mean_or_zero(values: list[float] | list[bool]) -> float:
    return float(np.mean(values)) if values else 0.0


def _correlate(rewards: list[float], lengths: list[int]) -> float:
    """Return the correlation of rewards with lengths, -1 to 1; 0 if either does not vary."""
    if len(rewards) < 2 or np.std(rewards) < 1e-9 or np.std(lengths) < 1e-9:
        return 0.0
    return float(np.corrcoef(rewards, lengths)[0, 1])
