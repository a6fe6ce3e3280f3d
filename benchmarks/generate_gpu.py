"""Output tokens a second on one GPU, against vLLM: random weights, ends of sequences ignored.

    python benchmarks/generate_gpu.py [--vllm PYTHON] [--rounds N] [--shape Qwen3-0.6B] [--workloads batch_128 …]

Each engine has the GPU to itself: ours runs, then vLLM, then ours again, each in a process of its own and on the same
work. `--vllm` is a Python that has vLLM; without it ours runs alone. For shapes of Qwen3.5, install the plugin
`benchmarks/vllm_qwen3_5` beside vLLM. Start-up is from the start of the process to its
first token, with the weights of Qwen3-0.6B on local disk; those of other shapes are drawn by each engine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from model_shapes import MODELS, measure_bandwidth, step_limits
from peer import ROOT, finish, median

WORKER = ROOT / "benchmarks" / "generation.py"
WORKLOADS = ("batch_128", "batch_256", "groups", "mixed")
STORED = "Qwen3-0.6B"  # the shape whose weights are written to a file


class Worker:
    def __init__(self, python: str, engine: str, model: Path, *options: object) -> None:
        start = time.perf_counter()
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        self.process = subprocess.Popen(
            [python, WORKER, engine, model, *map(str, options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.read()
        self.startup = time.perf_counter() - start

    def read(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        sys.exit(f"{self.process.args[2]} ended")

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)

    def run(self, **command: object) -> float:
        """Tokens a second."""
        answer = self.ask(**command)
        return answer["tokens"] / answer["seconds"]

    def ask(self, **command: object) -> dict:
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.read()


def write_model(directory: Path, shape: str) -> None:
    (directory / "config.json").write_text(json.dumps(MODELS[shape]))
    if shape != STORED:
        return
    import torch
    from safetensors.torch import save_file

    from hone.models.families import parse_model_config
    from hone.models.hf import hf_tensors
    from hone.models.transformer import Transformer

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Transformer(parse_model_config(MODELS[shape]))
    torch.set_default_dtype(torch.float32)
    for name, parameter in model.named_parameters():
        torch.nn.init.ones_(parameter) if "norm" in name else torch.nn.init.normal_(
            parameter, 0, 0.02
        )
    save_file(
        {name: tensor.contiguous().cpu() for name, tensor in hf_tensors(model)},
        directory / "model.safetensors",
    )


def limit(name: str, shape: str, rate: float) -> float:
    """Tokens a second if a step did nothing but read the weights and every key and value once (a group's prompt once
    for the group): what the memory's bandwidth allows."""
    from generation import workload

    from hone.models.families import parse_model_config

    spec = parse_model_config(MODELS[shape])
    work = workload(name)
    shared = 16 if name == "groups" else 1
    seconds = 0.0
    for step in range(max(work.outputs)):
        running = [(len(p), n) for p, n in zip(work.prompts, work.outputs, strict=True) if n > step]
        tokens = sum(length / shared + step for length, _ in running)
        seconds += step_limits(spec, len(running), tokens / len(running), rate, 1.0)[0]
    return sum(work.outputs) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", help="a Python that has vLLM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=MODELS, default=STORED)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), arguments.shape)
        rate = measure_bandwidth()
        print(f"memory: {rate / 1e12:.2f} TB/s", flush=True)
        results: dict[str, dict[str, list[float]]] = {name: {} for name in arguments.workloads}
        figures: dict[str, float | str] = {"shape": arguments.shape}
        for phase, engine in enumerate(("ours", "vllm", "ours") if arguments.vllm else ("ours",)):
            worker = Worker(
                arguments.vllm if engine == "vllm" else sys.executable, engine, Path(directory)
            )
            print(f"{engine}: {worker.startup:.1f} s to the first token", flush=True)
            figures[f"{engine}_startup_s" if phase < 2 else "ours_second_startup_s"] = (
                worker.startup
            )
            for name in arguments.workloads:
                for logprobs in (True, False) if engine == "vllm" else (True,):
                    speeds = [
                        worker.run(workload=name, logprobs=logprobs, seed=i)
                        for i in range(arguments.rounds + 1)
                    ]
                    label = engine if logprobs else f"{engine} without logprobs"
                    # The first is for warming up
                    results[name].setdefault(label, []).extend(speeds[1:])
                    print(f"{label}, {name}: {median(speeds[1:]):,.0f} tokens/s", flush=True)
            worker.end()
        for name, of_engines in results.items():
            most = limit(name, arguments.shape, rate)
            for label, speeds in of_engines.items():
                share = f"{median(speeds) / most:4.0%} of the memory's {most:,.0f}"
                print(
                    f"{name:>10} {label:>22}: {median(speeds):>9,.0f} tokens/s  {share}  {[round(s) for s in speeds]}"
                )
                figures[f"{name}_{label}".replace(" ", "_")] = median(speeds)
    finish(**figures)


if __name__ == "__main__":
    main()
