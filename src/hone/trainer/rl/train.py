"""The RL trainer as a process: batches from the orchestrator in, policy versions out.

    broadcasts/step_N ◄─ publish version N ◄─ step ◄─ rollouts/step_N/batch.safetensors
                              └─► weights/step_N, checkpoints/step_N when due

It owns the run directory: it claims it, sets the run's id and publishes the starting version, which
the orchestrator waits for. Also run as a file under torchrun.
"""

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
from hone.config.help import to_toml
from hone.config.rl_config import BenchConfig, TrainerRunConfig
from hone.kernels import cpu, fingerprints
from hone.kernels.gpu.compiling import together
from hone.models.hf import hf_tensors, write_description
from hone.models.loading import Loaded, load_configured
from hone.models.weight_proof import CanaryScorer, Proof, canary_ids
from hone.monitors.logging_setup import component_log
from hone.monitors.provenance import device_name, made_by
from hone.monitors.report import StepReport
from hone.records import Batch, Sample
from hone.run_directory import RunDirectory, appearing_directory
from hone.trainer.checkpoint import (
    Checkpoints,
    forget_after,
    metrics_of,
    progress_of,
    restore_checkpoint,
    resume_from,
)
from hone.trainer.performance import WARM_UP, Laps, keep_freed_memory, print_bench
from hone.trainer.ranks import Ranks
from hone.trainer.rl.trainer import PolicyTrainer
from hone.trainer.sharding import Export
from hone.trainer.weight_files import save_weights
from hone.transport.batches import Batches, FileBatches, read_progress, write_progress
from hone.transport.deadlines import Pulse, PulseOf, Wait, Watch, wait_for
from hone.transport.delivery import TEXT, Canary, Delivery, remove_before, write_delivery
from hone.transport.transports import make_sender


def _take_unless_preempted(batches: Batches, step: int) -> Batch | None:
    """Return the batch of a step, an empty one if the run was asked to leave, or None to wait."""
    return Batch(step, []) if preemption.is_asked() else batches.take(step)


def main(config: TrainerRunConfig) -> None:
    keep_freed_memory()
    ranks = Ranks.join_ranks(config.batch_timeout + config.ranks_timeout)
    if config.bench:
        return run_bench(config, config.bench, ranks)
    run = RunDirectory(config.output_dir, "rl", config.layout)
    weight_steps = config.weights.list_steps(config.max_steps)
    sources = resume_from(run, config.resume)
    if ranks.is_first:  # before seconds of loading
        run.check_claim(
            clean=config.may_start_anew, resume=bool(sources), weight_steps=weight_steps
        )
    loaded = load_configured(config.model, seed=config.seed)
    trainer = PolicyTrainer(
        loaded.model, config, config.max_steps, run.bad_steps, ranks, config.seed
    )
    with together():
        trainer.compile_kernels()
        fingerprints.rehearse(torch.empty(0, dtype=loaded.dtype, device=trainer.device))
    state = config.to_public_dict()
    first = 1 + restore_checkpoint(sources, trainer.optimizer, config, ranks)
    ranks.barrier()  # nobody reads what the first is about to change
    log = component_log("trainer")
    if ranks.is_first:
        run.claim_run(clean=config.may_start_anew, resume=bool(sources), weight_steps=weight_steps)
        log = component_log("trainer", run.logs)  # the log of an earlier run is gone now
        if sources:
            forget_after(first - 1, run)
            hand_on(progress_of(sources, first - 1), run.rollouts / f"step_{first - 1}")
        run.write_config(to_toml(config), "trainer")
        run.keep_tokenizer(loaded.directory)
        run.write_facts(device=device_name(trainer.device, ranks.count), **made_by())
        log.info(
            "Training %s (%.2fM parameters, %s on %s%s), steps %d to %d, with an orchestrator over %s",
            config.model.name,
            sum(p.numel() for p in loaded.model.parameters()) / 1e6,
            str(loaded.dtype)[6:],
            cpu.words(trainer.device.type),
            f" x {ranks.count}" if ranks.count > 1 else "",
            first,
            config.max_steps,
            run.path,
        )
    ranks.barrier()  # the run has its id
    run.id = run.id_on_disk()
    export = Export(loaded.model, ranks, loaded.dtype)
    publish = Publisher(loaded, export, run, config, log)
    checkpoints = Checkpoints(run, trainer.optimizer, config.ckpt, ranks)
    names = ["trainer", *(f"trainer rank {i}" for i in range(1, ranks.count))]
    peers = {name: run.pulse_file(name) for name in ("orchestrator", *names[1:])}
    watch = Watch(peers if ranks.is_first else {}, log)
    batches, hint = FileBatches(run.rollouts, run.id), f"is there an orchestrator over {run.path}? "
    hint += f"(orchestrator @ FILE --output-dir {run.path})"
    report = StepReport(log, config.max_steps, config.log_interval)
    with Pulse(run.pulse_file(names[ranks.rank])), watch, publish:
        values = metrics_of(sources, first - 1)
        preemption.steps_begin()
        publish(first - 1, values)
        for step in range(first, config.max_steps + 1):
            start = time.perf_counter()
            what = f"the rollouts of step {step} in {run.rollouts}"
            wait = Wait(what, config.batch_timeout, log, hint)
            take = partial(_take_unless_preempted, batches, step)
            batch = wait_for(wait, take, run.require_own)
            if ranks.any_rank(preemption.is_asked(), trainer.device):
                before = read_progress(run.rollouts / f"step_{step - 1}")
                checkpoints.leave_run(step - 1, state, values, before)
            waited = time.perf_counter() - start
            values = trainer.step(batch) | {"time/wait_for_batch": waited}
            start = time.perf_counter()
            if trainer.trained is not None:
                trainer.trained.write_files(run.rollouts / f"step_{step}", ranks.rank)
            is_last = step == config.max_steps
            if step in weight_steps:
                sampled = (read_progress(run.rollouts / f"step_{step}") or {}).get("metrics") or {}
                save_weights(
                    export, run, step, config.max_steps, loaded, config.model.name, sampled | values
                )
            checkpoints.save_if_due(
                step, is_last, state, values, read_progress(run.rollouts / f"step_{step}")
            )
            publish(step, values | {"time/save": time.perf_counter() - start})
            if ranks.is_first:
                report.report_training(step, values)
                batches.acknowledge(step)
        publish.finish_publishing()
        last = max(first - 1, config.max_steps)
        if ranks.is_first:
            run.note_end(last)
        log.info("Weights of step %d in %s", last, run.weights_of(last))
    ranks.leave_ranks()


def run_bench(config: TrainerRunConfig, size: BenchConfig, ranks: Ranks) -> None:
    """Print the speed of steps on random sequences, and where their time goes."""
    model = load_configured(config.model, seed=config.seed).model
    if size.tokens > model.spec.max_position_embeddings + 1:
        raise ValueError(
            f"bench.tokens {size.tokens}: the model has {model.spec.max_position_embeddings} positions"
        )
    trainer = PolicyTrainer(model, config, WARM_UP + size.steps, ranks=ranks)
    trainer.laps = Laps(trainer.device, is_on=True)
    draw, measured = np.random.default_rng(config.seed), []
    for step in range(1, WARM_UP + size.steps + 1):
        shape = (size.sequences, size.tokens)
        ids, mask = draw.integers(0, model.spec.vocab_size, shape), np.arange(size.tokens) > 0
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


def hand_on(progress: dict[str, Any] | None, rollouts: Path) -> None:
    """Write the orchestrator's progress from a checkpoint to `rollouts`, where it is read, unless
    that exists.
    """
    if progress is not None and not rollouts.exists():
        with appearing_directory(rollouts) as directory:
            write_progress(progress, directory)


class Publisher:
    """Publish weights as version N, the first time with the tokenizer, so that any server can load
    them.

    The sender transfers them (`transport/weight_transport.py`): all weights, or the trained
    adapter.
    """

    def __init__(
        self,
        loaded: Loaded,
        export: Export,
        run: RunDirectory,
        config: TrainerRunConfig,
        log: logging.Logger,
    ) -> None:
        self.loaded, self.export, self.run, self.log = loaded, export, run, log
        self.keep = config.max_async_level + 2
        self.is_first_time = True
        self.canary_ids, self.score = (
            canary_ids(loaded.model.spec.vocab_size),
            CanaryScorer(loaded.model),
        )
        self.proof: Proof | None = None  # of what is exported: the same model each time
        self.orchestrator = PulseOf(run.pulse_file("orchestrator"))
        write_adapter = (
            None
            if export.lora_config is None
            else partial(export.write_adapter, loaded.directory.name)
        )
        self.sender = make_sender(config.weight_broadcast, write_adapter, log)

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

    def __call__(self, version: int, metrics: dict[str, float]) -> None:
        """Publish a version. Collective; the first rank writes."""
        canary = Canary(self.canary_ids, self.score(self.canary_ids))
        if not all(map(math.isfinite, canary.logprobs)):
            raise ValueError(
                f"step {version}: training has diverged, the model's logprobs are not finite; a lower lr?"
            )
        start, broadcasts = time.perf_counter(), self.run.broadcasts
        wants_adapter = self.sender.takes == "adapter"
        is_first_time, self.is_first_time = self.is_first_time, False
        base = self.export(merged=False) if wants_adapter and is_first_time else None
        if base is not None:
            self.sender.send_base(dict(hf_tensors(base)), broadcasts)
        model, adapter = self.export(), self.export.adapter_tensors() if wants_adapter else {}
        if model is None:
            return
        if self.proof is None:
            self.proof = Proof(model)
        if is_first_time:  # a server that comes later needs it too
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
    # Src/, where torchrun gave a file and not the package
    sys.path.insert(0, str(Path(__file__).parents[3]))
    sys.argv.insert(1, "trainer")
    runpy.run_module("hone", run_name="__main__")
