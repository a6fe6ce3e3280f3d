"""What the first requests will need is compiled before they come."""

import torch

from hone.engine.engine import Engine
from hone.engine.graphs import Key, padded
from hone.engine.prefill import Stretch
from hone.engine.sampler import Sampler
from hone.kernels.decode import Rows

LENGTHS = (16, 512)  # tokens of prompts: products of few rows and of many are not the same kernels
ROWS = (16, 32, 64, 128)  # sequences from which products have other tiles


@torch.no_grad()
def compile_ahead(engine: Engine, sequences: int) -> None:
    """The kernels that up to so many plain requests need, in an engine that has none. Without a GPU nothing is done."""
    graphs, slots = engine.graphs, engine.slots
    if graphs is None:
        return
    from hone.kernels.gpu.compiling import together

    top = min(padded(sequences), engine.max_batch_size)
    rows = sorted({min(B, top) for B in (*ROWS, top)})
    ways = [Key(B, Sampler.PLAIN, False, 0, 0, is_wide) for B in rows for is_wide in (False, True)]
    ways.append(Key(top, Sampler.PLAIN, False, 8, 1, False))  # with prompts that groups share
    with together():
        for length in LENGTHS:
            length = min(length, engine.max_model_len - 1)
            pages = list(range(engine.pool.needed(length)))
            hidden = engine.prefill.run([Stretch([0] * length, pages, 0, length)], [length - 1])
            engine.draw(hidden, slots.active[-1:], Sampler.PLAIN, advance=False)
        for way in ways:
            seen = Rows(slots.active, slots.state, slots.table, graphs.shared_by(way), way.is_wide)
            engine.decode_step(way.rows, way.kind, way.has_adapters, seen)
    engine.prefill.clear()
