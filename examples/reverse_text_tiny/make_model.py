"""Writes the tiny model directory `model/`: a Qwen3 config and a byte-level tokenizer, no weights.

usage: python examples/reverse_text_tiny/make_model.py [DIR] [--shape tiny|0.6b]

One token a byte; the instruction and the answer's tags are single tokens, so that prompts stay short.
"""

import argparse
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from reverse_text import SYSTEM_PROMPT

ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
WORDS = [SYSTEM_PROMPT, "<reversed_text>", "</reversed_text>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message.role + '|>' + message.content }}{% if message.role == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


SHAPES = {
    "tiny": {
        "vocab_size": 264,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "initializer_range": 0.06,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        "dtype": "float32",
    },
    "0.6b": {  # Qwen3-0.6B's
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "initializer_range": 0.02,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "dtype": "bfloat16",
    },
}


def main(directory: Path, shape: str) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(role, special=True) for role in ROLES])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    end = tokenizer.token_to_id("<|end|>")
    # Ends a generation as well: nothing after it counts
    close = tokenizer.token_to_id("</reversed_text>")

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|end|>",
            "pad_token": "<|end|>",
            "model_max_length": 2048,
        },
    )
    write_json(
        directory / "generation_config.json", {"eos_token_id": [end, close], "pad_token_id": end}
    )
    write_json(
        directory / "config.json",
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-06,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "eos_token_id": end,
            "pad_token_id": end,
            **SHAPES[shape],
        },
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "place", type=Path, nargs="?", default=Path(__file__).parent / "model", metavar="DIR"
    )
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    args = parser.parse_args()
    main(args.place, args.shape)
