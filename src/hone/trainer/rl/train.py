"""Trainer process of an RL run: takes batches from the orchestrator, publishes policy versions.

    broadcasts/step_N ◄─ publish version N ◄─ step ◄─ rollouts/step_N/batch.safetensors
                              └─► weights/step_N, checkpoints/step_N when due

The trainer owns the run directory: it claims the directory, sets the run's id and publishes the
starting version, for which the orchestrator waits. Under torchrun this file is run directly.
"""

import asyncio
import logging
import math
import runpy
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hone import preemption
from hone.config.rl_config import BenchConfig, TrainerRunConfig
from hone.kernels import fingerprints
from hone.kernels.gpu.compiling import together
from hone.models.hf import hf_tensors, stored_names, write_description
from hone.models.loading import load_configured
from hone.models.weight_proof import CanaryScorer, Proof, canary_ids
from hone.monitors.events import EventList
from hone.monitors.logging_setup import component_log
from hone.monitors.step_lines import TrainerLines
from hone.records import Batch, Sample
from hone.run_directory import appearing_directory
from hone.trainer.performance import WARM_UP, Laps, fit_to_device, keep_freed_memory, print_bench
from hone.trainer.ranks import Ranks
from hone.trainer.rl.run_loop import run_rl_steps
from hone.trainer.rl.trainer import PolicyTrainer
from hone.trainer.run_session import RunSession, describe_training, rank_name
from hone.transport.batches import FileBatches, read_progress, write_progress
from hone.transport.deadlines import PulseOf, Wait, Watch, wait_for
from hone.transport.delivery import TEXT, Canary, Delivery, remove_before, write_delivery
from hone.transport.transports import make_sender


def main(config: TrainerRunConfig) -> None:
    keep_freed_memory()
    ranks = Ranks.join_ranks(config.batch_timeout + config.ranks_timeout)
    if config.bench:
        return run_bench(config, config.bench, ranks)
    session = RunSession(config, "rl", "trainer", ranks, config_name="trainer")
    run = session.run
    session.check_claim()
    loaded = load_configured(config.model, config.seed, config.lora)
    log = component_log("trainer")
    settings = config if ranks.count > 1 else fit_to_device(config, loaded.model, log)
    trainer = PolicyTrainer(
        loaded.model, settings, config.max_steps, run.bad_steps, ranks, config.seed
    )
    with together():
        trainer.compile_kernels()
        fingerprints.rehearse(torch.empty(0, dtype=loaded.dtype, device=trainer.device))
    session.begin(loaded, trainer.optimizer)
    log.info("%s", describe_training(session, f"with an orchestrator over {run.path}"))
    publisher = Publisher(session, log)
    source = FileSource(session, trainer.device, log)
    lines = TrainerLines(config) if ranks.is_first else None
    peers = ["orchestrator", *(rank_name("trainer", i) for i in range(1, ranks.count))]
    watch = Watch({name: run.pulse_file(name) for name in peers if ranks.is_first}, log)
    with session.show_heartbeat(), watch, publisher:
        last = asyncio.run(run_rl_steps(session, trainer, source, publisher, EventList(lines)))
        publisher.finish_publishing()
        session.end(last)
        log.info("Weights of step %d in %s", last, run.weights_of(last))
    ranks.leave_ranks()


class FileSource:
    """BatchSource of batches that the orchestrator's process writes to the run directory."""

    def __init__(self, session: RunSession, device: torch.device, log: logging.Logger) -> None:
        self.session = session
        self.device = device
        self.log = log
        self.run = session.run
        self.ranks = session.ranks
        self.batches = FileBatches(self.run.rollouts, self.run.id)
        self.waited = 0.0  # seconds
        if self.ranks.is_first:
            restore_progress(session.progress, self.run.rollouts / f"step_{session.done}")

    async def take_batch(self, step: int) -> Batch | None:
        start = time.perf_counter()
        path = self.run.path
        hint = f"is there an orchestrator over {path}? (orchestrator @ FILE --output-dir {path})"
        what = f"the rollouts of step {step} in {self.run.rollouts}"
        wait = Wait(what, self.session.config.batch_timeout, self.log, hint)

        def take() -> Batch | None:
            return Batch(step, []) if preemption.is_asked() else self.batches.take(step)

        batch = wait_for(wait, take, self.run.require_own)
        self.waited = time.perf_counter() - start
        return None if self.ranks.any_rank(preemption.is_asked(), self.device) else batch

    def on_launched(self) -> None:
        pass

    def read_metrics(self, step: int) -> dict[str, float]:
        progress = self.read_progress(step) or {}
        return (progress.get("metrics") or {}) | {"time/wait_for_batch": self.waited}

    def read_progress(self, step: int) -> dict[str, Any] | None:
        return read_progress(self.run.rollouts / f"step_{step}")

    def end_step(self, step: int) -> None:
        if self.ranks.is_first:
            self.batches.acknowledge(step)

    async def stop(self) -> None:
        pass

    async def close(self) -> None:
        pass


def run_bench(config: TrainerRunConfig, size: BenchConfig, ranks: Ranks) -> None:
    """Print the speed of steps on random sequences, and where their time goes."""
    model = load_configured(config.model, config.seed, config.lora).model
    if size.tokens > model.spec.max_position_embeddings + 1:
        raise ValueError(
            f"bench.tokens {size.tokens}: the model has {model.spec.max_position_embeddings} positions"
        )
    trainer = PolicyTrainer(model, config, WARM_UP + size.steps, ranks=ranks)
    trainer.laps = Laps(trainer.device, is_on=True)
    draw = np.random.default_rng(config.seed)
    measured = []
    for step in range(1, WARM_UP + size.steps + 1):
        shape = (size.sequences, size.tokens)
        ids = draw.integers(0, model.spec.vocab_size, shape)
        mask = np.arange(size.tokens) > 0
        logprobs = np.full(size.tokens, -math.log(model.spec.vocab_size))
        samples = [
            Sample(x, mask, logprobs, a, 1.0)
            for x, a in zip(ids, draw.normal(size=len(ids)), strict=True)
        ]
        if step == WARM_UP + 1:
            trainer.laps.clear_laps()
        values = trainer.step(Batch(step, samples))
        values |= {
            "progress/tokens": size.sequences * size.tokens,
            "time/step": values["time/train"],
        }
        measured.append(values | {"perf/throughput": values["perf/train_throughput"]})
    if ranks.is_first:
        print_bench(config.model.name, model, measured[WARM_UP:], trainer.laps.seconds)
    ranks.leave_ranks()


def restore_progress(progress: dict[str, Any] | None, rollouts: Path) -> None:
    """Write the orchestrator's saved state to directory `rollouts`, unless this directory exists.

    `progress` is the state in the checkpoint, `rollouts` the directory of the rollouts of the same
    step. Trainer and orchestrator read the state from there.
    """
    if progress is not None and not rollouts.exists():
        with appearing_directory(rollouts) as directory:
            write_progress(progress, directory)


class Publisher:
    """PolicySink that publishes weights as version N, for servers to load.

    The first version that a process publishes comes with the tokenizer, so that any server can load
    the model. A `Sender` (`transport/weight_transport.py`) transfers all weights, or only the
    trained adapter.
    """

    def __init__(self, session: RunSession, log: logging.Logger) -> None:
        self.loaded = session.loaded
        self.export = session.export
        self.run = session.run
        self.log = log
        loaded = self.loaded
        export = self.export
        run = self.run
        config = session.config
        self.keep = config.max_async_level + 2
        self.is_first_time = True
        self.canary_ids = canary_ids(loaded.model.spec)
        self.score = CanaryScorer(loaded.model)
        self.proof: Proof | None = None  # of the exported model, which stays the same object
        self.orchestrator = PulseOf(run.pulse_file("orchestrator"))
        write_adapter = (
            None
            if export.lora_config is None
            else partial(export.write_adapter, loaded.directory.name)
        )
        names = stored_names(loaded.model, loaded.directory)
        self.sender = make_sender(config.weight_broadcast, write_adapter, log, names)

    def __enter__(self) -> "Publisher":
        if self.export.ranks.is_first:
            self.sender.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self.export.ranks.is_first:
            self.sender.__exit__()

    def finish_publishing(self) -> None:
        """Wait for servers that still have to load the last version."""
        if self.export.ranks.is_first:
            self.sender.wait_for_receivers(lambda: not self.orchestrator.is_silent())

    def update(self, version: int) -> None:
        pass  # servers have weights of their own

    def publish(self, version: int, metrics: dict[str, float]) -> None:
        """Publish a version. Collective; the first rank writes."""
        canary = Canary(self.canary_ids, self.score(self.canary_ids))
        if not all(map(math.isfinite, canary.logprobs)):
            raise ValueError(
                f"step {version}: training has diverged, the model's logprobs are not finite; a lower lr?"
            )
        start = time.perf_counter()
        broadcasts = self.run.broadcasts
        wants_adapter = self.sender.takes == "adapter"
        is_first_time = self.is_first_time
        self.is_first_time = False
        base = self.export(merged=False) if wants_adapter and is_first_time else None
        if base is not None:
            self.sender.send_base(dict(hf_tensors(base)), broadcasts)
        model = self.export()
        adapter = self.export.adapter_tensors() if wants_adapter else {}
        if model is None:
            return
        if self.proof is None:
            self.proof = Proof(model)
        if is_first_time:  # servers that start later need it too
            template = self.loaded.tokenizer.chat_template
            write_description(
                self.loaded.directory, broadcasts / TEXT, self.loaded.dtype, True, template
            )
        with appearing_directory(broadcasts / f"step_{version}") as place:
            template = self.loaded.tokenizer.chat_template
            write_description(
                self.loaded.directory, place, self.loaded.dtype, is_first_time, template
            )
            sent = self.sender.send_version(
                version, adapter if wants_adapter else self.proof.tensors, place
            )
            of_each = self.proof.weight_fingerprints()
            delivery = Delivery(
                self.run.id,
                version,
                self.proof.combine_checksum(of_each),
                str(self.loaded.dtype).removeprefix("torch."),
                canary,
                metrics,
                self.proof.by_name(of_each),
                self.sender.delivery_message,
                sent,
                time.perf_counter() - start,
            )
            write_delivery(delivery, place)
        remove_before(broadcasts, version - self.keep)
        self.log.info(
            "Published version %d: %.2f MiB in %.3f s, checksum %s",
            version,
            delivery.bytes / 2**20,
            delivery.seconds,
            delivery.checksum,
            extra={"console": False},
        )


if __name__ == "__main__":
    # torchrun ran this file: add src/ to the path.
    sys.path.insert(0, str(Path(__file__).parents[3]))
    sys.argv.insert(1, "trainer")
    runpy.run_module("hone", run_name="__main__")
