"""The RL trainer: a batch of samples in, one optimizer step on the policy's weights, metrics out.

samples ─ split by tokens, pack ─► forward ─ logprobs at sampling temperature ─► weighted loss ─ backward ─► AdamW
"""

import copy
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hone.config.rl_config import TrainerConfig
from hone.kernels import numerics
from hone.kernels.pinned_memory import started_to_host, to_device
from hone.models.device_memory import total_bytes
from hone.models.language_model import LanguageModel
from hone.models.lora import add_lora, seed_dropout
from hone.monitors.value_summaries import summarize_values
from hone.records import Batch, Sample
from hone.trainer.bad_steps import BadStepPolicy, Sequences, handle_bad_step
from hone.trainer.context_parallel import ContextGroup
from hone.trainer.division_checks import check_division
from hone.trainer.loss import (
    Loss,
    compute_reference_logprobs,
    make_loss,
    policy_loss,
    token_weights,
)
from hone.trainer.memory_estimate import Estimate, estimate_rl, micro_batch_tokens
from hone.trainer.optim import Optimizer, learning_rate, resolve_lr
from hone.trainer.packing import (
    Packed,
    pack_sequences,
    pack_shared,
    prompt_of,
    share_by_prompt,
    split_by_prompt,
    split_by_tokens,
)
from hone.trainer.performance import Laps, model_flops_utilization, peak_memory_gib
from hone.trainer.ranks import ALONE, Ranks
from hone.trainer.sharding import shard_model
from hone.trainer.training_graphs import TrainingGraphs
from hone.transport.batches import routing_of
from hone.transport.trained_tokens import Trained

REHEARSAL_TOKENS = 96  # tokens of a prompt and of a completion: more than one tile of attention
REHEARSAL_GROUP_SIZE = 16
# Values of which a micro-batch has so many numbers; others have one per target token.
SUMS = {"routing": 2, "differs": 1}
# Values written to files for every target of a sample; context-parallel ranks gather them.
BY_TARGET = ("logprobs", "is_masked")
Values = dict[str, list[torch.Tensor]]  # of the micro-batches so far, by metric


class PolicyTrainer:
    def __init__(
        self,
        model: LanguageModel,
        config: TrainerConfig,
        max_steps: int,
        bad_steps: Path = Path("bad_steps"),
        ranks: Ranks = ALONE,
        seed: int = 0,
    ) -> None:
        self.model = model
        config = resolve_lr(config, model.spec.parameter_count(), is_rl=True)
        self.config = config
        self.max_steps = max_steps
        self.bad_steps = bad_steps
        check_division(model.spec, config.context_parallel, config.expert_parallel)
        self.ranks = ranks.with_context(config.context_parallel)
        self.seed = seed
        self.device = model.embed.weight.device
        # Not on a GPU without the Triton kernels: torch's padded, masked attention costs more than sharing saves.
        self.shares_prompts = self.device.type == "cpu" or model.trains_prefixes
        self.laps = Laps(self.device, is_on=False)
        self.trained: Trained | None = None  # this rank's values of the last step's tokens
        self.loss = make_loss(config.loss)
        self.loss_of = {
            env: make_loss(loss, f"trainer.loss_of.{env}") for env, loss in config.loss_of.items()
        }
        self.losses = [self.loss, *self.loss_of.values()]
        self.context = ContextGroup.join_group(self.ranks)
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
            shard_model(part, self.ranks, config.sharding, config.expert_parallel)
        self.optimizer = Optimizer(model, config.optim, self.ranks)
        model.recomputes = config.activation_checkpointing is True
        sizes = (model.spec, model.embed.weight.dtype.itemsize, model.recomputes)
        self.micro_batch_tokens = config.micro_batch_tokens or micro_batch_tokens(
            *sizes, total_bytes(self.device)
        )
        self.micro_batch_tokens *= self.ranks.context
        self.graphs = TrainingGraphs.for_model(model, self.optimizer.is_sharded)

    def estimate_memory(self, most_tokens: int) -> Estimate:
        """Estimate the memory of a step of up to `most_tokens` tokens."""
        itemsize = self.model.embed.weight.dtype.itemsize
        return estimate_rl(
            self.model.spec, self.config, most_tokens, itemsize, self.micro_batch_tokens
        )

    def compile_kernels(self, most_tokens: int = 2048) -> None:
        """Compile and load the kernels of steps of up to `most_tokens` tokens.

        Does nothing without GPU kernels, or for a sharded model, whose ranks would all have to take
        part. See `gpu/compiling.py`.
        """
        if self.optimizer.is_sharded or not self.model.stays_on_device:
            return
        count = max(
            REHEARSAL_GROUP_SIZE,
            min(self.micro_batch_tokens, most_tokens) // (2 * REHEARSAL_TOKENS),
        )
        graphs, self.graphs = self.graphs, None  # nothing is captured while kernels are compiled
        for members in (REHEARSAL_GROUP_SIZE, 1):  # a group's prompt is computed once
            mask = np.arange(2 * REHEARSAL_TOKENS) >= REHEARSAL_TOKENS
            logprobs = np.zeros(2 * REHEARSAL_TOKENS)
            ids = [np.full(len(mask), i // members % 256) for i in range(count)]
            samples = [
                Sample(own, mask, logprobs, 1.0, 1.0, teacher_logprobs=logprobs) for own in ids
            ]
            for loss in self.losses:
                self.optimizer.clear_gradients()
                self._backward_part(loss, samples, [1.0] * count, defaultdict(list))
        self.graphs = graphs
        self.optimizer.compile_kernels()

    def step(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step and return its metrics."""
        return self.begin_step(batch)()

    def begin_step(
        self, batch: Batch, meanwhile: Callable[[], object] = lambda: None
    ) -> Callable[[], dict[str, float]]:
        """Launch one optimizer step; return a function that waits for the step's metrics.

        Call the returned function exactly once. The weights of the tokens' losses are computed over
        the whole batch, so the loss does not depend on the split into micro-batches. A batch
        without samples (all advantages were 0) leaves the model unchanged. `meanwhile` is called
        when all forward and backward passes have been launched.
        """
        start = time.perf_counter()
        samples = batch.samples
        seed_dropout(self.model, self.seed, batch.step, self.ranks.rank)
        lr = learning_rate(self.config.optim, self.config.scheduler, batch.step, self.max_steps)
        by_loss = self._group_by_loss(samples)
        weights = _weigh_samples(samples, by_loss)
        parts = self._split_parts(samples, by_loss)
        values = self._start_values(samples)
        loss = torch.zeros((), device=self.device)
        flops = 0.0
        for kind, members in parts:
            own = [samples[i] for i in members]
            share, work = self._backward_part(kind, own, [weights[i] for i in members], values)
            loss = loss + share
            flops = flops + work
            if len(parts) > 1:
                self.optimizer.accumulate_gradients()
        # The copy to the host overlaps with the optimizer's work.
        on_device = {"loss": loss} | {
            name: sum(found, loss.new_zeros(SUMS[name], dtype=torch.float64))
            if name in SUMS
            else torch.cat([*found, loss.new_empty(0)])
            for name, found in values.items()
        }
        copies, arrival = started_to_host([*on_device.values()])
        meanwhile()
        has_targets = any(sample.target_count for sample in samples)
        grad_norm = self.optimizer.step(lr) if has_targets else 0.0
        self.laps("optimizer")
        is_bad = self.optimizer.is_bad(grad_norm)
        if is_bad:
            self._handle_bad_step(batch, weights, grad_norm)
        seconds = time.perf_counter() - start
        metrics = {
            "optim/lr": lr,
            "optim/grad_norm": grad_norm,
            "optim/skipped": float(is_bad),
            "time/train": seconds,
            "perf/train_throughput": sum(len(sample.ids) for sample in samples) / seconds,
        }

        def finish_step() -> dict[str, float]:
            if arrival is not None:
                arrival.synchronize()
            here = dict(zip(on_device, copies, strict=True))
            if self.context is None or self.context.index == 0:
                order = [samples[i] for _, members in parts for i in members]
                self.trained = Trained(
                    order, here["logprobs"].float().numpy(), here["is_masked"].numpy() > 0
                )
            # Several ranks sum and gather on the device.
            found = self._collect_metrics(here if self.ranks.count == 1 else on_device)
            used = model_flops_utilization(3 * flops / seconds, self.device)
            mfu = {} if used is None else {"perf/mfu": used}
            memory = {"perf/peak_memory": peak_memory_gib(self.device)}
            return found | metrics | memory | mfu

        return finish_step

    def _start_values(self, samples: list[Sample]) -> Values:
        names = ["logprobs", "entropy", "mismatch_kl", "is_masked", "importance_ratio"]
        names += ["routing"] if self._is_replaying_routes(samples) else []
        names += ["differs"] if numerics.is_exact() else []
        names += ["reference_kl"] if any("reference" in kind.needs for kind in self.losses) else []
        return {name: [] for name in names}

    def _handle_bad_step(self, batch: Batch, weights: list[float], grad_norm: float) -> None:
        samples = batch.samples

        def backward_alone(i: int) -> None:
            loss = self._loss_of(samples[i])
            self._backward_part(loss, [samples[i]], [weights[i]], defaultdict(list))

        def describe_sample(i: int) -> dict[str, Any]:
            found = {**vars(samples[i]), "routing": None}
            return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in found.items()}

        sequences = Sequences(len(samples), backward_alone, describe_sample)
        policy = BadStepPolicy(self.bad_steps, self.config.on_bad_step)
        handle_bad_step(batch.step, grad_norm, sequences, self.optimizer, policy, self.ranks)

    def _collect_metrics(self, found: dict[str, torch.Tensor]) -> dict[str, float]:
        """Return the metrics of a step, over all ranks."""
        values = {"loss/mean": float(self.ranks.sum_over_ranks(found["loss"]))}
        # Counts of replayed experts, and of those that differ from the router's choice.
        if "routing" in found:
            differs, given = self.ranks.sum_over_ranks(found["routing"]).tolist()
            values["routing/differs"] = differs / max(given, 1.0)
        if "differs" in found:  # tokens whose logprob differs from the sampler's in any bit
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
        """Return each distinct loss with the indices of its samples.

        Samples with different losses are processed in separate micro-batches.
        """
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

    def _split_parts(
        self, samples: list[Sample], by_loss: list[tuple[Loss, list[int]]]
    ) -> list[tuple[Loss, list[int]]]:
        """Return this rank's micro-batches, each as (loss, indices of the samples).

        Ranks of a sharded model get equally many micro-batches for each loss; some of them may be
        empty.
        """
        parts: list[tuple[Loss, list[int]]] = []
        for kind, members in by_loss:
            split = self._split_samples([samples[i] for i in members])
            if self.optimizer.is_sharded:
                most = self.ranks.all_reduce_max(len(split), self.device)
                split += [[]] * (most - len(split))
            parts += [(kind, [members[i] for i in part]) for part in split]
        return parts

    def _split_samples(self, samples: list[Sample]) -> list[list[int]]:
        """Return the sample indices of each of this rank's micro-batches."""
        lengths = [len(sample.ids) for sample in samples]
        budget = self.micro_batch_tokens
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

    def _backward_part(
        self, loss: Loss, samples: list[Sample], weights: list[float], values: Values
    ) -> tuple[torch.Tensor, float]:
        """Run forward and backward of a micro-batch; add its per-token values to `values`.

        Returns the micro-batch's share of the batch's loss, and the FLOPs of its forward pass. If
        there are no samples, a sample of weight 0 is computed, so that this rank takes part in the
        collective operations.
        """
        if not samples:
            return self._backward_part(loss, [_nothing()], [0.0], defaultdict(list))
        whole, packed = self._pack_part(samples)
        # The targets that the loss gets: this rank's, or all of the sequences.
        needs_whole = "whole_sequences" in loss.needs
        inputs = self._make_inputs(whole if needs_whole else packed, samples, weights)
        temperature_N = self._of_targets(packed, [s.temperature for s in samples])
        self.laps("data")

        def complete_values(own_N: torch.Tensor) -> torch.Tensor:
            if self.context is None or not needs_whole:
                return own_N
            return self.context.complete_targets(own_N, packed, whole)

        if "reference" in loss.needs:
            inputs.reference_N = complete_values(
                compute_reference_logprobs(packed, self.model, self.reference, temperature_N)
            )
        found: Values = defaultdict(list)

        def loss_of(part: slice, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
            return _loss_of_slice(loss, inputs, part, (logprobs, entropy), found)

        needs_entropy = "entropy" in loss.needs
        if needs_whole:
            numbers = packed.target_logprobs(self.model, temperature_N, needs_entropy)
            total = loss_of(slice(None), *map(complete_values, numbers))
        else:
            total = packed.compute_loss(self.model, temperature_N, loss_of, needs_entropy)
        self.laps("forward")
        total.backward()
        self.laps("backward")
        if self.model.routing_TR is not None:
            found["routing"].append(self._differing_routing())
        share = total.detach()
        if self.context is not None:
            share = self._gather_values(found, share, packed, whole, needs_whole)
        for name, parts in found.items():
            values[name] += parts
        return share, packed.count_flops(self.model.spec)

    def _gather_values(
        self, found: Values, loss: torch.Tensor, packed: Packed, whole: Packed, has_whole: bool
    ) -> torch.Tensor:
        """Complete what files have of all targets; return this rank's share of the loss.

        `has_whole`: each rank has computed the loss of the whole micro-batch, which one of them counts.
        """
        assert self.context is not None
        if has_whole:
            if self.context.index:
                found.pop("differs", None)
            return loss / self.context.count
        for name in BY_TARGET:
            own_N = torch.cat([loss.new_empty(0), *found[name]])  # perhaps no targets
            found[name] = [self.context.gather_targets(own_N, packed, whole)]
        return loss

    def _pack_part(self, samples: list[Sample]) -> tuple[Packed, Packed]:
        """Return the micro-batch, and this rank's part of it."""
        pack_samples = pack_shared if self.shares_prompts else pack_sequences
        whole = pack_samples([s.ids for s in samples], [s.mask for s in samples], self.device)
        packed = whole if self.context is None else self.context.take_own_part(whole)
        packed.graphs = self.graphs
        self.model.routing_TR = None
        if self._is_replaying_routes(samples):
            rows = routing_of(samples, spare=1)[packed.source_T]
            self.model.routing_TR = to_device(rows, self.device).to(torch.int64)
        return whole, packed

    def _of_targets(self, packed: Packed, numbers: list[float]) -> torch.Tensor:
        """Return each target's number from those of the sequences."""
        on_device = to_device(np.array(numbers, dtype=np.float32), self.device)
        return on_device[packed.sequence_N]

    def _make_inputs(
        self, packed: Packed, samples: list[Sample], weights: list[float]
    ) -> "_Inputs":
        """Return the inputs of the loss of these targets."""
        advantage_N = self._of_targets(packed, [s.advantage for s in samples])
        return _Inputs(samples, packed, advantage_N, self._of_targets(packed, weights))

    def _differing_routing(self) -> torch.Tensor:
        """Count the replayed experts that routers would not choose, and all replayed experts.

        Replayed experts are the sampler's, which training uses in place of its routers' choice.
        Returns both counts in one tensor, and ends the replay.
        """
        self.model.routing_TR = None
        found = torch.zeros(2, dtype=torch.float64, device=self.device)
        for mixture in self.model.expert_layers:
            assert mixture.differs_TK is not None and mixture.given_TK is not None
            found += torch.stack([mixture.differs_TK.sum(), (mixture.given_TK >= 0).sum()])
        return found


@dataclass
class _Inputs:
    """The inputs of a micro-batch's loss, one number per target token."""

    samples: list[Sample]
    packed: Packed
    advantage_N: torch.Tensor
    weight_N: torch.Tensor
    reference_N: torch.Tensor | None = None

    @cached_property
    def sampled_N(self) -> torch.Tensor:
        """The sampler's logprobs, collected on first use, while a GPU runs the model."""
        return self.packed.of_targets([s.logprobs for s in self.samples])

    @cached_property
    def teacher_N(self) -> torch.Tensor | None:
        found = [s.teacher_logprobs for s in self.samples if s.teacher_logprobs is not None]
        return self.packed.of_targets(found) if len(found) == len(self.samples) else None


def _loss_of_slice(
    loss: Loss,
    inputs: _Inputs,
    part: slice,
    computed: tuple[torch.Tensor, torch.Tensor],
    values: Values,
) -> torch.Tensor:
    """Return the loss of a slice of the targets; append per-token metrics to `values`.

    `computed`: logprobs, entropies.
    """
    logprobs, entropy = computed
    sampled_N = inputs.sampled_N[part]
    reference_N = inputs.reference_N
    found = policy_loss(
        logprobs,
        sampled_N,
        inputs.advantage_N[part],
        inputs.packed.sequence_N[part],
        inputs.weight_N[part],
        loss,
        entropy,
        None if reference_N is None else reference_N[part],
        None if inputs.teacher_N is None else inputs.teacher_N[part],
    )
    values["logprobs"].append(logprobs.detach())
    if numerics.is_exact():
        values["differs"].append((logprobs.detach() != sampled_N).sum()[None])
    values["entropy"].append(entropy.detach())
    values["mismatch_kl"].append(found.mismatch_kl)
    values["is_masked"].append(found.is_masked)
    values["importance_ratio"].append(found.ratio)
    if found.reference_kl is not None:
        values["reference_kl"].append(found.reference_kl)
    return found.total


def _weigh_samples(samples: list[Sample], by_loss: list[tuple[Loss, list[int]]]) -> list[float]:
    """Return the weight of each token's loss, one number per sample.

    With several losses, the weights that `token_weights` returns for the samples of a loss are
    multiplied by this loss's share of all samples with targets.
    """
    lengths = [sample.target_count for sample in samples]
    weights = [0.0] * len(samples)
    count = max(1, sum(map(bool, lengths)))
    for kind, members in by_loss:
        own = token_weights([lengths[i] for i in members], kind.config)
        share = sum(map(bool, own)) / count if len(by_loss) > 1 else 1.0
        for i, weight in zip(members, own, strict=True):
            weights[i] = share * weight
    return weights


def _nothing() -> Sample:
    """Return a sample of weight 0, with which a rank without samples takes part in collectives."""
    zeros = np.zeros(2)
    mask = np.array([False, True])
    return Sample(np.array([0, 0]), mask, zeros, 0.0, 1.0, teacher_logprobs=zeros)
