"""The transformer against transformers' Qwen3ForCausalLM: logits and gradients on random small configs."""

import pytest
import torch

from hone.models.attention import PackedAttention
from hone.models.hf import hf_tensors, load_model, save_model

SHAPES = [  # hidden, layers, heads, kv heads, head size, feed-forward, vocabulary, tied
    (64, 2, 4, 2, 16, 96, 61, True),
    (48, 3, 3, 1, 20, 80, 101, False),
    (40, 2, 5, 5, 6, 56, 33, True),
    (32, 1, 6, 3, 10, 40, 50, False),
]


def reference_model(shape, seed=0):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, layers, heads, kv_heads, head_dim, ff, vocab, tied = shape
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=ff, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, tie_word_embeddings=tied,
        initializer_range=0.2, max_position_embeddings=128, rope_theta=5000.0,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():  # norms away from 1, so that a forgotten scale shows
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_and_gradients_equal_transformers(tmp_path, shape):
    theirs = reference_model(shape)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    lengths = [7, 1, 12, 80]  # more than one length bucket
    sequences = [torch.randint(0, shape[6], (n,)) for n in lengths]
    attention = PackedAttention(lengths)
    tokens = torch.cat(sequences)
    logits = ours.logits(ours(tokens, attention.positions(), attention))
    expected = torch.cat([theirs(s[None]).logits[0] for s in sequences])
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)

    direction = torch.randn_like(logits) / logits.numel()
    (logits * direction).sum().backward()
    (expected * direction).sum().backward()
    gradients = dict(theirs.named_parameters())
    grads_of_ours = {n: p.grad for n, p in ours.named_parameters()}
    from hone.models.hf import hf_names, split_rows

    for name, hf in hf_names(ours.spec).items():
        for part_name, part in zip(hf, split_rows(ours.spec, name, grads_of_ours[name]), strict=True):
            torch.testing.assert_close(part, gradients[part_name].grad, rtol=1e-5, atol=1e-5, msg=part_name)


def test_saved_directory_is_read_back_by_transformers_and_by_us(tmp_path):
    from transformers import AutoModelForCausalLM

    reference_model(SHAPES[1]).save_pretrained(tmp_path / "a")
    model = load_model(tmp_path / "a")
    save_model(model, tmp_path / "a", tmp_path / "b")
    again = load_model(tmp_path / "b")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "b").state_dict()
    for (name, one), (_, two) in zip(hf_tensors(model), hf_tensors(again), strict=True):
        assert torch.equal(one, two) and torch.equal(one, theirs[name]), name
    assert not (tmp_path / "b.partial").exists()


def test_random_init_needs_no_weights_and_follows_the_seed(tmp_path):
    reference_model(SHAPES[0]).config.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json").read_text().replace("{", '{"architectures": ["Qwen3ForCausalLM"],', 1)
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
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported; supported: Qwen3"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_unsupported_configurations_are_refused_by_name(change, message):
    from hone.models.spec import parse_model_config

    config = reference_model(SHAPES[0]).config.to_dict() | {"architectures": ["Qwen3ForCausalLM"]} | change
    config = {k: v for k, v in config.items() if v is not None}
    with pytest.raises(ValueError, match=message):
        parse_model_config(config)
