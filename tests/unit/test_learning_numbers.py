"""Loss, advantage, packing, schedule, optimiser: values that can be checked by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hone.config.lora_config import LoRAConfig
from hone.config.loss_config import LossConfig
from hone.config.sections import OptimConfig, SchedulerConfig
from hone.kernels.adamw import AdamW, Change
from hone.kernels.logprobs import target_logprobs
from hone.kernels.pinned_memory import reachable_zeros
from hone.models.hf import split_rows
from hone.models.spec import ModelSpec, make_plain_layers
from hone.models.transformer import Transformer
from hone.orchestrator.advantage import ADVANTAGES, Scored, has_signal
from hone.trainer.loss import cross_entropy_sum, make_loss, policy_loss
from hone.trainer.optim import Optimizer, choose_lr, learning_rate
from hone.trainer.packing import pack_sequences, pack_shared, split_by_prompt, split_by_tokens

LN2 = math.log(2)


def logs(*ratios):
    """Trainer logprobs that stand in these ratios to a sampler's zeros."""
    return torch.tensor([math.log(r) for r in ratios], dtype=torch.float64, requires_grad=True)


def loss(trainer, advantages, sequences=None, **options):
    n = len(trainer)
    sequences = torch.tensor(sequences if sequences is not None else [0] * n)
    zeros = torch.zeros(n, dtype=torch.float64)
    more = {
        k: torch.tensor(options.pop(k), dtype=torch.float64)
        for k in list(options)
        if k.endswith("_N")
    }
    return policy_loss(
        trainer,
        options.pop("sampler", zeros),
        torch.tensor(advantages, dtype=torch.float64),
        sequences,
        torch.ones(n, dtype=torch.float64),
        make_loss(LossConfig(**options)),
        **more,
    )


def test_policy_loss_is_minus_ratio_times_advantage_and_its_gradient_too():
    trainer = logs(1.0, 2.0, 0.5)
    out = loss(trainer, [1.0, 1.0, -2.0])
    assert out.total.item() == pytest.approx(-1.0 - 2.0 + 1.0)
    out.total.backward()
    assert trainer.grad.tolist() == pytest.approx([-1.0, -2.0, 1.0])  # d/dx of -e^x A


def test_tokens_outside_the_bounds_are_dropped_on_both_sides():
    trainer = logs(0.124, 0.126, 7.9, 8.1)
    out = loss(trainer, [1.0] * 4)
    assert out.is_masked.tolist() == [1, 0, 0, 1]
    assert out.total.item() == pytest.approx(-0.126 - 7.9)
    out.total.backward()
    assert trainer.grad[0] == trainer.grad[3] == 0


def test_an_infinite_ratio_is_dropped_without_harm():
    trainer = torch.tensor([1000.0, 0.0], requires_grad=True)
    out = loss(trainer, [1.0, 1.0])
    out.total.backward()
    assert out.total.item() == -1.0 and trainer.grad.tolist() == [0.0, -1.0]


def test_sequence_ratio_is_the_geometric_mean_and_kl_adds_tau_log_r():
    out = loss(logs(4.0, 1.0, 3.0), [1.0, 1.0, 1.0], [0, 0, 1], ratio_type="sequence")
    assert out.total.item() == pytest.approx(-(2.0 + 2.0 + 3.0))
    out = loss(logs(2.0, 1.0), [1.0, 1.0], kl_tau=0.5)
    assert out.total.item() == pytest.approx(-3.0 + 0.5 * LN2)


def test_mismatch_kl_is_r_minus_log_r_minus_1():
    assert loss(logs(1.0, 2.0), [0.0, 0.0]).mismatch_kl.tolist() == pytest.approx([0.0, 1 - LN2])


@pytest.mark.parametrize("options", [{}, {"ratio_type": "sequence", "kl_tau": 0.1}])
def test_gradient_equals_finite_differences(options):
    torch.manual_seed(0)
    trainer = (torch.randn(6, dtype=torch.float64) * 0.3).requires_grad_()

    def function(x):
        return loss(x, [0.5, -1.0, 2.0, 1.0, -0.3, 0.1], [0, 0, 1, 1, 1, 2], **options).total

    assert torch.autograd.gradcheck(function, trainer)


def test_target_logprobs_apply_the_temperature():
    logits = torch.tensor([[0.0, LN2], [0.0, LN2]])
    logprobs, entropy = target_logprobs(logits, torch.tensor([1, 1]), torch.tensor([1.0, 0.5]))
    assert logprobs.tolist() == pytest.approx([math.log(2 / 3), math.log(4 / 5)])
    assert entropy.tolist() == pytest.approx(
        [
            -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3)),
            -(0.8 * math.log(0.8) + 0.2 * math.log(0.2)),
        ]
    )


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("mean", [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ("mean", [0.5, 0.5], [0, 0]),
        ("std", [1, 0, 0, 0], [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]),
        ("rloo", [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),  # the others' mean: 0, and 1/3
        (
            "length_corrected",
            [1, 0, 0, 0],
            [0.6, -0.4, -0.4, -0.4],
        ),  # 40 of 100 tokens were rewarded
        ("max_rl", [1, 0, 0, 0], [3, -1, -1, -1]),
        ("max_rl", [0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_advantages(name, rewards, expected):
    lengths = np.array([40.0, 10.0, 30.0, 20.0])[: len(rewards)]
    assert ADVANTAGES[name](
        Scored(np.array(rewards, dtype=float), lengths)
    ).tolist() == pytest.approx(expected)


def test_a_group_has_signal_where_advantages_are_not_0():
    assert has_signal(np.array([0.1, 0.0])) and not has_signal(np.array([0.0, 1e-17]))


def test_packing_keeps_the_positions_that_predict_a_target():
    packed = pack_sequences([[1, 2, 3, 4], [5, 6]], [[False, False, True, True], [False, True]])
    assert packed.tokens_T.tolist() == [1, 2, 3, 5]  # a last token predicts nothing
    assert packed.keep_K.tolist() == [1, 2, 3]
    assert packed.targets_N.tolist() == [3, 4, 6]
    assert packed.sequence_N.tolist() == [0, 0, 1]
    assert packed.attention.token_positions().tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64]
)  # compiled loops where there are some; torch's
def test_sequences_of_one_token_have_no_targets_and_no_gradient(dtype):
    model = Transformer(
        ModelSpec(
            40, 48, 72, 2, 4, 2, 16, 1e-6, make_plain_layers(100.0, 16, 2), True, 64, 0.3, False
        )
    ).to(dtype)
    model.init_weights(torch.Generator().manual_seed(0))
    packed = pack_sequences([[1], [2]], [[True], [True]])
    loss = packed.compute_loss(
        model, torch.ones(0), lambda part, logprobs, entropies: logprobs.sum()
    )
    loss.backward()
    assert loss == 0 and packed.count_flops(model.spec) == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_split_by_tokens_fills_micro_batches_up_to_the_budget():
    # 9 > 8 stands alone; three either way, so even ones
    assert split_by_tokens([5, 3, 9, 3], 8) == [[2], [0], [1, 3]]
    # 6 + 4 and 5 + 3 + 2: nothing is left over
    assert split_by_tokens([6, 5, 3, 2, 4], 10) == [[0, 4], [1, 2, 3]]
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 2000, 3000).tolist()
    groups = split_by_tokens(lengths, 4096)
    assert sorted(i for group in groups for i in group) == list(range(3000))
    assert all(sum(lengths[i] for i in group) <= 4096 for group in groups)
    assert sum(lengths) / (len(groups) * 4096) > 0.99


def test_split_by_prompt_counts_a_shared_prompt_once_and_keeps_groups_together():
    a, b = (1, 2, 3), (4,)
    assert split_by_prompt([a, b, a, a], [5, 4, 5, 5], 9) == [[0, 2, 3], [1]]  # 5 + 2 + 2, then 4
    assert split_by_prompt([a, a], [5, 5], 6) == [[0], [1]]
    # 24 each, not 31 and 17
    assert split_by_prompt([a] * 6, [10] * 6, 31) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    "completions",
    [[(4, 1, 7)] * 3, [(1, 1)] * 3, [(2,)] * 3, [(4, 1, 7), (3,), (2, 2)], [(3,), (1,), (1, 1, 5)]],
)
def test_shared_prompts_give_the_same_logits_and_gradients_as_whole_sequences(completions):
    prompts = ([1, 2, 3, 4, 5], [6], [7, 8])
    rng = np.random.default_rng(0)
    ids = [
        [*prompt, *rng.integers(0, 40, n).tolist()]
        for prompt, group in zip(prompts, completions, strict=True)
        for n in group
    ]
    masks = [
        [j >= len(s) - n for j in range(len(s))]
        for s, n in zip(ids, sum(completions, ()), strict=True)
    ]
    if completions[0][0] > 2:
        masks[0][-2] = False  # a hole in the targets, as an environment's turn leaves
    results = []
    for pack_samples in (pack_sequences, pack_shared):
        model = small_model().double()
        packed = pack_samples(ids, masks)
        logits = model.compute_logits(packed.target_hidden(model))
        (
            logits * torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view_as(logits)
        ).sum().backward()
        results.append((packed, logits, [p.grad for p in model.parameters()]))
    (whole, expected, gradients), (shared, logits, shared_gradients) = results
    assert torch.equal(whole.targets_N, shared.targets_N) and torch.equal(
        whole.sequence_N, shared.sequence_N
    )
    assert len(shared.tokens_T) <= len(whole.tokens_T)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    for one, two in zip(gradients, shared_gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def small_model(seed=0):
    model = Transformer(
        ModelSpec(
            40, 16, 24, 2, 2, 1, 8, 1e-6, make_plain_layers(100.0, 8, 2), True, 64, 0.3, False
        )
    )
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def test_gradients_do_not_depend_on_how_a_batch_is_split():
    model = small_model().double()
    sequences = [torch.randint(0, 40, (n,)).tolist() for n in (5, 30, 12, 7)]
    masks = [[i > 2 for i in range(len(s))] for s in sequences]
    gradients = []
    for groups in ([[0, 1, 2, 3]], [[2], [1, 0], [3]]):
        model.zero_grad()
        for members in groups:
            packed = pack_sequences([sequences[i] for i in members], [masks[i] for i in members])
            cross_entropy_sum_64 = torch.nn.functional.cross_entropy(
                model.compute_logits(packed.target_hidden(model)), packed.targets_N, reduction="sum"
            )
            cross_entropy_sum_64.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("pack_samples", [pack_sequences, pack_shared])
def test_blocks_computed_once_more_give_the_same_gradients(pack_samples):
    ids = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7], [8, 9, 10]]
    masks = [[i > 2 for i in range(6)], [i > 2 for i in range(4)], [False, True, True]]
    gradients = []
    for recomputes in (False, True):
        model = small_model()
        model.recomputes = recomputes
        cross_entropy_sum(pack_samples(ids, masks), model).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


def test_schedules():
    optim, cosine = OptimConfig(lr=1.0), SchedulerConfig(type="cosine", warmup_steps=10, min_lr=0.2)
    rates = [learning_rate(optim, cosine, step, 110) for step in (1, 10, 61, 111, 500)]
    assert rates == pytest.approx([0.1, 1.0, 0.6, 0.2, 0.2])
    linear = SchedulerConfig(type="linear")
    assert [learning_rate(optim, linear, s, 4) for s in (1, 2, 4)] == pytest.approx(
        [1.0, 0.75, 0.25]
    )
    wsd = SchedulerConfig(type="wsd", decay_fraction=0.4, min_lr=0.5)
    assert [learning_rate(optim, wsd, s, 10) for s in (1, 7, 9, 10)] == pytest.approx(
        [1.0, 1.0, 0.75, 0.625]
    )
    assert learning_rate(optim, SchedulerConfig(), 7, 10) == 1.0


@pytest.mark.parametrize("max_norm", [1e9, 0.01])
def test_optimizer_equals_torch_adamw(max_norm):
    ours, theirs = small_model(), small_model()
    config = OptimConfig(lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), max_norm=max_norm)
    optimizer = Optimizer(ours, config)
    matrices, vectors = (
        [p for p in theirs.parameters() if (p.dim() > 1) == wide] for wide in (True, False)
    )
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    cross_entropy_sum(pack_sequences([[9, 8, 7]], [[True] * 3]), ours).backward()
    optimizer.compile_kernels()  # leaves no trace
    for step in range(4):
        packed = pack_sequences([[1, 2, 3 + step, 4]], [[True] * 4])
        for model in (ours, theirs):
            cross_entropy_sum(packed, model).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        assert optimizer.step(1e-2) == pytest.approx(float(norm), rel=1e-5)
        reference.step()
        reference.zero_grad()
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def test_muon_equals_torchs_on_every_part_of_a_fused_weight(monkeypatch):
    # Torch's rounds there; on a CPU ours does not
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    model = small_model()
    spec = model.spec
    parts = {
        f"{name} {i}": part.detach().clone().requires_grad_()
        for name, p in model.named_parameters()
        if name.startswith("blocks.") and p.dim() == 2
        for i, part in enumerate(split_rows(spec, name, p.data))
    }
    reference = torch.optim.Muon(
        parts.values(), lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    optimizer = Optimizer(model, OptimConfig(type="muon", lr=1e-2, weight_decay=0.1, max_norm=1e9))
    assert not any(
        name.startswith("exp_avg_sq.blocks.0.mlp.") for name in optimizer.state_tensors()
    )
    embedding = model.embed.weight.clone()
    for step in range(3):
        cross_entropy_sum(pack_sequences([[1, 2, 3 + step, 4]], [[True] * 4]), model).backward()
        for name, parameter in model.named_parameters():
            if f"{name} 0" in parts:
                for i, grad in enumerate(split_rows(spec, name, parameter.grad)):
                    parts[f"{name} {i}"].grad = grad.clone()
        optimizer.step(1e-2)
        reference.step()
    for name, parameter in model.named_parameters():
        if f"{name} 0" in parts:
            expected = torch.cat(
                [parts[f"{name} {i}"] for i in range(len(split_rows(spec, name, parameter.data)))]
            )
            torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(model.embed.weight, embedding)  # by AdamW


def test_half_precision_weights_follow_fp32_masters_at_fixed_addresses():
    model = small_model().bfloat16()
    address = model.embed.weight.data_ptr()
    optimizer = Optimizer(model, OptimConfig(lr=1e-5, weight_decay=0.0))
    before = [m.clone() for m in optimizer.masters]
    for _ in range(3):
        packed = pack_sequences([[1, 2, 3, 4]], [[True] * 4])
        cross_entropy_sum(packed, model).backward()
        optimizer.step(1e-5)
    assert model.embed.weight.data_ptr() == address
    moved = [float((a - b).abs().max()) for a, b in zip(before, optimizer.masters, strict=True)]
    assert max(moved) == pytest.approx(3e-5, rel=0.1)  # far below a bf16 step at 0.3, yet not lost
    for parameter, master in zip(model.parameters(), optimizer.masters, strict=True):
        assert torch.equal(parameter, master.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_own_adamw_equals_torchs(dtype):
    """Exactly with moments in fp32; in bfloat16 within the two values around each."""
    torch.manual_seed(0)
    weights, grads = torch.randn(40, 30), [torch.randn(40, 30) * 10.0 ** (i - 2) for i in range(5)]
    expected = weights.clone().requires_grad_()
    reference = torch.optim.AdamW([expected], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    master, stored = weights.clone(), weights.bfloat16()
    own = AdamW(
        [[stored], [master], *([torch.zeros(40, 30, dtype=dtype)] for _ in range(2))], [0.1]
    )
    for step, grad in enumerate(grads, 1):
        expected.grad = 0.5 * grad
        reference.step()
        own.step([grad], Change(0.5, 0.01, (0.9, 0.95), step))
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(master, expected.detach(), rtol=tolerance, atol=tolerance)
    assert torch.equal(stored, master.bfloat16())


def test_a_moment_in_bfloat16_follows_small_changes_on_average():
    found = []
    for _ in range(2):
        weight, (first, second) = torch.zeros(4000), torch.ones(2, 4000, dtype=torch.bfloat16)
        own = AdamW([[weight], [weight], [first], [second]], [0.0])
        for step in range(1, 201):
            own.step([torch.zeros(4000)], Change(1.0, 0.0, (0.9, 0.999), step))
        found.append(second)
    # To the nearest it would stay at 1
    assert float(second.float().mean()) == pytest.approx(0.999**200, rel=0.01)
    assert torch.equal(*found)


def test_an_optimizer_with_moments_in_bfloat16_stays_near_the_exact_one():
    models = [small_model(), small_model()]
    optimizers = [
        Optimizer(model, OptimConfig(lr=1e-2, state_dtype=dtype))
        for model, dtype in zip(models, ("float32", "bfloat16"), strict=True)
    ]
    for step in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            cross_entropy_sum(pack_sequences([[1, 2, 3 + step, 4]], [[True] * 4]), model).backward()
            optimizer.step(1e-2)
    assert all(
        t.dtype == torch.bfloat16
        for name, t in optimizers[1].state_tensors().items()
        if name.startswith("exp_avg")
    )
    for one, two in zip(*(model.parameters() for model in models), strict=True):
        assert float((one - two).detach().abs().max()) < 3e-3  # of 0.06 that they have moved


def test_memory_that_a_gpu_reaches_is_known_to_cuda_as_long_as_it_is_used(monkeypatch):
    known = {}
    cuda = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: known.update({address: size}) or 0,
        cudaHostUnregister=known.pop,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    tensor = reachable_zeros(torch.Size((3, 5)), torch.bfloat16)
    assert tensor.shape == (3, 5) and not tensor.any() and known == {tensor.data_ptr(): 30}
    view = tensor[1:].detach()
    del tensor
    assert len(known) == 1 and not view.any()
    del view
    assert not known


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_offload_changes_nothing_on_a_cpu(kind):
    models = [small_model(), small_model()]
    for model, offload in zip(models, (False, True), strict=True):
        optimizer = Optimizer(model, OptimConfig(type=kind, lr=1e-2, offload=offload))
        cross_entropy_sum(pack_sequences([[1, 2, 3, 4]], [[True] * 4]), model).backward()
        optimizer.step(1e-2)
    assert all(
        torch.equal(one, two)
        for one, two in zip(*(model.parameters() for model in models), strict=True)
    )


@pytest.mark.parametrize(
    "weights, is_rl, lora, lr",
    [
        (8e9, True, None, 1e-6),
        (4e9, True, None, 1e-6),
        (4e9, True, LoRAConfig(), 1e-5),
        (0.6e9, True, None, 3.54e-6),
        (1.35e8, True, None, 9.58e-6),
        (1e6, True, None, 2.52e-4),
        (1e5, True, None, 3e-4),
        (1e6, True, LoRAConfig(), 2.52e-3),
        (4e9, False, None, 1e-5),
        (1.35e8, False, None, 9.58e-5),
        (4e9, False, LoRAConfig(), 1e-4),
    ],
)
def test_a_learning_rate_is_chosen_by_size_and_what_is_trained(weights, is_rl, lora, lr):
    assert choose_lr(OptimConfig(), lora, weights, is_rl) == pytest.approx(lr, rel=0.01)
    assert choose_lr(OptimConfig(lr=3e-7), lora, weights, is_rl) == 3e-7
    assert choose_lr(OptimConfig(type="muon"), None, weights, is_rl) == 2e-3
