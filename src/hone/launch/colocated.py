"""`rl` in one process: sampler and trainer share one model, so a weight update copies only merged
adapters.

    for each step:   collect (sample, score)  ─►  train on the batch  ─►  the weights are version N  ─►  save, log
                     event loop + compute thread   compute thread         the engine reads the same storage

On-policy: step N is sampled by version N - 1. Rollouts are written to disk while a GPU computes
what the trainer has launched; a thread would delay its launches. If nothing else is due before the
next step, its requests are made meanwhile, so that the engine starts when the trainer ends. The
trainer's numbers are read after that.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hone import preemption
from hone.config.help import to_toml
from hone.config.rl_config import RLConfig
from hone.config.sections import ServeConfig
from hone.engine.cache_budget import plan_cache
from hone.engine.engine import Engine
from hone.engine.warm_up import compile_kernels
from hone.environments import Environment, load_environments
from hone.evals.held_out import evaluate_environments
from hone.inference import event_loop
from hone.inference.engine_service import EngineService, LocalClient
from hone.kernels import cpu
from hone.kernels.gpu.compiling import together
from hone.launch.run_callbacks import Watcher
from hone.models.loading import Loaded, load_configured
from hone.models.lora import Merged
from hone.monitors import trackers
from hone.monitors.logging_setup import component_log
from hone.monitors.metrics_log import Metrics
from hone.monitors.progress_line import Live
from hone.monitors.provenance import device_name, made_by
from hone.monitors.report import StepReport
from hone.monitors.step_lines import whole_run_line
from hone.orchestrator.orchestrator import Collected, Orchestrator
from hone.orchestrator.rollouts_file import tracker_rows, write_rollouts
from hone.orchestrator.teacher import Teacher
from hone.run_directory import RunDirectory
from hone.trainer.checkpoint import (
    Checkpoints,
    forget_after,
    progress_of,
    restore_checkpoint,
    resume_from,
)
from hone.trainer.performance import keep_freed_memory
from hone.trainer.rl.trainer import PolicyTrainer
from hone.trainer.sharding import Export
from hone.trainer.weight_files import save_weights
from hone.transport.deadlines import Pulse

T = TypeVar("T")
LOOK = 0.2  # seconds between looks whether the run is asked to end
LONG = 60.0  # seconds that a rollout may take: of fewer, none is spent on waiting for the end of a step of training


def main(
    config: RLConfig,
    watcher: Watcher | None = None,
    environments: dict[str, Environment] | None = None,
) -> None:
    """Run the configuration in this process.

    Args:
        watcher: receives the events of the run.
        environments: by name, instead of those of the configuration.
    """
    trackers.check_trackers(config.wandb, config.tensorboard)
    run = RunDirectory(config.output_dir, "rl", config.layout)
    sources = resume_from(run, config.resume)
    run.refuse_earlier(config.may_start_anew or bool(sources))  # before seconds of loading
    keep_freed_memory()
    own, evaluation = environments, config.orchestrator.eval
    environments = own or load_environments(
        config.orchestrator.env, config.model.template_arguments
    )
    held_out = (
        {}
        if evaluation is None
        else own or load_environments(evaluation.env, config.model.template_arguments)
    )
    with Live("rl") as live:
        live.show_activity("loading the model")
        carry_out(config, run, sources, environments, held_out, watcher, live)


def carry_out(
    config: RLConfig,
    run: RunDirectory,
    sources: list[Path],
    environments: dict[str, Environment],
    held_out: dict[str, Environment],
    watcher: Watcher | None,
    live: Live,
) -> None:
    loaded = load_configured(config.model, seed=config.seed)
    trainer = PolicyTrainer(
        loaded.model, config.trainer, config.max_steps, run.bad_steps, seed=config.seed
    )
    limit, serving = loaded.model.spec.max_position_embeddings, config.inference or ServeConfig()
    length = min(config.seq_len, serving.max_model_len or limit, limit)
    most_tokens = config.orchestrator.batch_size * length
    sampled = Merged(loaded.model)
    engine = Engine(
        sampled.model,
        max_model_len=length,
        **plan_cache(
            serving, loaded.model, length, trainer.estimate_memory(most_tokens).step_bytes
        ),
    )
    live.show_activity("preparing")
    with together():
        compile_kernels(engine, config.orchestrator.batch_size)
        trainer.compile_kernels(most_tokens)
    weight_steps = config.weights.list_steps(config.max_steps)
    first = 1 + restore_checkpoint(sources, trainer.optimizer, config)
    sampled.follow_step()
    run.claim_run(clean=config.may_start_anew, resume=bool(sources), weight_steps=weight_steps)
    if sources:
        forget_after(first - 1, run)
    run.write_config(to_toml(config))
    run.keep_tokenizer(loaded.directory)
    run.write_facts(device=device_name(trainer.device), **made_by())
    live.start_run(config.max_steps, first - 1)
    with Pulse(run.pulse_file("trainer")), Metrics(run.metrics, config) as metrics:
        service = EngineService(engine, lockstep=True)
        progress = progress_of(sources, first - 1)
        steps = (first, weight_steps, progress, live)
        program = run_training_loop(
            config,
            loaded,
            environments,
            held_out,
            service,
            trainer,
            sampled,
            run,
            metrics,
            watcher,
            *steps,
        )
        service.run_beside(program, event_loop.run_event_loop)


async def run_training_loop(
    config: RLConfig,
    loaded: Loaded,
    environments: dict[str, Environment],
    held_out: dict[str, Environment],
    service: EngineService,
    trainer: PolicyTrainer,
    sampled: Merged,
    run: RunDirectory,
    metrics: Metrics,
    watcher: Watcher | None,
    first: int,
    weight_steps: list[int],
    progress: dict[str, Any] | None,
    live: Live,
) -> None:
    orchestrator_log, trainer_log = (
        component_log("orchestrator", run.logs),
        component_log("trainer", run.logs),
    )
    service.engine.set_version(first - 1)
    client = LocalClient(service, loaded.tokenizer)
    wanted = config.orchestrator.teacher
    limit = {"max_total_tokens": service.engine.max_model_len}
    teacher = (
        Teacher(wanted, config.orchestrator.rollout_timeout, limit, orchestrator_log)
        if wanted
        else None
    )
    orchestrator = Orchestrator(
        config.orchestrator,
        environments,
        client,
        config.seed,
        teacher=teacher,
        count_tokens=lambda prompt: len(loaded.tokenizer.prompt_ids(prompt)),
    )
    orchestrator.go_on(first, progress, run.rollouts)
    orchestrator.heard = partial(live.show_activity, "generating")
    if teacher is not None:
        await teacher.check_servers()
    trainer_log.info(
        "Training %s (%.2fM parameters, %s on %s) on %d examples of %s, steps %d to %d",
        config.model.name,
        sum(p.numel() for p in loaded.model.parameters()) / 1e6,
        str(loaded.model.embed.weight.dtype)[6:],
        cpu.words(str(trainer.device)),
        orchestrator.count,
        ", ".join(environments),
        first,
        config.max_steps,
    )
    export = Export(loaded.model, trainer.ranks, loaded.dtype)
    checkpoints = Checkpoints(run, trainer.optimizer, config.ckpt, trainer.ranks)
    evaluation = config.orchestrator.eval
    of_rollouts, of_training = (
        StepReport(log, config.max_steps, config.log_interval, metrics)
        for log in (orchestrator_log, trainer_log)
    )

    async def evaluate_if_due(version: int) -> dict[str, float]:
        """Return the metrics of an evaluation of this version, empty if none is due."""
        if evaluation is None or not evaluation.is_due(version, config.max_steps):
            return {}
        live.show_activity("evaluating")
        found = await evaluate_environments(evaluation, held_out, client, config.seed)
        of_rollouts.report_evaluation(version, found)
        return found

    def leads_on(step: int) -> bool:
        """Return True if the next step follows at once."""
        is_evaluated = evaluation is not None and evaluation.is_due(step, config.max_steps)
        is_saved = step in weight_steps or checkpoints.is_due(step, step == config.max_steps)
        return config.orchestrator.rollout_timeout >= LONG and not (is_evaluated or is_saved)

    values: dict[str, float] = {}
    preemption.steps_begin()
    before = await evaluate_if_due(0) if first == 1 else {}
    if before:
        of_rollouts.write_row(0, before)
    start = time.perf_counter()
    for step in range(first, config.max_steps + 1):
        orchestrator.on_adopted(step - 1)
        collected = await unless_asked(orchestrator.collect_step(step, config.max_steps, start))
        if collected is None:
            await orchestrator.close()
            await service.run_on_engine(
                partial(checkpoints.leave_run, step - 1, config.to_public_dict(), values, progress)
            )
            return
        live.show_activity("training")
        is_plain = leads_on(step)
        begin = partial(orchestrator.on_adopted, step) if is_plain else None
        place = run.rollouts / f"step_{step}"
        numbers = await service.run_on_engine(
            partial(train_step, trainer, sampled, service, collected, place, begin)
        )
        now = time.perf_counter()
        seconds, start = now - start, now
        trained = await service.run_on_engine(numbers)
        values = {**trained, "time/step": seconds}
        of_rollouts.report_rollouts(step, values)
        of_rollouts.report_samples(
            step, partial(tracker_rows, step, collected.groups), config.orchestrator.log_samples
        )
        of_training.report_training(step, values)
        values |= await evaluate_if_due(step)
        # Before the checkpoint: a run that resumes from it has the row
        of_rollouts.report_step(step, values)
        goes_on = watcher is None or watcher.on_step({"step": step, **values})
        is_last = step == config.max_steps or not goes_on
        if not goes_on:
            await orchestrator.give_up()
        if step in weight_steps or not goes_on:
            save = partial(
                save_weights, export, run, step, config.max_steps, loaded, config.model.name, values
            )
            await service.run_on_engine(save)
        live.show_step(f"reward {values['reward/mean']:.4f}")
        progress = collected.progress
        if checkpoints.is_due(step, is_last):
            await service.run_on_engine(
                partial(
                    checkpoints.save_if_due,
                    step,
                    is_last,
                    config.to_public_dict(),
                    values,
                    progress,
                )
            )
        if watcher is not None and (step in weight_steps or not goes_on):
            # What is told to be saved can be gone on with
            await service.run_on_engine(checkpoints.wait_until_written)
            watcher.on_weights(run.weights_of(step))
        if not goes_on:
            break
        if not is_plain:
            start = time.perf_counter()
    await orchestrator.close()
    for environment in held_out.values():
        await environment.close()
    last = step if first <= config.max_steps else first - 1
    run.note_end(last)
    trainer_log.info("Weights of step %d in %s", last, run.weights_of(last))
    trainer_log.info("%s", whole_run_line(run))


def train_step(
    trainer: PolicyTrainer,
    sampled: Merged,
    service: EngineService,
    collected: Collected,
    directory: Path,
    begin: Callable[[], None] | None,
) -> Callable[[], dict[str, float]]:
    """Launch a training step, update the sampler, and return a function that waits for the numbers.

    Meanwhile the rollouts are measured and written, and the event loop may `begin` the next step's
    sampling.
    """
    values: dict[str, float] = {}

    def work_meanwhile() -> None:
        values.update(collected.measure())
        write_rollouts(collected.groups, directory)
        if begin is not None:
            service.on_loop(begin)

    numbers = trainer.begin_step(collected.batch, work_meanwhile)
    sampled.follow_step()
    service.engine.set_version(collected.batch.step)

    def read_numbers() -> dict[str, float]:
        values.update(numbers())
        assert trainer.trained is not None
        trainer.trained.write_files(directory)
        return values

    return read_numbers


async def unless_asked(work: Coroutine[Any, Any, T]) -> T | None:
    """Await `work`; cancel it and return None if the run was asked to stop."""
    task = asyncio.ensure_future(work)
    while not task.done():
        if preemption.is_asked():
            task.cancel()
            await asyncio.wait([task])
            return None
        await asyncio.wait([task], timeout=LOOK)
    return task.result()
