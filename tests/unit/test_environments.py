"""Environments: the protocol, parsers, rubrics, the registry, and reverse-text."""

import asyncio
import functools
import time
from collections import Counter

import pytest

import hone.environments as vf
from hone.config.sections import EvalConfig
from hone.environments.attempt import attempt
from hone.environments.math_rubric import Comparer
from hone.evals.held_out import evaluate_environments, mean_scores
from hone.records import Completion, Rollout, Sampling, Turn


class Echo:
    """A model that answers every prompt with the same words."""

    def __init__(self, text):
        self.text = text

    async def chat(self, messages, sampling, tools=None):
        self.seen = messages
        return Turn([1, 2], Completion([3], [-0.5], [0], "stop"), self.text)


class Asked(Echo):
    """The same as a client that is given a whole prompt."""

    async def chat(self, prompt, sampling):
        return await super().chat(prompt.messages, sampling)


def rollout(env, text, index=0):
    return asyncio.run(env.rollout(Echo(text), env.get_dataset()[index], Sampling()))


def test_single_turn_rollout_is_prompted_and_scored():
    def length(completion, answer, info, **_):
        return len(completion[0]["content"]) / len(answer) + info["bonus"]

    async def is_it(completion, answer, parser):
        return float(parser.parse_answer(completion) == answer)

    env = vf.SingleTurnEnv(
        dataset=[{"question": "q?", "answer": "abcd", "info": {"bonus": 1.0}}],
        system_prompt="Be good.",
        few_shot=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
        rubric=vf.Rubric(funcs=[length, is_it], weights=[1.0, 0.5]),
    )
    done = rollout(env, "abcd")
    assert [m["content"] for m in done.example.prompt] == ["Be good.", "x", "y", "q?"]
    assert done.reward == pytest.approx(2.0 + 0.5) and done.metrics == {"length": 2.0, "is_it": 1.0}
    assert done.messages == [{"role": "assistant", "content": "abcd"}] and not done.error


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (RuntimeError("no"), "raised RuntimeError: no (at.py:1)"),
        (None, "returned None"),
        (float("nan"), "returned nan"),
        ("0.5", "returned '0.5'"),
        ([1.0], "returned list, not a number"),
    ],
)
def test_a_reward_function_without_a_number_fails_its_rollout_or_counts_zero(value, said, caplog):
    def broken(completion):
        if isinstance(value, Exception):
            raise value
        return value

    broken.__name__ = f"broken_{type(value).__name__}"
    env = vf.SingleTurnEnv(
        dataset=[{"question": "q"}], rubric=vf.Rubric(funcs=[broken, lambda **_: 1.0])
    )
    failures = Counter()
    done = asyncio.run(
        attempt(env, Asked("a"), env.get_dataset()[0], Sampling(), retries=2, failures=failures)
    )
    what = said.partition(" (")[0]
    assert done.error == f"reward function {broken.__name__} {what}" and failures == {"reward": 3}
    assert caplog.text.count(broken.__name__) == 1 and what in caplog.text  # said once
    env.on_reward_error("zero")
    done = rollout(env, "a")
    assert done.reward == 1.0 and done.metrics == {
        broken.__name__: 0.0,
        "<lambda>": 1.0,
        "reward_raised": 1.0,
    }


def test_functions_of_one_name_and_without_a_name():
    def good(answer):
        return 1.0

    half = functools.partial(lambda answer, by: 1 / by, by=2)
    rubric = vf.Rubric([good, lambda answer: 0.25, lambda answer: 0.5, half], [1, 1, 1, 2])
    reward, metrics = asyncio.run(rubric.score(answer="x"))
    assert reward == 2.75
    assert metrics == {"good": 1.0, "<lambda>": 0.25, "<lambda>_2": 0.5, "<lambda>_3": 0.5}


def test_rows_without_a_question_and_rubrics_with_odd_weights_are_refused():
    with pytest.raises(ValueError, match="neither 'prompt' nor 'question'"):
        vf.SingleTurnEnv(dataset=[{"text": "q"}])
    with pytest.raises(ValueError, match="2 functions but 1 weights"):
        vf.Rubric(funcs=[len, len], weights=[1.0])


def test_xml_parser():
    parser = vf.XMLParser(["think", ("code", "answer")])
    parsed = parser.parse("<think>\n hm\n</think><answer> 4 </answer>")
    assert (parsed.think, parsed.code, parsed.answer) == ("hm", None, "4")
    assert parser.parse("<answer> 4 </answer>", strip=False).answer == " 4 "
    turns = [
        {"role": "assistant", "content": "<answer>1</answer>"},
        {"role": "user", "content": "<answer>2</answer>"},
    ]
    assert parser.parse_answer(turns) == "1" and parser.parse_answer("nothing") is None
    with pytest.raises(ValueError, match="answer_field"):
        vf.XMLParser(["a"], answer_field="b")


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<a>x</a><b>y</b>", 1.0),
        ("  <a>x</a> then <b>y</b> ", 1.0),
        ("so <a>x</a><b>y</b>", 0.8),  # does not start with a field
        ("<a>x</a>", 0.4 * 0.5 + 0.2 + 0.2),  # one field of two, does not end with the last
        ("nothing", 0.0),
        ("<a>x<b>y</b>", 0.4 * 0.5 + 0.2 + 0.2),  # <a> is never closed
    ],
)
def test_format_reward(text, score):
    assert vf.XMLParser(["a", "b"]).get_format_reward_func()(text) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "reward", "exact"),
    [
        ("<reversed_text>cba</reversed_text>", 1.0, 1.0),
        ("<reversed_text>cbx</reversed_text>", 2 * 2 / 6, 0.0),
        ("cba", 0.0, 0.0),
        ("<reversed_text>cba", 0.0, 0.0),
    ],
)
def test_reverse_text_reward(tmp_path, answer, reward, exact):
    (tmp_path / "texts.txt").write_text("abc\n\nxyz\n")
    env = vf.load_environment("primeintellect/reverse-text", texts=str(tmp_path / "texts.txt"))
    assert [e.answer for e in env.get_dataset()] == ["cba", "zyx"]
    done = rollout(env, answer)
    assert done.reward == pytest.approx(reward) and done.metrics["exact_match"] == exact
    assert done.example.prompt[0]["content"].startswith("Reverse the text character-by-character.")


def test_generated_texts_are_repeatable_and_never_both_trained_on_and_held_out():
    make = functools.partial(
        vf.load_environment, "reverse-text", texts="generated", min_chars=2, max_chars=5
    )
    env, again, other = make(), make(), make(seed=1)
    train = [e.answer for e in env.get_dataset()]
    held_out = {e.answer for e in env.get_eval_dataset()}
    assert (
        train == [e.answer for e in again.get_dataset()] != [e.answer for e in other.get_dataset()]
    )
    assert len(held_out) == 256 and not held_out & set(train)
    assert not held_out & {e.answer for e in other.get_dataset()}  # nor with another seed
    assert all(2 <= len(t) <= 5 and t == t.strip() for t in train)


def test_unknown_environments_and_arguments_are_named():
    with pytest.raises(ValueError, match="did you mean reverse-text"):
        vf.load_environment("reverse-txt")
    with pytest.raises(
        ValueError, match=r"unexpected keyword argument 'txts'; its arguments are: texts, "
    ):
        vf.load_environment("reverse-text", txts="x")
    with pytest.raises(ValueError, match="is not an environment"):
        vf.load_environment("json")
    with pytest.raises(ValueError, match="must be 'hub', 'generated', 'phrases' or a file"):
        vf.load_environment("reverse-text", texts="nowhere.txt")


def test_an_environment_that_cannot_be_imported_says_so_in_a_line(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "half_written.py").write_text("def load_environment():\n    return [\n")
    with pytest.raises(
        ValueError, match=r"'half-written': .*half_written.py, line 2: '\[' was never closed"
    ):
        vf.load_environment("half-written")
    (tmp_path / "needy.py").write_text("import no_such_thing\n")
    with pytest.raises(
        ValueError, match="'needy' needs the module no_such_thing, which is not installed"
    ):
        vf.load_environment("needy")


def test_an_unreachable_hub_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(
        "datasets.load_dataset", lambda *a, **k: (_ for _ in ()).throw(ConnectionError("offline"))
    )
    with pytest.raises(ValueError, match="cannot be loaded from the hub"):
        vf.load_environment("reverse-text")


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (None, "no end within 0.05 s"),
        (TimeoutError("own"), "TimeoutError: own"),
        (1, "TypeError: rollout() gave int"),
    ],
)
def test_an_evaluation_goes_on_without_what_has_no_end_or_gives_nothing(end, error):
    class Odd(vf.SingleTurnEnv):
        async def rollout(self, client, example, sampling):
            if end is None:
                await asyncio.sleep(60)
            if isinstance(end, Exception):
                raise end
            return end

    config = EvalConfig(env={"id": "odd"}, timeout=0.05)
    env = Odd(dataset=[{"question": "q"}], eval_dataset=[{"question": "q"}])
    # Not a function's
    assert (
        mean_scores([Rollout(env.get_dataset()[0], [], [], 0.5, {"reward": 1.0})])["reward"] == 0.5
    )
    assert asyncio.run(evaluate_environments(config, {"odd": env}, Echo("a"), 0)) == {
        "eval/odd/failed": 1
    }
    example, sampling = env.get_eval_dataset()[0], Sampling()
    assert asyncio.run(attempt(env, Echo("a"), example, sampling, 0.05)).error.startswith(error)


def test_slow_comparisons_hold_up_no_others_and_no_longer_than_they_may(monkeypatch):
    worker = (
        "import json, sys, time\ntime.sleep(1.0)\nprint('ready', flush=True)\n"
        "for line in sys.stdin:\n    gold, given = json.loads(line)\n    time.sleep(float(given))\n"
        "    print(json.dumps(gold == 'g'), flush=True)\n"
    )
    monkeypatch.setattr("hone.environments.math_rubric.WORKER", worker)

    async def compare():
        comparer = Comparer(0.5, workers=2)
        # Starting takes longer than a comparison may
        assert await comparer.is_equal("g", "0") is True
        start = time.monotonic()
        slow = asyncio.create_task(comparer.is_equal("g", "30"))
        await asyncio.sleep(0.05)
        quick = await asyncio.gather(*(comparer.is_equal("g", "0") for _ in range(5)))
        assert quick == [True] * 5 and await slow is False
        assert time.monotonic() - start < 10
        assert (
            await comparer.is_equal("g", "0") is True and await comparer.is_equal("x", "0") is False
        )

    asyncio.run(compare())
