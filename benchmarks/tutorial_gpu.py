"""The tutorial's own configuration on one GPU, with as much of its memory as a small card has.

`vf-rl @ configs/vf-rl/reverse-text.toml` (LoRA, 128 rollouts of 128 tokens, enforce_eager) with random weights of
Qwen3-0.6B's shape and a reward made of the text, so that no completion ends early and every group has a signal.

usage: python benchmarks/tutorial_gpu.py [--gib 16] [--steps 100]
"""

import argparse
import os
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import torch
from peer import ROOT, finish
from shapes_gpu import write_shape

import hone
from hone.launch.lab import TEMPLATES
from hone.models.hf import load_model, save_model

TEXT = {"texts": "generated", "min_chars": 30, "max_chars": 30}  # and 7 tokens of the template: 37


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gib", type=float, default=16.0, help="of the device's memory that the process may take"
    )
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "benchmarks"))  # any_text
    total = torch.cuda.get_device_properties(0).total_memory
    context = 0.6 * 2**30  # of CUDA itself, beside what torch hands out
    torch.cuda.set_per_process_memory_fraction((args.gib * 2**30 - context) / total)
    given = tomllib.loads((TEMPLATES / "configs/vf-rl/reverse-text.toml").read_text())
    with tempfile.TemporaryDirectory(prefix="tutorial_gpu") as directory:
        os.chdir(directory)
        shape = Path("shape")
        write_shape(shape, "Qwen3-0.6B")
        model = load_model(shape, random_init=True, seed=0, dtype=torch.bfloat16, device="cpu")
        save_model(model, shape, Path("model"))
        del model
        keys = given["trainer"]["args"] | {
            "max_steps": args.steps,
            "logging_steps": 10,
            "sample_steps": 0,
        }
        flags = given["inference"]["args"] | {
            "gpu_memory_utilization": round((args.gib - 1.0) * 2**30 / total, 3)
        }
        trainer = hone.RLTrainer(
            "model", "any_text", hone.RLConfig(**keys), env_args=TEXT, inference=flags
        )
        start = time.perf_counter()
        rows = trainer.train()
        whole = time.perf_counter() - start
        free, _ = torch.cuda.mem_get_info()
        size = sum(file.stat().st_size for file in trainer.checkpoints[args.steps].iterdir())
    steps = sum(row["time/step"] for row in rows)
    # An end is one of 151,936 tokens
    lengths = sum(row["completion_len/mean"] for row in rows) / len(rows)
    assert lengths > 127, "completions ended early: not the work that is meant"
    finish(
        steps_s=steps,
        startup_s=whole - steps,
        torch_gib=torch.cuda.max_memory_reserved() / 2**30,
        device_gib=(total - free) / 2**30,
        allowed_gib=args.gib,
        checkpoint_mib=size / 2**20,
    )


if __name__ == "__main__":
    main()
