"""Environment of verifiers' v1 API whose tasks crash, hang or flood their worker, or do well."""

import os
import sys
import time

import verifiers.v1 as vf

__all__ = ["FaultyTaskset"]
FAULTS = ("none", "crash", "hang", "flood", "raise", "none")


class FaultyData(vf.TaskData):
    fault: str


class FaultyTask(vf.Task[FaultyData]):
    @vf.reward
    async def done(self, trace) -> float:
        if self.data.fault == "crash":
            os._exit(3)
        if self.data.fault == "hang":
            time.sleep(3600)
        if self.data.fault == "flood":
            for _ in range(200):
                print("x" * 100_000)
                sys.stderr.write("y" * 1000)
        if self.data.fault == "raise":
            raise RuntimeError("no reward today")
        return 1.0


class FaultyTaskset(vf.Taskset[FaultyTask, vf.TasksetConfig]):
    def load(self):
        for i, fault in enumerate(FAULTS):
            yield FaultyTask(FaultyData(idx=i, prompt="say", fault=fault), self.config.task)
