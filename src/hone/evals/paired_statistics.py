"""Statistics of evaluations: standard errors, pass@k, paired comparison. Pure functions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

SIGMAS = 1.96  # of a 95 % interval


def clustered_error(values: ArrayLike, clusters: ArrayLike) -> float:
    """Return the standard error of a mean of values that are correlated within clusters.

    sqrt(G / (G - 1) * sum over the G clusters of (sum of residuals)²) / N; NaN for one cluster
    (Miller 2024, eq. 4).
    """
    value = np.asarray(values, dtype=np.float64)
    cluster = np.asarray(clusters)
    _, number = np.unique(cluster, return_inverse=True)
    sums = np.bincount(number, weights=value - value.mean())
    G = len(sums)
    return (
        float(np.sqrt(G / (G - 1) * np.square(sums).sum()) / len(value)) if G > 1 else float("nan")
    )


def pass_at_k(successes: Sequence[Sequence[bool]], k: int) -> float:
    """Return pass@k, the estimated probability that at least one of k rollouts succeeds.

    It is the mean over examples of 1 - C(n - c, k) / C(n, k) for c successes in n rollouts (Chen et
    al. 2021). Examples with fewer than k rollouts are left out; NaN if none is left.
    """
    found = []
    for rollouts in successes:
        n = len(rollouts)
        c = sum(rollouts)
        if n >= k:
            found.append(1.0 - math.comb(n - c, k) / math.comb(n, k))
    return float(np.mean(found)) if found else float("nan")


@dataclass(frozen=True)
class Difference:
    """Difference B - A of two evaluations, paired by example.

    Attributes:
        mean: mean difference.
        error: standard error of the mean.
        p: two-sided p-value.
        better: number of examples on which B is better.
        worse: number of examples on which B is worse.
        count: number of examples.
    """

    mean: float
    error: float
    p: float
    better: int
    worse: int
    count: int


def paired_difference(a: dict[str, float], b: dict[str, float]) -> Difference:
    """Compare two evaluations, given as {example: value}, on the examples that both have.

    Raises ValueError if they have no example in common.
    """
    both = sorted(a.keys() & b.keys())
    if not both:
        raise ValueError("the two evaluations have no example in common")
    differences = np.array([b[key] - a[key] for key in both])
    mean = float(differences.mean())
    n = len(both)
    error = float(differences.std(ddof=1) / math.sqrt(n)) if n > 1 else float("nan")
    p = math.erfc(abs(mean) / error / math.sqrt(2)) if error > 0 else float(mean == 0)
    return Difference(mean, error, p, int((differences > 0).sum()), int((differences < 0).sum()), n)
