"""`vf-rl` in a folder that `hone lab setup` made: an adapter is trained, saved, evaluated, and trained further."""

import re

import pytest

from .conftest import command

FILE = "configs/vf-rl/reverse-text-tiny.toml"
TEXTS = '{"texts": "generated", "min_chars": 4, "max_chars": 10}'


@pytest.mark.main_path
def test_vf_rl_trains_saves_and_resumes_an_adapter_that_evaluates(tmp_path):
    command("hone", "lab", "setup", "--vf-rl", "--no-install", cwd=tmp_path)
    short = ("vf-rl", "@", FILE, "--trainer.args.save-steps", 2)
    first = command(*short, "--trainer.args.max-steps", 2, cwd=tmp_path).stdout
    assert re.findall(r"Step (\d)/2: reward=", first) == ["1", "2"]
    more = command(*short, "--trainer.args.max-steps", 4, "--resume", cwd=tmp_path).stdout
    assert re.findall(r"Step (\d)/4: reward=", more) == ["3", "4"]
    saved = tmp_path / "outputs" / "reverse-text-tiny" / "checkpoint-4"
    assert {"adapter_config.json", "adapter_model.safetensors", "trainer_state.json"} <= {
        p.name for p in saved.iterdir()
    }
    said = command(
        "hone",
        "eval",
        "run",
        "reverse-text",
        "-m",
        saved,
        "-n",
        4,
        "-t",
        20,
        "-a",
        TEXTS,
        cwd=tmp_path,
    )
    assert "reward: avg - " in said.stdout
