"""The estimate of memory: against what a model's parts really take, and as a person sees it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hone import cli
from hone.config.base import load_config
from hone.config.inference_config import InferenceConfig
from hone.config.lora_config import LoRAConfig
from hone.config.rl_config import RLConfig, TrainerConfig, TrainerRunConfig
from hone.config.sections import OptimConfig
from hone.config.sft_config import SFTConfig
from hone.engine.cache import KVCache
from hone.kernels.pinned_memory import PORTION, ROOMS
from hone.launch.card_fit import CARD_GIB, find_cure, fit_lines, need_on
from hone.launch.estimate import memory_lines
from hone.models.families import parse_model_config
from hone.models.gemma4 import Gemma4Transformer
from hone.models.lora import add_lora
from hone.models.transformer import Transformer
from hone.trainer.memory_estimate import adapter_size, estimate_rl, micro_batch_tokens
from hone.trainer.memory_plan import CPU_SHARE, choose_memory, estimate_need
from hone.trainer.rl.trainer import PolicyTrainer
from tests.unit.test_families import CONFIGS

QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}

GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": 50,
    "vocab_size_per_layer_input": 50,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "max_position_embeddings": 64,
}


def nbytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adamw", "half", "muon", "lora", "reference"])
def test_what_is_always_there_is_counted(family, dtype, kind):
    spec = parse_model_config(CONFIGS[family])
    model = Transformer(spec).to(dtype)
    model.init_weights(torch.Generator().manual_seed(0))
    half = {"state_dtype": "bfloat16"} if kind == "half" else {}
    optim = OptimConfig(type="muon" if kind == "muon" else "adamw", **half)
    lora = LoRAConfig(rank=4) if kind == "lora" else None
    loss = {"kl_beta": 0.1} if kind == "reference" else {}
    config = TrainerConfig(optim=optim, lora=lora, loss=loss)
    trainer = PolicyTrainer(model, config, max_steps=1)
    found = estimate_rl(spec, config, 100, dtype.itemsize, 100)
    own = trainer.optimizer
    reference = list(trainer.reference.parameters()) if trainer.reference is not None else []
    masters = own.masters if own.masters is not own.parameters else []
    # Without the norms
    assert found.weights == pytest.approx(nbytes([*model.parameters(), *reference]), rel=0.03)
    assert found.masters == pytest.approx(nbytes(masters), rel=0.03)
    assert found.moments == pytest.approx(nbytes([*own.exp_avg, *own.exp_avg_sq]), rel=0.1)
    # Whose gradients are copied to fp32
    by_muon = nbytes([masters[i] for i in own.by_muon]) if masters else 0
    assert found.gradients == pytest.approx(nbytes(own.parameters) + by_muon, rel=0.1)


def test_what_is_offloaded_is_the_machines():
    spec = parse_model_config(QWEN3_4B)
    here, away = (
        estimate_rl(spec, TrainerConfig(optim=OptimConfig(offload=offload)), 8704, 2, 8704)
        for offload in (False, True)
    )
    assert (
        away.host == 12 * spec.parameter_count() == here.peak_bytes - away.peak_bytes
        and here.host == 0
    )
    # Rooms through which it comes to the GPU
    assert away.gradients - here.gradients == 12 * ROOMS * PORTION
    assert away.describe_estimate().endswith(
        f", and {away.host / 2**30:.2f} GiB of the machine's memory"
    )


@pytest.mark.parametrize("kind", ["dense", "gemma4"])
def test_the_cache_is_what_it_says(kind):
    spec = parse_model_config(CONFIGS["dense"] if kind == "dense" else GEMMA4)
    stores = KVCache(spec, torch.float32, torch.device("cpu"), 16 * 99).stores.values()
    assert nbytes(stores) == 16 * 100 * spec.cache_numbers * 4  # and a page to write nothing to


def test_weights_of_gemma_4_are_what_its_shape_says():
    spec = parse_model_config(GEMMA4)
    model = Gemma4Transformer(spec)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert matrices == spec.parameter_count()
    for targets in (None, ["k_proj", "down_proj"]):
        model = Gemma4Transformer(spec)
        config = LoRAConfig(rank=4, targets=targets)
        add_lora(model, config, seed=0)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert trained == adapter_size(spec, config)


def test_qwen3_4b_on_one_card():
    """Measured on an H200 by benchmarks/memory_gpu.py, in GiB: RL, full and LoRA of rank 16."""
    spec = parse_model_config(QWEN3_4B)
    for config, tokens, measured in [
        (TrainerConfig(), 8704, 75.63),
        (TrainerConfig(), 16896, 95.28),
        (TrainerConfig(activation_checkpointing=True), 16896, 62.39),
        (TrainerConfig(lora=LoRAConfig(rank=16)), 16896, 49.43),
        (TrainerConfig(lora=LoRAConfig(rank=16), activation_checkpointing=True), 16896, 16.11),
    ]:
        assert estimate_rl(spec, config, tokens, 2, tokens).peak_bytes / 2**30 == pytest.approx(
            measured, rel=0.05
        )
    assert micro_batch_tokens(spec, 2, False, 140 * 2**30) == 2**14
    small = replace(
        spec, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16
    )
    by_card = [micro_batch_tokens(small, 2, False, gib * 2**30) for gib in (24, 80, 140)]
    # Of Qwen3-0.6B; the step of 128 x (37 + 128) has 16,680
    assert by_card == [2**14, 20776, 2**15]
    several = estimate_rl(spec, TrainerConfig(), 10**6, 2, 8704)
    assert (
        several.peak_bytes - estimate_rl(spec, TrainerConfig(), 8704, 2, 8704).peak_bytes
        == 4 * spec.parameter_count()
    )


SHAPES = {  # hidden size, layers, intermediate size
    "0.6B": (1024, 28, 3072),
    "4B": (2560, 36, 9728),
    "8B": (4096, 36, 12288),
    "14B": (5120, 40, 17408),
}


def spec_of(shape):
    hidden, layers, intermediate = SHAPES[shape]
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": intermediate}
    return replace(parse_model_config(QWEN3_4B), **sizes)


def words_of(command, *more):
    """Return the type of a command's configuration and the words of its command line."""
    words = ["--model.name", "m", *more]
    if command == "rl":
        return RLConfig, [*words, "--orchestrator.env.id", "e", "--seq-len", "768"]
    words = [word.replace("trainer.", "") for word in words]
    return SFTConfig, [*words, "--data.fake", "--data.seq-len", "2048"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lora", [(), ("--trainer.lora.rank", "16")])
@pytest.mark.parametrize("command", ["rl", "sft"])
def test_the_keys_that_are_proposed_make_it_fit(shape, lora, command):
    spec = spec_of(shape)
    config_class, words = words_of(command, *lora)
    for more in ([], ["--trainer.no-activation-checkpointing"]):
        given = [
            *words,
            *(word.replace("trainer.", "" if command == "sft" else "trainer.") for word in more),
        ]
        config = load_config(config_class, given)
        needs = {size: need_on(config, spec, 2, size) for size in CARD_GIB}
        fitting = [size for size, need in needs.items() if need.fits(CARD_GIB[size])]
        assert fitting == list(CARD_GIB)[len(CARD_GIB) - len(fitting) :]  # all larger ones too
        if command == "rl":
            assert all(needs[size].sequences_at_once(CARD_GIB[size]) for size in fitting)
        for size in set(CARD_GIB) - set(fitting):
            found = find_cure(config, spec, 2, size)
            if found is not None:
                keys, less = found
                asked = load_config(config_class, [*given, *" ".join(keys).split()])
                assert need_on(asked, spec, 2, size) == less and less.fits(CARD_GIB[size])
        assert fitting or find_cure(config, spec, 2, 141) is not None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("command", ["rl", "sft"])
def test_auto_chooses_the_fastest_step_that_fits(shape, command):
    spec = spec_of(shape)
    config_class, words = words_of(command, "--trainer.lora.rank", "16")
    config = load_config(config_class, words)

    def choice(card_bytes, config=config):
        chosen = choose_memory(config, spec, 2, card_bytes)
        section = chosen.trainer if command == "rl" else chosen
        size = section.micro_batch_tokens if command == "rl" else chosen.data.micro_batch_size
        return section.activation_checkpointing, size

    choices = [choice(int(gib * 2**30)) for gib in CARD_GIB.values()]
    kept = [not recomputes for recomputes, _ in choices]
    assert kept == sorted(kept)  # a larger card never recomputes where a smaller one does not
    for recomputes in (False, True):
        sizes = [size for one, size in choices if one == recomputes]
        assert sizes == sorted(sizes)
    assert choice(None)[0] is False
    fixed = load_config(config_class, [*words, *(
        ["--trainer.micro-batch-tokens", "1000", "--trainer.no-activation-checkpointing"]
        if command == "rl"
        else ["--data.micro-batch-size", "2", "--no-activation-checkpointing"]
    )])  # fmt: skip
    assert choice(2**30, fixed) == (False, 1000 if command == "rl" else 2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("command", ["rl", "sft"])
def test_a_cpu_keeps_its_default_step_where_it_fits(shape, command):
    spec = spec_of(shape)
    config_class, words = words_of(command)
    config = load_config(config_class, words)

    def choose(gib):
        return choose_memory(config, spec, 4, int(gib * 2**30), is_gpu=False)

    default = choose_memory(config, spec, 4, None)
    assert choose(2**20) == default
    for gib in (2048, 512, 256, 128, 64, 32, 16):
        chosen = choose(gib)
        need, least = (estimate_need(one, spec, 4) for one in (chosen, default))
        if least.fits(gib * CPU_SHARE):
            assert chosen == default
        else:  # smaller, also where nothing fits
            assert need.least_bytes < least.least_bytes


@pytest.mark.parametrize("shape", SHAPES)
def test_a_small_card_decodes_half_as_many_sequences_as_it_could(shape):
    spec = spec_of(shape)
    long = ["--seq-len", "2560", "--orchestrator.batch-size", "128"]
    config_class, words = words_of("rl", "--trainer.lora.rank", "16", *long)
    for size, gib in CARD_GIB.items():

        def count(*more, size=size, gib=gib):
            config = load_config(config_class, [*words, *more])
            return need_on(config, spec, 2, size).sequences_at_once(gib)

        least = ["--trainer.micro-batch-tokens", "2048", "--trainer.activation-checkpointing"]
        assert max(count(), 0) >= min(max(count(*least), 0), 32) // 2


def test_a_server_fits_by_its_weights():
    spec = parse_model_config(QWEN3_4B)
    config = load_config(InferenceConfig, ["--model.name", "m", "--max-model-len", "1000"])
    first, *rest = fit_lines(config, spec, 2)
    assert not rest and "does not fit" not in first and "16 GB (" in first


def test_a_dry_run_says_what_a_step_takes(tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    words = ["--dry-run", "--model.name", str(tmp_path), "--output-dir", str(tmp_path / "run")]
    monkeypatch.setattr("hone.machine.usable_gpus", list)
    monkeypatch.setattr("hone.machine.usable_memory", lambda: 512 * 2**30)
    assert cli._run_command("trainer", words) == 0
    assert "# memory, about: training in float32, up to 16,384 tokens" in capsys.readouterr().out
    monkeypatch.setattr("hone.machine.usable_gpus", lambda: ["0"])
    assert cli._run_command("trainer", [*words, "--clean"]) == 0
    said = capsys.readouterr().out
    assert (
        "# memory, about: training in bfloat16, up to 16,384 tokens in a micro-batch: weights 7.49, masters"
        in said
    )
    assert (
        cli._run_command(
            "inference", ["--dry-run", "--model.name", str(tmp_path), "--max-model-len", "1000"]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert (
        "keys and values in bfloat16: 144.0 KiB a token, 0.14 GiB for the longest sequence, 1,000 tokens"
        in said
    )
    unknown = memory_lines(TrainerRunConfig(model={"name": "nobody/nothing"}))
    assert unknown == [
        "not known: the config.json of nobody/nothing is not here, and the hub does not send it"
    ]


def test_out_of_memory_is_one_message(tmp_path, monkeypatch, capsys):
    def main(config):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total of …"
        )

    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    monkeypatch.setattr(
        cli, "import_object", lambda path: main if path.endswith(":main") else TrainerRunConfig
    )
    assert cli._run_command("trainer", ["--model.name", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        "trainer: error: out of memory: CUDA out of memory. Tried to allocate 9.00 GiB\n  about: "
    )
    assert "activation_checkpointing" in said and "Traceback" not in said


def test_the_estimate_after_running_out_of_memory_has_the_micro_batches_of_the_gpu(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("hone.machine.usable_gpus", lambda: ["0"])
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    words = ["--model.name", str(tmp_path), "--model.dtype", "bfloat16", "--trainer.lora.rank", "8"]
    words += ["--orchestrator.env", '{"id": "reverse-text"}']
    config = load_config(RLConfig, words)
    small, whole = (memory_lines(config, card)[0] for card in (16 * 2**30, None))
    assert "up to 16,384 tokens" in whole and "up to 16,384 tokens" not in small


PUBLISHED = {  # config.json of the models in examples/gsm8k
    "qwen3_0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "qwen3_1.7b_lora": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
    "qwen3_4b_lora": {},
    "qwen2.5_math_1.5b_rank1": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
}


def test_the_recipes_of_published_models_load_and_fit_a_card():
    folder = Path(__file__).parents[2] / "examples" / "gsm8k"
    assert {file.stem for file in folder.glob("*.toml")} == PUBLISHED.keys()
    for name, shape in PUBLISHED.items():
        config = load_config(RLConfig, ["@", str(folder / f"{name}.toml")])
        spec = parse_model_config(QWEN3_4B | shape)
        assert need_on(config, spec, 2, 141).fits(CARD_GIB[141])
