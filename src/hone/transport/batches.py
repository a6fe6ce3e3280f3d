"""Transport of batches from the orchestrator to the trainer: an interface, and files.

    orchestrator ── put ──► rollouts/step_N/{rollouts.jsonl, progress.json, batch.safetensors} ── take ──► trainer

Directories are found by listing, not opened by name: after a failed look-up a network file system
may hide a new name for a minute. A batch carries the run's id, so that files of an earlier run are
ignored.
"""

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from hone.records import Batch, Sample
from hone.run_directory import Steps

BATCH = "batch.safetensors"
PROGRESS = "progress.json"


class Batches(ABC):
    """Transport of one run's batches."""

    @abstractmethod
    def put(self, batch: Batch, place: Path) -> None:
        """Send a batch; `place` is the directory of its step, about to be published."""

    @abstractmethod
    def take(self, step: int) -> Batch | None:
        """Return the batch of a step, None if the batch is not there yet.

        The batch can be taken again until `acknowledge` is called.
        """

    @abstractmethod
    def acknowledge(self, step: int) -> None:
        """Confirm that the step is done and saved; its batch is no longer needed."""


class FileBatches(Batches):
    """Batches as files in the directories of their steps: flat arrays with offsets."""

    def __init__(self, rollouts: Path, run: str) -> None:
        self.run = run
        self._steps = Steps(rollouts)

    def put(self, batch: Batch, place: Path) -> None:
        samples = batch.samples
        lengths = np.array([len(s.ids) for s in samples], dtype=np.int64)
        envs = sorted({s.env for s in samples})

        def flatten_field(name: str, dtype: Any) -> Any:
            return np.concatenate([np.empty(0, dtype), *(getattr(s, name) for s in samples)])

        def list_field(name: str) -> Any:
            return np.array([getattr(s, name) for s in samples], dtype=np.float64)

        arrays = {
            "lengths": lengths,
            "ids": flatten_field("ids", np.int64),
            "mask": flatten_field("mask", np.bool_),
            "logprobs": flatten_field("logprobs", np.float64),
            "advantage": list_field("advantage"),
            "temperature": list_field("temperature"),
            "env": np.array([envs.index(s.env) for s in samples], dtype=np.int64),
            "group": np.array([s.group for s in samples], dtype=np.int64),
            "member": np.array([s.member for s in samples], dtype=np.int64),
        }
        if any(s.routing is not None for s in samples):
            arrays["routing"] = routing_of(samples)
        known = [s.teacher_logprobs for s in samples if s.teacher_logprobs is not None]
        if known:
            arrays["has_teacher"] = np.array([s.teacher_logprobs is not None for s in samples])
            arrays["teacher_logprobs"] = np.concatenate(known)
        save_file(
            arrays,
            place / BATCH,
            metadata={"run": self.run, "step": str(batch.step), "envs": json.dumps(envs)},
        )

    def take(self, step: int) -> Batch | None:
        return (
            read_batch(self._steps.path_of(step) / BATCH, self.run)
            if step in self._steps.list_numbers()
            else None
        )

    def acknowledge(self, step: int) -> None:
        (self._steps.path_of(step) / BATCH).unlink(missing_ok=True)  # the rollouts stay


def read_batch(file: Path, run: str) -> Batch | None:
    """Read a batch; None if it belongs to another run."""
    with safe_open(file, framework="numpy") as reader:
        header = reader.metadata()
        if header["run"] != run:
            return None
        arrays = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    bounds = np.cumsum(arrays["lengths"])[:-1]
    of_each = ("advantage", "temperature", "group", "member")
    columns: dict[str, list[Any]] = {name: arrays[name].tolist() for name in of_each}
    envs = json.loads(header["envs"])
    columns["env"] = [envs[i] for i in arrays["env"].tolist()]
    for name in ("ids", "mask", "logprobs"):
        columns[name] = np.split(arrays[name], bounds)
    if "has_teacher" in arrays:
        lengths = np.where(arrays["has_teacher"], arrays["lengths"], 0)
        parts = np.split(arrays["teacher_logprobs"], np.cumsum(lengths)[:-1])
        has = arrays["has_teacher"].tolist()
        columns["teacher_logprobs"] = [
            x if there else None for x, there in zip(parts, has, strict=True)
        ]
    if "routing" in arrays:
        columns["routing"] = np.split(arrays["routing"], np.cumsum(arrays["lengths"] - 1)[:-1])
    each = zip(*columns.values(), strict=True)
    samples = (
        [Sample(**dict(zip(columns, values, strict=True))) for values in each]
        if len(arrays["lengths"])
        else []
    )
    return Batch(int(header["step"]), samples)


def routing_of(samples: list[Sample], spare: int = 0) -> NDArray[np.int16]:
    """Return the experts used by the samples' tokens, int16, -1 where unknown.

    A sample has one row for each of its tokens but the last, followed by `spare` rows of -1.
    """
    width = next(s.routing.shape[1] for s in samples if s.routing is not None)
    lengths = [len(s.ids) - 1 + spare for s in samples]
    rows = np.full((sum(lengths), width), -1, dtype=np.int16)
    start = 0
    for sample, length in zip(samples, lengths, strict=True):
        if sample.routing is not None:
            rows[start : start + len(sample.routing)] = sample.routing
        start += length
    return rows


def write_progress(progress: dict[str, Any], directory: Path) -> None:
    (directory / PROGRESS).write_text(json.dumps(progress) + "\n")


def read_progress(directory: Path) -> dict[str, Any] | None:
    """Return the progress saved in a step's directory, None if there is none."""
    try:
        progress: dict[str, Any] = json.loads((directory / PROGRESS).read_text())
    except FileNotFoundError:
        return None
    return progress
