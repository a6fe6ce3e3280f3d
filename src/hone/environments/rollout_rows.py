"""Convert rollouts to JSON rows and back, in one format for training and evaluation."""

from typing import Any

from hone.records import Completion, Example, Rollout, Turn


def row_of(rollout: Rollout, env: str, token_ids: bool = True) -> dict[str, Any]:
    """Convert a rollout to a JSON row: prompt, turns, reward, metrics and timings.

    With `token_ids` the turns have token ids and logprobs, otherwise only the numbers of tokens.
    """
    example = rollout.example
    return {
        "env": env,
        "task": example.task,
        **({"agent": rollout.agent} if rollout.agent else {}),
        "example_id": example.id,
        "prompt": example.prompt,
        "completion": rollout.messages,
        "answer": example.answer,
        "info": example.info,
        "reward": rollout.reward,
        "metrics": rollout.metrics,
        "stop": rollout.stop,
        "is_truncated": rollout.is_truncated,
        "error": rollout.error,
        "seconds": round(rollout.seconds, 4),
        "timings": {k: round(v, 5) for k, v in rollout.timings.items()},
        "turns": [_encode_turn(turn, token_ids) for turn in rollout.turns],
    }


def _encode_turn(turn: Turn, token_ids: bool) -> dict[str, Any]:
    done = turn.completion
    tokens = {"prompt_ids": turn.prompt_ids, "ids": done.ids, "logprobs": done.logprobs}
    return {
        **(
            tokens
            if token_ids
            else {"prompt_tokens": len(turn.prompt_ids), "tokens": len(done.ids)}
        ),
        "version": done.versions[0] if done.versions else None,
        "last_version": done.versions[-1] if done.versions else None,
        "finish_reason": done.finish_reason,
    }


def rollout_of(row: dict[str, Any]) -> Rollout:
    """Build a rollout from its row. Token ids and logprobs are empty if the row has none."""
    turns = [
        Turn(
            t.get("prompt_ids") or [],
            Completion(
                t.get("ids") or [], t.get("logprobs") or [], [t["version"]], t["finish_reason"]
            ),
            "",
        )
        for t in row["turns"]
    ]
    example = Example(
        row["example_id"],
        row["prompt"],
        row["answer"],
        row.get("info") or {},
        row.get("task") or "",
    )
    return Rollout(
        example,
        turns,
        row["completion"],
        row["reward"],
        row["metrics"],
        row["seconds"],
        row["error"],
        row.get("stop") or "",
        row.get("timings") or {},
        agent=row.get("agent") or "",
    )
