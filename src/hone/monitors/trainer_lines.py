"""Step lines as transformers' Trainer and verifiers' RLTrainer print them.

{'loss': 0.0132, 'learning_rate': 0.005, 'epoch': 0.01}
Step 1/100: reward=0.75, entropy=0.41, importance_ratio=1.00
=== Step 5 Sample ===
"""

from typing import Any

from hone.monitors.step_lines import printable, why_no_signal

NAMES = {  # their names, and ours
    "loss": "loss/mean",
    "learning_rate": "optim/lr",
    "epoch": "progress/epoch",
    "grad_norm": "optim/grad_norm",
    "reward": "reward/mean",
    "entropy": "entropy/mean",
    "importance_ratio": "importance_ratio/mean",
    "tokens/masked_fraction": "is_masked/mean",
}


def trainer_names(row: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a metrics row by the names that transformers' Trainer uses."""
    return {theirs: row[ours] for theirs, ours in NAMES.items() if ours in row}


def loss_line(row: dict[str, Any]) -> str:
    shown = trainer_names(row)
    return str(
        {
            key: float(f"{shown[key]:.4g}")
            for key in ("loss", "learning_rate", "epoch")
            if key in shown
        }
    )


def step_line(row: dict[str, Any], max_steps: int) -> str:
    """Return the line of a step, with the reason if it had nothing to learn from."""
    shown = trainer_names(row)
    is_idle = not row.get("batch/effective_batch_size", 1)
    names = ("reward",) if is_idle else ("reward", "entropy", "importance_ratio")
    line = f"Step {row['step']}/{max_steps}: " + ", ".join(
        f"{key}={shown[key]:.4f}" for key in names if key in shown
    )
    return f"{line}\n{why_no_signal(row['step'], row)}" if is_idle else line


def sample_block(step: int, rollout: dict[str, Any]) -> str:
    """Return a row of rollouts.jsonl as text, with control characters escaped."""
    asked = [message for message in rollout["prompt"] if message["role"] != "system"] or rollout[
        "prompt"
    ]
    said = "\n".join(_message_text(message) for message in rollout["completion"])
    return "\n".join(
        [
            f"=== Step {step} Sample ===",
            f"Prompt: {printable(_message_text(asked[-1]) if asked else '')}",
            f"Completion: {printable(said)}",
            f"Reward: {rollout['reward']:.4g}"
            + (f" ({printable(rollout['error'])})" if rollout.get("error") else ""),
        ]
    )


def _message_text(message: dict[str, Any]) -> str:
    calls = "".join(f" {call.get('function')}" for call in message.get("tool_calls") or [])
    return f"{message.get('content') or ''}{calls}"
