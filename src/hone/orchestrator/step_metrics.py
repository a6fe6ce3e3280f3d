"""Metrics of a step's groups. Pure functions."""

from collections import Counter

import numpy as np

from hone.monitors.value_summaries import summarize_values
from hone.orchestrator.group import DROPPED, Group, tokens_of

PARTS = ("model", "environment", "scoring")  # that the seconds of a rollout go to
FAILURES = ("reward", "raised", "refused", "timeout", "not_finite", "empty")


def metrics_of(
    taken: list[Group],
    replaced: list[Group],
    again: list[Group],
    step: int,
    environments: list[str],
) -> dict[str, float]:
    """Return the metrics of a step.

    `taken`: its groups; `replaced`: those sampled for it and not used; `again`: reused from earlier
    steps.
    """
    groups = [*taken, *replaced]
    rollouts = [r for g in groups for r in g.rollouts if not r.error]
    used = [g for g in groups if not g.unused] + again
    dropped, failures = (
        sum(counts, Counter[str]()) for counts in zip(*((g.dropped, g.failures) for g in groups))
    )
    prompt = [len(r.turns[0].prompt_ids) for r in rollouts]
    completion = [tokens_of(r) for r in rollouts]
    # With earlier turns
    whole = [len(r.turns[-1].prompt_ids) + len(r.turns[-1].completion.ids) for r in rollouts]
    lags = [step - 1 - g.version for g in [*groups, *again]]
    values: dict[str, float] = {
        "progress/step": step,
        "progress/samples": len(rollouts),
        "progress/tokens": sum(whole),
        "progress/failed": sum(len(g.rollouts) for g in groups) - len(rollouts),
        **{f"failures/{cause}": failures[cause] for cause in FAILURES},
        **summarize_values("reward", np.array([r.reward for r in rollouts])),
        "batch/solve_none": float(
            np.mean([max(g.reward_list, default=0.0) <= 0.0 for g in groups])
        ),
        "batch/solve_all": float(np.mean([min(g.reward_list, default=0.0) >= 1.0 for g in groups])),
        "batch/without_signal": float(np.mean([bool(g.unused) for g in groups])),
        "batch/effective_batch_size": sum(len(g.samples) for g in used),
        "batch/groups_replaced": len(replaced),
        "batch/groups_replayed": len(again),
        "batch/off_policy_level/mean": float(np.mean(lags)),
        "batch/off_policy_level/max": max(lags),
        "tokens/trained": sum(s.target_count for g in used for s in g.samples),
        **{f"tokens/dropped/{cause}": dropped[cause] for cause in DROPPED},
        **summarize_values("prompt_len", prompt),
        **summarize_values("completion_len", completion),
        "completion_len/total": sum(completion),
        **summarize_values("seq_len", whole),
        "is_truncated/mean": float(np.mean([r.is_truncated for r in rollouts]))
        if rollouts
        else 0.0,
        **{
            f"time/rollout/{part}": _mean_or_zero([r.timings.get(part, 0.0) for r in rollouts])
            for part in PARTS
        },
    }
    for env in environments:
        of_env = [r for g in groups if g.task.env == env for r in g.rollouts if not r.error]
        if len(environments) > 1:
            values[f"batch/{env}/groups"] = sum(g.task.env == env for g in groups)
        if of_env:
            values[f"reward/{env}"] = float(np.mean([r.reward for r in of_env]))
        for name, count in Counter(name for r in of_env for name in r.metrics).items():
            values[f"metrics/{env}/{name}"] = sum(r.metrics.get(name, 0.0) for r in of_env) / count
    return values


def _mean_or_zero(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0
