"""What exact numerics cost on one GPU, and that they are exact: by shape of model, random weights.

    python benchmarks/exact_gpu.py [--shapes Qwen3-0.6B Qwen3-4B] [--rollouts 1000] [--lora]

For each shape, exact and fast: logprobs of sampler and trainer that differ (`hone probe`), tokens a second that 128
sequences of 64 + 128 tokens are sampled with, and seconds of an RL step on them, 8 prompts x 16: sampling and training.
Moments of a large model are kept in bfloat16 where a card of 80 GB would not hold them in full.
"""

import argparse
import random
import time

import torch
from peer import finish, median
from shapes_gpu import MODELS
from training import our_model

from hone.config.lora_config import LoRAConfig
from hone.config.rl_config import TrainerConfig
from hone.config.sections import OptimConfig
from hone.engine.engine import Engine
from hone.kernels import numerics
from hone.launch.numerics_probe import probe_model
from hone.models.lora import Merged, lora_modules
from hone.records import Batch, GenerateRequest, Sample, Sampling
from hone.trainer.performance import device_bytes
from hone.trainer.rl.trainer import PolicyTrainer

PROMPT, NEW, GROUPS, MEMBERS = 64, 128, 8, 16
LARGE, ROOMY = 2e9, 100e9  # parameters; bytes of a card


def requests(step: int) -> list[GenerateRequest]:
    draw = random.Random(step)
    prompts = [draw.choices(range(1000, 150_000), k=PROMPT) for _ in range(GROUPS)]
    return [
        GenerateRequest(prompt, Sampling(1.0, NEW, step * 1000 + i * MEMBERS + k), frozenset())
        for i, prompt in enumerate(prompts)
        for k in range(MEMBERS)
    ]


def timed(work):
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    return result, time.perf_counter() - start


def steps(model, lora: bool, count: int = 7) -> dict[str, float]:
    """Medians of the last ones: decoding's tokens a second, seconds of a step and of its parts."""
    is_large = not lora and sum(p.numel() for p in model.parameters()) > LARGE
    is_short = is_large and device_bytes(model.embed.weight.device) < ROOMY
    optim = OptimConfig(state_dtype="bfloat16") if is_short else OptimConfig()
    config = TrainerConfig(lora=LoRAConfig(rank=16) if lora else None, optim=optim)
    trainer = PolicyTrainer(model, config, count)
    if lora:
        for one in lora_modules(model):
            torch.nn.init.normal_(one.B, std=0.01)
    sampled = Merged(model)
    engine = Engine(sampled.model, max_batch_size=128, max_model_len=512, kv_cache_gib=4.0)
    rows: list[dict[str, float]] = []
    for step in range(1, count + 1):
        work = requests(step)
        done, sampling = timed(lambda work=work: engine.generate(work))
        samples = [
            Sample(
                [*r.prompt_ids, *c.ids],
                [False] * PROMPT + [True] * NEW,
                [0.0] * PROMPT + c.logprobs,
                1.0 if i % 2 else -1.0,
                1.0,
            )
            for i, (r, c) in enumerate(zip(work, done, strict=True))
        ]
        values, training = timed(
            lambda step=step, samples=samples: trainer.step(Batch(step, samples))
        )
        sampled.follow_step()
        engine.set_version(step)
        rows.append(
            {
                "sampling_s": sampling,
                "training_s": training,
                "step_s": sampling + training,
                "tokens_per_s": GROUPS * MEMBERS * NEW / sampling,
                "mismatch_kl": values["mismatch_kl/mean"],
                "differ": values.get("exact/differs", float("nan")),
            }
        )
    return {key: median([row[key] for row in rows[2:]]) for key in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=MODELS, default=["Qwen3-0.6B", "Qwen3-4B"])
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--lora", action="store_true")
    args = parser.parse_args()
    figures: dict[str, float] = {}
    for name in args.shapes:
        for mode in ("exact", "fast"):
            numerics.use(mode)
            model = our_model(MODELS[name])
            count = args.rollouts if mode == "exact" else args.rollouts // 10
            found, seconds = timed(lambda model=model, count=count: probe_model(model, count, 200))
            print(
                f"{name} {mode}: {count} rollouts: {found.describe_result()} ({seconds:.0f} s)",
                flush=True,
            )
            found = steps(model, args.lora)
            print(
                f"{name} {mode}: { ({k: float(f'{v:.4g}') for k, v in found.items()}) }", flush=True
            )
            figures |= {
                f"{mode}_{key}": value
                for key, value in found.items()
                if key in ("step_s", "tokens_per_s")
            }
            del model
            torch.cuda.empty_cache()
        print(
            f"{name}: a step in exact takes {figures['exact_step_s'] / figures['fast_step_s']:.2f} of fast",
            flush=True,
        )
    finish(**figures, ratio=figures["exact_step_s"] / figures["fast_step_s"])


if __name__ == "__main__":
    main()
