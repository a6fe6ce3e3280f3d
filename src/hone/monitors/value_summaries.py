"""Summaries of a step's values as metrics NAME/{mean,median,std,min,max}."""

import numpy as np
from numpy.typing import ArrayLike


def summarize_values(name: str, values: ArrayLike) -> dict[str, float]:
    array = np.sort(np.asarray(values, dtype=np.float64), axis=None)  # NaN sorts last
    n = array.size
    found = [0.0] * 5
    if n:
        # numpy's median alone takes longer than all of this.
        middle = (array[(n - 1) // 2] + array[n // 2]) / 2
        found = [array.mean(), middle, array.std(), array[0], array[-1]]
        if np.isnan(array[-1]):
            found = [np.nan] * 5
    return {
        f"{name}/{key}": float(x)
        for key, x in zip(("mean", "median", "std", "min", "max"), found, strict=True)
    }
