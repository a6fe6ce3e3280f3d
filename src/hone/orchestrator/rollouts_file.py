"""Write and read rollouts/step_N/rollouts.jsonl, which has one JSON object per rollout.

An object has the prompt, the completion, rewards and tokens.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from hone.environments.rollout_rows import rollout_of, row_of
from hone.orchestrator.group import Group, samples_of, tokens_of
from hone.orchestrator.schedule import Task
from hone.records import Message
from hone.run_directory import appearing_directory
from hone.text.messages import show_message

FILE = "rollouts.jsonl"


def write_rollouts(
    groups: list[Group], directory: Path, write_more: Callable[[Path], None] | None = None
) -> None:
    """Write a step's directory atomically, with the files that `write_more(directory)` adds."""
    with appearing_directory(directory) as partial:
        with (partial / FILE).open("wb") as file:
            for group in groups:
                # Seven times faster than Python's json.
                for i in range(len(group.rollouts)):
                    file.write(to_json(_build_row(group, i), inf_nan_mode="constants") + b"\n")
        if write_more:
            write_more(partial)


def _build_row(group: Group, i: int) -> dict[str, object]:
    judged = {
        "group": group.task.number,
        "member": i,
        "advantage": group.advantages[i],
        "is_used": group.learnt[i],
    }
    return row_of(group.rollouts[i], group.task.env) | judged | {"unused": group.unused}


def tracker_rows(step: int, groups: list[Group]) -> list[dict[str, Any]]:
    """Return rollouts as rows with the columns of `trackers.COLUMNS`."""
    return [
        {
            "step": step,
            "env": group.task.env,
            "prompt": join_texts(rollout.example.prompt[-1:]),
            "completion": join_texts(rollout.messages),
            "answer": str(rollout.example.answer),
            "reward": float(rollout.reward),
            "advantage": group.advantages[i],
            "tokens": tokens_of(rollout),
            "stop": rollout.stop,
            "error": rollout.error or "",
        }
        for group in groups
        for i, rollout in enumerate(group.rollouts)
    ]


def join_texts(messages: list[Message]) -> str:
    """Return the texts of messages, with their tool calls."""
    return "\n".join(map(show_message, messages))


def read_group(directory: Path, number: int, temperatures: dict[str, float]) -> Group | None:
    """Read the samples of a written group, None if none of its rollouts was trained on.

    `temperatures` has the sampling temperature of each environment.
    """
    lines = (directory / FILE).read_text().split("\n") if (directory / FILE).exists() else []
    rows = [
        row
        for row in map(json.loads, filter(None, lines))
        if row["group"] == number and row["is_used"]
    ]
    if not rows:
        return None
    group = Group(Task(number, rows[0]["env"], -1), [rollout_of(row) for row in rows])
    for row, rollout in zip(rows, group.rollouts, strict=True):
        own = samples_of(rollout, row["advantage"], temperatures[row["env"]], row["env"])
        for sample in own:
            sample.group = number
            sample.member = row["member"]
        group.samples += own
    group.version = group.oldest_version(0)
    return group
