"""Recipes of Tinker's cookbook, unchanged, against `hone tinker` with a tiny model of random weights."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from hone.authoring.tiny_model import write_model
from tests.hangs import HANG_SECONDS
from tests.integration.test_tinker import Server

pytestmark = pytest.mark.cookbook
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
    words = [PYTHON, "-m", f"tinker_cookbook.recipes.{recipe}"]
    words += RECIPES[recipe].format(data=data).split()
    words += [f"model_name={server.base}", "renderer_name=role_colon", "max_steps=2"]
    words += [f"log_path={tmp_path / 'log'}", "behavior_if_log_dir_exists=delete"]
    done = subprocess.run(
        words,
        env=os.environ
        | {
            "TINKER_BASE_URL": server.url,
            "TINKER_API_KEY": "tml-local",
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").open()]
    assert len(rows) >= 2
    differences = [row[key] for row in rows for key in row if key.startswith("optim/kl_sample")]
    assert len(differences) >= (4 if "_rl" in recipe else 0)
    assert max(map(abs, differences), default=0.0) < 1e-6, differences
