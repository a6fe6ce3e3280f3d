"""Seconds of an RL step on one GPU, against TRL's GRPOTrainer with transformers' and with vLLM's generation.

    python benchmarks/rl_step_gpu.py [--trl PYTHON] [--shapes NAME …] [--peers hf vllm] [--steps 8] [--rounds 1]

The work of all: 8 prompts x 16 rollouts of one length, full fine-tuning in bf16 from the same random weights, one
optimiser step, each in a process of its own with the GPU to itself; ours runs before and after the peers, and once
where there are none. PYTHON has TRL, and vLLM for that peer. Medians from the third step on. The floor is what the card
needs at the least: weights, keys and values, a group's prompt once, read for each decoded token, and the arithmetic of
training at the rate of a large product.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from model_shapes import MODELS, write_shape
from peer import PEER, finish, median, run_json
from rl_gpu import SHAPES, SYSTEM, measure
from serve_gpu import with_names
from training import our_model

# Rollouts in a pass of TRL's: what fits the card
MICRO = {"0.6B 128 x (37+128)": 128, "4B 128 x (222+498)": 8}


def write_weights(directory: Path, name: str) -> None:
    """The model of that shape with random weights, which TRL reads, and a text for each of its tokens."""
    import torch

    from hone.models.hf import save_model

    write_shape(directory / "described", name)
    save_model(our_model(MODELS[name]), directory / "described", directory / "model")
    torch.cuda.empty_cache()  # the GPU is for those that are measured
    with_names(directory / "model", MODELS[name]["vocab_size"])


def floor(name: str) -> dict[str, float]:
    """Seconds of generating and of training, measured on this card."""
    import torch
    from model_shapes import measure_bandwidth
    from training import matrix_rate

    from hone.models.families import parse_model_config

    model, rollouts, group, prompt, completion = SHAPES[name]
    spec = parse_model_config(MODELS[model])
    weights = spec.parameter_count() * torch.bfloat16.itemsize
    held = (
        rollouts * (prompt / group + completion / 2) * spec.cache_numbers * torch.bfloat16.itemsize
    )
    tokens = rollouts // group * prompt + rollouts * completion
    of_token = spec.flops_per_token(prompt + completion / 2, head=rollouts * completion / tokens)
    return {
        "generate": (completion - 1) * (weights + held) / measure_bandwidth(),
        "train": 3 * of_token * tokens / matrix_rate(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=MICRO, default=list(MICRO))
    parser.add_argument("--trl", help="a Python that has TRL")
    parser.add_argument("--peers", nargs="*", choices=["hf", "vllm"], default=["hf", "vllm"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--floor", choices=SHAPES, help="only print the floor of this shape")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    if args.floor:
        return print(json.dumps(floor(args.floor)))
    peers = args.peers if args.trl else []
    os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1"}
    for name in args.shapes:
        model, _, _, prompt, new = SHAPES[name]
        ours: list[dict] = []
        theirs: dict[str, list[float]] = {peer: [] for peer in peers}
        with tempfile.TemporaryDirectory(prefix="rl_step_gpu") as home:
            if peers:
                write_weights(Path(home), model)
            for _ in range(args.rounds):
                ours.append(measure(name, args.steps, ()))
                for peer in peers:
                    words = (
                        "grpo-gpu",
                        Path(home) / "model",
                        peer,
                        prompt - SYSTEM,
                        new,
                        MICRO[name],
                        args.steps,
                    )
                    found = run_json(args.trl, PEER, *words)
                    theirs[peer] += found["seconds"][2:]
                    print(f"TRL with {peer}: {found}", flush=True)
                if peers:
                    ours.append(measure(name, args.steps, ()))
        figures = {f"peer_{peer}_step_s": median(seconds) for peer, seconds in theirs.items()}
        best = min(figures.values(), default=float("nan"))
        step, generate, train = (
            median([one[f"{key}_s"] for one in ours]) for key in ("step", "generate", "train")
        )
        least = run_json(sys.executable, Path(__file__), "--floor", name)
        print(
            f"{name}: ours {[round(one['step_s'], 3) for one in ours]}, {figures}, floor {least}",
            flush=True,
        )
        figures |= {f"floor_{part}_s": seconds for part, seconds in least.items()}
        finish(
            shape=name,
            ours_step_s=step,
            ours_generate_s=generate,
            ours_train_s=train,
            **figures,
            ratio=best / step,
        )


if __name__ == "__main__":
    main()
