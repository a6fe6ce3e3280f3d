"""Environment of verifiers' v1 API: a conversation of three turns, led by the environment."""

import verifiers.v1 as vf

__all__ = ["CountEnv", "CountTaskset"]


class CountTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def turns(self, trace) -> float:
        return float(trace.num_turns)

    @vf.metric
    async def characters(self, trace) -> float:
        return float(len(trace.last_reply or ""))


class CountTaskset(vf.Taskset[CountTask, vf.TasksetConfig]):
    def load(self):
        for text in ("abc", "bca", "cab", "cba"):
            yield CountTask(vf.TaskData(prompt=text), self.config.task)


class CountEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class CountEnv(vf.Env[CountEnvConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as conversation:
            await conversation.turn()
            for text in ("again", "once more"):
                await conversation.turn(text)
