"""Every algorithm learns on the tiny recipe, from its name alone. Three seeds: benchmarks/algorithms_cpu.py."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from hone.config.algorithms import ALGORITHMS

from .conftest import TINY, Server, command
from .learning import RECIPE, STEPS, has_learnt, read_rewards


def reward(out, model, algorithm, *options):
    """On held-out texts, before and after."""
    command(
        "rl",
        "@",
        f"{TINY}/rl.toml",
        "--model.name",
        model,
        "--output-dir",
        out,
        *RECIPE,
        "--algorithm",
        algorithm,
        *options,
    )
    return read_rewards(out)[0]


@pytest.fixture(scope="module")
def teacher(trained, tmp_path_factory):
    """A server of the model after RL."""
    out = tmp_path_factory.mktemp("teacher")
    found = reward(out / "run", trained, "grpo")
    server = Server("--model.name", out / "run" / "weights" / f"step_{STEPS}", log=out / "log")
    yield server, found
    server.stop()


FROM_REWARDS = sorted(set(ALGORITHMS) - {"grpo", "opd", "sft"})


@pytest.fixture(scope="module")
def rewards(trained, tmp_path_factory):
    """Of each algorithm; two at a time, since most of it is starting."""
    root = tmp_path_factory.mktemp("algorithms")
    with ThreadPoolExecutor(2) as pool:
        return dict(
            zip(
                FROM_REWARDS,
                pool.map(lambda name: reward(root / name, trained, name), FROM_REWARDS),
            )
        )


@pytest.mark.parametrize("algorithm", FROM_REWARDS)
def test_an_algorithm_learns_from_rewards(algorithm, rewards):
    before, after = rewards[algorithm]
    assert has_learnt(before, after), (before, after)


@pytest.mark.parametrize("algorithm", ["opd", "sft"])
def test_a_pupil_learns_from_its_teacher(algorithm, teacher, trained, tmp_path):
    server, of_teacher = teacher
    assert has_learnt(*of_teacher), of_teacher  # which grpo has taught
    model = server.log.parent / "run" / "weights" / f"step_{STEPS}"
    options = ("--orchestrator.teacher.model", model, "--orchestrator.teacher.base-url", server.url)
    before, after = reward(tmp_path / "run", trained, algorithm, *options)
    assert has_learnt(before, after), (before, after, of_teacher)
