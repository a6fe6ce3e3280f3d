"""Environment of verifiers' v1 API: reverse a short text; the reward is the share of right characters."""

import random

import verifiers.v1 as vf

__all__ = ["ReverseTaskset"]


class ReverseData(vf.TaskData):
    answer: str


class ReverseTask(vf.Task[ReverseData]):
    @vf.reward
    async def share_right(self, trace) -> float:
        reply = trace.last_reply or ""
        answer = self.data.answer
        return sum(a == b for a, b in zip(reply, answer)) / max(len(answer), len(reply), 1)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply or ""))


class ReverseConfig(vf.TasksetConfig):
    rows: int = 20


class ReverseTaskset(vf.Taskset[ReverseTask, ReverseConfig]):
    def load(self):
        draw = random.Random(0)
        for _ in range(self.config.rows):
            text = "".join(draw.choice("abcdef") for _ in range(5))
            yield ReverseTask(ReverseData(prompt=text, answer=text[::-1]), self.config.task)
