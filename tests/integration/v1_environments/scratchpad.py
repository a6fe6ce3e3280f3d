"""Environment of verifiers' v1 API: one tool server for all rollouts, with a state for each."""

import asyncio

import verifiers.v1 as vf

__all__ = ["ScratchpadTaskset"]
WORDS = ("abc", "bca", "cab", "cba", "acb", "bac", "aab", "bbc")


class ScratchpadState(vf.State):
    word: str = ""


class Scratchpad(vf.Toolset[vf.SharedToolsetConfig, ScratchpadState]):
    TOOL_PREFIX = "scratchpad"

    @vf.tool
    async def keep(self, word: str) -> str:
        """Write a word down, and read it after a while."""
        self.state.word = word
        await asyncio.sleep(0.2)  # other rollouts write theirs
        return self.state.word


class ScratchpadData(vf.TaskData):
    word: str


class ScratchpadTask(vf.Task[ScratchpadData, ScratchpadState]):
    @vf.stop
    async def four_turns(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 4

    @vf.reward
    async def share_right(self, trace) -> float:
        reply, word = trace.last_reply or "", self.data.word
        return sum(a == b for a, b in zip(reply, word)) / max(len(reply), len(word))

    @vf.metric
    async def own_word(self, trace) -> float:
        return float(trace.last_reply == self.data.word)


class ScratchpadConfig(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class ScratchpadTaskset(vf.Taskset[ScratchpadTask, ScratchpadConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Scratchpad(config.tools)]

    def load(self):
        for word in WORDS:
            yield ScratchpadTask(ScratchpadData(prompt=word, word=word), self.config.task)


if __name__ == "__main__":
    Scratchpad.run()
