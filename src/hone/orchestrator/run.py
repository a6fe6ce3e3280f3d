"""The orchestrator as a process: policy versions in, batches for the trainer out.

    broadcasts/step_V ─ adopt: update every server, compare checksum and canary ─► groups in flight continue with it
    rollouts/step_N   ◄─ collect step N, of groups started with a version V >= N - 1 - max_async_level

The canary is a fixed text whose logprobs must agree between server and trainer. The orchestrator
joins the run of the live trainer in the output directory and ignores files of earlier runs. It
writes a step's row of metrics.jsonl when the trainer's metrics of the step have arrived together
with the step's weights.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hone.clients.http import HttpClient, connect_clients
from hone.config.help import to_toml
from hone.config.rl_config import OrchestratorRunConfig
from hone.config.sections import ModelConfig
from hone.environments import Environment, load_environments
from hone.evals.held_out import evaluate_environments
from hone.monitors import trackers
from hone.monitors.diagnosis_monitor import DiagnosisMonitor
from hone.monitors.event_loop_lag import Lag
from hone.monitors.events import EventList, Events
from hone.monitors.logging_setup import component_log
from hone.monitors.metrics_log import Metrics, read_rows
from hone.monitors.step_lines import RolloutLines
from hone.orchestrator.orchestrator import Collected, Orchestrator
from hone.orchestrator.rollouts_file import tracker_rows, write_rollouts
from hone.orchestrator.teacher import Teacher
from hone.orchestrator.weight_updates import Weights
from hone.records import Prompt
from hone.run_directory import RunDirectory, steps_in
from hone.transport.batches import FileBatches, read_progress, write_progress
from hone.transport.deadlines import Pulse, Wait, Watch


def main(config: OrchestratorRunConfig) -> None:
    trackers.check_trackers(config.wandb, config.tensorboard)
    environments = load_environments(config.env, config.model.template_arguments)
    held_out = (
        load_environments(config.eval.env, config.model.template_arguments) if config.eval else {}
    )
    run = RunDirectory(config.output_dir, "rl", config.layout)
    asyncio.run(run_orchestrator(config, run, environments, held_out))


async def run_orchestrator(
    config: OrchestratorRunConfig,
    run: RunDirectory,
    environments: dict[str, Environment],
    held_out: dict[str, Environment],
) -> None:
    """Join the trainer's run and orchestrate its steps to the end."""
    program = OrchestratorProgram(config, run, environments, held_out)
    try:
        first = await program.join_run()
        if first is not None:
            await program.run(first)
    finally:
        await program.close()


class OrchestratorProgram:
    """An orchestrator with its servers, environments, teacher and weight updates."""

    def __init__(
        self,
        config: OrchestratorRunConfig,
        run: RunDirectory,
        environments: dict[str, Environment],
        held_out: dict[str, Environment],
    ) -> None:
        self.config = config
        self.dir = run
        self.held_out = held_out
        self.log = log = logging.getLogger("hone.orchestrator")
        limit = {"max_total_tokens": config.seq_len}
        extra_body = limit | ({"return_routing": True} if config.return_routing else {})
        self.clients = connect_clients(
            config.client, config.model.name, extra_body=extra_body, timeout=config.rollout_timeout
        )
        self.weights = Weights(run, config, self.clients, log)
        self.fleet = self.weights.fleet
        self.teacher = None
        if config.teacher:
            self.teacher = Teacher(config.teacher, config.rollout_timeout, limit, log)
        self.orchestrator = Orchestrator(
            config,
            environments,
            self.fleet,
            config.seed,
            config.max_async_level,
            self.teacher,
            token_counter(config.model) if config.max_prompt_tokens else None,
        )
        self.lag = Lag(log)

    async def join_run(self) -> int | None:
        """Wait for servers and trainer; return the first step to sample, None if the run is over."""
        config = self.config
        run = self.dir
        if self.teacher is not None:
            await self.teacher.check_servers()
        await wait_for_servers(config, self.clients, self.log)
        version = await self.weights.join_trainer()
        if version is None:
            self.log.info(
                "The run in %s is over, after step %d: nothing is left to sample",
                run.path,
                run.ended_at(),
            )
            return None
        # Steps that an earlier orchestrator of this run has published are not sampled again.
        first = max([version, *steps_in(run.rollouts)]) + 1
        self.orchestrator.go_on(first, progress_before(run, first), run.rollouts)
        component_log("orchestrator", run.logs)
        run.write_config(to_toml(config), "orchestrator")
        self.log.info(
            "Orchestrating steps %d to %d on %d examples of %s, sampled by %s",
            first,
            config.max_steps,
            self.orchestrator.count,
            ", ".join(self.orchestrator.environments),
            ", ".join(config.client.base_url),
        )
        return first

    async def run(self, first: int) -> None:
        """Take the steps from `first` on, while weights and servers are watched."""
        config = self.config
        run = self.dir
        weights = self.weights
        with (
            Metrics(run.metrics, config) as metrics,
            Pulse(run.pulse_file("orchestrator")),
            Watch({"trainer": run.pulse_file("trainer")}, self.log),
        ):
            monitor = DiagnosisMonitor(run, self.log, first - 1)
            lines = RolloutLines(config, config.log_samples, monitor)
            self.events = EventList(metrics, lines, monitor)
            rows = MetricsRows(self.events, run)
            assert weights.current is not None
            # An earlier orchestrator may have been killed before it wrote this row.
            rows.write_trained(weights.version, weights.current.metrics)
            gc.freeze()  # data sets and modules stay; collecting them would block the event loop
            background = [
                weights.watch_deliveries(rows, self.orchestrator.on_adopted, self.evaluate_version),
                self.fleet.watch_servers(),
                self.lag.watch_loop(),
            ]
            if self.teacher is not None:
                background.append(self.teacher.fleet.watch_servers())
            steps = asyncio.create_task(self.run_steps(first))
            watching = list(map(asyncio.create_task, background))
            try:
                await asyncio.wait(
                    {steps, *watching, self.fleet.ended}, return_when=asyncio.FIRST_COMPLETED
                )
                for ended in (*watching, self.fleet.ended):
                    if ended.done():
                        await ended  # raises what ended it
                await steps
            finally:
                tasks = (steps, *watching)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def evaluate_version(self, version: int) -> None:
        config = self.config
        if config.eval is not None and self.weights.is_evaluated(version):
            values = await evaluate_environments(
                config.eval, self.held_out, self.fleet.urgent, config.seed
            )
            self.events.on_evaluation(version, values, True)

    async def run_steps(self, first: int) -> None:
        config = self.config
        weights = self.weights
        if first == 1:
            async with weights.busy:
                await self.evaluate_version(0)
        self.orchestrator.on_adopted(weights.version)
        for step in range(first, config.max_steps + 1):
            start = time.perf_counter()
            await weights.at_least(max(step - 1 - config.max_async_level, first - 1))
            waited = time.perf_counter() - start
            collected = await self.orchestrator.collect_step(step, config.max_steps)
            times = {"time/wait_for_weights": waited, "time/step": time.perf_counter() - start}
            values = {**collected.measure(), **times, **self.lag.take_metrics()}
            values["perf/throughput"] = values["progress/tokens"] / values["time/step"]
            self.events.on_rollouts(step, values, partial(tracker_rows, step, collected.groups))
            await weights.proven.wait()
            await asyncio.to_thread(publish_step, collected, values, self.dir)
        await weights.at_least(config.max_steps)
        async with weights.busy:  # with the evaluation of the last version
            pass

    async def close(self) -> None:
        await self.orchestrator.close()
        for environment in self.held_out.values():
            await environment.close()
        await self.fleet.close()


def token_counter(model: ModelConfig) -> Callable[[Prompt], int]:
    """Return a function that counts the tokens of prompts, with the model's tokenizer."""
    from hone.models.model_directory import resolve_model
    from hone.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.for_model(resolve_model(model.name), model)
    return lambda prompt: len(tokenizer.prompt_ids(prompt))


def progress_before(run: RunDirectory, first: int) -> dict[str, Any] | None:
    """Return the orchestrator's state after step `first` - 1, from its rollouts or checkpoint.

    None if neither exists.
    """
    name = f"step_{first - 1}"
    return read_progress(run.rollouts / name) or read_progress(
        run.checkpoints / name / "orchestrator"
    )


async def wait_for_servers(
    config: OrchestratorRunConfig, clients: list[HttpClient], log: logging.Logger
) -> None:
    for client in clients:
        hint = f"start one with: inference --model.name {config.model.name}"
        wait = Wait(f"a server at {client.base_url}", config.client.ready_timeout, log, hint)
        while not await client.is_up():
            wait.is_check_due()
            await asyncio.sleep(0.1)
        await client.check_key()


def publish_step(collected: Collected, values: dict[str, float], run: RunDirectory) -> None:
    """Publish a step's rollouts, batch and progress in one directory, atomically."""

    def write_more(directory: Path) -> None:
        write_progress(collected.progress | {"metrics": values}, directory)
        FileBatches(run.rollouts, run.id).put(collected.batch, directory)

    write_rollouts(collected.groups, run.rollouts / f"step_{collected.batch.step}", write_more)


class MetricsRows:
    """Rows of metrics.jsonl: the sampling metrics of a step joined with its training metrics."""

    def __init__(self, events: Events, run: RunDirectory) -> None:
        self.events = events
        self.run = run
        self.last = max((row["step"] for row in read_rows(run.metrics)), default=0)

    def write_trained(self, step: int, values: dict[str, float]) -> None:
        sampled = (read_progress(self.run.rollouts / f"step_{step}") or {}).get("metrics")
        if sampled is not None and values and step > self.last:
            self.events.on_step(step, sampled | values)
            self.last = step
