"""What a decode step of the engine could be at best on this card, with torch's products or with fewer kernels.

    python benchmarks/kernels/floor.py [--models NAME …] [--rows 256] [--context 128] [--few 32]

Three tables. The first has torch's products of a layer and of the head by themselves, microseconds of one and teraflops
a second, and the share of the limit (`shapes.py`) of a step that is these, attention by its bytes, and nothing
else. The second has what a kernel costs in a chain in which each reads what the one before wrote: launched with
dependent launch, before or after its own wait, as against one kernel for all of them with a barrier of the grid between
two. The third has the engine's step of Qwen3-0.6B for few rows, and the same where all tiles of a product fetch the
weights of one, or all rows are one row, which costs nearly nothing: what is left is starting kernels, multiplying,
adding up, attention, the head and the draw.
"""

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import _path  # noqa: F401
import torch
import triton
import triton.language as tl
from decode import step_ms
from model_shapes import MODELS, measure_bandwidth, step_limits
from peer import finish, median
from training import gpu_seconds, matrix_rate, our_model
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hone.engine.engine import Engine
from hone.kernels import gpu
from hone.kernels.gpu import few_row_products, has_dependent_launch
from hone.models.families import parse_model_config

# Bytes of weights in turns, so that none is in the second cache when its turn comes
BEYOND_CACHE = 120 * 2**20
LINKS = 140  # of a chain: a step of 0.6B's shape has so many
ROWS, INNER = 32, 2048  # numbers that a link copies
# All its layers' products of up to 32 rows are those of few_row_products.py.
FEW_MODEL = "Qwen3-0.6B"
# In the text of few_row_products.py: where a row is, and where a tile's weights are; then the same for all rows and
# all tiles.
ONE_ROW = ("x + (m_x * K +", "x + (m_x * 0 +")
ONE_TILE = ("w + (n.to(gl.int64) * K", "w + ((n - first_n).to(gl.int64) * K")


def seconds(run, times: int) -> float:
    """Seconds of one of `times` calls of run(i), launched as a CUDA graph."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run(0)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(times):
            run(i)
    graph.replay()
    return median([gpu_seconds(graph.replay) for _ in range(5)]) / times


def product_seconds(rows: int, columns: int, inner: int) -> float:
    copies = max(2, -(-BEYOND_CACHE // (2 * columns * inner)))
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    weights = [
        torch.randn(columns, inner, device="cuda", dtype=torch.bfloat16) for _ in range(copies)
    ]
    out = x.new_empty(rows, columns)
    return seconds(lambda i: torch.mm(x, weights[i % copies].t(), out=out), 40)


@triton.jit
def _copy(source, target, INNER: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * INNER + tl.program_id(0) * BN + tl.arange(0, BN)[None, :]
    tl.store(target + at, tl.load(source + at, cache_modifier=".cg"))


@triton.jit
def link_kernel(
    source, target, INNER: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, EARLY: tl.constexpr
):
    if EARLY:
        gdc_launch_dependents()
    gdc_wait()
    if not EARLY:
        gdc_launch_dependents()
    _copy(source, target, INNER, ROWS, BN)


@triton.jit
def whole_kernel(a, b, counter, links, INNER: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr):
    for i in range(links):
        _copy(tl.where(i % 2 == 0, a, b), tl.where(i % 2 == 0, b, a), INNER, ROWS, BN)
        tl.debug_barrier()
        tl.atomic_add(counter, 1, sem="release")
        while tl.atomic_add(counter, 0, sem="acquire") < (i + 1) * tl.num_programs(0):
            pass
        tl.debug_barrier()


def chain_seconds() -> dict[str, float]:
    """Seconds of a link by how it is made."""
    a = torch.randn(ROWS, INNER, device="cuda", dtype=torch.bfloat16)
    b, counter, shape = (
        torch.empty_like(a),
        torch.zeros(1, dtype=torch.int32, device="cuda"),
        (INNER, ROWS, 16),
    )
    blocks = INNER // 16

    def link(i: int, is_early: bool) -> None:
        link_kernel[(blocks,)](
            *((a, b) if i % 2 == 0 else (b, a)), *shape, EARLY=is_early, launch_pdl=True
        )

    def whole(_: int) -> None:
        counter.zero_()
        whole_kernel[(blocks,)](a, b, counter, LINKS, *shape)

    return {
        "launched_before_the_wait": seconds(lambda i: link(i, True), LINKS),
        "launched_after_the_wait": seconds(lambda i: link(i, False), LINKS),
        "barrier": seconds(whole, 10) / LINKS,
    }


@contextmanager
def products_changed(*changes: tuple[str, str]) -> Iterator[None]:
    """Products of few rows by few_row_products.py with these parts of its text replaced."""
    text = Path(few_row_products.__file__).read_text()
    for old, new in changes:
        if text.count(old) != 1:
            raise RuntimeError(
                f"few_row_products.py has {text.count(old)} times {old!r}: this table is for another version of it"
            )
        text = text.replace(old, new)
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "held_changed.py"
        path.write_text(text)
        found = importlib.util.spec_from_file_location(path.stem, path)
        assert found is not None and found.loader is not None
        changed = importlib.util.module_from_spec(found)
        found.loader.exec_module(changed)
        gpu.few_row_products = sys.modules[few_row_products.__name__] = changed  # type: ignore[attr-defined]
        try:
            yield
        finally:
            gpu.few_row_products = sys.modules[few_row_products.__name__] = few_row_products  # type: ignore[attr-defined]


@torch.no_grad()
def few_ms(rows: int, context: int) -> dict[str, float]:
    """Milliseconds of a step of few rows by what its products fetch; each the median of three rounds."""
    engine = Engine(
        our_model(MODELS[FEW_MODEL]),
        max_batch_size=rows,
        max_model_len=context + 256,
        kv_cache_gib=8,
    )
    ways: dict[str, list[tuple[str, str]]] = {
        "as_it_is": [],
        "one_row": [ONE_ROW],
        "one_tile": [ONE_TILE],
        "one_row_and_tile": [ONE_ROW, ONE_TILE],
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(3):
        for name, changes in ways.items():
            with products_changed(*changes):
                engine.captured.clear()
                found[name].append(step_ms(engine, rows, context))
    return {name: median(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=["Llama-3.2-1B", "Qwen3-1.7B", "Qwen3-4B"]
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--few", type=int, default=32, help="rows of the third table, up to 32")
    args = parser.parse_args()
    if not 1 <= args.few <= gpu.FEWEST_TOKENS:
        parser.error(
            f"--few {args.few}: 1 to {gpu.FEWEST_TOKENS}, for which products fetch as this table says"
        )
    rate, flops, figures = measure_bandwidth(), matrix_rate(), {}
    print(f"memory: {rate / 1e12:.2f} TB/s, a large product: {flops / 1e12:.0f} TFLOP/s\n")
    print(
        "| model | qkv | out | gate and up | down | head | share |",
        "|---" * 7 + "|",
        sep="\n",
        flush=True,
    )
    for name in args.models:
        spec = parse_model_config(MODELS[name])
        D, (q, k, v), F = spec.hidden_size, spec.qkv_splits, spec.intermediate_size
        products = [(q + k + v, D), (D, q), (2 * F, D), (D, F), (spec.vocab_size, D)]
        found = [product_seconds(args.rows, *product) for product in products]
        words = [
            f"{s * 1e6:.1f}, {2 * args.rows * n * k / s / 1e12:.0f}"
            for s, (n, k) in zip(found, products, strict=True)
        ]
        of_step = step_limits(spec, args.rows, args.context, rate, flops)
        attention = of_step[0] - step_limits(spec, args.rows, 0, rate, flops)[0]
        share = max(of_step) / (spec.num_hidden_layers * sum(found[:-1]) + found[-1] + attention)
        print(f"| {name} | {' | '.join(words)} | {share:.0%} |", flush=True)
        figures[f"{name}_{args.rows}"] = share
    chain = chain_seconds() if has_dependent_launch() else {}
    print("\n| a link of a chain | microseconds |", "|---|---|", sep="\n")
    for name, each in chain.items():
        print(f"| {name.replace('_', ' ')} | {each * 1e6:.2f} |")
        figures[f"{name}_us"] = each * 1e6
    if has_dependent_launch():
        least = max(
            step_limits(parse_model_config(MODELS[FEW_MODEL]), args.few, args.context, rate, flops)
        )
        print(
            f"\n| {FEW_MODEL}, {args.few} rows, products fetch | milliseconds | share of the limit |"
        )
        print("|---|---|---|")
        for name, ms in few_ms(args.few, args.context).items():
            print(f"| {name.replace('_', ' ')} | {ms:.3f} | {least * 1e3 / ms:.0%} |")
            figures[f"{name}_ms"] = ms
    finish(**figures)


if __name__ == "__main__":
    main()
