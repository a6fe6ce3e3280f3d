"""Supervised fine-tuning, top to bottom.

rows ─ tokenise, pack ─► micro-batches ─ forward, loss on assistant tokens, backward ─► AdamW ─► weights/step_N
"""

import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hone.config.help import to_toml
from hone.config.sft import SFTConfig
from hone.models.hf import save_model
from hone.models.loading import Loaded, load
from hone.monitors.log import SUCCESS, component_log
from hone.monitors.metrics import Metrics, check_wandb
from hone.run_directory import RunDirectory
from hone.trainer.bad_steps import handle
from hone.trainer.checkpoint import forget_after, restore, resume_from, save_checkpoint
from hone.trainer.loss import cross_entropy_sum
from hone.trainer.optim import Optimizer, learning_rate
from hone.trainer.packing import Packed, pack
from hone.trainer.performance import keep_freed_memory, mfu, peak_memory_gib
from hone.trainer.sft.data import Conversations, Row, load_rows, steps


def main(config: SFTConfig) -> None:
    check_wandb(config.wandb)
    keep_freed_memory()
    rows = load_rows(config.data)
    val_rows = load_rows(config.val) if config.val else []
    run = RunDirectory(config.output_dir, "sft")
    sources = resume_from(run, config.resume)
    loaded = load(config.model, seed=config.seed)
    optimizer = Optimizer(loaded.model, config.optim)
    done = restore(sources, optimizer, config.public())
    run.claim(
        clean=config.clean or config.resume == "auto",
        resume=bool(sources),
        weight_steps=config.weights.steps(config.max_steps) if config.max_steps else [],
    )
    if sources:
        forget_after(done, run)
    run.write_config(to_toml(config))
    log = component_log("sft", run.logs)
    with Metrics(run.metrics, config.wandb, config) as metrics:
        Trainer(config, loaded, optimizer, run, metrics, log).train(rows, val_rows, done)


class Trainer:
    def __init__(
        self, config: SFTConfig, loaded: Loaded, optimizer: Optimizer, run: RunDirectory, metrics: Metrics, log: Any
    ) -> None:
        self.config, self.loaded, self.run, self.metrics, self.log = config, loaded, run, metrics, log
        self.model = loaded.model
        self.device = self.model.embed.weight.device
        self.optimizer = optimizer

    def train(self, rows: list[dict[str, Any]], val_rows: list[dict[str, Any]], done: int) -> None:
        """Takes the steps after `done`."""
        config = self.config
        data = Conversations(rows, self.loaded.tokenizer, config.data.seq_len)
        val = Conversations(val_rows, self.loaded.tokenizer, config.data.seq_len)
        max_steps = config.max_steps or sum(1 for _ in steps(data, config.data, config.seed, epochs=1))
        batches = islice(steps(data, config.data, config.seed), done, None)  # their order follows from the seed
        parameters = sum(p.numel() for p in self.model.parameters())
        self.log.info(
            "Training %s (%.2fM parameters, %s on %s) on %d conversations, steps %d to %d",
            config.model.name, parameters / 1e6, str(self.model.embed.weight.dtype)[6:], self.device, len(data),
            done + 1, max_steps,
        )  # fmt: skip
        start = time.perf_counter()
        with _progress() as progress:
            task = progress.add_task("sft", total=max_steps, completed=done, loss=float("nan"), rate=0.0)
            for step in range(done + 1, max_steps + 1):
                values = self.step(step, max_steps, batches)
                out_of_time = config.max_seconds is not None and time.perf_counter() - start >= config.max_seconds
                is_last = step == max_steps or out_of_time
                if config.val and (is_last or step % config.val.interval == 0):
                    values["val/loss"] = self.validate(val)
                self.metrics.log(step, values)
                self._log_step(step, values, console=is_last or step % config.log_interval == 0)
                progress.update(task, advance=1, loss=values["loss/mean"], rate=values["perf/throughput"])
                if config.ckpt and (is_last or step % config.ckpt.interval == 0):
                    save_checkpoint(self.run, self.optimizer, step, config.public(), config.ckpt, values)
                if is_last or (config.weights.interval and step % config.weights.interval == 0):
                    save_model(self.model, self.loaded.directory, self.run.weights_for(step))
                if is_last:
                    break
        if data.dropped:
            self.log.warning(
                "%d of %d conversations were left out: longer than data.seq-len %d, or without an assistant turn",
                len(data.dropped), len(data), config.data.seq_len,
            )  # fmt: skip
        self.log.info(
            "Weights of step %d in %s (%.1f s)", step, self.run.weights / f"step_{step}", time.perf_counter() - start
        )

    def step(self, step: int, max_steps: int, batches: Iterator[list[Row]]) -> dict[str, float]:
        """One optimiser step. The loss is the mean over all targets of the step, however it is split."""
        start = time.perf_counter()
        rows = next(batches)
        size = self.config.data.micro_batch_size or len(rows)
        targets = sum(sum(mask[1:]) for row in rows for _, mask in row)
        tokens = sum(len(ids) for row in rows for ids, _ in row)
        loss = torch.zeros((), device=self.device)
        for i in range(0, len(rows), size):
            micro = self._pack(rows[i : i + size])
            total = cross_entropy_sum(micro, self.model) / targets
            total.backward()
            loss += total.detach()
        lr = learning_rate(self.config.optim, self.config.scheduler, step, max_steps)
        grad_norm = self.optimizer.step(lr)
        is_bad = self.optimizer.is_bad(grad_norm)
        if is_bad:
            flat = [conversation for row in rows for conversation in row]
            alone = lambda i: (cross_entropy_sum(self._pack([[flat[i]]]), self.model) / targets).backward()  # noqa: E731
            describe = lambda i: dict(zip(("ids", "mask"), flat[i], strict=True))  # noqa: E731
            where = (self.optimizer, self.run.bad_steps, self.config.on_bad_step)
            handle(step, grad_norm, len(flat), alone, describe, *where)
        seconds = time.perf_counter() - start
        context = sum(len(ids) ** 2 for row in rows for ids, _ in row) / (2 * tokens)
        used = mfu(3 * self.model.spec.flops_per_token(context) * tokens / seconds, self.device)
        return {
            "loss/mean": float(loss),
            "optim/lr": lr,
            "optim/grad_norm": grad_norm,
            "optim/skipped": float(is_bad),
            "time/step": seconds,
            "perf/throughput": tokens / seconds,
            "perf/peak_memory": peak_memory_gib(self.device),
            "progress/tokens": tokens,
            **({} if used is None else {"perf/mfu": used}),
        }

    @torch.no_grad()
    def validate(self, data: Conversations) -> float:
        """Mean loss over the targets of the validation data."""
        total, targets = 0.0, 0
        for rows in steps(data, self.config.data, seed=0, epochs=1):
            micro = self._pack(rows)
            total += float(cross_entropy_sum(micro, self.model))
            targets += len(micro.targets_N)
        return total / targets

    def _pack(self, rows: list[Row]) -> Packed:
        conversations = [conversation for row in rows for conversation in row]
        return pack([ids for ids, _ in conversations], [mask for _, mask in conversations], self.device)

    def _log_step(self, step: int, values: dict[str, float], console: bool) -> None:
        parts = [
            f"Step {step}",
            f"Time: {values['time/step']:.2f}s",
            f"Loss: {values['loss/mean']:.4f}",
            *([f"Val. Loss: {values['val/loss']:.4f}"] if "val/loss" in values else []),
            f"Grad. Norm: {values['optim/grad_norm']:.4f}",
            f"LR: {values['optim/lr']:.2e}",
            f"Throughput: {values['perf/throughput']:.0f} tokens/s",
            *([f"MFU: {values['perf/mfu']:.1%}"] if "perf/mfu" in values else []),
            f"Peak Mem.: {values['perf/peak_memory']:.1f} GiB",
        ]
        self.log.log(SUCCESS, " | ".join(parts), extra={"console": console})


def _progress() -> Progress:
    """A bar with loss, tokens/s and time left; on a terminal only, elsewhere the log lines stand alone."""
    columns = [
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
        TextColumn("left"),
        TimeRemainingColumn(),
    ]
    console = Console()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))  # src/, where torchrun gave a file and not the package
    from hone.cli import run_as_file

    run_as_file("sft")
