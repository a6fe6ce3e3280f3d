"""Convert conversations to token ids and loss masks, and pack them into rows of `seq_len` tokens.

    data_sources ─► messages ─ chat template ─► ids, mask ─► rows ─► step

Class `Conversations` holds all data in memory and orders it anew every epoch;
`StreamedConversations` reads data on demand.
"""

import logging
import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hone.config.sft_config import UNKNOWN_ROW_TOKENS, DataConfig
from hone.text.tokenizer import Tokenizer
from hone.trainer.sft.data_sources import Source, to_messages, to_tools

log = logging.getLogger("hone.sft")

Conversation = tuple[list[int], list[bool]]  # ids, and which of them are trained on
Row = list[Conversation]  # conversations that share a row of seq_len tokens

LEARNT_FROM = "no message of data.train-on"


class FakeConversations:
    """Random tokens for benchmarks: `count` conversations of seq_len / 4 to seq_len tokens."""

    unit_size = 1

    def __init__(self, count: int, seq_len: int, vocab_size: int, seed: int) -> None:
        self.count = count
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.seed = seed
        self.read = count
        self.dropped_count = 0
        self.sizes = [count]

    def __getitem__(self, i: int) -> list[Conversation]:
        draw = np.random.default_rng([self.seed, i])
        length = int(draw.integers(max(self.seq_len // 4, 2), self.seq_len, endpoint=True))
        return [
            (draw.integers(0, self.vocab_size, length).tolist(), [False] + [True] * (length - 1))
        ]


@dataclass(frozen=True)
class Rendered:
    """The usable samples of one row of the data, or the reason why it has none.

    Attributes:
        reason: why there are no samples; "" if there are some.
        detail: message of the error, if any.
        tokens: number of tokens of all samples, including those that are too long or have no target.
        longest: number of tokens of the longest of all these samples.
    """

    samples: list[Conversation]
    reason: str = ""
    detail: str = ""
    tokens: int = 0  # over all its samples
    longest: int = 0


@dataclass
class LeftOut:
    """Rows without a usable sample: counts by reason, and the first three of each."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add_row(self, number: int, rendered: Rendered) -> None:
        self.counts[rendered.reason] += 1
        named = self.examples.setdefault(rendered.reason, [])
        if len(named) < 3:
            named.append(f"row {number}" + (f": {rendered.detail}" if rendered.detail else ""))

    def __str__(self) -> str:
        parts = [
            f"{count} {reason} ({'; '.join(self.examples[reason])})"
            for reason, count in self.counts.items()
        ]
        return ", ".join(parts)


class Renderer:
    """Tokenize a row's conversation into samples; leave out those longer than `seq_len` tokens.

    Attributes:
        unit_size: number of consecutive samples that belong together. They share a row of the batch,
            and are left out together.
    """

    unit_size = 1

    def __init__(
        self, tokenizer: Tokenizer, seq_len: int, roles: Collection[str], last_only: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.roles = roles
        self.last_only = last_only

    def tokenize_row(self, row: dict[str, Any]) -> list[Conversation]:
        """Return all samples of a row. Raises ValueError and others if it cannot be rendered."""
        return self.tokenizer.conversation_ids(
            to_messages(row), self.roles, self.last_only, **to_tools(row)
        )

    def __call__(self, row: dict[str, Any]) -> Rendered:
        try:
            every = self.tokenize_row(row)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return Rendered([], "cannot be rendered", str(error))
        units = split_units(every, self.unit_size)
        sizes = [sum(len(ids) for ids, _ in unit) for unit in units]
        fitting = [unit for unit, size in zip(units, sizes, strict=True) if size <= self.seq_len]
        used = [unit for unit in fitting if all(any(mask[1:]) for _, mask in unit)]
        reason = (
            ""
            if used
            else f"with {LEARNT_FROM}"
            if fitting or not every
            else f"longer than {self.seq_len} tokens"
        )
        samples = [sample for unit in used for sample in unit]
        return Rendered(samples, reason, "", sum(sizes), max(sizes, default=0))


def split_units(samples: Sequence[Conversation], size: int) -> list[Row]:
    """Split samples into units of `size` consecutive ones."""
    return [list(samples[i : i + size]) for i in range(0, len(samples), size)]


class Conversations:
    """Concatenated data sets, tokenized on demand.

    Args:
        data_sets: rows of each data set.
        seq_len: maximum number of tokens of a sample.
        roles: roles whose messages have a loss.
        last_only: how to treat earlier turns that the chat template rewrites, for example by
            dropping their reasoning. True: these turns have no loss; False: additional samples,
            which end with such a turn, show it as it was written.
        renderer: class that tokenizes a row.
    """

    def __init__(
        self,
        data_sets: list[list[dict[str, Any]]],
        tokenizer: Tokenizer,
        seq_len: int,
        roles: Collection[str] = ("assistant",),
        last_only: bool = False,
        renderer: type[Renderer] = Renderer,
    ) -> None:
        self.rows = [row for data_set in data_sets for row in data_set]
        self.render = renderer(tokenizer, seq_len, roles, last_only)
        self.unit_size = renderer.unit_size
        self.sizes = [len(data_set) for data_set in data_sets]
        self.count = self.read = len(self.rows)
        self.rendered: list[Rendered | None] = [None] * len(self.rows)
        self.left_out: dict[int, Rendered] = {}

    @property
    def dropped_count(self) -> int:
        """Return how many rendered rows are not used at all."""
        return len(self.left_out)

    def __getitem__(self, i: int) -> list[Conversation]:
        """Return the samples of row `i`, empty if it is left out."""
        return self.render_row(i).samples

    def render_row(self, i: int) -> Rendered:
        found = self.rendered[i]
        if found is None:
            found = self.rendered[i] = self.render(self.rows[i])
            if not found.samples:
                self.left_out[i] = found
        return found

    def limit_length(self, seq_len: int) -> None:
        """Leave out conversations longer than `seq_len` tokens from now on."""
        self.render.seq_len = seq_len
        for i, one in enumerate(self.rendered):
            if one is not None and one.longest > seq_len:
                self.rendered[i] = None


class StreamedConversations:
    """Data sets that are read on demand, and restarted when they end."""

    count = "streamed"

    def __init__(
        self,
        sources: list[Source],
        tokenizer: Tokenizer,
        seq_len: int,
        roles: Collection[str] = ("assistant",),
        last_only: bool = False,
        renderer: type[Renderer] = Renderer,
    ) -> None:
        self.sources = sources
        self.render = renderer(tokenizer, seq_len, roles, last_only)
        self.unit_size = renderer.unit_size
        self.read = 0
        self.left = LeftOut()

    def limit_length(self, seq_len: int) -> None:
        """Leave out conversations longer than `seq_len` tokens from now on."""
        self.render.seq_len = seq_len

    @property
    def dropped_count(self) -> int:
        """Return how many rows are not used at all, so far."""
        return self.left.counts.total()

    def iterate_units(self, config: DataConfig, seed: int) -> Iterator[Row]:
        """Yield units of samples endlessly, in an order that follows from the seed.

        Raises ValueError if a thousand consecutive rows are unusable, or if the share of rows left
        out so far exceeds `data.max_left_out`.
        """
        draw = random.Random(seed)
        useless = 0
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
                row = pool[at]
                pool[at] = pool[-1]
                pool.pop()
            self.read += 1
            rendered = self.render(row)
            useless = 0 if rendered.samples else useless + 1
            if not rendered.samples:
                self.left.add_row(self.read, rendered)
            if useless == STREAM_CHECK:
                raise _nothing_fits(config, self.render.seq_len, self.left)
            if (
                self.read % STREAM_CHECK == 0
                and self.dropped_count > config.max_left_out * self.read
            ):
                raise too_many_left_out(self.dropped_count, self.read, self.left, config)
            yield from split_units(rendered.samples, self.unit_size)


STREAM_CHECK = 1000  # rows of a stream after which the share left out is checked


def too_many_left_out(count: int, total: int, left: LeftOut, config: DataConfig) -> ValueError:
    """Return the ValueError that more rows are left out than `data.max_left_out` allows.

    `count` of `total` rows are left out.
    """
    return ValueError(
        f"data: {count} of {total} rows would be left out: {left}; data.max-left-out allows {config.max_left_out:g} of "
        "them (a longer data.seq-len keeps long ones; --data.max-left-out 1 trains on the others)"
    )


Data = Conversations | StreamedConversations | FakeConversations


def _again_and_again(source: Source) -> Iterator[dict[str, Any]]:
    while True:
        yield from source


def iterate_epoch(
    data: Conversations | FakeConversations, config: DataConfig, seed: int, number: int
) -> Iterator[Row]:
    """Yield the rows of one pass over the data; `seed` and `number` determine the order."""
    draw = random.Random(f"{seed} {number}")
    order = []
    start = 0
    weights = None if config.fake else config.weights
    for size, weight in zip(data.sizes, weights or [1.0] * len(data.sizes), strict=True):
        own = range(start, start + size)
        part = round(weight % 1 * size)
        order += [*own] * int(weight) + (draw.sample(own, part) if part else [])
        start += size
    if config.shuffle:
        draw.shuffle(order)
    units = (unit for i in order for unit in split_units(data[i], data.unit_size))
    yield from pack_units(units, config)


def pack_units(units: Iterator[Row], config: DataConfig) -> Iterator[Row]:
    """Pack whole units of conversations in order into rows of at most `seq_len` tokens; yield the rows.

    With `pack` "stack" each row has one unit.
    """
    row: Row = []
    used = 0
    for unit in units:
        size = sum(len(ids) for ids, _ in unit)
        if row and (config.pack == "stack" or used + size > (config.seq_len or UNKNOWN_ROW_TOKENS)):
            yield row
            row = []
            used = 0
        row += unit
        used += size
    if row:
        yield row


def iterate_steps(
    data: Data, config: DataConfig, seed: int, epochs: int | None = None
) -> Iterator[list[Row]]:
    """Yield the rows of each optimizer step across epochs, endlessly unless `epochs` is given."""
    batch: list[Row] = []
    for row in _iterate_rows(data, config, seed, epochs):
        batch.append(row)
        if len(batch) == config.batch_size:
            yield batch
            batch = []
    if batch:
        yield batch


def _iterate_rows(data: Data, config: DataConfig, seed: int, epochs: int | None) -> Iterator[Row]:
    if isinstance(data, StreamedConversations):
        yield from pack_units(data.iterate_units(config, seed), config)
        return
    number = 0
    while epochs is None or number < epochs:
        is_empty = True
        for row in iterate_epoch(data, config, seed, number):
            is_empty = False
            yield row
        if is_empty and data.dropped_count == data.count:
            left = LeftOut()
            for i, one in getattr(data, "left_out", {}).items():
                left.add_row(i + 1, one)
            raise _nothing_fits(
                config, data.render.seq_len if isinstance(data, Conversations) else 0, left
            )
        if is_empty:
            raise ValueError(
                f"data.weights {config.weights} of {data.sizes} rows leave no conversation to train on"
            )
        number += 1


def _nothing_fits(config: DataConfig, seq_len: int, left: LeftOut) -> ValueError:
    return ValueError(
        f"no conversation fits into data.seq-len {config.seq_len or seq_len} and the model's positions, or none has a "
        f"message of data.train-on: {left}"
    )
