"""Advantages: from a group of R rollouts to R numbers, what each is worth to the policy. Pure.

The keyword-only parameters of a user's own function are its keys.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hone import plugins
from hone.config.orchestrator_config import ADVANTAGES as NAMES
from hone.config.orchestrator_config import GroupConfig
from hone.records import Rollout

Array = NDArray[np.float64]


@dataclass
class Scored:
    """The rollouts of a group that count, their rewards as configured, and how many tokens the model wrote in each."""

    rewards: Array
    lengths: Array
    rollouts: list[Rollout] = field(default_factory=list)


Advantage = Callable[[Scored], Array]


def mean(group: Scored) -> Array:
    """Reward minus the mean of its group, without division by the deviation (Dr. GRPO, Liu et al. 2025)."""
    centred: Array = group.rewards - group.rewards.mean()
    return centred


def std(group: Scored) -> Array:
    """The same over the group's deviation (GRPO, Shao et al. 2024); 0 where all rewards are equal."""
    deviation = group.rewards.std(ddof=1) if len(group.rewards) > 1 else 0.0
    return mean(group) / (deviation + 1e-4)


def rloo(group: Scored) -> Array:
    """Reward minus the mean of the others (leave one out, Ahmadian et al. 2024)."""
    R = len(group.rewards)
    return mean(group) * (R / (R - 1) if R > 1 else 1.0)


def length_corrected(group: Scored) -> Array:
    """Reward minus the mean over the group's tokens: the baseline of least variance where every token counts the same
    (OPO, Hao et al. 2025)."""
    advantage: Array = group.rewards - (group.rewards * group.lengths).sum() / max(
        group.lengths.sum(), 1.0
    )
    return advantage


def max_rl(group: Scored) -> Array:
    """(reward - mean) / mean: rare successes count for more, [1, 0, 0, 0] -> [3, -1, -1, -1]; 0 where the mean is 0."""
    whole = group.rewards.mean()
    return mean(group) / whole if whole > 0 else np.zeros_like(group.rewards)


ADVANTAGES: dict[str, Advantage] = {
    f.__name__: f for f in (mean, std, rloo, length_corrected, max_rl)
}


def make_advantage(settings: GroupConfig) -> Advantage:
    """An advantage by its name, or a user's own by import path. Raises ValueError."""
    if settings.advantage in NAMES:
        return ADVANTAGES[settings.advantage]
    function = plugins.load_function(settings.advantage, "orchestrator.advantage")
    return plugins.with_keys(function, settings.advantage_args, "orchestrator.advantage_args")


def penalize_overlong(rewards_R: Array, lengths_R: Array, longest: int, share: float) -> Array:
    """Rewards less what completions in the last `share` of the longest length have gone into it, 1 at its end (soft
    overlong punishment, DAPO, Yu et al. 2025)."""
    room = share * longest
    if not room:
        return rewards_R
    punished: Array = rewards_R - np.clip((lengths_R - (longest - room)) / room, 0.0, 1.0)
    return punished


def has_signal(advantages_R: Array) -> bool:
    """Whether a group has an advantage other than 0; what rounding leaves of equal rewards is none."""
    return bool(np.abs(advantages_R).max() > 1e-9)
