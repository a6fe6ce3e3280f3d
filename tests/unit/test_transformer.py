"""The transformer against transformers' own models: logits, gradients, greedy generation on random small configs."""

import pytest
import torch

from hone.engine.engine import Engine
from hone.models.attention_layouts import PackedAttention
from hone.models.hf import hf_tensors, load_model, save_model
from hone.records import GenerateRequest, Sampling

SHAPES = [  # hidden, layers, heads, kv heads, head size, feed-forward, vocabulary, tied
    (64, 2, 4, 2, 16, 96, 61, True),
    (48, 3, 3, 1, 20, 80, 101, False),
    (40, 2, 5, 5, 6, 56, 33, True),
    (32, 1, 6, 3, 10, 40, 50, False),
]


EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
FAMILIES = {  # configuration class, model class, what is particular
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "qwen3 with biases": ("Qwen3Config", "Qwen3ForCausalLM", {"attention_bias": True}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama with biases": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True},
    ),
    "llama 3.1": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen3 moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", EXPERTS | {"norm_topk_prob": True}),
    "qwen3 moe, weights as they are": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        EXPERTS | {"norm_topk_prob": False},
    ),
}


def reference_model(shape, seed=0, family="qwen3"):
    import transformers

    hidden, layers, heads, kv_heads, head_dim, ff, vocab, tied = shape
    config_class, model_class, particular = FAMILIES[family]
    torch.manual_seed(seed)
    keys = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ff,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
        "max_position_embeddings": 128,
        "rope_theta": 5000.0,
    } | particular
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**keys))
    # Norms away from 1 and biases from 0, so that a forgotten one shows
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


# Hidden = heads x head size, which is all that Qwen2 knows
FULL_HEADS = (64, 2, 4, 2, 16, 96, 61, True)


@pytest.mark.parametrize(
    "family, shape",
    [("qwen3", shape) for shape in SHAPES]
    + [(f, s) for f in FAMILIES for s in (FULL_HEADS, (48, 3, 3, 1, 16, 80, 101, False))],
    ids=str,
)
def test_logits_and_gradients_equal_transformers(tmp_path, family, shape):
    theirs = reference_model(shape, family=family)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    lengths = [7, 1, 12, 80]  # more than one length bucket
    sequences = [torch.randint(0, shape[6], (n,)) for n in lengths]
    attention = PackedAttention(lengths)
    tokens = torch.cat(sequences)
    logits = ours.compute_logits(ours(tokens, attention.token_positions(), attention))
    expected = torch.cat([theirs(s[None]).logits[0] for s in sequences])
    torch.testing.assert_close(logits, expected, rtol=5e-5, atol=5e-5)

    direction = torch.randn_like(logits) / logits.numel()
    (logits * direction).sum().backward()
    (expected * direction).sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    # Theirs lie together too, and have names of files
    for name in [name for name in gradients if "experts." in name]:
        layer, kind = name.split("experts.")
        for e, grad in enumerate(gradients.pop(name)):
            parts = (
                zip(("gate", "up"), grad.chunk(2), strict=True)
                if kind == "gate_up_proj"
                else [("down", grad)]
            )
            gradients |= {f"{layer}experts.{e}.{part}_proj.weight": rows for part, rows in parts}
    grads_of_ours = {n: p.grad for n, p in ours.named_parameters()}
    from hone.models.hf import hf_names, split_rows

    for name, hf in hf_names(ours.spec).items():
        for part_name, part in zip(
            hf, split_rows(ours.spec, name, grads_of_ours[name]), strict=True
        ):
            torch.testing.assert_close(
                part, gradients[part_name], rtol=5e-5, atol=5e-5, msg=part_name
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_generation_equals_transformers(tmp_path, family):
    theirs = reference_model(FULL_HEADS, family=family).eval()
    theirs.save_pretrained(tmp_path)
    engine = Engine(load_model(tmp_path))
    prompts = [torch.randint(0, 61, (n,)).tolist() for n in (3, 20, 45)]
    done = engine.generate([GenerateRequest(p, Sampling(0.0, 30), frozenset()) for p in prompts])
    for prompt, completion in zip(prompts, done, strict=True):
        ids = torch.tensor([prompt])
        length = {"max_new_tokens": 30, "eos_token_id": None, "pad_token_id": 0}
        expected = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, **length
        )
        assert completion.ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["qwen3", "qwen3 moe"])
def test_saved_directory_is_read_back_by_transformers_and_by_us(tmp_path, family):
    from transformers import AutoModelForCausalLM

    reference = reference_model(SHAPES[1], family=family)
    reference.save_pretrained(tmp_path / "a")
    model = load_model(tmp_path / "a")
    save_model(model, tmp_path / "a", tmp_path / "b")
    again = load_model(tmp_path / "b")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "b").state_dict()
    for (name, one), (_, two) in zip(hf_tensors(model), hf_tensors(again), strict=True):
        assert torch.equal(one, two), name
    for name, tensor in reference.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name
    assert not (tmp_path / "b.partial").exists()


def test_random_init_needs_no_weights_and_follows_the_seed(tmp_path):
    reference_model(SHAPES[0]).config.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json")
        .read_text()
        .replace("{", '{"architectures": ["Qwen3ForCausalLM"],', 1)
    )
    with pytest.raises(ValueError, match="--model.random-init"):
        load_model(tmp_path)
    one, two, other = (load_model(tmp_path, random_init=True, seed=s) for s in (3, 3, 4))
    assert torch.equal(one.embed.weight, two.embed.weight)
    assert not torch.equal(one.embed.weight, other.embed.weight)
    assert torch.equal(one.norm.weight, torch.ones(64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture GPT2LMHeadModel is not supported; supported: Qwen3",
        ),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "key 'factor' is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_parameters and rope_scaling",
        ),
        ({"architectures": ["Ministral3ForCausalLM"], "rope_parameters": None}, "rope_parameters"),
        (
            {"architectures": ["Olmo3ForCausalLM"], "rope_parameters": {"rope_theta": 5e3}},
            "rope_parameters without full_attention",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: 'silu'"),
        (
            {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 2},
            "layer_types with the kind chunked_attention",
        ),
        (
            {"use_sliding_window": True, "layer_types": ["full_attention"]},
            "layer_types with 1 kinds for 2 layers",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}
            | {"hidden_act": "gelu_pytorch_tanh", "rope_parameters": None},
            "use_bidirectional_attention is not supported",
        ),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 8}
            | {"use_sliding_window": True},
            "use_sliding_window",
        ),
        ({"hidden_size": None}, "hidden_size"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [1]},
            "blocks without experts",
        ),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 8},
            "'num_experts' is missing",
        ),
    ],
)
def test_unsupported_configurations_are_refused_by_name(change, message):
    from hone.models.families import parse_model_config

    config = (
        reference_model(SHAPES[0]).config.to_dict()
        | {"architectures": ["Qwen3ForCausalLM"]}
        | change
    )
    config = {k: v for k, v in config.items() if v is not None}
    with pytest.raises(ValueError, match=message):
        parse_model_config(config, implementation="hone")
