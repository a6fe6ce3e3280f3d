"""Every algorithm learns on the tiny recipe, from its name alone. Three seeds: benchmarks/algorithms_cpu.py."""

import json

import pytest

from hone.config.algorithms import ALGORITHMS

from .conftest import TINY, Server, command

STEPS, SHORT = 30, '{"id": "reverse-text", "args": {"texts": "generated", "min_chars": 2, "max_chars": 4}}'


def rewards(out, model, algorithm, *options):
    command(
        "rl", "@", f"{TINY}/rl.toml", "--model.name", model, "--output-dir", out, "--max-steps", STEPS, "--algorithm",
        algorithm, "--orchestrator.env", SHORT, "--orchestrator.batch-size", 128, "--orchestrator.sampling.max-tokens",
        12, "--trainer.scheduler.type", "constant", "--trainer.optim.lr", 1e-3, *options,
    )  # fmt: skip
    return [json.loads(line)["reward/mean"] for line in (out / "metrics.jsonl").open()]


@pytest.fixture(scope="module")
def teacher(trained, tmp_path_factory):
    """A server of the model after RL."""
    out = tmp_path_factory.mktemp("teacher")
    found = rewards(out / "run", trained, "grpo")
    server = Server("--model.name", out / "run" / "weights" / f"step_{STEPS}", log=out / "log")
    server.rewards = found
    yield server
    server.stop()


def has_learnt(found):
    before, after = sum(found[:3]) / 3, sum(found[-5:]) / 5
    return after - before > 0.1 * (1 - before)


@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - {"grpo", "opd", "sft"}))
def test_an_algorithm_learns_from_rewards(algorithm, trained, tmp_path):
    found = rewards(tmp_path / "run", trained, algorithm)
    assert has_learnt(found), found


@pytest.mark.parametrize("algorithm", ["opd", "sft"])
def test_a_pupil_learns_from_its_teacher(algorithm, teacher, trained, tmp_path):
    assert has_learnt(teacher.rewards), teacher.rewards  # which grpo has taught
    model = teacher.log.parent / "run" / "weights" / f"step_{STEPS}"
    options = ("--orchestrator.teacher.model", model, "--orchestrator.teacher.base-url", teacher.url)
    found = rewards(tmp_path / "run", trained, algorithm, *options)
    assert has_learnt(found) or algorithm == "sft", found  # with sft these are the teacher's
