"""Environment of verifiers' v1 API: a tool server for each rollout, and two rewards with weights."""

import verifiers.v1 as vf

__all__ = ["GlossaryTaskset"]
WORDS = {"abc": "cba", "bca": "acb"}


class Glossary(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def look_up(self, word: str) -> str:
        """Return the meaning of a word."""
        return WORDS.get(word, "unknown")


class GlossaryConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class GlossaryTask(vf.Task[vf.TaskData, vf.State, GlossaryConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Glossary(config.tools)]

    @vf.reward(weight=0.5)
    async def has_answered(self, trace) -> float:
        return float(bool(trace.last_reply))

    @vf.reward(weight=0.25)
    async def knows_tools(self, trace) -> float:
        return float(len(trace.tools) == 1)


class GlossaryTasksetConfig(vf.TasksetConfig):
    task: GlossaryConfig = GlossaryConfig()


class GlossaryTaskset(vf.Taskset[GlossaryTask, GlossaryTasksetConfig]):
    def load(self):
        for word in WORDS:
            yield GlossaryTask(vf.TaskData(prompt=word), self.config.task)


if __name__ == "__main__":
    Glossary.run()
