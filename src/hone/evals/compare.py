"""`vf-eval --compare A B`: test if two evaluations of the same examples differ."""

from collections import defaultdict
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from hone.evals.paired_statistics import paired_difference
from hone.evals.results import Folder


def compare_results(a: Path, b: Path) -> int:
    """Print the rewards and metrics of two result folders, paired by example.

    Raises ValueError if the folders cannot be compared.
    """
    one = by_example(a)
    other = by_example(b)
    table = Table(title=f"A {a}\nB {b}", box=None, pad_edge=False, title_justify="left")
    for heading in ("", "A", "B", "B - A", "95 %", "p", "better", "worse"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name in ["reward", *sorted((one.keys() & other.keys()) - {"reward"})]:
        found = paired_difference(one[name], other[name])
        low = found.mean - 1.96 * found.error
        high = found.mean + 1.96 * found.error
        both = one[name].keys() & other[name].keys()
        table.add_row(
            name,
            *(f"{fmean(side[name][key] for key in both):.3f}" for side in (one, other)),
            f"{found.mean:+.3f}",
            f"{low:+.3f} to {high:+.3f}",
            f"{found.p:.3g}",
            str(found.better),
            str(found.worse),
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"{found.count} examples are in both; p: how often chance alone would differ as much"
    )
    return 0


def by_example(path: Path) -> dict[str, dict[str, float]]:
    """Return {metric: {example: mean over its rollouts that did not fail}} of a result folder.

    Raises ValueError if all rollouts failed.
    """
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in Folder.open(path).read_rows():
        if not row["error"]:
            for name, value in {"reward": row["reward"], **row["metrics"]}.items():
                values[name][f"{row['env']} {row['example_id']}"].append(value)
    if not values:
        raise ValueError(f"{path} has no rollout that did not fail")
    return {
        name: {key: fmean(found) for key, found in of_each.items()}
        for name, of_each in values.items()
    }
