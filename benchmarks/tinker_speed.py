"""Steps of clients of `hone tinker`, through Tinker's SDK, against a step of `rl` with the same work.

    python benchmarks/tinker_speed.py [--shape Qwen3-0.6B] [--clients 1 4] [--steps 12] [--no-rl]
        [--no-merge]

A client's step is that of RL with LoRA of rank 32: 128 samples (16 prompts of 37 tokens, 8 of each, 128 tokens), one
forward_backward with importance_sampling, one optim_step, and weights saved for the next samples. Clients are processes
of their own, with an adapter each. `rl` takes the same step with its own loop. Random weights; the first steps, which
compile and capture, do not count.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from model_shapes import write_shape
from peer import finish
from tinker_server import serve_tinker

PROMPTS, GROUP, PROMPT, COMPLETION, RANK = 16, 8, 37, 128, 32
WARM_UP = 5  # steps: by then each of the slots of snapshots was filled


def run_client(base: str, steps: int, seed: int, completion: int) -> None:
    """Take steps through the SDK; print their times as JSON."""
    import tinker
    from tinker import types

    service = tinker.ServiceClient()
    training = service.create_lora_training_client(
        base, rank=RANK, seed=seed, train_unembed=False
    ).result()
    draw = np.random.default_rng(seed)
    params = types.SamplingParams(max_tokens=completion, stop=[])
    sampler = training.save_weights_and_get_sampling_client().result()
    rows = []
    for _ in range(steps):
        begun = time.perf_counter()
        prompts = draw.integers(3, 60, (PROMPTS, PROMPT)).tolist()
        promised = [
            sampler.sample(types.ModelInput.from_ints(ids), GROUP, params) for ids in prompts
        ]
        sampled = [one.result().sequences for one in promised]
        generated = time.perf_counter()
        data = []
        for ids, group in zip(prompts, sampled, strict=True):
            for one in group:
                whole = [*ids, *one.tokens]
                before = [0.0] * (len(ids) - 1)
                numbers = {
                    "logprobs": before + list(one.logprobs),
                    "advantages": before + [float(draw.normal())] * len(one.tokens),
                }
                data.append(
                    types.Datum(
                        model_input=types.ModelInput.from_ints(whole[:-1]),
                        loss_fn_inputs={
                            "target_tokens": types.TensorData(data=whole[1:], dtype="int64"),
                            **{
                                name: types.TensorData(data=values, dtype="float32")
                                for name, values in numbers.items()
                            },
                        },
                    )
                )
        passed = training.forward_backward(data, "importance_sampling")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-5))
        saved = training.save_weights_and_get_sampling_client()
        passed.result(), stepped.result()
        trained = time.perf_counter()
        sampler = saved.result()
        ended = time.perf_counter()
        rows.append([ended - begun, generated - begun, trained - generated, ended - trained])
    print(json.dumps(rows))


def serve_and_measure(args: argparse.Namespace, model: Path, work: Path) -> dict[int, dict]:
    options = ["--model.random-init", "--max-model-len", 1024]
    if args.no_merge:
        options += ["--no-merge", "--sampling-adapters", max(args.clients)]
    found = {}
    with serve_tinker(model, work, *options) as environment:
        for clients in args.clients:
            words = [sys.executable, __file__, "--client", str(model)]
            words += ["--steps", str(args.steps), "--completion", str(args.completion)]
            processes = [
                subprocess.Popen(
                    [*words, "--seed", str(i)], env=environment, stdout=subprocess.PIPE, text=True
                )
                for i in range(clients)
            ]
            outputs = [process.communicate()[0] for process in processes]
            if any(process.returncode for process in processes):
                sys.exit("tinker_speed: a client failed")
            rows = [row for one in outputs for row in json.loads(one.splitlines()[-1])[WARM_UP:]]
            step, sample, train, save = (statistics.median(values) for values in zip(*rows))
            found[clients] = {
                "step_s": step,
                "sample_s": sample,
                "train_s": train,
                "save_s": save,
                "steps_per_s": clients / step,
            }
            print(clients, found[clients], file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="Qwen3-0.6B")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--completion", type=int, default=COMPLETION)
    parser.add_argument("--no-rl", action="store_true")
    parser.add_argument("--no-merge", action="store_true", help="as of `hone tinker`")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        return run_client(args.client, args.steps, args.seed, args.completion)
    with tempfile.TemporaryDirectory(prefix="tinker_speed") as directory:
        work = Path(directory)
        write_shape(work / "model", args.shape)
        found = serve_and_measure(args, work / "model", work)
    figures: dict[str, float | str] = {"shape": args.shape, "samples": PROMPTS * GROUP}
    for clients, times in found.items():
        figures |= {f"{name}_{clients}": value for name, value in times.items()}
    first, last = min(found), max(found)
    figures["throughput_ratio"] = found[last]["steps_per_s"] / found[first]["steps_per_s"]
    if not args.no_rl:
        import rl_gpu

        options = ("--trainer.lora.rank", str(RANK))
        step = rl_gpu.measure("0.6B 128 x (37+128)", 6, options)["step_s"]
        figures |= {"rl_step_s": step, "ratio_to_rl": found[first]["step_s"] / step}
    finish(**figures)


if __name__ == "__main__":
    main()
