"""Make a tiny model for trying an environment on a CPU: a config and a byte tokenizer.

Phrases that many conversations of the environment share (instructions, tags) become single tokens,
which keeps prompts short. All other text has one token per byte.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hone.records import Message

ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|system|>' + tools | map(attribute='function') | map(attribute='name') | join(', ') }}{% endif %}
{%- for message in messages %}
{{- '<|' + message.role + '|>' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '</tool_call>' }}
{%- endfor %}
{%- if message.role == 'assistant' %}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
SHORT_FIRST = re.compile(r"^\W*\b\w{1,2}\b")
SHORT_LAST = re.compile(r"\b\w{1,2}\W*$")
MIN_PHRASE_CHARS = 4  # characters of a phrase
COMPARED_PAIRS = 60  # conversations that are compared


def spoken_text(message: Message) -> str:
    """Return a message's text followed by its tool calls as JSON, without the tags around calls."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    written = [
        json.dumps({"name": c["name"], "arguments": json.loads(c["arguments"])}) for c in calls
    ]
    return (message.get("content") or "") + "".join(written)


def common_phrases(conversations: Sequence[Sequence[str]]) -> list[str]:
    """Return up to 64 phrases that many conversations share, longest first.

    Each conversation is a list of message texts. Phrases are compared between messages with the
    same index.
    """
    often: set[str] = set()
    for place in range(max(map(len, conversations))):
        found: Counter[str] = Counter()
        pairs = list(pairwise(texts[place] for texts in conversations if len(texts) > place))[
            :COMPARED_PAIRS
        ]
        for one, other in pairs:
            blocks = SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()
            found.update(
                {
                    part
                    for block in blocks
                    for part in _clean_part(one, block.a, block.a + block.size)
                }
            )
        often |= {text for text, count in found.items() if count >= max(2, len(pairs) // 6)}
    return sorted(often, key=lambda text: (-len(text), text))[:64]


def _clean_part(text: str, start: int, end: int) -> set[str]:
    """Strip partial words and words of 1 or 2 letters from the ends of text[start:end].

    Returns a set with the phrase that is left, or an empty set if it is too short.
    """
    whole = text[start:end]
    if text[:start][-1:].isalnum():
        whole = re.sub(r"^\w+", "", whole)
    if text[end:][:1].isalnum():
        whole = re.sub(r"\w+$", "", whole)
    while SHORT_FIRST.match(whole):
        whole = SHORT_FIRST.sub("", whole)
    while SHORT_LAST.search(whole):
        whole = SHORT_LAST.sub("", whole)
    return {whole} if len(whole) >= MIN_PHRASE_CHARS and re.search(r"\w{3}", whole) else set()


def write_model(
    directory: Path,
    conversations: Sequence[Sequence[str]],
    has_tools: bool = False,
    hidden: int = 128,
    layers: int = 3,
) -> int:
    """Write a model directory without weights; return how many phrases became tokens.

    The directory has a Qwen3 config, a tokenizer and a chat template.

    Args:
        directory: directory to write to.
        conversations: message texts of the environment's conversations.
        has_tools: add tokens for the tags around tool calls.
        hidden: hidden size, a multiple of 32.
        layers: number of transformer blocks.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(role, special=True) for role in ROLES])
    known = common_phrases(conversations)
    calls = ["<tool_call>", "</tool_call>"] if has_tools else []
    tokenizer.add_tokens(
        [AddedToken(word, normalized=False) for word in dict.fromkeys([*calls, *known])]
    )
    end = tokenizer.token_to_id("<|end|>")
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    described: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|end|>",
            "pad_token": "<|end|>",
            "model_max_length": 2048,
        },
        "generation_config.json": {"eos_token_id": [end], "pad_token_id": end},
        "config.json": {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": -(-tokenizer.get_vocab_size() // 8) * 8,
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": hidden // 32,
            "num_key_value_heads": hidden // 32,
            "head_dim": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "initializer_range": 0.06,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
            "attention_bias": False,
            "tie_word_embeddings": True,
            "eos_token_id": end,
            "pad_token_id": end,
            "dtype": "float32",
        },
    }
    for name, content in described.items():
        (directory / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return len(known)
