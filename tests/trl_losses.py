"""Compare Hone's losses with TRL's GRPOTrainer and DPOTrainer on random tensors: every variant that both have.

    python tests/trl_losses.py     with a Python that has trl, and src/ on PYTHONPATH

TRL's own `_compute_loss` runs on given logprobs instead of a model. Exits with 1 if a loss or a gradient differs by
more than MAX_DIFFERENCE, relative.
"""

import sys
from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
from trl import DPOTrainer, GRPOTrainer

from hone.config.loss_config import LossConfig
from hone.config.sft_config import DPOConfig
from hone.trainer.loss import make_loss, policy_loss, token_weights
from hone.trainer.sft.objectives import Answers, pair_losses, pair_metrics

MAX_DIFFERENCE = 1e-9
VARIANTS = {  # name: (TRL's options, ours)
    "GRPO": ({"loss_type": "grpo"}, {"type": "ppo", "normalize": "sequences"}),
    "GRPO, clip-higher": (
        {"loss_type": "grpo", "epsilon_high": 0.28},
        {"type": "ppo", "normalize": "sequences", "clip_high": 0.28},
    ),
    "GRPO with KL": (
        {"loss_type": "grpo", "beta": 0.04},
        {"type": "ppo", "normalize": "sequences", "kl_beta": 0.04},
    ),
    "GSPO": (
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 0.1,
            "epsilon_high": 0.15,
        },
        {
            "type": "ppo",
            "normalize": "sequences",
            "ratio_type": "sequence",
            "clip_low": 0.1,
            "clip_high": 0.15,
        },
    ),
    "BNPO": ({"loss_type": "bnpo"}, {"type": "ppo"}),
    "DAPO": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"type": "ppo", "clip_high": 0.28}),
    "Dr. GRPO": (
        {"loss_type": "dr_grpo"},
        {"type": "ppo", "normalize": "constant", "max_length": 12},
    ),
    "CISPO": ({"loss_type": "cispo", "epsilon_high": 1.5}, {"type": "cispo", "ratio_cap": 1.5}),
    "TIS": ({"loss_type": "bnpo", "cap": 1.2}, {"type": "tis", "ratio_cap": 1.2}),
}
PREFERENCE_VARIANTS = ("sigmoid", "hinge", "ipo")


def theirs(options: dict, logprobs, old, reference, advantages, mask):
    cap = options.get("cap")
    settings = {
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
    } | options
    trainer = MagicMock(**settings)
    for name, value in {
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": cap is not None,
        "vllm_importance_sampling_correction": cap is not None,
        "_entropy_bonus_enabled": False,
        "max_completion_length": 12,
        "current_gradient_accumulation_steps": 1,
    }.items():
        setattr(trainer, name, value)
    trainer.args = SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1)
    trainer.accelerator.num_processes = 1
    trainer.accelerator.reduce = lambda x, reduction: x
    trainer.accelerator.gather = trainer.accelerator.gather_for_metrics = lambda x: x
    trainer._get_per_token_logps_and_entropies.return_value = (
        logprobs,
        torch.zeros_like(logprobs),
        None,
    )
    ids = torch.zeros_like(mask, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": advantages,
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    if cap is None:
        inputs["old_per_token_logps"] = old
    else:
        inputs["importance_sampling_ratio"] = (logprobs.detach() - old).exp().clamp(max=cap)
    return GRPOTrainer._compute_loss(trainer, None, inputs)


def ours(options: dict, logprobs, old, reference, advantages, mask):
    config, is_token = LossConfig(**options), mask.bool()
    sequence = torch.arange(len(mask))[:, None].expand_as(mask)[is_token]
    weights = torch.tensor(token_weights(mask.sum(1).int().tolist(), config), dtype=logprobs.dtype)
    given = (
        logprobs[is_token],
        old[is_token],
        advantages[sequence],
        sequence,
        weights[sequence],
        make_loss(config),
    )
    return policy_loss(
        *given, reference_logprobs_N=reference[is_token] if config.kl_beta else None
    ).total


def compare_losses() -> dict[str, list[float]]:
    """Return the largest relative differences of loss and gradient over 20 draws, by variant."""
    results = {}
    for name, (of_theirs, of_ours) in VARIANTS.items():
        worst = [0.0, 0.0]
        for seed in range(20):
            torch.manual_seed(seed)
            mask = (torch.arange(12)[None] < torch.randint(1, 13, (8, 1))).double()
            old = -torch.rand(8, 12).double() * 3
            logprobs, reference = (old + 0.2 * torch.randn(8, 12).double() for _ in range(2))
            advantages = torch.randn(8).double()
            results_of = []
            for function, options in ((theirs, of_theirs), (ours, of_ours)):
                x = logprobs.clone().requires_grad_()
                loss = function(options, x, old, reference, advantages, mask)
                results_of.append((loss.detach(), torch.autograd.grad(loss, x)[0]))
            for i, (one, two) in enumerate(zip(*results_of, strict=True)):
                worst[i] = max(worst[i], float((one - two).abs().max() / one.abs().max()))
        results[name] = worst
    return results


def preference_theirs(kind: str, logprobs, reference, mask):
    """Return TRL's DPO loss and its metrics; rows are the chosen answers, then the rejected ones."""

    def answer_of(values):
        zeros = torch.zeros_like(values)
        return SimpleNamespace(
            log_probs=values, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
        )

    trainer = MagicMock(**{"model.training": True, "beta": 0.3, "ld_alpha": None})
    for name, value in {
        "aux_loss_enabled": False,
        "precompute_ref_logps": False,
        "f_divergence_type": "reverse_kl",
        "loss_types": [kind],
        "loss_weights": [1.0],
        "use_weighting": False,
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "ref_model": lambda **inputs: answer_of(reference * mask),
    }.items():
        setattr(trainer, name, value)
    trainer.accelerator.gather = trainer.accelerator.gather_for_metrics = lambda x: x
    before = torch.zeros(len(mask), 1, dtype=torch.int64)
    completion_mask = torch.cat((before, mask.long()), 1)  # the first token is the prompt's
    inputs = {
        "input_ids": completion_mask,
        "attention_mask": completion_mask,
        "completion_mask": completion_mask,
    }
    model = MagicMock(side_effect=lambda **inputs: answer_of(logprobs * mask))
    loss = DPOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)
    return loss, trainer._metrics["train"]


def compare_preference_losses() -> dict[str, list[float]]:
    """Return the largest relative differences of loss, gradient and metrics over 20 draws, by variant."""
    results = {}
    names = ("accuracies", "margins", "chosen", "rejected")
    for kind in PREFERENCE_VARIANTS:
        worst = [0.0, 0.0, 0.0]
        for seed in range(20):
            torch.manual_seed(seed)
            mask = (torch.arange(12)[None] < torch.randint(1, 13, (8, 1))).double()
            reference = -torch.rand(8, 12).double() * 3
            x = (reference + torch.randn(8, 12).double()).requires_grad_()
            loss, metrics = preference_theirs(kind, x, reference, mask)
            sums = [
                (values * mask).sum(1).view(2, -1).T
                for values in (x, reference, torch.ones_like(mask))
            ]
            answers = Answers(*sums)
            config = DPOConfig(beta=0.3, type=kind)
            own = pair_losses(answers, config).mean()
            found = (pair_metrics(answers, config.beta) / len(sums[0])).tolist()
            expected = [metrics[f"rewards/{name}"][0] for name in names]
            pairs = [
                (loss.detach(), own.detach()),
                (torch.autograd.grad(loss, x)[0], torch.autograd.grad(own, x)[0]),
                (torch.tensor(expected), torch.tensor(found[: len(names)])),
            ]
            for i, (one, two) in enumerate(pairs):
                worst[i] = max(worst[i], float((one - two).abs().max() / one.abs().max()))
        results[f"DPO, {kind}"] = worst
    return results


def main() -> int:
    results = compare_losses() | compare_preference_losses()
    for name, (loss, gradient, *metrics) in results.items():
        further = f", metrics {metrics[0]:.1e}" if metrics else ""
        print(f"{name:>18}: loss {loss:.1e}, gradient {gradient:.1e}{further}")
    return int(max(x for found in results.values() for x in found) > MAX_DIFFERENCE)


if __name__ == "__main__":
    sys.exit(main())
