"""One decode step of the engine on a GPU at a length, by batch and by the parts that each sequence is divided into.

    python benchmarks/kernels/decode.py [--models NAME …] [--lengths 128 768] [--batches 1 8 32] [--parts -1 0 2 8]
        [--uneven]

Random weights, bf16. A step is a CUDA graph that is replayed, so nothing of the host counts; parts 0 reads each
sequence in one piece, -1 as the engine chooses. With --uneven lengths are those of texts that end with the same
probability after each token, with that mean, four times as much at most. What is measured is in milliseconds, the
median of three times twenty steps.
"""

import argparse
from typing import TYPE_CHECKING

import _path  # noqa: F401
from model_shapes import MODELS
from peer import finish, median
from training import gpu_seconds, our_model

if TYPE_CHECKING:
    import torch

STEPS, REPEATS = 20, 3


def lengths(count: int, mean: int, is_uneven: bool) -> "torch.Tensor":
    import torch

    if not is_uneven:
        return torch.full((count,), mean)
    drawn = torch.empty(count).exponential_(1 / mean, generator=torch.Generator().manual_seed(1))
    return drawn.clamp(8, 4 * mean).long()


def at_length(engine, length: int, is_uneven: bool = False) -> None:
    """All slots have so many tokens, in pages all over the cache."""
    import torch

    from hone.kernels import row_state as column

    slots, pages = engine.slots, engine.pool.pages - 1
    slots.state[:, column.LENGTH] = lengths(len(slots.state), length, is_uneven).cuda()
    slots.state[:, column.LAST] = 5
    slots.state[:, column.COUNT], slots.state[:, column.MAX], slots.state[:, column.DONE] = (
        0,
        10**6,
        0,
    )
    slots.active[:-1] = torch.arange(len(slots.active) - 1, device="cuda")
    slots.table.copy_(
        (torch.arange(slots.table.numel(), device="cuda") % pages + 1).view_as(slots.table)
    )


def step_ms(engine, batch: int, length: int, parts: int = -1, is_uneven: bool = False) -> float:
    from hone.engine.graphs import Key, pad_rows
    from hone.engine.token_sampler import TokenSampler
    from hone.kernels import row_state as column

    graphs, rows = engine.graphs, pad_rows(batch)
    parts = graphs._choose_parts(rows, length) if parts < 0 else parts
    at_length(engine, length, is_uneven)
    longest = engine.slots.state[:rows, column.LENGTH].max().item()
    graphs.key = Key(
        rows, TokenSampler.PLAIN, False, 0, parts, graphs.is_long(rows, longest, parts)
    )
    graphs.run(2)  # captures
    times = []
    for _ in range(REPEATS):
        at_length(engine, length, is_uneven)
        times.append(gpu_seconds(lambda: graphs.run(STEPS)) * 1e3 / STEPS)
    return median(times)


def main() -> None:
    import torch

    from hone.engine.engine import Engine

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["Qwen3-0.6B", "Qwen3-4B"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 768])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--parts", type=int, nargs="+", default=[-1, 0, 2, 8])
    parser.add_argument("--uneven", action="store_true")
    args = parser.parse_args()
    figures = {}
    print("| model | length | parts | " + " | ".join(map(str, args.batches)) + " |")
    print("|---" * (3 + len(args.batches)) + "|")
    for name in args.models:
        model = our_model(MODELS[name])
        longest = max(args.lengths) * (4 if args.uneven else 1) + 256
        engine = Engine(
            model, max_batch_size=max(args.batches), max_model_len=longest, kv_cache_gib=16
        )
        with torch.no_grad():
            for length in args.lengths:
                for parts in args.parts:
                    found = [
                        step_ms(engine, batch, length, parts, args.uneven) for batch in args.batches
                    ]
                    print(
                        f"| {name} | {length} | {parts} |",
                        *(f"{ms:.3f} |" for ms in found),
                        flush=True,
                    )
                    figures |= {
                        f"{name}_{length}_{parts}_{b}": ms
                        for b, ms in zip(args.batches, found, strict=True)
                    }
        del engine, model
        torch.cuda.empty_cache()
    finish(**figures)


if __name__ == "__main__":
    main()
