"""The orchestrator as a process: versions of the weights in, batches for the trainer out.

    broadcasts/step_V ─ adopt: update every server, compare checksum and canary ─► groups under way go on with it
    rollouts/step_N   ◄─ collect step N, of groups begun with a version V >= N - 1 - max_async_level

It joins the run whose trainer lives in the output directory: what an earlier run left there is not taken for it. A row
of metrics.jsonl is written when the trainer's numbers of that step have come with its weights.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from hone.config.help import to_toml
from hone.config.rl import OrchestratorRunConfig
from hone.environments import Environment, load_environments
from hone.evals.held_out import evaluate
from hone.inference.client import HttpClient, ServerLost, connect
from hone.inference.fleet import Fleet, Server
from hone.monitors.lag import Lag
from hone.monitors.lines import orchestrator_line, why_no_signal
from hone.monitors.log import SUCCESS, component_log
from hone.monitors.metrics import Metrics, check_wandb
from hone.orchestrator.orchestrator import Collected, Orchestrator, write_rollouts
from hone.run_directory import RunDirectory
from hone.transport.files import PROGRESS, Delivery, published, read_delivery, read_progress, write_batch
from hone.transport.waiting import POLL, PulseOf, Wait

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}  # of canary logprobs, where none is configured


def main(config: OrchestratorRunConfig) -> None:
    check_wandb(config.wandb)
    environments = load_environments(config.env)
    held_out = load_environments(config.eval.env) if config.eval else {}
    run = RunDirectory(config.output_dir, "rl")
    asyncio.run(orchestrate(config, run, environments, held_out))


async def orchestrate(
    config: OrchestratorRunConfig, run: RunDirectory, environments: dict[str, Environment],
    held_out: dict[str, Environment],
) -> None:  # fmt: skip
    log = logging.getLogger("hone.orchestrator")
    limit = {"max_total_tokens": config.seq_len}
    clients = connect(config.client, config.model.name, extra_body=limit, timeout=config.rollout_timeout)
    weights = Weights(run, config, log)
    fleet = weights.fleet = Fleet(clients, weights.revive, config.client.ready_timeout, log)
    orchestrator = Orchestrator(config, environments, fleet, config.seed, config.max_async_level)
    await wait_for_servers(config, clients, log)
    # What an orchestrator before this one has published of the run is not sampled again.
    first = max([await weights.join(), *published(run.rollouts)]) + 1
    orchestrator.go_on(first, progress_before(run, first))
    log = weights.log = fleet.log = component_log("orchestrator", run.logs)
    run.write_config(to_toml(config), "orchestrator")
    log.info(
        "Orchestrating steps %d to %d on %d examples of %s, sampled by %s",
        first, config.max_steps, len(orchestrator.examples), ", ".join(environments), ", ".join(config.client.base_url),
    )  # fmt: skip
    with Metrics(run.metrics, config.wandb, config) as metrics:
        rows = Rows(metrics, config, log)

        async def evaluate_version(version: int) -> None:
            if config.eval is not None and config.eval.is_due(version, config.max_steps):
                metrics.log(version, await evaluate(config.eval, held_out, fleet, config.seed))

        weights.evaluate = evaluate_version
        if first == 1:
            await evaluate_version(0)
        orchestrator.adopted(weights.version)
        lag = Lag(log)
        lagging = asyncio.create_task(lag.watch())
        watching = asyncio.create_task(weights.watch(rows, orchestrator.adopted))
        working = asyncio.create_task(work(config, run, orchestrator, weights, rows, lag, first))
        try:
            await asyncio.wait({watching, working, fleet.ended}, return_when=asyncio.FIRST_COMPLETED)
            for ended in (watching, fleet.ended):
                if ended.done():
                    await ended  # raises what ended it
            await working
        finally:
            tasks = (lagging, watching, working)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await orchestrator.close()
            await fleet.close()


async def work(
    config: OrchestratorRunConfig, run: RunDirectory, orchestrator: Orchestrator, weights: "Weights", rows: "Rows",
    lag: Lag, first: int,
) -> None:  # fmt: skip
    for step in range(first, config.max_steps + 1):
        start = time.perf_counter()
        await weights.at_least(max(step - 1 - config.max_async_level, first - 1))
        waited = time.perf_counter() - start
        collected = await orchestrator.collect(step, config.max_steps)
        await asyncio.to_thread(publish, collected, run)
        seconds = time.perf_counter() - start
        rows.sampled(step, collected, {"time/wait_for_weights": waited, "time/step": seconds, **lag.take()})
    await weights.at_least(config.max_steps)
    async with weights.busy:  # with the evaluation of the last
        pass


def progress_before(run: RunDirectory, first: int) -> dict[str, Any] | None:
    """What the step before the first one left behind: beside its rollouts, or in its checkpoint."""
    name = f"step_{first - 1}"
    return read_progress(run.rollouts / name) or read_progress(run.checkpoints / name / "orchestrator")


async def wait_for_servers(config: OrchestratorRunConfig, clients: list[HttpClient], log: logging.Logger) -> None:
    for client in clients:
        hint = f"start one with: inference --model.name {config.model.name}"
        wait = Wait(f"a server at {client.base_url}", config.client.ready_timeout, log, hint)
        while not await client.is_up():
            wait.check()
            await asyncio.sleep(0.1)
        await client.check_key()


def publish(collected: Collected, run: RunDirectory) -> None:
    """Rollouts and batch of a step, in one directory that appears whole, and what is under way beside."""

    def write_more(directory: Path) -> None:
        (directory / PROGRESS).write_text(json.dumps(collected.progress) + "\n")
        write_batch(collected.batch, run.id, directory)

    write_rollouts(collected.groups, run.rollouts / f"step_{collected.batch.step}", write_more)


class Weights:
    """The versions that the trainer publishes, and the newest that every server has taken and proven."""

    fleet: Fleet
    evaluate: Callable[[int], Awaitable[None]]

    def __init__(self, run: RunDirectory, config: OrchestratorRunConfig, log: logging.Logger) -> None:
        self.run, self.config, self.log = run, config, log
        self.trainer = PulseOf(run.pulse("trainer"))
        self.version, self.seen = -1, -1
        self.current: Delivery | None = None
        self.busy = asyncio.Lock()  # with taking a version and evaluating it

    async def join(self) -> int:
        """The version that the run of the living trainer starts from; every server has it then."""
        hint = f"is there a trainer over it? (trainer @ FILE --output-dir {self.run.path})"
        wait = Wait(f"the trainer of a run in {self.run.path}", self.config.weights_timeout, self.log, hint)
        while True:
            versions = published(self.run.broadcasts) if self.trainer.is_beating() else []
            delivery = read_delivery(self.run.broadcasts / f"step_{versions[-1]}") if versions else None
            if delivery is not None and delivery.run == self.run.id_on_disk():
                self.run.id = delivery.run
                self.seen = delivery.version
                await self._adopt(delivery)
                return delivery.version
            wait.check()
            await asyncio.sleep(0.05)

    async def watch(self, rows: "Rows", adopted: Callable[[int], None]) -> None:
        """Gives the servers each version when it comes. Ends only by raising."""
        while True:
            newest = self.look(rows)
            if newest is not None:
                async with self.busy:
                    await self._adopt(newest)
                    adopted(self.version)
                    await self.evaluate(self.version)  # the next is taken after that: results are of one version
            await asyncio.sleep(POLL)

    async def at_least(self, version: int) -> None:
        """Waits until the servers have that version."""
        what = f"version {version} of the weights in {self.run.broadcasts}"
        wait = Wait(what, self.config.weights_timeout, self.log, "is the trainer still at work?")
        while self.version < version:
            if self.seen < version and self.trainer.is_silent():
                raise ConnectionError(f"waiting for {what}: the trainer of this run has gone silent")
            if wait.check():
                self.run.require_own()
            await asyncio.sleep(POLL)

    def look(self, rows: "Rows") -> Delivery | None:
        """Takes note of what has been published since; returns the newest of it."""
        delivery = None
        for version in published(self.run.broadcasts):
            if version > self.seen:
                found = read_delivery(self.run.broadcasts / f"step_{version}")
                if found is not None and found.run == self.run.id:
                    delivery, self.seen = found, version
                    rows.trained(version, found.metrics)
        return delivery

    async def _adopt(self, delivery: Delivery) -> None:
        """Gives every server the version and has each prove that it serves it. A lost one gets it once it is back."""
        start = time.perf_counter()
        self.current = delivery

        async def update(server: Server) -> None:
            try:
                await self._update(server.client, delivery)
                server.version = delivery.version
            except ServerLost as error:
                self.fleet.lost(server, str(error))

        await asyncio.gather(*(update(server) for server in self.fleet.up))
        self.version = delivery.version
        self.log.debug("Version %d adopted in %.3f s", delivery.version, time.perf_counter() - start)

    async def revive(self, client: HttpClient) -> int:
        """Gives a server that was lost what is current."""
        while True:
            delivery = self.current
            assert delivery is not None
            await self._update(client, delivery)
            if delivery is self.current:
                return delivery.version

    async def _update(self, client: HttpClient, delivery: Delivery) -> None:
        directory = (self.run.broadcasts / f"step_{delivery.version}").resolve()
        body = {"weight_dir": str(directory), "version": delivery.version, "model_name": self.config.model.name}
        try:
            state = await client.control("update_weights", body)
            if state["is_paused"]:  # by whoever used the server before
                await client.control("resume", {})
            scored = (await client.control("score", {"ids": delivery.canary.ids}))["logprobs"]
        except RuntimeError as error:  # an answer that refuses: nothing that this run can go on with
            raise ConnectionError(f"version {delivery.version} was not taken: {error}") from None
        if state["dtype"] == delivery.dtype and state["checksum"] != delivery.checksum:
            raise ConnectionError(
                f"{client.base_url} serves other weights than version {delivery.version}: checksum "
                f"{state['checksum']}, the trainer's is {delivery.checksum}"
            )
        worst = max(abs(a - b) for a, b in zip(scored, delivery.canary.logprobs, strict=True))
        tolerance = self.config.canary_tolerance or max(TOLERANCE[delivery.dtype], TOLERANCE[state["dtype"]])
        if not worst <= tolerance:
            if (await client.control("version"))["version"] != delivery.version:
                raise ServerLost(f"{client.base_url} was started again while it took version {delivery.version}")
            raise ConnectionError(
                f"{client.base_url} and the trainer disagree on the canary of version {delivery.version}: logprobs "
                f"differ by up to {worst:.2g}, allowed are {tolerance:g} (canary-tolerance)"
            )


class Rows:
    """Rows of metrics.jsonl: what sampling a step gave, joined by what training on it gave."""

    def __init__(self, metrics: Metrics, config: OrchestratorRunConfig, log: logging.Logger) -> None:
        self.metrics, self.config, self.log = metrics, config, log
        self._sampled: dict[int, dict[str, float]] = {}

    def sampled(self, step: int, collected: Collected, times: dict[str, float]) -> None:
        values = {**collected.metrics, **times}
        values["perf/throughput"] = values["progress/tokens"] / values["time/step"]
        self._sampled[step] = values
        if not collected.batch.samples:
            self.log.warning("%s", why_no_signal(step, values))
        is_last = step == self.config.max_steps
        console = {"console": is_last or step % self.config.log_interval == 0}
        self.log.log(SUCCESS, orchestrator_line(step, values), extra=console)

    def trained(self, step: int, values: dict[str, float]) -> None:
        if step in self._sampled:
            self.metrics.log(step, {**self._sampled.pop(step), **values})
