"""Mistakes of a person at the keyboard: one clear message, an exit code that is not 0, earlier outputs untouched."""

import json
import os
import shutil

import pytest

from .conftest import RL_ENV, TINY, command

MODEL = f"{TINY}/model"
SFT = ["sft", "@", f"{TINY}/sft.toml"]


@pytest.fixture
def outputs(tmp_path):
    """An output directory that holds something of value."""
    out = tmp_path / "out"
    (out / "weights" / "step_7").mkdir(parents=True)
    (out / "weights" / "step_7" / "model.safetensors").write_text("precious")
    return out


def refused(outputs, *words):
    before = {p: p.read_bytes() for p in outputs.rglob("*") if p.is_file()}
    done = command(*words, "--output-dir", outputs, ok=False)
    assert {p: p.read_bytes() for p in outputs.rglob("*") if p.is_file()} == before
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.stderr


def rl(*options):
    return [
        "rl",
        "--model.name",
        MODEL,
        "--model.random-init",
        "--orchestrator.env",
        RL_ENV,
        *options,
    ]


@pytest.mark.main_path
def test_misspelt_key(outputs):
    assert "did you mean orchestrator.rollouts-per-example?" in refused(
        outputs, *rl("--orchestrator.rollouts-per-exampel", "4")
    )


@pytest.mark.main_path
def test_wrong_type(outputs):
    message = refused(outputs, *rl("--max-steps", "many"))
    assert "max-steps" in message and "'many'" in message


@pytest.mark.main_path
def test_batch_not_divisible(outputs):
    assert "batch-size 100 is not a multiple of rollouts-per-example 16" in refused(
        outputs, *rl("--orchestrator.batch-size", "100")
    )


@pytest.mark.main_path
def test_missing_file(outputs):
    message = refused(outputs, "sft", "@", f"{TINY}/stf.toml")
    assert (
        "stf.toml: no such file" in message and "did you mean" in message and "sft.toml" in message
    )
    assert "no file nowhere.jsonl" in refused(outputs, *SFT, "--data.name", "nowhere.jsonl")


@pytest.mark.main_path
def test_unknown_environment(outputs):
    env = '{"id": "reverse-txt"}'
    message = refused(
        outputs, "rl", "--model.name", MODEL, "--model.random-init", "--orchestrator.env", env
    )
    assert "'reverse-txt' is not installed" in message and "did you mean reverse-text?" in message


def test_output_directory_not_writable(outputs, tmp_path):
    (tmp_path / "file").write_text("")
    done = command(*rl("--output-dir", tmp_path / "file" / "below"), ok=False)
    assert "cannot be written to" in done.stderr


def test_model_directory_without_tokenizer_or_weights(outputs, tmp_path):
    bare = tmp_path / "model"
    shutil.copytree(MODEL, bare)
    words = [*rl("--output-dir", outputs)[:1], "--model.name", bare, "--orchestrator.env", RL_ENV]
    assert "--model.random-init" in refused(outputs, *words)
    (bare / "tokenizer.json").unlink()
    assert f"{bare} has no tokenizer.json" in refused(outputs, *words, "--model.random-init")
    (bare / "config.json").unlink()
    (bare / "tokenizer.json").write_text("{}")
    assert "tokenizer" in refused(outputs, *words)
    assert "no directory ./nowhere here" in refused(
        outputs, "rl", "--model.name", "./nowhere", "--orchestrator.env", RL_ENV
    )


@pytest.mark.main_path
def test_data_set_without_the_needed_columns(outputs, tmp_path):
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "x"}))
    assert "it has text" in refused(outputs, *SFT, "--data.name", tmp_path / "data.jsonl")


@pytest.mark.main_path
def test_groups_of_one(outputs):
    message = refused(outputs, *rl("--orchestrator.rollouts-per-example", "1"))
    assert "rollouts-per-example" in message and "greater than or equal to 2" in message


def test_unreachable_hub(outputs):
    env = '{"id": "reverse-text"}'
    message = refused(
        outputs, "rl", "--model.name", MODEL, "--model.random-init", "--orchestrator.env", env
    )
    assert "cannot be loaded from the hub" in message
    assert "cannot be reached" in refused(
        outputs, "rl", "--model.name", "owner/model", "--orchestrator.env", RL_ENV
    )


def test_prompts_that_do_not_fit(outputs):
    message = command(
        *rl("--seq-len", "4", "--max-steps", "1", "--output-dir", outputs), ok=False
    ).stderr
    assert "every rollout failed" in message and "maximum context length is 4" in message


@pytest.mark.main_path
def test_unknown_command_and_bad_json():
    assert "did you mean rl?" in command("hone", "lr", ok=False).stderr
    assert "not valid JSON" in command("vf-eval", "reverse-text", "-a", "{", ok=False).stderr


def test_a_component_without_a_model_says_which_it_takes():
    done = command("inference", "--port", 0, ok=False)
    assert "No model is named: it is Qwen/Qwen3-0.6B" in done.stdout and "model.name" in done.stderr


EXITS = """
from hone.environments import Rubric, SingleTurnEnv

def exits(completion):
    exit()

def load_environment(place="reward"):
    if place == "load":
        exit()
    return SingleTurnEnv(dataset=[{"question": "?", "answer": "a"}] * 8, rubric=Rubric([exits]))
"""


@pytest.mark.parametrize("deployment", ["colocated", "processes"])
@pytest.mark.main_path
def test_code_of_an_environment_that_exits_is_named_and_no_run_ends_well(
    tmp_path, trained, deployment
):
    (tmp_path / "exits_env.py").write_text(EXITS)
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    words = [
        "rl",
        "--model.name",
        trained,
        "--orchestrator.env.id",
        "exits_env",
        "--max-steps",
        2,
        "--seq-len",
        64,
        "--orchestrator.batch-size",
        16,
        "--orchestrator.rollouts-per-example",
        8,
        "--deployment",
        deployment,
        "--orchestrator.sampling.max-tokens",
        4,
        "--inference.server.port",
        0,
        "--output-dir",
        tmp_path / "out",
    ]
    done = command(*words, ok=False, env=env)
    assert (
        "reward function exits wanted to end the process: it called exit()"
        in done.stdout + done.stderr
    )
    assert not (tmp_path / "out" / "weights" / "step_2").exists()
    if deployment == "colocated":
        done = command(
            *words, "--clean", "--orchestrator.env.args.place", "load", ok=False, env=env
        )
        assert (
            "load_environment() raised ExitInUserCode: it called exit() (SystemExit: None)"
            in done.stderr
        )
