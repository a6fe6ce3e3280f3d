"""Plot the curves of the dashboard's first page as PNG, SVG or PDF."""

import io
from pathlib import Path
from typing import Any

from hone.dashboard.index import Index

RL = [
    ("Reward", "reward/mean"),
    ("Entropy, nats a token", "entropy/mean"),
    ("Mismatch KL", "mismatch_kl/mean"),
    ("Tokens of a completion", "completion_len/mean"),
    ("Norm of the gradient", "optim/grad_norm"),
    ("Seconds of a step", "time/step"),
]
SFT = [
    ("Loss", "loss/mean"),
    ("Loss on held-out data", "val/loss"),
    ("Learning rate", "optim/lr"),
    ("Norm of the gradient", "optim/grad_norm"),
]
COLOURS = ("#0f766e", "#b45309", "#4338ca", "#be185d", "#4d7c0f", "#0369a1")
FORMATS = ("png", "svg", "pdf")


def draw_curves(indexes: list[Index], form: str) -> bytes:
    """Return a picture with a panel per metric and, in each panel, a line per run.

    `form` is one of FORMATS. Raises ValueError if there is nothing to draw.
    """
    from matplotlib.figure import Figure  # takes seconds, which only pictures need

    for index in indexes:
        index.update_metrics()
    kinds = {index.run.kind for index in indexes}
    panels = [panel for kind, some in (("rl", RL), ("sft", SFT)) if kind in kinds for panel in some]
    names = [name for _, name in panels] + ["reward/std"]
    series = [(index, index.metric_series(names)) for index in indexes]
    panels = [
        panel for panel in dict.fromkeys(panels) if any(panel[1] in found for _, found in series)
    ]
    if not panels:
        raise ValueError("there is nothing to draw yet: no step is done")
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.0 * rows), layout="constrained")
    for k, (title, name) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, k + 1)
        axes.set_title(title, loc="left", fontsize=10)
        _draw_panel(axes, name, series)
        if len(indexes) > 1 and k == 0:
            axes.legend(fontsize=8, frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format=form, dpi=130)
    return out.getvalue()


def _draw_panel(axes: Any, name: str, series: list[tuple[Index, dict[str, Any]]]) -> None:
    for i, (index, found) in enumerate(series):
        if name in found:
            _draw_line(axes, name, found, COLOURS[i % len(COLOURS)], label_of(index))
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    values = [value for _, found in series for value in found.get(name, [[], []])[1]]
    if name == "mismatch_kl/mean" and any(value > 0 for value in values):
        axes.set_yscale("log", nonpositive="mask")


def _draw_line(
    axes: Any, name: str, series: dict[str, list[list[float]]], colour: str, label: str
) -> None:
    steps, values = series[name]
    axes.plot(
        steps,
        values,
        color=colour,
        linewidth=1.6,
        label=label,
        marker="." if len(steps) < 2 else None,
    )
    if name == "reward/mean" and len(series.get("reward/std", [[]])[0]) == len(steps):
        spread = series["reward/std"][1]
        low, high = (
            [v + sign * s for v, s in zip(values, spread, strict=True)] for sign in (-1, 1)
        )
        axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)


def label_of(index: Index) -> str:
    place = index.run.id.rpartition(":")[0]
    return Path(index.root).name if place == "." else place
