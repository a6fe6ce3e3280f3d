"""Supervised fine-tuning.

rows ─ tokenize, pack ─► micro-batches ─ forward, loss (objectives.py), backward ─► AdamW ─► weights/step_N

The evaluation on environments is passed in (`launch/run_sft.py`).
"""

import copy
import logging
import math
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from hone import preemption
from hone.config.sft_config import UNKNOWN_ROW_TOKENS, DataConfig, SFTConfig
from hone.models.language_model import LanguageModel
from hone.models.loading import Loaded, load_configured
from hone.models.lora import add_lora, seed_dropout
from hone.monitors import trackers
from hone.monitors.events import EventList
from hone.monitors.logging_setup import component_log
from hone.monitors.metrics_log import Metrics
from hone.monitors.progress_line import ProgressLine
from hone.monitors.step_lines import SFTLines
from hone.text.tokenizer import Tokenizer
from hone.trainer.bad_steps import BadStepPolicy, Sequences, handle_bad_step
from hone.trainer.context_parallel import ContextGroup
from hone.trainer.division_checks import check_division
from hone.trainer.optim import Optimizer, learning_rate, resolve_lr
from hone.trainer.packing import Packed
from hone.trainer.performance import (
    WARM_UP,
    Laps,
    fit_to_device,
    keep_freed_memory,
    model_flops_utilization,
    peak_memory_gib,
    print_bench,
)
from hone.trainer.ranks import ALONE, Ranks
from hone.trainer.run_session import RunSession, describe_training
from hone.trainer.sft.data import (
    Conversation,
    Conversations,
    Data,
    FakeConversations,
    Renderer,
    Row,
    StreamedConversations,
    iterate_steps,
    split_units,
)
from hone.trainer.sft.data_sources import CONVERSATIONS, PREFERENCES, Source, load_rows
from hone.trainer.sft.objectives import CrossEntropy, DirectPreference, Objective
from hone.trainer.sft.preferences import PreferenceRenderer
from hone.trainer.sft.survey import row_tokens_of_data, row_tokens_of_streams, survey_data
from hone.trainer.sharding import shard_model
from hone.trainer.training_graphs import TrainingGraphs

DataSets = list[list[dict[str, Any]]]
Evaluate = Callable[[LanguageModel, Tokenizer, int], dict[str, float]]  # of a model after a step
BENCH_STEPS = 10  # steps of --bench
FAKE_ROWS = 4096


def main(config: SFTConfig, evaluate: Evaluate | None = None) -> None:
    trackers.check_trackers(config.wandb, config.tensorboard)
    keep_freed_memory()
    reads: Any = Source if config.data.streaming else load_rows
    columns = PREFERENCES if config.dpo else CONVERSATIONS
    names = [] if config.data.fake else config.data.name
    rows = [reads(name, config.data.split, rows=columns) for name in names]
    val_rows: DataSets = []
    if config.val:
        val_rows = [load_rows(config.val.name, config.val.split, "val.name", columns)]
    ranks = Ranks.join_ranks(config.ranks_timeout).with_context(config.context_parallel)
    if config.bench:
        return run_bench(config, rows, ranks)
    session = RunSession(config, "sft", "sft", ranks)
    session.check_claim()
    loaded, optimizer, objective = prepare_model(config, ranks)
    trainer = Trainer(config, loaded, optimizer, objective, session.run.bad_steps, ranks)
    # Load and check the data now: `begin` removes the earlier run with --clean.
    data = trainer.load_data(rows)
    val = trainer.load_val_data(val_rows)
    trainer.check_data(data, val)
    session.begin(loaded, optimizer)
    trainer.copy_data_lines()
    run_steps = partial(train_steps, session, trainer, data, val, evaluate)
    if ranks.is_first:
        with session.show_heartbeat(), Metrics(session.run.metrics, config) as metrics:
            with ProgressLine("sft") as progress_line:
                run_steps(EventList(metrics, SFTLines(config), progress_line))
            session.end(config.max_steps or 1)
    else:
        run_steps(EventList())
    ranks.leave_ranks()


def train_steps(
    session: RunSession,
    trainer: "Trainer",
    data: Data,
    val: Conversations,
    evaluate: Evaluate | None,
    events: EventList,
) -> None:
    """Take the remaining steps of a run. Collective."""
    config = trainer.config
    run = session.run
    log = trainer.log
    trainer.plan_micro_batches()
    data_config = trainer.data_config
    val_config = trainer.val_config
    max_steps = config.max_steps or sum(
        1 for _ in iterate_steps(data, data_config, config.seed, epochs=1)
    )
    # The order of the data follows from the seed, so a resumed run skips what was trained on.
    batches = islice(iterate_steps(data, data_config, config.seed), session.done, None)
    session.max_steps = max_steps
    log.info("%s", describe_training(session, f"on {data.count} conversations"))
    start = time.perf_counter()
    step = session.done

    preemption.steps_begin()
    events.on_start(max_steps, session.done)
    if session.done == 0:
        evaluate_if_due(session, trainer, evaluate, events, 0)
    for step in range(session.done + 1, max_steps + 1):
        values = trainer.train_step(step, max_steps, batches)
        is_last = step == max_steps or trainer.is_out_of_time(start)
        if is_last:
            session.max_steps = step
            events.on_last_step(step)
        if config.val and (is_last or step % config.val.interval == 0):
            values |= trainer.measure_validation(val, val_config)
        values |= evaluate_if_due(session, trainer, evaluate, events, step)
        events.on_step(step, values)
        if not is_last and session.ranks.any_rank(preemption.is_asked(), trainer.device):
            session.leave(step, values)
        session.save_step(step, is_last, values)
        if is_last:
            break
    trainer.log_dropped_rows(data)
    seconds = time.perf_counter() - start
    log.info("Weights of step %d in %s (%.1f s)", step, run.weights_of(step), seconds)


def evaluate_if_due(
    session: RunSession,
    trainer: "Trainer",
    evaluate: Evaluate | None,
    events: EventList,
    step: int,
) -> dict[str, float]:
    """Evaluate on the first rank if an evaluation is due; return the metrics. Other ranks wait.

    The trained model itself is evaluated or, if it is sharded, a gathered copy.
    """
    config = trainer.config.eval
    if config is None or not config.is_due(step, session.max_steps or step):
        return {}
    values: dict[str, float] = {}
    model = session.export() if trainer.optimizer.is_sharded else trainer.model
    if session.ranks.is_first and evaluate is not None and model is not None:
        values = evaluate(model.to(trainer.device), session.loaded.tokenizer, step)
        events.on_evaluation(step, values, step == 0)
    session.ranks.barrier()
    return values


def prepare_model(config: SFTConfig, ranks: Ranks) -> tuple[Loaded, Optimizer, Objective]:
    """Load the model with its adapter, sharded if configured, its optimizer, and the objective.

    Call it before a checkpoint is restored: the reference of `dpo` is the initial model.
    """
    loaded = load_configured(config.model, config.seed, config.lora)
    check_division(loaded.model.spec, config.context_parallel, config.expert_parallel)
    if config.lora:
        add_lora(loaded.model, config.lora, config.seed)
    objective: Objective = CrossEntropy()
    if config.dpo:
        reference = None
        if config.keeps_reference_copy:
            reference = copy.deepcopy(loaded.model).requires_grad_(False)
            shard_model(reference, ranks, config.sharding, config.expert_parallel)
        objective = DirectPreference(config.dpo, reference)
    shard_model(loaded.model, ranks, config.sharding, config.expert_parallel)
    return loaded, Optimizer(loaded.model, config.optim, ranks), objective


def run_bench(config: SFTConfig, rows: DataSets, ranks: Ranks) -> None:
    """Print where the time of a step goes; write nothing."""
    loaded, optimizer, objective = prepare_model(config, ranks)
    trainer = Trainer(config, loaded, optimizer, objective, Path("bad_steps"), ranks)
    data = trainer.load_data(rows)
    trainer.plan_micro_batches()
    data_config = trainer.data_config
    batches = iterate_steps(data, data_config, config.seed)
    measured = []
    for step in range(1, WARM_UP + BENCH_STEPS + 1):
        if step == WARM_UP + 1:
            trainer.laps.clear_laps()
        measured.append(trainer.train_step(step, WARM_UP + BENCH_STEPS, batches))
    if ranks.is_first:
        print_bench(config.model.name, loaded.model, measured[WARM_UP:], trainer.laps.seconds)
    ranks.leave_ranks()


class Trainer:
    """Steps of supervised fine-tuning on a model."""

    def __init__(
        self,
        config: SFTConfig,
        loaded: Loaded,
        optimizer: Optimizer,
        objective: Objective,
        bad_steps: Path,
        ranks: Ranks = ALONE,
    ) -> None:
        # Preferences, like rewards, need smaller steps than text that is imitated.
        has_small_steps = config.dpo is not None
        config = resolve_lr(config, loaded.model.spec.parameter_count(), is_rl=has_small_steps)
        self.config = config
        self.loaded = loaded
        self.objective = objective
        self.renderer: type[Renderer] = PreferenceRenderer if config.dpo else Renderer
        self.bad_steps = bad_steps
        self.ranks = ranks
        self.model = loaded.model
        self.context = ContextGroup.join_group(ranks)
        self.log = component_log("sft")
        self.data_lines: list[logging.LogRecord] = []
        self.device = self.model.embed.weight.device
        self.laps = Laps(self.device, is_on=config.bench)
        self.optimizer = optimizer
        self.row_tokens = config.data.seq_len or UNKNOWN_ROW_TOKENS
        self.micro_batch_rows = config.data.micro_batch_size
        self.model.recomputes = config.activation_checkpointing is True
        self.graphs = TrainingGraphs.for_model(self.model, optimizer.is_sharded)

    @property
    def data_config(self) -> DataConfig:
        """Return the configuration of the data with the length of rows in use."""
        return self.config.data.model_copy(update={"seq_len": self.row_tokens})

    @property
    def val_config(self) -> DataConfig:
        """Return the configuration with which validation data is read."""
        return self.data_config.model_copy(update={"weights": None, "shuffle": False})

    def check_data(self, data: Data, val: Conversations) -> None:
        """Raise ValueError if there is nothing to train on, or to validate on.

        Of streamed data only the first row is read: what it leaves out is known as it is read.
        """
        if isinstance(data, StreamedConversations):
            for source in data.sources:
                next(iter(source), None)
        else:
            next(iterate_steps(data, self.data_config, self.config.seed))
        if self.config.val is None:
            return
        try:
            next(iterate_steps(val, self.val_config, self.config.seed, epochs=1))
        except ValueError as error:
            raise ValueError(f"val.name: {error}") from None

    def plan_micro_batches(self) -> None:
        """Choose micro-batches that fit the GPU, once the length of rows is known."""
        if self.ranks.count > 1:
            return
        config = self.config.model_copy(update={"data": self.data_config})
        chosen = fit_to_device(config, self.model, self.log)
        self.micro_batch_rows = chosen.data.micro_batch_size
        self.model.recomputes = chosen.activation_checkpointing is True

    def is_out_of_time(self, start: float) -> bool:
        """Return True if max_seconds have passed on any rank."""
        limit = self.config.max_seconds
        if limit is None:
            return False
        return self.ranks.any_rank(time.perf_counter() - start >= limit, self.device)

    def load_val_data(self, rows: DataSets) -> Conversations:
        """Return the validation data. Raises ValueError like `load_data`."""
        config = self.config.data
        last_only = config.rewritten_turns == "last"
        most = self.max_conversation_tokens
        val = Conversations(
            rows, self.loaded.tokenizer, most, config.train_on, last_only, self.renderer
        )
        if rows:
            survey_data(val, config, "val.name", self.note_data)
        return val

    def load_data(self, rows: DataSets) -> Data:
        """Return the run's training data; choose the row length if it is not configured.

        Raises ValueError if more rows are left out than `data.max_left_out` allows.
        """
        config = self.config.data
        tokenizer = self.loaded.tokenizer
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
            rows,
            tokenizer,
            most,
            config.train_on,
            config.rewritten_turns == "last",
            self.renderer,
        )
        if config.seq_len is None:
            if isinstance(data, Conversations):
                self.row_tokens = row_tokens_of_data(data, self.max_positions, self.note_data)
            else:
                self.row_tokens = row_tokens_of_streams(
                    data.sources, data.render, self.max_positions, self.note_data
                )
            data.limit_length(self.max_conversation_tokens)
        if isinstance(data, Conversations):
            survey_data(data, config, "data.name", self.note_data)
        return data

    def log_dropped_rows(self, data: object) -> None:
        if isinstance(data, StreamedConversations) and data.dropped_count:
            self.note_data(
                f"{data.dropped_count} of {data.read} rows that were read were left out: {data.left}"
            )

    def note_data(self, line: str, is_warning: bool = False) -> None:
        """Log a line about the data on the first rank, and keep it for `copy_data_lines`."""
        level = logging.WARNING if is_warning else logging.INFO
        if self.ranks.is_first and self.log.isEnabledFor(level):
            record = self.log.makeRecord(self.log.name, level, __file__, 0, "%s", (line,), None)
            self.log.handle(record)
            self.data_lines.append(record)

    def copy_data_lines(self) -> None:
        """Write the lines about the data to the run's log file too, which exists by now."""
        for record in self.data_lines:
            for handler in self.log.handlers:
                handler.handle(record)

    @property
    def max_positions(self) -> int:
        """Return the maximum number of tokens in a conversation that the model's positions allow.

        This is the number of positions plus one, since the last token is only a target.
        """
        return self.model.spec.max_position_embeddings + 1

    @property
    def max_conversation_tokens(self) -> int:
        """Return the maximum number of tokens in a conversation, given row length and positions."""
        return min(self.row_tokens, self.max_positions)

    def train_step(
        self, step: int, max_steps: int, batches: Iterator[list[Row]]
    ) -> dict[str, float]:
        """Take one optimizer step and return its metrics.

        The loss is the mean over all units (targets, or pairs) of the step, whatever the split into
        micro-batches and ranks.
        """
        start = time.perf_counter()
        seed_dropout(self.model, self.config.seed, step, self.ranks.rank)
        rows = next(batches)
        units = self.objective.count_units(list_conversations(rows))
        mine = self.ranks.own_share(rows, [sum(len(ids) for ids, _ in row) for row in rows])
        tokens = sum(len(ids) for row in rows for ids, _ in row)
        sums = torch.zeros(1 + len(self.objective.metrics), device=self.device)
        flops = 0.0
        parts = self._split_micro_batches(mine)
        for part in parts:
            micro = self._pack_rows(part)
            flops += self.objective.passes * micro.count_flops(self.model.spec)
            self.laps("data")
            total, metrics = self.objective.sum_losses(micro, self.model)
            divisor = units if part else math.inf
            total = total / divisor
            self.laps("forward")
            total.backward()
            sums += torch.cat((total.detach()[None], metrics / divisor))
            self.laps("backward")
            if len(parts) > 1:
                self.optimizer.accumulate_gradients()
        lr = learning_rate(self.config.optim, self.config.scheduler, step, max_steps)
        grad_norm = self.optimizer.step(lr)
        self.laps("optimizer")
        is_bad = self.optimizer.is_bad(grad_norm)
        if is_bad:
            self._handle_bad_step(step, grad_norm, rows, units)
        seconds = time.perf_counter() - start
        used = model_flops_utilization(flops / seconds, self.device)
        names = ("loss/mean", *self.objective.metrics)
        return {
            **dict(zip(names, self.ranks.sum_over_ranks(sums).tolist(), strict=True)),
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

    def _handle_bad_step(self, step: int, grad_norm: float, rows: list[Row], units: int) -> None:
        flat = split_units(list_conversations(rows), self.renderer.unit_size)

        def backward_alone(i: int) -> None:
            total, _ = self.objective.sum_losses(self._pack_rows([flat[i]]), self.model)
            (total / units).backward()

        def describe(i: int) -> dict[str, Any]:
            names = ("ids", "mask", "rejected_ids", "rejected_mask")
            return dict(zip(names, chain.from_iterable(flat[i]), strict=False))

        sequences = Sequences(len(flat), backward_alone, describe)
        policy = BadStepPolicy(self.bad_steps, self.config.on_bad_step)
        handle_bad_step(step, grad_norm, sequences, self.optimizer, policy, self.ranks)

    def _split_micro_batches(self, mine: list[Row]) -> list[list[Row]]:
        """Split this rank's rows into micro-batches, equally many on all ranks if sharded."""
        size = self.micro_batch_rows or max(1, len(mine))
        parts = [mine[i : i + size] for i in range(0, len(mine), size)]
        if self.optimizer.is_sharded:
            parts += [[]] * (self.ranks.all_reduce_max(len(parts), self.device) - len(parts))
        return parts

    @torch.no_grad()
    def measure_validation(self, data: Conversations, config: DataConfig) -> dict[str, float]:
        """Return the mean loss, and means of the objective's metrics, over the validation data."""
        count = 1 + len(self.objective.metrics)
        sums = torch.zeros(1 + count, dtype=torch.float64, device=self.device)  # units first
        for rows in iterate_steps(data, config, seed=0, epochs=1):
            mine = rows[self.ranks.own_share_index :: self.ranks.shares]
            for part in self._split_micro_batches(mine):
                found = self.objective.sum_losses(self._pack_rows(part), self.model)
                if part:
                    units = self.objective.count_units(list_conversations(part))
                    sums[0] += units / self.ranks.context  # each of these ranks counts them
                    sums[1:] += torch.cat((found[0][None], found[1]))
        units, *totals = self.ranks.sum_over_ranks(sums).tolist()
        names = ("loss", *self.objective.metrics)
        return {f"val/{k}": total / units for k, total in zip(names, totals, strict=True)}

    def _pack_rows(self, rows: list[Row]) -> Packed:
        """Pack rows into a micro-batch; without rows, sequences that count for nothing."""
        packed = self.objective.pack_conversations(
            list_conversations(rows) or self.objective.nothing, self.device
        )
        if self.context is not None:
            packed = self.context.take_own_part(packed)
        packed.graphs = self.graphs
        return packed


def list_conversations(rows: list[Row]) -> list[Conversation]:
    return [conversation for row in rows for conversation in row]


if __name__ == "__main__":
    # torchrun ran this file: add src/ to the path.
    sys.path.insert(0, str(Path(__file__).parents[3]))
    sys.argv.insert(1, "sft")
    runpy.run_module("hone", run_name="__main__")
