"""Read a configuration: defaults < TOML files < command line, into one typed model.

    argv ─ `@ file.toml`, `--a.b-c value` ─► nested dict ─ Config.model_validate ─► typed model
                                                  └─ any mistake ─► ConfigError: key, file, found, accepted, nearest

pydantic provides types, bounds and validation. pydantic-config reads `@ file.toml` too, but this
reader also names the file of a bad key and the nearest valid key, makes `--help` from the types,
and starts without heavy imports.
"""

import difflib
import itertools
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from hone.config.prime_rl_keys import find_counterpart, find_section
from hone.config.secrets import redact_secrets, restore_secrets

C = TypeVar("C", bound="Config")
T = TypeVar("T")
FREE = "may be changed when a run is resumed"
# Marks a key, or a section with all its keys, that does not affect training, so that `--resume`
# accepts a change. Unmarked keys must stay the same.
Free = Annotated[T, FREE]
COMMAND_LINE = "the command line"


class ConfigError(ValueError):
    """A mistake in the configuration, with a message for the user."""


def expand_home(value: Any) -> Any:
    """Expand a leading `~/` in a path, a string, or a list of them."""
    if isinstance(value, list):
        return [expand_home(one) for one in value]
    is_text = isinstance(value, str) and (value == "~" or value.startswith("~/"))
    if not is_text and not (
        isinstance(value, Path) and value.parts[:1] and value.parts[0].startswith("~")
    ):
        return value
    try:
        expanded = Path(value).expanduser()
    except RuntimeError as error:  # an unknown user's home
        raise ValueError(f"{value}: {error}") from None
    return str(expanded) if is_text else expanded


class Config(BaseModel):
    """Base class of all configuration sections. Unknown keys are errors.

    The docstring below a key documents it in `--help` and in the reference page.
    """

    # Keys that reduce memory.
    MEMORY_KEYS: ClassVar[str] = (
        "trainer.micro_batch_tokens (data.micro_batch_size of sft), activation_checkpointing, optim.state_dtype, "
        "optim.offload, lora.rank, seq_len, max_batch_size, kv_cache_gib or gpu_memory_utilization of inference"
    )

    # True if a run with this configuration can begin from a step of another run (`rl --fork`).
    CAN_FORK: ClassVar[bool] = True

    # Section of prime-rl's `rl` that has the keys of this command.
    PRIME_RL_SECTION: ClassVar[str] = ""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)

    @field_validator("*", mode="after", check_fields=False)
    @classmethod
    def _expand_home(cls, value: Any) -> Any:
        """Expand a leading `~` in paths: no shell expands the values of a file."""
        return expand_home(value)

    def to_public_dict(self) -> dict[str, Any]:
        """Return the values as plain data without secrets, for files and logs."""
        redacted: dict[str, Any] = redact_secrets(self.model_dump(mode="json"))
        return redacted

    def resolve_config(self) -> "Config":
        """Return the configuration to run: this one, or what a subclass converts it to.

        Raises ConfigError.
        """
        return self

    @classmethod
    def prepare_values(
        cls, values: dict[str, Any], origins: dict[str, str], files_for: set[str]
    ) -> dict[str, Any]:
        """Adjust the values after reading and before validation; return them.

        Args:
            values: nested values, as read from files and the command line.
            origins: source of each dotted key, such as a file's name.
            files_for: sections that are read from files of their own (`--trainer @ train.toml`).
        """
        return values


def find_differences(
    before: dict[str, Any], now: Config, prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, before, now) for each changed key that has to stay the same on resume.

    Keys that only one of the two configurations has are skipped: they come from another version of
    Hone.

    Args:
        before: configuration of the earlier run, as plain data.
        now: the new configuration.
        prefix: dotted path of the section, ending in a dot.
    """
    public = now.to_public_dict()
    for key, field in type(now).model_fields.items():
        if key in before and key in public and FREE not in field.metadata:
            yield from _find_differences(
                f"{prefix}{key}", before[key], getattr(now, key), public[key]
            )


def _find_differences(
    key: str, before: Any, now: Any, public: Any
) -> Iterator[tuple[str, Any, Any]]:
    pairs: list[tuple[Any, Any, Any, Any]] = []
    if isinstance(now, Config) and isinstance(before, dict):
        yield from find_differences(before, now, f"{key}.")
    elif isinstance(now, dict) and isinstance(before, dict) and now.keys() == before.keys():
        pairs = [(name, before[name], now[name], public[name]) for name in now]
    elif isinstance(now, list) and isinstance(before, list) and len(now) == len(before):
        pairs = list(zip(range(len(now)), before, now, public, strict=True))
    elif before != public:
        yield key, before, public
    for name, one, other, plain in pairs:
        yield from _find_differences(f"{key}.{name}", one, other, plain)


def load_config(cls: type[C], argv: list[str]) -> C:
    """Read a command's configuration from its arguments. Raises ConfigError."""
    values, origins = parse_argv(argv, users_keys(cls))
    restore_secrets(values)
    files_for = {
        one[2:]
        for one, two in itertools.pairwise(argv)
        if one.startswith("--") and two.startswith("@")
    }
    return validate_values(cls, cls.prepare_values(values, origins, files_for), origins)


def validate_values(
    cls: type[C], values: dict[str, Any], origins: dict[str, str] | None = None
) -> C:
    """Return the values as a validated `cls`. Raises ConfigError.

    `origins` maps dotted keys to the sources of their values (a file or the command line), for
    messages.
    """
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain_errors(error, cls, origins or {})) from None


def parse_argv(argv: list[str], free: dict[str, bool]) -> tuple[dict[str, Any], dict[str, str]]:
    """Parse arguments into nested values and the origin of each dotted key.

    Later files override earlier ones; keys on the command line override all files, and the last
    value of a key wins. `free` has the keys of tables with user-chosen names (`users_keys`). Raises
    ConfigError.
    """
    files: dict[str, Any] = {}
    overrides: dict[str, Any] = {}
    origins: dict[str, str] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word.startswith("@"):
            _merge_file(files, [], word[1:] or _next_word(rest, "@"), origins, free)
        elif word.startswith("--") and len(word) > 2:
            name, has_value, value = word[2:].partition("=")
            path = _split_key(name, free)
            if has_value:
                _assign_value(overrides, path, _parse_scalar(value), word)
            elif rest and rest[0].startswith("@"):
                at = rest.pop(0)
                _merge_file(files, path, at[1:] or _next_word(rest, f"{word} @"), origins, free)
                continue
            elif rest and not rest[0].startswith("--"):
                _assign_value(overrides, path, _parse_scalar(rest.pop(0)), word)
            elif path[-1].startswith("no_"):
                path[-1] = path[-1].removeprefix("no_")
                _assign_value(overrides, path, False, word)
            else:
                _assign_value(overrides, path, True, word)
            origins[".".join(path)] = COMMAND_LINE
        else:
            raise ConfigError(
                f"{word!r} is not understood here; write `@ file.toml` or `--key value` (see --help)"
            )
    return merge_tables(files, overrides), origins


def merge_tables(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with `over` merged in: tables key by key, anything else replaced.

    Where `base` has a list of tables and `over` a table, the table is merged into each entry of the
    list. A key of this table that is the name of an entry holds values for that entry alone.
    """
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            result[key] = merge_tables(old, value)
        elif isinstance(value, dict) and not isinstance(value, Whole) and _is_tables(old):
            result[key] = _merge_each(old, value)
        else:
            result[key] = value
    return result


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(one, dict) for one in value)


def _merge_each(entries: Any, over: dict[str, Any]) -> list[dict[str, Any]]:
    names = [str(entry.get("name") or entry.get("id")).replace("-", "_") for entry in entries]
    own = {name: over[name] for name in names if isinstance(over.get(name), dict)}
    common = {key: value for key, value in over.items() if key not in own}
    return [
        merge_tables(merge_tables(entry, common), own.get(name, {}))
        for name, entry in zip(names, entries, strict=True)
    ]


def _next_word(rest: list[str], what: str) -> str:
    if not rest:
        raise ConfigError(f"{what} wants a file: `{what} file.toml`")
    return rest.pop(0)


def _merge_file(
    files: dict[str, Any],
    path: list[str],
    name: str,
    origins: dict[str, str],
    free: dict[str, bool],
) -> None:
    try:
        # Windows editors write a byte order mark.
        content = tomllib.loads(Path(name).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        folder = Path(name).parent
        nearby = sorted(p.name for p in folder.glob("*.toml")) if folder.is_dir() else []
        stems = {Path(one).stem: one for one in nearby}  # file endings are equal anyway
        near = [
            stems[one] for one in difflib.get_close_matches(Path(name).stem, stems, n=1, cutoff=0.6)
        ]
        there = (
            f"; there are {', '.join(nearby[:5])}{', …' if len(nearby) > 5 else ''}"
            if nearby
            else ""
        )
        hint = f"; did you mean {folder / near[0]}?" if near else there
        raise ConfigError(f"{name}: no such file{hint}") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} is not valid TOML: {error}") from None
    content = clear_none(_to_snake_case(content, free, path[-1] if path else ""))
    for key in _list_leaves(content, path):
        origins[key] = name
    for part in reversed(path):
        content = {part: content}
    files.update(merge_tables(files, content))


def users_keys(cls: type[Config]) -> dict[str, bool]:
    """Return the keys of tables with user-chosen names, such as arguments or adapters.

    The parser keeps the user-chosen names as written, dashes included. A key maps to True if the
    entries of its table are configuration sections, to False if they are plain values. A key that
    is also the name of a section with fixed keys is left out.
    """
    found: dict[str, bool] = {}
    sections: set[str] = set()

    def collect_keys(at: type[Config]) -> None:
        for name, field in at.model_fields.items():
            section = section_type(field.annotation)
            if dict in (field.annotation, getattr(field.annotation, "__origin__", None)):
                found[name] = section is not None
            elif section is not None:
                sections.add(name)
            if section is not None:
                collect_keys(section)

    collect_keys(cls)
    return {name: holds for name, holds in found.items() if name not in sections}


def _split_key(name: str, free: dict[str, bool]) -> list[str]:
    """Split a dotted key; replace dashes by underscores except in user-chosen names.

    `free` is the result of `users_keys`.
    """
    path: list[str] = []
    rest = name.split(".")
    while rest:
        path.append(rest.pop(0).replace("-", "_"))
        if path[-1] in free:
            count = 1 if free[path[-1]] else len(rest)
            path = path + rest[:count]
            rest = rest[count:]
    return path


def _to_snake_case(value: Any, free: dict[str, bool], under: str = "") -> Any:
    if isinstance(value, list):
        return [_to_snake_case(one, free) for one in value]
    if not isinstance(value, dict):
        return value
    if under in free:
        return {
            key: _to_snake_case(one, free) if free[under] else one for key, one in value.items()
        }
    names = {key: key.replace("-", "_") for key in value}
    return {names[key]: _to_snake_case(one, free, names[key]) for key, one in value.items()}


def clear_none(value: Any) -> Any:
    """Replace the string "None" by None, since TOML has no null."""
    if isinstance(value, dict):
        return {k: clear_none(v) for k, v in value.items()}
    if isinstance(value, list):
        return [clear_none(v) for v in value]
    return None if value == "None" else value


def _list_leaves(content: dict[str, Any], path: list[str]) -> list[str]:
    keys = []
    for key, value in content.items():
        keys.append(".".join([*path, key]))
        if isinstance(value, dict):
            keys += _list_leaves(value, [*path, key])
    return keys


class Whole(dict[str, Any]):
    """A table given as JSON on the command line; it replaces a list of tables as a whole."""


class Typed(str):
    """Text from the command line that is converted to the type of its key during validation."""


def parse_untyped(value: Any) -> Any:
    """Parse command-line text of a key without a type: as JSON if possible, else as text."""
    if isinstance(value, dict):
        return {key: parse_untyped(one) for key, one in value.items()}
    if not isinstance(value, Typed):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return str(value)


def _parse_scalar(text: str) -> Any:
    """Parse a command-line value: `None`, a JSON list or object, else text of type Typed."""
    if text == "None":
        return None
    if text[:1] in "[{":
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            return text
        return Whole(value) if isinstance(value, dict) else value
    return Typed(text)


def _assign_value(values: dict[str, Any], path: list[str], value: Any, word: str) -> None:
    for part in path[:-1]:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            raise ConfigError(
                f"{word}: {part} was given a value before, it cannot have keys as well"
            )
    values[path[-1]] = value


# ---------------------------------------------------------------------------------------------- messages


EXPECTED = "input should be "  # how pydantic begins what a key accepts


def explain_errors(error: ValidationError, cls: type[Config], origins: dict[str, str]) -> str:
    """Return one line per mistake: key, source, what was found, what is accepted."""
    lines = []
    for item in error.errors(include_url=False):
        names = _without_tags(cls, [str(part) for part in item["loc"] if not _is_tag(part)])
        key = _to_kebab_case(".".join(names))
        place = _describe_origin(names, origins, str((item.get("ctx") or {}).get("error", "")))
        if item["type"] == "extra_forbidden":
            lines.append(f"{key}: unknown key{place}; {_suggest_key(cls, names)}")
        elif item["type"] == "missing":
            sections = find_sections(cls, names)
            full = ".".join(names)
            required = _list_required(sections[0], f"{full}.") if sections else [full]
            lines += [
                f"{_to_kebab_case(k)} must be given: --{_to_kebab_case(k)} VALUE or in the TOML file"
                for k in required
            ]
        elif item["type"] == "union_tag_invalid":
            kinds = [kind.strip("'") for kind in item["ctx"]["expected_tags"].split(", ")]
            near = difflib.get_close_matches(item["ctx"]["tag"], kinds, n=1, cutoff=0.0)[0]
            found = f"{item['ctx']['tag']!r} is not one of {', '.join(kinds)}; did you mean {near}?"
            lines.append(f"{key}.type: {found}{place}")
        elif foreign := _describe_foreign_table(cls, names, item["input"]):
            lines.append(f"{key}: unknown keys{place}; {foreign}")
        elif item["type"] in ("value_error", "assertion_error"):
            message = str(item["ctx"]["error"]) if "ctx" in item else item["msg"]
            lines.append(f"{key}: {message}{place}" if key else f"{message}{place}")
        else:
            message = item["msg"][0].lower() + item["msg"][1:]
            _add_wrong_value(lines, key, message, f", found {item['input']!r}{place}")
    return "\n".join(dict.fromkeys(lines))


def _add_wrong_value(lines: list[str], key: str, message: str, found: str) -> None:
    """Append the line of a wrong value; join it with that of another type which the key may have."""
    same = [i for i, line in enumerate(lines) if line.startswith(f"{key}: {EXPECTED}")]
    if same and lines[same[0]].endswith(found) and message.startswith(EXPECTED):
        before = lines.pop(same[0])[len(key) + 2 : -len(found)]
        message = f"{before} or {message[len(EXPECTED) :]}"
    lines.append(f"{key}: {message}{found}")


def _suggest_key(cls: type[Config], names: list[str]) -> str:
    """Return a hint for an unknown key: the type that has it, the nearest key, or all keys."""
    parents = find_sections(cls, names[:-1])
    name = names[-1]
    foreign = _describe_foreign_key(cls, ".".join(names))
    if foreign:
        return foreign
    kinds = [kind for one in parents if name in one.model_fields for kind in _list_kinds(one)]
    if kinds:
        return f"it is one of type {', '.join(kinds)}"
    dotted = ".".join(names)
    every = [entry.key for entry in walk_entries(cls)]
    # The same key with a section before it, or without the first.
    same = (x for x in every if x.endswith(f".{dotted}") or dotted.endswith(f".{x}"))
    if (found := next(same, None)) is not None:
        return f"did you mean {_to_kebab_case(found)}?"
    known = sorted({key for one in parents for key in one.model_fields})
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if near:
        return f"did you mean {_to_kebab_case('.'.join([*names[:-1], near[0]]))}?"
    return f"known keys: {', '.join(map(_to_kebab_case, known))}"


def _describe_foreign_key(cls: type[Config], key: str) -> str:
    """Return what a key of prime-rl is in Hone, in words; "" if it is none."""
    own = f"{cls.PRIME_RL_SECTION}{key}"
    found = find_counterpart(own) or find_section(own) or find_counterpart(key)
    if found is None:
        return ""
    rewrite = "hone convert FILE rewrites a file of prime-rl"
    if not found.key:
        kind = "has no counterpart here" if found.is_lost else "is not needed here"
        return f"this key of prime-rl {kind}: {found.why}; {rewrite}"
    name = _to_kebab_case(found.key.removeprefix(cls.PRIME_RL_SECTION))
    return f"prime-rl's key is {name} here; {rewrite}"


def _describe_foreign_table(cls: type[Config], names: list[str], value: Any) -> str:
    """Return what the first key of a table of prime-rl is in Hone, where Hone has no table; or ""."""
    if not isinstance(value, dict) or not value or not names or find_sections(cls, names):
        return ""
    return _describe_foreign_key(cls, ".".join([*names, str(next(iter(value)))]))


def _list_required(cls: type[Config], prefix: str) -> list[str]:
    """Return the required keys below a prefix."""
    found: list[str] = []
    for name, field in cls.model_fields.items():
        if field.is_required():
            section = section_type(field.annotation)
            found += _list_required(section, f"{prefix}{name}.") if section else [f"{prefix}{name}"]
    return found


def _is_tag(part: int | str) -> bool:
    """Return True for a part of a path by which pydantic names a member of a union."""
    kinds = ("str", "int", "float", "bool")
    return isinstance(part, str) and (
        "[" in part or part in kinds or part.startswith("constrained-")
    )


def _without_tags(cls: type[Config], names: list[str]) -> list[str]:
    """Return the path of a key without the tags that pydantic inserts for discriminated unions."""
    found: list[str] = []
    for name in names:
        field = (
            parents[0].model_fields.get(found[-1])
            if found and (parents := find_sections(cls, found[:-1]))
            else None
        )
        kinds = (
            [kind for one in section_types(field.annotation) for kind in _list_kinds(one)]
            if field
            else []
        )
        if field is None or field.discriminator is None or name not in kinds:
            found.append(name)
    return found


def _list_kinds(cls: type[Config]) -> list[str]:
    """Return the accepted values of a section's `type`; empty if it has no such key."""
    return (
        [str(kind) for kind in get_args(cls.model_fields["type"].annotation)]
        if "type" in cls.model_fields
        else []
    )


def _to_kebab_case(key: str) -> str:
    return key.replace("_", "-")


def _describe_origin(names: list[str], origins: dict[str, str], message: str = "") -> str:
    """Return where a key was given, as ` (in FILE)`, or "" if that is unknown.

    For a section, return where its keys were given: those that the message names, else all of them.
    """
    prefix = ".".join(names) + "." if names else ""
    below = {key[len(prefix) :]: place for key, place in origins.items() if key.startswith(prefix)}
    named = [
        place
        for key, place in below.items()
        if re.search(rf"\b{re.escape(key).replace('_', '[_-]')}\b", message)
    ]
    leaves = [
        place
        for key, place in below.items()
        if not any(other.startswith(f"{key}.") for other in below)
    ]
    places = sorted(
        set(named or (leaves if message and names else [])), key=lambda place: place != COMMAND_LINE
    )
    if ".".join(names) in origins and not named:
        places = [origins[".".join(names)]]
    if places:
        return f" (in {' and '.join(places)})"
    return _describe_origin(names[:-1], origins) if len(names) > 1 else ""


def find_sections(cls: type[Config], names: list[str]) -> list[type[Config]]:
    """Return the Config classes of a section (several for a union); empty if it is no section."""
    sections = [cls]
    for name in names:
        if not name.isdigit():
            fields = [one.model_fields[name] for one in sections if name in one.model_fields]
            sections = [found for field in fields for found in section_types(field.annotation)]
    return sections


def section_types(annotation: Any) -> list[type[Config]]:
    """Return the Config classes in an annotation such as `X`, `X | None`, `list[X]` or `X | Y`."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [
        found
        for argument in getattr(annotation, "__args__", ())
        for found in section_types(argument)
    ]


def section_type(annotation: Any) -> type[Config] | None:
    """Return the first Config class in an annotation, or None."""
    return next(iter(section_types(annotation)), None)


@dataclass(frozen=True)
class Entry:
    """An entry of `--help`: a key, or the heading of a section. `value` is the default."""

    key: str
    field: Any
    value: Any
    is_section: bool


def walk_entries(
    cls: type[Config], values: Config | None = None, prefix: str = ""
) -> Iterator[Entry]:
    """Yield the entries of a section: its own keys first, then its subsections with theirs.

    Sections with user-chosen names are listed once, with NAME in place of these names.

    Args:
        values: defaults of this section in the command; None: the defaults of its class.
        prefix: dotted path of the section, ending in a dot.
    """
    sections = []
    for name, field in cls.model_fields.items():
        value = (
            field.get_default(call_default_factory=True)
            if values is None
            else getattr(values, name)
        )
        is_section = bool(section_types(field.annotation))
        by_name = ".NAME" if is_section and get_origin(field.annotation) is dict else ""
        entry = Entry(f"{prefix}{name}{by_name}", field, value, is_section)
        if is_section:
            sections.append(entry)
        else:
            yield entry
    for entry in sections:
        yield entry
        for kind in section_types(entry.field.annotation):
            yield from walk_entries(
                kind, entry.value if type(entry.value) is kind else None, f"{entry.key}."
            )
