"""Summaries of a step's values under the metric names that users know: NAME/{mean,median,std,min,max}."""

import numpy as np
from numpy.typing import ArrayLike


def summary(name: str, values: ArrayLike) -> dict[str, float]:
    array = np.asarray(values, dtype=np.float64)
    keys = ("mean", "median", "std", "min", "max")
    return {f"{name}/{key}": float(getattr(np, key)(array)) if array.size else 0.0 for key in keys}
