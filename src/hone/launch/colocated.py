"""Run `rl` in one process, where sampler and trainer share the weights of one model.

    for each step:   collect (sample, score)  ─►  train on the batch  ─►  the weights are version N  ─►  save, log
                     event loop + compute thread   compute thread         the engine reads the same storage

A training step changes the sampler's weights in place; only weights with a LoRA adapter are merged
into copies. Training is on-policy: step N trains on rollouts sampled by version N-1. The compute
thread writes rollouts to disk after it has launched the forward and backward passes on the GPU;
writing them on another thread would delay the launches. If no evaluation, weights or checkpoint are
due after the step, it then also has the requests of the next step submitted, before the trainer's
metrics are read, so that the engine can start as soon as the training step ends.
"""

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from hone import preemption
from hone.config.rl_config import RLConfig
from hone.config.sections import ServeConfig
from hone.engine.cache_budget import plan_cache
from hone.engine.engine import Engine
from hone.engine.warm_up import compile_kernels
from hone.environments import Environment, load_environments
from hone.evals.held_out import evaluate_environments
from hone.inference import event_loop
from hone.inference.engine_service import EngineService, LocalClient
from hone.kernels.gpu.compiling import together
from hone.models.loading import Loaded, load_configured
from hone.models.lora import Merged
from hone.monitors import trackers
from hone.monitors.diagnosis_monitor import DiagnosisMonitor
from hone.monitors.events import EventList, Events
from hone.monitors.logging_setup import component_log
from hone.monitors.metrics_log import Metrics
from hone.monitors.progress_line import ProgressLine
from hone.monitors.step_lines import RLStepLines, RolloutLines, TrainerLines, format_outcome
from hone.orchestrator.orchestrator import Collected, Orchestrator
from hone.orchestrator.rollouts_file import tracker_rows, write_rollouts
from hone.orchestrator.teacher import Teacher
from hone.records import Batch
from hone.trainer.performance import fit_to_device, keep_freed_memory
from hone.trainer.rl.run_loop import run_rl_steps
from hone.trainer.rl.trainer import PolicyTrainer
from hone.trainer.run_session import RunSession, describe_training

T = TypeVar("T")
PREEMPTION_POLL_SECONDS = 0.2
# With a shorter rollout_timeout, rollouts do not start during training, which would use up their time.
MIN_TIMEOUT_TO_OVERLAP_SECONDS = 60.0


@dataclass
class Environments:
    """The environments of a run, by name."""

    training: dict[str, Environment]
    held_out: dict[str, Environment]

    @classmethod
    def load(cls, config: RLConfig, given: dict[str, Environment] | None) -> "Environments":
        """Load the configured environments; if environments are `given`, use those instead."""
        arguments = config.model.template_arguments
        evaluation = config.orchestrator.eval
        training = given or load_environments(config.orchestrator.env, arguments)
        if evaluation is None:
            return cls(training, {})
        return cls(training, given or load_environments(evaluation.env, arguments))


def main(
    config: RLConfig,
    callbacks: Events | None = None,
    environments: dict[str, Environment] | None = None,
) -> None:
    """Run the configuration in this process.

    Args:
        callbacks: receives the events of the run.
        environments: environments by name, used instead of the configured ones.
    """
    trackers.check_trackers(config.wandb, config.tensorboard)
    session = RunSession(config, "rl", "trainer")
    session.run.refuse_earlier(config.may_start_anew or bool(session.sources))
    keep_freed_memory()
    loaded_environments = Environments.load(config, environments)
    with ProgressLine("rl") as progress_line:
        progress_line.on_activity("loading the model")
        loaded = load_configured(config.model, config.seed, config.trainer.lora)
        settings = fit_to_device(config, loaded.model, component_log("trainer")).trainer
        trainer = PolicyTrainer(
            loaded.model, settings, config.max_steps, session.run.bad_steps, seed=config.seed
        )
        policy = SharedPolicy(config, loaded, trainer)
        session.begin(loaded, trainer.optimizer)
        component_log("orchestrator", session.run.logs)
        policy.update(session.done)
        progress_line.on_start(config.max_steps, session.done)
        with session.show_heartbeat(), Metrics(session.run.metrics, config) as metrics:
            rollouts = config.orchestrator
            monitor = DiagnosisMonitor(
                session.run, component_log("orchestrator"), session.done, rollouts.stop_when
            )
            logs = (
                RolloutLines(config, rollouts.log_samples, monitor, is_on_console=False),
                TrainerLines(config, is_on_console=False),
            )
            lines = RLStepLines(config)
            events = EventList(metrics, *logs, lines, monitor, progress_line, callbacks)
            service = EngineService(policy.engine, lockstep=True)
            program = run_in_process(session, trainer, policy, service, loaded_environments, events)
            service.run_beside(program, event_loop.run_event_loop)


class SharedPolicy:
    """Receiver of policy versions (PolicySink); its engine samples from the weights in training."""

    def __init__(self, config: RLConfig, loaded: Loaded, trainer: PolicyTrainer) -> None:
        limit = loaded.model.spec.max_position_embeddings
        serving = config.inference or ServeConfig()
        length = min(config.seq_len, serving.max_model_len or limit, limit)
        most_tokens = config.orchestrator.batch_size * length
        reserved = trainer.estimate_memory(most_tokens).step_bytes
        self.sampled = Merged(loaded.model)
        self.engine = Engine(
            self.sampled.model,
            max_model_len=length,
            **plan_cache(serving, loaded.model, length, reserved),
        )
        with together():
            compile_kernels(self.engine, config.orchestrator.batch_size)
            trainer.compile_kernels(most_tokens)

    def update(self, version: int) -> None:
        self.sampled.follow_step()
        self.engine.set_version(version)

    def publish(self, version: int, metrics: dict[str, float]) -> None:
        pass  # the engine reads the same storage


class InProcessSource:
    """A batch source: an orchestrator on the event loop of this process."""

    def __init__(
        self,
        session: RunSession,
        orchestrator: Orchestrator,
        service: EngineService,
        events: Events,
    ) -> None:
        self.session = session
        self.orchestrator = orchestrator
        self.service = service
        self.events = events
        self.config: RLConfig = session.config
        self.collected: Collected | None = None
        self.metrics = dict[str, float]()
        self.since = time.perf_counter()  # when work on the current step began

    async def take_batch(self, step: int) -> Batch | None:
        self.orchestrator.on_adopted(step - 1)
        work = self.orchestrator.collect_step(step, self.config.max_steps, self.since)
        collected = await unless_preempted(work)
        if collected is None:
            return None
        self.collected = collected
        return collected.batch

    def on_launched(self) -> None:
        assert self.collected is not None
        step = self.collected.batch.step
        self.metrics = self.collected.measure()
        write_rollouts(self.collected.groups, self.session.run.rollouts / f"step_{step}")
        if self.can_overlap(step):
            self.service.on_loop(partial(self.orchestrator.on_adopted, step))

    def can_overlap(self, step: int) -> bool:
        """Return True if the next step's requests may be submitted while this step is trained."""
        config = self.config
        session = self.session
        evaluation = config.orchestrator.eval
        is_last = step == config.max_steps
        return not (
            config.orchestrator.rollout_timeout < MIN_TIMEOUT_TO_OVERLAP_SECONDS
            or (evaluation is not None and evaluation.is_due(step, config.max_steps))
            or session.writes_weights(step, is_last)
            or session.checkpoints.is_due(step, is_last)
        )

    def read_metrics(self, step: int) -> dict[str, float]:
        assert self.collected is not None
        values = self.metrics
        now = time.perf_counter()
        values["time/step"], self.since = now - self.since, now
        values["perf/throughput"] = values["progress/tokens"] / values["time/step"]
        values["perf/kv_cache"] = self.service.engine.cache.nbytes / 2**30
        self.events.on_rollouts(step, values, partial(tracker_rows, step, self.collected.groups))
        return values

    def read_progress(self, step: int) -> dict[str, Any] | None:
        if self.collected is None or self.collected.batch.step != step:
            return self.session.progress
        return self.collected.progress

    def end_step(self, step: int) -> None:
        if not self.can_overlap(step):
            self.since = time.perf_counter()

    async def stop(self) -> None:
        await self.orchestrator.give_up()

    async def close(self) -> None:
        await self.orchestrator.close()


async def run_in_process(
    session: RunSession,
    trainer: PolicyTrainer,
    policy: SharedPolicy,
    service: EngineService,
    environments: Environments,
    events: Events,
) -> None:
    """Set up the orchestrator and run all training steps, on this event loop."""
    config: RLConfig = session.config
    tokenizer = session.loaded.tokenizer
    client = LocalClient(service, tokenizer)
    teacher = None
    if (wanted := config.orchestrator.teacher) is not None:
        limit = {"max_total_tokens": policy.engine.max_model_len}
        log = component_log("orchestrator")
        teacher = Teacher(wanted, config.orchestrator.rollout_timeout, limit, log)
    orchestrator = Orchestrator(
        config.orchestrator,
        environments.training,
        client,
        config.seed,
        teacher=teacher,
        count_tokens=lambda prompt: len(tokenizer.prompt_ids(prompt)),
    )
    orchestrator.go_on(session.done + 1, session.progress, session.run.rollouts)
    orchestrator.on_progress = partial(events.on_activity, "generating")
    if teacher is not None:
        await teacher.check_servers()
    data = f"on {orchestrator.count} examples of {', '.join(environments.training)}"
    log = component_log("trainer")
    log.info("%s", describe_training(session, data))

    async def evaluate_if_due(version: int) -> dict[str, float]:
        evaluation = config.orchestrator.eval
        if evaluation is None or not evaluation.is_due(version, config.max_steps):
            return {}
        events.on_activity("evaluating")
        return await evaluate_environments(evaluation, environments.held_out, client, config.seed)

    source = InProcessSource(session, orchestrator, service, events)
    last = await run_rl_steps(
        session, trainer, source, policy, events, service.run_on_engine, evaluate_if_due
    )
    for environment in environments.held_out.values():
        await environment.close()
    session.end(last)
    log.info("%s", format_outcome(session.run))


async def unless_preempted(work: Coroutine[Any, Any, T]) -> T | None:
    """Await `work`; cancel it and return None if the run was asked to stop."""
    task = asyncio.ensure_future(work)
    while not task.done():
        if preemption.is_asked():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
            return None
        await asyncio.wait([task], timeout=PREEMPTION_POLL_SECONDS)
    return task.result()
