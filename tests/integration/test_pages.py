"""The commands of docs/dashboard.md, as they stand there."""

import re
import shlex

import pytest

from tests.integration.conftest import ROOT, command

RECIPE = ROOT / "src/hone/launch/workspace/configs/prime-rl/reverse-text-tiny.toml"
MODEL = ROOT / "src/hone/launch/workspace/models/reverse-text-tiny-sft"


def commands_of(page):
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / page).read_text(), re.S)
    return [line.split("#")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


@pytest.fixture
def place(tmp_path):
    """With FILE, the recipe of the page, and a run of it in outputs/ that has a checkpoint of step 40."""
    text = (
        RECIPE.read_text()
        .replace("models/reverse-text-tiny-sft", str(MODEL))
        .replace("batch_size = 128", "batch_size = 32")
    )
    text = text.replace("max_steps = 100", "max_steps = 42").replace(
        "rollouts_per_example = 16", "rollouts_per_example = 8"
    )
    (tmp_path / "FILE").write_text(re.sub("output_dir.*\n", "", text))
    command("rl", "@", "FILE", "--ckpt.interval", 40, "--ckpt.keep", 9, "--log-interval", 0, cwd=tmp_path)
    return tmp_path


def test_the_dashboard_page(place):
    found = commands_of("dashboard.md")
    assert len(found) == 8
    seen = []
    for line in found:
        words = shlex.split(line)
        assert words[:2] == ["uv", "run"]
        words = words[2:]
        if words == ["hone", "dashboard"]:
            continue  # tests/integration/test_browser.py looks at it
        if words[0] == "rl":
            words += ["--max-steps", "42", "--log-interval", "0"]
            if "--output-dir" not in words:
                words += ["--output-dir", f"outputs/{len(seen)}"]
        seen.append(command(*words, cwd=place, env={"WANDB_MODE": "offline", "WANDB_SILENT": "true"}).stdout)
    assert "Dashboard over" in seen[0] and "nothing that is known" in seen[1]
    assert (place / "outputs" / "slower" / "weights" / "step_42").exists()
    assert (place / "outputs" / "curves.png").stat().st_size > 10_000 and "<svg" in (place / "both.svg").read_text()
    assert list((place / "outputs").glob("*/wandb/offline-run-*/*.wandb"))
    assert list((place / "outputs").glob("*/tensorboard/events.*"))
