"""rollouts/step_N/rollouts.jsonl: one JSON object a rollout: what was asked and written, why it was rewarded, and the
tokens behind it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hone.orchestrator.group import Group, samples_of
from hone.orchestrator.schedule import Task
from hone.records import Completion, Example, Rollout, Turn
from hone.run_directory import appearing

FILE = "rollouts.jsonl"


def write_rollouts(groups: list[Group], directory: Path, write_more: Callable[[Path], None] | None = None) -> None:
    """The directory appears whole, with what `write_more` puts into it."""
    with appearing(directory) as partial:
        with (partial / FILE).open("w") as file:
            for group in groups:
                for i in range(len(group.rollouts)):
                    file.write(json.dumps(_row(group, i), ensure_ascii=False) + "\n")
        if write_more:
            write_more(partial)


def _row(group: Group, i: int) -> dict[str, object]:
    rollout = group.rollouts[i]
    return {
        "env": group.task.env,
        "example_id": rollout.example.id,
        "group": group.task.number,
        "prompt": rollout.example.prompt,
        "completion": rollout.messages,
        "answer": rollout.example.answer,
        "reward": rollout.reward,
        "metrics": rollout.metrics,
        "advantage": group.advantages[i],
        "is_used": group.learnt[i],
        "unused": group.unused,
        "error": rollout.error,
        "seconds": round(rollout.seconds, 4),
        "turns": [
            {
                "prompt_ids": turn.prompt_ids,
                "ids": turn.completion.ids,
                "logprobs": [float(f"{x:.9g}") for x in turn.completion.logprobs],  # to the bit, of fp32
                "version": turn.completion.versions[0] if turn.completion.versions else None,
                "last_version": turn.completion.versions[-1] if turn.completion.versions else None,
                "finish_reason": turn.completion.finish_reason,
            }
            for turn in rollout.turns
        ],
    }


def read_group(directory: Path, number: int, temperatures: dict[str, float]) -> Group | None:
    """What a group that was written there is trained on, at its environment's temperature; None where it is not."""
    lines = (directory / FILE).read_text().splitlines() if (directory / FILE).exists() else []
    rows = [row for row in map(json.loads, lines) if row["group"] == number and row["is_used"]]
    if not rows:
        return None
    group = Group(Task(number, rows[0]["env"], -1), [_rollout(row) for row in rows])
    for row, rollout in zip(rows, group.rollouts, strict=True):
        group.samples += samples_of(rollout, row["advantage"], temperatures[row["env"]], row["env"])
    group.version = min(group.versions)
    return group


def _rollout(row: dict[str, Any]) -> Rollout:
    turns = [
        Turn(t["prompt_ids"], Completion(t["ids"], t["logprobs"], [t["version"]], t["finish_reason"]), "")
        for t in row["turns"]
    ]
    return Rollout(Example(row["example_id"], row["prompt"], row["answer"]), turns, row["completion"], row["reward"])
