"""Text made from a configuration: `--help`, the reference page, and the resolved TOML file."""

import json
import re
import shutil
import textwrap
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from hone.config.base import Config, Entry, walk_entries

INDENT = " " * 6
MAX_WIDTH_COLUMNS = 120
TABLE_HEAD = ["| key | type | default | |", "|---|---|---|---|"]


def help_text(command: str, summary: str, cls: type[Config]) -> str:
    """Return the text of `command --help`: usage, then each key with type, default and meaning."""
    lines = [
        f"usage: {command} [@ file.toml] [--key value] [--section.key value] …",
        "",
        summary,
        "",
        "Values: command line over TOML over defaults. Lists as JSON or one bare value, None clears a value,",
        "--flag and --no-flag for booleans.",
        "  --dry-run    print and write the resolved configuration, start nothing",
        "  --help       this text",
        "",
    ]
    return "\n".join([*lines, keys_text(cls)])


def keys_text(cls: type[Config]) -> str:
    """Return all keys with their documentation, by section."""
    lines = list[str]()
    width = max(60, min(MAX_WIDTH_COLUMNS, shutil.get_terminal_size().columns))
    for one in walk_entries(cls):
        lines += (
            ["", f"[{one.key}]"]
            if one.is_section
            else [
                f"  --{one.key.replace('_', '-')} {_describe_type(one.field.annotation)}{_in_brackets(one.value)}"
            ]
        )
        indent = "" if one.is_section else INDENT
        lines += textwrap.wrap(
            _describe_entry(one), width, initial_indent=indent, subsequent_indent=indent
        )
    return "\n".join(lines)


def reference_table(cls: type[Config]) -> str:
    """Return all keys as a Markdown table."""
    return "\n".join([*TABLE_HEAD, *filter(None, map(table_row, walk_entries(cls)))])


def table_row(one: Entry, within: str = "") -> str:
    """Return an entry's row of a Markdown table; "" for a section without a description.

    `within` is the dotted path of a section, ending in a dot, that is left out of the key.
    """
    words = _describe_entry(one).replace("|", "\\|")
    if one.is_section:
        return f"| **`{one.key}`** | section | | {words} |" if words else ""
    kind = _describe_type(one.field.annotation).replace("|", "\\|")
    default = _describe_default(one.value)
    return f"| `{one.key.removeprefix(within)}` | {kind} | {default} | {words} |"


def _describe_entry(one: Entry) -> str:
    words = " ".join((one.field.description or "").split())
    return words or (
        "Not used unless one of its keys is given." if one.is_section and one.value is None else ""
    )


def to_toml(config: Config, with_secrets: bool = False) -> str:
    """Return a configuration as TOML that loads back to the same values; None becomes "None".

    Secrets are left out unless `with_secrets` is set, for a file that only its owner can read.
    """
    values = config.model_dump(mode="json") if with_secrets else config.to_public_dict()
    return format_toml(values)


def format_toml(values: dict[str, Any]) -> str:
    """Return nested values as TOML; None becomes "None"."""
    return "\n".join(_toml_table(values, "")).strip() + "\n"


def _toml_table(values: dict[str, Any], name: str) -> list[str]:
    tables = {k: v for k, v in values.items() if isinstance(v, dict)}
    arrays = {
        k: v for k, v in values.items() if isinstance(v, list) and v and isinstance(v[0], dict)
    }
    lines = [
        f"{_toml_key(k)} = {_toml_value(v)}"
        for k, v in values.items()
        if k not in tables and k not in arrays
    ]
    for key, table in tables.items():
        full = f"{name}.{_toml_key(key)}" if name else _toml_key(key)
        lines += ["", f"[{full}]", *_toml_table(table, full)]
    for key, entries in arrays.items():
        full = f"{name}.{_toml_key(key)}" if name else _toml_key(key)
        for entry in entries:
            lines += ["", f"[[{full}]]", *_toml_table(entry, full)]
    return lines


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _toml_value(value: Any) -> str:
    if value is None:
        return '"None"'
    if isinstance(value, dict):
        return (
            "{ " + ", ".join(f"{json.dumps(k)} = {_toml_value(v)}" for k, v in value.items()) + " }"
        )
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)


def _describe_type(kind: Any) -> str:
    """Return a type in words: a Literal as its values, a list as its members."""
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is Annotated:
        return _describe_type(arguments[0])
    if origin is Literal:
        return "|".join(str(value) for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_describe_type(a) for a in arguments if a is not type(None))
    if origin in (list, tuple):
        return (
            f"{origin.__name__} of {', '.join(dict.fromkeys(_describe_type(a) for a in arguments))}"
        )
    if origin is dict:
        return "table"
    return {"Path": "path"}.get(kind.__name__, str(kind.__name__))


def _describe_default(value: Any) -> str:
    """Return a default as text: "required" if there is none, "none" for None."""
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "none"
    return json.dumps(value) if isinstance(value, (bool, list, dict)) else str(value)


def _in_brackets(value: Any) -> str:
    words = _describe_default(value)
    return f" ({words})" if value is PydanticUndefined else f" (default {words})" if words else ""
