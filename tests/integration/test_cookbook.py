"""Recipes of Tinker's cookbook, unchanged, against `hone tinker` with a tiny model of random weights."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from statistics import mean

import pytest
import tinker
from transformers import AutoTokenizer

from hone.authoring.tiny_model import write_model
from tests.hangs import HANG_SECONDS
from tests.integration.test_tinker import Server

pytestmark = pytest.mark.cookbook
LOCAL_DATA = Path(__file__).parent / "local_data_recipe.py"
QUESTION = "How many of 0?"  # the first of the local data
PYTHON = os.environ.get("COOKBOOK_PYTHON", "")
RECIPES = {
    "math_rl.train": "env=arithmetic loss_fn=importance_sampling group_size=4 groups_per_batch=8",
    "multiplayer_rl.guess_number.train": "group_size=2 batch_size=2 max_tokens=6 eval_every=0",
    "preference.shorter.train": "",
    "chat_sl.train": "dataset={data} batch_size=4 max_length=1024",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cookbook")
    write_model(directory / "model", [["sums"]])
    opened = Server(directory, "--model.random-init")
    yield opened
    opened.close()


def run_recipe(server, tmp_path, words, **environment):
    """Run a recipe to its end; return the rows of its metrics."""
    log_path = tmp_path / "log"
    done = subprocess.run(
        [PYTHON, *words, f"model_name={server.base}", f"log_path={log_path}"],
        env=os.environ
        | {
            "TINKER_BASE_URL": server.url,
            "TINKER_API_KEY": "tml-local",
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
        }
        | environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return [json.loads(line) for line in (log_path / "metrics.jsonl").open()]


def values_of(rows, key):
    return [row[key] for row in rows if key in row]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_as_published(server, tmp_path, recipe):
    package = subprocess.run(
        [PYTHON, "-c", "import tinker_cookbook as t; print(t.__path__[0])"],
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_SECONDS,
    ).stdout.strip()
    data = Path(package) / "example_data" / "conversations.jsonl"
    words = ["-m", f"tinker_cookbook.recipes.{recipe}"]
    words += RECIPES[recipe].format(data=data).split()
    words += ["renderer_name=role_colon", "max_steps=2", "behavior_if_log_dir_exists=delete"]
    rows = run_recipe(server, tmp_path, words)
    assert len(rows) >= 2
    differences = [row[key] for row in rows for key in row if key.startswith("optim/kl_sample")]
    assert len(differences) >= (4 if "_rl" in recipe else 0)
    assert max(map(abs, differences), default=0.0) < 1e-6, differences


def test_loops_and_distillation_learn_on_local_data(server, tmp_path):
    """sl_loop learns to answer 1 or 2. From there rl_loop learns that it is 1, and a student that it
    is 2, from a teacher.
    """
    loop, teacher, student = (tmp_path / name for name in ("loop", "teacher", "student"))
    for directory in (loop, teacher, student):
        directory.mkdir()
    supervise = [LOCAL_DATA, "sl_loop", "batch_size=16", "learning_rate=1e-2", "lora_rank=16"]
    supervise += ["max_length=1024"]
    losses = values_of(run_recipe(server, loop, supervise), "train_mean_nll")
    assert losses[-1] < 0.25 * losses[0]
    supervised = start_anew(loop / "log")
    assert 0.2 < share_of_twos(server, supervised["sampler_path"]) < 0.8
    shutil.copytree(loop / "log", teacher / "log")

    words = [LOCAL_DATA, "rl_loop", "batch_size=8", "group_size=8", "max_tokens=24"]
    words += ["learning_rate=3e-4", "loss_fn=importance_sampling", "lora_rank=16"]
    rewards = values_of(run_recipe(server, loop, words), "reward/total")
    assert mean(rewards[-4:]) > mean(rewards[:4]) + 0.25

    run_recipe(server, teacher, [*supervise, "max_steps=10"], LOCAL_ANSWERS="2")
    words = [LOCAL_DATA, "distillation.on_policy_distillation", "dataset=deepmath"]
    words += [f"teacher_model={server.base}"]
    words += [f"teacher_checkpoint={start_anew(teacher / 'log')['sampler_path']}"]
    words += [f"load_checkpoint_path={supervised['state_path']}", "renderer_name=role_colon"]
    words += ["group_size=4", "groups_per_batch=8", "max_tokens=24", "learning_rate=1e-3"]
    run_recipe(server, student, [*words, "lora_rank=16", "eval_every=0"])
    assert share_of_twos(server, start_anew(student / "log")["sampler_path"]) > 0.85


def share_of_twos(server, path):
    """Return the share of 2 among 200 answers of a sampler that are 1 or 2; most of them are."""
    tokenizer = AutoTokenizer.from_pretrained(server.base)
    sampler = server.connect().create_sampling_client(model_path=path).result()
    prompt = tokenizer.encode(f"User: {QUESTION}\n\nAssistant:", add_special_tokens=False)
    drawn = sampler.sample(
        prompt=tinker.ModelInput.from_ints(prompt),
        num_samples=200,
        sampling_params=tinker.SamplingParams(max_tokens=24, stop=["\n\n"], seed=0),
    ).result()
    texts = [tokenizer.decode(one.tokens) for one in drawn.sequences]
    ones, twos = (sum(f"{{{digit}}}" in text for text in texts) for digit in (1, 2))
    assert ones + twos > 100, texts[:10]
    return twos / (ones + twos)


def start_anew(log_path):
    """Return the last checkpoint of a loop, from which a further run then begins at batch 0."""
    file = log_path / "checkpoints.jsonl"
    *_, last = map(json.loads, file.read_text().splitlines())
    file.write_text(json.dumps({**last, "batch": 0}) + "\n")
    return last


def test_preferences_are_learned_by_the_dpo_recipe(server, tmp_path):
    words = [LOCAL_DATA, "preference.dpo.train", "dataset=hhh", "renderer_name=role_colon"]
    words += ["batch_size=8", "learning_rate=1e-3", "max_length=512"]
    rows = run_recipe(server, tmp_path, words)
    losses = values_of(rows, "dpo_loss")
    assert losses[0] == pytest.approx(0.6931, abs=1e-3) and losses[-1] < 0.5
    assert values_of(rows, "accuracy")[-1] > 0.9
