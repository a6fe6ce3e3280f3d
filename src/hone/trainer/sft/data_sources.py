"""Read SFT data from files, folders and the Hugging Face hub as rows; convert rows to messages.

    .jsonl .json .csv (.gz)                                            rows as they are written
    .parquet, .arrow, folders saved by the datasets library, hub ids   Arrow tables, whose columns have a type

In an Arrow table, objects of one column all have the same keys; where a row did not have a key, its
value is null. These added nulls are removed (`drop_nulls`).
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.records import Message
from hone.text.messages import MessageError, drop_nulls

TEXT_FILES = (".jsonl", ".json", ".csv", ".tsv")
ARROW_FILES = (".parquet", ".arrow")
READABLE = (
    "a .jsonl, .json, .csv (each also .gz), .parquet or .arrow file, "
    "a folder of datasets' save_to_disk, or a hub id"
)
# Columns that are rendered.
CONVERSATION = ("messages", "prompt", "completion", "chosen", "rejected", "tools")


@dataclass(frozen=True)
class RowFormat:
    """Columns that rows of training data need.

    Attributes:
        columns: alternatives; a row has all columns of one of them.
        described: these alternatives in words.
    """

    columns: tuple[frozenset[str], ...]
    described: str

    def has_columns(self, row: dict[str, Any]) -> bool:
        present = {k for k, value in row.items() if k != "messages" or value is not None}
        return any(needed <= present for needed in self.columns)


CONVERSATIONS = RowFormat(
    (frozenset({"messages"}), frozenset({"prompt", "completion"})),
    "`messages`, or `prompt` and `completion`",
)
PREFERENCES = RowFormat(
    (frozenset({"chosen", "rejected"}),),
    "`chosen` and `rejected`, and `prompt` where these are answers alone",
)


class Source:
    """A data set read row by row, each time from its start.

    Raises ValueError that names the configuration key: when constructed if a file does not exist or
    has an unknown format, otherwise during iteration.
    """

    def __init__(
        self,
        name: str,
        split: str,
        streaming: bool = True,
        key: str = "data.name",
        rows: RowFormat = CONVERSATIONS,
    ) -> None:
        self.name = name
        self.rows = rows
        self.split = split
        self.streaming = streaming
        self.key = key
        self.path = Path(name).expanduser()
        suffixes = [suffix.lower() for suffix in self.path.suffixes]
        self.is_zipped = suffixes[-1:] == [".gz"]
        self.suffix = (suffixes[:-1] if self.is_zipped else suffixes)[-1:] or [""]
        self.kind = self.suffix[0]
        self.is_file = self.path.is_file() or (
            self.kind in TEXT_FILES + ARROW_FILES and not self.path.is_dir()
        )
        if self.is_file and not self.path.is_file():
            raise ValueError(f"{key}: no file {name}")
        if self.is_file and self.kind not in TEXT_FILES + ARROW_FILES:
            raise ValueError(f"{key}: {name} cannot be read; give {READABLE}")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        number = 0
        for number, row in enumerate(self._iterate_rows(), 1):
            if not self.rows.has_columns(row):
                place = "" if number == 1 else f", row {number},"
                hint = (
                    "; pairs need the section dpo (--dpo.beta 0.1)"
                    if PREFERENCES.has_columns(row)
                    else ""
                )
                raise ValueError(
                    f"{self.key}: {self.name}{place} needs the columns {self.rows.described}; it has "
                    f"{', '.join(sorted(row))}{hint}"
                )
            yield row
        if number == 0:
            raise ValueError(f"{self.key}: {self.name} has no rows")

    def _iterate_rows(self) -> Iterator[dict[str, Any]]:
        if not self.is_file:
            return map(without_added_nulls, self._read_data_set())
        if self.kind in ARROW_FILES:
            return map(without_added_nulls, _read_arrow(self.path))
        return _read_text(self.path, self.kind, self.is_zipped)

    def _read_data_set(self) -> Iterable[dict[str, Any]]:
        """Read a folder written by `save_to_disk`, or what `load_dataset` finds."""
        import datasets

        try:
            if self.path.is_dir() and any(
                (self.path / name).is_file() for name in ("state.json", "dataset_dict.json")
            ):
                found = datasets.load_from_disk(str(self.path))
                if isinstance(found, datasets.DatasetDict):
                    if self.split not in found:
                        raise ValueError(f"it has the splits {', '.join(found)}, not {self.split}")
                    found = found[self.split]
                return iter(found)
            name = str(self.path) if self.path.is_dir() else self.name
            return iter(datasets.load_dataset(name, split=self.split, streaming=self.streaming))
        except Exception as error:  # the library raises many types for unreachable and missing data
            where = "is a folder that" if self.path.is_dir() else "is no file or folder here and"
            raise ValueError(
                f"{self.key}: {self.name} {where} cannot be loaded {'' if self.path.is_dir() else 'from the hub '}"
                f"({type(error).__name__}: {(str(error).splitlines() or [''])[0]}); give {READABLE}"
            ) from None


def load_rows(
    name: str, split: str, key: str = "data.name", rows: RowFormat = CONVERSATIONS
) -> list[dict[str, Any]]:
    """Return all rows of a data set. Raises ValueError like `Source`.

    `key`: the configuration key of the data set.
    """
    return list(Source(name, split, streaming=False, key=key, rows=rows))


def without_added_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of an Arrow table without the nulls that stand for keys the row did not have."""
    return {key: drop_nulls(value) if key in CONVERSATION else value for key, value in row.items()}


def to_messages(row: dict[str, Any]) -> list[Message]:
    """Return a row's conversation; plain-text prompts and completions become messages.

    Raises MessageError for invalid JSON.
    """
    if row.get("messages") is not None:
        return _from_json(row["messages"], "messages")
    return as_messages(row["prompt"], "user") + as_messages(row["completion"], "assistant")


def as_messages(value: Any, role: str) -> list[Message]:
    """Return messages; text becomes one message of this role."""
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value)


def to_tools(row: dict[str, Any]) -> dict[str, Any]:
    """Return the tools of a row's conversation under the key `tools`, {} if there are none.

    Raises MessageError for invalid JSON, or if they are not a list of objects.
    """
    tools = _from_json(row.get("tools") or None, "tools")
    if isinstance(tools, list):
        tools = [_from_json(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise MessageError(f"tools: a list of tools (objects) is needed, found {tools!r:.80}")
    return {"tools": tools} if tools else {}


def _from_json(value: Any, column: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"{column} is text that is not JSON: {error}") from None


def _read_text(path: Path, kind: str, is_zipped: bool) -> Iterator[dict[str, Any]]:
    unpack: Any = gzip.open if is_zipped else open
    try:
        with (
            unpack(path, "rb") as raw,
            io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file,
        ):
            if kind in (".csv", ".tsv"):
                csv.field_size_limit(2**31 - 1)  # reasoning may be long
                yield from csv.DictReader(file, delimiter="\t" if kind == ".tsv" else ",")
            elif kind == ".json" and _first_character(file) == "[":
                yield from _read_list(path, file.read())
            else:
                yield from _read_lines(path, file)
    except (
        UnicodeDecodeError,
        gzip.BadGzipFile,
        zlib.error,
        EOFError,
        OSError,
        csv.Error,
    ) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _first_character(file: io.TextIOWrapper) -> str:
    found = ""
    while not found and (part := file.read(4096)):
        found = part.lstrip()[:1]
    file.seek(0)
    return found


def _read_list(path: Path, text: str) -> Iterator[dict[str, Any]]:
    try:
        rows = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, row {number} is not a JSON object")
        yield row


def _read_lines(path: Path, file: Iterable[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"{path}, line {number} is not valid JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number} is not a JSON object")
            yield row


def _read_arrow(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        if path.suffix.lower() == ".parquet":
            batches: Iterable[Any] = pyarrow.parquet.ParquetFile(path).iter_batches()
        else:
            with pyarrow.memory_map(str(path)) as file:
                try:
                    batches = pyarrow.ipc.open_stream(file).read_all().to_batches()
                except pyarrow.ArrowInvalid:
                    batches = pyarrow.ipc.open_file(file).read_all().to_batches()
        for batch in batches:
            yield from batch.to_pylist(maps_as_pydicts="strict")
    except Exception as error:  # pyarrow has a class for each kind of damage
        raise ValueError(f"{path} is not a readable {path.suffix[1:]} file: {error}") from None
