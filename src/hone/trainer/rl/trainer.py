"""The RL trainer: a batch of samples in, one optimizer step on the shared weights, metrics out.

samples ─ split by tokens, pack ─► forward ─ logprobs at the sampler's T ─► policy loss, weighted ─
backward ─► AdamW
"""

import copy
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hone.config.rl_config import TrainerConfig
from hone.kernels import numerics
from hone.kernels.gpu import trains_model
from hone.kernels.pinned_memory import started_to_host, to_device
from hone.models.lora import add_lora, seed_dropout, without_lora
from hone.models.transformer import Transformer
from hone.monitors.value_summaries import summarize_values
from hone.records import Batch, Sample
from hone.trainer.bad_steps import handle_bad_step
from hone.trainer.loss import Loss, make_loss, policy_loss, token_weights
from hone.trainer.memory_estimate import Estimate, estimate_rl, micro_batch_tokens
from hone.trainer.optim import Optimizer, learning_rate
from hone.trainer.packing import (
    pack_sequences,
    pack_shared,
    prompt_of,
    share_by_prompt,
    split_by_prompt,
    split_by_tokens,
)
from hone.trainer.performance import Laps, device_bytes, model_flops_utilization, peak_memory_gib
from hone.trainer.ranks import ALONE, Ranks
from hone.trainer.sharding import shard_model
from hone.transport.batches import routing_of
from hone.transport.trained_tokens import Trained

REHEARSED = 96  # tokens of a prompt, and of what follows it: over one tile of the attention's
GROUP = 16
# So many numbers of a micro-batch, where others are of its tokens
SUMS = {"routing": 2, "differs": 1}


class PolicyTrainer:
    def __init__(
        self,
        model: Transformer,
        config: TrainerConfig,
        max_steps: int,
        bad_steps: Path = Path("bad_steps"),
        ranks: Ranks = ALONE,
        seed: int = 0,
    ) -> None:
        self.model, self.config, self.max_steps, self.bad_steps = (
            model,
            config,
            max_steps,
            bad_steps,
        )
        self.ranks, self.seed = ranks, seed
        self.device = model.embed.weight.device
        # Not on a GPU without the Triton kernels: torch's padded, masked attention costs more than sharing saves.
        self.shares_prompts = self.device.type == "cpu" or trains_model(
            model.embed.weight, model.spec.head_dim
        )
        self.laps = Laps(self.device, is_on=False)
        self.trained: Trained | None = None  # what this rank saw of the last step's tokens
        self.loss = make_loss(config.loss)
        self.loss_of = {
            env: make_loss(loss, f"trainer.loss_of.{env}") for env, loss in config.loss_of.items()
        }
        self.losses = [self.loss, *self.loss_of.values()]
        lora = config.lora
        if config.replay_routing and not model.spec.routed_experts:
            raise ValueError("trainer.replay_routing: this model is not a mixture of experts")
        if lora is not None and lora.dropout and numerics.is_exact():
            raise ValueError(
                "trainer.lora.dropout: with model.numerics exact the trainer drops nothing that was sampled"
            )
        if lora is not None:
            add_lora(model, lora, seed)
        # The reference model of the KL: under a fresh adapter the model without the adapter, else a copy.
        keeps = any("reference" in loss.needs for loss in self.losses) and not (
            lora and lora.keeps_reference
        )
        self.reference = copy.deepcopy(model).requires_grad_(False) if keeps else None
        for part in filter(None, (model, self.reference)):
            shard_model(part, ranks, config.sharding)
        self.optimizer = Optimizer(model, config.optim, ranks)
        model.recomputes = config.activation_checkpointing
        sizes = (model.spec, model.embed.weight.dtype.itemsize, config.activation_checkpointing)
        self.micro_batch_tokens = config.micro_batch_tokens or micro_batch_tokens(
            *sizes, device_bytes(self.device)
        )

    def estimate_memory(self, most_tokens: int) -> Estimate:
        """Estimate the memory of a step of up to `most_tokens` tokens."""
        itemsize = self.model.embed.weight.dtype.itemsize
        return estimate_rl(
            self.model.spec, self.config, most_tokens, itemsize, self.micro_batch_tokens
        )

    def compile_kernels(self, most_tokens: int = 2048) -> None:
        """Compile and load the kernels of steps of up to `most_tokens` (`gpu/compiling.py`).

        Does nothing without GPU kernels, or for sharded models, whose ranks must run in step.
        """
        if self.optimizer.is_sharded or not trains_model(
            self.model.embed.weight, self.model.spec.head_dim
        ):
            return
        count = max(GROUP, min(self.micro_batch_tokens, most_tokens) // (2 * REHEARSED))
        for members in (GROUP, 1):  # a group's prompt is computed once
            mask, logprobs = np.arange(2 * REHEARSED) >= REHEARSED, np.zeros(2 * REHEARSED)
            ids = [np.full(len(mask), i // members % 256) for i in range(count)]
            samples = [
                Sample(own, mask, logprobs, 1.0, 1.0, teacher_logprobs=logprobs) for own in ids
            ]
            for loss in self.losses:
                self.optimizer.clear_gradients()
                self._backward_micro_batch(loss, samples, [1.0] * count, defaultdict(list))
        self.optimizer.compile_kernels()

    def step(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step and return its metrics."""
        return self.begin_step(batch)()

    def begin_step(
        self, batch: Batch, meanwhile: Callable[[], object] = lambda: None
    ) -> Callable[[], dict[str, float]]:
        """Launch one optimizer step; return a function that waits for its metrics. Call it once.

        The loss is normalized by the loss tokens of the whole batch, however it is split. A batch
        without samples (no group had a signal) leaves the weights unchanged. `meanwhile` is called
        when all forward and backward passes have been launched.
        """
        start = time.perf_counter()
        seed_dropout(self.model, self.seed, batch.step, self.ranks.rank)
        lr = learning_rate(self.config.optim, self.config.scheduler, batch.step, self.max_steps)
        samples = batch.samples
        loss_lengths = [sample.target_count for sample in samples]
        kinds, weights = self._group_by_loss(samples), [0.0] * len(samples)
        # Each loss weighs by its share of the samples; tokens weigh as its config says
        for kind, members in kinds:
            own = token_weights([loss_lengths[i] for i in members], kind.config)
            share = (
                sum(map(bool, own)) / max(1, sum(map(bool, loss_lengths)))
                if len(kinds) > 1
                else 1.0
            )
            for i, weight in zip(members, own, strict=True):
                weights[i] = share * weight
        names = ["entropy", "mismatch_kl", "is_masked", "importance_ratio"]
        names += ["routing"] if self._is_replaying_routes(samples) else []
        names += ["differs"] if numerics.is_exact() else []
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in [*names, "logprobs"]}
        if any("reference" in kind.needs for kind in self.losses):
            parts["reference_kl"] = []
        loss, flops = torch.zeros((), device=self.device), 0.0
        split: list[tuple[Loss, list[int]]] = []
        for kind, members in kinds:
            own_parts = [
                [members[i] for i in part]
                for part in self._split_samples([samples[i] for i in members])
            ]
            # All ranks go through the model equally often, and for the same losses
            if self.optimizer.is_sharded:
                own_parts += [[]] * (
                    self.ranks.all_reduce_max(len(own_parts), self.device) - len(own_parts)
                )
            split += [(kind, part) for part in own_parts]
        for kind, members in split:
            part, work = self._backward_micro_batch(
                kind, [samples[i] for i in members], [weights[i] for i in members], parts
            )
            loss, flops = loss + part, flops + work
            if len(split) > 1:
                self.optimizer.accumulate_gradients()
        # Copied before the optimiser's work, beside which they are made into numbers.
        on_device = {"loss": loss} | {
            name: sum(found, loss.new_zeros(SUMS[name], dtype=torch.float64))
            if name in SUMS
            else torch.cat([*found, loss.new_empty(0)])
            for name, found in parts.items()
        }
        copies, arrival = started_to_host([*on_device.values()])
        meanwhile()
        grad_norm = self.optimizer.step(lr) if any(loss_lengths) else 0.0
        self.laps("optimizer")
        is_bad = self.optimizer.is_bad(grad_norm)
        if is_bad:
            alone = partial(self._backward_alone, samples, weights)

            def describe_sample(i: int) -> dict[str, Any]:
                found = {**vars(samples[i]), "routing": None}
                return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in found.items()}

            handle_bad_step(
                batch.step,
                grad_norm,
                len(samples),
                alone,
                describe_sample,
                self.optimizer,
                self.bad_steps,
                self.config.on_bad_step,
                self.ranks,
            )
        seconds = time.perf_counter() - start

        def finish_step() -> dict[str, float]:
            if arrival is not None:
                arrival.synchronize()
            here = dict(zip(on_device, copies, strict=True))
            order = [samples[i] for _, members in split for i in members]
            self.trained = Trained(
                order, here["logprobs"].float().numpy(), here["is_masked"].numpy() > 0
            )
            # Ranks add up and gather on the device
            found = self._collect_metrics(here if self.ranks.count == 1 else on_device)
            used = model_flops_utilization(3 * flops / seconds, self.device)
            return found | {
                "optim/lr": lr,
                "optim/grad_norm": grad_norm,
                "optim/skipped": float(is_bad),
                "time/train": seconds,
                "perf/train_throughput": sum(len(sample.ids) for sample in samples) / seconds,
                "perf/peak_memory": peak_memory_gib(self.device),
                **({} if used is None else {"perf/mfu": used}),
            }

        return finish_step

    def _collect_metrics(self, found: dict[str, torch.Tensor]) -> dict[str, float]:
        """Return the metrics of a step, over all ranks."""
        values = {"loss/mean": float(self.ranks.sum_over_ranks(found["loss"]))}
        # Of the experts that were given and of those among them that differ, how many
        if "routing" in found:
            differs, given = self.ranks.sum_over_ranks(found["routing"]).tolist()
            values["routing/differs"] = differs / max(given, 1.0)
        if "differs" in found:  # tokens whose logprob has other bits than the sampler's
            values["exact/differs"] = self.ranks.sum_over_ranks(found["differs"]).item()
        for name in found:
            if name not in (*SUMS, "loss", "logprobs"):
                values |= summarize_values(name, self.ranks.gather_numbers(found[name]))
        return values

    def _is_replaying_routes(self, samples: list[Sample]) -> bool:
        return self.config.replay_routing and any(sample.routing is not None for sample in samples)

    def _loss_of(self, sample: Sample) -> Loss:
        return self.loss_of.get(sample.env, self.loss)

    def _group_by_loss(self, samples: list[Sample]) -> list[tuple[Loss, list[int]]]:
        """Return each loss with the indices of its samples, which are processed separately."""
        kinds: list[tuple[Loss, list[int]]] = []
        for i, sample in enumerate(samples):
            loss = self._loss_of(sample)
            members = next(
                (members for kind, members in kinds if kind is loss or kind.config == loss.config),
                None,
            )
            if members is None:
                kinds.append((loss, members := []))
            members.append(i)
        return kinds

    def _split_samples(self, samples: list[Sample]) -> list[list[int]]:
        """Return the sample indices of each of this rank's micro-batches."""
        lengths, budget = [len(sample.ids) for sample in samples], self.micro_batch_tokens
        if not self.shares_prompts:
            mine = self.ranks.own_share(range(len(samples)), lengths)
            return [
                [mine[i] for i in part]
                for part in split_by_tokens([lengths[i] for i in mine], budget)
            ]
        prompts = [prompt_of(sample.ids, sample.mask) for sample in samples]
        mine = share_by_prompt(self.ranks, prompts, lengths)
        parts = split_by_prompt([prompts[i] for i in mine], [lengths[i] for i in mine], budget)
        return [[mine[i] for i in part] for part in parts]

    def _backward_micro_batch(
        self,
        loss: Loss,
        samples: list[Sample],
        weights: list[float],
        parts: dict[str, list[torch.Tensor]],
    ) -> tuple[torch.Tensor, float]:
        """Add a micro-batch to the gradients and its per-token values to `parts`.

        Returns its share of the loss, and the FLOPs of its forward pass. Without samples it only
        takes part in the ranks' collective operations.
        """
        if not samples:
            zeros = np.zeros(2)
            nothing = Sample(
                np.array([0, 0]), np.array([False, True]), zeros, 0.0, 1.0, teacher_logprobs=zeros
            )
            return self._backward_micro_batch(loss, [nothing], [0.0], defaultdict(list))
        pack_samples = pack_shared if self.shares_prompts else pack_sequences
        packed = pack_samples([s.ids for s in samples], [s.mask for s in samples], self.device)
        sequence_N = packed.sequence_N
        temperature_N, advantage_N, weight_N = (
            to_device(np.array(values, dtype=np.float32), self.device)[sequence_N]
            for values in (
                [s.temperature for s in samples],
                [s.advantage for s in samples],
                weights,
            )
        )
        self.model.routing_TR = None
        if self._is_replaying_routes(samples):
            rows = routing_of(samples, spare=1)[packed.source_T]
            self.model.routing_TR = to_device(rows, self.device).to(torch.int64)
        self.laps("data")
        reference_N = None
        if "reference" in loss.needs:
            with (
                torch.no_grad(),
                without_lora(self.model) if self.reference is None else nullcontext(),
            ):
                reference_N, _ = packed.target_logprobs(self.reference or self.model, temperature_N)

        @cache
        def sampled_logprobs() -> tuple[torch.Tensor, torch.Tensor | None]:
            """Return the sampler's and the teacher's logprobs, made while a GPU runs the model."""
            teachers = [s.teacher_logprobs for s in samples if s.teacher_logprobs is not None]
            teacher_N = packed.of_targets(teachers) if len(teachers) == len(samples) else None
            return packed.of_targets([s.logprobs for s in samples]), teacher_N

        def loss_of(part: slice, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
            sampled_N, teacher_N = sampled_logprobs()
            found = policy_loss(
                logprobs,
                sampled_N[part],
                advantage_N[part],
                sequence_N[part],
                weight_N[part],
                loss,
                entropy,
                None if reference_N is None else reference_N[part],
                None if teacher_N is None else teacher_N[part],
            )
            parts["logprobs"].append(logprobs.detach())
            if numerics.is_exact():
                parts["differs"].append((logprobs.detach() != sampled_N[part]).sum()[None])
            parts["entropy"].append(entropy.detach())
            parts["mismatch_kl"].append(found.mismatch_kl)
            parts["is_masked"].append(found.is_masked)
            parts["importance_ratio"].append(found.ratio)
            if found.reference_kl is not None:
                parts["reference_kl"].append(found.reference_kl)
            return found.total

        needs_entropy = "entropy" in loss.needs
        if "whole_sequences" not in loss.needs:
            total = packed.compute_loss(self.model, temperature_N, loss_of, needs_entropy)
        else:
            total = loss_of(
                slice(None), *packed.target_logprobs(self.model, temperature_N, needs_entropy)
            )
        self.laps("forward")
        total.backward()
        self.laps("backward")
        if self.model.routing_TR is not None:
            parts["routing"].append(self._differing_routing())
        return total.detach(), packed.count_flops(self.model.spec)

    def _differing_routing(self) -> torch.Tensor:
        """Return how many replayed experts the routers would not have chosen, and how many there
        are.
        """
        self.model.routing_TR, found = None, torch.zeros(2, dtype=torch.float64, device=self.device)
        for mixture in self.model.expert_layers:
            assert mixture.differs_TK is not None and mixture.given_TK is not None
            found += torch.stack([mixture.differs_TK.sum(), (mixture.given_TK >= 0).sum()])
        return found

    def _backward_alone(self, samples: list[Sample], weights: list[float], i: int) -> None:
        self._backward_micro_batch(
            self._loss_of(samples[i]), [samples[i]], [weights[i]], defaultdict(list)
        )
