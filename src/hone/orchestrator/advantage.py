"""Advantages: from the rewards of a group to what each of its rollouts is worth to the policy. Pure.

Every function takes the rewards R of one group, and the lengths of their completions in tokens, and gives R numbers.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def mean(rewards_R: Array, lengths_R: Array) -> Array:
    """Reward minus the mean of its group, without division by the deviation (Dr. GRPO, Liu et al. 2025)."""
    centred: Array = rewards_R - rewards_R.mean()
    return centred


def std(rewards_R: Array, lengths_R: Array) -> Array:
    """The same over the group's deviation (GRPO, Shao et al. 2024); 0 where all rewards are equal."""
    deviation = rewards_R.std(ddof=1) if len(rewards_R) > 1 else 0.0
    return mean(rewards_R, lengths_R) / (deviation + 1e-4)


def rloo(rewards_R: Array, lengths_R: Array) -> Array:
    """Reward minus the mean of the others (leave one out, Ahmadian et al. 2024)."""
    R = len(rewards_R)
    return mean(rewards_R, lengths_R) * (R / (R - 1) if R > 1 else 1.0)


def length_corrected(rewards_R: Array, lengths_R: Array) -> Array:
    """Reward minus the mean over the group's tokens: the baseline of least variance where every token counts the same
    (OPO, Hao et al. 2025)."""
    advantage: Array = rewards_R - (rewards_R * lengths_R).sum() / max(lengths_R.sum(), 1.0)
    return advantage


def max_rl(rewards_R: Array, lengths_R: Array) -> Array:
    """(reward - mean) / mean: rare successes count for more, [1, 0, 0, 0] -> [3, -1, -1, -1]; 0 where the mean is 0."""
    whole = rewards_R.mean()
    return mean(rewards_R, lengths_R) / whole if whole > 0 else np.zeros_like(rewards_R)


ADVANTAGES: dict[str, Callable[[Array, Array], Array]] = {
    f.__name__: f for f in (mean, std, rloo, length_corrected, max_rl)
}


def overlong(rewards_R: Array, lengths_R: Array, longest: int, share: float) -> Array:
    """Rewards less what completions in the last `share` of the longest length have gone into it, 1 at its end (soft
    overlong punishment, DAPO, Yu et al. 2025)."""
    room = share * longest
    if not room:
        return rewards_R
    punished: Array = rewards_R - np.clip((lengths_R - (longest - room)) / room, 0.0, 1.0)
    return punished


def has_signal(rewards_R: Array) -> bool:
    """Whether a group's rollouts differ in reward: where all are equal, all advantages are 0."""
    return bool(rewards_R.max() > rewards_R.min())
