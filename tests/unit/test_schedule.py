"""Which example comes next: orders, ratios over steps, easy and hard ones, and going on where a run was."""

import itertools
import json
from collections import Counter

import pytest

from hone.config.orchestrator_config import BufferConfig
from hone.orchestrator.schedule import Schedule, Task, interpolate_at


def test_the_data_is_gone_through_in_a_new_order_every_epoch():
    schedule = Schedule({"x": 6, "y": 4}, seed=3)
    tasks = [schedule.next_task() for _ in range(30)]
    assert [task.number for task in tasks] == list(range(30)) and schedule.epoch == 3
    epochs = [[task[1:] for task in tasks[10 * i : 10 * i + 10]] for i in range(3)]
    assert all(len(set(epoch)) == 10 for epoch in epochs) and epochs[0] != epochs[1]
    assert Counter(env for env, _ in epochs[0]) == {"x": 6, "y": 4}
    schedule.give_back(tasks[7])
    schedule.give_back(tasks[4])
    assert [schedule.next_task() for _ in range(3)][:2] == [tasks[4], tasks[7]]


def test_ratios_hold_at_every_moment_and_change_in_a_line():
    ratios = {"x": [(1, 1.0)], "y": [(11, 3.0), (21, 0.0)]}
    schedule = Schedule({"x": 50, "y": 7}, 0, groups_in_a_step=8, ratios=ratios)
    steps = [Counter(schedule.next_task().env for _ in range(8)) for _ in range(30)]
    assert steps[:10] == [{"y": 6, "x": 2}] * 10 and steps[-9:] == [{"x": 8}] * 9
    between = [step["y"] for step in steps[10:21]]
    assert sum(between) == pytest.approx(
        8 * sum(r / (1 + r) for r in (3 * i / 10 for i in range(11))), abs=1.5
    )
    assert (
        between[0] == 6
        and between[-1] == 0
        and all(abs(a - b) <= 2 for a, b in itertools.pairwise(between))
    )
    assert [interpolate_at(step, ratios["y"]) for step in (1, 11, 16, 21, 99)] == [
        3.0,
        3.0,
        1.5,
        0.0,
        0.0,
    ]
    with pytest.raises(ValueError, match="all are 0 at step 2"):
        zero = Schedule({"x": 5}, 0, ratios={"x": [(1, 1.0), (2, 0.0)]})
        [zero.next_task() for _ in range(2)]


def test_easy_and_hard_examples_come_as_often_as_they_should():
    buffer = BufferConfig(
        easy_threshold=0.9, hard_threshold=0.1, easy_fraction=0.25, newest_share=1.0
    )
    schedule = Schedule({"x": 400}, 0, buffer=buffer)
    means = {example: (0.0, 0.5, 1.0, 0.5)[example % 4] for example in range(400)}
    for _ in range(400):
        task = schedule.next_task()
        schedule.record_score(task, means[task.example])
    assert schedule.pool_shares() == {"easy": 0.25, "normal": 0.5, "hard": 0.25}
    second = Counter(
        means[task.example]
        for task in itertools.takewhile(lambda _: schedule.epoch < 2, iter(schedule.next_task, 0))
    )
    assert second[0.0] == 0 and 190 <= second[0.5] <= 200 and 10 <= second[1.0] <= 40


def test_a_running_mean_forgets_slowly_and_a_data_set_that_is_all_easy_still_comes():
    schedule = Schedule({"x": 3}, 0, buffer=BufferConfig(easy_threshold=0.9, newest_share=0.5))
    task = Task(0, "x", 1)
    for mean, pool in ((1.0, "easy"), (0.7, "normal"), (1.0, "easy")):  # 1, 0.85, 0.925
        schedule.record_score(task, mean)
        assert schedule.pool_of("x", 1) == pool
    for example in range(3):
        schedule.record_score(Task(0, "x", example), 1.0)
    assert len({schedule.next_task().example for _ in range(3)}) >= 1  # and does not hang


def test_a_schedule_that_goes_on_is_the_one_that_was():
    made = dict(
        sizes={"x": 9, "y": 5},
        seed=1,
        groups_in_a_step=4,
        ratios={"x": [(1, 2.0)], "y": [(1, 1.0), (9, 5.0)]},
        buffer=BufferConfig(easy_threshold=0.8, easy_fraction=0.5),
    )
    one = Schedule(**made)
    begun = [one.next_task() for _ in range(23)]
    for task in begun[:20]:
        one.record_score(task, (task.example % 3) / 2)
    two = Schedule(**made, progress=json.loads(json.dumps(one.progress_state(begun[20:]))))
    assert [two.next_task() for _ in range(3)] == begun[20:]
    assert [one.next_task() for _ in range(40)] == [two.next_task() for _ in range(40)]
