"""Environments written for verifiers' v0 API: five published styles, ported by their import line alone."""

import asyncio
import json
import random
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest

import hone.environments as vf
from hone.environments.attempt import attempt, score_group_or_fail
from hone.environments.tools import schema_of
from hone.records import Completion, ContextFull, Rollout, Sampling, Turn


class Scripted:
    """A model that says the given replies in turn; one that is a dict calls a tool by its name with these arguments."""

    def __init__(self, *replies):
        self.replies, self.asked, self.tools = list(replies), [], None

    async def chat(self, messages, sampling, tools=None):
        self.asked.append(list(messages))
        self.tools = tools
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        completion, calls = Completion([3], [-0.5], [0], "stop"), []
        for i, (name, arguments) in enumerate(reply.items() if isinstance(reply, dict) else []):
            function = {"name": name, "arguments": json.dumps(arguments)}
            calls.append(
                {"id": f"call_{len(messages)}_{i}", "type": "function", "function": function}
            )
        return Turn([1, 2], completion, "" if calls else reply, calls)


def play(env, *replies, index=0):
    model = Scripted(*replies)
    done = asyncio.run(env.rollout(model, env.get_dataset()[index], Sampling()))
    return done, model


# ---------------------------------------------------------------------------------------------------- single turn


def single_turn():
    dataset = [{"question": "2 + 3?", "answer": "5"}, {"question": "1 + 1?", "answer": "2"}]
    parser = vf.XMLParser(["think", "answer"], answer_field="answer")

    def correct_answer_reward_func(parser, completion, answer, **kwargs):
        return 1.0 if parser.parse_answer(completion) == answer else 0.0

    rubric = vf.Rubric(
        funcs=[correct_answer_reward_func, parser.get_format_reward_func()],
        weights=[1.0, 0.2],
        parser=parser,
    )
    return vf.SingleTurnEnv(
        dataset=dataset, system_prompt="Think.", parser=parser, rubric=rubric, max_concurrent=8
    )


def test_single_turn_with_a_dataset():
    done, model = play(single_turn(), "<think>hm</think><answer>5</answer>")
    assert done.reward == pytest.approx(1.2) and done.stop == "max_turns_reached"
    assert [m["role"] for m in model.asked[0]] == ["system", "user"]
    assert set(done.timings) == {"model", "environment", "scoring"}


# ---------------------------------------------------------------------------------------------------- multi turn


class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state: vf.State, **kwargs) -> vf.State:
        state["secret"] = int(state["answer"])
        state["guesses"] = []
        return state

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs) -> vf.Messages:
        guess = int(messages[-1]["content"])
        state["guesses"].append(guess)
        if guess == state["secret"]:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        return [{"role": "user", "content": "higher" if guess < state["secret"] else "lower"}]

    @vf.stop
    async def gave_up(self, state: vf.State) -> bool:
        return state["turn"] > 0 and state["completion"][-1]["content"] == "0"

    @vf.cleanup
    async def forget(self, state: vf.State) -> None:
        state["cleaned"] = True


def guesses_left(state, info):
    return info["most"] - len(state["guesses"])


def multi_turn():
    rows = [{"prompt": [{"role": "user", "content": "Guess."}], "answer": "7", "info": {"most": 5}}]
    return Guess(dataset=rows, rubric=vf.Rubric(funcs=[guesses_left]), max_turns=4)


def test_multi_turn_with_state():
    done, model = play(multi_turn(), "5", "9", "7")
    assert [m["content"] for m in done.messages[:4]] == ["5", "higher", "9", "lower"]
    assert done.reward == 2 and done.stop == "has_final_env_response" and len(done.turns) == 3
    assert [m["content"] for m in model.asked[-1]] == ["Guess.", "5", "higher", "9", "lower"]
    assert done.messages[-1]["content"] == "right" and done.state["cleaned"]
    assert play(multi_turn(), "5", "0")[0].stop == "gave_up"
    assert play(multi_turn(), *"1234")[0].stop == "max_turns_reached"
    assert play(multi_turn(), "5", ContextFull("full"))[0].stop == "prompt_too_long"
    with pytest.raises(ContextFull):  # not even the first question fits
        play(multi_turn(), ContextFull("full"))


class Older(vf.MultiTurnEnv):
    """As v0 was at first: plain functions, conditions of messages and state, state handed back."""

    def is_completed(self, messages, state, **kwargs):
        return "done" in messages[-1]["content"]

    def env_response(self, messages, state, **kwargs):
        return {"role": "user", "content": "go on"}, {**state, "count": state.get("count", 0) + 1}


def test_multi_turn_as_it_was_first():
    env = Older(dataset=[{"question": "?"}], rubric=vf.Rubric(funcs=[lambda state: state["count"]]))
    done, _ = play(env, "a", "b", "done")
    assert done.reward == 2 and done.stop == "is_completed"
    lost = Older(dataset=[{"question": "?"}])
    lost.env_response = lambda messages, state: 7
    with pytest.raises(TypeError, match="env_response gave 7, not messages"):
        play(lost, "a", "b")


# ---------------------------------------------------------------------------------------------------- tools


def divide(a: float, b: float = 1.0) -> float:
    """Divide a number by another.

    Args:
        a: what is divided,
            in full
        b: by what

    Returns:
        The quotient.
    """
    return a / b


async def shout(word: str, times: list[int] | None = None) -> str:
    """Say a word loudly."""
    return word.upper()


def test_tools_from_docstrings():
    env = vf.ToolEnv(
        dataset=[{"question": "6 / 4?", "answer": "1.5"}],
        tools=[divide, shout],
        max_turns=6,
        rubric=vf.Rubric(
            funcs=[lambda completion, answer: float(answer in completion[-1]["content"])]
        ),
    )
    calls = {"divide": {"a": 6, "b": 4}, "shout": {"word": "so"}}
    done, model = play(
        env, calls, {"divide": {"a": 1, "b": 0}}, {"divid": {}}, {"divide": {"c": 1}}, "1.5"
    )
    said = [m["content"] for m in done.messages if m["role"] == "tool"]
    assert said[:3] == ["1.5", "SO", "division by zero"]
    assert said[3] == "there is no tool 'divid'; the tools are: divide, shout"
    assert said[4].startswith("divide: missing a required argument")
    assert done.messages[0]["tool_calls"][0]["id"] == done.messages[1]["tool_call_id"]
    assert done.reward == 1.0 and done.stop == "no_tools_called"
    assert done.metrics["total_tool_calls"] == 5 and done.metrics["divide_calls"] == 3
    schema = model.tools[0]["function"]
    assert schema["description"] == "Divide a number by another." and schema["parameters"][
        "required"
    ] == ["a"]
    assert schema["parameters"]["properties"]["a"] == {
        "type": "number",
        "description": "what is divided, in full",
    }
    assert schema_of(shout)["function"]["parameters"]["properties"]["times"]["default"] is None


class Notes(vf.StatefulToolEnv):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.add_tool(self.note, args_to_skip=["kept"])

    async def setup_state(self, state):
        state["kept"] = []
        return state

    def note(self, text: str, kept: list) -> str:
        """Keep a text."""
        kept.append(text)
        return f"{len(kept)} kept"

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {**tool_args, "kept": state["kept"]}


def test_tools_with_a_state_that_the_model_does_not_see():
    env = Notes(
        dataset=[{"question": "?"}], rubric=vf.Rubric(funcs=[lambda state: len(state["kept"])])
    )
    done, model = play(env, {"note": {"text": "a"}}, {"note": {"text": "b"}}, "end")
    assert done.reward == 2 and done.messages[-2]["content"] == "2 kept"
    assert list(model.tools[0]["function"]["parameters"]["properties"]) == ["text"]


def test_calls_have_a_deadline():
    async def slow() -> str:
        """Take long."""
        await asyncio.sleep(5)
        return ""

    env = vf.ToolEnv(dataset=[{"question": "?"}], tools=[slow], call_timeout=0.05)
    done, _ = play(env, {"slow": {}}, "x")
    assert done.messages[1]["content"] == "slow did not end within 0.05 s"

    async def grade(completion):
        await asyncio.sleep(5)

    env = vf.SingleTurnEnv(
        dataset=[{"question": "?"}], rubric=vf.Rubric(funcs=[grade]), call_timeout=0.05
    )
    with pytest.raises(vf.RewardError, match="grade gave no value within 0.05 s"):
        play(env, "x")

    def late(completion):
        raise TimeoutError("the disk is slow")

    env = vf.SingleTurnEnv(
        dataset=[{"question": "?"}], rubric=vf.Rubric(funcs=[late]), call_timeout=5.0
    )
    with pytest.raises(vf.RewardError, match="late raised TimeoutError: the disk is slow"):
        play(env, "x")


def test_data_sets_by_the_names_of_v0(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(*words, split):
        asked.append((*words, split))
        return datasets.Dataset.from_list(
            [{"question": f"{i}?", "answer": f"so\n#### {i}", "more": 1} for i in range(9)]
        )

    monkeypatch.setattr(datasets, "load_dataset", load)
    rows = vf.load_example_dataset("gsm8k", n=3, seed=1)
    assert asked == [("openai/gsm8k", "main", "test")] and rows.column_names == [
        "question",
        "answer",
    ]
    assert len(rows) == 3 and all(row["question"] == row["answer"] + "?" for row in rows)
    assert len(vf.load_example_dataset("gsm8k", split="train")) == 9 and asked[1][2] == "train"
    assert vf.extract_hash_answer("plain") == "plain"
    with pytest.raises(ValueError, match="there is no 'gsm'; there are gsm8k, math"):
        vf.load_example_dataset("gsm")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: 1 / 0)
    with pytest.raises(ValueError, match="cannot be loaded from the hub"):
        vf.load_example_dataset("math500")


# ---------------------------------------------------------------------------------------------------- judge


class Judge(BaseHTTPRequestHandler):
    asked: ClassVar[list] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.path, self.headers["authorization"], body))
        if len(self.asked) == 1:  # busy
            self.send_response(503)
            self.end_headers()
            return
        says = "yes" if "Response:\nParis" in body["messages"][0]["content"] else "no"
        answer = json.dumps(
            {"choices": [{"message": {"role": "assistant", "content": says}}]}
        ).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def test_a_judge_over_an_endpoint(monkeypatch):
    server = HTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("JUDGE_KEY", "secret")
    url = f"http://127.0.0.1:{server.server_port}/v1"
    rubric = vf.JudgeRubric(
        judge_model="wise", base_url=url, api_key_var="JUDGE_KEY", judge_sampling_args={"seed": 1}
    )

    async def judged(judge, prompt, completion, answer, state):
        return 1.0 if "yes" in (await judge(prompt, completion, answer, state)).lower() else 0.0

    async def again(judge, prompt, completion, answer, state):
        return await judged(judge, prompt, completion, answer, state)

    rubric.add_reward_func(judged, weight=1.0)
    rubric.add_reward_func(again, weight=0.5)
    env = vf.SingleTurnEnv(
        dataset=[{"question": "Capital of France?", "answer": "Paris"}], rubric=rubric
    )
    env.check()
    assert play(env, "Paris")[0].reward == 1.5 and play(env, "Rome")[0].reward == 0.0
    server.shutdown()
    assert len(Judge.asked) == 3  # busy, then once for both functions, then once
    path, key, body = Judge.asked[1]
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert (
        body["model"] == "wise"
        and body["seed"] == 1
        and "Capital of France?" in body["messages"][0]["content"]
    )


# ---------------------------------------------------------------------------------------------------- groups


def shortest(completions, answers, **kwargs):
    lengths = [len(one[-1]["content"]) for one in completions]
    return [float(length == min(lengths)) for length in lengths]


def test_rewards_of_a_group_compare_its_rollouts():
    env = vf.SingleTurnEnv(
        dataset=[{"question": "?"}],
        rubric=vf.Rubric(funcs=[shortest, lambda completion: 0.25], weights=[0.5, 1.0]),
    )
    env.check()
    rollouts = [play(env, text)[0] for text in ("long one", "short")] + [
        Rollout(None, [], [], error="lost")
    ]
    asyncio.run(score_group_or_fail(env, rollouts))
    assert [r.reward for r in rollouts] == [0.25, 0.75, 0.0]
    assert (
        rollouts[1].metrics == {"<lambda>": 0.25, "shortest": 1.0} and rollouts[2].error == "lost"
    )

    def one_too_many(completions):
        return [1.0] * (len(completions) + 1)

    env.rubric.add_reward_func(one_too_many)
    asyncio.run(score_group_or_fail(env, rollouts))
    assert (
        rollouts[0].error
        == "reward function one_too_many raised TypeError: gave 3 values for 2 rollouts"
    )


def test_rubrics_that_disagree_are_summed_before_advantages():
    def longer(completion):
        return len(completion[-1]["content"]) / 10

    def better(completion):
        return float("b" in completion[-1]["content"])

    group = vf.RubricGroup([vf.Rubric([longer], [-1.0]), vf.Rubric([longer, better], [0.5, 1.0])])
    env = vf.SingleTurnEnv(dataset=[{"question": "?"}], rubric=group)
    done = [play(env, text)[0] for text in ("aaaaaaaaaa", "b")]
    assert [r.reward for r in done] == pytest.approx([-0.5, 0.95])
    assert done[1].metrics == {"longer": 0.1, "longer_2": 0.1, "better": 1.0}
    assert group.get_reward_func_names() == ["longer", "longer_2", "better"]


def test_a_group_of_environments_has_all_their_tasks():
    def named(task):
        return float(task == "guess")

    guess = multi_turn()
    guess.rubric.add_metric(named)
    env = vf.EnvGroup([single_turn(), guess], env_names=["sum", "guess"])
    env.check()
    examples = env.get_dataset()
    assert [(e.id, e.task) for e in examples] == [(0, "sum"), (1, "sum"), (2, "guess")]
    assert play(env, "<think>\n</think><answer>2</answer>", index=1)[0].metrics["sum/reward"] > 1
    done, _ = play(env, "7", index=2)
    assert done.reward == 4 and done.metrics["named"] == 1.0
    with pytest.raises(ValueError, match="2 environments and the names"):
        vf.EnvGroup([env, env], env_names=["a"])


# ---------------------------------------------------------------------------------------------------- what is refused


def test_a_reward_function_that_asks_for_what_is_not_there():
    for func, words in (
        (
            lambda completions_: 0.0,
            "'completions_', which is not available; did you mean completion",
        ),
        (lambda completion, answers_key: 0.0, "did you mean answer"),
        (lambda judge: 0.0, "needs 'judge'"),
        (
            lambda completions, answer: [0.0],
            "'answer', which is not available; did you mean answers",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            vf.SingleTurnEnv(dataset=[{"question": "?"}], rubric=vf.Rubric([func])).check()
    rubric = vf.Rubric([lambda completion, other=1, **kwargs: 0.0, lambda table: table["a"]])
    rubric.add_class_object("table", {"a": 2.0})
    rubric.check()
    with pytest.raises(ValueError, match="SingleTurnEnv takes no argument 'datset'"):
        vf.SingleTurnEnv(dataset=[{"question": "?"}], datset=[])
    with pytest.raises(ValueError, match='"chat"'):
        vf.SingleTurnEnv(dataset=[{"question": "?"}], message_type="completion")


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("None", "returned builtins.NoneType; accepted is an environment of hone.environments"),
        (
            "vf.SingleTurnEnv(dataset=[{'question': '?'}], rubric=vf.Rubric([lambda anser: 1]))",
            "did you mean answer",
        ),
    ],
)
def test_what_load_environment_returns_is_an_environment(returned, words, tmp_path, monkeypatch):
    name = f"env_of_{random.Random(returned).randrange(10**6)}"
    (tmp_path / f"{name}.py").write_text(
        f"import hone.environments as vf\ndef load_environment():\n return {returned}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=words):
        vf.load_environment(name)


# ---------------------------------------------------------------------------------------------------- parsers


def test_parsers_of_thinking_and_boxes():
    assert (
        vf.ThinkParser().parse("<think>a</think> b ") == "b" and vf.ThinkParser().parse("b") == ""
    )
    assert (
        vf.MaybeThinkParser(vf.extract_boxed_answer).parse("x</think>so \\boxed{\\frac{1}{2}}.")
        == "\\frac{1}{2}"
    )
    assert (
        vf.extract_boxed_answer("none") == "none"
        and vf.extract_boxed_answer("none", strict=True) == ""
    )
    form = vf.ThinkParser().get_format_reward_func()
    says = [
        {"role": "assistant", "content": text}
        for text in ("<think>a</think>b", "<think>a</think>", "b", "")
    ]
    assert form(says) == 0.25


def test_attempts_keep_what_was_sampled():
    class Client:
        async def chat(self, prompt, sampling):
            assert prompt.tools[0]["function"]["name"] == "divide"
            return Turn([1], Completion([2], [-0.1], [0], "stop"), "done")

    env = vf.ToolEnv(dataset=[{"question": "?"}], tools=[divide])
    done = asyncio.run(attempt(env, Client(), env.get_dataset()[0], Sampling()))
    assert not done.error and done.stop == "no_tools_called"


def test_groups_of_groups_and_what_they_demonstrate():
    inner = vf.EnvGroup([single_turn(), single_turn()], env_names=["a", "b"])
    env = vf.EnvGroup([multi_turn(), inner], env_names=["guess", "sums"])
    example = env.get_dataset()[3]
    assert (example.id, example.task, example.answer) == (3, "sums", "5")
    done, _ = play(env, "<think>\n</think><answer>5</answer>", index=3)
    assert done.reward == pytest.approx(1.2) and done.example is example
    assert env.demonstrate(example.prompt, example, random.Random(0)) == "<answer>5</answer>"


def test_the_rubrics_own_parser_is_the_one_that_its_functions_get():
    def right(parser, completion, answer):
        return float(parser.parse_answer(completion) == answer)

    rows = [{"question": "?", "answer": "2"}]
    own = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([right], parser=vf.XMLParser(["answer"])))
    assert play(own, "<answer>1</answer> no, <answer>2</answer>")[0].reward == 1.0
    of_the_environment = vf.SingleTurnEnv(
        dataset=rows, parser=vf.XMLParser(["answer"]), rubric=vf.Rubric([right])
    )
    assert play(of_the_environment, "<answer>2</answer>")[0].reward == 1.0


def test_rows_as_other_libraries_write_them():
    rows = [{"prompt": [{"role": "user", "content": "?"}], "info": '{"a": 1}'}]
    (example,) = vf.SingleTurnEnv(dataset=rows, system_prompt="Be good.").get_dataset()
    assert example.info == {"a": 1} and [m["role"] for m in example.prompt] == ["system", "user"]
