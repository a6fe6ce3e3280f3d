"""The step lines of the console, as scripts read them: `Step N | Time: … | Reward: …`."""

import logging
from collections.abc import Callable
from typing import Any

from hone.config.key_names import key_name
from hone.config.sections import RunConfig
from hone.monitors.events import Events
from hone.monitors.logging_setup import SUCCESS
from hone.monitors.metrics_log import read_rows
from hone.monitors.trackers import Rows, spread_by_reward
from hone.run_directory import RunDirectory


class StepLines(Events):
    """Base class of listeners that log lines for events.

    The console shows the lines of every `log_interval`-th step and of the last step; log files have
    all lines.
    """

    def __init__(self, config: RunConfig, log: str) -> None:
        self.max_steps = getattr(config, "max_steps", None)
        self.log_interval = config.log_interval
        self.log = logging.getLogger(f"hone.{log}")

    def on_start(self, max_steps: int, done: int) -> None:
        self.max_steps = max_steps

    def on_last_step(self, step: int) -> None:
        self.max_steps = step

    def log_line(self, step: int, line: str, level: int = SUCCESS) -> None:
        interval = self.log_interval
        is_shown = interval and (step == self.max_steps or step % interval == 0)
        self.log.log(level, "%s", line, extra={"console": bool(is_shown)})

    def on_evaluation(self, version: int, values: dict[str, float], is_row: bool) -> None:
        self.log.info("%s", evaluation_line(version, values))


class RolloutLines(StepLines):
    """Lines of the orchestrator: rollouts, evaluations, and the summary of a step."""

    def __init__(self, config: RunConfig, log_samples: int = 0) -> None:
        super().__init__(config, "orchestrator")
        self.log_samples = log_samples

    def on_rollouts(self, step: int, values: dict[str, float], rows: Callable[[], Rows]) -> None:
        if not values["batch/effective_batch_size"]:
            self.log_line(step, why_no_signal(step, values), logging.WARNING)
        self.log_line(step, orchestrator_line(step, values))
        if self.log_samples and step % self.log_samples == 0 and (found := rows()):
            self.log.info("%s", sample_lines(step, spread_by_reward(found, 3)[len(found) > 2]))

    def on_step(self, step: int, values: dict[str, float]) -> bool:
        self.log_line(step, summary_line(step, values), logging.INFO)
        return True


class TrainerLines(StepLines):
    """Lines of the RL trainer."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config, "trainer")

    def on_trained(self, step: int, values: dict[str, float]) -> None:
        self.log_line(step, trainer_line(step, values))

    def on_evaluation(self, version: int, values: dict[str, float], is_row: bool) -> None:
        pass  # the orchestrator's lines have it


class SFTLines(StepLines):
    """Lines of supervised fine-tuning."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config, "sft")

    def on_step(self, step: int, values: dict[str, float]) -> bool:
        self.log_line(step, sft_line(step, values))
        return True


def orchestrator_line(step: int, values: dict[str, float]) -> str:
    return (
        f"Step {step} | Time: {values['time/step']:.2f}s | Reward: {values['reward/mean']:.4f} | "
        f"Throughput: {values['perf/throughput']:.0f} tokens/s | Seq. Length: {values['seq_len/mean']:.1f} tokens | "
        f"Async Level: {values['batch/async_level']:.0f} | "
        f"Max. Off-Policy Level: {values['batch/off_policy_level/max']:.0f}"
    )


def trainer_line(step: int, values: dict[str, float]) -> str:
    used = f"{values['perf/mfu']:.1%}" if "perf/mfu" in values else "n/a"
    return (
        f"Step {step} | Time: {values['time/train']:.2f}s | Loss: {values['loss/mean']:.4f} | "
        f"Entropy: {values['entropy/mean']:.4f} | Mismatch KL: {format_mismatch(values)} | "
        f"Grad. Norm: {values['optim/grad_norm']:.4f} | LR: {values['optim/lr']:.2e} | "
        f"Throughput: {values['perf/train_throughput']:.0f} tokens/s | MFU: {used} | "
        f"Peak Mem.: {values['perf/peak_memory']:.1f} GiB"
    )


def format_mismatch(values: dict[str, float]) -> str:
    """Format the mismatch KL of sampler and trainer; "0 (exact)" if no logprob differs."""
    if values.get("exact/differs", 1.0) == 0.0:
        return "0 (exact)"
    return f"{values.get('mismatch_kl/mean', 0.0):.2e}"


def sft_line(step: int, values: dict[str, float]) -> str:
    parts = [
        f"Step {step} | Time: {values['time/step']:.2f}s | Loss: {values['loss/mean']:.4f}",
        *(
            [f"Accuracy: {values['rewards/accuracies']:.1%}"]
            if "rewards/accuracies" in values
            else []
        ),
        *([f"Val. Loss: {values['val/loss']:.4f}"] if "val/loss" in values else []),
        f"Grad. Norm: {values['optim/grad_norm']:.4f} | LR: {values['optim/lr']:.2e}",
        f"Throughput: {values['perf/throughput']:.0f} tokens/s",
        *([f"MFU: {values['perf/mfu']:.1%}"] if "perf/mfu" in values else []),
        f"Peak Mem.: {values['perf/peak_memory']:.1f} GiB",
    ]
    return " | ".join(parts)


def summary_line(step: int, values: dict[str, float]) -> str:
    """Format the summary of a step from the metrics of its rollouts and its training."""

    def value_of(*names: str) -> float:
        return sum(values.get(name, 0.0) for name in names)

    def format_parts(prefix: str) -> str:
        found = {
            key.removeprefix(prefix): n for key, n in values.items() if key.startswith(prefix) and n
        }
        return (
            ", ".join(f"{n:.0f} {cause.replace('_', ' ')}" for cause, n in found.items()) or "none"
        )

    waiting = value_of("time/wait_for_weights", "time/wait_for_batch")
    sections = [
        f"Step {step} in all",
        f"Reward: {value_of('reward/mean'):.4f} ± {value_of('reward/std'):.4f}, "
        f"groups solved by all {value_of('batch/solve_all'):.0%}, "
        f"by none {value_of('batch/solve_none'):.0%}",
        f"Tokens: {value_of('tokens/trained'):.0f} trained, dropped: {format_parts('tokens/dropped/')}",
        f"Failed: {format_parts('failures/')}",
        f"Staleness: {value_of('batch/off_policy_level/mean'):.1f}, "
        f"at most {value_of('batch/off_policy_level/max'):.0f}",
        f"Mismatch KL: {format_mismatch(values)}",
        f"Masked: {value_of('is_masked/mean'):.2%}",
        f"Entropy: {value_of('entropy/mean'):.4f}",
        f"Grad. Norm: {value_of('optim/grad_norm'):.4f}",
        f"Seconds: {value_of('time/generate'):.2f} generating, {waiting:.2f} waiting, "
        f"{value_of('time/train'):.2f} training, "
        f"{value_of('time/publish_weights', 'time/update_weights'):.2f} syncing",
    ]
    return " | ".join(sections)


def evaluation_line(version: int, values: dict[str, float]) -> str:
    """Format the mean reward and the number of failed rollouts of each environment."""
    parts = []
    for name in (key.removesuffix("/failed") for key in values if key.endswith("/failed")):
        failed = values[f"{name}/failed"]
        reward = f"{values[f'{name}/reward']:.4f}" if f"{name}/reward" in values else "none"
        parts.append(
            f"{name.removeprefix('eval/')}: {reward}"
            + (f" ({failed:.0f} failed)" if failed else "")
        )
    return f"Evaluation of version {version} | " + " | ".join(parts)


def why_no_signal(step: int, values: dict[str, float]) -> str:
    """Return one sentence on why a step has nothing to learn from, and what usually helps."""
    if any(name.endswith("/reward_raised") for name in values):
        why = "reward functions raised"
        cure = "to mend what the warnings name"
    elif values["batch/solve_all"] == 1:
        why = "every rollout was solved"
        cure = "harder examples, or fewer of them"
    elif values.get("tokens/dropped/too_easy") or values.get("tokens/dropped/too_hard"):
        why = "every group was at a threshold"
        cure = "other orchestrator.buffer thresholds, or other examples"
    elif values["is_truncated/mean"] > 0.5:
        why = "most completions were cut off"
        cure = f"a larger {key_name('orchestrator.sampling.max_tokens')}"
    elif values["batch/solve_none"] == 1:
        why = "no rollout was rewarded"
        cure = "a longer supervised warm-up, easier examples, or partial rewards"
    else:
        why = "the rollouts of each group had the same reward"
        cure = "more rollouts an example, or a finer reward"
    failed = f" ({values['progress/failed']:.0f} failed)" if values["progress/failed"] else ""
    return f"Step {step}: nothing to learn from: {why}{failed}; what helps: {cure}"


def whole_run_line(run: RunDirectory) -> str:
    """Return the outcome of an RL run, and how to inspect it."""
    rewards = {
        row["step"]: row["reward/mean"] for row in read_rows(run.metrics) if "reward/mean" in row
    }
    look = f"look at it: hone dashboard {run.path}, hone doctor {run.path}, hone plot {run.path}"
    if not rewards:
        return look[0].upper() + look[1:]
    first = min(rewards)
    last = max(rewards)
    best = max(rewards, key=rewards.__getitem__)
    return (
        f"Reward: {rewards[first]:.4f} at step {first}, {rewards[last]:.4f} at step {last}, at best "
        f"{rewards[best]:.4f} (step {best}); {look}"
    )


def sample_lines(step: int, row: dict[str, Any]) -> str:
    """Format a rollout as text; `row` has the columns of `trackers.COLUMNS`."""
    end = f" ({printable(row['error'] or row['stop'])})" if row["error"] or row["stop"] else ""
    return (
        f"=== Step {step} Sample ===\nPrompt: {printable(row['prompt'])}\nCompletion: {printable(row['completion'])}\n"
        f"Reward: {row['reward']:.4g}, advantage {row['advantage']:.4g}, {row['tokens']} tokens{end}"
    )


def printable(text: str) -> str:
    """Escape all control characters except line breaks."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
