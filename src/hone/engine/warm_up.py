"""Warm up an engine before its first request: compile kernels and capture graphs.

Call `compile_kernels` inside `together()` (`kernels/gpu/compiling.py`), which compiles several
kernels in parallel.
"""

from collections.abc import Callable
from functools import partial

import torch

from hone.engine.delta_states import DeltaChunk
from hone.engine.engine import Engine
from hone.engine.graphs import MIN_PART_TOKENS, PARTS, Key, pad_rows
from hone.engine.prefill import PrefillChunk, Shape
from hone.engine.token_sampler import TokenSampler
from hone.kernels import gpu, numerics

WARM_UP_PROMPT_TOKENS = 16  # tokens
PROMPTS = (1, 2, 4, 8, 32)  # prompts at once: products of more rows use other tiles
ROWS = (1, 4, 8, 16, 32, 64, 128)  # decoding sequences at once, likewise
CAPTURED = (1, 16, 64, 128, 256)  # batch sizes with graphs from the start
PASSES = (256, 512, 1024, 2048)  # tokens of prefill passes with graphs from the start
SHORT_PROMPT_TOKENS = 16  # tokens per prompt for which such a graph has room
# The same for models whose graphs hold states of all prompts that they have room for.
STATE_PROMPT_TOKENS = 64


@torch.no_grad()
def compile_kernels(engine: Engine, sequences: int) -> None:
    """Compile the kernels of an idle engine by dummy prefill passes and decode steps.

    Only kernels for requests without filters, penalties or adapters are compiled. `sequences` is
    the largest number that will decode at once. Does nothing without GPU kernels.
    """
    graphs = engine.graphs
    slots = engine.slots
    if graphs is None:
        return
    top = min(pad_rows(sequences), engine.max_batch_size)
    rows = sorted({min(B, top) for B in (*ROWS, *CAPTURED, top)})
    ways = [Key(B, TokenSampler.PLAIN, False, 0, 0, False) for B in rows]
    ways += [
        Key(B, TokenSampler.PLAIN, False, 0, 0, True)
        for B in rows
        if graphs.is_long(B, engine.max_model_len, 0)
    ]
    for parts in (parts for parts in PARTS if parts * MIN_PART_TOKENS <= engine.max_model_len):
        most = min(gpu.processors() // (graphs.heads * parts), top)
        ways += [
            Key(B, TokenSampler.PLAIN, False, 0, parts, False) for B in sorted({1, most}) if most
        ]
    if graphs.can_share:
        ways.append(Key(top, TokenSampler.PLAIN, False, 8, 1, False))  # with shared prompts
    length = min(WARM_UP_PROMPT_TOKENS, engine.max_model_len - 1)
    pages = list(range(engine.pool.pages_needed(length)))
    for count in PROMPTS:
        hidden = engine.prefill.run_chunks(
            [PrefillChunk([0] * length, pages, 0, length)] * count, [length - 1]
        )
        engine.decoder.draw_tokens(hidden, slots.active[-1:], TokenSampler.PLAIN, advance=False)
    rehearse_snapshots(engine)
    for way in ways:
        engine.decoder.decode_step(way.rows, way.kind, way.has_adapters, graphs.rows_by(way))
    engine.prefill.seen.clear()


def rehearse_snapshots(engine: Engine) -> None:
    """Compute two prompts whose states are kept before their ends, for models with such states."""
    size, row = engine.pool.size, engine.prefill.spare_row
    length = size + WARM_UP_PROMPT_TOKENS
    if engine.cache.deltas is None or length >= engine.max_model_len:
        return
    spare_pages = [0] * engine.pool.pages_needed(length)
    delta = DeltaChunk(row, True, snapshot_row=row, until=size)
    chunk = PrefillChunk([0] * length, spare_pages, 0, length, delta=delta)
    engine.prefill.run_chunks([chunk] * 2, [length - 1])


def describe_rehearsal(engine: Engine) -> str:
    """Return what decides which kernels `compile_kernels` compiles, beside the GPU and versions."""
    dtype = engine.model.embed.weight.dtype
    sizes = (engine.max_batch_size, engine.max_model_len)
    return repr((engine.model.spec, dtype, sizes, numerics.is_exact()))


def plan_captures(engine: Engine) -> list[Callable[[Engine], None]]:
    """Return functions that capture CUDA graphs of decode steps and prefill passes, the largest last.

    The graphs are for requests without filters, penalties or adapters; smaller batches and passes
    can use them, padded. Call the functions after `compile_kernels`, once kernels are compiled. Empty
    without GPU kernels.
    """
    found: list[Callable[[Engine], None]] = []
    if engine.prefill.captured is not None:
        longest = gpu.power_of_2(engine.max_model_len)
        most = engine.max_batch_size * engine.max_model_len
        has_states = engine.cache.deltas is not None
        short = STATE_PROMPT_TOKENS if has_states else SHORT_PROMPT_TOKENS
        found += [
            partial(_capture_pass, Shape(n, n // short, min(n, longest), has_states))
            for n in PASSES
            if n <= engine.prefill.most_tokens and n < 2 * most
        ]
    if engine.graphs is not None:
        found += [
            partial(_capture_step, Key(rows, TokenSampler.PLAIN, False, 0, 0, False))
            for rows in sorted({min(B, engine.max_batch_size) for B in CAPTURED})
        ]
    return found


@torch.no_grad()
def _capture_pass(shape: Shape, engine: Engine) -> None:
    if engine.prefill.captured is not None and shape not in engine.prefill.captured:
        engine.prefill.capture_graph(shape)


@torch.no_grad()
def _capture_step(key: Key, engine: Engine) -> None:
    if engine.graphs is not None and key not in engine.graphs.captured:
        engine.graphs.capture_graph(key)
