"""Find a model's tokenizer files and chat templates, by the rules of transformers.

tokenizer.json              the tokenizer; truncation and padding that an earlier use left in it are reset
tokenizer_config.json       special tokens, added tokens, chat templates
special_tokens_map.json     special tokens, where tokenizer_config.json lists no added tokens
chat_template.jinja, additional_chat_templates/*.jinja     instead of the templates of tokenizer_config.json
generation_config.json, else config.json                   token ids that end a generation
"""

import difflib
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Encoder

from hone.text.chat import DEFAULT

SHIPPED = Path(__file__).with_name("templates")
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
OTHER_FORMATS = ("tokenizer.model", "vocab.json", "tekken.json", "*.tiktoken")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file, {} if there is no such file. Raises ValueError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value


def read_config(directory: Path) -> dict[str, Any]:
    """Return tokenizer_config.json.

    If that lists no added tokens, special_tokens_map.json is merged in.
    """
    config = read_json(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= read_json(directory / "special_tokens_map.json")
    return config


def read_special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the text of special tokens by their names in templates (`bos_token`, …)."""
    found = {key: text_of(value) for key, value in config.items() if key.endswith("_token")}
    for name in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(config.get(name), dict):
            found |= {key: text_of(value) for key, value in config[name].items()}
    return {key: text for key, text in found.items() if text is not None}


def text_of(token: Any) -> str | None:
    """Return the text of a special token given as a string or as {"content": …}."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def load_encoder(directory: Path, config: dict[str, Any]) -> Encoder:
    """Return the tokenizer of a directory with all configured tokens. Raises ValueError."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        others = sorted(file.name for pattern in OTHER_FORMATS for file in directory.glob(pattern))
        found = (
            f"; of {', '.join(others)} transformers writes one: AutoTokenizer.from_pretrained(DIRECTORY)"
            if others
            else ""
        )
        hint = (
            ".save_pretrained(DIRECTORY)"
            if others
            else "; save the tokenizer in that directory (HF fast format)"
        )
        raise ValueError(f"{directory} has no tokenizer.json{found}{hint}")
    try:
        encoder = Encoder.from_file(str(path))
    except Exception as error:  # the library raises a plain Exception for a malformed file
        raise ValueError(f"{path} is not a readable tokenizer: {error}") from None
    encoder.no_truncation()
    encoder.no_padding()
    encoder.encode_special_tokens = bool(config.get("split_special_tokens"))
    encoder.add_tokens(_tokens_to_add(encoder, directory, config))
    return encoder


def _tokens_to_add(encoder: Encoder, directory: Path, config: dict[str, Any]) -> list[AddedToken]:
    """Return the configured added tokens, which may change or extend those of tokenizer.json.

    Tokens named in the configuration (eos_token, …) are special, whatever their entry says.
    """
    specials = read_special_tokens(config)
    extra = _extra_tokens(config)
    named = set(specials.values())
    if "added_tokens_decoder" in config:
        listed = config["added_tokens_decoder"].items()
        found = {
            int(i): AddedToken(**{k: v for k, v in token.items() if k != "__type"})
            for i, token in listed
        }
    else:
        older = {
            int(number): text for text, number in read_json(directory / "added_tokens.json").items()
        }
        is_special = {text: text in named or text in extra for text in older.values()}
        found = {
            i: AddedToken(t, normalized=not is_special[t], special=is_special[t])
            for i, t in older.items()
        }
        found |= encoder.get_added_tokens_decoder()
    tokens = [found[number] for number in sorted(found)]
    tokens = [_as_special(token) if token.content in named else token for token in tokens]
    known = {token.content for token in [*tokens, *encoder.get_added_tokens_decoder().values()]}
    missing = [text for text in dict.fromkeys([*specials.values(), *extra]) if text not in known]
    return tokens + [AddedToken(text, special=True) for text in missing]


def _as_special(token: AddedToken) -> AddedToken:
    flags = {
        name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")
    }
    return AddedToken(token.content, special=True, **flags)


def _extra_tokens(config: dict[str, Any]) -> list[str]:
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    return (
        []
        if isinstance(extra, dict)
        else [text for token in extra if (text := text_of(token)) is not None]
    )


def find_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates of a directory by name; empty if there are none."""
    found = {}
    if (directory / TEMPLATE_FILE).is_file():
        found[DEFAULT] = (directory / TEMPLATE_FILE).read_text(encoding="utf-8")
    for file in filter(Path.is_file, sorted((directory / TEMPLATE_FOLDER).glob("*.jinja"))):
        found[file.name.removesuffix(".jinja")] = file.read_text(encoding="utf-8")
    if found:
        return found
    given = config.get("chat_template") or read_json(directory / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(given, str):
        return {DEFAULT: given}
    if isinstance(given, dict):
        return {name: text for name, text in given.items() if isinstance(text, str)}
    try:
        return {one["name"]: one["template"] for one in given or []}
    except (KeyError, TypeError):
        raise ValueError(
            f"{directory / 'tokenizer_config.json'}: each chat template has a name and a template"
        ) from None


def resolve_template(value: str, key: str = "model.chat-template") -> str:
    """Return the text of a chat template given as text, as a file, or by the name of a shipped one.

    Raises ValueError, which names `key`, if `value` is none of these.
    """
    if "{%" in value or "{{" in value:
        return value
    shipped = {file.stem: file for file in SHIPPED.glob("*.jinja")}
    file = shipped.get(value) or Path(value).expanduser()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        near = difflib.get_close_matches(value, shipped, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        names = ", ".join(sorted(shipped))
        raise ValueError(
            f"{key}: {value!r} is no readable file, no template text and none of {names}{hint}"
        ) from None


def read_end_ids(directory: Path) -> list[int]:
    """Return the eos token ids of generation_config.json, or else of config.json."""
    generation = read_json(directory / "generation_config.json")
    model = read_json(directory / "config.json") if not generation else {}
    found = generation.get(
        "eos_token_id",
        model.get("eos_token_id", (model.get("text_config") or {}).get("eos_token_id")),
    )
    return found if isinstance(found, list) else [] if found is None else [found]


def write_template(directory: Path, template: str) -> None:
    """Write a chat template into a saved model's directory, replacing all others."""
    (directory / TEMPLATE_FILE).write_text(template, encoding="utf-8")
    for file in (directory / TEMPLATE_FOLDER).glob("*.jinja"):
        file.unlink()
    path = directory / "tokenizer_config.json"
    config = read_json(path)
    if config.pop("chat_template", None) is not None:
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
