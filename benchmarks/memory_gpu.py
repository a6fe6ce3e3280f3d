"""Memory of a training step on one GPU, as estimated before and as measured: RL and SFT, full and LoRA, by shape.

    python benchmarks/memory_gpu.py [--models Qwen3-0.6B Qwen3-4B] [--tokens 8192 16384]

Random weights, bf16, AdamW. RL: groups of 16 with prompts of 128 and completions of 512 tokens; SFT: conversations of
1,024 tokens, all of them targets. One micro-batch a step, two steps; nothing else is on the device. A line of JSON a
row: GiB after the model, after the optimiser's state, and the peaks of forward, backward and optimiser.
"""

import argparse
import gc

from model_shapes import MODELS
from peer import finish

GIB = 2**30


def measure(name: str, kind: str, is_lora: bool, tokens: int, recomputes: bool) -> dict:
    import torch

    from hone.config.lora_config import LoRAConfig
    from hone.config.rl_config import TrainerConfig
    from hone.models.families import parse_model_config
    from hone.models.hf import empty_model
    from hone.trainer.memory_estimate import estimate_rl
    from hone.trainer.rl.trainer import PolicyTrainer

    spec = parse_model_config(MODELS[name])
    model = empty_model(spec, torch.bfloat16, "cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)
    found = {"weights": torch.cuda.memory_allocated() / GIB}
    lora = LoRAConfig(rank=16) if is_lora else None
    config = TrainerConfig(
        lora=lora, micro_batch_tokens=tokens, activation_checkpointing=recomputes
    )
    trainer = PolicyTrainer(model, config, max_steps=3)
    found["with_state"] = torch.cuda.memory_allocated() / GIB

    def lap(part: str) -> None:
        torch.cuda.synchronize()
        found[part] = max(found.get(part, 0.0), torch.cuda.max_memory_allocated() / GIB)
        torch.cuda.reset_peak_memory_stats()

    trainer.laps = lap
    step = rl_step if kind == "rl" else sft_step
    for number in (1, 2):
        torch.cuda.reset_peak_memory_stats()
        step(trainer, tokens, number)
    expected = estimate_rl(spec, config, tokens, torch.bfloat16.itemsize, tokens)
    peak = max(found[part] for part in ("forward", "backward", "optimizer"))
    return {
        "model": name,
        "kind": kind,
        "lora": is_lora,
        "tokens": tokens,
        "recomputes": recomputes,
        **{part: round(value, 2) for part, value in found.items()},
        "peak": round(peak, 2),
        "estimate": round(expected.peak_bytes / GIB, 2),
        "ratio": round(expected.peak_bytes / GIB / peak, 3),
    }


def measure_cache(name: str) -> dict:
    import torch

    from hone.engine.cache import KVCache
    from hone.models.families import parse_model_config

    spec, tokens = parse_model_config(MODELS[name]), 128 * 1024
    before = torch.cuda.memory_allocated()
    cache = KVCache(spec, torch.bfloat16, torch.device("cuda"), tokens)
    found = torch.cuda.memory_allocated() - before
    expected = tokens * spec.cache_numbers * torch.bfloat16.itemsize
    del cache
    return {
        "model": name,
        "kind": "keys and values",
        "tokens": tokens,
        "peak": found / GIB,
        "ratio": expected / found,
    }


def rl_step(trainer, tokens: int, number: int) -> None:
    import random

    from hone.records import Batch, Sample

    draw, samples = random.Random(number), []
    vocabulary, left = range(trainer.model.spec.vocab_size), tokens
    while left >= 128 + 16 * 512:
        prompt = draw.choices(vocabulary, k=128)
        for i in range(16):
            ids = prompt + draw.choices(vocabulary, k=512)
            samples.append(
                Sample(
                    ids, [False] * 128 + [True] * 512, [0.0] * 128 + [-11.9] * 512, (-1.0) ** i, 1.0
                )
            )
        left -= 128 + 16 * 512
    for i in range(left // 512):
        ids = draw.choices(vocabulary, k=512)
        samples.append(
            Sample(ids, [False] * 128 + [True] * 384, [0.0] * 128 + [-11.9] * 384, (-1.0) ** i, 1.0)
        )
    assert len(trainer._split_samples(samples)) == 1, "more than one micro-batch"
    trainer.step(Batch(number, samples))


def sft_step(trainer, tokens: int, number: int) -> None:
    import random

    from hone.trainer.loss import cross_entropy_sum
    from hone.trainer.packing import pack_sequences

    draw = random.Random(number)
    vocabulary = range(trainer.model.spec.vocab_size)
    rows = [draw.choices(vocabulary, k=1025) for _ in range(tokens // 1024)]
    packed = pack_sequences(rows, [[True] * len(row) for row in rows], trainer.device)
    trainer.laps("data")
    total = cross_entropy_sum(packed, trainer.model) / tokens
    trainer.laps("forward")
    total.backward()
    trainer.laps("backward")
    trainer.optimizer.step(1e-6)
    trainer.laps("optimizer")


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["Qwen3-0.6B", "Qwen3-4B"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8704, 16896])
    args = parser.parse_args()
    for name in args.models:
        finish(**measure_cache(name))
        for kind in ("rl", "sft"):
            for is_lora in (False, True):
                for tokens in args.tokens:
                    for recomputes in (False, True) if tokens == args.tokens[-1] else (False,):
                        finish(**measure(name, kind, is_lora, tokens, recomputes))
                        gc.collect()
                        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
