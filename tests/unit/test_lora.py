"""LoRA adapters beside the weights, against the same adapters merged into them."""

import copy
import json
import math
import random
import shutil
from collections import Counter

import pytest
import torch
from safetensors.torch import save_file

from hone.engine.engine import Engine
from hone.inference.engine_service import EngineService
from hone.inference.samplers.embedded import EmbeddedSampler
from hone.models.adapters import Adapters, read_adapter
from hone.models.attention_layouts import PackedAttention
from hone.models.hf import hf_names, load_model, split_rows
from hone.models.layers import Linear
from hone.models.spec import ModelSpec, make_plain_layers
from hone.models.transformer import Transformer
from hone.models.weight_proof import find_likeliest
from hone.records import GenerateRequest, Sampling

SPEC = ModelSpec(
    50, 32, 64, 2, 4, 2, 16, 1e-6, make_plain_layers(1000.0, 16, 2), True, 96, 0.5, False
)
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def model():
    model = Transformer(SPEC)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def sources(model):
    """HF linears and the row blocks of our weights that they are."""
    parameters = dict(model.named_parameters())
    for ours, theirs in hf_names(SPEC).items():
        for name, part in zip(
            theirs, split_rows(SPEC, ours, parameters[ours].detach()), strict=True
        ):
            yield name.removesuffix(".weight"), part


def write_adapter(directory, model, rank, targets, seed, **config):
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, part in sources(model):
        if name.split(".")[-1] in targets:
            for letter, shape in (("A", (rank, part.shape[1])), ("B", (part.shape[0], rank))):
                key = f"base_model.model.{name}.lora_{letter}.weight"
                tensors[key] = 0.3 * torch.randn(shape, generator=generator)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings | config))
    return directory


@torch.no_grad()
def merged(model, directory):
    model = copy.deepcopy(model)
    adapter = read_adapter(directory)
    for name, part in sources(model):
        if name in adapter.weights:
            a, b = adapter.weights[name]
            part += b @ a
    return model


def request(seed, adapter=None, prompt=(5, 6, 7), max_tokens=12):
    return GenerateRequest([*prompt], Sampling(1.0, max_tokens, seed), frozenset(), adapter=adapter)


def same(one, two):
    assert one.ids == two.ids
    torch.testing.assert_close(
        torch.tensor(one.logprobs), torch.tensor(two.logprobs), rtol=0, atol=1e-4
    )


def test_each_request_is_answered_by_its_adapter(model, tmp_path):
    paths = {
        "a": write_adapter(tmp_path / "a", model, 4, ALL, 1),
        "b": write_adapter(
            tmp_path / "b", model, 3, ("q_proj", "v_proj", "down_proj"), 2, use_rslora=True
        ),
    }
    engine = Engine(model)
    for name, path in paths.items():
        engine.load_adapter(name, path)
    names = [None, "a", "b"] * 4
    prompt = range(4, 25)  # a full page: adapters must not share it
    done = engine.generate([request(i, name, prompt) for i, name in enumerate(names)])
    plain = {None: model, **{name: merged(model, path) for name, path in paths.items()}}
    for i, (name, completion) in enumerate(zip(names, done, strict=True)):
        same(completion, Engine(plain[name]).generate([request(i, None, prompt)])[0])


def test_scale_and_replacement(model, tmp_path):
    write_adapter(tmp_path / "a", model, 4, ALL, 1)
    write_adapter(tmp_path / "b", model, 4, ALL, 1, use_rslora=True)
    one, two = read_adapter(tmp_path / "a"), read_adapter(tmp_path / "b")
    name = "model.layers.0.self_attn.q_proj"
    torch.testing.assert_close(one.weights[name][1] / 2, two.weights[name][1] / (8 / math.sqrt(4)))

    engine, done = Engine(model), []
    engine.load_adapter("x", tmp_path / "a")
    engine.add(request(3, "x", max_tokens=20), done.append)
    engine.step()
    write_adapter(tmp_path / "c", model, 2, ALL, 9)
    engine.load_adapter("x", tmp_path / "c")  # the request goes on with the new one
    with pytest.raises(ValueError, match="under way"):
        engine.unload_adapter("x")
    while not engine.is_idle:
        engine.step()
    old = Engine(merged(model, tmp_path / "a")).generate([request(3, max_tokens=20)])[0]
    assert done[0].ids[:2] == old.ids[:2] and done[0].logprobs[2:] != old.logprobs[2:]
    same(
        engine.generate([request(4, "x")])[0],
        Engine(merged(model, tmp_path / "c")).generate([request(4)])[0],
    )
    engine.unload_adapter("x")
    with pytest.raises(ValueError, match="no adapter 'x' is loaded; loaded: none"):
        engine.add(request(1, "x"), print)
    same(engine.generate([request(5)])[0], Engine(model).generate([request(5)])[0])


@pytest.mark.parametrize(
    ("rank", "targets", "stays"),
    [(4, ALL, True), (2, ALL, False), (4, ("k_proj", "down_proj"), False)],
)
def test_an_adapter_of_the_same_shape_is_replaced_in_place(model, tmp_path, rank, targets, stays):
    """CUDA graphs that read its tensors go on; the other adapter is as it was."""
    engine = Engine(model)
    for number, name in enumerate(("x", "y")):
        engine.load_adapter(name, write_adapter(tmp_path / name, model, 4, ALL, number))
    before = [linear.delta for linear in model.modules() if isinstance(linear, Linear)]
    new = write_adapter(tmp_path / "new", model, rank, targets, 9)
    assert engine.adapters.load_adapter("x", read_adapter(new)) is not stays
    after = [linear.delta for linear in model.modules() if isinstance(linear, Linear)]
    assert all(a is b for a, b in zip(before, after, strict=True)) == stays
    for name, place in (("x", new), ("y", tmp_path / "y")):
        same(
            engine.generate([request(4, name)])[0],
            Engine(merged(model, place)).generate([request(4)])[0],
        )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 5}, "of rank 5"),
        ({"r": None}, "r = None is not a rank"),
    ],
)
def test_adapters_that_would_do_something_else_are_refused(model, tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        read_adapter(write_adapter(tmp_path / "a", model, 4, ALL, 1, **config))


def test_an_adapter_of_another_model_is_refused(model, tmp_path):
    from dataclasses import replace

    other = Transformer(replace(SPEC, hidden_size=48))
    write_adapter(tmp_path / "a", other, 4, ("q_proj",), 1)
    with pytest.raises(ValueError, match="is for 64 x 48 weights, the model's are 64 x 32"):
        Engine(model).load_adapter("a", tmp_path / "a")
    with pytest.raises(ValueError, match="not an adapter"):
        Engine(model).load_adapter("a", tmp_path)
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"half a file")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        read_adapter(tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_adapter(tmp_path / "a")


def test_logprobs_of_a_prompt_are_those_of_its_adapter(model, tmp_path):
    engine = Engine(model)
    engine.load_adapter("a", write_adapter(tmp_path / "a", model, 4, ALL, 1))
    service = EngineService(engine)
    sampler, ids = EmbeddedSampler(service), [5, 6, 7, 8, 9]
    found = []

    async def look():
        for adapter in (None, "a"):
            found.append(await sampler.find_likeliest(ids, 3, adapter))
        with pytest.raises(ValueError, match="no adapter 'b' is loaded"):
            await sampler.find_likeliest(ids, 3, "b")

    service.run_beside(look())
    for (own, others), expected in zip(found, (model, merged(model, tmp_path / "a")), strict=True):
        exact, tops = find_likeliest(expected, ids, 3)
        assert own == pytest.approx(exact, abs=1e-5)
        assert [[i for i, _ in one] for one in others] == [[i for i, _ in one] for one in tops]


def draw_adapter(rng, base):
    """A model of peft's with an adapter of any kind, whose product is not 0."""
    from peft import LoraConfig, get_peft_model

    targets = rng.sample(ALL, rng.randint(1, 7))
    options = {
        "use_rslora": rng.random() < 0.3,
        "init_lora_weights": rng.choice(
            [True, True, "gaussian", "orthogonal", "pissa", "olora", "pissa_niter_4"]
        ),
        "use_dora": rng.random() < 0.15,
        "bias": rng.choice(["none"] * 5 + ["lora_only"]),
        "layers_to_transform": rng.choice([None, None, [0], [1]]),
        "rank_pattern": rng.choice([{}] * 5 + [{"q_proj": 2, "up_proj": 2}]),
        "alpha_pattern": rng.choice([{}] * 5 + [{"v_proj": 32, "down_proj": 1}]),
        "modules_to_save": rng.choice([None] * 5 + [["embed_tokens"]]),
    }
    config = LoraConfig(
        r=rng.choice([2, 4, 8]),
        lora_alpha=rng.choice([1, 4, 32]),
        target_modules=targets,
        **options,
    )
    tuned = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            with torch.no_grad():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return tuned


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_gives_what_peft_gives_or_is_refused_by_its_key(tmp_path):
    from peft import PeftModel
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(vocab_size=50, num_hidden_layers=2, max_position_embeddings=64, **size)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    ids = torch.arange(3, 20)
    counts = Counter()
    for seed in range(60):
        rng = random.Random(seed)
        fresh = LlamaForCausalLM.from_pretrained(tmp_path / "base")
        draw_adapter(rng, fresh).save_pretrained(tmp_path / "a")
        base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
        with torch.no_grad():
            expected = PeftModel.from_pretrained(base, tmp_path / "a")(ids[None]).logits[0]
        ours = load_model(tmp_path / "base")
        adapters = Adapters(ours)
        try:
            adapters.load_adapter("a", read_adapter(tmp_path / "a"))
        except ValueError as error:
            counts[next(key for key in REFUSED if key in str(error))] += 1
            shutil.rmtree(tmp_path / "a")
            continue
        packed = PackedAttention([len(ids)], "cpu")
        with torch.no_grad(), adapters.used_by_all("a", len(ids)):
            found = ours.compute_logits(ours(ids, packed.token_positions(), packed))
        assert torch.allclose(found, expected, atol=2e-5), (seed, (found - expected).abs().max())
        counts["equal"] += 1
        shutil.rmtree(tmp_path / "a")
    assert counts["equal"] > 10 and set(counts) == {"equal", *REFUSED}, counts


REFUSED = (
    "init_lora_weights",
    "use_dora",
    "bias",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
)
