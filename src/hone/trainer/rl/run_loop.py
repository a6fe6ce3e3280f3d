"""The loop of an RL run: a batch in, an optimizer step, a new version of the policy out.

    BatchSource ── take_batch ──► PolicyTrainer.begin_step ──► PolicySink.update ─► RunSession.save_step ─► publish
    an orchestrator, or files                                  samplers read the same storage, or a published copy

`launch/colocated.py` runs this loop with an orchestrator in the same process, `trainer/rl/train.py`
with an orchestrator in another process.
"""

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from hone import preemption
from hone.monitors.events import Events
from hone.records import Batch
from hone.trainer.rl.trainer import PolicyTrainer
from hone.trainer.run_session import RunSession

T = TypeVar("T")


class BatchSource(Protocol):
    """Source of a run's batches."""

    async def take_batch(self, step: int) -> Batch | None:
        """Return the batch of a step, or None if the run was asked to stop."""

    def on_launched(self) -> None:
        """Do host work while the GPU runs forward and backward; called on the compute thread."""

    def read_metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of a step's rollouts; called after the step has been trained on."""

    def read_progress(self, step: int) -> dict[str, Any] | None:
        """Return the state that a run needs to resume after this step."""

    def end_step(self, step: int) -> None:
        """Confirm that the step is done and saved."""

    async def stop(self) -> None:
        """Cancel the groups in flight, since no further batch will be taken."""

    async def close(self) -> None:
        """Release the resources of the source."""


class PolicySink(Protocol):
    """Receiver of new policy versions, which passes them on to the samplers."""

    def update(self, version: int) -> None:
        """Update samplers that share the trainer's weights; called on the compute thread."""

    def publish(self, version: int, metrics: dict[str, float]) -> None:
        """Deliver a version with the metrics of its step; called on the compute thread."""


async def call_here(function: Callable[[], T]) -> T:
    return function()


async def evaluate_never(version: int) -> dict[str, float]:
    return {}


async def run_rl_steps(
    session: RunSession,
    trainer: PolicyTrainer,
    source: BatchSource,
    sink: PolicySink,
    events: Events,
    compute: Callable[[Callable[[], Any]], Awaitable[Any]] = call_here,
    evaluate: Callable[[int], Awaitable[dict[str, float]]] = evaluate_never,
) -> int:
    """Run the remaining steps of a run; return the number of the last one.

    Args:
        compute: runs a function on the thread that owns the device.
        evaluate: returns the metrics of an evaluation of a version, empty if none is due.

    Raises:
        Preempted: the run was asked to stop; its checkpoint is written if `ckpt` is configured.
    """
    max_steps = session.config.max_steps
    values = session.metrics
    preemption.steps_begin()
    await compute(partial(sink.publish, session.done, values))
    if session.done == 0 and (found := await evaluate(0)):
        events.on_evaluation(0, found, True)
    step = session.done
    for step in range(session.done + 1, max_steps + 1):
        batch = await source.take_batch(step)
        if batch is None:
            await source.close()
            progress = source.read_progress(step - 1)
            await compute(partial(session.leave, step - 1, values, progress))
            return step - 1  # not reached: `leave` raises
        events.on_activity("training")
        read_numbers = await compute(partial(_launch_step, session, trainer, source, sink, batch))
        trained = await compute(read_numbers)
        values = source.read_metrics(step) | trained
        events.on_trained(step, values)
        if found := await evaluate(step):
            events.on_evaluation(step, found, False)
            values |= found
        # The row is written before the checkpoint, so that a run that resumes from it has the row.
        goes_on = events.on_step(step, values)
        is_last = step == max_steps or not goes_on
        if is_last:
            await source.stop()
        progress = source.read_progress(step)
        await compute(partial(_save_and_publish, session, sink, step, is_last, values, progress))
        if events.awaits_weights and session.writes_weights(step, is_last):
            await compute(session.checkpoints.wait_until_written)
            events.on_weights(session.run.weights_of(step))
        source.end_step(step)
        if is_last:
            break
    await source.close()
    return step


def _launch_step(
    session: RunSession,
    trainer: PolicyTrainer,
    source: BatchSource,
    sink: PolicySink,
    batch: Batch,
) -> Callable[[], dict[str, float]]:
    """Launch a training step; return a function that waits for its metrics."""
    numbers = trainer.begin_step(batch, source.on_launched)
    sink.update(batch.step)

    def read_numbers() -> dict[str, float]:
        values = numbers()
        if trainer.trained is not None:
            directory = session.run.rollouts / f"step_{batch.step}"
            trainer.trained.write_files(directory, session.ranks.rank)
        return values

    return read_numbers


def _save_and_publish(
    session: RunSession,
    sink: PolicySink,
    step: int,
    is_last: bool,
    values: dict[str, float],
    progress: dict[str, Any] | None,
) -> None:
    start = time.perf_counter()
    session.save_step(step, is_last, values, progress)
    sink.publish(step, values | {"time/save": time.perf_counter() - start})
