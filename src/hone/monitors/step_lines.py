"""The step lines of the console, as scripts read them: `Step N | Time: … | Reward: …`."""

import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hone.config.key_names import key_name
from hone.config.sections import RunConfig
from hone.monitors.diagnosis import Finding
from hone.monitors.diagnosis_monitor import DiagnosisMonitor
from hone.monitors.events import Events
from hone.monitors.metrics_log import read_rows
from hone.monitors.trackers import Rows, spread_by_reward
from hone.run_directory import RunDirectory, shorten_path

QUIET_VARIABLE = "HONE_QUIET_STEPS"  # set by `rl` for its components: it prints their steps itself


class StepLines(Events):
    """Base class of listeners that log lines for events.

    The console shows the lines of every `log_interval`-th step and of the last step; log files have
    all lines.
    """

    def __init__(self, config: RunConfig, log: str, is_on_console: bool = True) -> None:
        """`is_on_console` is False if another listener prints the steps there."""
        self.is_on_console = is_on_console and QUIET_VARIABLE not in os.environ
        self.max_steps = getattr(config, "max_steps", None)
        self.log_interval = config.log_interval
        self.log = logging.getLogger(f"hone.{log}")

    def on_start(self, max_steps: int, done: int) -> None:
        self.max_steps = max_steps

    def on_last_step(self, step: int) -> None:
        self.max_steps = step

    def log_line(self, step: int, line: str, level: int = logging.INFO) -> None:
        interval = self.log_interval
        is_due = bool(interval) and (step == self.max_steps or step % interval == 0)
        is_shown = is_due and (self.is_on_console or level > logging.INFO)
        self.log.log(level, "%s", line, extra={"console": is_shown})

    def on_evaluation(self, version: int, values: dict[str, float], is_row: bool) -> None:
        self.log.info("%s", evaluation_line(version, values))


class RolloutLines(StepLines):
    """Lines of the orchestrator: rollouts, evaluations, and the summary of a step."""

    def __init__(
        self,
        config: RunConfig,
        log_samples: int = 0,
        monitor: DiagnosisMonitor | None = None,
        is_on_console: bool = True,
    ) -> None:
        super().__init__(config, "orchestrator", is_on_console)
        self.log_samples = log_samples
        self.monitor = monitor

    def on_rollouts(self, step: int, values: dict[str, float], rows: Callable[[], Rows]) -> None:
        if not values["batch/effective_batch_size"]:
            finding = self.monitor.main_finding if self.monitor is not None else None
            line = why_no_signal(step, values, finding)
            is_solved = finding is not None and not finding.is_problem
            self.log_line(step, line, logging.INFO if is_solved else logging.WARNING)
        self.log_line(step, orchestrator_line(step, values))
        if self.log_samples and step % self.log_samples == 0 and (found := rows()):
            self.log.info("%s", sample_lines(step, spread_by_reward(found, 3)[len(found) > 2]))


class TrainerLines(StepLines):
    """Lines of the RL trainer."""

    def __init__(self, config: RunConfig, is_on_console: bool = True) -> None:
        super().__init__(config, "trainer", is_on_console)

    def on_trained(self, step: int, values: dict[str, float]) -> None:
        self.log_line(step, trainer_line(step, values))

    def on_evaluation(self, version: int, values: dict[str, float], is_row: bool) -> None:
        pass  # the orchestrator's lines have it


class RLStepLines(StepLines):
    """One console line a step of an RL run whose components write their own logs."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config, "rl")

    def on_step(self, step: int, values: dict[str, float]) -> bool:
        self.log_line(step, rl_step_line(step, values))
        return True

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
        f"Step {step} | Time: {values['time/train']:.2f}s | Loss: {values['loss/mean']:z.4f} | "
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
        f"Step {step} | Time: {values['time/step']:.2f}s | Loss: {values['loss/mean']:z.4f}",
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


def rl_step_line(step: int, values: dict[str, float]) -> str:
    """Format a step of RL in one line, from the metrics of its rollouts and its training.

    Parts that are usually 0 (failures, stale tokens, waiting) appear only if they are not.
    """

    def value_of(*names: str) -> float:
        return sum(values.get(name, 0.0) for name in names)

    failures = {
        name.removeprefix("failures/").replace("_", " "): count
        for name, count in values.items()
        if name.startswith("failures/") and count
    }
    failed = ", ".join(f"{count:.0f} {cause}" for cause, count in failures.items())
    staleness = value_of("batch/off_policy_level/mean")
    waiting = value_of("time/wait_for_weights", "time/wait_for_batch")
    mfu = f", MFU {values['perf/mfu']:.1%}" if "perf/mfu" in values else ""
    parts = [
        f"Step {step}",
        f"Time: {value_of('time/step'):.2f}s",
        f"Reward: {value_of('reward/mean'):.4f} ± {value_of('reward/std'):.4f}",
        f"Solved: {value_of('batch/solve_all'):.0%} by all, {value_of('batch/solve_none'):.0%} by none",
        f"Loss: {value_of('loss/mean'):z.4f}",
        f"Entropy: {value_of('entropy/mean'):.4f}",
        f"Mismatch KL: {format_mismatch(values)}",
        f"Grad. Norm: {value_of('optim/grad_norm'):.4f}",
        f"LR: {value_of('optim/lr'):.2e}",
        f"Length: {value_of('completion_len/mean'):.0f} tokens",
        *(
            [f"Truncated: {value_of('is_truncated/mean'):.0%}"]
            if value_of("is_truncated/mean")
            else []
        ),
        *([f"Masked: {value_of('is_masked/mean'):.2%}"] if value_of("is_masked/mean") else []),
        *([f"Failed: {failed}"] if failed else []),
        *([f"Off-Policy: {staleness:.1f} steps"] if staleness else []),
        *([f"Waiting: {waiting:.2f}s"] if waiting >= 0.01 else []),
        f"Throughput: {value_of('perf/throughput'):.0f} tokens/s{mfu}",
        f"Peak Mem.: {value_of('perf/peak_memory'):.1f} GiB",
    ]
    return " | ".join(parts)


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


def why_no_signal(step: int, values: dict[str, float], finding: Finding | None = None) -> str:
    """Return one sentence on why a step has nothing to learn from, and what usually helps.

    `finding` is what the run's diagnosis says, if it says something.
    """
    if finding is not None:
        return f"Step {step}: nothing to learn from: {finding.title}"
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


def format_outcome(run: RunDirectory) -> str:
    """Return the outcome of an RL run, and the commands that show more, as the user types them."""
    rewards = {
        row["step"]: row["reward/mean"] for row in read_rows(run.metrics) if "reward/mean" in row
    }
    hone = typed_command("hone")
    place = shorten_path(run.path)
    lines = [f"{hone} {command} {place}" for command in ("dashboard", "doctor", "plot")]
    look = "Look at it with:\n" + "\n".join(lines)
    if not rewards:
        return look
    first = min(rewards)
    last = max(rewards)
    best = max(rewards, key=rewards.__getitem__)
    return (
        f"Reward: {rewards[first]:.4f} at step {first}, {rewards[last]:.4f} at step {last}, at best "
        f"{rewards[best]:.4f} (step {best}). {look}"
    )


def typed_command(name: str) -> str:
    """Return how the user of this process types a command of Hone."""
    if "UV_RUN_RECURSION_DEPTH" in os.environ:
        return f"uv run {name}"
    if shutil.which(name):
        return name
    return os.path.relpath(Path(sys.executable).parent / name)


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
