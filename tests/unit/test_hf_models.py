"""On transformers' modules and on Hone's own: logits, gradients, greedy tokens are those of transformers."""

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hone.config.lora_config import LoRAConfig
from hone.config.rl_config import TrainerConfig
from hone.engine import mixer_states, state_rows
from hone.engine.engine import Engine
from hone.inference.samplers.vllm_files import VllmFiles
from hone.models.attention_layouts import PackedAttention
from hone.models.families import parse_model_config
from hone.models.hf import (
    empty_model,
    hf_names,
    hf_tensors,
    load_model,
    save_model,
    split_rows,
    stored_names,
)
from hone.models.layers import Linear
from hone.models.lora import (
    Merged,
    adapter_tensors,
    add_lora,
    lora_modules,
    merge_adapter,
    write_adapter,
)
from hone.models.weight_proof import canary_ids, score_sequence
from hone.records import Batch, GenerateRequest, Sample, Sampling
from hone.trainer.rl.trainer import PolicyTrainer
from hone.transport.files import FileReceiver, FileSender
from hone.transport.transports import RECEIVERS

V = 256
SHAPE = {
    "vocab_size": V,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYERS = ["sliding_attention", "full_attention"] * 2
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
MINISTRAL_ROPE = YARN | {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 100.0}
GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 8,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": V,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 100.0}
        | {"partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
MLA = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
HYBRID_LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA = {"mamba_n_groups": 1, "mamba_expand": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "qwen3": {},
    "llama": {},
    "qwen2": {},
    "olmo2": {},
    "olmo3": {
        "sliding_window": 8,
        "layer_types": LAYERS,
        "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN_ROPE},
    },
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "mistral": {"sliding_window": 8},
    "ministral3": {"rope_parameters": MINISTRAL_ROPE},
    "gemma2": {"sliding_window": 8, "layer_types": LAYERS, "query_pre_attn_scalar": 32},
    "gemma3_text": {
        "sliding_window": 8,
        "layer_types": LAYERS,
        "query_pre_attn_scalar": 32,
        "rope_parameters": {
            "full_attention": PLAIN_ROPE | {"rope_type": "linear", "factor": 8.0},
            "sliding_attention": PLAIN_ROPE,
        },
    },
    "granite": {
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
        "logits_scaling": 2.0,
    },
    "phi3": {"partial_rotary_factor": 0.5},
    "phi3_long": {
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 96,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 100.0,
            "short_factor": [1.0, 1.2, 1.5, 2.0],
            "long_factor": [4.0, 5.0, 6.0, 7.0],
        },
    },
    "qwen2_windows": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "gpt_oss": {"sliding_window": 8, "layer_types": LAYERS, **EXPERTS},
    "cohere2": {"sliding_window": 8, "layer_types": LAYERS, "logit_scale": 0.25},
    "exaone4": {"sliding_window": 8, "layer_types": LAYERS},
    "glm4": {},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "granitemoe": EXPERTS,
    "mixtral": EXPERTS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "stablelm": {},  # hands no arguments down to its layers
    "starcoder2": {"sliding_window": 8},
    "seed_oss": {},
    "ernie4_5": {},
    "hunyuan_v1_dense": {},
    "gpt_neox": {"num_key_value_heads": 4},
    "minimax_m2": EXPERTS,
    # with heads of other sizes in some layers, or values of another size than keys
    "gemma4_e": GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "gemma4_text": GEMMA4
    | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True}
    | {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    "glm4_moe_lite": MLA,
    "deepseek_v3": MLA | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    # with other mixers than attention
    "qwen3_5_text": DELTA | {"layer_types": HYBRID_LAYERS},
    "qwen3_5_moe_text": DELTA
    | {"layer_types": HYBRID_LAYERS, "num_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 48},
    "olmo_hybrid": DELTA | {"layer_types": HYBRID_LAYERS},
    "qwen3_next": DELTA
    | {"layer_types": HYBRID_LAYERS, "num_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 48},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_n_groups": 1}
    | {"mamba_d_state": 16, "mamba_chunk_size": 16, "lm_head_multiplier": 0.25}
    | {"embedding_multiplier": 3.0, "key_multiplier": 0.5, "ssm_out_multiplier": 0.7},
    "granitemoehybrid": MAMBA
    | {"layer_types": HYBRID_LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2}
    | {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
    | {"shared_intermediate_size": 48, "embedding_multiplier": 6.0, "residual_multiplier": 0.5},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 48,
        "moe_latent_size": None,
    },
}
LENGTHS = [24, 9, 17]
# Also computed by Hone's own blocks.
OWN = """qwen3 llama qwen2 olmo2 olmo3 smollm3 mistral ministral3 gemma2 gemma3_text granite phi3
phi3_long qwen2_windows qwen3_5_text qwen3_5_moe_text gpt_oss gemma4_e""".split()
KINDS = {"gemma4_e": "gemma4_text", "phi3_long": "phi3", "qwen2_windows": "qwen2"}


@pytest.fixture(
    params=[
        *((kind, "transformers") for kind in FAMILIES),
        *((kind, "hone") for kind in OWN),
    ],
    ids="-".join,
)
def case(request, tmp_path):
    """A model's directory, transformers' model, and ours."""
    name, implementation = request.param
    kind = KINDS.get(name, name)
    config = AutoConfig.for_model(kind, **SHAPE | FAMILIES[name])
    config.tie_word_embeddings = kind.startswith("gemma") or kind == "granite"
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            is_norm = parameter.dim() == 1
            parameter.normal_(0.0, 0.1 if is_norm else 0.2)
            if is_norm and "norm" in name and kind not in ("gemma2", "gemma3_text"):
                parameter.add_(1.0)
        for name, buffer in theirs.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.7)
    theirs.save_pretrained(tmp_path / "model")
    spec = parse_model_config(
        json.loads((tmp_path / "model" / "config.json").read_text()), implementation=implementation
    )
    return tmp_path / "model", theirs, load_model(tmp_path / "model", spec=spec)


def sequences():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, V, (n,), generator=generator) for n in LENGTHS]


def run_packed(model, rows):
    attention = PackedAttention([len(row) for row in rows])
    hidden = model(torch.cat(rows), attention.token_positions(), attention)
    return model.compute_logits(hidden).split([len(row) for row in rows])


def test_packed_logits_and_gradients_are_those_of_transformers(case):
    _, theirs, ours = case
    rows = sequences()
    found = run_packed(ours, rows)
    expected = [theirs(row[None]).logits[0] for row in rows]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-4)
    weight = torch.randn(sum(LENGTHS), V, generator=torch.Generator().manual_seed(2))
    (torch.cat(found) * weight).sum().backward()
    (torch.cat(expected) * weight).sum().backward()
    gradients = dict(theirs.named_parameters())
    table = hf_names(ours.spec)
    for own_name, parameter in ours.named_parameters():
        if parameter.grad is None:
            assert gradients[table[own_name][0]].grad is None
            continue
        parts = split_rows(ours.spec, own_name, parameter.grad)
        names = table[own_name]
        if names[0] not in gradients:  # experts, which transformers stacks
            names = [ours.spec.fused_name(own_name)]
            parts = [parameter.grad.view(gradients[names[0]].shape)]
        for name, part in zip(names, parts, strict=True):
            other = gradients[name].grad
            # Gradients of routers are small differences of large sums: rounding is 1.4e-4 on some CPUs.
            assert (part - other).norm() <= 3e-4 * other.norm() + 1e-6, name


def test_shared_prompts_are_those_of_whole_sequences(case):
    _, _, ours = case
    prompt, first, second = sequences()
    attention = PackedAttention([len(prompt)], completions=[[len(first), len(second)]])
    tokens = torch.cat([prompt, first, second])
    with torch.no_grad():
        hidden = ours(tokens, attention.token_positions(), attention)
        parts = ours.compute_logits(hidden).split(LENGTHS)
        for completion, part in ((first, parts[1]), (second, parts[2])):
            (whole,) = run_packed(ours, [torch.cat([prompt, completion])])
            torch.testing.assert_close(part, whole[len(prompt) :], rtol=1e-4, atol=1e-4)


def test_gradients_of_shared_prompts_are_those_of_whole_sequences(case):
    """Also of a completion of one token, which some modules compute in place."""
    _, _, ours = case
    prompt, first, second = sequences()
    second = second[:1]
    lengths = [len(x) for x in (prompt, first, second)]
    weight = torch.randn(sum(lengths), V, generator=torch.Generator().manual_seed(2))
    of_prompt, of_first, of_second = weight.split(lengths)
    gradients = []
    for is_shared in (True, False):
        ours.zero_grad()
        if is_shared:
            attention = PackedAttention([len(prompt)], completions=[lengths[1:]])
            tokens = torch.cat([prompt, first, second])
            logits = ours.compute_logits(ours(tokens, attention.token_positions(), attention))
            (logits * weight).sum().backward()
        else:
            whole = run_packed(ours, [torch.cat([prompt, first]), torch.cat([prompt, second])])
            (whole[0] * torch.cat([of_prompt, of_first])).sum().backward(retain_graph=True)
            (whole[1][len(prompt) :] * of_second).sum().backward()
        gradients.append([p.grad for p in ours.parameters()])
    for one, other in zip(*gradients, strict=True):
        if other is not None:
            assert (one - other).norm() <= 1e-3 * other.norm() + 1e-5


def test_greedy_tokens_and_logprobs_are_those_of_transformers(case):
    _, theirs, ours = case
    engine = Engine(ours, max_batch_size=4, max_model_len=64, kv_cache_gib=0.1, prefill_tokens=16)
    rows = sequences()
    requests = [
        GenerateRequest(row.tolist(), Sampling(0.0, 20, seed=1), frozenset()) for row in rows
    ]
    for row, completion in zip(rows, engine.generate(requests), strict=True):
        whole = torch.cat([row, torch.tensor(completion.ids)])
        with torch.no_grad():
            logprobs = theirs(whole[None]).logits[0].log_softmax(-1)[len(row) - 1 : -1]
        own = logprobs.gather(1, whole[len(row) :, None]).squeeze(1)
        assert (logprobs.max(-1).values - own).max() < 1e-4
        torch.testing.assert_close(torch.tensor(completion.logprobs), own, rtol=1e-4, atol=2e-4)


def test_prompts_in_chunks_of_any_size_give_the_same_logprobs(case):
    _, _, ours = case
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, V, (n,), generator=generator).tolist() for n in (70, 66, 3)]
    prompts.append(prompts[0][:40] + prompts[1][:30])  # begins with cached pages
    for cut in (3, 16, 63, 64, 65):
        engine = Engine(
            ours, max_batch_size=4, max_model_len=96, kv_cache_gib=0.1, prefill_tokens=cut
        )
        requests = [GenerateRequest(ids, Sampling(1.0, 4, seed=1), frozenset()) for ids in prompts]
        for ids, completion in zip(prompts, engine.generate(requests), strict=True):
            expected = score_sequence(ours, ids + completion.ids)[-len(completion.ids) :]
            found = torch.tensor(completion.logprobs)
            torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=2e-4)


HYBRIDS = """qwen3_5_text qwen3_5_moe_text qwen3_next olmo_hybrid lfm2 granitemoehybrid
nemotron_h falcon_h1""".split()


@pytest.mark.parametrize(
    "case",
    [*((kind, "transformers") for kind in HYBRIDS), ("qwen3_5_text", "hone")],
    indirect=True,
    ids="-".join,
)
@pytest.mark.parametrize("spare", [64, -8])
def test_states_of_mixers_follow_siblings_prefixes_and_reused_slots(case, spare, monkeypatch):
    """More groups than slots, prompts that begin with cached pages, states that were evicted."""
    monkeypatch.setattr(mixer_states, "SPARE_STATES", spare)
    monkeypatch.setattr(state_rows, "MOST_SNAPSHOTS", max(spare, 2))
    _, _, ours = case
    assert ours.state_bytes > 0
    generator = torch.Generator().manual_seed(6)
    first, second = (torch.randint(3, V, (n,), generator=generator).tolist() for n in (37, 21))
    engine = Engine(ours, max_batch_size=4, max_model_len=96, kv_cache_gib=0.1, prefill_tokens=32)
    prompts = [first] * 3 + [second] * 3 + [first[:33] + second, second + first[:9], first[:1]]
    for turn in range(2):
        requests = [
            GenerateRequest(ids, Sampling(1.0, 3 + i, seed=10 * turn + i), frozenset())
            for i, ids in enumerate(prompts)
        ]
        for ids, completion in zip(prompts, engine.generate(requests), strict=True):
            expected = score_sequence(ours, ids + completion.ids)[-len(completion.ids) :]
            found = torch.tensor(completion.logprobs)
            torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=2e-4)
    short = [GenerateRequest([5 + i, 7], Sampling(1.0, 1, seed=i), frozenset()) for i in range(120)]
    engine.generate(short)
    if engine.cache.mixers is not None:
        assert len(engine.cache.mixers.states) <= 8 + spare


def test_bfloat16_drifts_no_more_than_transformers(case):
    directory, theirs, ours = case
    rows = [torch.randint(3, V, (60,), generator=torch.Generator().manual_seed(5))]
    short = load_model(directory, spec=ours.spec, dtype=torch.bfloat16)
    with torch.no_grad():
        exact = theirs(rows[0][None]).logits[0].log_softmax(-1)
        found = run_packed(short, rows)[0].float().log_softmax(-1)
        expected = theirs.bfloat16()(rows[0][None]).logits[0].float().log_softmax(-1)
    drift, allowed = ((x - exact).abs().mean() for x in (found, expected))
    assert drift <= 1.5 * allowed, (drift, allowed)


def test_saved_weights_are_those_that_were_read(case, tmp_path):
    directory, _, ours = case
    save_model(ours, directory, tmp_path / "saved")
    before, after = (
        load_file(place / "model.safetensors") for place in (directory, tmp_path / "saved")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved")


def test_one_sequence_does_not_see_another(case):
    _, _, ours = case
    rows = sequences()
    with torch.no_grad():
        before = run_packed(ours, rows)
        rows[0] = (rows[0] + 5) % V
        after = run_packed(ours, rows)
    assert not torch.equal(before[0], after[0])
    for one, other in zip(before[1:], after[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_training_step_changes_all_weights_and_recomputing_gives_the_same(case, recomputes):
    directory, _, ours = case
    other = load_model(directory, spec=ours.spec)
    samples = [
        Sample(row.tolist(), [False] * 4 + [True] * (len(row) - 4), [0.0] * len(row), 1.0, 1.0)
        for row in sequences()
    ]
    norms, counts = [], []
    for model, recompute in ((ours, recomputes), (other, False)):
        calls = []
        # Hone's own blocks may compute their linears in one call.
        is_own = ours.spec.implementation == "hone"
        linear = next(x for x in model.blocks[0].modules() if isinstance(x, Linear))
        (model.blocks[0] if is_own else linear).register_forward_pre_hook(
            lambda module, _, calls=calls: calls.append(module)
        )
        keys = {"loss": {"type": "sft"}, "activation_checkpointing": recompute}
        trainer = PolicyTrainer(model, TrainerConfig.model_validate(keys), 10)
        norms.append(trainer.step(Batch(1, samples))["optim/grad_norm"])
        counts.append(len(calls))
    assert counts[0] == (2 if recomputes else 1) * counts[1] > 0
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def adapted_linears(spec):
    """Return the linears to adapt: all; in mixtures of experts those that peft and servers adapt, too."""
    if not spec.routed_experts:
        return None
    return [x for x in spec.linear_shapes if x not in ("gate_proj", "up_proj", "down_proj")]


def test_adapters_of_all_linears_are_peft_s(case, tmp_path):
    from peft import PeftModel

    directory, theirs, ours = case
    linears = {
        name.rsplit(".", 1)[-1]
        for name, module in theirs.get_decoder().layers.named_modules()
        if type(module) is torch.nn.Linear and ours.spec.can_adapt(name)
    }
    targets = adapted_linears(ours.spec)
    linears = linears if targets is None else linears & set(targets)
    add_lora(ours, LoRAConfig(rank=4, alpha=8.0, targets=targets), seed=0)
    generator = torch.Generator().manual_seed(3)
    config = next(lora_modules(ours)).config
    for lora in lora_modules(ours):
        lora.B.data.normal_(0.0, 0.1, generator=generator)
    rows = sequences()
    with torch.no_grad():
        beside = run_packed(ours, rows)
        merged = run_packed(Merged(ours).model, rows)
        write_adapter(adapter_tensors(ours), config, ours.spec, str(directory), tmp_path / "lora")
        adapted = PeftModel.from_pretrained(theirs, tmp_path / "lora").eval()
        for row, one, other in zip(rows, beside, merged, strict=True):
            expected = adapted(row[None]).logits[0]
            atol = 2e-3 if ours.spec.mixer_layers else 2e-4
            torch.testing.assert_close(one, expected, rtol=1e-4, atol=atol)
            torch.testing.assert_close(other, expected, rtol=1e-4, atol=atol)
    kinds = {name.rsplit(".", 1)[-1] for lora in lora_modules(ours) for name in lora.targets}
    assert kinds == linears


def test_an_eight_bit_base_is_near_the_model(case):
    _, _, ours = case
    rows = sequences()
    with torch.no_grad():
        before = torch.cat(run_packed(ours, rows))
        add_lora(ours, LoRAConfig(rank=4, base_bits=8), seed=0)
        after = torch.cat(run_packed(ours, rows))
    assert 0 < (after - before).norm() < 0.5 * before.norm()  # experts may be chosen anew


@pytest.mark.parametrize(
    ("kind", "keys", "without", "tokens"),
    [
        (
            "gemma3_text",
            {"sliding_window": 64, "layer_types": LAYERS},
            {"layer_types": ["full_attention"] * 4},
            66,
        ),
        (
            "ministral3",
            {"rope_parameters": MINISTRAL_ROPE | {"original_max_position_embeddings": 40}},
            {"rope_parameters": MINISTRAL_ROPE | {"original_max_position_embeddings": 80}},
            42,
        ),
        ("llama", {}, {}, 33),
    ],
)
def test_the_canary_reaches_past_windows_and_scaled_rotation(kind, keys, without, tokens):
    config = SHAPE | {"model_type": kind, "architectures": ["X"]} | keys
    model, other = (
        empty_model(parse_model_config(shape), torch.float32, "cpu")
        for shape in (config, config | without)
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            two.copy_(one.normal_(0.0, 0.2) if one.dim() > 1 else one.fill_(0.5))
    ids = canary_ids(model.spec)
    assert len(ids) == tokens
    scores = [torch.tensor(score_sequence(one, ids)) for one in (model, other)]
    differ = float((scores[0] - scores[1]).abs().max())
    assert differ > 0.01 if without else differ == 0


# Gemma 4's last layer has no window.
WITH_WINDOW = [
    kind for kind in FAMILIES if "sliding_window" in FAMILIES[kind] and "gemma4" not in kind
]


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [(kind, "transformers") for kind in WITH_WINDOW]
    + [(kind, "hone") for kind in WITH_WINDOW if kind in OWN],
)
def test_a_window_ends_where_it_ends_in_transformers(kind, implementation):
    """With one layer, token i sees token i - W + 1, and not token i - W."""
    config = AutoConfig.for_model(
        KINDS.get(kind, kind),
        **SHAPE
        | FAMILIES[kind]
        | {"num_hidden_layers": 1, "max_window_layers": 0}
        | ({"layer_types": ["sliding_attention"]} if "layer_types" in FAMILIES[kind] else {}),
    ).to_dict()
    architecture = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).__class__
    config["architectures"] = [architecture.__name__]
    spec = parse_model_config(config, implementation=implementation)
    model = empty_model(spec, torch.float32, "cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2) if parameter.dim() > 1 else parameter.fill_(0.5)
        ids = sequences()[0]
        base = run_packed(model, [ids])[0]
        at, window = 20, 8
        for back, is_seen in ((window - 1, True), (window, False)):
            other = ids.clone()
            other[at - back] = (other[at - back] + 7) % V
            changed = (run_packed(model, [other])[0][at] - base[at]).abs().max()
            assert (changed > 1e-5) == is_seen


VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
WITH_VISION = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_e",
    "mistral3": "ministral3",
    "llava": "llama",
    "qwen3_5": "qwen3_5_text",
}


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [(kind, name) for name in ("transformers", "hone") for kind in WITH_VISION],
)
def test_the_text_part_of_a_model_with_vision_is_trained_and_the_rest_is_kept(
    kind, implementation, tmp_path
):
    from transformers import AutoModelForImageTextToText

    name = WITH_VISION[kind]
    text = SHAPE | FAMILIES[name] | {"model_type": KINDS.get(name, name)}
    clip = {"model_type": "clip_vision_model", "projection_dim": 16} if kind == "llava" else {}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=VISION | clip)
    torch.manual_seed(0)
    theirs = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    theirs.save_pretrained(tmp_path / "model")
    shape = json.loads((tmp_path / "model" / "config.json").read_text())
    spec = parse_model_config(shape, implementation=implementation)
    assert spec.implementation == implementation
    ours = load_model(tmp_path / "model", spec=spec)
    rows = sequences()
    with torch.no_grad():
        for row, found in zip(rows, run_packed(ours, rows), strict=True):
            torch.testing.assert_close(found, theirs(row[None]).logits[0], rtol=1e-4, atol=1e-4)
        before = load_file(tmp_path / "model" / "model.safetensors")
        (name, weight), *_ = (x for x in hf_tensors(ours) if "self_attn.q_proj" in x[0])
        weight.add_(1.0)
    save_model(ours, tmp_path / "model", tmp_path / "saved")
    after = load_file(tmp_path / "saved" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) == 1 and changed[0].endswith(name.removeprefix("model."))
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        found = run_packed(load_model(tmp_path / "saved"), rows)[0]
        torch.testing.assert_close(found, again(rows[0][None]).logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma4", "mistral3"])
def test_versions_for_vllm_have_the_names_of_the_model_s_files(kind, tmp_path, monkeypatch):
    """vLLM skips tensors of other names in silence; a server of Hone's finds them too."""
    from transformers import AutoModelForImageTextToText

    name = WITH_VISION[kind]
    text = SHAPE | FAMILIES[name] | {"model_type": KINDS.get(name, name)}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=VISION)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "model")
    config_text = (tmp_path / "model" / "config.json").read_text()
    ours, other = (load_model(tmp_path / "model") for _ in range(2))
    with torch.no_grad():
        for tensor in dict(hf_tensors(ours)).values():
            tensor.add_(1.0)
    place = tmp_path / "step_1"
    place.mkdir()
    (place / "config.json").write_text(config_text)
    names = stored_names(ours, tmp_path / "model")
    FileSender(names).send_version(1, dict(hf_tensors(ours)), place)
    in_files = load_file(tmp_path / "model" / "model.safetensors").keys()
    sent = load_file(place / "model.safetensors")
    assert sent.keys() <= in_files and set(sent) == set(names.values())
    FileReceiver().receive_version({}, 1, place, dict(hf_tensors(other)))
    for (_, one), (_, two) in zip(hf_tensors(ours), hf_tensors(other), strict=True):
        assert torch.equal(one, two)
    (tmp_path / "home").mkdir()
    files = VllmFiles(tmp_path / "model", tmp_path / "home", "float32", is_on_cpu=False)
    for directory in (place, tmp_path / "model"):  # without the other parts, and with them
        assert files.take_version(directory, 1, {"type": "filesystem"}) == directory
    if ours.spec.tie_word_embeddings:  # a head of its own, where transformers would have it
        untied = AutoConfig.from_pretrained(tmp_path / "model")
        untied.tie_word_embeddings = untied.get_text_config().tie_word_embeddings = False
        AutoModelForImageTextToText.from_config(untied).save_pretrained(tmp_path / "untied")
        heads = load_file(tmp_path / "untied" / "model.safetensors").keys() - in_files
        on_cpu = VllmFiles(tmp_path / "model", tmp_path / "home", "float32", is_on_cpu=True)
        written = on_cpu.take_version(place, 1, {"type": "filesystem"})
        assert load_file(written / "head.safetensors").keys() == heads and len(heads) == 1

    class Fake(FileReceiver):
        def receive_version(self, message, version, place, into, arrived=None):
            for key, tensor in hf_tensors(ours):
                into[key].copy_(tensor)

    monkeypatch.setitem(RECEIVERS, "fake", Fake)
    received = load_file(files.take_version(place, 2, {"type": "fake"}) / "model.safetensors")
    assert received.keys() == sent.keys()
    assert all(torch.equal(received[key], sent[key]) for key in sent)


@pytest.mark.parametrize("implementation", ["hone", "transformers"])
def test_a_head_of_its_own_beside_vision_is_not_taken_for_a_tied_one(implementation, tmp_path):
    from transformers import AutoModelForImageTextToText

    text = SHAPE | {"model_type": "mistral", "sliding_window": None}
    config = AutoConfig.for_model("mistral3", text_config=text, vision_config=VISION)
    config.tie_word_embeddings = False
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    shape = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    with pytest.raises(ValueError, match="differs from .*embed_tokens.weight, though"):
        load_model(tmp_path, spec=parse_model_config(shape, implementation=implementation))


@pytest.mark.parametrize("kind", [kind for kind in OWN if kind not in KINDS])
def test_keys_that_a_config_leaves_out_are_those_of_transformers(kind):
    """Real files leave out what their author's version had as a default."""
    shape = {key: SHAPE[key] for key in ("vocab_size", "intermediate_size")}
    shape |= {"hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 4}
    name = type(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE))).__name__
    config = shape | {"model_type": kind, "architectures": [name]}
    if kind == "ministral3":
        config["rope_parameters"] = MINISTRAL_ROPE
    own, theirs = (parse_model_config(config, implementation=x) for x in ("hone", "transformers"))
    for field in ("num_key_value_heads", "head_dim", "max_position_embeddings", "logit_cap"):
        assert getattr(own, field) == getattr(theirs, field), field
    text = AutoConfig.for_model(kind, **shape)
    assert own.rms_norm_eps == text.rms_norm_eps
    assert own.tie_word_embeddings == text.tie_word_embeddings
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * 4
    window = getattr(text, "sliding_window", None)
    windows = [window if "sliding" in one else None for one in kinds]
    assert [layer.window for layer in own.layers] == windows


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_old_names_of_phi_s_rotation_are_longrope(name):
    config = SHAPE | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}
    config |= FAMILIES["phi3_long"]
    old = config["rope_parameters"] | {"rope_type": name}
    specs = [
        parse_model_config(x, implementation="hone")
        for x in (config, config | {"rope_parameters": old})
    ]
    assert specs[0] == specs[1]


def test_each_request_is_answered_by_its_own_adapter(case, tmp_path):
    """A server's adapters: the logprobs are those of the model that was trained with the adapter."""
    directory, _, ours = case
    row = sequences()[0].tolist()
    expected = {}
    for name in ("a", "b"):
        trained = load_model(directory, spec=ours.spec)
        config = LoRAConfig(rank=4, targets=adapted_linears(ours.spec))
        add_lora(trained, config, seed=len(expected))
        generator = torch.Generator().manual_seed(len(expected))
        for lora in lora_modules(trained):
            lora.B.data.normal_(0.0, 0.1, generator=generator)
        config = next(lora_modules(trained)).config
        tensors = adapter_tensors(trained)
        write_adapter(tensors, config, ours.spec, str(directory), tmp_path / name)
        expected[name] = torch.tensor(score_sequence(Merged(trained).model, row))
    expected[None] = torch.tensor(score_sequence(ours, row))
    engine = Engine(ours, max_batch_size=4, max_model_len=64, kv_cache_gib=0.1)
    for name in ("a", "b"):
        engine.load_adapter(name, tmp_path / name)
    assert not torch.allclose(expected["a"], expected["b"], atol=1e-2)
    prompts = [(name, row[:8]) for name in expected]
    requests = [
        GenerateRequest(prompt, Sampling(1.0, 6, seed=1), frozenset(), adapter=name)
        for name, prompt in prompts
    ]
    for (name, prompt), completion in zip(prompts, engine.generate(requests), strict=True):
        whole = prompt + completion.ids
        if name is None:
            own = score_sequence(ours, whole)
        else:
            trained = load_model(directory, spec=ours.spec)
            merge_adapter(dict(hf_tensors(trained)), tmp_path / name)
            own = score_sequence(trained, whole)
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), torch.tensor(own[7:]), rtol=1e-3, atol=1e-3
        )


REFUSED = {
    "llama4_text": "layers of the kind chunked_attention",
    "gpt2": "its layers are not a list",
    "phi": "its head has a bias",
    "gptj": "gptj",
    "nothing_like_it": "no model of type nothing_like_it",
    "gpt_oss": "quantized weights",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_not_be_the_model_is_refused_by_name(kind, tmp_path):
    config = SHAPE | {"model_type": kind, "architectures": ["X"]}
    if kind == "gpt_oss":
        config["quantization_config"] = {"quant_method": "mxfp4"}
    with pytest.raises(ValueError, match=REFUSED[kind]):
        empty_model(parse_model_config(config), torch.float32, "cpu")


def test_a_mixer_that_sees_the_sequence_before_is_refused():
    config = SHAPE | {"model_type": "llama", "architectures": ["X"]}
    model = empty_model(parse_model_config(config), torch.float32, "cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2, generator=generator) if parameter.dim() > 1 else None
    model.refuse_unsupported()
    mlp = model.blocks[1].mlp
    before = mlp.forward
    mlp.forward = lambda x: before(x + 0.3 * x.roll(1, dims=1))
    with pytest.raises(ValueError, match="a packed sequence sees the one before it"):
        model.refuse_unsupported()


def test_layers_with_heads_of_another_size_are_refused():
    config = SHAPE | {"model_type": "llama", "architectures": ["X"]}
    model = empty_model(parse_model_config(config), torch.float32, "cpu")
    model.init_weights(torch.Generator().manual_seed(0))
    attention = model.blocks[2].self_attn
    attention.head_dim = 8
    with pytest.raises(ValueError, match="LlamaForCausalLM is not supported"):
        model.refuse_unsupported()


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "olmo2", "gpt_oss", "lfm2", "cohere2"])
def test_norms_of_modules_use_the_kernel_where_they_are_rms_norms(kind, monkeypatch):
    """On a GPU without gradients; here the kernel runs in Triton's interpreter."""
    pytest.importorskip("triton")
    config = AutoConfig.for_model(KINDS.get(kind, kind), **SHAPE | FAMILIES[kind])
    spec = parse_model_config(config.to_dict(), implementation="transformers")
    model = empty_model(spec, torch.bfloat16, "cpu")
    norms = [m for m in model.modules() if type(m).__name__.endswith("Norm")]
    assert norms and all(("forward" in m.__dict__) == (kind != "cohere2") for m in norms)
    monkeypatch.setattr("hone.models.hf_model.gpu.takes", lambda x: not torch.is_grad_enabled())
    for norm in norms[:3] + norms[-1:]:
        norm.float()
        torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(0))
        x = torch.randn(2, 3, *norm.weight.shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            torch.testing.assert_close(norm(x), type(norm).forward(norm, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_5_text", "granitemoehybrid", "qwen3"])
def test_a_copy_of_a_model_does_not_follow_the_policy(kind):
    """As a reference model: training changes the weights of the policy alone."""
    config = AutoConfig.for_model(KINDS.get(kind, kind), **SHAPE | FAMILIES[kind])
    spec = parse_model_config(config.to_dict(), implementation="transformers")
    model = empty_model(spec, torch.float32, "cpu")
    model.init_weights(torch.Generator().manual_seed(0))
    reference = copy.deepcopy(model)
    ids = list(range(20))
    before = score_sequence(reference, ids)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert score_sequence(reference, ids) == before
    assert score_sequence(model, ids) != before


@pytest.mark.parametrize("case", [("qwen3_5_moe_text", "hone")], indirect=True, ids=["hone"])
def test_files_with_a_tensor_for_all_experts_are_read_and_written_as_such(case, tmp_path):
    directory, theirs, ours = case
    whole = {name: x.contiguous() for name, x in theirs.state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in whole
    shutil.copytree(directory, tmp_path / "whole")
    save_file(whole, tmp_path / "whole" / "model.safetensors")
    other = load_model(tmp_path / "whole", spec=ours.spec)
    for one, two in zip(ours.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    save_model(other, tmp_path / "whole", tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == whole.keys()
    assert all(torch.equal(saved[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"attention_k_eq_v": True}, "attention_k_eq_v is not supported"),
        ({"enable_moe_block": True}, "enable_moe_block is not supported"),
        ({"hidden_size_per_layer_input": 0}, "inputs per layer"),
        ({"vocab_size_per_layer_input": 9}, "inputs per layer"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types has 4 kinds for 6 layers"),
        ({"num_kv_shared_layers": -2}, "of which -2 share keys"),
        ({"num_kv_shared_layers": 5}, "leaves a kind of layer without keys"),
        ({"layer_types": ["conv", "full_attention"] * 3}, "layer_types with the kind conv"),
    ],
)
def test_options_of_gemma_4_that_are_not_there_are_refused_by_name(keys, words):
    config = SHAPE | GEMMA4 | {"architectures": ["Gemma4ForCausalLM"]} | keys
    with pytest.raises(ValueError, match=words):
        parse_model_config(config, implementation="hone")


@pytest.mark.parametrize("case", [("gemma4_e", "hone")], indirect=True, ids=["hone"])
def test_gemma_4_may_store_keys_that_it_does_not_use_and_nothing_else(case, tmp_path):
    directory, _, ours = case
    stored = load_file(directory / "model.safetensors")
    name = "model.layers.5.self_attn.k_proj.weight"
    save_file(stored | {name: torch.zeros(2, 2)}, directory / "model.safetensors")
    again = load_model(directory, spec=ours.spec)
    for one, two in zip(ours.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    other = name.replace(".5.", ".0.").replace("k_proj", "zzz")
    save_file(stored | {other: torch.zeros(2, 2)}, directory / "model.safetensors")
    with pytest.raises(ValueError, match="does not have: model.layers.0.self_attn.zzz.weight"):
        load_model(directory, spec=ours.spec)
