"""Looks for faster tiles of a decode step's kernels on this card, for one model and number of sequences.

    python benchmarks/kernels/tiles.py [--model Qwen3-0.6B] [--rows 32] [--length 128] [--seconds 120]

Starts from the tiles in use, and tries those beside them: half or twice a size, a stage more or fewer, 1 to 16
warps, another limit of registers. What makes the whole step of the engine at least half a percent faster stays. Each
line is a try and the milliseconds of its step; the last name what was found, for
`kernels/gpu/few_row_products.py`, `products.py`,
`sampling.py` and `decode_attention.py`, whose tests say whether it is right. Compiling takes a second a try.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import _path  # noqa: F401
from decode import step_ms
from model_shapes import MODELS
from peer import finish
from training import our_model

ENOUGH = 0.995  # of the best time so far
Setting = tuple[int | None, ...]


def beside(setting: Setting, names: tuple[str, ...]) -> Iterator[Setting]:
    """Settings that differ from this one in a number."""
    choices = {"warps": (1, 2, 4, 8, 16), "registers": (None, 128, 144, 168, 200)}
    for i, name in enumerate(names):
        value = setting[i]
        if name in choices:
            others: set[int | None] = set(choices[name])
        elif value is None:
            continue
        elif name in ("stages", "held", "ahead"):
            others = {value - 1, value + 1}
        else:
            others = {value // 2, value * 2}
        for other in others - {value}:
            if other is None or other >= 1:
                yield (*setting[:i], other, *setting[i + 1 :])


def divides(size: int, part: int) -> None:
    """Raises ValueError where not: a kernel would leave out what is over, and be the faster for it."""
    if size % part:
        raise ValueError(f"{part} does not divide {size}")


def main() -> None:
    import torch

    from hone.engine.engine import Engine
    from hone.engine.graphs import pad_rows
    from hone.kernels.gpu import decode_attention, few_row_products, products, sampling

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="Qwen3-0.6B")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=120.0)
    args = parser.parse_args()
    own_product, own_held, own_blocks, own_head = (
        products._product,
        few_row_products.held_tile,
        decode_attention.blocks_of,
        sampling.head_tile,
    )
    used: dict[str, Setting] = {}  # what stands in for the settings of each kernel, by its name
    of_product = ("rows", "columns", "inner", "stages", "lines", "warps")
    of_held = ("rows", "columns", "inner", "held", "ahead", "warps", "registers")
    names = {
        "attention": ("warps", "stages", "registers", "tokens"),
        "head": ("words", "inner", "stages", "warps"),
    }

    def product(
        x: Any, weight: Any, bias: Any, tile: Any, splits: int = 1, is_swiglu: bool = False
    ) -> Any:
        N, K = weight.shape
        name = f"{N} x {K}, {splits} parts" if splits > 1 else f"{N} x {K}"
        names.setdefault(name, of_product)
        tile = products.Tile(*used.setdefault(name, tile))
        divides(K, tile.BK)
        return own_product(x, weight, bias, tile, splits, is_swiglu)

    def held_tile(
        rows: int, columns: int, inner: int, is_swiglu: bool, is_of_heads: bool
    ) -> few_row_products.Held:
        name = f"{columns * (1 + is_swiglu)} x {inner}, held"
        names.setdefault(name, of_held)
        tile = few_row_products.Held(
            *used.setdefault(name, own_held(rows, columns, inner, is_swiglu, is_of_heads))
        )
        divides(inner, tile.WARPS * tile.BK)
        return tile

    def blocks(*inputs: Any) -> decode_attention.Blocks:
        return decode_attention.Blocks(*used.setdefault("attention", own_blocks(*inputs)))

    def head(rows: int, inner: int) -> Setting:
        setting = used.setdefault("head", own_head(rows, inner))
        divides(inner, setting[1])
        divides(setting[0], sampling.CELL)
        return setting

    engine = Engine(
        our_model(MODELS[args.model]),
        max_batch_size=args.rows,
        max_model_len=args.length + 256,
        kv_cache_gib=8,
    )
    # By the blocks in use, since those that are tried are alike for all lengths.
    graphs, rows = engine.graphs, pad_rows(args.rows)
    is_long = graphs.is_long(rows, args.length, graphs._choose_parts(rows, args.length))
    graphs.is_long = lambda *_: is_long
    products._product, few_row_products.held_tile = product, held_tile
    decode_attention.blocks_of, sampling.head_tile = blocks, head

    def measured() -> float:
        engine.captured.clear()
        with torch.no_grad():
            return step_ms(engine, args.rows, args.length)

    end = time.monotonic() + args.seconds
    first = best = measured()
    print(f"as it is: {best:.4f} ms, {used}", flush=True)
    moved = True
    while moved and time.monotonic() < end:
        moved = False
        for name in list(used):
            for setting in beside(used[name], names[name]):
                if time.monotonic() > end:
                    break
                before, used[name] = used[name], setting
                ms = tried(measured)
                print(f"{name}: {tuple(setting)} {ms:.4f}", flush=True)
                if ms < best * ENOUGH:
                    best, moved = ms, True
                    break  # what is beside that comes in the next round
                used[name] = before
    print(
        "\n".join(
            f"{name}: {dict(zip(names[name], setting, strict=True))}"
            for name, setting in used.items()
        )
    )
    finish(before_ms=first, after_ms=best, ratio=first / best)


def tried(measured: Callable[[], float]) -> float:
    """Its time; infinite for a setting that a kernel or the card does not take."""
    try:
        return measured()
    except Exception as error:
        print(f"  {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        return float("inf")


if __name__ == "__main__":
    main()
