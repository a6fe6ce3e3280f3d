"""Kills the parts of on-policy runs at random moments, and compares with a run that was left alone.

    python -m tests.chaos [--kills 25] [--steps 150] [--seed 0] [--only PART]

A killed server is started again by `rl`, a killed worker of an environment by the orchestrator; a killed orchestrator,
trainer or launcher ends the run, which goes on with `--resume auto`. At the end every run must have its steps, every
group of rollouts must have been trained on once, and the weights must be those of the run left alone, bit for bit. Ends
with one line of JSON; exits with 1 where that is not so. Without --only the launcher is left alone.

With --together the parts are killed by turns, in the same runs: the short form. With --ahead sampling runs a step ahead
of training: weights then depend on timing, and are not compared. With --vllm PYTHON inference is a vLLM, ahead too; now
the server and now the vLLM under it is killed, each time at work. With --gpu the runs are in exact numerics on one GPU,
whose parts take longer to start and are killed later.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file

from hone.child_process import end_with_parent
from hone.run_directory import steps_in
from tests.integration.conftest import processes_now

ROOT = Path(__file__).parents[1]
HONE = [sys.executable, "-P", "-m", "hone"]
TINY = "examples/reverse_text_tiny"
GROUPS, ROLLOUTS = 4, 8
ENVIRONMENT = {
    "id": "reverse-text",
    "args": {"texts": "generated", "min_chars": 4, "max_chars": 10},
    "workers": 1,
}
PARTS = ("inference", "orchestrator", "trainer", "worker", "launcher")
# When a part is killed, from the start or from the kill before, as shares of the time that a run left alone takes: now
# in the start, now at work.
EARLIEST, LATEST = 0.1, 0.7
STEPS_AT_WORK = 3  # after which a vLLM is known to be at work again: two more may have been sampled before its end
RUN_SECONDS = 20.0  # of that time where no run is left alone
GPU = ("--model.numerics", "exact", "--deployment", "processes", "--inference.kv-cache-gib", 4)


def command(out: Path, model: Path, options: argparse.Namespace) -> list[str]:
    words = [
        *HONE,
        "rl",
        "--trainer",
        "@",
        f"{TINY}/rl/train.toml",
        "--orchestrator",
        "@",
        f"{TINY}/rl/orch.toml",
        "--inference",
        "@",
        f"{TINY}/rl/infer.toml",
        "--model.name",
        model,
        "--output-dir",
        out,
        "--max-steps",
        options.steps,
        "--seq-len",
        32,
        "--orchestrator.batch-size",
        GROUPS * ROLLOUTS,
        "--orchestrator.rollouts-per-example",
        ROLLOUTS,
        "--orchestrator.sampling.max-tokens",
        16,
        "--inference.server.port",
        0,
        "--max-async-level",
        int(options.ahead),
        "--orchestrator.env",
        json.dumps(ENVIRONMENT),
        "--ckpt.interval",
        1,
        "--ckpt.keep",
        2,
        "--trainer.clean",
        "false",
        "--resume",
        "auto",
        "--trainer.scheduler.type",
        "constant",
    ]
    if options.vllm:
        words += ["--inference.backend", "vllm", "--inference.vllm-python", options.vllm]
        words += ["--inference.enforce-eager", "true"]
        words += ["--inference.max-model-len", 64]
    if options.gpu:
        words += GPU
    return list(map(str, words))


def vllm_of(server: int) -> int | None:
    """The vLLM that a server has started: the child of the one that keeps it."""
    alive = processes_now()
    keepers = {pid for pid, (parent, _) in alive.items() if parent == server}
    return next(
        (pid for pid, (parent, words) in alive.items() if parent in keepers and "--uds" in words),
        None,
    )


def engines() -> set[int]:
    """vLLM's own processes, whoever started them."""
    return {pid for pid, (_, words) in processes_now().items() if words[0].startswith("VLLM::")}


def newest(out: Path) -> int:
    """The last step whose rollouts are there."""
    return max(steps_in(out / "rollouts"), default=0)


def pid_of(part: str, out: Path, launcher: int) -> int | None:
    """The process of a part, by its command line."""
    if part == "launcher":
        return launcher
    alive = processes_now()
    name = "orchestrator" if part == "worker" else part
    for pid, (_, words) in alive.items():
        if words[1:5] == ["-P", "-m", "hone", name] and str(out) in words[6]:
            its_own = [child for child, (parent, _) in alive.items() if parent == pid]
            return pid if part != "worker" else its_own[0] if its_own else None
    return None


def is_over(out: Path, steps: int) -> bool:
    return (out / "weights" / f"step_{steps}").exists()


def run(
    out: Path,
    model: Path,
    options: argparse.Namespace,
    parts: list[str],
    draw: random.Random,
    seconds: float,
) -> int:
    """Run to the end, killing these parts one after the other; return how many kills there were.

    Args:
        seconds: how long a run takes that is left alone.
    """

    def draw_pause() -> float:
        return seconds * draw.uniform(EARLIEST, LATEST)

    done, attempts, seen, others = 0, 0, 0, engines()
    steps, vllm = options.steps, options.vllm
    words = command(out, model, options)
    while not is_over(out, steps):
        attempts += 1
        if attempts > len(parts) + 3 or (attempts > 1 and {"inference", "worker"} >= set(parts)):
            print(*out.with_suffix(".log").read_text().splitlines()[-20:], sep="\n")
            raise SystemExit(f"{out} does not come to its end; see {out.with_suffix('.log')}")
        with out.with_suffix(".log").open("a") as log:
            process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
        moment = time.monotonic() + draw_pause()
        while process.poll() is None:
            time.sleep(0.02)
            if vllm and newest(out) < seen + STEPS_AT_WORK:
                moment = time.monotonic() + draw.uniform(0.0, 1.0)
            if done < len(parts) and time.monotonic() > moment:
                part = parts[done]
                pid = pid_of(part, out, process.pid)
                if vllm and pid is not None and done % 2:
                    pid = vllm_of(pid)
                if pid is not None and not is_over(out, steps):
                    os.kill(pid, signal.SIGKILL)
                    done, seen = done + 1, newest(out)
                    # Five kills within a minute end a run
                    rest = 10.0 if {"inference"} >= set(parts) else 0.0
                    moment = time.monotonic() + rest + draw_pause()
        deadline = time.monotonic() + 120
        while (
            any(pid_of(other, out, 0) for other in ("inference", "orchestrator", "trainer"))
            or engines() - others
        ):
            if time.monotonic() > deadline:
                raise SystemExit(f"{out}: something of an ended run lives on")
            time.sleep(0.05)
    return done


def groups_trained(out: Path, steps: int) -> Counter[int]:
    """How often each group of rollouts was trained on."""
    found: Counter[int] = Counter()
    for step in range(1, steps + 1):
        lines = (out / "rollouts" / f"step_{step}" / "rollouts.jsonl").read_text().splitlines()
        found.update({json.loads(line)["group"] for line in lines})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=25, help="of each part")
    parser.add_argument("--steps", type=int, default=150, help="of a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ahead", action="store_true")
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM")
    parser.add_argument("--gpu", action="store_true", help="on a machine with a GPU")
    options = parser.parse_args()
    if options.vllm:
        options.ahead, options.only = True, "inference"
    end_with_parent()
    os.environ["HONE_PARENT_PID"] = str(os.getpid())
    work, draw, steps = (
        Path(tempfile.mkdtemp(prefix="chaos_")),
        random.Random(options.seed),
        options.steps,
    )
    model, start = work / "model", time.perf_counter()
    data = work / "sft.jsonl"
    for words in (
        [sys.executable, "-m", "reverse_text", "--out", data, "-n", 2000],
        [
            *HONE,
            "sft",
            "@",
            f"{TINY}/sft.toml",
            "--data.name",
            data,
            "--max-steps",
            60,
            "--output-dir",
            work / "sft",
        ],
    ):
        subprocess.run(list(map(str, words)), cwd=ROOT, check=True, capture_output=True)
    (work / "sft" / "weights" / "step_60").rename(model)
    expected, seconds = {}, RUN_SECONDS
    if not options.ahead:
        begun = time.perf_counter()
        run(work / "alone", model, options, [], draw, 0.0)
        seconds = time.perf_counter() - begun
        expected = load_file(work / "alone" / "weights" / f"step_{steps}" / "model.safetensors")
    found = Counter(kills=0, runs=0, samples_lost=0, samples_doubled=0, differing_weights=0)
    wanted = [options.only] if options.only else PARTS[:4]
    lists = [[part] * options.kills for part in wanted]
    for parts in (
        [[part for turn in zip(*lists, strict=True) for part in turn]]
        if options.together
        else lists
    ):
        name, kills = parts[0] if len(set(parts)) == 1 else "all", 0
        while kills < len(parts):
            out = work / f"{name}_{kills}"
            done = run(out, model, options, parts[kills:], draw, seconds)
            if not done:
                raise SystemExit(f"{out} ended before its first kill: let it have more steps")
            kills += done
            groups = groups_trained(out, steps)
            weights = load_file(out / "weights" / f"step_{steps}" / "model.safetensors")
            found["kills"] += done
            found["runs"] += 1
            progress = json.loads(
                (out / "rollouts" / f"step_{steps}" / "progress.json").read_text()
            )
            begun = {number for number, *_ in progress["untrained"]}
            found["samples_lost"] += ROLLOUTS * len(
                set(range(progress["next"])) - set(groups) - begun
            )
            found["samples_doubled"] += ROLLOUTS * sum(times - 1 for times in groups.values())
            if not options.ahead:
                found["differing_weights"] += sum(
                    not torch.equal(weights[name], expected[name]) for name in expected
                )
            print(
                f"{name}: {done} kills in a run of {steps} steps; so far {dict(found)}", flush=True
            )
    print(json.dumps({**found, "seconds": round(time.perf_counter() - start)}))
    has_failed = any(
        found[name] for name in ("samples_lost", "samples_doubled", "differing_weights")
    )
    if not has_failed:
        shutil.rmtree(work)
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
