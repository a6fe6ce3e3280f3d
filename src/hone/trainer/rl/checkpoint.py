"""Checkpoints to resume from: checkpoints/step_N/{trainer,orchestrator}, whole or not at all.

trainer/ has the optimiser's tensors (fp32 weights and moments) as safetensors, orchestrator/ the step and the
configuration; everything else of a run (data order, draws) follows from seed and step.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from hone.run_directory import RunDirectory
from hone.trainer.optim import Optimizer

FREE_TO_CHANGE = {
    "output_dir", "clean", "resume", "wandb", "log_level", "log_interval", "max_steps", "ckpt", "weights", "deployment",
    "inference_gpu_ids", "trainer_gpu_ids", "batch_timeout",
}  # fmt: skip


def save_checkpoint(directory: Path, optimizer: Optimizer, step: int, config: dict[str, Any], keep: int) -> None:
    """Writes the checkpoint of a step and removes all but the last `keep`."""
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    for part in ("trainer", "orchestrator"):
        (partial / part).mkdir(parents=True)
    save_file(
        {name: t.contiguous() for name, t in optimizer.state().items()}, partial / "trainer" / "optimizer.safetensors"
    )
    state = {"step": step, "config": config}
    (partial / "orchestrator" / "state.json").write_text(json.dumps(state, indent=2) + "\n")
    partial.rename(directory)
    steps = sorted((p for p in directory.parent.glob("step_*") if p.name[5:].isdigit()), key=lambda p: int(p.name[5:]))
    for old in steps[:-keep]:
        shutil.rmtree(old)


def load_checkpoint(directory: Path, optimizer: Optimizer, config: dict[str, Any]) -> int:
    """Puts weights and optimiser back and returns the step. Raises ValueError where the run would not be the same."""
    try:
        state = json.loads((directory / "orchestrator" / "state.json").read_text())
        tensors = load_file(directory / "trainer" / "optimizer.safetensors")
    except Exception as error:  # a damaged file raises whatever its reader raises
        raise ValueError(f"checkpoint {directory} cannot be read: {error}") from None
    for key, value in config.items():
        if key not in FREE_TO_CHANGE and key in state["config"] and state["config"][key] != value:
            raise ValueError(
                f"--resume: {key} differs from the run in {directory.parent.parent}: "
                f"it had {state['config'].get(key)}, found {value}"
            )
    optimizer.load_state(tensors)
    step: int = state["step"]
    return step


def resume(run: RunDirectory, optimizer: Optimizer, config: dict[str, Any]) -> int:
    """Puts the last checkpoint of a run directory back; returns its step."""
    return load_checkpoint(run.last_checkpoint(), optimizer, config)


def forget_after(step: int, metrics: Path, rollouts: Path) -> None:
    """Removes what a run wrote after its checkpoint of `step`: those steps are taken again."""
    if metrics.exists():
        lines = [line for line in metrics.read_text().splitlines(keepends=True) if json.loads(line)["step"] <= step]
        partial = metrics.with_suffix(".partial")
        partial.write_text("".join(lines))
        partial.replace(metrics)
    for directory in rollouts.glob("step_*"):
        number = directory.name.removeprefix("step_").removesuffix(".partial")
        if number.isdigit() and int(number) > step:
            shutil.rmtree(directory)
