"""What a group's rollouts are worth, and which of their tokens are trained on. Values by hand."""

import json

import numpy as np
import pytest

from hone.config.orchestrator_config import BufferConfig, GroupConfig
from hone.orchestrator.advantage import make_advantage, penalize_overlong
from hone.orchestrator.group import Group, judge_group, samples_of
from hone.orchestrator.schedule import Task
from hone.records import Completion, Example, Rollout, Turn


def rollout(reward, reason="stop", error=None, ids=(7, 8)):
    if error:
        return Rollout(Example(0, []), [], [], error=error)
    completion = Completion(list(ids), [-0.5] * len(ids), [3] * len(ids), reason)
    return Rollout(Example(0, []), [Turn([1, 2], completion, "")], [], reward)


def judged(rollouts, buffer=None, **settings):
    group = Group(Task(0, "env", 0), rollouts)
    config = GroupConfig(**settings)
    judge_group(group, make_advantage(config), config, BufferConfig(**(buffer or {})))
    return group


@pytest.mark.parametrize(
    ("truncated", "advantages", "learnt", "dropped"),
    [
        ("keep", [0.25, -0.75, 0.25, 0.25], [True] * 4, 0),
        ("mask", [0.25, -0.75, 0.25, 0.25], [True, True, True, False], 3),
        ("zero", [0.5, -0.5, 0.5, -0.5], [True] * 4, 0),
        ("drop", [1 / 3, -2 / 3, 1 / 3, 0.0], [True, True, True, False], 3),
    ],
)
def test_what_was_cut_off(truncated, advantages, learnt, dropped):
    rollouts = [rollout(1.0), rollout(0.0), rollout(1.0), rollout(1.0, "length", ids=(4, 5, 6))]
    group = judged(rollouts, truncated=truncated)
    assert group.advantages == pytest.approx(advantages) and group.learnt == learnt
    assert group.dropped["truncated"] == dropped and len(group.samples) == sum(learnt)
    assert sum(map(sum, (s.mask for s in group.samples))) == 9 - dropped


def test_what_failed_counts_as_nothing_or_as_0():
    rollouts = lambda: [rollout(1.0), rollout(1.0), rollout(0.0, error="gone")]  # noqa: E731
    assert judged(rollouts()).unused == "no_signal"
    zero = judged(rollouts(), failed="zero")
    assert zero.advantages == pytest.approx([1 / 3, 1 / 3, -2 / 3]) and zero.learnt == [
        True,
        True,
        False,
    ]
    assert judged([rollout(0.0, error="gone")] * 2, failed="zero").unused == "failed"


def test_agents_of_an_episode_are_compared_with_their_own_role():
    """The second player wins less often: its baseline is its own, and the silent one is left out."""

    def play(first, second):
        parts = [rollout(first), rollout(second)]
        for part, agent in zip(parts, ("first", "second"), strict=True):
            part.agent = agent
            part.metrics = {"chips": part.reward}
        return Rollout.join_agents(Example(0, []), parts)

    episodes = [play(1.0, -1.0), play(0.5, 0.0), rollout(0.0, error="gone")]
    episodes[0].parts[1].turns = []
    assert episodes[1].reward == 0.25
    assert episodes[1].metrics == {"first/chips": 0.5, "second/chips": 0.0}
    again = [Rollout.from_json(json.loads(json.dumps(one.to_json()))) for one in episodes]
    assert again == episodes
    rollouts = [part for episode in again for part in episode.split_agents()]
    assert [one.agent for one in rollouts] == ["first", "first", "second", ""]
    assert judged(rollouts).advantages == pytest.approx([0.25, -0.25, 0.0, 0.0])
    zero = judged(rollouts, failed="zero")
    assert zero.advantages[:3] == pytest.approx([0.5, 0.0, 0.0])


def test_groups_from_which_nothing_is_learnt_say_why():
    same, mixed, well = (
        [rollout(0.5), rollout(0.5)],
        [rollout(0.0), rollout(0.4)],
        [rollout(1.0), rollout(0.8)],
    )
    assert (judged(same).unused, judged(same).dropped) == ("no_signal", {"no_signal": 4})
    assert judged(same, drop_zero_signal=False).learnt == [True, True]
    online = {"online_difficulty_filtering": True}
    assert [judged(group, online).unused for group in (same, mixed, well)] == ["no_signal", "", ""]
    tight = {**online, "easy_threshold": 0.9, "hard_threshold": 0.2}
    assert [judged(group, tight).unused for group in (same, mixed, well)] == [
        "no_signal",
        "too_hard",
        "too_easy",
    ]


def test_overlong_rewards_fall_in_a_line():
    rewards, lengths = np.array([1.0, 1.0, 0.0, 1.0]), np.array([50.0, 90.0, 95.0, 100.0])
    assert penalize_overlong(rewards, lengths, 100, 0.2).tolist() == [1.0, 0.5, -0.75, 0.0]
    assert penalize_overlong(rewards, lengths, 100, 0.0) is rewards


def test_turns_become_one_sequence_as_long_as_their_tokens_go_on():
    def turn(prompt, ids):
        return Turn(prompt, Completion(ids, [-0.1 * i for i in ids], [0] * len(ids), "stop"), "")

    whole = Rollout(Example(0, []), [turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5, 6], [7])], [])
    (sample,) = samples_of(whole, 2.0, 0.8, "env")
    assert sample.ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert (
        sample.mask.tolist() == [False, False, True, True, False, False, True]
        and sample.target_count == 3
    )
    assert sample.logprobs == pytest.approx([0, 0, -0.3, -0.4, 0, 0, -0.7])
    assert (sample.advantage, sample.temperature, sample.env) == (2.0, 0.8, "env")
    rewritten = Rollout(Example(0, []), [turn([1, 2], [3, 4]), turn([1, 2, 4, 5], [7])], [])
    assert [s.ids.tolist() for s in samples_of(rewritten, 1.0, 1.0, "env")] == [
        [1, 2, 3, 4],
        [1, 2, 4, 5, 7],
    ]
