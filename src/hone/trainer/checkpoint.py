"""Checkpoints to resume from: checkpoints/step_N, whole or not at all.

    checkpoint.json                  step, configuration, metrics of the step; size and CRC-32 of every file
    trainer/optimizer.safetensors    fp32 weights and moments
    orchestrator/progress.json       (rl) the step; the order of the data and all draws follow from it and the seed

A directory appears by rename once everything in it is on disk. One that is damaged all the same is named and passed
over for the one before it.
"""

import json
import logging
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from hone.config.sections import CkptConfig
from hone.run_directory import RunDirectory, steps_in
from hone.trainer.optim import Optimizer

FREE_TO_CHANGE = {
    "output_dir", "clean", "resume", "wandb", "log_level", "log_interval", "max_steps", "max_seconds", "ckpt",
    "weights", "val", "deployment", "inference_gpu_ids", "trainer_gpu_ids", "batch_timeout", "on_bad_step",
    "ranks_timeout", "activation_checkpointing",
}  # fmt: skip
HEADER, TENSORS = "checkpoint.json", Path("trainer") / "optimizer.safetensors"


class Damaged(Exception):
    """A checkpoint that cannot be gone on from, and why."""


def save_checkpoint(
    run: RunDirectory, optimizer: Optimizer, step: int, config: dict[str, Any], policy: CkptConfig,
    metrics: dict[str, float],
) -> None:  # fmt: skip
    """Writes the checkpoint of a step and removes those that the policy does not keep."""
    directory = run.checkpoints / f"step_{step}"
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "trainer").mkdir(parents=True)
    save_file({name: t.contiguous() for name, t in optimizer.state().items()}, partial / TENSORS)
    if run.command == "rl":
        (partial / "orchestrator").mkdir()
        (partial / "orchestrator" / "progress.json").write_text(json.dumps({"step": step}) + "\n")
    files = {str(p.relative_to(partial)): _fingerprint(p) for p in sorted(partial.rglob("*")) if p.is_file()}
    header = {"step": step, "config": config, "metrics": metrics, "files": files}
    (partial / HEADER).write_text(json.dumps(header, indent=2) + "\n")
    for path in (*(partial / name for name in files), partial / HEADER):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    shutil.rmtree(directory, ignore_errors=True)  # of a run that had gone further before it was resumed
    partial.rename(directory)
    kept = to_keep({s: _metric(p, policy.keep_best) for s, p in steps_in(run.checkpoints).items()}, policy)
    for other, path in steps_in(run.checkpoints).items():
        if other not in kept:
            shutil.rmtree(path)


def to_keep(metrics: dict[int, float | None], policy: CkptConfig) -> set[int]:
    """Of the steps with a checkpoint, and their values of keep_best's metric, those that stay."""
    kept = set(sorted(metrics)[-policy.keep :])
    if policy.keep_every:
        kept |= {step for step in metrics if step % policy.keep_every == 0}
    known = {step: value for step, value in metrics.items() if value is not None}
    if policy.keep_best and known:
        sign = -1 if "loss" in policy.keep_best else 1
        kept.add(max(known, key=lambda step: (sign * known[step], step)))
    return kept


def resume_from(run: RunDirectory, resume: bool | str) -> list[Path]:
    """The checkpoints that a run may go on from, best first; none: it starts at the start.

    True: the run's own, of which there must be one. "auto": if there is one. A path: that one. Raises ValueError.
    """
    if resume in (False, "never"):
        return []
    if isinstance(resume, str) and resume != "auto":
        if not (Path(resume) / HEADER).is_file():
            raise ValueError(f"--resume {resume}: no checkpoint there; it is auto, never, or a checkpoints/step_N")
        return [Path(resume)]
    found = steps_in(run.checkpoints)
    if not found and resume is True:
        raise ValueError(
            f"--resume: {run.path} has no checkpoint (--ckpt.interval N writes them); start again with --clean"
        )
    return [found[step] for step in sorted(found, reverse=True)]


def restore(sources: list[Path], optimizer: Optimizer, config: dict[str, Any]) -> int:
    """Puts weights and optimiser back from the first of these that is whole; returns its step, 0 without any.

    Raises ValueError where the run would not be the same, and where all are damaged.
    """
    for source in sources:
        try:
            header = read_header(source)
            tensors = load_file(source / TENSORS)
        except Damaged as error:
            logging.getLogger("hone").warning("Checkpoint %s is damaged and passed over: %s", source, error)
            continue
        for key, value in config.items():
            if key not in FREE_TO_CHANGE and key in header["config"] and header["config"][key] != value:
                raise ValueError(
                    f"--resume: {key} differs from the run in {source.parent.parent}: "
                    f"it had {header['config'][key]}, found {value}"
                )
        optimizer.load_state(tensors)
        step: int = header["step"]
        return step
    if sources:
        raise ValueError(f"--resume: none of {', '.join(map(str, sources))} is whole; start again with --clean")
    return 0


def forget_after(step: int, run: RunDirectory) -> None:
    """Removes what a run wrote after its checkpoint of `step`: those steps are taken again."""
    if run.metrics.exists():
        lines = [x for x in run.metrics.read_text().splitlines(keepends=True) if json.loads(x)["step"] <= step]
        partial = run.metrics.with_suffix(".partial")
        partial.write_text("".join(lines))
        partial.replace(run.metrics)
    places = [run.rollouts, run.checkpoints] if run.command == "rl" else [run.checkpoints]
    for directory in (d for place in places for d in place.glob("step_*")):
        number = directory.name.removeprefix("step_").removesuffix(".partial")
        if number.isdigit() and int(number) > step:
            shutil.rmtree(directory)


def read_header(directory: Path) -> dict[str, Any]:
    """The header of a whole checkpoint. Raises Damaged."""
    try:
        header: dict[str, Any] = json.loads((directory / HEADER).read_text())
        for name, fingerprint in header["files"].items():
            if _fingerprint(directory / name) != fingerprint:
                raise Damaged(f"{name} is not what was written")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from None
    return header


def _metric(directory: Path, name: str | None) -> float | None:
    if name is None:
        return None
    value = json.loads((directory / HEADER).read_text())["metrics"].get(name)
    return None if value is None else float(value)


def _fingerprint(path: Path) -> list[int]:
    """Size and CRC-32."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(2**24):
            crc = zlib.crc32(block, crc)
    return [path.stat().st_size, crc]
