"""Examine SFT data before the first step: how much is used, and why rows are left out."""

import random
from collections.abc import Callable, Sequence
from itertools import islice

from hone.config.sft_config import DataConfig
from hone.trainer.sft.data import Conversations, LeftOut, Renderer, too_many_left_out
from hone.trainer.sft.data_sources import Source

SURVEYED_ROWS = 20_000  # rows drawn from larger data: examining all would take minutes
STREAMED_ROWS = 1_000  # first rows of each stream, which determine the row length
ROW_MULTIPLE, MOST_ROW_TOKENS = 64, 8192  # of a chosen row length
Tell = Callable[..., None]


def survey_data(data: Conversations, config: DataConfig, key: str, tell: Tell) -> None:
    """Tokenize the data, or a sample of its rows; log its size and which rows are left out.

    Raises ValueError if the share of rows left out exceeds `data.max_left_out`, unless all rows are
    left out.
    """
    left = LeftOut()
    samples = 0
    tokens = 0
    lost = 0
    rows = _choose_surveyed(data.count)
    for i in rows:
        found = data.render_row(i)
        samples += len(found.samples)
        tokens += found.tokens
        if not found.samples:
            left.add_row(i + 1, found)
            lost += found.tokens
    count = left.counts.total()
    total = len(rows)
    which = (
        f"{total:,} rows" if total == data.count else f"{total:,} rows drawn from {data.count:,}"
    )
    tell(f"Data ({key}): {which}, {samples:,} samples, {tokens:,} tokens")
    if count:
        share = f"{100 * count / total:.1f} % of the rows, {100 * lost / max(tokens, 1):.1f} % of the tokens"
        tell(f"Data ({key}): {count} of {which} left out ({share}): {left}", is_warning=True)
    if count > config.max_left_out * total and count < total:
        raise too_many_left_out(count, total, left, config)


def row_tokens_of_data(data: Conversations, positions: int, tell: Tell) -> int:
    """Choose a row length that fits the longest conversation.

    It is at most `positions` and MOST_ROW_TOKENS.
    """
    return _row_tokens(
        max((data.render_row(i).longest for i in _choose_surveyed(data.count)), default=0),
        positions,
        tell,
    )


def row_tokens_of_streams(
    sources: list[Source], render: Renderer, positions: int, tell: Tell
) -> int:
    """Return a row length in tokens that fits the first STREAMED_ROWS conversations of each stream.

    It is at most `positions` and at most MOST_ROW_TOKENS.
    """
    lengths = (render(row).longest for source in sources for row in islice(source, STREAMED_ROWS))
    return _row_tokens(max(lengths, default=0), positions, tell)


def _row_tokens(longest: int, positions: int, tell: Tell) -> int:
    rounded = -(-max(longest, 1) // ROW_MULTIPLE) * ROW_MULTIPLE
    chosen = min(rounded, positions, MOST_ROW_TOKENS)
    tell(f"data.seq-len is {chosen}: the longest conversation has {longest} tokens")
    return chosen


def _choose_surveyed(count: int) -> Sequence[int]:
    rows = range(count)
    return rows if count <= SURVEYED_ROWS else sorted(random.Random(0).sample(rows, SURVEYED_ROWS))
