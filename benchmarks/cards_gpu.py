"""What fits on a card: `rl` by model, way of training and size of the card, as estimated and as measured.

    python benchmarks/cards_gpu.py [--models Qwen3-0.6B …] [--ways full lora …] [--cards 16 24 …] [--steps n]

Each cell is a run of `rl` on random weights, 128 rollouts of 256 + 512 tokens a step in groups of 16, in a process that
may use no more of the GPU than such a card has (HONE_GPU_GIB). Nothing else may be on the GPU. `full` and `lora` are
each the first of several settings that fits the card by the estimate; cells that fit by none are listed without a run.
`--rollouts`, `--prompt` and `--completion` shorten a run that is to prove that a model fits.

A line of JSON a cell: the settings, the estimate (`needs_gib`), what was in use without the keys and values of further
sequences (`used_gib`, with memory that torch keeps for later), what torch had allocated of it (`allocated_gib`; CUDA's
own memory is not in it), sequences that decode at once, seconds of a step, tokens/s of decoding and training, and the
difference between the logprobs of sampler and trainer.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from model_shapes import MODELS, write_shape
from peer import ROOT, finish, median, with_tasks

SYSTEM = 7  # tokens of a prompt beside the text
GIB = 2**30
SHORT_STATE = ("--trainer.optim.state-dtype", "bfloat16")
OFFLOAD = (*SHORT_STATE, "--trainer.optim.offload")
LORA = ("--trainer.lora.rank", "16")
NO_MERGE = (*LORA, "--trainer.lora.no-merge")
EIGHT_BIT = (*LORA, "--trainer.lora.base-bits", "8")
# Settings of each way, the fastest first.
WAYS = {
    "full": {"": (), "moments in bf16": SHORT_STATE, "moments in bf16, offload": OFFLOAD},
    "lora": {"": LORA, "not merged": NO_MERGE, "base in 8 bits": EIGHT_BIT},
    "offload": {"moments in bf16, offload": OFFLOAD},
    "no-merge": {"not merged": NO_MERGE},
    "8-bit": {"base in 8 bits": EIGHT_BIT},
}
GOOD_SEQUENCES = 16  # a setting with fewer at once is taken only if there is no other


def list_words(model: Path, run: Path, args: argparse.Namespace) -> list[str]:
    characters = args.prompt - SYSTEM
    task = {"texts": "generated", "min_chars": characters, "max_chars": characters}
    words = ["--model.name", str(model), "--output-dir", str(run)]
    words += ["--orchestrator.env", json.dumps({"id": "any_text", "args": task})]
    words += ["--orchestrator.batch-size", str(args.rollouts)]
    words += ["--orchestrator.rollouts-per-example", "16"]
    words += ["--orchestrator.sampling.max-tokens", str(args.completion)]
    words += ["--orchestrator.no-drop-zero-signal", "--seq-len", str(args.prompt + args.completion)]
    return [*words, "--max-steps", str(args.steps), "--log-interval", "1"]


def choose_setting(words: list[str], model: Path, way: str, card: int):
    """Return (name, words, need, sequences at once) of the first setting that fits a card, else of the last."""
    from hone.config.base import load_config
    from hone.config.rl_config import RLConfig
    from hone.launch.card_fit import CARD_GIB, need_on
    from hone.models.families import parse_model_config
    from hone.models.spec import read_model_config

    spec = parse_model_config(read_model_config(model))
    found = []
    for name, more in WAYS[way].items():
        need = need_on(load_config(RLConfig, [*words, *more]), spec, 2, card)
        found.append((name, more, need, need.sequences_at_once(CARD_GIB[card])))
    for least in (GOOD_SEQUENCES, 1):
        for setting in found:
            if setting[-1] >= least:
                return setting
    return found[-1]


class GpuMemory:
    """The largest memory in use on the GPU while a block runs, in bytes."""

    def __enter__(self):
        words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        self.peak = 0
        self.process = subprocess.Popen([*words, "-lms", "100"], stdout=subprocess.PIPE, text=True)
        self.reader = threading.Thread(target=self._read)
        self.reader.start()
        return self

    def _read(self) -> None:
        for line in self.process.stdout:
            self.peak = max(self.peak, int(line) * 2**20)

    def __exit__(self, *_) -> None:
        self.process.terminate()
        self.process.wait()
        self.reader.join()


def run_rl(words: list[str], name: str, env: dict[str, str]) -> tuple[int, str]:
    """Run `rl`; return the largest memory in use on the GPU in bytes, and the error if it failed.

    The log of a failed run is written as NAME.log into the directory $OUT, if that is set.
    """
    command = [sys.executable, "-m", "hone", "rl", *words]
    with GpuMemory() as memory:
        done = subprocess.run(
            command, cwd=ROOT, env=with_tasks() | env, capture_output=True, text=True
        )
    if not done.returncode:
        return memory.peak, ""
    if (folder := os.environ.get("OUT")) is not None:
        (Path(folder) / f"{name}.log").write_text(done.stdout + done.stderr)
    return memory.peak, (done.stderr.strip().splitlines() or ["no message"])[-1][:300]


def median_times(rows: list[dict]) -> dict[str, float]:
    """Return the median seconds of a step and its parts, without the first one's compilation."""
    return {
        key: median([row[key] for row in rows[1:] or rows])
        for key in ("time/step", "time/generate", "time/train")
    }


def run_cell(model: Path, way: str, card: int, args: argparse.Namespace) -> dict:
    from hone.launch.card_fit import CARD_GIB
    from hone.trainer.memory_plan import CONTEXT_BYTES

    with tempfile.TemporaryDirectory(prefix="cards_gpu") as directory:
        run = Path(directory) / "run"
        words = list_words(model, run, args)
        name, more, need, at_once = choose_setting(words, model, way, card)
        cell = {
            "card_gb": card,
            "way": way,
            "setting": name,
            "needs_gib": need.least_bytes / GIB,
            "fits": at_once > 0,
        }
        if not at_once:
            return cell
        limit = {"HONE_GPU_GIB": str(CARD_GIB[card])}
        peak, error = run_rl([*words, *more], f"{model.name}-{way}-{card}", limit)
        if error:
            return cell | {"fits": False, "in_use_gib": peak / GIB, "error": error}
        rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    cache = rows[-1]["perf/kv_cache"]
    one_sequence = need.sequence / GIB - cache
    used = peak / GIB + one_sequence
    allocated = rows[-1]["perf/peak_memory"] + one_sequence
    middle = median_times(rows)
    trained = args.rollouts * args.completion + args.rollouts // 16 * args.prompt
    return cell | {
        "at_once": min(args.rollouts, int(cache * GIB // need.sequence)),
        "used_gib": used,
        "estimate_over_used": need.least_bytes / GIB / used,
        "allocated_gib": allocated,
        "estimate_over_allocated": (need.least_bytes - CONTEXT_BYTES) / GIB / allocated,
        "in_use_gib": peak / GIB,
        "step_s": middle["time/step"],
        "decoded_tokens_per_s": args.rollouts * args.completion / middle["time/generate"],
        "trained_tokens_per_s": trained / middle["time/train"],
        "mismatch_kl": rows[0]["mismatch_kl/mean"],
        "reward_first": rows[0]["reward/mean"],
        "reward_last": rows[-1]["reward/mean"],
    }


def write_weights(directory: Path, name: str) -> None:
    """Write a model's directory with random weights in bf16; run in a process of its own."""
    import torch

    from hone.models.families import parse_model_config
    from hone.models.hf import empty_model, save_model

    source = directory.with_name("shape")
    write_shape(source, name)
    model = empty_model(parse_model_config(MODELS[name]), torch.bfloat16, "cuda")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in key else parameter.normal_(0.0, 0.02)
    save_model(model, source, directory)


def write_model(directory: Path) -> None:
    """Write a directory, named like the model, with random weights; a process of its own does it."""
    words = [sys.executable, __file__, "--models", directory.name, "--write", str(directory)]
    subprocess.run(words, check=True, env=with_tasks())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["Qwen3-0.6B", "Qwen3-4B"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["full", "lora"])
    parser.add_argument("--cards", nargs="+", type=int, default=[16, 24, 32, 48, 80, 141])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--completion", type=int, default=512)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write is not None:
        write_weights(args.write, args.models[0])
        return
    for name in args.models:
        with tempfile.TemporaryDirectory(prefix="cards_gpu") as directory:
            model = Path(directory) / name
            write_model(model)
            for way in args.ways:
                for card in args.cards:
                    finish(model=name, **run_cell(model, way, card, args))


if __name__ == "__main__":
    main()
