"""Summaries of a step's values under the metric names that users know: NAME/{mean,median,std,min,max}."""

import numpy as np
from numpy.typing import ArrayLike


def summary(name: str, values: ArrayLike) -> dict[str, float]:
    array = np.asarray(values, dtype=np.float64)
    of = {key: getattr(np, key) for key in ("mean", "median", "std", "min", "max")}
    return {f"{name}/{key}": float(function(array)) if array.size else 0.0 for key, function in of.items()}
