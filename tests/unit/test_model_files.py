"""Tokenizer, template and weight files of a directory are found as transformers finds them, or refused by name."""

import json
import logging
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Encoder

from hone.config.sections import ModelConfig
from hone.models.families import parse_model_config
from hone.models.hf import (
    find_weights,
    hf_tensors,
    load_model,
    save_model,
    write_description,
)
from hone.models.mxfp4 import unpack_mxfp4
from hone.models.transformer import Transformer
from hone.records import Prompt
from hone.text.model_text import SHIPPED, resolve_template
from hone.text.tokenizer import Tokenizer
from tests.unit.test_text import CHATML, TOOL_LIST

TINY = Path(__file__).parents[2] / "examples" / "reverse_text_tiny" / "model"

SEEDS = range(200)
SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<pad>")
BY_NAME = "{{ bos_token }}{% for m in messages %}<NAME>{{ m.content }}{{ eos_token }}{% endfor %}"
ASKED = [{"role": "user", "content": "What is 2 + 2, and why? " * 3}]


def write_tokenizer(directory, rng, template=None):
    """A byte-level tokenizer with what earlier uses may have left in its files."""
    directory.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoder = Encoder(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    encoder.pre_tokenizer, encoder.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    is_special = {one: rng.random() < 0.8 for one in SPECIALS}
    encoder.add_tokens(
        [AddedToken(one, special=is_special[one], normalized=False) for one in SPECIALS]
    )
    if rng.random() < 0.4:
        encoder.enable_truncation(rng.randint(4, 40))
    if rng.random() < 0.4:
        encoder.enable_padding(length=rng.choice([None, 64]), pad_id=261, pad_token="<pad>")
    encoder.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    eos = rng.choice(["</s>", "<|eot|>"])
    entries = {"bos_token": "<s>", "eos_token": eos, "pad_token": rng.choice(["<pad>", eos])}
    as_objects = {
        key: {"__type": "AddedToken", "content": text, "special": True}
        for key, text in entries.items()
    }
    config |= rng.choice([entries, as_objects])
    if rng.random() < 0.4:
        mapped = {
            "bos_token": "<s>",
            "eos_token": {"content": rng.choice(["</s>", "<|im_end|>"]), "lstrip": False},
        }
        (directory / "special_tokens_map.json").write_text(json.dumps(mapped))
    if rng.random() < 0.4:
        decoder = encoder.get_added_tokens_decoder()
        known = {
            str(i): {
                "content": t.content,
                "special": rng.random() < 0.8,
                "normalized": False,
                "lstrip": rng.random() < 0.2,
                "rstrip": rng.random() < 0.2,
            }
            for i, t in decoder.items()
        }
        if rng.random() < 0.5:
            known["262"] = {"content": "<new>", "special": rng.random() < 0.5, "normalized": False}
        config["added_tokens_decoder"] = known
    if rng.random() < 0.3:
        config[rng.choice(["additional_special_tokens", "extra_special_tokens"])] = [
            "<|im_end|>",
            "<extra>",
        ]
    config |= rng.choice(
        [
            {},
            {"add_bos_token": True},
            {"model_max_length": 10},
            {"clean_up_tokenization_spaces": True},
        ]
    )
    named = {
        name: BY_NAME.replace("NAME", name)
        for name in ("config", "default", "tool_use", "file", "extra")
    }
    named = {name: text + "{{ image_token }}" for name, text in named.items()}
    kind = rng.randrange(5) if template is None else -1
    if template is not None:
        config["chat_template"] = template
    if kind in (0, 2):
        config["chat_template"] = named["config"]
    if kind in (1, 4):
        config["chat_template"] = [
            {"name": n, "template": named[n]} for n in ("default", "tool_use")
        ]
    if kind in (2, 3, 4):
        (directory / "chat_template.jinja").write_text(named["file"])
    if kind == 3 and rng.random() < 0.7:
        (directory / "additional_chat_templates").mkdir()
        (directory / "additional_chat_templates" / "tool_use.jinja").write_text(named["extra"])
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_tokenizers_are_read_as_transformers_reads_them(tmp_path):
    from transformers import AutoTokenizer

    for seed in SEEDS:
        directory = write_tokenizer(tmp_path / str(seed), random.Random(seed))
        theirs, ours = AutoTokenizer.from_pretrained(directory), Tokenizer(directory)
        for tools in (None, TOOL_LIST):
            expected = theirs.apply_chat_template(
                ASKED, tools=tools, add_generation_prompt=True, return_dict=False
            )
            assert ours.prompt_ids(Prompt(ASKED, tools)) == expected, (seed, tools)
        text = "<s>a <|im_end|> <new> <extra> b <image> , <added> c </s> <|eot|> d"
        for around in (True, False):
            assert (
                ours.encode(text, around) == theirs(text, add_special_tokens=around)["input_ids"]
            ), seed
        ids = ours.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), seed
        assert theirs.eos_token_id in ours.stop_ids and ours.vocab_size == len(theirs), seed


def test_a_template_without_a_default_and_a_tokenizer_of_another_format_are_named(tmp_path):
    directory = write_tokenizer(
        tmp_path / "a", random.Random(0), [{"name": "tool_use", "template": CHATML}]
    )
    with pytest.raises(ValueError, match="no chat template is named 'default'; there are tool_use"):
        Tokenizer(directory)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "tokenizer.model").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"no tokenizer.json; of tokenizer.model transformers writes one"
    ):
        Tokenizer(tmp_path / "b")


def test_what_ends_a_turn_in_the_template_ends_a_generation(tmp_path, caplog):
    caplog.set_level(logging.INFO, "hone.text")
    for i, (eos, mark) in enumerate(
        (("</s>", "<|im_end|>"), ("<|im_end|>", "<|im_end|>"), ("</s>", "<|eot|>"))
    ):
        directory = write_tokenizer(
            tmp_path / str(i), random.Random(2), CHATML.replace("<|im_end|>", mark)
        )
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            (directory / name).unlink(missing_ok=True)
        config = {"eos_token": eos, "chat_template": CHATML.replace("<|im_end|>", mark)}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = Tokenizer(directory)
        assert set(map(tokenizer.token_text, tokenizer.stop_ids)) == {eos, mark}
        said = f"the chat template ends a turn with {mark}, which the model's files do not name as an end"
        assert (said in caplog.text) == (eos != mark)
        caplog.clear()
    (directory / "generation_config.json").write_text('{"eos_token_id": [259, 260]}')
    assert Tokenizer(directory).stop_ids == [257, 259, 260]
    (directory / "generation_config.json").unlink()
    (directory / "config.json").write_text('{"eos_token_id": 258}')
    assert Tokenizer(directory).stop_ids == [257, 258, 260]


def test_a_template_is_given_by_name_file_or_text_and_saved_with_the_weights(tmp_path):
    from transformers import AutoTokenizer

    directory = write_tokenizer(
        tmp_path / "base", random.Random(3), [{"name": "default", "template": "{{ 'old' }}"}]
    )
    (directory / "config.json").write_text("{}")
    (tmp_path / "mine.jinja").write_text(CHATML)
    for i, given in enumerate(["chatml", "zephyr", "llama3", str(tmp_path / "mine.jinja"), CHATML]):
        tokenizer = Tokenizer.for_model(directory, ModelConfig(name="m", chat_template=given))
        saved = tmp_path / f"saved{i}"
        write_description(directory, saved, torch.float32, True, tokenizer.chat_template)
        theirs = AutoTokenizer.from_pretrained(saved)
        expected = theirs.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
        assert (
            tokenizer.prompt_ids(Prompt(ASKED))
            == Tokenizer(saved).prompt_ids(Prompt(ASKED))
            == expected
        )
    with pytest.raises(
        ValueError, match="'chatmll' is no readable file, .* none of chatml.*; did you mean chatml"
    ):
        resolve_template("chatmll")


@pytest.mark.parametrize("name", sorted(file.stem for file in SHIPPED.glob("*.jinja")))
def test_shipped_templates_append_and_end_their_turns(tmp_path, name):
    tokenizer = Tokenizer(write_tokenizer(tmp_path / "t", random.Random(4)), resolve_template(name))
    turns = [
        {"role": role, "content": role}
        for role in ("system", "user", "assistant", "user", "assistant")
    ]
    ((ids, mask),) = tokenizer.conversation_ids(turns)
    written = "".join(
        tokenizer.token_text(i) for i, is_target in zip(ids, mask, strict=True) if is_target
    )
    end = tokenizer.template.turn_end().strip()
    assert end and written == f"assistant{end}" * 2


def test_template_arguments_reach_every_rendering(tmp_path):
    template = (
        "{{ 'T' if enable_thinking else 'F' }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    directory = write_tokenizer(tmp_path / "t", random.Random(5), template)
    tokenizer = Tokenizer.for_model(
        directory, ModelConfig(name="m", template_arguments={"enable-thinking": True})
    )
    asked = [{"role": "user", "content": "a"}]
    assert tokenizer.decode(tokenizer.prompt_ids(Prompt(asked))) == "Ta"
    off = Prompt(asked, template_arguments={"enable_thinking": False})
    assert tokenizer.decode(tokenizer.prompt_ids(off)) == "Fa"
    assert tokenizer.decode(tokenizer.reload_from(directory).prompt_ids(Prompt(asked))) == "Ta"
    assert (
        tokenizer.decode(
            tokenizer.conversation_ids([*asked, {"role": "assistant", "content": "b"}])[0][0]
        )
        == "Tab"
    )


# ---------------------------------------------------------------------------------------------------- weights


def shard(tensors, count, directory):
    """Write tensors as transformers writes them: in shards, with an index."""
    names = sorted(tensors)
    weight_map = {}
    for i in range(count):
        file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        own = names[i::count]
        save_file({name: tensors[name] for name in own}, directory / file)
        weight_map |= dict.fromkeys(own, file)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def read(directory):
    where = find_weights(None, directory)
    return {name: load_file(file)[name] for name, file in where.items()}


def draw_tensors(rng, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        f"model.layers.{i}.weight": torch.randn(2, 3, generator=generator)
        for i in range(rng.randint(2, 8))
    }


def test_leftovers_of_earlier_saves_are_never_read(tmp_path, caplog):
    for seed in SEEDS:
        rng = random.Random(seed)
        directory = tmp_path / str(seed)
        directory.mkdir()
        fresh, stale = draw_tensors(rng, seed), draw_tensors(rng, seed + 1000)
        kind = rng.choice(["sharded", "single", "shards alone", "odd name"])
        leftovers = set()
        if kind == "sharded":
            count = rng.randint(1, min(3, len(fresh)))
            if rng.random() < 0.7:
                shard(stale, count + 1, directory)
                leftovers |= {
                    f"model-{i + 1:05d}-of-{count + 1:05d}.safetensors" for i in range(count + 1)
                }
            shard(fresh, count, directory)
            if rng.random() < 0.5:
                save_file(stale, directory / "model.safetensors")
                leftovers.add("model.safetensors")
        elif kind == "single":
            if rng.random() < 0.5:
                shard(stale, 3 if len(stale) > 2 else 2, directory)
                # Transformers removes shards and leaves their index
                for file in directory.glob("model-*"):
                    file.unlink()
            save_file(fresh, directory / "model.safetensors")
        elif kind == "shards alone":
            shard(fresh, min(2, len(fresh)), directory)
            (directory / "model.safetensors.index.json").unlink()
        else:
            save_file(fresh, directory / "weights.safetensors")
        for name in rng.sample(
            ["adapter_model", "consolidated", "optimizer", "consolidated-00001-of-00002"], 2
        ):
            save_file(stale, directory / f"{name}.safetensors")
        caplog.clear()
        found = read(directory)
        assert found.keys() == fresh.keys(), (seed, kind)
        assert all(torch.equal(found[name], fresh[name]) for name in fresh), (seed, kind)
        assert all(name in caplog.text for name in leftovers), (seed, kind)
        shutil.rmtree(directory)


def test_directories_whose_weights_cannot_be_told_are_refused_by_name(tmp_path):
    tensors = {"a": torch.zeros(2), "b": torch.zeros(2)}
    shard(tensors, 2, tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        ValueError,
        match=r"index.json names model-00002-of-00002.safetensors, which .* does not have",
    ):
        find_weights(None, tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(
        ValueError, match="has 1 of 2 shards of its weights, and no model.safetensors.index.json"
    ):
        find_weights(None, tmp_path)
    for file in tmp_path.iterdir():
        file.unlink()
    save_file(tensors, tmp_path / "one.safetensors")
    save_file(tensors, tmp_path / "two.safetensors")
    with pytest.raises(
        ValueError, match=r"tensor \w is in one.safetensors and in two.safetensors; remove the file"
    ):
        find_weights(None, tmp_path)
    for file in tmp_path.iterdir():
        file.unlink()
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"adapter_model.safetensors are not a model's weights"):
        find_weights(None, tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"weights as pytorch_model.bin, which can run code when read"
    ):
        find_weights(None, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"c": "adapter_model.safetensors"}})
    )
    with pytest.raises(ValueError, match=r"tensor c is not in adapter_model.safetensors"):
        find_weights(None, tmp_path)


def test_tokens_that_the_model_has_no_embedding_for_are_refused_where_they_are_used(
    tmp_path, caplog
):
    directory = write_tokenizer(tmp_path / "t", random.Random(6), CHATML)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["pad_token"] = "[PAD]"  # as many fine-tuned models have it
    config.pop("added_tokens_decoder", None)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "special_tokens_map.json").unlink(missing_ok=True)
    tokenizer = Tokenizer(directory)
    size = tokenizer.encoder.token_to_id("[PAD]")
    tokenizer.fit_vocabulary(size)
    assert "the model has no embedding for tokens of its tokenizer: [PAD]" in caplog.text
    assert tokenizer.prompt_ids(Prompt(ASKED)) and tokenizer.reload_from(directory).encode("PAD")
    for given in (tokenizer, tokenizer.reload_from(directory)):
        with pytest.raises(
            ValueError,
            match=r"the text has the token \[PAD\], for which the model has no embedding",
        ):
            given.prompt_ids(Prompt([{"role": "user", "content": "a [PAD] b"}]))
    with pytest.raises(
        ValueError, match="the tokenizer has 256 tokens, the model's vocab_size is 100"
    ):
        tokenizer.fit_vocabulary(100)


def test_links_out_of_a_model_s_directory_are_refused_and_never_copied(tmp_path, caplog):
    import os

    from hone.models.model_directory import check_links

    (tmp_path / "secret.txt").write_text("private")
    directory = write_tokenizer(
        tmp_path / "hub" / "models--a--b" / "snapshots" / "rev", random.Random(1), CHATML
    )
    (directory / "config.json").write_text("{}")
    blobs = tmp_path / "hub" / "models--a--b" / "blobs"
    blobs.mkdir()
    os.replace(directory / "tokenizer.json", blobs / "123")
    (directory / "tokenizer.json").symlink_to("../../blobs/123")  # as the hub's cache has it
    check_links(directory)
    (directory / "notes.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(
        ValueError, match=r"notes.txt is a link to .*secret.txt, out of the model's directory"
    ):
        check_links(directory)
    (directory / "folder.json").mkdir()
    os.mkfifo(directory / "pipe.json")
    write_description(directory, tmp_path / "saved", torch.float32, True)
    assert (
        not (tmp_path / "saved" / "notes.txt").exists() and "notes.txt is not copied" in caplog.text
    )
    assert not (tmp_path / "saved" / "tokenizer.json").is_symlink()
    assert {"folder.json", "pipe.json"} & set(os.listdir(tmp_path / "saved")) == set()


def test_what_is_no_file_ends_with_a_message(tmp_path):
    import os

    for name in ("model.safetensors", "tokenizer.json"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=r"has no \*.safetensors weights"):
        find_weights(None, tmp_path)
    with pytest.raises(ValueError, match="has no tokenizer.json"):
        Tokenizer(tmp_path)


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    from hone.models.hf import load_model

    size = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(vocab_size=50, num_hidden_layers=1, tie_word_embeddings=True, **size)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    load_model(tmp_path)
    for other, is_refused in (
        (tensors["model.embed_tokens.weight"].clone(), False),
        (torch.randn(50, 32), True),
    ):
        save_file(
            tensors | {"lm_head.weight": other}, tmp_path / "model.safetensors", {"format": "pt"}
        )
        if is_refused:
            with pytest.raises(
                ValueError, match=r"lm_head.weight differs from .*tie_word_embeddings"
            ):
                load_model(tmp_path)
        else:
            load_model(tmp_path)


def test_a_server_with_an_engine_process_imports_no_torch():
    """Its import takes seconds, before the engine's process could start."""
    code = """
import sys
import hone.inference.app, hone.inference.engine_process, hone.inference.http_server, hone.inference.serve
from hone.config.inference_config import InferenceConfig
from hone.inference.backends import takes_vllm
assert not takes_vllm(InferenceConfig.model_validate({"model": {"name": sys.argv[1]}}))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, TINY], check=True)


def test_weights_in_mxfp4_are_read_and_written_in_bfloat16(tmp_path):
    """The numbers are those of transformers; a saved model has plain weights."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    experts, layers, hidden, inner = 3, 2, 64, 96
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 40,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
    }
    model = Transformer(parse_model_config(config)).bfloat16()
    model.init_weights(torch.Generator().manual_seed(0))
    tensors = {name: x.clone() for name, x in hf_tensors(model)}
    draw = torch.Generator().manual_seed(1)
    wanted = {}
    for layer in range(layers):
        for part, rows, columns in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            name = f"model.layers.{layer}.mlp.experts.{part}_proj"
            shape = (experts, rows, columns // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=draw, dtype=torch.uint8)
            scales = torch.randint(120, 130, shape, generator=draw, dtype=torch.uint8)
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            wanted[name] = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    source = tmp_path / "packed"
    source.mkdir()
    quantized = {"quantization_config": {"quant_method": "mxfp4"}}
    (source / "config.json").write_text(json.dumps(config | quantized))
    save_file(tensors, source / "model.safetensors")
    read = load_model(source, dtype=torch.bfloat16)
    found = dict(hf_tensors(read))
    assert wanted.keys() < found.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted.get(name, tensors.get(name))), name
    save_model(read, source, tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    again = dict(hf_tensors(load_model(tmp_path / "saved", dtype=torch.bfloat16)))
    assert all(torch.equal(again[name], tensor) for name, tensor in found.items())
    short = {
        name: x
        for name, x in tensors.items()
        if not name.endswith("1.mlp.experts.down_proj_scales")
    }
    save_file(short, source / "model.safetensors")
    with pytest.raises(ValueError, match="down_proj_scales is missing"):
        load_model(source)
    other = {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(
        ValueError, match="quantization_config: fp8.* are not supported, but for mxfp4"
    ):
        parse_model_config(config | other)


def test_numbers_of_mxfp4_are_those_of_its_format():
    """Two numbers to a byte, the first in the low bits: sign, two bits of exponent, one of mantissa."""
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, :3] = torch.tensor([0x21, 0xF7, 0x9A], dtype=torch.uint8)
    found = unpack_mxfp4(blocks, torch.tensor([[127]], dtype=torch.uint8), torch.float32)
    assert found.shape == (1, 32)
    assert found[0, :6].tolist() == [0.5, 1.0, 6.0, -6.0, -1.0, -0.5]
    doubled = unpack_mxfp4(blocks, torch.tensor([[128]], dtype=torch.uint8), torch.float32)
    assert torch.equal(doubled, 2 * found)
