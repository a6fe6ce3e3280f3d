"""Write and read checkpoints: checkpoints/step_N, which is complete or absent.

    checkpoint.json                  step, configuration, metrics of the step; size and CRC-32 of every file
    trainer/                         fp32 weights and moments, in torch's distributed format (DCP): one file per rank
    orchestrator/progress.json       (rl) position in the examples, groups in flight, groups kept for replay

The state is copied to the CPU and written while training continues; offloaded state
(`optim.offload`) is written without a copy while training waits. The files are written to a
temporary directory, which is renamed when all of them are on disk. If a checkpoint is damaged, the
reason is logged and the previous checkpoint is used. A checkpoint can be loaded by a different
number of ranks than wrote it.
"""

import json
import logging
import os
import shutil
import threading
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hone.config.base import Config, find_differences
from hone.config.key_names import key_name
from hone.config.sections import CkptConfig
from hone.monitors.metrics_log import read_rows
from hone.preemption import Preempted
from hone.run_directory import RunDirectory, rewrite_file, steps_in
from hone.trainer.optim import Optimizer
from hone.trainer.ranks import Ranks
from hone.transport.batches import read_progress, write_progress

HEADER = "checkpoint.json"
TENSORS = "trainer"


class Damaged(Exception):
    """Raised for an unusable checkpoint, with the reason."""


class Checkpoints:
    """Write a run's checkpoints in the background; all ranks save together."""

    def __init__(
        self, run: RunDirectory, optimizer: Optimizer, policy: CkptConfig | None, ranks: Ranks
    ) -> None:
        self.run = run
        self.optimizer = optimizer
        self.policy = policy
        self.ranks = ranks
        self._group: Any = None  # group for messages between the ranks' writers
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._last = time.monotonic()  # start of the last checkpoint, or of the run
        self._due: tuple[int, bool] = 0, False  # step, and if a checkpoint is due by time after it

    def leave_run(
        self,
        step: int,
        config: dict[str, Any],
        metrics: dict[str, float],
        progress: dict[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint of step `step` unless it exists; raise Preempted. Collective.

        Writes none before step 1 or if `ckpt` is None.
        """
        self.wait_until_written()
        if self.policy is None:
            raise Preempted(
                f"stopped after step {step} as requested; it cannot be resumed: ckpt is None",
                can_resume=False,
            )
        if step and not (self.run.checkpoints / f"step_{step}").exists():
            self._start_saving(step, True, config, metrics, progress)
        kept = f"its checkpoint is in {self.run.checkpoints}" if step else "nothing was to be kept"
        raise Preempted(
            f"stopped after step {step} as requested; {kept}; --resume auto continues the run"
        )

    def is_due(self, step: int, is_last: bool) -> bool:
        """Return True if this step gets a checkpoint; the same on all ranks."""
        if self.policy is None:
            return False
        interval = self.policy.interval or self.policy.keep_every
        if interval is not None:
            return is_last or step % interval == 0
        if self._due[0] != step:
            is_late = time.monotonic() - self._last >= 60 * self.policy.minutes
            device = self.optimizer.parameters[0].device
            self._due = step, self.ranks.any_rank(is_late and self.ranks.is_first, device)
        return self._due[1]

    def save_if_due(
        self,
        step: int,
        is_last: bool,
        config: dict[str, Any],
        metrics: dict[str, float],
        progress: dict[str, Any] | None = None,
    ) -> None:
        """Start to write the step's checkpoint in the background if it is due.

        Waits for the previous checkpoint to be written and, in the last step, also for this one.
        """
        if self.is_due(step, is_last):
            self._start_saving(step, is_last, config, metrics, progress)

    def _start_saving(
        self,
        step: int,
        is_last: bool,
        config: dict[str, Any],
        metrics: dict[str, float],
        progress: dict[str, Any] | None,
    ) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import async_save, save

        self.wait_until_written()
        self._last = time.monotonic()
        directory = self.run.checkpoints / f"step_{step}"
        partial = directory.with_name(directory.name + ".partial")
        if self.ranks.is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self.ranks.barrier()
        if self._group is None and self.ranks.count > 1:
            self._group = torch.distributed.new_group(backend="gloo")
        expect_to_be_alone()
        # The data is on the CPU by then; without copy-ahead the writing thread leaves the device
        # alone.
        writer = FileSystemWriter(partial / TENSORS, per_thread_copy_ahead=0)
        state = self.optimizer.state_tensors()
        written = None
        # A copy would double the host memory, so training waits.
        if self.optimizer.is_away:
            save(state, storage_writer=writer, process_group=self._group)
        else:
            written = async_save(state, storage_writer=writer, process_group=self._group)
        header = {"step": step, "config": config, "metrics": metrics}
        orchestrator = progress or {"step": step}

        def finish_writing() -> None:
            try:
                if written is not None:
                    written.result()  # type: ignore[union-attr]  # on the first rank: when all have written
                if self.ranks.is_first:
                    self._publish_checkpoint(partial, directory, header, orchestrator)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=finish_writing)
        self._thread.start()
        if is_last:
            self.wait_until_written()

    def wait_until_written(self) -> None:
        """Wait until the pending checkpoint is written. Raises the error of a failed write."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self.ranks.barrier()
        if self._error is not None:
            raise self._error

    def _publish_checkpoint(
        self, partial: Path, directory: Path, header: dict[str, Any], orchestrator: dict[str, Any]
    ) -> None:
        assert self.policy is not None
        if self.run.command == "rl":
            (partial / "orchestrator").mkdir()
            write_progress(orchestrator, partial / "orchestrator")
        files = {
            str(p.relative_to(partial)): _file_fingerprint(p)
            for p in sorted(partial.rglob("*"))
            if p.is_file()
        }
        (partial / HEADER).write_text(json.dumps(header | {"files": files}, indent=2) + "\n")
        for path in (*(partial / name for name in files), partial / HEADER):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        # Left by a run that had gone further before it was resumed.
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
        found = steps_in(self.run.checkpoints)
        kept = to_keep(_read_metric(found, self.policy.keep_best, self.run.metrics), self.policy)
        for other, path in found.items():
            if other not in kept:
                shutil.rmtree(path)


def to_keep(metrics: dict[int, float | None], policy: CkptConfig) -> set[int]:
    """Return the steps whose checkpoints are kept, by `keep`, `keep_every` and `keep_best`.

    With `keep_best`, the best checkpoint is kept, and also the last 3 checkpoints after the newest
    one whose metric is known: an evaluation may end after the checkpoint of its step is written.

    Args:
        metrics: for each step with a checkpoint, the value of the metric `policy.keep_best`; None
            if the value is not known yet.
    """
    kept = set(sorted(metrics)[-policy.keep :])
    if policy.keep_every:
        kept |= {step for step in metrics if step % policy.keep_every == 0}
    known = {step: value for step, value in metrics.items() if value is not None}
    if policy.keep_best and known:
        sign = -1 if "loss" in policy.keep_best else 1
        kept.add(max(known, key=lambda step: (sign * known[step], step)))
    if policy.keep_best:
        kept |= set(sorted(step for step in metrics if step > max(known, default=-1))[-3:])
    return kept


def resume_from(run: RunDirectory, resume: bool | str) -> list[Path]:
    """Return the checkpoints to try to resume from, newest first; none for a new run.

    Args:
        resume: True: the run's own checkpoints, of which one must exist; "auto": the run's own, if
            any; a path: that checkpoint; False or "never": none.

    Raises ValueError if a required checkpoint does not exist, or if "auto" finds weights of a run
    but no checkpoint.
    """
    if resume in (False, "never"):
        return []
    if isinstance(resume, str) and resume != "auto":
        if not (Path(resume) / HEADER).is_file():
            raise ValueError(
                f"{key_name('--resume')} {resume}: no checkpoint there; it is auto, never, or a checkpoints/step_N"
            )
        return [Path(resume)]
    found = steps_in(run.checkpoints)
    if not found and resume == "auto" and run.has_weights():
        raise ValueError(
            f"--resume auto: {run.path} has weights of a run, and no checkpoint to resume from "
            f"({key_name('--ckpt.interval N')} writes them); start again with {key_name('--clean')}, or choose "
            f"another directory ({key_name('--output-dir DIR')})"
        )
    if not found and resume is True:
        raise ValueError(
            f"{key_name('--resume')}: {run.path} has no checkpoint ({key_name('--ckpt.interval N')} writes them); "
            f"start again with {key_name('--clean')}"
        )
    return [found[step] for step in sorted(found, reverse=True)]


def step_of(source: Path) -> int:
    """Return the step of a checkpoint by its header, 0 if unreadable."""
    try:
        return int(json.loads((source / HEADER).read_text())["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def restore_checkpoint(
    sources: list[Path], optimizer: Optimizer, config: Config, ranks: Ranks | None = None
) -> int:
    """Load weights and optimizer state from the first undamaged checkpoint; return its step.

    Returns 0 if `sources` is empty. Raises ValueError if the checkpoint's configuration differs
    from `config` in a key that must stay the same, or if all checkpoints are damaged. Collective.
    """
    ranks = ranks or Ranks()
    at = len(sources)
    if ranks.is_first:  # other ranks need not verify it
        at = next((i for i, source in enumerate(sources) if is_whole(source)), len(sources))
    device = optimizer.parameters[0].device
    at = ranks.all_reduce_max(at if ranks.is_first else 0, device)
    if sources and at == len(sources):
        raise ValueError(
            f"{key_name('--resume')}: none of {', '.join(map(str, sources))} is whole; start again with "
            f"{key_name('--clean')}"
        )
    if not sources:
        return 0
    header = json.loads((sources[at] / HEADER).read_text())
    refuse_changes(header["config"], config, sources[at])
    load_tensors(sources[at], optimizer.state_tensors())
    optimizer.follow_masters()
    step: int = header["step"]
    logging.getLogger("hone").info("Resuming from %s", sources[at])
    return step


def refuse_changes(before: dict[str, Any], now: Config, source: Path) -> None:
    """Raise ValueError if a key of the configuration that must not change on resume has changed."""
    for key, was, found in find_differences(before, now):
        run, step = source.parent.parent, source.name.removeprefix("step_")
        how = (
            f"{key_name('--fork')} {run}@{step}"
            if now.CAN_FORK
            else f"{key_name('--model.name')} {run}/weights/step_{step} in another {key_name('--output-dir')}"
        )
        raise ValueError(
            f"{key_name('--resume')}: {key_name(key)} differs from the run in {run}: it had {was}, found {found}; "
            f"with other keys it is a new run: {how}"
        )


def progress_of(sources: list[Path], step: int) -> dict[str, Any] | None:
    """Return the orchestrator's saved state from the checkpoint of step `step`, None if missing."""
    for source in sources:
        found = read_progress(source / "orchestrator")
        if found is not None and found["step"] == step and "next" in found:
            return found
    return None


def metrics_of(sources: list[Path], step: int) -> dict[str, float]:
    """Return the metrics in the checkpoint of that step."""
    for source in sources:
        if source.name == f"step_{step}":
            metrics: dict[str, float] = json.loads((source / HEADER).read_text())["metrics"]
            return metrics
    return {}


def is_whole(source: Path) -> bool:
    """Return True if a checkpoint is usable; log the reason otherwise."""
    try:
        read_header(source)
    except Damaged as error:
        logging.getLogger("hone").warning("Checkpoint %s is damaged and skipped: %s", source, error)
        return False
    return True


def load_tensors(source: Path, tensors: dict[str, Tensor]) -> None:
    """Load a checkpoint's tensors, by name, in place into `tensors`, which may be sharded."""
    from torch.distributed.checkpoint.state_dict_loader import load

    expect_to_be_alone()
    with torch.no_grad():
        load(tensors, checkpoint_id=source / TENSORS)


def expect_to_be_alone() -> None:
    """Silence torch's warning about saving without torch.distributed, in all threads."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def forget_after(step: int, run: RunDirectory) -> None:
    """Remove metrics, rollouts and checkpoints of steps after `step`, which a resumed run repeats."""
    if run.metrics.exists():
        rows = [row for row in read_rows(run.metrics) if row["step"] <= step]
        rewrite_file(run.metrics, "".join(json.dumps(row) + "\n" for row in rows))
    places = [run.rollouts, run.checkpoints] if run.command == "rl" else [run.checkpoints]
    for directory in (d for place in places for d in place.glob("step_*")):
        number = directory.name.removeprefix("step_").removesuffix(".partial")
        if number.isdigit() and int(number) > step:
            shutil.rmtree(directory)


def read_header(directory: Path) -> dict[str, Any]:
    """Verify a checkpoint's files and return its header. Raises Damaged."""
    try:
        header: dict[str, Any] = json.loads((directory / HEADER).read_text())
        for name, fingerprint in header["files"].items():
            if _file_fingerprint(directory / name) != fingerprint:
                raise Damaged(f"{name} is not what was written")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from None
    return header


def _read_metric(found: dict[int, Path], name: str | None, file: Path) -> dict[int, float | None]:
    """Return metric `name` of each checkpoint, from its header or else from metrics.jsonl (`file`)."""
    values: dict[int, float | None] = dict.fromkeys(found)
    if name is not None:
        values |= {
            row["step"]: row[name]
            for row in read_rows(file)
            if row["step"] in found and name in row
        }
        for step, directory in found.items():
            own = json.loads((directory / HEADER).read_text())["metrics"].get(name)
            values[step] = values[step] if own is None else own
    return values


def _file_fingerprint(path: Path) -> list[int]:
    """Return size and CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(2**24):
            crc = zlib.crc32(block, crc)
    return [path.stat().st_size, crc]
