"""What a rollout of verifiers 0.4 costs beside the model: by Hone, and by verifiers alone.

    python benchmarks/verifiers_overhead.py --venv DIRECTORY [--rollouts 32] [--rounds 2]

The model is a server in this process that always gives the same answer at once. DIRECTORY is a
virtual environment with verifiers 0.4 and uv. All rollouts of a round run together, after one that
is not counted; the two sides alternate.
"""

import argparse
import asyncio
import os
import subprocess
import tempfile
import time
from pathlib import Path

from results import append_record

from hone.config.sections import EnvConfig
from hone.environments.attempt import attempt
from hone.environments.protocols.policy_endpoint import PolicyEndpoint
from hone.environments.registry import load_environments
from hone.records import Completion, Sampling, Turn

TASKSET = """
import verifiers.v1 as vf

__all__ = ["SayTaskset"]


class SayTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def length(self, trace) -> float:
        return float(len(trace.last_reply or ""))


class SayTaskset(vf.Taskset[SayTask, vf.TasksetConfig]):
    def load(self):
        for i in range(8):
            yield SayTask(vf.TaskData(prompt=f"say {i}"), self.config.task)
"""
VERIFIERS_ALONE = """
import asyncio, os, sys, time
import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment

url, count = sys.argv[1], int(sys.argv[2])
os.environ["NO_KEY"] = "none"
agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
config = vf.resolve_env_config({"taskset": {"id": "say_env"}, "agent": agent})
environment = load_environment(config)
tasks = list(environment.taskset)


async def run_episode(i):
    client = vf.EvalClientConfig(base_url=url, api_key_var="NO_KEY")
    context = vf.ModelContext(client=client, model="policy", sampling=vf.SamplingConfig())
    (slot,) = environment.slots(tasks[i % len(tasks)])
    episode = await environment.run_slot(slot, context)
    assert episode.ok, episode.errors


async def main():
    async with environment.serving():
        await run_episode(0)
        start = time.perf_counter()
        await asyncio.gather(*map(run_episode, range(count)))
        print("seconds", time.perf_counter() - start)


asyncio.run(main())
"""


class ConstantModel:
    async def chat(self, prompt, sampling, tools=None) -> Turn:
        return Turn([1, 2], Completion([3], [-0.5], [0], "stop"), "well")


async def measure_verifiers(python: Path, count: int) -> float:
    """Return the seconds a rollout of `count` at once, run by verifiers in a process of its own."""
    endpoint = PolicyEndpoint()
    try:
        async with endpoint.open_access(ConstantModel(), Sampling()) as access:
            words = [str(python), "-c", VERIFIERS_ALONE, access.url, str(count)]
            paths = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
            process = await asyncio.create_subprocess_exec(
                *words, stdout=subprocess.PIPE, env=os.environ | paths
            )
            output, _ = await process.communicate()
    finally:
        await endpoint.close()
    return float(output.decode().rpartition("seconds")[2]) / count


async def measure_hone(venv: Path, count: int) -> float:
    """Return the seconds a rollout of `count` at once, run by Hone with one worker."""
    settings = EnvConfig(id="say-env", venv=str(venv), workers=1)
    (environment,) = load_environments([settings]).values()
    examples = environment.get_dataset()

    async def run_rollout(i: int) -> None:
        example = examples[i % len(examples)]
        rollout = await attempt(environment, ConstantModel(), example, Sampling())
        assert not rollout.error, rollout.error

    try:
        await run_rollout(0)
        start = time.perf_counter()
        await asyncio.gather(*map(run_rollout, range(count)))
        return (time.perf_counter() - start) / count
    finally:
        await environment.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {"hone": [], "verifiers": []}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "say_env.py").write_text(TASKSET)
        os.environ["PYTHONPATH"] = os.pathsep.join([directory, os.environ.get("PYTHONPATH", "")])
        for _ in range(args.rounds):
            seconds["hone"].append(asyncio.run(measure_hone(args.venv, args.rollouts)))
            alone = measure_verifiers(args.venv / "bin" / "python", args.rollouts)
            seconds["verifiers"].append(asyncio.run(alone))
    figures = {f"{name}_ms_a_rollout": round(1000 * min(s), 1) for name, s in seconds.items()}
    figures["ratio"] = round(min(seconds["hone"]) / min(seconds["verifiers"]), 4)
    print(figures)
    append_record({"rollouts": args.rollouts, **figures})


if __name__ == "__main__":
    main()
