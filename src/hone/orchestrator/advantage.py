"""Advantage functions: map the R rewards of a group to R advantages. Pure functions.

The keyword-only parameters of a user's function are set by orchestrator.advantage_args.
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
    """The rollouts from which a group's advantages are computed.

    Attributes:
        rewards: R, float64, after the configured penalties.
        lengths: R, float64, generated tokens per rollout.
        rollouts: the R rollouts.
    """

    rewards: Array
    lengths: Array
    rollouts: list[Rollout] = field(default_factory=list)


Advantage = Callable[[Scored], Array]


def mean(group: Scored) -> Array:
    """Return reward minus group mean, not divided by the deviation (Dr. GRPO, Liu et al. 2025)."""
    centred: Array = group.rewards - group.rewards.mean()
    return centred


def std(group: Scored) -> Array:
    """Return (reward - mean) / deviation (GRPO, Shao et al. 2024); 0 if all rewards are equal."""
    deviation = group.rewards.std(ddof=1) if len(group.rewards) > 1 else 0.0
    return mean(group) / (deviation + 1e-4)


def rloo(group: Scored) -> Array:
    """Return reward minus the mean of the group's other rewards (RLOO, Ahmadian et al. 2024)."""
    R = len(group.rewards)
    return mean(group) * (R / (R - 1) if R > 1 else 1.0)


def length_corrected(group: Scored) -> Array:
    """Return reward minus the token-weighted mean (OPO, Hao et al. 2025).

    This baseline has the least variance if every token counts the same.
    """
    advantage: Array = group.rewards - (group.rewards * group.lengths).sum() / max(
        group.lengths.sum(), 1.0
    )
    return advantage


def max_rl(group: Scored) -> Array:
    """Return (reward - mean) / mean, which favours rare successes: [1, 0, 0, 0] -> [3, -1, -1, -1].

    0 if the mean is 0.
    """
    whole = group.rewards.mean()
    return mean(group) / whole if whole > 0 else np.zeros_like(group.rewards)


ADVANTAGES: dict[str, Advantage] = {
    f.__name__: f for f in (mean, std, rloo, length_corrected, max_rl)
}


def make_advantage(settings: GroupConfig) -> Advantage:
    """Return the configured advantage function, by name or import path. Raises ValueError."""
    if settings.advantage in NAMES:
        return ADVANTAGES[settings.advantage]
    function = plugins.load_function(settings.advantage, "orchestrator.advantage")
    return plugins.with_keys(function, settings.advantage_args, "orchestrator.advantage_args")


def penalize_overlong(rewards_R: Array, lengths_R: Array, longest: int, share: float) -> Array:
    """Subtract from the rewards a penalty for completions of almost `longest` tokens or more.

    The penalty grows linearly from 0 to 1 over the last `share` (a fraction) of `longest` tokens:
    soft overlong punishment (DAPO, Yu et al. 2025).
    """
    room = share * longest
    if not room:
        return rewards_R
    punished: Array = rewards_R - np.clip((lengths_R - (longest - room)) / room, 0.0, 1.0)
    return punished


def has_signal(advantages_R: Array) -> bool:
    """Return True if an advantage differs from 0 by more than rounding."""
    return bool(np.abs(advantages_R).max() > 1e-9)
