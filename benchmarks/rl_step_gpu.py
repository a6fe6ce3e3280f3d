"""Seconds of an RL step on one GPU, against TRL's GRPOTrainer with transformers' and with vLLM's generation.

    python benchmarks/rl_step_gpu.py --trl PYTHON [--shapes NAME …] [--peers hf vllm] [--steps 8] [--rounds 1]

The work of all: 8 prompts x 16 rollouts of one length, full fine-tuning in bf16 from the same random weights, one
optimiser step, each in a process of its own with the GPU to itself; ours runs before and after the peers. PYTHON has
TRL, and vLLM for that peer. Medians from the third step on.
"""

import argparse
import os
import tempfile
from pathlib import Path

from peer import PEER, finish, median, run_json
from rl_gpu import SHAPES, SYSTEM, measure
from serve_gpu import with_names
from shapes_gpu import MODELS, write_shape
from training import our_model

MICRO = {"0.6B 128 x (37+128)": 128, "4B 128 x (222+498)": 8}  # rollouts in a pass of TRL's: what fits the card


def write_weights(directory: Path, name: str) -> None:
    """The model of that shape with random weights, which TRL reads, and a text for each of its tokens."""
    import torch

    from hone.models.hf import save_model

    write_shape(directory / "described", name)
    save_model(our_model(MODELS[name]), directory / "described", directory / "model")
    torch.cuda.empty_cache()  # the GPU is for those that are measured
    with_names(directory / "model", MODELS[name]["vocab_size"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=MICRO, default=list(MICRO))
    parser.add_argument("--trl", help="a Python that has TRL")
    parser.add_argument("--peers", nargs="*", choices=["hf", "vllm"], default=["hf", "vllm"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1"}
    for name in args.shapes:
        model, _, _, prompt, new = SHAPES[name]
        ours: list[float] = []
        theirs: dict[str, list[float]] = {peer: [] for peer in args.peers}
        with tempfile.TemporaryDirectory(prefix="rl_step_gpu") as home:
            write_weights(Path(home), model)
            for _ in range(args.rounds):
                ours.append(measure(name, args.steps, ())["step_s"])
                for peer in args.peers:
                    found = run_json(
                        args.trl,
                        PEER,
                        "grpo-gpu",
                        Path(home) / "model",
                        peer,
                        prompt - SYSTEM,
                        new,
                        MICRO[name],
                        args.steps,
                    )
                    theirs[peer] += found["seconds"][2:]
                    print(f"TRL with {peer}: {found}", flush=True)
                ours.append(measure(name, args.steps, ())["step_s"])
        figures = {f"peer_{peer}_step_s": median(seconds) for peer, seconds in theirs.items()}
        best = min(figures.values(), default=float("nan"))
        print(f"{name}: ours {[round(x, 3) for x in ours]}, {figures}", flush=True)
        finish(shape=name, ours_step_s=median(ours), **figures, ratio=best / median(ours))


if __name__ == "__main__":
    main()
