"""Summaries of a step's values under the metric names that users know: NAME/{mean,median,std,min,max}."""

import numpy as np
from numpy.typing import ArrayLike


def summary(name: str, values: ArrayLike) -> dict[str, float]:
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        return {f"{name}/mean": 0.0, f"{name}/median": 0.0, f"{name}/std": 0.0, f"{name}/min": 0.0, f"{name}/max": 0.0}
    return {
        f"{name}/mean": float(array.mean()),
        f"{name}/median": float(np.median(array)),
        f"{name}/std": float(array.std()),
        f"{name}/min": float(array.min()),
        f"{name}/max": float(array.max()),
    }
