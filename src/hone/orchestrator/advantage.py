"""Advantages: from the rewards of groups to what each rollout is worth to the policy. Pure."""

import numpy as np
from numpy.typing import NDArray


def group_mean_advantage(rewards_GR: NDArray[np.float64]) -> NDArray[np.float64]:
    """Reward minus the mean of its group, without division by the deviation (Dr. GRPO, Liu et al. 2025)."""
    centred: NDArray[np.float64] = rewards_GR - rewards_GR.mean(axis=1, keepdims=True)
    return centred


def has_signal(rewards_R: NDArray[np.float64]) -> bool:
    """Whether a group's rollouts differ in reward: where all are equal, all advantages are 0."""
    return bool(rewards_R.max() > rewards_R.min())
