"""SFT data: rows of conversations to token ids and loss masks, in rows of `seq_len` tokens.

hub | .jsonl | .parquet ─ columns ─► messages ─ chat template ─► ids, mask ─ rows ─► step

Read at once and gone through in a new order every epoch (Conversations), or as it comes (StreamedConversations).
"""

import json
import random
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hone.config.sft import DataConfig
from hone.records import Message
from hone.text.tokenizer import Tokenizer

Conversation = tuple[list[int], list[bool]]  # ids, and which of them are trained on
Row = list[Conversation]  # conversations that share a row of seq_len tokens

COLUMNS = "`messages`, or `prompt` and `completion`"


class Source:
    """A data set that is read row by row, each time from its start. Raises ValueError, in words, for what cannot be
    found, read or used: where it is not found at once, else as it is come to."""

    def __init__(self, name: str, split: str, streaming: bool = True, key: str = "data.name") -> None:
        self.name, self.split, self.path, self.streaming, self.key = name, split, Path(name), streaming, key
        self.is_file = self.path.suffix in (".jsonl", ".json", ".parquet")
        if self.is_file and not self.path.is_file():
            raise ValueError(f"{key}: no file {name}")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.is_file:
            rows = _read_hub(self.key, self.name, self.split, self.streaming)
        else:
            rows = _read_parquet(self.path) if self.path.suffix == ".parquet" else _read_jsonl(self.path)
        number = 0
        for number, row in enumerate(rows, 1):
            if row.get("messages") is None and not {"prompt", "completion"} <= set(row):
                place = "" if number == 1 else f", row {number},"
                raise ValueError(
                    f"{self.key}: {self.name}{place} needs the columns {COLUMNS}; it has {', '.join(sorted(row))}"
                )
            yield row
        if number == 0:
            raise ValueError(f"{self.key}: {self.name} has no rows")


def load_rows(name: str, split: str, key: str = "data.name") -> list[dict[str, Any]]:
    """The rows of a data set, which the configuration names by this key. Raises ValueError like `Source`."""
    return list(Source(name, split, streaming=False, key=key))


def _read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}, line {number} is not valid JSON: {error}") from None
                if not isinstance(row, dict):
                    raise ValueError(f"{path}, line {number} is not a JSON object")
                yield row


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except Exception as error:  # pyarrow's own classes, one for each way a file can be damaged
        raise ValueError(f"{path} is not a readable parquet file: {error}") from None


def _read_hub(key: str, name: str, split: str, streaming: bool) -> Iterator[dict[str, Any]]:
    from datasets import load_dataset

    try:
        rows = load_dataset(name, split=split, streaming=streaming)
    except Exception as error:  # the library raises a dozen kinds for "not reachable" and "not there"
        raise ValueError(
            f"{key}: {name} is no local .jsonl or .parquet file and cannot be loaded from the hub "
            f"({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from None
    return iter(rows)


def to_messages(row: dict[str, Any]) -> list[Message]:
    """A row's conversation. A plain-text prompt is the user's message, a plain-text completion the answer."""
    if row.get("messages") is not None:
        messages = row["messages"]
    else:
        prompt, completion = row["prompt"], row["completion"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        messages += [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
    # Parquet fills in every key of every message; templates test for a key's presence.
    return [{k: v for k, v in message.items() if v is not None} for message in messages]


def to_tools(row: dict[str, Any]) -> dict[str, Any]:
    """The tools that the conversation was told of, as a list or as JSON, if there were any."""
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    return {"tools": tools} if tools else {}


class FakeConversations:
    """Random tokens, for measuring: `count` conversations of a quarter of `seq_len` to all of it."""

    def __init__(self, count: int, seq_len: int, vocab_size: int, seed: int) -> None:
        self.count, self.seq_len, self.vocab_size, self.seed = count, seq_len, vocab_size, seed
        self.read, self.dropped = count, 0
        self.sizes = [count]

    def __getitem__(self, i: int) -> Conversation:
        draw = np.random.default_rng([self.seed, i])
        length = int(draw.integers(max(self.seq_len // 4, 2), self.seq_len, endpoint=True))
        return draw.integers(0, self.vocab_size, length).tolist(), [False] + [True] * (length - 1)


class Conversations:
    """Data sets, end to end, tokenised as they are needed. `dropped`: longer than `seq_len`, or without a target."""

    def __init__(
        self,
        data_sets: list[list[dict[str, Any]]],
        tokenizer: Tokenizer,
        seq_len: int,
        roles: Collection[str] = ("assistant",),
    ) -> None:
        self.rows = [row for data_set in data_sets for row in data_set]
        self.render = Renderer(tokenizer, seq_len, roles)
        self.sizes = [len(data_set) for data_set in data_sets]
        self.count = self.read = len(self.rows)
        self.tokenized: list[Conversation | None] = [None] * len(self.rows)
        self.without_use: set[int] = set()

    @property
    def dropped(self) -> int:
        return len(self.without_use)

    def __getitem__(self, i: int) -> Conversation | None:
        """Conversation `i`, or None where it is dropped."""
        if i not in self.without_use and self.tokenized[i] is None:
            self.tokenized[i] = self.render(self.rows[i], i)
            if self.tokenized[i] is None:
                self.without_use.add(i)
        return self.tokenized[i]


class StreamedConversations:
    """Data sets that are read as they are needed, each again from its start when it ends."""

    count = "streamed"

    def __init__(
        self, sources: list[Source], tokenizer: Tokenizer, seq_len: int, roles: Collection[str] = ("assistant",)
    ) -> None:
        self.sources, self.render = sources, Renderer(tokenizer, seq_len, roles)
        self.read = self.dropped = 0

    def conversations(self, config: DataConfig, seed: int) -> Iterator[Conversation]:
        """Without end, in an order that follows from the seed. Raises ValueError where a thousand in a row are of no
        use."""
        draw, useless = random.Random(seed), 0
        weights = config.weights or [1.0] * len(self.sources)
        streams = [_again_and_again(source) for source in self.sources]
        pool: list[dict[str, Any]] = []
        while True:
            row = next(draw.choices(streams, weights)[0])
            if config.shuffle:
                pool.append(row)
                if len(pool) < config.buffer:
                    continue
                at = draw.randrange(len(pool))
                row, pool[at] = pool[at], pool[-1]
                pool.pop()
            self.read += 1
            conversation = self.render(row, self.read - 1)
            useless = 0 if conversation else useless + 1
            self.dropped += conversation is None
            if useless == 1000:
                raise _nothing_fits(config)
            if conversation is not None:
                yield conversation


Data = Conversations | StreamedConversations | FakeConversations


def _again_and_again(source: Source) -> Iterator[dict[str, Any]]:
    while True:
        yield from source


class Renderer:
    """Rows to ids and masks, None for those that are too long or teach nothing."""

    def __init__(self, tokenizer: Tokenizer, seq_len: int, roles: Collection[str]) -> None:
        self.tokenizer, self.seq_len, self.roles = tokenizer, seq_len, roles

    def __call__(self, row: dict[str, Any], number: int) -> Conversation | None:
        try:
            ids, mask = self.tokenizer.conversation_ids(to_messages(row), self.roles, **to_tools(row))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"row {number} of the data cannot be rendered: {error}") from None
        return (ids, mask) if len(ids) <= self.seq_len and any(mask[1:]) else None


def epoch(data: Conversations | FakeConversations, config: DataConfig, seed: int, number: int) -> Iterator[Row]:
    """The rows of one pass over the data; the order follows from seed and number."""
    draw, order, start = random.Random(f"{seed} {number}"), [], 0
    weights = None if config.fake else config.weights
    for size, weight in zip(data.sizes, weights or [1.0] * len(data.sizes), strict=True):
        own, part = range(start, start + size), round(weight % 1 * size)
        order += [*own] * int(weight) + (draw.sample(own, part) if part else [])
        start += size
    if config.shuffle:
        draw.shuffle(order)
    yield from packed((conversation for conversation in map(data.__getitem__, order) if conversation), config)


def packed(conversations: Iterator[Conversation], config: DataConfig) -> Iterator[Row]:
    """Rows of whole conversations, in their order."""
    row: Row = []
    used = 0
    for conversation in conversations:
        size = len(conversation[0])
        if row and (config.pack == "stack" or used + size > config.seq_len):
            yield row
            row, used = [], 0
        row.append(conversation)
        used += size
    if row:
        yield row


def steps(data: Data, config: DataConfig, seed: int, epochs: int | None = None) -> Iterator[list[Row]]:
    """The rows of one optimiser step after the other, across epochs; without end unless `epochs` is given."""
    batch: list[Row] = []
    for row in _rows(data, config, seed, epochs):
        batch.append(row)
        if len(batch) == config.batch_size:
            yield batch
            batch = []
    if batch:
        yield batch


def _rows(data: Data, config: DataConfig, seed: int, epochs: int | None) -> Iterator[Row]:
    if isinstance(data, StreamedConversations):
        yield from packed(data.conversations(config, seed), config)
        return
    number = 0
    while epochs is None or number < epochs:
        is_empty = True
        for row in epoch(data, config, seed, number):
            is_empty = False
            yield row
        if is_empty and data.dropped == data.count:
            raise _nothing_fits(config)
        if is_empty:
            raise ValueError(f"data.weights {config.weights} of {data.sizes} rows leave no conversation to train on")
        number += 1


def _nothing_fits(config: DataConfig) -> ValueError:
    return ValueError(
        f"no conversation fits into data.seq-len {config.seq_len} and the model's positions, or none has a message of "
        "data.train-on"
    )
