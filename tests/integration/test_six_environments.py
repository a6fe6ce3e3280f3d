"""The environments that ship: what answers are worth, and that all of them work offline."""

import asyncio
import random

import pytest

import hone.environments as vf
from hone.authoring.demonstrations import demonstrate_rollout
from hone.records import Sampling
from tests.unit.test_sandbox import contained
from tests.unit.test_v0_protocol import Scripted

pytestmark = pytest.mark.main_path

OFFLINE = {"reverse-text": {"texts": "generated"}}
SIX = ("alphabet-sort", "gsm8k", "math-python", "reverse-text", "wiki-search", "wordle")


def play(env, example, *replies):
    return asyncio.run(env.rollout(Scripted(*replies), example, Sampling()))


@pytest.mark.parametrize("name", [name for name in SIX if name != "math-python"])
def test_what_they_demonstrate_is_right_and_repeats(name):
    env, again = (vf.load_environment(name, **OFFLINE.get(name, {})) for _ in range(2))
    assert [e.prompt for e in env.get_dataset()] == [e.prompt for e in again.get_dataset()]
    both = [example for example in env.get_dataset()[:20] + env.get_eval_dataset()[:10]]

    async def rewards():
        return [(await demonstrate_rollout(env, example, 0))[0].reward for example in both]

    assert min(asyncio.run(rewards())) >= (0.2 if name == "wordle" else 1.0)


@contained
def test_python_computes_what_is_asked():
    env = vf.load_environment("math-python", seconds=5.0)

    async def program():
        done, tools = await demonstrate_rollout(env, env.get_dataset()[0], 0)
        model = Scripted(
            {"python": {"code": "x = 6"}}, {"python": {"code": "x * 7"}}, "\\boxed{42}"
        )
        kept = await env.rollout(model, env.get_dataset()[0], Sampling())
        await env.close()
        return done, kept, tools

    done, kept, tools = asyncio.run(program())
    assert done.reward == 1.0 and done.metrics["python_calls"] == 1.0
    assert [m["content"] for m in kept.messages if m["role"] == "tool"] == ["", "42"]
    assert list(tools[0]["function"]["parameters"]["properties"]) == ["code"]


def test_alphabet_sort_is_worth_the_similarity_of_each_turn():
    env = vf.load_environment(
        "alphabet-sort", min_turns=2, max_turns=2, min_names_per_turn=2, max_names_per_turn=2
    )
    example = env.get_dataset()[0]
    first, second = example.info["ground_truths"]
    said = lambda tag, names: f"<{tag}>\n" + "\n".join(names) + f"\n</{tag}>"  # noqa: E731
    right = said("alphabetical_sorted", first), said("combined_alphabetical_sorted", second)
    assert sum(" // new name!" in name for name in second) == 2 and len(second) == 4
    assert play(env, example, *right).reward == 1.0
    half = play(env, example, right[0], "no")
    assert (
        half.reward == 0.5
        and half.metrics["exact"] == 0.0
        and half.stop in ("all_asked", "max_turns_reached")
    )
    worse = play(env, example, right[0] + said("alphabetical_sorted", first[::-1]), right[1])
    assert worse.reward == 0.5  # of two lists the second is not better
    by = 0 if example.info["sort_by_first"] else 1
    from alphabet_sort import parts

    assert [parts(name)[by] for name in first] == sorted(parts(name)[by] for name in first)
    with pytest.raises(ValueError, match="1 <= min <= max"):
        vf.load_environment("alphabet-sort", min_turns=3, max_turns=2)


def test_wordle_marks_and_rewards():
    from wordle import marks

    assert marks("crane", "crane") == "GGGGG" and marks("eerie", "geese") == "YGXXG"
    assert marks("allee", "apple") == "GYXXG"
    env = vf.load_environment("wordle", words=["crane", "crate", "brave"], max_guesses=3)
    example = next(e for e in env.get_dataset() if e.answer == "crane")
    assert "5-letter word" in example.prompt[-1]["content"] and example.prompt[0][
        "content"
    ].startswith("You are a comp")
    won = play(env, example, "<guess>[brave]</guess>", "so <guess>[CRANE]</guess>")
    assert won.messages[1]["content"] == "B R A V E\nX G G X G\n\nYou have 2 guesses left."
    assert won.metrics["correct_answer"] == 1.0 and won.metrics["length_bonus"] == 0.5
    assert won.stop == "has_final_env_response" and won.metrics["consistent_guesses"] == 1.0
    lost = play(env, example, "<guess>[brave]</guess>", "what?", "<guess>[crate]</guess>")
    assert (
        lost.metrics["partial_answer"] == pytest.approx(0.8)
        and "in square brackets" in lost.messages[3]["content"]
    )
    with pytest.raises(ValueError, match="at least two of one length"):
        vf.load_environment("wordle", words=["a", "bcd"])


def test_wiki_search_finds_reads_and_compares_words():
    env = vf.load_environment("wiki-search")
    assert len(env.get_dataset()) + len(env.get_eval_dataset()) == 48
    found = asyncio.run(env.corpus.search_pages("moons of Mars"))
    assert found[0]["page_id"] == "mars_(planet)"
    example = next(e for e in env.get_dataset() + env.get_eval_dataset() if e.answer == "1,642")
    done = play(
        env,
        example,
        {"read_section": {"section_id": "lake_baikal:nothing"}},
        "It is 1642 metres deep.",
    )
    assert done.reward == 1.0 and "there is no section" in done.messages[1]["content"]
    assert play(env, example, "16 metres").reward == 0.0


def test_gsm8k_never_trains_on_what_is_held_out():
    env = vf.load_environment("gsm8k")
    asked = [
        {e.prompt[-1]["content"] for e in rows}
        for rows in (env.get_dataset(), env.get_eval_dataset())
    ]
    assert not asked[0] & asked[1] and len(asked[1]) == 256
    example = env.get_dataset()[0]
    assert play(env, example, f"so \\boxed{{{example.answer}.0}}").reward == 1.0
    assert play(env, example, f"{random.Random(0).random()}").reward == 0.0


@pytest.mark.parametrize("name", SIX)
def test_unknown_data_is_refused(name):
    wrong = {"alphabet-sort": "names", "reverse-text": "texts", "wiki-search": "pages"}.get(
        name, "problems"
    )
    if name == "wordle":
        wrong = "demonstrations"
    with pytest.raises(ValueError, match=f"{name}: .*'nothing'"):
        vf.load_environment(name, **{wrong: "nothing"})
