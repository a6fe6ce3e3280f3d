"""Policy losses by name: values that can be checked by hand, gradients against finite differences."""

import inspect
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from hone.config.loss_config import KINDS, LossConfig
from hone.config.orchestrator_config import ADVANTAGES as ADVANTAGE_NAMES
from hone.config.orchestrator_config import GroupConfig
from hone.config.rl_config import TrainerConfig
from hone.kernels.head import _Head, head_logprobs
from hone.models.spec import ModelSpec, make_plain_layers
from hone.models.transformer import Transformer
from hone.orchestrator.advantage import ADVANTAGES, Scored, make_advantage
from hone.records import Batch, Sample
from hone.trainer.loss import LOSSES, make_loss, needs, policy_loss, token_weights
from hone.trainer.rl.trainer import PolicyTrainer
from tests import twins

LN2 = math.log(2)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def run(
    trainer,
    sampler,
    advantage,
    sequence=None,
    weight=None,
    reference=None,
    teacher=None,
    entropy=None,
    **config,
):
    sequence = (
        torch.zeros(len(trainer), dtype=torch.int64) if sequence is None else torch.tensor(sequence)
    )
    weight = torch.ones_like(trainer) if weight is None else weight
    more = (entropy, reference, teacher)
    return policy_loss(
        trainer, sampler, advantage, sequence, weight, make_loss(LossConfig(**config)), *more
    )


def gradient(trainer, *rest, **options):
    trainer = trainer.clone().requires_grad_()
    out = run(trainer, *rest, **options)
    out.total.backward()
    return out, trainer.grad.tolist()


def test_dppo_drops_what_has_moved_far_enough():
    # Probabilities 0.5 and 0.8 for a sampler's 0.4: shifts of 0.1 and 0.4, ratios of 1.25 and 2.
    trainer, sampler = tensor(0.5, 0.8, 0.8).log(), tensor(0.4, 0.4, 0.4).log()
    out, grad = gradient(trainer, sampler, tensor(1.0, 1.0, -1.0), type="dppo", kl_tau=0.1)
    kl = [0.1 * math.log(r) ** 2 for r in (1.25, 2.0, 2.0)]
    assert out.total.item() == pytest.approx(-1.25 + 0.0 + 2.0 + sum(kl))
    assert out.is_masked.tolist() == [0, 1, 0]
    assert grad == pytest.approx([-1.25 + 0.2 * math.log(1.25), 0.2 * LN2, 2.0 + 0.2 * LN2])
    assert LossConfig(type="dppo").kl_coefficient == 1e-3 and LossConfig().kl_coefficient == 0.0


def test_ppo_clips_each_side_by_its_own_bound():
    trainer, advantage = tensor(1.25, 1.35, 0.7, 0.7).log(), tensor(1.0, 1.0, -1.0, 1.0)
    out, grad = gradient(
        trainer, torch.zeros(4), advantage, type="ppo", clip_low=0.2, clip_high=0.28
    )
    assert out.total.item() == pytest.approx(-1.25 - 1.28 + 0.8 - 0.7)
    assert grad == pytest.approx([-1.25, 0.0, 0.0, -0.7])
    assert out.is_masked.tolist() == [0, 1, 1, 0]


def test_gspo_is_ppo_with_the_ratio_of_the_sequence():
    trainer = tensor(4.0, 1.0, 1.1).log()
    out = run(
        trainer, torch.zeros(3), tensor(1.0, 1.0, 1.0), [0, 0, 1], type="ppo", ratio_type="sequence"
    )
    assert out.total.item() == pytest.approx(-1.2 - 1.2 - 1.1)  # sqrt(4) = 2 is clipped at 1.2


def test_cispo_caps_the_weight_and_keeps_the_gradient():
    out, grad = gradient(
        tensor(0.5, 0.9).log(),
        tensor(0.25, 0.1).log(),
        tensor(1.0, -1.0),
        type="cispo",
        ratio_cap=3.0,
    )
    assert out.total.item() == pytest.approx(-2.0 * math.log(0.5) + 3.0 * math.log(0.9))
    assert grad == pytest.approx([-2.0, 3.0]) and out.is_masked.tolist() == [0, 1]


def test_tis_has_the_same_gradient_and_the_value_of_the_weight():
    out, grad = gradient(
        tensor(0.5, 0.9).log(),
        tensor(0.25, 0.1).log(),
        tensor(1.0, -1.0),
        type="tis",
        ratio_cap=3.0,
    )
    assert out.total.item() == pytest.approx(-2.0 + 3.0) and grad == pytest.approx([-2.0, 3.0])


def test_sft_and_distillation():
    trainer = tensor(0.5, 0.25).log()
    assert run(trainer, trainer, tensor(9.0, 9.0), type="sft").total.item() == pytest.approx(
        3 * LN2
    )
    out, grad = gradient(
        trainer, trainer, tensor(0.0, 0.0), teacher=tensor(1.0, 0.125).log(), type="opd"
    )
    assert out.total.item() == pytest.approx(-LN2 + LN2)  # advantages of log 2 and -log 2
    assert grad == pytest.approx([-LN2, LN2])
    with pytest.raises(ValueError, match="no teacher's logprobs"):
        run(trainer, trainer, tensor(0.0, 0.0), type="opd")


def test_kl_to_the_reference_and_entropy():
    trainer, zero = tensor(0.5).log(), tensor(0.0)
    out, grad = gradient(trainer, trainer, zero, reference=tensor(1.0).log(), kl_beta=0.1)
    assert out.total.item() == pytest.approx(0.1 * (2 - LN2 - 1)) and grad == pytest.approx(
        [0.1 * (1 - 2)]
    )
    assert out.reference_kl.tolist() == pytest.approx([1 - LN2])
    assert run(
        trainer, trainer, zero, entropy=tensor(0.3), entropy_weight=0.5
    ).total.item() == pytest.approx(-0.15)


@pytest.mark.parametrize("kind", ["mask", "dppo", "ppo", "cispo", "tis", "sft", "opd"])
@pytest.mark.parametrize("ratio_type", ["token", "sequence"])
def test_gradients_equal_finite_differences(kind, ratio_type):
    torch.manual_seed(0)
    if kind == "sft" and ratio_type == "sequence":
        return  # has no ratio
    trainer = torch.randn(6, dtype=torch.float64).mul(0.05).sub(1).requires_grad_()
    sampler, advantage = (
        trainer.detach() + 0.02 * torch.randn(6, dtype=torch.float64),
        torch.randn(6).double(),
    )
    fixed = trainer.detach().clone()
    config = LossConfig(type=kind, **({} if kind == "sft" else {"ratio_type": ratio_type}))

    def total(x):
        out = policy_loss(
            x,
            sampler,
            advantage,
            torch.tensor([0, 0, 1, 1, 1, 2]),
            torch.full((6,), 0.2).double(),
            make_loss(config),
            teacher_logprobs_N=sampler - 0.1,
        )
        return out.total

    if kind in ("mask", "dppo", "ppo", "sft"):
        assert torch.autograd.gradcheck(total, trainer)
        return
    # These detach a weight: the gradient is that of the sum with the weight held fixed.
    (grad,) = torch.autograd.grad(total(trainer), trainer)
    log_ratio = fixed - sampler
    if ratio_type == "sequence":
        log_ratio = torch.stack([log_ratio[:2].mean(), log_ratio[2:5].mean(), log_ratio[5]])[
            [0, 0, 1, 1, 1, 2]
        ]
    if kind == "opd":
        ratio, worth = log_ratio.exp(), sampler - 0.1 - fixed
        each = -ratio * worth * 0.2
        if ratio_type == "sequence":
            each = torch.cat([each[:2].mean().expand(2), each[2:5].mean().expand(3), each[5:]])
        expected = each
    else:
        expected = -log_ratio.exp().clamp(max=2.0) * advantage * 0.2
    torch.testing.assert_close(grad, expected)


def test_weights_of_tokens():
    lengths = [1, 3, 0]
    assert token_weights(lengths, LossConfig()) == pytest.approx([0.25] * 3)
    assert token_weights(lengths, LossConfig(normalize="sequences")) == pytest.approx(
        [1 / 2, 1 / 6, 0]
    )
    constant = LossConfig(normalize="constant", max_length=10)
    assert token_weights(lengths, constant) == pytest.approx([1 / 20, 1 / 20, 0])
    assert token_weights([0, 0], LossConfig()) == [0, 0]


def own_loss(tokens, *, factor: float = 2):
    return -tokens.trainer_logprobs * factor, torch.ones_like(
        tokens.trainer_logprobs, dtype=torch.bool
    )


@needs("wings")
def needs_what_there_is_not(tokens):
    raise AssertionError


def raises(tokens):
    return tokens.nothing


def test_a_loss_of_ones_own_by_import_path():
    trainer, path = tensor(0.5).log(), f"{__name__}:own_loss"
    assert run(trainer, trainer, trainer, type=path).total.item() == pytest.approx(2 * LN2)
    assert run(
        trainer, trainer, trainer, type=path, args={"factor": 3}
    ).total.item() == pytest.approx(3 * LN2)
    for config, message in [
        (
            {"type": "nowhere_to_be_found:f"},
            "trainer.loss.type nowhere_to_be_found:f: cannot be imported",
        ),
        (
            {"type": path, "args": {"factr": 1}},
            "trainer.loss.args.factr: unknown key; did you mean factor",
        ),
        (
            {"type": path, "args": {"factor": "x"}},
            "trainer.loss.args.factor: .*valid number.* found 'x'",
        ),
        (
            {"type": f"{__name__}:needs_what_there_is_not"},
            "'wings'.* is not one of whole_sequences, entropy",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            make_loss(LossConfig(**config))
    with pytest.raises(
        ValueError, match=r"raises raised AttributeError: .*nothing.* \(.*test_losses.py:\d+\)"
    ):
        run(trainer, trainer, trainer, type=f"{__name__}:raises")
    with pytest.raises(ValidationError, match="loss.args has no effect with loss.type ppo"):
        LossConfig(type="ppo", args={"factor": 3})


def test_names_in_the_configuration_are_those_there_are():
    assert KINDS.keys() == LOSSES.keys() and set(ADVANTAGE_NAMES) == ADVANTAGES.keys()
    for name, function in LOSSES.items():
        keys = {
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.kind is p.KEYWORD_ONLY
        }
        assert name == "opd" or keys == KINDS[name].keys - {"ratio_type"}
    with pytest.raises(
        ValidationError, match="advantage 'sdt' is not one of mean, std, .*did you mean std"
    ):
        GroupConfig(advantage="sdt")


@pytest.fixture
def documented(tmp_path, monkeypatch):
    """The functions of docs/algorithms.md, as files in the working directory."""
    text = (Path(__file__).parents[2] / "docs/algorithms.md").read_text()
    for name, code in zip(
        ("my_loss", "my_advantage"), re.findall(r"```python\n(.*?)```", text, re.S), strict=True
    ):
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path != str(tmp_path)])


def test_the_documented_loss_is_the_same_by_chunks_of_the_head(documented, monkeypatch):
    gradients = []
    drifted = samples()
    # The last of each sequence moved far, which its other tokens alone do not say
    for sample in drifted:
        sample.logprobs[-1] -= 0.5
    for rows in (1000, 3):
        monkeypatch.setattr("hone.kernels.head.WHOLE_BYTES", 0)
        monkeypatch.setattr("hone.kernels.head.chunk_rows", lambda weight, rows=rows: rows)
        loss = LossConfig(type="my_loss:trusted", args={"max_drift": 0.8})
        trainer = PolicyTrainer(made(), TrainerConfig(loss=loss), max_steps=1)
        trainer.optimizer.step = lambda lr: 0.0
        values = trainer.step(Batch(1, drifted))
        assert 0.1 < values["is_masked/mean"] < 0.9
        gradients.append([p.grad for p in trainer.model.parameters()])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-9)


def test_the_documented_advantage_ranks_a_group(documented):
    group = Scored(np.array([0.5, 1.0, 0.0, 0.5]), np.array([3.0, 9.0, 9.0, 9.0]))
    of = {"advantage": "my_advantage:ranked"}
    assert make_advantage(GroupConfig(**of))(group).tolist() == pytest.approx(
        [1 / 3, 1, -1, -1 / 3]
    )
    other = GroupConfig(**of, advantage_args={"shorter_first": False})
    assert make_advantage(other)(group).tolist() == pytest.approx([-1 / 3, 1, -1, 1 / 3])


def test_mistakes_in_the_configuration():
    with pytest.raises(ValidationError, match="'pppo' is not one of mask, .*did you mean ppo"):
        LossConfig(type="pppo")
    with pytest.raises(ValidationError, match="loss.clip_low has no effect with loss.type mask"):
        LossConfig(clip_low=0.1)
    with pytest.raises(
        ValidationError, match="loss.max_length has no effect with loss.normalize tokens"
    ):
        LossConfig(max_length=10)
    full = LossConfig(type="ppo", clip_high=0.28).model_dump()
    assert LossConfig(**full).model_dump() == full  # what a run writes down can be read again


# ------------------------------------------------------------------------------------------------ the step

SPEC = ModelSpec(40, 16, 24, 2, 2, 1, 8, 1e-6, make_plain_layers(100.0, 8, 2), True, 64, 0.3, False)


def made():
    model = Transformer(SPEC)
    model.init_weights(torch.Generator().manual_seed(0))
    return model.double()


def samples(count=8):
    rng = torch.Generator().manual_seed(1)
    found = []
    for i in range(count):
        n = 4 + i % 5
        ids = torch.randint(0, 40, (3 + n,), generator=rng).tolist()
        logprobs = [0.0] * 3 + (-3 - torch.rand(n, generator=rng)).tolist()
        found.append(
            Sample(ids, [False] * 3 + [True] * n, logprobs, (-1.0) ** i * (1 + i), 1.0, logprobs)
        )
    return found


@pytest.mark.parametrize("normalize", ["tokens", "sequences", "constant"])
@pytest.mark.parametrize("kind", ["mask", "ppo", "opd"])
def test_gradients_do_not_depend_on_micro_batches(kind, normalize):
    gradients = []
    for budget in (1000, 12):
        config = TrainerConfig(
            loss=LossConfig(type=kind, normalize=normalize), micro_batch_tokens=budget
        )
        trainer = PolicyTrainer(made(), config, max_steps=1)
        trainer.optimizer.step = lambda lr: 0.0
        assert (len(trainer._split_samples(samples())) > 1) == (budget == 12)
        trainer.step(Batch(1, samples()))
        gradients.append([p.grad for p in trainer.model.parameters()])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-9)


def test_an_environment_may_have_a_loss_of_its_own():
    """The gradients are those of each loss on its own samples, by the share of the samples that they are."""

    def gradients(batch, **config):
        trainer = PolicyTrainer(made(), TrainerConfig(micro_batch_tokens=20, **config), max_steps=1)
        trainer.optimizer.step = lambda lr: 0.0
        trainer.step(Batch(1, batch))
        return [p.grad for p in trainer.model.parameters()]

    batch, own = samples(), LossConfig(type="opd", normalize="sequences")
    for sample in batch[:2]:
        sample.env = "distilled"
    mixed = gradients(batch, loss_of={"distilled": own})
    parts = zip(gradients(batch[:2], loss=own), gradients(batch[2:]), strict=True)
    for found, (one, two) in zip(mixed, parts, strict=True):
        torch.testing.assert_close(found, 0.25 * one + 0.75 * two, rtol=1e-6, atol=1e-9)
    same = gradients(batch, loss_of={"distilled": LossConfig()})
    for one, two in zip(same, gradients(batch), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


@needs("entropy")
def surprise(tokens):
    return -tokens.entropy, torch.ones_like(tokens.entropy, dtype=torch.bool)


def test_a_loss_of_ones_own_has_the_gradient_of_the_entropy(monkeypatch):
    norms = []
    for whole in (2**30, 0):  # logits kept, and made chunk by chunk
        monkeypatch.setattr("hone.kernels.head.WHOLE_BYTES", whole)
        trainer = PolicyTrainer(
            made(), TrainerConfig(loss=LossConfig(type=f"{__name__}:surprise")), max_steps=1
        )
        trainer.optimizer.step = lambda lr: 0.0
        trainer.step(Batch(1, samples()))
        norms.append(sum(float(p.grad.square().sum()) for p in trainer.model.parameters()) ** 0.5)
    assert norms[0] > 0.01 and norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_the_reference_is_where_training_started():
    config = TrainerConfig(loss=LossConfig(kl_beta=0.1, entropy_weight=0.01))
    config.optim.lr = 1e-2
    trainer = PolicyTrainer(made().float(), config, max_steps=3)
    values = [trainer.step(Batch(step, samples())) for step in (1, 2)]
    assert (
        values[0]["reference_kl/mean"] == pytest.approx(0.0, abs=1e-9)
        and values[1]["reference_kl/mean"] > 1e-6
    )


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("rows", [3, 100])
def test_head_in_chunks_equals_all_logits_at_once(rows, cap):
    torch.manual_seed(0)
    hidden, weight = torch.randn(10, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    targets, temperature = torch.randint(0, 30, (10,)), torch.linspace(0.5, 1.5, 10)
    results = []
    inputs = (hidden, weight, targets, temperature)
    for logprobs, entropy in (_Head.apply(*inputs, rows, cap), twins.head_logprobs(*inputs, cap)):
        slopes = torch.linspace(-1, 1, 10)
        total = (logprobs * slopes + entropy * slopes.flip(0)).sum()
        results.append((logprobs, entropy, *torch.autograd.grad(total, (hidden, weight))))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    plain, _ = head_logprobs(*inputs, cap=cap)
    torch.testing.assert_close(plain, results[1][0])
