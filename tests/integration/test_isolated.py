"""An environment in processes of its own: the same rollouts, and what happens when it raises, hangs or dies."""

import asyncio
import os
import signal
import time

import pytest

from hone import machine
from hone.config.sections import EnvConfig
from hone.environments import load_environments
from hone.environments.protocols import worker_process as module
from hone.environments.protocols.isolated import Isolated
from hone.records import Completion, Sampling, Turn

pytestmark = pytest.mark.main_path

SOURCE = """
import os, time
import hone.environments as vf

class Env(vf.SingleTurnEnv):
    async def rollout(self, client, example, sampling):
        print("noise on standard output")
        fate = example.info["fate"]
        if fate == "raises":
            raise KeyError("nothing here")
        if fate == "blocks":
            time.sleep(60)
        done = await super().rollout(client, example, sampling)
        done.metrics["pid"] = float(os.getpid())
        return done

def load_environment(word):
    rows = [{"question": f"{word} {fate}", "info": {"fate": fate}} for fate in ("well", "raises", "blocks", "well")]
    return Env(dataset=rows, rubric=vf.Rubric(funcs=[lambda completion, **_: float(len(completion[-1]["content"]))]))
"""


class Model:
    def __init__(self, seconds=0.0):
        self.seconds = seconds

    async def chat(self, messages, sampling, tools=None):
        await asyncio.sleep(self.seconds)
        if sampling.seed == 13:
            raise ValueError("refused")
        completion = Completion([1, 2], [-0.5, -0.25], [3, 3], "stop")
        return Turn([7, 8], completion, messages[-1]["content"] * 2)


@pytest.fixture
def environment(tmp_path, monkeypatch):
    (tmp_path / "isolated_env.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = load_environments([EnvConfig(id="isolated-env", args={"word": "say"}, workers=1)])[
        "isolated-env"
    ]
    assert isinstance(made, Isolated) and len(made.get_dataset()) == 4
    return made


def test_a_worker_that_was_stopped_is_named_killed_and_replaced_and_one_that_blocks_is_not(
    environment, monkeypatch, caplog
):
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.2)
    monkeypatch.setattr(machine, "SILENCE_SECONDS", 3.0)
    well, _, blocks, again = environment.get_dataset()
    (worker,) = environment.workers

    async def program():
        first = await environment.rollout(Model(), well, Sampling())
        blocking = asyncio.ensure_future(environment.rollout(Model(), blocks, Sampling()))
        await asyncio.sleep(5.0)
        assert not caplog.records and not blocking.done()
        os.kill(worker.process.pid, signal.SIGSTOP)
        with pytest.raises(ConnectionError, match="was killed"):
            await blocking
        second = await environment.rollout(Model(), again, Sampling())
        assert first.metrics["pid"] != second.metrics["pid"]

    run(environment, program)
    assert (
        "The worker of isolated-env" in caplog.text and "its 1 rollouts are retried" in caplog.text
    )


def run(environment, program):
    async def whole():
        try:
            return await program()
        finally:
            await environment.close()

    return asyncio.run(whole())


def test_rollouts_of_a_worker_are_those_of_the_environment(environment):
    well, raises = environment.get_dataset()[:2]

    async def program():
        done = await asyncio.gather(
            *(environment.rollout(Model(0.01), well, Sampling(seed=i)) for i in range(5))
        )
        with pytest.raises(RuntimeError, match="KeyError: 'nothing here'"):
            await environment.rollout(Model(), raises, Sampling())
        with pytest.raises(RuntimeError, match="ValueError: refused"):
            await environment.rollout(Model(), well, Sampling(seed=13, logit_bias=((4, 1.0),)))
        return done

    done = run(environment, program)
    assert {r.metrics["pid"] for r in done} != {float(os.getpid())} and len(
        {r.metrics["pid"] for r in done}
    ) == 1
    assert done[0].reward == 16.0 and done[0].example is well
    assert done[0].turns == [
        Turn([7, 8], Completion([1, 2], [-0.5, -0.25], [3, 3], "stop"), "say wellsay well")
    ]


def test_a_worker_that_dies_fails_its_rollouts_and_is_replaced(environment):
    well = environment.get_dataset()[0]

    async def program():
        first = await environment.rollout(Model(), well, Sampling())
        under_way = asyncio.ensure_future(environment.rollout(Model(30), well, Sampling()))
        await asyncio.sleep(0.2)
        os.kill(int(first.metrics["pid"]), signal.SIGKILL)
        with pytest.raises(
            ConnectionError, match=r"the worker of isolated-env was killed \(SIGKILL\)"
        ):
            await under_way
        return first, await environment.rollout(Model(), well, Sampling())

    first, second = run(environment, program)
    assert second.reward == first.reward and second.metrics["pid"] != first.metrics["pid"]


def test_a_worker_that_blocks_is_killed_and_others_go_on(environment, monkeypatch):
    monkeypatch.setattr(module, "ANSWER_SECONDS", 2.0)
    well, _, blocks, _ = environment.get_dataset()

    async def program():
        await environment.rollout(Model(), well, Sampling())
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await environment.rollout(Model(), blocks, Sampling())
        while environment.workers[0].process.returncode is None:
            await asyncio.sleep(0.05)
        done = await environment.rollout(Model(), well, Sampling())
        return time.monotonic() - start, done

    seconds, done = run(environment, program)
    assert done.reward == 16.0 and seconds < 50  # the environment would block for a minute


def test_a_worker_that_sends_too_much_is_killed_and_others_go_on(environment, monkeypatch, caplog):
    monkeypatch.setattr(module, "MAX_MESSAGE_BYTES", 2**20)
    well = environment.get_dataset()[0]

    class Flood(Model):
        async def chat(self, messages, sampling, tools=None):
            turn = await super().chat(messages, sampling, tools)
            turn.text = "x" * 2**21
            return turn

    async def program():
        with pytest.raises(ConnectionError, match="was killed"):
            await environment.rollout(Flood(), well, Sampling())
        assert "sent more than 1 MiB at once" in caplog.text
        done = await environment.rollout(Model(), well, Sampling())
        assert done.reward > 0
        await environment.close()

    asyncio.run(program())
