"""SFT data: rows of conversations to token ids and loss masks, in rows of `seq_len` tokens.

hub | .jsonl | .parquet ─ columns ─► messages ─ chat template ─► ids, mask ─ rows ─► step
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


def load_rows(name: str, split: str) -> list[dict[str, Any]]:
    """The rows of a data set. Raises ValueError, in words, for what cannot be found, read or used."""
    path = Path(name)
    if path.suffix in (".jsonl", ".json", ".parquet"):
        if not path.is_file():
            raise ValueError(f"data.name: no file {name}")
        rows = _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)
    else:
        rows = _load_from_hub(name, split)
    if not rows:
        raise ValueError(f"data.name: {name} has no rows")
    columns = set(rows[0])
    if "messages" not in columns and not {"prompt", "completion"} <= columns:
        raise ValueError(f"data.name: {name} needs the columns {COLUMNS}; it has {', '.join(sorted(columns))}")
    return rows


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    with path.open() as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}, line {number} is not valid JSON: {error}") from None
                if not isinstance(rows[-1], dict):
                    raise ValueError(f"{path}, line {number} is not a JSON object")
    return rows


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet

    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except Exception as error:  # pyarrow's own classes, one for each way a file can be damaged
        raise ValueError(f"{path} is not a readable parquet file: {error}") from None
    return rows


def _load_from_hub(name: str, split: str) -> list[dict[str, Any]]:
    from datasets import load_dataset

    try:
        return list(load_dataset(name, split=split))
    except Exception as error:  # the library raises a dozen kinds for "not reachable" and "not there"
        raise ValueError(
            f"data.name: {name} is no local .jsonl or .parquet file and cannot be loaded from the hub "
            f"({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from None


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


class FakeConversations:
    """Random tokens, for measuring: `count` conversations of a quarter of `seq_len` to all of it."""

    def __init__(self, count: int, seq_len: int, vocab_size: int, seed: int) -> None:
        self.count, self.seq_len, self.vocab_size, self.seed = count, seq_len, vocab_size, seed
        self.dropped: set[int] = set()
        self.sizes = [count]

    def __getitem__(self, i: int) -> Conversation:
        draw = np.random.default_rng([self.seed, i])
        length = int(draw.integers(max(self.seq_len // 4, 2), self.seq_len, endpoint=True))
        return draw.integers(0, self.vocab_size, length).tolist(), [False] + [True] * (length - 1)

    def __len__(self) -> int:
        return self.count


class Conversations:
    """Data sets, end to end, tokenised as they are needed. `dropped`: longer than `seq_len`, or without a target."""

    def __init__(
        self,
        data_sets: list[list[dict[str, Any]]],
        tokenizer: Tokenizer,
        seq_len: int,
        roles: Collection[str] = ("assistant",),
    ) -> None:
        rows = [row for data_set in data_sets for row in data_set]
        self.rows, self.tokenizer, self.seq_len = rows, tokenizer, seq_len
        self.roles = roles
        self.sizes = [len(data_set) for data_set in data_sets]
        self.tokenized: list[Conversation | None] = [None] * len(rows)
        self.dropped: set[int] = set()

    def __getitem__(self, i: int) -> Conversation | None:
        """Conversation `i`, or None where it is dropped."""
        if i in self.dropped:
            return None
        conversation = self.tokenized[i]
        if conversation is None:
            try:
                conversation = self.tokenizer.conversation_ids(to_messages(self.rows[i]), self.roles)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"row {i} of the data cannot be rendered: {error}") from None
            ids, mask = conversation
            if len(ids) > self.seq_len or not any(mask[1:]):
                self.dropped.add(i)
                return None
            self.tokenized[i] = conversation
        return conversation

    def __len__(self) -> int:
        return len(self.rows)


def epoch(data: Conversations | FakeConversations, config: DataConfig, seed: int, number: int) -> Iterator[Row]:
    """The rows of one pass over the data; the order follows from seed and number."""
    draw, order, start = random.Random(f"{seed} {number}"), [], 0
    for size, weight in zip(data.sizes, config.weights or [1.0] * len(data.sizes), strict=True):
        own, part = range(start, start + size), round(weight % 1 * size)
        order += [*own] * int(weight) + (draw.sample(own, part) if part else [])
        start += size
    if config.shuffle:
        draw.shuffle(order)
    row: Row = []
    used = 0
    for i in order:
        conversation = data[i]
        if conversation is None:
            continue
        size = len(conversation[0])
        if row and (config.pack == "stack" or used + size > config.seq_len):
            yield row
            row, used = [], 0
        row.append(conversation)
        used += size
    if row:
        yield row


def steps(
    data: Conversations | FakeConversations, config: DataConfig, seed: int, epochs: int | None = None
) -> Iterator[list[Row]]:
    """The rows of one optimiser step after the other, across epochs; without end unless `epochs` is given."""
    batch: list[Row] = []
    number = 0
    while epochs is None or number < epochs:
        before = len(data.dropped)
        for row in epoch(data, config, seed, number):
            batch.append(row)
            if len(batch) == config.batch_size:
                yield batch
                batch = []
        if before == len(data.dropped) == len(data):
            raise ValueError(
                f"no conversation fits into data.seq-len {config.seq_len} (or none has a message of data.train-on)"
            )
        number += 1
    if batch:
        yield batch
