"""Load Hugging Face data sets by verifiers v0's names, as rows of `question` and `answer`."""

from collections.abc import Callable
from typing import Any

from hone.environments.parsers import extract_boxed_answer, extract_hash_answer

Row = dict[str, Any]
DATA: dict[
    str, tuple[str, str | None, str, str, Callable[[Row], str]]
] = {  # hub id, subset, split, question, answer
    "gsm8k": (
        "openai/gsm8k",
        "main",
        "test",
        "question",
        lambda row: extract_hash_answer(row["answer"]),
    ),
    "math": (
        "chiayewken/competition_math",
        None,
        "train",
        "problem",
        lambda row: extract_boxed_answer(row["solution"]),
    ),
    "math500": ("HuggingFaceH4/MATH-500", None, "test", "problem", lambda row: str(row["answer"])),
    "aime2024": (
        "HuggingFaceH4/aime_2024",
        None,
        "train",
        "problem",
        lambda row: str(int(row["answer"])),
    ),
    "amc2023": ("knoveleng/AMC-23", None, "train", "problem", lambda row: str(row["answer"])),
}


def load_example_dataset(
    name: str = "gsm8k", split: str | None = None, n: int | None = None, seed: int = 0
) -> Any:
    """Load a data set, such as "gsm8k" or "math500", as a `datasets.Dataset`.

    Args:
        name: gsm8k, math, math500, aime2024 or amc2023.
        split: split on the Hugging Face Hub; each data set has a default.
        n: number of rows to draw at random; None for all.
        seed: seed of the random draw.

    Raises ValueError for an unknown name and if the data set cannot be loaded from the hub.
    """
    if name not in DATA:
        raise ValueError(f"load_example_dataset: there is no {name!r}; there are {', '.join(DATA)}")
    from datasets import load_dataset

    hub_id, subset, usual, question, answer = DATA[name]
    try:
        rows = load_dataset(hub_id, *([subset] if subset else []), split=split or usual)
    except Exception as error:  # the library raises many types for unreachable and missing data
        raise ValueError(
            f"load_example_dataset: {hub_id} cannot be loaded from the hub ({type(error).__name__}: {error})"
        ) from None
    rows = rows.map(
        lambda row: {"question": row[question], "answer": answer(row)},
        remove_columns=rows.column_names,
    )
    return rows if n is None or n >= len(rows) else rows.shuffle(seed=seed).select(range(n))
