"""What is asked of a family: sizes without torch, adapters, fast paths; a mixture of experts from sampling to a step.

Logits, gradients, greedy tokens and files of every family: test_transformer.py.
"""

import base64
import subprocess
import sys

import numpy as np
import pytest
import torch

from hone.config.lora_config import LoRAConfig
from hone.config.rl_config import RLConfig, TrainerConfig
from hone.config.sections import OptimConfig
from hone.engine.engine import Engine
from hone.engine.packed_model import PackedModel
from hone.kernels.expert_products import multiply_groups
from hone.models.adapters import Adapter, Adapters
from hone.models.attention_layouts import PackedAttention
from hone.models.families import parse_model_config
from hone.models.hf import hf_names, hf_tensors
from hone.models.lora import (
    ExpertLoRA,
    Merged,
    adapter_tensors,
    add_lora,
    list_linears,
    lora_modules,
    merge_adapter,
    write_adapter,
)
from hone.models.transformer import Transformer
from hone.orchestrator.group import samples_of
from hone.records import (
    Batch,
    Completion,
    Example,
    GenerateRequest,
    Rollout,
    Sample,
    Sampling,
    Turn,
)
from hone.run_directory import appearing_directory
from hone.trainer.rl.trainer import PolicyTrainer
from hone.transport.batches import FileBatches

COMMON = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
CONFIGS = {
    "dense": COMMON | {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "experts": COMMON | EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"]},
}


def made(family, seed=0):
    model = Transformer(parse_model_config(CONFIGS[family]))
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


@pytest.mark.parametrize("family", CONFIGS)
def test_sizes_are_those_of_the_model(family):
    model = made(family)
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
    assert model.spec.parameter_count() == matrices
    # The embedding is looked up, not multiplied
    active = matrices - 50 * 32 * (family == "experts")
    if family == "experts":
        active -= 2 * (6 - 2) * 3 * 32 * 16  # four of six experts in each block are not asked
    assert model.spec.flops_per_token() == 2 * active
    assert set(hf_names(model.spec)) == dict(model.named_parameters()).keys()


def test_the_arithmetic_needs_no_torch():
    code = "import sys, hone.models.families as f; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_fast_paths_are_refused_by_asking():
    assert PackedModel.supports_model(made("dense")) == made("dense").spec.has_fast_paths
    assert (
        not PackedModel.supports_model(made("experts"))
        and Engine(made("experts")).decoder.packed is None
    )


def test_grouped_products_with_groups_of_none():
    x, weights = torch.randn(5, 4), torch.randn(4, 3, 4)
    found = multiply_groups(x, weights, torch.tensor([2, 0, 3, 0]))
    torch.testing.assert_close(found, torch.cat([x[:2] @ weights[0].T, x[2:] @ weights[2].T]))
    assert multiply_groups(x[:0], weights, torch.tensor([0, 0, 0, 0])).shape == (0, 3)


@pytest.mark.parametrize("rank", [3, 8])
@pytest.mark.parametrize("targets", [None, ["up_proj"], ["gate_proj", "down_proj", "q_proj"]])
def test_adapters_of_experts_are_those_of_merged_weights(tmp_path, rank, targets):
    """Outputs, gradients, files and merged weights, against torch on weights merged by hand."""
    model = made("experts")
    config = LoRAConfig(rank=rank, alpha=7, targets=targets)
    add_lora(model, config, seed=0)
    names = {name.rsplit(".", 1)[-1] for lora in lora_modules(model) for name in lora.targets}
    assert names == set(targets or model.spec.linear_shapes)
    base = made("experts")
    leaves, weights = {}, dict(hf_tensors(base))
    with torch.no_grad():
        for lora in lora_modules(model):
            lora.B.normal_()
    for lora in lora_modules(model):
        for name, a, b in lora.named_pairs():
            leaves[name] = [x.clone().requires_grad_() for x in (a, b)]
            merged = weights[f"{name}.weight"] + config.scale * leaves[name][1] @ leaves[name][0]
            weights[f"{name}.weight"] = merged
    parameters = {
        ours: torch.cat([weights[name] for name in theirs])
        for ours, theirs in hf_names(base.spec).items()
    }
    tokens = torch.randint(0, 50, (23,))
    attention = PackedAttention([9, 14], "cpu")
    inputs = (tokens, attention.token_positions(), attention)
    found = model(*inputs)
    wanted = torch.func.functional_call(base, parameters, inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    direction = torch.randn_like(found)
    for out in (found, wanted):
        (out * direction).sum().backward()
    for lora in lora_modules(model):
        of_a, of_b = (x.grad for x in (lora.A, lora.B))
        theirs = [leaves[name] for name in lora.targets]
        for one, others in ((of_a, [a for a, _ in theirs]), (of_b, [b for _, b in theirs])):
            other = torch.cat([x.grad for x in others])
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    write_adapter(adapter_tensors(model), config, model.spec, "base", tmp_path / "adapter")
    into = dict(hf_tensors(base))
    merge_adapter(into, tmp_path / "adapter")
    copy = dict(hf_tensors(Merged(model).model))
    assert all(torch.equal(copy[name], into[name]) for name in into)
    for linear, _ in list_linears(model):
        if isinstance(linear.delta, ExpertLoRA):  # on a GPU all experts at once
            for dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
                one = linear.delta.add_to(linear.weight.detach(), dtype)
                many = linear.delta.add_at_once(linear.weight.detach(), dtype, lambda x: x)
                torch.testing.assert_close(one, many, rtol=rtol, atol=1e-5)
                assert (one == many).float().mean() > 0.9
    start = LoRAConfig(rank=rank, alpha=7, targets=targets, start_from=tmp_path / "adapter")
    again = made("experts")
    add_lora(again, start, seed=1)
    torch.testing.assert_close(again(*inputs), found, rtol=1e-5, atol=1e-5)


def test_an_adapter_of_experts_cannot_be_chosen_by_request():
    with pytest.raises(ValueError, match="lora.targets: upp_proj has no adapter in this model"):
        add_lora(made("experts"), LoRAConfig(targets=["q_proj", "upp_proj"]), seed=0)
    expert = Adapter(
        2, {"model.layers.0.mlp.experts.1.up_proj": (torch.zeros(2, 32), torch.zeros(16, 2))}
    )
    with pytest.raises(ValueError, match=r"experts.1.up_proj is an expert's"):
        Adapters(made("experts")).load_adapter("a", expert)


@pytest.mark.parametrize("kind", ["adamw", "muon", "lora"])
def test_what_the_sampler_wrote_the_trainer_scores_alike_and_learns(kind):
    model = made("experts")
    optim = OptimConfig(type="muon" if kind == "muon" else "adamw", lr=1e-2)
    lora = LoRAConfig(rank=4) if kind == "lora" else None
    trainer = PolicyTrainer(model, TrainerConfig(optim=optim, lora=lora), max_steps=2)
    engine = Engine(model, max_batch_size=8, kv_cache_gib=0.1)
    prompts = [[1, 2, 3, 4 + i % 2] for i in range(8)]
    before = None
    for step in (1, 2):
        asked = [
            GenerateRequest(p, Sampling(0.8, 12, seed=i), frozenset())
            for i, p in enumerate(prompts)
        ]
        samples = [
            Sample(
                p + c.ids,
                [False] * 4 + [True] * len(c.ids),
                [0.0] * 4 + c.logprobs,
                (-1.0) ** i,
                0.8,
            )
            for i, (p, c) in enumerate(zip(prompts, engine.generate(asked), strict=True))
        ]
        values = trainer.step(Batch(step, samples))
        engine.set_version(step)
        assert values["mismatch_kl/max"] < 1e-6
        # The loss of what was sampled just now is 0
        assert before is None or values["entropy/mean"] != before
        before = values["entropy/mean"]


# ------------------------------------------------------------------------------- the sampler's experts, replayed


def sampled(model, prompts, count=9):
    engine = Engine(model, max_batch_size=8, kv_cache_gib=0.1)
    asked = [
        GenerateRequest(p, Sampling(1.0, count, seed=i), frozenset()) for i, p in enumerate(prompts)
    ]
    return engine, engine.generate(asked)


def chosen_in(model, ids):
    """What the routers choose for all tokens of a sequence but the last."""
    attention = PackedAttention([len(ids) - 1])
    with torch.no_grad():
        model(torch.tensor(ids[:-1]), attention.token_positions(), attention)
    return torch.cat([mixture.chosen_TK for mixture in model.expert_layers], 1)


def test_completions_say_which_experts_their_tokens_went_through():
    model = made("experts")
    prompts = [
        [1, 2, 3, *range(20, 40)],
        [1, 2, 3, *range(20, 40)],
        [1, 2, 3, *range(20, 39), 7],
        [9, 8],
    ]
    engine, completions = sampled(model, prompts)  # a sibling, pages that are shared, one alone
    # Pages known before
    again = engine.generate([GenerateRequest(prompts[0] + [5], Sampling(1.0, 4), frozenset())])[0]
    for prompt, completion in [*zip(prompts, completions, strict=True), (prompts[0] + [5], again)]:
        ids = prompt + completion.ids
        found = np.frombuffer(base64.b64decode(completion.routing), dtype=np.int16).reshape(
            len(ids) - 1, -1
        )
        expected = chosen_in(model, ids).numpy()
        written = slice(len(prompt) - 1, None)  # rows that predict what was written
        assert np.array_equal(found[written], expected[written])
        first_block = found[:, :2]
        assert np.array_equal(first_block, expected[:, :2]) and (first_block >= 0).all()
        # The last block computes what is needed alone
        assert (found[: len(prompt) - 1, 2:] == -1).all()
    dense = sampled(made("dense"), prompts)[1]
    assert [completion.routing for completion in dense] == [""] * 4


def test_a_conversation_keeps_the_experts_of_each_turn():
    def turn(prompt, ids, number):
        routing = np.full((len(prompt) + len(ids) - 1, 2), number, dtype=np.int16)
        completion = Completion(ids, [0.0] * len(ids), [0] * len(ids), "stop")
        completion.routing = base64.b64encode(routing.tobytes()).decode()
        return Turn(prompt, completion, "")

    rollout = Rollout(Example(0, []), [turn([1, 2], [3, 4], 5), turn([1, 2, 3, 4, 6], [7], 8)], [])
    (sample,) = samples_of(rollout, 1.0, 1.0, "")
    assert sample.ids.tolist() == [1, 2, 3, 4, 6, 7] and sample.routing[:, 0].tolist() == [
        5,
        5,
        5,
        8,
        8,
    ]


def test_batches_carry_routing(tmp_path):
    known = np.arange(8, dtype=np.int16).reshape(4, 2)
    samples = [
        Sample([1] * 5, [True] * 5, [0.0] * 5, 1.0, 1.0, routing=known),
        Sample([1, 2], [True] * 2, [0.0] * 2, 1.0, 1.0),
    ]
    with appearing_directory(tmp_path / "step_1") as place:
        FileBatches(tmp_path, "run").put(Batch(1, samples), place)
    one, two = FileBatches(tmp_path, "run").take(1).samples
    assert np.array_equal(one.routing, known) and two.routing.tolist() == [[-1, -1]]


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_training_goes_through_the_experts_that_were_chosen(shared, recomputes):
    model = made("experts")
    prompts = [[1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7]] if shared else [[1, 2], [3, 4, 5], [6]]
    _, completions = sampled(model, prompts)
    rollouts = [
        Rollout(Example(0, []), [Turn(p, c, "")], [])
        for p, c in zip(prompts, completions, strict=True)
    ]
    samples = [samples_of(one, (-1.0) ** i, 1.0, "")[0] for i, one in enumerate(rollouts)]

    def stepped(changed, replay):
        model = made("experts")
        if changed:
            with torch.no_grad():
                model.expert_layers[0].router.weight.add_(
                    torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
                )
        config = TrainerConfig(replay_routing=replay, activation_checkpointing=recomputes)
        trainer = PolicyTrainer(model, config, max_steps=1)
        trainer.optimizer.step = lambda lr: 0.0
        values = trainer.step(Batch(1, samples))
        return (
            values,
            [p.grad for p in model.parameters()],
            [mixture.chosen_TK for mixture in model.expert_layers],
        )

    plain, gradients, own = stepped(False, False)
    replayed, same, _ = stepped(False, True)
    assert "routing/differs" not in plain and replayed["routing/differs"] == 0.0
    for one, two in zip(gradients, same, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-9)
    values, _, chosen = stepped(True, True)
    assert 0.05 < values["routing/differs"] < 1.0 and torch.equal(chosen[0], own[0])
    assert not torch.equal(stepped(True, False)[2][0], own[0])


def test_replay_needs_a_mixture_and_sets_what_servers_return():
    with pytest.raises(
        ValueError, match="trainer.replay_routing: this model is not a mixture of experts"
    ):
        PolicyTrainer(made("dense"), TrainerConfig(replay_routing=True), max_steps=1)
    given = {
        "model": {"name": "m"},
        "orchestrator": {"env": {"id": "x"}},
        "trainer": {"replay_routing": True},
    }
    assert RLConfig.model_validate(
        RLConfig.prepare_values(given, {}, set())
    ).orchestrator.return_routing


def test_a_bad_step_is_written_down_without_routing(tmp_path):
    model = made("experts")
    _, (completion,) = sampled(model, [[1, 2, 3]])
    samples = samples_of(
        Rollout(Example(0, []), [Turn([1, 2, 3], completion, "")], []), 1.0, 1.0, ""
    )
    config = TrainerConfig(
        replay_routing=True, optim=OptimConfig(skip_norm=1e-12), on_bad_step="skip"
    )
    trainer = PolicyTrainer(model, config, max_steps=1, bad_steps=tmp_path)
    assert trainer.step(Batch(1, samples))["optim/skipped"] == 1.0
    assert '"routing": null' in (tmp_path / "step_1.jsonl").read_text()
