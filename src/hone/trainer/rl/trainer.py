"""The RL trainer: a batch of samples in, one optimiser step on the shared weights, numbers out.

samples ─ split by tokens, pack ─► forward ─ logprobs at T of the sampler ─► policy loss / N ─ backward ─► AdamW
"""

import time

import torch

from hone.config.rl import TrainerConfig
from hone.kernels.logprobs import target_logprobs
from hone.models.transformer import Transformer
from hone.monitors.statistics import summary
from hone.records import Batch, Sample
from hone.trainer.loss import policy_loss
from hone.trainer.optim import Optimizer, learning_rate
from hone.trainer.packing import pack, pack_shared, prompt_of, split_by_prompt, split_by_tokens
from hone.trainer.performance import mfu, peak_memory_gib


class RLTrainer:
    def __init__(self, model: Transformer, config: TrainerConfig, max_steps: int) -> None:
        self.model, self.config, self.max_steps = model, config, max_steps
        self.device = model.embed.weight.device
        self.optimizer = Optimizer(model, config.optim)
        # On a GPU the variable-length flash kernel is faster on whole sequences than the masked rectangle.
        self.shares_prompts = self.device.type == "cpu"

    def step(self, batch: Batch) -> dict[str, float]:
        """One optimiser step. The loss is normalised by the loss tokens of the whole batch, however it is split.

        A batch without samples (no group had a signal) leaves the weights as they are.
        """
        start = time.perf_counter()
        lr = learning_rate(self.config.optim, self.config.scheduler, batch.step, self.max_steps)
        samples = batch.samples
        loss_tokens = sum(sum(sample.mask[1:]) for sample in samples)
        lengths = [len(sample.ids) for sample in samples]
        parts: dict[str, list[torch.Tensor]] = {
            "entropy": [],
            "mismatch_kl": [],
            "is_masked": [],
            "importance_ratio": [],
        }
        loss = torch.zeros((), device=self.device)
        for members in self._split(samples):
            loss += self._backward([samples[i] for i in members], loss_tokens, parts)
        grad_norm = self.optimizer.step(lr) if loss_tokens else 0.0
        seconds = time.perf_counter() - start
        tokens = sum(lengths)
        values = {
            "loss/mean": float(loss),
            "optim/lr": lr,
            "optim/grad_norm": grad_norm,
            "time/train": seconds,
            "perf/train_throughput": tokens / seconds,
            "perf/peak_memory": peak_memory_gib(self.device),
        }
        for name, tensors in parts.items():
            values |= summary(name, torch.cat(tensors).cpu().numpy() if tensors else [])
        if tokens:
            context = sum(n * n for n in lengths) / (2 * tokens)
            used = mfu(3 * self.model.spec.flops_per_token(context) * tokens / seconds, self.device)
            values |= {} if used is None else {"perf/mfu": used}
        return values

    def _split(self, samples: list[Sample]) -> list[list[int]]:
        """Indices of the samples of each micro-batch."""
        lengths, budget = [len(sample.ids) for sample in samples], self.config.micro_batch_tokens
        if not self.shares_prompts:
            return split_by_tokens(lengths, budget)
        return split_by_prompt([prompt_of(sample.ids, sample.mask) for sample in samples], lengths, budget)

    def _backward(self, samples: list[Sample], loss_tokens: int, parts: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        """Adds a micro-batch to the gradients and its per-token numbers to `parts`; returns its share of the loss."""
        pack_samples = pack_shared if self.shares_prompts else pack
        packed = pack_samples([s.ids for s in samples], [s.mask for s in samples], self.device)
        sampled = [x for s in samples for x, is_target in zip(s.logprobs[1:], s.mask[1:], strict=True) if is_target]
        temperature_S = torch.tensor([s.temperature for s in samples], device=self.device)
        advantage_S = torch.tensor([s.advantage for s in samples], dtype=torch.float32, device=self.device)
        logprobs_N, entropy_N = target_logprobs(
            packed.target_logits(self.model), packed.targets_N, temperature_S[packed.sequence_N]
        )
        loss = policy_loss(
            logprobs_N,
            torch.tensor(sampled, device=self.device),
            advantage_S[packed.sequence_N],
            packed.sequence_N,
            **self.config.loss.model_dump(),
        )
        total = loss.total / loss_tokens
        total.backward()
        parts["entropy"].append(entropy_N)
        parts["mismatch_kl"].append(loss.mismatch_kl)
        parts["is_masked"].append(loss.is_masked)
        parts["importance_ratio"].append(loss.ratio)
        return total.detach()
