"""Environment of verifiers' v1 API with a harness of its own, which rewrites the history.

Each turn shows the model its last answer alone: every turn is a branch of the trace.
"""

import openai
import verifiers.v1 as vf
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ForgetfulHarness", "ForgetfulTaskset"]
TURNS = 3


class ForgetfulHarnessConfig(HarnessConfig):
    pass


class ForgetfulHarness(Harness[ForgetfulHarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret)
        notes = data.prompt
        for _ in range(TURNS):
            messages = [{"role": "user", "content": notes}]
            done = await client.chat.completions.create(model=ctx.model, messages=messages)
            notes = done.choices[0].message.content or "none"
        await client.close()
        return ProgramResult(0, "", "")


class ForgetfulTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def branches(self, trace) -> float:
        return float(len(trace.branches))


class ForgetfulTaskset(vf.Taskset[ForgetfulTask, vf.TasksetConfig]):
    def load(self):
        for text in ("abc", "bca"):
            yield ForgetfulTask(vf.TaskData(prompt=text), self.config.task)
