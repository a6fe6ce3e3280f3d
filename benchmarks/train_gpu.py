"""Training on one GPU, against transformers and TRL: Qwen3-0.6B's shape, random weights, bf16, AdamW (`training.py`).

    python benchmarks/train_gpu.py [--trl PYTHON] [--only ours]

Each trainer has the GPU to itself, in a process of its own, and the same tokens: RL on 128 sequences with 256 targets
each, SFT on documents of 512 to 2,048 tokens, 65,536 a step, RL on 128 sequences in groups of 16 that have a prompt in
common. `--trl` is a Python that has TRL and Liger kernels, whose best of two packings counts. MFU: FLOPs that a step
needs (causal attention, the head where there is a target, three times the forward; what is computed twice counts once),
over the rate of a large matrix product in the same process.
"""

import argparse
import json
import os
import subprocess
import sys

from peer import ROOT, finish

WORKER = ROOT / "benchmarks" / "training.py"
RL, SFT = "rl, ours", "sft, ours, 2 x 32,768"
FULL, LORA = "sft, ours, 2 x, recomputing", "sft, LoRA, 2 x, recomputing"
SMALL, SMALL_LORA = "sft, ours, 16 x 4,096", "sft, LoRA, 16 x 4,096"
OURS = {
    RL: ("rl", "ours", 32_896),
    SFT: ("sft", "ours", 2),
    "sft, ours, 1 x 65,536": ("sft", "ours", 1),
    "sft, LoRA, 2 x 32,768": ("sft", "ours", 2, "lora"),
    FULL: ("sft", "ours", 2, "recompute"),
    LORA: ("sft", "ours", 2, "lora", "recompute"),
    SMALL: ("sft", "ours", 16),
    SMALL_LORA: ("sft", "ours", 16, "lora"),
}
# Prompt and completion; the prompt is computed once, or once a sequence
GROUPS = [(512, 128), (128, 512)]
for prompt, completion in GROUPS:
    words = ("groups", "ours", prompt, completion, 16)
    OURS[f"groups {prompt} + {completion}, shared"] = words
    OURS[f"groups {prompt} + {completion}, repeated"] = (*words, "repeated")
EAGER, COMPILED = "rl, transformers", "rl, transformers, compiled"
PEERS = {EAGER: ("rl", "hf"), COMPILED: ("rl", "hf_compiled")}
TRL = {
    "sft, TRL, wrapped": ("sft", "trl", "sdpa", "wrapped"),
    "sft, TRL, bfd": ("sft", "trl", "sdpa", "bfd"),
}
PARAMETERS, BYTES = 596e6, 4.17e12  # of the model; a second, of a large copy


def run(python: str, words: tuple) -> dict | None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [python, str(WORKER), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        print(f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1:]}", flush=True)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def floor(tokens: int, flops: float, rate: float) -> dict[str, float]:
    """Seconds that a step cannot go below: arithmetic, the optimiser's bytes, activations read and written once."""
    # Norms, heads and SwiGLU, forward and back
    element_wise = 28 * tokens * 2 * (1024 * 24 + 4096 * 8 + 6144 * 9)
    return {
        "products and attention": flops / rate,
        "optimiser": PARAMETERS * (2 + 3 * 8 + 2) / BYTES,
        "norms, heads, SwiGLU": element_wise / BYTES,
        "logits in fp32, once": 4 * 151_936 * tokens * 3 / BYTES,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl")
    parser.add_argument("--only", choices=["ours"])
    options = parser.parse_args()
    wanted = {name: (sys.executable, words) for name, words in OURS.items()}
    if options.only is None:
        wanted |= {name: (sys.executable, words) for name, words in PEERS.items()}
        wanted |= {name: (options.trl, words) for name, words in TRL.items() if options.trl}
    found: dict[str, dict] = {}
    print(f"{'':30} {'tokens/s':>9} {'step':>8} {'MFU':>6} {'memory':>9} {'first step':>10}")
    for name, (python, words) in wanted.items():
        result = run(python, words)
        if result is None:
            continue
        found[name] = result
        mfu = (
            result["flops_per_second"] / result["matrix_rate"]
            if "matrix_rate" in result
            else float("nan")
        )
        print(
            f"{name:30} {result['tokens_per_second']:9,.0f} {result['step'] * 1e3:5.0f} ms {mfu:6.1%} "
            f"{result['memory_gib']:5.1f} GiB {result['first_step']:8.1f} s",
            flush=True,
        )
    for name in (RL, SFT):
        result = found[name]
        laps = ", ".join(f"{lap} {1e3 * seconds:.0f}" for lap, seconds in result["laps"].items())
        tokens = result["tokens_per_second"] * result["step"]
        parts = floor(
            int(tokens), result["flops_per_second"] * result["step"], result["matrix_rate"]
        )
        floors = ", ".join(f"{part} {1e3 * seconds:.0f}" for part, seconds in parts.items())
        print(f"{name}: {laps} ms; floor {1e3 * sum(parts.values()):.0f} ms: {floors}")
    best = max(
        (found[name]["tokens_per_second"] for name in TRL if name in found), default=float("nan")
    )
    finish(
        ours_rl=found[RL]["tokens_per_second"],
        ours_sft=found[SFT]["tokens_per_second"],
        ours_sft_mfu=found[SFT]["flops_per_second"] / found[SFT]["matrix_rate"],
        peer_rl=max(
            (found[n]["tokens_per_second"] for n in PEERS if n in found), default=float("nan")
        ),
        peer_sft=best,
        ratio=found[SFT]["tokens_per_second"] / best,
        lora_memory=found[LORA]["memory_gib"] / found[FULL]["memory_gib"],
        lora_memory_small=found[SMALL_LORA]["memory_gib"] / found[SMALL]["memory_gib"],
    )


if __name__ == "__main__":
    main()
