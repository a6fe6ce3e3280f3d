"""Batches and weights as files of the run directory, published by rename and found by listing.

    orchestrator ── rollouts/step_N/{rollouts.jsonl, progress.json, batch.safetensors} ──► trainer
    trainer ── broadcasts/step_N/{model.safetensors, config.json, delivery.json, STABLE} ──► orchestrator, servers
               with LoRA once broadcasts/base/, and in step_N/ the adapter alone

Both carry the run's id, so that what an earlier run left behind is never taken for this one's. Directories are listed,
not asked for by name: a network file system may hide a new name for a minute from those who asked too early.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from hone.records import Batch, Sample

BATCH, PROGRESS = "batch.safetensors", "progress.json"
DELIVERY, STABLE, BASE = "delivery.json", "STABLE", "base"
TEXT = "text"  # tokenizer and template of all versions, beside them


class Superseded(Exception):
    """The trainer has gone on: the version that was asked for is no more."""


@dataclass(frozen=True)
class Canary:
    """A fixed sequence and the logprobs of its tokens after the first: what proves that two models are the same."""

    ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Delivery:
    """What the trainer says about published weights. `metrics` are those of the step that made them.

    `checksum` and `fingerprints`, one a weight, are of the whole model, also where only an adapter for `base` travels.
    """

    run: str
    version: int
    checksum: str
    dtype: str
    canary: Canary
    metrics: dict[str, float]
    fingerprints: dict[str, str] = field(default_factory=dict)
    is_adapter: bool = False
    source: str = ""  # where the weights are to be had, if not here (network.py)
    bytes: int = 0
    seconds: float = 0.0  # that writing took


def published(parent: Path) -> list[int]:
    """The steps that stand whole in broadcasts/ or rollouts/, in order."""
    try:
        names = os.listdir(parent)
    except FileNotFoundError:
        return []
    return sorted(int(name[5:]) for name in names if name.startswith("step_") and name[5:].isdigit())


def is_published(directory: Path) -> bool:
    """Whether this step_N directory has been published, and so is complete."""
    try:
        return directory.name in os.listdir(directory.parent)
    except FileNotFoundError:
        return False


# ---------------------------------------------------------------------------------------------- weights


def publish_delivery(partial: Path, delivery: Delivery) -> Path:
    """Completes a directory step_N.partial that holds the weights, and publishes it; what is there already goes."""
    (partial / DELIVERY).write_text(json.dumps(asdict(delivery)) + "\n")
    (partial / STABLE).touch()
    directory = partial.with_suffix("")
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)
    return directory


def read_delivery(directory: Path) -> Delivery | None:
    """What was delivered there; None where nothing is (it may have been removed by now)."""
    try:
        values = json.loads((directory / DELIVERY).read_text())
    except FileNotFoundError:
        return None
    return Delivery(**{**values, "canary": Canary(**values["canary"])})


def remove_before(parent: Path, step: int) -> None:
    """Removes the published directories of earlier steps."""
    for old in published(parent):
        if old < step:
            shutil.rmtree(parent / f"step_{old}", ignore_errors=True)


# ---------------------------------------------------------------------------------------------- batches


def write_batch(batch: Batch, run: str, directory: Path) -> None:
    """Writes the samples as flat arrays with offsets into a directory that is not published yet."""
    samples = batch.samples
    lengths = np.array([len(s.ids) for s in samples], dtype=np.int64)
    envs = sorted({s.env for s in samples})

    def flat(name: str, dtype: Any) -> Any:
        return np.array([x for s in samples for x in getattr(s, name)], dtype=dtype)

    def each(name: str) -> Any:
        return np.array([getattr(s, name) for s in samples], dtype=np.float64)

    arrays = {
        "lengths": lengths,
        "ids": flat("ids", np.int64),
        "mask": flat("mask", np.bool_),
        "logprobs": flat("logprobs", np.float64),
        "advantage": each("advantage"),
        "temperature": each("temperature"),
        "env": np.array([envs.index(s.env) for s in samples], dtype=np.int64),
    }
    known = [s.teacher_logprobs for s in samples if s.teacher_logprobs is not None]
    if known:
        arrays["has_teacher"] = np.array([s.teacher_logprobs is not None for s in samples])
        arrays["teacher_logprobs"] = np.array([x for one in known for x in one], dtype=np.float64)
    save_file(arrays, directory / BATCH, metadata={"run": run, "step": str(batch.step), "envs": json.dumps(envs)})


def write_progress(progress: dict[str, Any], directory: Path) -> None:
    (directory / PROGRESS).write_text(json.dumps(progress) + "\n")


def read_progress(directory: Path) -> dict[str, Any] | None:
    """What an orchestrator that goes on after the step of this directory needs to know; None where it was not said."""
    try:
        progress: dict[str, Any] = json.loads((directory / PROGRESS).read_text())
    except FileNotFoundError:
        return None
    return progress


def read_batch(directory: Path, run: str) -> Batch | None:
    """The batch there; None if it is of another run."""
    with safe_open(directory / BATCH, framework="numpy") as file:
        header = file.metadata()
        if header["run"] != run:
            return None
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    bounds = np.cumsum(arrays["lengths"])[:-1]
    columns: dict[str, list[Any]] = {name: arrays[name].tolist() for name in ("advantage", "temperature")}
    envs = json.loads(header["envs"])
    columns["env"] = [envs[i] for i in arrays["env"].tolist()]
    for name in ("ids", "mask", "logprobs"):
        columns[name] = [part.tolist() for part in np.split(arrays[name], bounds)]
    if "has_teacher" in arrays:
        lengths = np.where(arrays["has_teacher"], arrays["lengths"], 0)
        parts = np.split(arrays["teacher_logprobs"], np.cumsum(lengths)[:-1])
        has = arrays["has_teacher"].tolist()
        columns["teacher_logprobs"] = [x.tolist() if there else None for x, there in zip(parts, has, strict=True)]
    each = zip(*columns.values(), strict=True)
    samples = [Sample(**dict(zip(columns, values, strict=True))) for values in each] if len(arrays["lengths"]) else []
    return Batch(int(header["step"]), samples)
