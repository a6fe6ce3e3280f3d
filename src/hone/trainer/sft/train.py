"""Supervised fine-tuning.

rows ─ tokenize, pack ─► micro-batches ─ forward, loss on assistant tokens, backward ─► AdamW ─►
weights/step_N

The evaluation on environments is passed in (`launch/run_sft.py`).
"""

import logging
import math
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from hone import preemption
from hone.config.help import to_toml
from hone.config.sft_config import UNKNOWN_ROW_TOKENS, DataConfig, SFTConfig
from hone.kernels import cpu
from hone.models.loading import Loaded, load_configured
from hone.models.lora import add_lora, seed_dropout
from hone.models.transformer import Transformer
from hone.monitors import trackers
from hone.monitors.logging_setup import component_log
from hone.monitors.metrics_log import Metrics
from hone.monitors.progress_line import Live
from hone.monitors.provenance import device_name, made_by
from hone.monitors.report import StepReport
from hone.run_directory import RunDirectory
from hone.text.tokenizer import Tokenizer
from hone.trainer.bad_steps import handle_bad_step
from hone.trainer.checkpoint import Checkpoints, forget_after, restore_checkpoint, resume_from
from hone.trainer.loss import cross_entropy_sum
from hone.trainer.optim import Optimizer, learning_rate
from hone.trainer.packing import Packed, pack_sequences
from hone.trainer.performance import (
    WARM_UP,
    Laps,
    keep_freed_memory,
    model_flops_utilization,
    peak_memory_gib,
    print_bench,
)
from hone.trainer.ranks import Ranks
from hone.trainer.sft.data import (
    Conversations,
    Data,
    FakeConversations,
    Row,
    StreamedConversations,
    iterate_steps,
)
from hone.trainer.sft.data_sources import Source, load_rows
from hone.trainer.sft.survey import row_tokens_of_data, row_tokens_of_streams, survey_data
from hone.trainer.sharding import Export, shard_model
from hone.trainer.weight_files import save_weights
from hone.transport.deadlines import Pulse

DataSets = list[list[dict[str, Any]]]
Evaluate = Callable[[Transformer, Tokenizer, int], dict[str, float]]  # of a model after a step
MEASURED = 10  # steps of --bench
FAKE_ROWS = 4096
# What a rank without rows goes through the model with
NOTHING: list[Row] = [[([0, 0], [False, True])]]


def main(config: SFTConfig, evaluate: Evaluate | None = None) -> None:
    trackers.check_trackers(config.wandb, config.tensorboard)
    keep_freed_memory()
    reads: Any = Source if config.data.streaming else load_rows
    rows = [] if config.data.fake else [reads(name, config.data.split) for name in config.data.name]
    val_rows = [load_rows(config.val.name, config.val.split, "val.name")] if config.val else []
    ranks = Ranks.join_ranks(config.ranks_timeout)
    if config.bench:
        return run_bench(config, rows, ranks)
    run = RunDirectory(config.output_dir, "sft", config.layout)
    sources = resume_from(run, config.resume)
    loaded, optimizer = prepare_model(config, ranks)
    done = restore_checkpoint(sources, optimizer, config, ranks)
    ranks.barrier()  # nobody reads what the first is about to change
    if not ranks.is_first:
        Trainer(config, loaded, optimizer, run, build_report(config), ranks, evaluate).train_steps(
            rows, val_rows, done
        )
        return ranks.leave_ranks()
    run.claim_run(
        clean=config.may_start_anew,
        resume=bool(sources),
        weight_steps=config.weights.list_steps(config.max_steps) if config.max_steps else [],
    )
    if sources:
        forget_after(done, run)
    run.write_config(to_toml(config))
    run.write_facts(device=device_name(loaded.model.embed.weight.device, ranks.count), **made_by())
    with Pulse(run.pulse_file("sft")), Metrics(run.metrics, config) as metrics:
        report = build_report(config, run.logs, metrics)
        Trainer(config, loaded, optimizer, run, report, ranks, evaluate).train_steps(
            rows, val_rows, done
        )
        run.note_end(config.max_steps or 1)
    ranks.leave_ranks()


def build_report(
    config: SFTConfig, logs: Path | None = None, metrics: Metrics | None = None
) -> StepReport:
    return StepReport(
        component_log("sft", logs), config.max_steps or 0, config.log_interval, metrics
    )


def prepare_model(config: SFTConfig, ranks: Ranks) -> tuple[Loaded, Optimizer]:
    """Load the model with its adapter, sharded if configured, and its optimizer."""
    loaded = load_configured(config.model, seed=config.seed)
    if config.lora:
        add_lora(loaded.model, config.lora, config.seed)
    shard_model(loaded.model, ranks, config.sharding)
    return loaded, Optimizer(loaded.model, config.optim, ranks)


def run_bench(config: SFTConfig, rows: DataSets, ranks: Ranks) -> None:
    """Print where the time of a step goes; write nothing."""
    loaded, optimizer = prepare_model(config, ranks)
    run = RunDirectory(config.output_dir, "sft", config.layout)
    trainer = Trainer(config, loaded, optimizer, run, build_report(config), ranks)
    data = trainer.load_data(rows)
    data_config = config.data.model_copy(update={"seq_len": trainer.row_tokens})
    batches, measured = iterate_steps(data, data_config, config.seed), []
    for step in range(1, WARM_UP + MEASURED + 1):
        if step == WARM_UP + 1:
            trainer.laps.clear_laps()
        measured.append(trainer.train_step(step, WARM_UP + MEASURED, batches))
    if ranks.is_first:
        print_bench(config.model.name, loaded.model, measured[WARM_UP:], trainer.laps.seconds)
    ranks.leave_ranks()


class Trainer:
    """Train a model. Only the first rank's report has metrics, and only it writes."""

    def __init__(
        self,
        config: SFTConfig,
        loaded: Loaded,
        optimizer: Optimizer,
        run: RunDirectory,
        report: StepReport,
        ranks: Ranks,
        evaluate: Evaluate | None = None,
    ) -> None:
        self.config, self.loaded, self.run, self.report, self.log = (
            config,
            loaded,
            run,
            report,
            report.log,
        )
        self.ranks, self.model = ranks, loaded.model
        self.device = self.model.embed.weight.device
        self.laps = Laps(self.device, is_on=config.bench)
        self.optimizer, self.evaluate = optimizer, evaluate
        self.row_tokens = config.data.seq_len or UNKNOWN_ROW_TOKENS
        self.export = Export(self.model, ranks, loaded.dtype)
        self.checkpoints = Checkpoints(run, optimizer, config.ckpt, ranks)
        self.model.recomputes = config.activation_checkpointing

    def train_steps(self, rows: DataSets, val_rows: DataSets, done: int) -> None:
        """Take the steps after `done`."""
        config = self.config
        data = self.load_data(rows)
        data_config = config.data.model_copy(update={"seq_len": self.row_tokens})
        val = Conversations(
            val_rows,
            self.loaded.tokenizer,
            self.max_conversation_tokens,
            config.data.train_on,
            config.data.rewritten_turns == "last",
        )
        if val_rows:
            survey_data(val, config.data, "val.name", self.log_data_line)
        data_of_val = data_config.model_copy(update={"weights": None, "shuffle": False})
        max_steps = config.max_steps or sum(
            1 for _ in iterate_steps(data, data_config, config.seed, epochs=1)
        )
        # Their order follows from the seed
        batches = islice(iterate_steps(data, data_config, config.seed), done, None)
        parameters = sum(p.numel() for p in self.model.parameters())
        self.log.info(
            "Training %s (%.2fM parameters, %s on %s) on %s conversations, steps %d to %d",
            config.model.name,
            parameters / 1e6,
            str(self.loaded.dtype)[6:],
            cpu.words(str(self.device)),
            data.count,
            done + 1,
            max_steps,
        )
        start = time.perf_counter()
        preemption.steps_begin()
        with Live("sft", self.ranks.is_first) as live:
            live.start_run(max_steps, done)
            if done == 0 and config.eval and config.eval.is_due(0, max_steps):
                values = self._evaluate_if_due(0)
                self.report.write_row(0, values)
            step = done
            for step in range(done + 1, max_steps + 1):
                values = self.train_step(step, max_steps, batches)
                is_last = step == max_steps or self._is_over(start)
                if config.val and (is_last or step % config.val.interval == 0):
                    values["val/loss"] = self.validation_loss(val, data_of_val)
                if config.eval and config.eval.is_due(step, step if is_last else max_steps):
                    values |= self._evaluate_if_due(step)
                live.show_step(
                    f"loss {values['loss/mean']:.4f}, {values['perf/throughput']:.0f} tokens/s"
                )
                self.report.max_steps = step if is_last else max_steps
                self.report.report_sft_step(step, values)
                if not is_last and self.ranks.any_rank(preemption.is_asked(), self.device):
                    self.checkpoints.leave_run(step, config.to_public_dict(), values)
                self._write_step(step, values, is_last)
                if is_last:
                    break
        if isinstance(data, StreamedConversations) and data.dropped_count:
            self.log_data_line(
                f"{data.dropped_count} of {data.read} rows that were read were left out: {data.left}"
            )
        self.log.info(
            "Weights of step %d in %s (%.1f s)",
            step,
            self.run.weights_of(step),
            time.perf_counter() - start,
        )

    def _is_over(self, start: float) -> bool:
        """Return True if max_seconds have passed on any rank."""
        limit = self.config.max_seconds
        if limit is None:
            return False
        return self.ranks.any_rank(time.perf_counter() - start >= limit, self.device)

    def load_data(self, rows: DataSets) -> Data:
        """Return the data of this run, and fix the row length.

        Raises ValueError if more than `data.max_left_out` would be left out.
        """
        config, tokenizer = self.config.data, self.loaded.tokenizer
        if config.fake:
            return FakeConversations(
                FAKE_ROWS,
                self.max_conversation_tokens,
                self.model.spec.vocab_size,
                self.config.seed,
            )
        kind: Any = StreamedConversations if config.streaming else Conversations
        most = self.max_conversation_tokens if config.seq_len else self.max_positions
        data: Conversations | StreamedConversations = kind(
            rows, tokenizer, most, config.train_on, config.rewritten_turns == "last"
        )
        if config.seq_len is None:
            if isinstance(data, Conversations):
                self.row_tokens = row_tokens_of_data(data, self.max_positions, self.log_data_line)
            else:
                self.row_tokens = row_tokens_of_streams(
                    data.sources, data.render, self.max_positions, self.log_data_line
                )
            data.limit_length(self.max_conversation_tokens)
        if isinstance(data, Conversations):
            survey_data(data, config, "data.name", self.log_data_line)
        return data

    def log_data_line(self, line: str, is_warning: bool = False) -> None:
        """Log a line about the data, on the first rank."""
        if self.ranks.is_first:
            self.log.log(logging.WARNING if is_warning else logging.INFO, "%s", line)

    @property
    def max_positions(self) -> int:
        """Return the most tokens of a conversation by the model's positions; the last is only a
        target.
        """
        return self.model.spec.max_position_embeddings + 1

    @property
    def max_conversation_tokens(self) -> int:
        """Return the most tokens of a conversation, by row length and positions."""
        return min(self.row_tokens, self.max_positions)

    def _write_step(self, step: int, values: dict[str, float], is_last: bool) -> None:
        config = self.config
        self.checkpoints.save_if_due(step, is_last, config.to_public_dict(), values)
        if is_last or (config.weights.interval and step % config.weights.interval == 0):
            max_steps = self.report.max_steps
            save_weights(
                self.export, self.run, step, max_steps, self.loaded, config.model.name, values
            )

    def _evaluate_if_due(self, step: int) -> dict[str, float]:
        """Evaluate on the first rank, with the model itself unless it is sharded; others wait."""
        values: dict[str, float] = {}
        model = self.export() if self.optimizer.is_sharded else self.model
        if self.ranks.is_first and self.evaluate is not None and model is not None:
            values = self.evaluate(model.to(self.device), self.loaded.tokenizer, step)
            self.report.report_evaluation(step, values)
        self.ranks.barrier()
        return values

    def train_step(
        self, step: int, max_steps: int, batches: Iterator[list[Row]]
    ) -> dict[str, float]:
        """Take one optimizer step. The loss is the mean over all targets of the step, however it is
        split.
        """
        start = time.perf_counter()
        seed_dropout(self.model, self.config.seed, step, self.ranks.rank)
        rows = next(batches)
        targets = sum(sum(mask[1:]) for row in rows for _, mask in row)
        mine = self.ranks.own_share(rows, [sum(len(ids) for ids, _ in row) for row in rows])
        tokens = sum(len(ids) for row in rows for ids, _ in row)
        loss, flops = torch.zeros((), device=self.device), 0.0
        parts = self._split_micro_batches(mine)
        for part in parts:
            micro = self._pack_rows(part or NOTHING)
            flops += 3 * micro.count_flops(self.model.spec)
            self.laps("data")
            total = cross_entropy_sum(micro, self.model) / (targets if part else math.inf)
            self.laps("forward")
            total.backward()
            loss += total.detach()
            self.laps("backward")
            if len(parts) > 1:
                self.optimizer.accumulate_gradients()
        lr = learning_rate(self.config.optim, self.config.scheduler, step, max_steps)
        grad_norm = self.optimizer.step(lr)
        self.laps("optimizer")
        is_bad = self.optimizer.is_bad(grad_norm)
        if is_bad:
            flat = [conversation for row in rows for conversation in row]

            def backward_alone(i: int) -> None:
                (cross_entropy_sum(self._pack_rows([[flat[i]]]), self.model) / targets).backward()

            def describe(i: int) -> dict[str, Any]:
                return dict(zip(("ids", "mask"), flat[i], strict=True))

            where = (self.optimizer, self.run.bad_steps, self.config.on_bad_step)
            handle_bad_step(
                step, grad_norm, len(flat), backward_alone, describe, *where, self.ranks
            )
        seconds = time.perf_counter() - start
        used = model_flops_utilization(flops / seconds, self.device)
        return {
            "loss/mean": float(self.ranks.sum_over_ranks(loss)),
            "optim/lr": lr,
            "optim/grad_norm": grad_norm,
            "optim/skipped": float(is_bad),
            "time/step": seconds,
            "perf/throughput": tokens / seconds,
            "perf/peak_memory": peak_memory_gib(self.device),
            "progress/tokens": tokens,
            "packing/fill": tokens / (len(rows) * self.row_tokens),
            "packing/conversations": sum(map(len, rows)),
            **({} if used is None else {"perf/mfu": used}),
        }

    def _split_micro_batches(self, mine: list[Row]) -> list[list[Row]]:
        """Return this rank's rows in micro-batches, equally many on ranks that share a model."""
        size = self.config.data.micro_batch_size or max(1, len(mine))
        parts = [mine[i : i + size] for i in range(0, len(mine), size)]
        if self.optimizer.is_sharded:
            parts += [[]] * (self.ranks.all_reduce_max(len(parts), self.device) - len(parts))
        return parts

    @torch.no_grad()
    def validation_loss(self, data: Conversations, config: DataConfig) -> float:
        """Return the mean loss over the targets of the validation data."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)  # of losses, of targets
        for rows in iterate_steps(data, config, seed=0, epochs=1):
            for part in self._split_micro_batches(rows[self.ranks.rank :: self.ranks.count]):
                micro = self._pack_rows(part or NOTHING)
                found = torch.tensor(
                    [float(cross_entropy_sum(micro, self.model)), len(micro.targets_N)]
                ).to(sums)
                sums += found if part else 0.0
        total, targets = self.ranks.sum_over_ranks(sums).tolist()
        return total / targets

    def _pack_rows(self, rows: list[Row]) -> Packed:
        conversations = [conversation for row in rows for conversation in row]
        return pack_sequences(
            [ids for ids, _ in conversations], [mask for _, mask in conversations], self.device
        )


if __name__ == "__main__":
    # Src/, where torchrun gave a file and not the package
    sys.path.insert(0, str(Path(__file__).parents[3]))
    sys.argv.insert(1, "sft")
    runpy.run_module("hone", run_name="__main__")
