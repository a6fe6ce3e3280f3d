"""Groups under way across steps: what is begun when, what is too old, what fails, what a run goes on with."""

import asyncio
import json
import logging
import math
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from hone.config.algorithms import ALGORITHMS
from hone.config.loss_config import LossConfig
from hone.config.orchestrator_config import OrchestratorConfig
from hone.config.rl_config import RLConfig
from hone.environments import SingleTurnEnv
from hone.monitors.event_loop_lag import Lag
from hone.monitors.step_lines import why_no_signal
from hone.orchestrator.orchestrator import Orchestrator
from hone.orchestrator.rollouts_file import write_rollouts
from hone.records import Completion, Rollout, Turn


class Model:
    """Answers with a digit that follows from the seed, after `seconds(seed)`, by the version that is served then."""

    def __init__(self, seconds=lambda seed: 0.0):
        self.version, self.seconds, self.asked = -1, seconds, 0

    async def chat(self, prompt, sampling):
        self.asked += 1
        await asyncio.sleep(self.seconds(sampling.seed))
        digit = random.Random(sampling.seed).randrange(10)
        return Turn(
            [1, 2],
            Completion([10 + digit, 3], [-1.0, -0.5], [self.version] * 2, "stop"),
            str(digit),
        )


class Digits(SingleTurnEnv):
    def __init__(self, reward=lambda digit: float(digit % 2)):
        super().__init__(dataset=[{"question": f"q{i}"} for i in range(100)])
        self.reward = reward

    async def score(self, rollout, state):
        rollout.reward = self.reward(int(rollout.messages[-1]["content"]))
        return rollout


def orchestrator(model, env=None, level=0, **config):
    settings = {"env": {"id": "digits"}, "batch_size": 16, "rollouts_per_example": 4, **config}
    made = Orchestrator(
        OrchestratorConfig.model_validate(settings), {"digits": env or Digits()}, model, 0, level
    )
    adopt = made.on_adopted

    def adopted(version):
        model.version = version
        adopt(version)

    made.on_adopted = adopted
    return made


def run(program):
    return asyncio.run(program)


def test_an_error_of_a_group_is_not_forgotten_for_the_next_that_is_well():
    class Teacher:
        async def score_samples(self, samples):
            if samples[0].ids[2] % 2:
                raise ConnectionError("the teacher is gone")

        async def close(self):
            pass

    async def program():
        made = orchestrator(Model())
        made.teacher = Teacher()
        made.settings = {
            name: one.model_copy(update={"teacher_logprobs": True})
            for name, one in made.settings.items()
        }
        made.on_adopted(0)
        await asyncio.sleep(0.05)
        with pytest.raises(ConnectionError, match="the teacher is gone"):
            await made.collect_step(1)
        await made.close()

    run(program())


@pytest.mark.parametrize("answer", [None, "none"])
def test_an_environment_that_gives_no_rollout_fails_that_rollout(answer):
    class Odd(Digits):
        async def rollout(self, client, example, sampling):
            rollout = await super().rollout(client, example, sampling)
            if sampling.seed % 2:
                return rollout
            if answer is None:
                return None
            rollout.reward = answer
            return rollout

    async def program():
        made = orchestrator(Model(), Odd())
        made.on_adopted(0)
        collected = await made.collect_step(1)
        await made.close()
        return collected

    assert run(program()).measure()["progress/failed"] == 8


def test_on_policy_the_groups_of_a_step_follow_from_its_number():
    async def steps(first, count, progress=None):
        made = orchestrator(Model(lambda seed: (seed % 7) / 1000))
        made.go_on(first, progress)
        found = []
        for step in range(first, first + count):
            made.on_adopted(step - 1)
            found.append(await made.collect_step(step))
        await made.close()
        return found

    whole, start = run(steps(1, 6)), run(steps(1, 3))
    assert [[g.task.number for g in c.groups] for c in whole] == [
        [4 * i + k for k in range(4)] for i in range(6)
    ]
    rest = run(steps(4, 3, start[-1].progress))
    of = start[-1].progress.pop("of")
    assert start[-1].progress == {"step": 3, "next": 12, "untrained": [], "streams": [[0, 12, 0.0]]}
    other = orchestrator(Model(), batch_size=20)
    with pytest.raises(
        ValueError,
        match="batch_size / rollouts_per_example differs from the run's: it had 4, found 5",
    ):
        other.go_on(4, {**start[-1].progress, "of": of})
    for one, two in zip(whole, start + rest, strict=True):
        assert [s.ids.tolist() for s in one.batch.samples] == [
            s.ids.tolist() for s in two.batch.samples
        ]
        assert (
            one.measure()["batch/off_policy_level/max"]
            == two.measure()["batch/off_policy_level/max"]
            == 0
        )


@pytest.mark.parametrize(("level", "oversampling"), [(1, 1.0), (1, 1.5), (3, 1.25)])
def test_ahead_of_training_nothing_is_older_than_allowed_lost_or_doubled(level, oversampling):
    """A trainer that takes a while for a step, calls that take up to four steps; killed and gone on with once."""
    seconds = lambda seed: random.Random(seed).choice([0.001, 0.001, 0.002, 0.02])  # noqa: E731
    bound = level + 1

    async def steps(first, count, progress):
        made = orchestrator(
            Model(seconds),
            level=level,
            oversampling_factor=oversampling,
            max_off_policy_steps=bound,
        )
        made.go_on(first, progress)
        made.on_adopted(first - 1)
        found, trained = [], first - 1
        for step in range(first, first + count):
            while trained < step - 1 - level:
                await asyncio.sleep(0.003)
                trained += 1
                made.on_adopted(trained)
            assert len(made.under_way) + len(made.ready) <= 4 * (level + 1) + math.ceil(
                4 * (oversampling - 1)
            )
            found.append(await made.collect_step(step))
        await made.close()
        return found

    found = run(steps(1, 60, None))
    found += run(steps(61, 60, found[-1].progress))
    assert max(c.measure()["batch/off_policy_level/max"] for c in found) <= bound
    trained = Counter(g.task.number for c in found for g in c.groups)
    assert set(trained.values()) == {1} and sum(trained.values()) == 120 * 4
    missing = set(range(found[-1].progress["next"])) - set(trained)
    assert missing == {number for number, _, _ in found[-1].progress["untrained"]}


def test_a_step_more_is_under_way_with_each_version_that_training_gives():
    async def lasting(first):
        made = orchestrator(Model(lambda seed: 30.0), level=2, oversampling_factor=1.25)
        made.go_on(first, None)
        found = []
        for version in range(first - 1, first + 2):
            made.on_adopted(version)
            found.append(len(made.under_way))
        await made.close()
        return found

    assert run(lasting(1)) == run(lasting(7)) == [4 + 1, 8 + 1, 12 + 1]

    async def ending():
        made = orchestrator(Model(), level=2, oversampling_factor=1.25)
        made.on_adopted(0)
        async with asyncio.timeout(10.0):
            while len(made.ready) < 3 * 4 + 1:  # all that this version may be used for
                await asyncio.sleep(0.002)
        await made.close()

    run(ending())


def test_what_has_become_too_old_is_begun_again():
    async def program():
        made = orchestrator(
            Model(lambda seed: 30.0 if seed == 0 and model.asked == 1 else 0.001),
            level=1,
            oversampling_factor=1.5,
            max_off_policy_steps=2,
        )
        model = made.client
        made.on_adopted(0)
        found = []
        for step in range(1, 7):
            found.append(await made.collect_step(step))
            made.on_adopted(step)
        await made.close()
        return found

    found = run(program())
    assert [c.measure()["batch/groups_stale"] for c in found] == [0, 0, 0, 1, 0, 0]
    steps_of_0 = [step for step, c in enumerate(found, 1) for g in c.groups if g.task.number == 0]
    assert len(steps_of_0) == 1 and steps_of_0[0] >= 4


def test_what_is_cancelled_from_outside_ends_in_silence_and_from_inside_is_a_failure(caplog):
    class Cancels(Digits):
        async def rollout(self, client, example, sampling):
            if sampling.seed % 4 == 0:
                raise asyncio.CancelledError
            return await super().rollout(client, example, sampling)

    async def inside():
        made = orchestrator(Model(), Cancels())
        made.on_adopted(0)
        return await made.collect_step(1)

    assert run(inside()).measure()["progress/failed"] == 4

    async def outside():
        made = orchestrator(Model(lambda seed: 30.0))
        made.on_adopted(0)
        asyncio.get_running_loop().call_later(0.05, asyncio.current_task().cancel)
        await made.collect_step(1)

    with pytest.raises(asyncio.CancelledError), caplog.at_level(logging.ERROR):
        run(outside())
    assert not caplog.records  # asyncio says there what a callback raised


def test_groups_without_signal_are_replaced_up_to_a_limit():
    rare = Digits(reward=lambda digit: float(digit == 0))

    async def program(env, **config):
        made = orchestrator(Model(), env, refill=True, **config)
        made.on_adopted(0)
        collected = await made.collect_step(1)
        return collected, made.progress_state()

    collected, progress = run(program(rare))
    used = [g for g in collected.groups if not g.unused]
    assert (
        len(used) == 4
        and collected.measure()["batch/groups_replaced"] == len(collected.groups) - 4 > 0
    )
    assert progress["next"] == len(collected.groups) and progress["untrained"] == []
    solved, _ = run(program(Digits(reward=lambda digit: 1.0)))
    # Four batches replaced, then without
    assert len(solved.groups) == 20 and not solved.batch.samples


def test_failures_of_ten_thousand_rollouts_are_counted_by_cause():
    kinds = {"raised": 0.05, "timeout": 0.02, "not_finite": 0.01, "empty": 0.03}

    def fate(seed):
        at = random.Random(f"fate {seed}").random()
        for kind, share in kinds.items():
            if at < share:
                return kind
            at -= share
        return "well"

    class Faulty(Digits):
        async def rollout(self, client, example, sampling):
            kind = fate(sampling.seed)
            if kind == "raised":
                raise KeyError("x")
            if kind == "timeout":
                await asyncio.sleep(60)
            if kind == "empty":
                return Rollout(example, [Turn([1], Completion([], [], [], "stop"), "")], [])
            done = await super().rollout(client, example, sampling)
            if kind == "not_finite":
                done.reward = math.nan
            return done

    async def program():
        made = orchestrator(
            Model(),
            Faulty(),
            level=1,
            batch_size=10_000,
            rollouts_per_example=100,
            rollout_retries=0,
            rollout_timeout=1.5,
        )
        made.on_adopted(0)
        return [await made.collect_step(1, last_step=1)]

    found = run(program())
    expected = Counter(fate(seed) for seed in range(10_000))
    for kind in kinds:
        assert sum(c.measure()[f"failures/{kind}"] for c in found) == expected[kind] > 50
    assert sum(c.measure()["progress/samples"] for c in found) == expected["well"]
    errors = Counter(r.error for c in found for g in c.groups for r in g.rollouts if r.error)
    assert (
        errors["the reward is nan"] == expected["not_finite"]
        and errors["KeyError: 'x'"] == expected["raised"]
    )


def test_a_rollout_that_fails_once_is_tried_again_with_its_seed():
    seen = Counter()

    class Once(Digits):
        async def rollout(self, client, example, sampling):
            seen[sampling.seed] += 1
            if seen[sampling.seed] == 1 and sampling.seed % 3 == 0:
                raise OSError("gone")
            return await super().rollout(client, example, sampling)

    async def collected(env):
        made = orchestrator(Model(), env)
        made.on_adopted(0)
        return await made.collect_step(1)

    again, plain = run(collected(Once())), run(collected(Digits()))
    assert again.measure()["failures/raised"] == 6 and again.measure()["progress/failed"] == 0
    assert [s.ids.tolist() for s in again.batch.samples] == [
        s.ids.tolist() for s in plain.batch.samples
    ]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_sets_what_is_not_given(name):
    given = {
        "model": {"name": "m"},
        "orchestrator": {"env": {"id": "digits"}, "teacher": {"model": "t"}},
    }
    config = RLConfig.model_validate(
        RLConfig.prepare_values({**given, "algorithm": name}, {}, set())
    )
    for section, values in ALGORITHMS[name].items():
        for key, value in values.items():
            found = getattr(getattr(config, section), key)
            assert (
                (found.model_dump() | value == found.model_dump())
                if isinstance(value, dict)
                else found == value
            )
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    assert page.count(f"| `{name}` |") == 2  # its formula and its source
    alone = {"id": "digits", "name": "alone", "algorithm": name}
    several = RLConfig.prepare_values(
        {**given, "orchestrator": {"env": [{"id": "digits"}, alone], "teacher": {"model": "t"}}},
        {},
        set(),
    )
    several = RLConfig.model_validate(several)
    assert (
        several.trainer.loss_of == {"alone": config.trainer.loss}
        and several.trainer.loss == LossConfig()
    )
    assert several.orchestrator.group_config_of("alone") == config.orchestrator.group_config_of(
        "digits"
    )
    own = {**given, "algorithm": name, "trainer": {"loss": {"type": "tis", "ratio_cap": 3.0}}}
    own = RLConfig.model_validate(RLConfig.prepare_values(own, {}, set()))
    assert own.trainer.loss.type == "tis" and own.trainer.loss.ratio_cap == 3.0
    more = {
        **given,
        "algorithm": name,
        "orchestrator": {**given["orchestrator"], "advantage": "rloo"},
    }
    assert (
        RLConfig.model_validate(RLConfig.prepare_values(more, {}, set())).orchestrator.advantage
        == "rloo"
    )


def test_a_step_without_signal_says_why():
    values = {
        "batch/solve_all": 0.0,
        "batch/solve_none": 1.0,
        "is_truncated/mean": 0.0,
        "progress/failed": 3,
    }
    line = why_no_signal(7, values)
    assert line.startswith(
        "Step 7: nothing to learn from: no rollout was rewarded (3 failed); what helps: "
    )
    assert "most completions were cut off" in why_no_signal(7, values | {"is_truncated/mean": 0.9})
    assert "every rollout was solved" in why_no_signal(
        7, values | {"batch/solve_all": 1.0, "batch/solve_none": 0.0}
    )
    assert "the same reward" in why_no_signal(7, values | {"batch/solve_none": 0.5})


def test_the_orchestrator_starts_without_torch():
    program = "import sys, hone.orchestrator.run; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_blocks_the_event_loop_is_seen(caplog):
    async def program():
        lag = Lag(logging.getLogger("hone"))
        task = asyncio.create_task(lag.watch_loop())
        await asyncio.sleep(0.2)
        calm = lag.take_metrics()
        await asyncio.sleep(0.01)
        time.sleep(1.1)
        await asyncio.sleep(0.05)
        task.cancel()
        return calm, lag.take_metrics()

    with caplog.at_level(logging.WARNING, logger="hone"):
        calm, blocked = run(program())
    assert calm["perf/event_loop_lag/p99"] < 0.5 and blocked["perf/event_loop_lag/max"] > 1.0
    assert "The event loop stood still for 1." in caplog.text


def test_each_environment_has_its_share_its_group_size_and_its_sampling():
    class Seen(Model):
        async def chat(self, prompt, sampling):
            drawn[sampling.temperature, sampling.max_tokens] += 1
            return await super().chat(prompt, sampling)

    drawn = Counter()
    config = OrchestratorConfig.model_validate(
        {
            "batch_size": 32,
            "rollouts_per_example": 4,
            "drop_zero_signal": False,
            "env": [
                {"id": "digits", "ratio": 3.0},
                {
                    "id": "digits",
                    "name": "few",
                    "ratio": 1.0,
                    "rollouts_per_example": 2,
                    "temperature": 0.5,
                    "max_tokens": 7,
                    "advantage": "rloo",
                },
            ],
        }
    )

    async def program():
        made = Orchestrator(config, {"digits": Digits(), "few": Digits()}, Seen(), 0)
        found = []
        for step in range(1, 5):
            made.on_adopted(step - 1)
            found.append(await made.collect_step(step))
        return found

    found = run(program())
    for collected in found:
        sizes = Counter((g.task.env, len(g.rollouts)) for g in collected.groups)
        assert (
            sizes == {("digits", 4): 6, ("few", 2): 2}
            and collected.measure()["batch/few/groups"] == 2
        )
        assert {(s.env, s.temperature) for s in collected.batch.samples} == {
            ("digits", 1.0),
            ("few", 0.5),
        }
        few = next(g for g in collected.groups if g.task.env == "few")
        (one, two), rewards = few.advantages, few.reward_list
        # Rloo: less the mean of the others
        assert (one, two) == (rewards[0] - rewards[1], rewards[1] - rewards[0])
    assert drawn[1.0, 128] == 4 * 24 and drawn[0.5, 7] == 4 * 4


def test_useful_groups_of_earlier_steps_stand_in_also_in_a_run_that_goes_on(tmp_path):
    useful_at = {1, 2}  # steps

    def env():
        made = Digits()
        made.reward = lambda digit: float(digit) if made.step in useful_at else 1.0
        return made

    async def steps(first, count, progress):
        environment = env()
        made = orchestrator(Model(), environment, buffer={"replay": 2}, max_off_policy_steps=4)
        made.go_on(first, progress, tmp_path)
        found = []
        for step in range(first, first + count):
            environment.step = step
            made.on_adopted(step - 1)
            found.append(await made.collect_step(step, last_step=step))
            if not (tmp_path / f"step_{step}").exists():
                write_rollouts(found[-1].groups, tmp_path / f"step_{step}")
        return found

    found = run(steps(1, 7, None))
    counts = [c.measure()["batch/groups_replayed"] for c in found]
    fresh = [sum(not g.unused for g in c.groups) for c in found]
    assert fresh == [4, 4, 0, 0, 0, 0, 0] and counts == [0, 0, 4, 4, 4, 0, 0]
    # Twice those of step 2,
    assert found[2].batch.samples == found[3].batch.samples == found[1].batch.samples
    # Then of step 1, which are too old after that
    assert found[4].batch.samples == found[0].batch.samples
    assert [c.measure()["batch/off_policy_level/max"] for c in found] == [0, 0, 1, 2, 4, 0, 0]
    again = run(steps(4, 4, json.loads(json.dumps(found[2].progress))))
    for one, two in zip(found[3:], again, strict=True):
        assert [s.ids.tolist() for s in one.batch.samples] == [
            s.ids.tolist() for s in two.batch.samples
        ]
        assert [s.advantage for s in one.batch.samples] == [s.advantage for s in two.batch.samples]
