"""Manage a training run's directory from start to end, for `sft` and the trainer of `rl`.

resume_from ─► begin: restore, claim, write configuration ─► save_step … ─► end, or leave (preempted)
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from hone.config.help import to_toml
from hone.kernels import cpu
from hone.models.eight_bit import count_weights
from hone.models.loading import Loaded
from hone.monitors.logging_setup import component_log
from hone.monitors.provenance import device_name, made_by
from hone.run_directory import RunDirectory
from hone.trainer.checkpoint import (
    Checkpoints,
    forget_after,
    metrics_of,
    progress_of,
    restore_checkpoint,
    resume_from,
)
from hone.trainer.optim import Optimizer
from hone.trainer.ranks import ALONE, Ranks
from hone.trainer.sharding import Export
from hone.trainer.weight_files import save_weights
from hone.transport.deadlines import Pulse


def rank_name(component: str, rank: int) -> str:
    return f"{component} rank {rank}" if rank else component


class RunSession:
    """One run of a training command. All ranks make the same calls; the first one writes.

    Attributes:
        component: name of the log and of the heartbeat file.
        config_name: name of the written configuration.
        run: the run's directory.
        done: step of the checkpoint that the run resumed from, 0 for a new run.
        metrics: metrics of that step.
        progress: the orchestrator's progress in that checkpoint (rl).
        max_steps: the last step; None while it is unknown (sft).
    """

    def __init__(
        self,
        config: Any,
        command: str,
        component: str,
        ranks: Ranks = ALONE,
        config_name: str | None = None,
    ) -> None:
        self.config = config
        self.component = component
        self.ranks = ranks
        self.config_name = config_name or command
        self.run = RunDirectory(config.output_dir, command, config.layout)
        self.sources = resume_from(self.run, config.resume)
        self.max_steps: int | None = config.max_steps
        self.done = 0
        self.metrics = dict[str, float]()
        self.progress: dict[str, Any] | None = None

    @property
    def _claim(self) -> dict[str, Any]:
        config = self.config
        steps = self.max_steps
        return {
            "clean": config.may_start_anew,
            "resume": bool(self.sources),
            "weight_steps": config.weights.list_steps(steps) if steps else [],
        }

    def check_claim(self) -> None:
        """Raise ValueError if the run may not use its directory. Call this before slow work."""
        if self.ranks.is_first:
            self.run.check_claim(**self._claim)

    def begin(self, loaded: Loaded, optimizer: Optimizer) -> None:
        """Restore the checkpoint, claim the directory, and record the configuration. Collective.

        Raises ValueError if the run cannot be resumed or may not use the directory.
        """
        config = self.config
        run = self.run
        self.loaded = loaded
        device = optimizer.parameters[0].device
        self.done = restore_checkpoint(self.sources, optimizer, config, self.ranks)
        self.metrics = metrics_of(self.sources, self.done)
        self.progress = progress_of(self.sources, self.done)
        self.ranks.barrier()  # no rank reads what the first one is about to change
        if self.ranks.is_first:
            run.claim_run(**self._claim)
            component_log(self.component, run.logs)
            if self.sources:
                forget_after(self.done, run)
            run.write_config(to_toml(config), self.config_name)
            run.keep_tokenizer(loaded.directory)
            run.write_facts(device=device_name(device, self.ranks.count), **made_by())
        self.ranks.barrier()  # the run has its id
        run.id = run.id_on_disk()
        self.export = Export(loaded.model, self.ranks, loaded.dtype)
        self.checkpoints = Checkpoints(run, optimizer, config.ckpt, self.ranks)

    @contextlib.contextmanager
    def show_heartbeat(self) -> Iterator[None]:
        """Context manager in which this rank's heartbeat file is updated, to show that it is alive."""
        with Pulse(self.run.pulse_file(rank_name(self.component, self.ranks.rank))):
            yield

    def writes_weights(self, step: int, is_last: bool) -> bool:
        """Return True if the weights of this step are to be written to files."""
        interval = self.config.weights.interval
        return is_last or bool(interval and step % interval == 0)

    def save_step(
        self,
        step: int,
        is_last: bool,
        values: dict[str, float],
        progress: dict[str, Any] | None = None,
    ) -> None:
        """Write the weights and the checkpoint of a step, if they are due. Collective."""
        if self.writes_weights(step, is_last):
            name = self.config.model.name
            last = self.max_steps or step
            save_weights(self.export, self.run, step, last, self.loaded, name, values)
        self.checkpoints.save_if_due(step, is_last, self.config.to_public_dict(), values, progress)

    def leave(self, step: int, values: dict[str, float], progress: Any = None) -> None:
        """End a run early after this step, with a checkpoint. Raises Preempted. Collective."""
        self.checkpoints.leave_run(step, self.config.to_public_dict(), values, progress)

    def end(self, step: int) -> None:
        """Record that the run is complete after this step."""
        if self.ranks.is_first:
            self.run.note_end(step)


def describe_training(session: RunSession, data: str) -> str:
    """Return the log line of a run's start: model, device, data and steps."""
    loaded = session.loaded
    ranks = session.ranks
    weight = loaded.model.embed.weight
    parameters = count_weights(loaded.model) / 1e6
    devices = cpu.words(weight.device.type) + (f" x {ranks.count}" if ranks.count > 1 else "")
    return (
        f"Training {session.config.model.name} ({parameters:.2f}M parameters, "
        f"{str(loaded.dtype)[6:]} on {devices}) {data}, steps {session.done + 1} to {session.max_steps}"
    )
