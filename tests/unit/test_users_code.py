"""Code of users cannot end a run, and what it does to one rollout stays there."""

import asyncio
import dataclasses
import functools
import json
import random
import signal
import sys
from collections import Counter

import pytest

import hone
from hone import preemption
from hone.environments import load_environment
from hone.environments.attempt import attempt
from hone.environments.env_group import EnvGroup
from hone.environments.protocols.isolated import Isolated
from hone.environments.rubric import Rubric
from hone.environments.tools import ToolEnv
from hone.environments.turns import MultiTurnEnv, SingleTurnEnv, cleanup, stop
from hone.records import Completion, Example, Sampling, Turn
from hone.users_code import CONTAINED, ExitInUserCode

ROW = {"question": "Go.", "answer": "a", "info": {"moves": [], "at": {"x": 1}}}
PLACES = (
    "reward",
    "stop",
    "setup_state",
    "env_response",
    "cleanup",
    "tool",
    "rollout",
    "group reward",
    "parser",
)


class Custom(BaseException):
    pass


class Model:
    """Answers with a call of the tool once, then with text."""

    async def chat(self, prompt, sampling):
        asked = prompt.tools and not any(message["role"] == "tool" for message in prompt.messages)
        call = {"id": "c", "type": "function", "function": {"name": "tool", "arguments": "{}"}}
        return Turn(
            [1], Completion([2], [0.0], [0], "stop"), "" if asked else "a", [call] if asked else []
        )


def make(place, error, is_async):
    """An environment whose code at one place raises this."""

    def fail(*_):
        raise error

    async def fail_later(*_):
        await asyncio.sleep(0)
        raise error

    act = fail_later if is_async else fail

    def tool():
        return act() if place == "tool" else "4"

    def reward(completion, parser):
        if place == "parser":
            parser.parse_answer(completion)
        return act() if place == "reward" else 1.0

    def compare(completions):
        return act() if place == "group reward" else [0.0] * len(completions)

    class Env(ToolEnv):
        async def setup_state(self, state):
            if place == "setup_state":
                await fail_later()
            return state

        @stop
        def is_over(self, state):
            return act() if place == "stop" else state["turn"] >= 2

        async def env_response(self, messages, state):
            if place == "env_response":
                await fail_later()
            return await super().env_response(messages, state)

        @cleanup
        def clean(self, state):
            return act() if place == "cleanup" else None

        async def rollout(self, client, example, sampling):
            if place == "rollout":
                await fail_later()
            return await super().rollout(client, example, sampling)

    rubric = Rubric([reward, compare])
    env = Env(tools=[tool], dataset=[ROW], rubric=rubric)
    if place == "parser":
        env.parser.parse = fail
    return env


def test_no_code_of_an_environment_ends_the_process():
    from hone.environments.attempt import score_group_or_fail

    counts = Counter()

    async def work():
        for seed in range(200):
            rng = random.Random(seed)
            place = rng.choice(PLACES)
            error = rng.choice(
                [
                    SystemExit(0),
                    SystemExit("bye"),
                    KeyboardInterrupt(),
                    Custom("x"),
                    GeneratorExit(),
                ]
            )
            env = make(place, error, rng.random() < 0.5)
            (example,) = env.get_dataset()
            done = await attempt(env, Model(), example, Sampling(), retries=1, failures=counts)
            await score_group_or_fail(env, [done])
            assert done.error and type(error).__name__ in done.error, (seed, place, done.error)
        done = await attempt(make("", None, False), Model(), example, Sampling())
        assert done.error is None and done.reward == 1.0 and done.messages[-1]["content"] == "a"

    asyncio.run(work())
    assert counts["raised"] and counts["reward"]


def test_a_real_ctrl_c_still_ends_it(monkeypatch):
    with pytest.raises(ExitInUserCode, match="it raised KeyboardInterrupt"), CONTAINED:
        raise KeyboardInterrupt
    monkeypatch.setattr("hone.preemption._interrupts", 1)
    with pytest.raises(KeyboardInterrupt), CONTAINED:
        raise KeyboardInterrupt


def test_the_first_ctrl_c_asks_a_run_that_takes_steps_and_the_next_ends_it(monkeypatch, capsys):
    for name, value in (("_asked", False), ("_interrupts", 0), ("_takes_steps", False)):
        monkeypatch.setattr(f"hone.preemption.{name}", value)
    monkeypatch.setattr(signal, "signal", lambda number, handler: handlers.append(handler))
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.default_int_handler)
    handlers = []
    preemption.listen_to_ctrl_c()
    with pytest.raises(KeyboardInterrupt):  # nothing to save yet
        handlers[0]()
    assert not preemption.is_asked()
    monkeypatch.setattr("hone.preemption._interrupts", 0)
    preemption.steps_begin()
    handlers[0]()
    assert preemption.is_asked() and "Ctrl-C again ends at once" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        handlers[0]()


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        (["/x/bin/rl", "@", "a b.toml", "--clean"], "rl @ 'a b.toml' --resume auto"),
        (["/x/sft", "--resume", "--max-steps", "3"], "sft --max-steps 3 --resume auto"),
        (
            ["/x/rl", "@", "r.toml", "--resume=out/checkpoints/step_1", "--clean", "false"],
            "rl @ r.toml --resume auto",
        ),
        (
            ["/x/hone/__main__.py", "vf-rl", "@", "f", "--clean", "@", "g"],
            "python -m hone vf-rl @ f @ g --resume auto",
        ),
    ],
)
def test_the_command_that_continues_is_the_one_that_was_typed(monkeypatch, typed, command):
    from hone.cli import resume_command

    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)
    assert resume_command(typed) == command
    monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    assert resume_command(typed) == f"uv run {command}"


@pytest.mark.parametrize("place", ["import", "load"])
def test_an_environment_that_exits_while_it_is_loaded_is_named(tmp_path, monkeypatch, place):
    monkeypatch.syspath_prepend(tmp_path)
    text = (
        "import sys\nsys.exit(0)\n"
        if place == "import"
        else "def load_environment():\n    raise SystemExit(3)\n"
    )
    (tmp_path / f"exits_in_{place}.py").write_text(text)
    with pytest.raises(
        ValueError, match=rf"environment 'exits_in_{place}'.*it called exit\(\) \(SystemExit: \d\)"
    ):
        load_environment(f"exits_in_{place}")


def test_rollouts_of_an_example_share_nothing():
    class Growing(MultiTurnEnv):
        async def setup_state(self, state):
            state["prompt"][0]["content"] += " Go."
            state["info"]["moves"].append(len(state["info"]["moves"]))
            state["info"]["at"]["x"] += 1
            return state

        async def env_response(self, messages, state):
            state["info"]["moves"].append("b")
            return "more"

    def seen(info):
        return float(100 * len(info["moves"]) + info["at"]["x"])

    env = Growing(max_turns=2, dataset=[ROW], rubric=Rubric([seen]))
    (example,) = env.get_dataset()
    done = [asyncio.run(attempt(env, Model(), example, Sampling())) for _ in range(4)]
    assert [one.reward for one in done] == [202.0] * 4
    assert [one.state["prompt"][0]["content"] for one in done] == ["Go. Go."] * 4
    assert example.prompt == [{"role": "user", "content": "Go."}] and example.info == {
        "moves": [],
        "at": {"x": 1},
    }
    assert all(one.example is example for one in done)


@pytest.mark.parametrize("answer", [7, 0, 2.5, True, False, [1, "a"], {"x": [None]}, "text", ""])
def test_answers_keep_their_type(answer):
    seen = []

    def reward(answer, state):
        seen.append((answer, state["answer"]))
        return 1.0

    env = SingleTurnEnv(dataset=[{"question": "?", "answer": answer}], rubric=Rubric([reward]))
    (example,) = env.get_dataset()
    asyncio.run(attempt(env, Model(), example, Sampling()))
    assert seen == [(answer, answer)] and type(seen[0][0]) is type(answer)


def test_rows_of_a_dataset_may_have_nulls_and_numpy_values():
    import datasets
    import numpy as np

    rows = [
        {"prompt": [{"role": "user", "content": "a", "tool_calls": None}], "answer": 1},
        {"prompt": [{"role": "user", "content": "b", "tool_calls": [{"id": "x"}]}], "answer": 2},
    ]
    for form in (rows, datasets.Dataset.from_list(rows)):
        env = SingleTurnEnv(dataset=form)
        assert env.get_dataset()[0].prompt == [{"role": "user", "content": "a"}]
    (example,) = SingleTurnEnv(dataset=[{"question": "?", "answer": np.int64(3)}]).get_dataset()
    assert example.answer == 3 and type(example.answer) is int
    with pytest.raises(
        ValueError, match="row 0 of the dataset: its prompt is no list of messages with roles"
    ):
        SingleTurnEnv(dataset=[{"prompt": [{"content": "a"}]}])


def wrapped(tmp_path):
    """The same environment by itself, in workers, and in a group."""
    inner = load_environment("wrapped_env")
    return (
        inner,
        Isolated(inner, "wrapped_env", {}, 1),
        EnvGroup([load_environment("wrapped_env")], ["w"]),
    )


WRAPPED = '''
from hone.environments import Rubric, ToolEnv

def tool(a: int) -> int:
    """Adds.

    Args:
        a: a number
    """
    return a

def good(completion, answer):
    return float(completion[-1]["content"] == answer)

def load_environment():
    return ToolEnv(tools=[tool], max_turns=1, dataset=[{"question": "?", "answer": "a"}], rubric=Rubric([good]))
'''


def test_what_wraps_an_environment_has_all_that_it_has(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
    (tmp_path / "wrapped_env.py").write_text(WRAPPED)
    found = []
    for env in wrapped(tmp_path):
        env.on_reward_error("zero")
        env.check()
        env.add_rubric(Rubric([lambda completion: 10.0]))
        env.check()
        (example,) = env.get_dataset()
        assert env.demonstrate(example.prompt, example, random.Random(0)) == "a"
        tools = env.first_tools(example)
        assert tools[0]["function"]["parameters"]["properties"]["a"]["description"] == "a number"

        async def once(env=env, example=example):
            try:
                return await attempt(env, Plain(), example, Sampling(), 60.0)
            finally:
                await env.close()

        done = asyncio.run(once())
        found.append((done.error, done.reward))
    assert found == [(None, 11.0)] * 3
    public = {name for name in dir(hone.environments.Environment) if not name.startswith("_")}
    for env in wrapped(tmp_path):
        assert all(
            hasattr(env, name)
            for name in (*public, "parser", "rubric", "system_prompt", "few_shot", "call_timeout")
        )


class Plain:
    async def chat(self, prompt, sampling):
        return Turn([1], Completion([2], [0.0], [0], "stop"), "a")


def test_an_example_travels_as_json_with_its_answer():
    example = Example(0, [], {"x": [1, None]})
    assert json.loads(json.dumps(vars(example)))["answer"] == {"x": [1, None]}


def test_a_group_evaluates_on_the_examples_to_evaluate_on():
    def reward(info):
        return float(info["seed"])

    rows = [[{"question": "Play", "answer": "x", "info": {"seed": seed}}] for seed in (1, 1000)]
    inner = SingleTurnEnv(dataset=rows[0], eval_dataset=rows[1], rubric=Rubric([reward]))
    group = EnvGroup([inner], ["game"])
    for examples, expected in ((group.get_dataset(), 1.0), (group.get_eval_dataset(), 1000.0)):
        assert asyncio.run(attempt(group, Model(), examples[0], Sampling())).reward == expected


def test_rewards_of_any_names_are_summed_and_each_has_a_metric_of_its_own():
    for seed in range(200):
        rng = random.Random(seed)
        names = [rng.choice(["a", "a_2", "a_3", "b", "a_2_2"]) for _ in range(rng.randint(1, 5))]
        values = [float(10**i) for i in range(len(names))]
        funcs = []
        for name, value in zip(names, values, strict=True):
            funcs.append(lambda completion, value=value: value)
            funcs[-1].__name__ = name
        rubric = Rubric(funcs)
        reward, metrics = asyncio.run(rubric.score(completion=[], prompt=[]))
        assert reward == sum(values), names
        assert sorted(metrics.values()) == values and len(metrics) == len(names), (names, metrics)
        assert set(names) <= set(metrics)


def test_callables_without_a_hash_may_reward():
    @dataclasses.dataclass
    class Reward:
        worth: float

        def __call__(self, completion):
            return self.worth

    env = SingleTurnEnv(dataset=[ROW], rubric=Rubric([Reward(2.0), Reward(3.0)]))
    env.check()
    assert asyncio.run(attempt(env, Model(), env.get_dataset()[0], Sampling())).reward == 5.0


def test_tools_are_told_apart_and_have_the_parameters_that_a_model_can_give():
    class Shop:
        def look(self, item: str, *more: str, **options: int) -> str:
            return item

    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    env = ToolEnv(tools=[Shop().look, functools.partial(add, b=1)], dataset=[ROW])
    assert (
        env.oai_tools[1]["function"]["name"] == "add"
        and env.oai_tools[1]["function"]["description"] == "Adds."
    )
    assert list(env.oai_tools[0]["function"]["parameters"]["properties"]) == ["item"]
    with pytest.raises(
        ValueError, match="two tools are named 'look'; the model could not tell them apart"
    ):
        env.add_tool(Shop().look)

    def hidden(_x: int) -> int:
        return _x

    with pytest.raises(ValueError, match="tool hidden: a parameter cannot be named '_x'"):
        env.add_tool(hidden)
