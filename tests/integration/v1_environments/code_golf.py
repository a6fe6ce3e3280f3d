"""Environment of verifiers' v1 API: two attempts at a short program, compared with each other."""

import asyncio
import re

import verifiers.v1 as vf

__all__ = ["GolfEnv", "GolfTaskset"]
OUTPUTS = {"the sum of 1 to 100": "5050", "HELLO backwards": "OLLEH"}


def extract_program(trace):
    found = re.search(r"```python\n(.*?)```", trace.last_reply or "", re.DOTALL)
    return found[1].strip() if found else ""


class GolfData(vf.TaskData):
    output: str


class GolfTask(vf.Task[GolfData]):
    @vf.metric
    async def passes(self, trace, runtime) -> float:
        """Run the program where the agent ran."""
        await runtime.write("golf.py", extract_program(trace).encode())
        done = await runtime.run(["python3", "golf.py"], {})
        return float(done.exit_code == 0 and done.stdout.strip() == self.data.output)

    @vf.reward
    async def is_right(self, trace) -> float:
        return trace.metrics["passes"]


class GolfConfig(vf.EnvConfig):
    golfer: vf.AgentConfig = vf.AgentConfig()
    attempts: int = 2


class GolfEnv(vf.Env[GolfConfig]):
    async def run(self, task, agents):
        await asyncio.gather(*(agents.golfer.run(task) for _ in range(self.config.attempts)))

    async def finalize(self, task, episode):
        right = [trace for trace in episode.traces if trace.metrics["passes"]]
        shortest = min((len(extract_program(trace)) for trace in right), default=0)
        for trace in episode.traces:
            is_shortest = trace in right and len(extract_program(trace)) == shortest
            trace.record_reward("is_shortest", float(is_shortest), 0.5)


class GolfTaskset(vf.Taskset[GolfTask, vf.TasksetConfig]):
    def load(self):
        for what, output in OUTPUTS.items():
            yield GolfTask(GolfData(prompt=f"Print {what}.", output=output), self.config.task)
