"""docs/tutorial.md: every command of it, in its order, in an empty folder; and the same from the wheel alone."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from hone.config.base import load_config
from hone.config.lab_config import LabConfig
from hone.config.rl_config import RLConfig
from hone.config.sections import ModelConfig
from hone.config.vf_rl_config import VfRLConfig
from hone.launch.lab import SIX, environment_sources, list_templates, project_name, write_templates
from hone.models.attention_layouts import PackedAttention
from hone.models.hf import hf_tensors
from hone.models.loading import load_configured
from hone.models.lora import merge_adapter
from tests.hangs import HANG_SECONDS

from .conftest import ROOT, at_a_shell, command

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
TEMPLATES = ROOT / "src" / "hone" / "launch" / "workspace"
UV = shutil.which("uv") or str(ROOT / ".uv" / "bin" / "uv")
TINY_ENV = '{"texts": "generated", "min_chars": 4, "max_chars": 10}'


def blocks(kind):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [text for one, text in found if one == kind]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A folder after the commands of the page were typed in it, and what they printed."""
    place = tmp_path_factory.mktemp("my-lab")
    said = {}
    for script in blocks("bash"):
        typed = script.replace("hone lab setup", "hone lab setup --no-install")
        # Models of the hub
        typed = re.sub(r"(vf-rl @ configs/vf-rl/(?!\S*tiny|my)\S+)", r"\1 --dry-run", typed)
        done = at_a_shell(typed, place)
        assert done.returncode == 0, f"{typed}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        said[script] = done.stdout
    return place, said


def of(said, words):
    return next(text for script, text in said.items() if words in script)


def test_the_page_is_as_it_says(lab):
    _, said = lab
    setup = of(said, "setup --vf-rl")
    shown = [line for block in blocks("") for line in block.splitlines() if line.startswith("✓")]
    assert [line for line in shown if "Installed" not in line] == [
        x for x in setup.splitlines() if x.startswith("✓")
    ]
    trained = of(said, "vf-rl @ configs/vf-rl/reverse-text-tiny.toml\n")
    assert re.search(r"\{'loss': [-\d.e]+, 'learning_rate': 0.001, 'epoch': [\d.e-]+\}", trained)
    assert "=== Step 5 Sample ===\nPrompt: " in trained and "\nReward: " in trained
    rewards = dict(re.findall(r"Step (\d+)/100: reward=([\d.]+)", trained))
    assert len(rewards) == 100
    first, last = (
        sum(float(rewards[str(step)]) for step in part) / 5
        for part in (range(1, 6), range(96, 101))
    )
    assert last - first >= 0.12
    before, after = (
        float(re.search(r"reward: avg - ([\d.]+)", of(said, f"-m {model}"))[1])
        for model in (
            "models/reverse-text-tiny-sft",
            "outputs/reverse-text-tiny/checkpoint-100",
        )
    )
    assert after - before >= 0.12
    served = float(re.search(r"reward: avg - ([\d.]+)", of(said, "-m reverser"))[1])
    assert served == pytest.approx(after, abs=1e-6)
    assert "Step 30/30" in of(said, "--resume") and "Step 20/20" in of(said, "--resume")
    assert "[trainer.lora]" in of(said, "--dry-run")


def test_checkpoints_are_those_of_the_tutorial(lab):
    place, _ = lab
    run = place / "outputs" / "reverse-text-tiny"
    for step in (50, 100):
        files = {path.name for path in (run / f"checkpoint-{step}").iterdir()}
        assert files == {"adapter_model.safetensors", "adapter_config.json", "trainer_state.json"}
        state = json.loads((run / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert state["global_step"] == step and len(state["log_history"]) == step
    assert (
        (run / "runs" / "trainer.log").exists()
        and not (run / "weights").exists()
        and not (run / "logs").exists()
    )


def test_peft_gives_the_logits_that_we_train(lab, monkeypatch):
    from peft import AutoPeftModelForCausalLM

    place, _ = lab
    monkeypatch.chdir(place)
    adapter = Path("outputs/reverse-text-tiny/checkpoint-100")
    theirs = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32).eval()
    ours = load_configured(
        ModelConfig(name="models/reverse-text-tiny-sft", dtype="float32", device="cpu")
    ).model
    ids = torch.arange(3, 43)

    def logits():
        attention = PackedAttention([len(ids)])
        return ours.compute_logits(ours(ids, attention.token_positions(), attention))

    with torch.no_grad():
        before, expected = logits(), theirs(ids[None]).logits[0]
        merge_adapter(dict(hf_tensors(ours)), adapter)
        after = logits()
    assert (after - expected).abs().max() < 1e-4
    assert (before - expected).abs().max() > 1e-2


def test_all_weights_are_trained_without_lora(lab):
    from transformers import AutoModelForCausalLM

    place, _ = lab
    words = (
        "--trainer.args.run-name",
        "whole",
        "--trainer.args.max-steps",
        2,
        "--trainer.args.learning-rate",
        3e-4,
    )
    file = "configs/vf-rl/reverse-text-tiny.toml"
    command("vf-rl", "@", file, *words, "--trainer.args.use-lora", "false", cwd=place)
    saved = place / "outputs" / "whole" / "checkpoint-2"
    assert (saved / "trainer_state.json").exists() and not (saved / "adapter_config.json").exists()
    AutoModelForCausalLM.from_pretrained(saved)


def test_processes_tell_the_same(lab):
    """As where both sides have GPUs of their own: servers are started, rows are read from the run's files."""
    place, _ = lab
    words = (
        "--trainer.args.run-name",
        "parts",
        "--trainer.args.max-steps",
        4,
        "--trainer.args.save-steps",
        2,
    )
    port = ("--deployment", "processes", "--trainer.args.vllm-server-port", 0)
    done = command("vf-rl", "@", "configs/vf-rl/reverse-text-tiny.toml", *words, *port, cwd=place)
    assert re.findall(r"Step (\d)/4: reward=", done.stdout) == ["1", "2", "3", "4"]
    for line in (
        "Starting inference server on port",
        "Inference server is ready",
        "Saved outputs/parts/checkpoint-2",
    ):
        assert line in done.stdout
    assert {path.name for path in (place / "outputs" / "parts" / "runs").iterdir()} >= {
        "inference.log",
        "trainer.log",
    }
    more = command(
        "vf-rl",
        "@",
        "configs/vf-rl/reverse-text-tiny.toml",
        *words,
        *port,
        "--resume",
        "--trainer.args.max-steps",
        5,
        cwd=place,
    )
    assert re.findall(r"Step (\d)/5: reward=", more.stdout) == ["5"]


def test_a_port_in_use_is_named_before_anything_starts(lab):
    import socket

    place, _ = lab
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = (
            "--trainer.args.run-name",
            "port",
            "--deployment",
            "processes",
            "--trainer.args.vllm-server-port",
            port,
        )
        done = command(
            "vf-rl", "@", "configs/vf-rl/reverse-text-tiny.toml", *words, cwd=place, ok=False
        )
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert "vllm-server-port" in done.stderr
    if sys.platform == "linux":
        assert f"by process {os.getpid()}" in done.stderr


def test_python_blocks_run(lab):
    place, _ = lab
    (script,) = blocks("python")
    done = at_a_shell(f"python - <<'END'\n{script}\nEND", place)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "outputs/from-python/checkpoint-20" in done.stdout


def test_toml_blocks_are_configurations(lab, tmp_path):
    whole, *parts = blocks("toml")
    assert tomllib.loads(whole) == tomllib.loads(
        (TEMPLATES / "configs/vf-rl/reverse-text-tiny.toml").read_text().split("\n", 1)[1]
    )
    for part in parts:
        keys = {line.split(" =")[0] for line in part.splitlines()}
        kept = [line for line in whole.splitlines() if line.split(" =")[0] not in keys]
        (tmp_path / "file.toml").write_text("\n".join([*kept, part]))
        assert load_config(VfRLConfig, ["@", str(tmp_path / "file.toml")]).as_rl()


def test_templates_are_configurations():
    for kind, folder in ((VfRLConfig, "vf-rl"), (RLConfig, "prime-rl"), (LabConfig, "lab")):
        for file in sorted((TEMPLATES / "configs" / folder).glob("*.toml")):
            config = load_config(kind, ["@", str(file)]).resolve_config()
            assert isinstance(config, RLConfig)
            assert {
                env.id.rpartition("/")[2].replace("-", "_") for env in config.orchestrator.env
            } <= set(SIX)


def test_a_second_time_nothing_is_overwritten(tmp_path):
    first = command("hone", "lab", "setup", "--vf-rl", "--no-install", cwd=tmp_path).stdout
    assert "✓ Created Python project" in first
    changed = tmp_path / "configs" / "vf-rl" / "wordle.toml"
    changed.write_text("# mine\n")
    (tmp_path / "configs" / "endpoints.py").unlink()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    second = command("hone", "lab", "setup", "--vf-rl", "--no-install", cwd=tmp_path).stdout
    assert "✓ Python project is there" in second and "kept configs/vf-rl/wordle.toml" in second
    assert "✓ Wrote 1 files" in second and (tmp_path / "configs" / "endpoints.py").exists()
    assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.parametrize(
    ("project", "said"),
    [
        ("[tool.x]", "has no [project]"),
        ('[project]\nname = "a"\nrequires-python = ">=3.10"', "Hone needs Python 3.11 to 3.13"),
        ('[project]\nname = "hone-rl"', "this is Hone's own source"),
        ("[project", "cannot be read"),
    ],
)
def test_a_project_that_does_not_fit_is_refused_before_anything_is_written(tmp_path, project, said):
    (tmp_path / "pyproject.toml").write_text(project)
    assert said in command("hone", "lab", "setup", "--vf-rl", cwd=tmp_path, ok=False).stderr
    assert [path.name for path in tmp_path.iterdir()] == ["pyproject.toml"]


def test_an_evaluation_of_a_run_names_its_checkpoint(tmp_path):
    (tmp_path / "run" / "checkpoint-7").mkdir(parents=True)
    done = command("hone", "eval", "run", "reverse-text", "-m", "run", cwd=tmp_path, ok=False)
    assert "did you mean run/checkpoint-7?" in done.stderr


def test_environments_of_a_workspace_stand_alone(tmp_path):
    files = dict(list_templates([]))
    assert {name.split("/")[1] for name in files} == set(SIX) and environment_sources().is_dir()
    assert write_templates(files, tmp_path) == (len(files), [])
    for name in SIX:
        project = tomllib.loads((tmp_path / "environments" / name / "pyproject.toml").read_text())
        assert "uv" not in project.get("tool", {}) and project["project"]["dependencies"]


def test_a_project_has_a_name_of_its_own():
    names = ("My Lab!", "reverse_text", "äöü", "hone")
    assert [project_name(Path("/x") / name) for name in names] == [
        "my-lab",
        "reverse-text-lab",
        "lab",
        "hone-lab",
    ]


def test_the_notebook_runs(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", 4)
    client = NotebookClient(
        notebook,
        timeout=HANG_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(str(output.get("text", "")) for output in outputs)
    assert "Step 60/60: reward=" in text and "step 60  reward" in text
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert (
        tmp_path / "outputs" / "notebook" / "checkpoint-60" / "adapter_model.safetensors"
    ).exists()


@pytest.mark.skipif(not Path(UV).exists(), reason="needs uv")
def test_the_wheel_alone_does_the_tutorials_path(tmp_path):
    """Built, installed into an environment outside the checkout; from set-up to the evaluation of a checkpoint."""

    def uv(*words, cwd=tmp_path):
        environment = {
            k: v
            for k, v in os.environ.items()
            if k not in ("VIRTUAL_ENV", "PYTHONPATH", "UV_PROJECT_ENVIRONMENT")
        }
        environment |= {
            "PATH": f"{Path(UV).parent}:{environment['PATH']}",
            "UV_CONSTRAINT": str(tmp_path / "constraints"),
        }
        done = subprocess.run(
            [UV, *map(str, words)],
            cwd=cwd,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env=environment,
            timeout=HANG_SECONDS,
        )
        assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    have = "torch==" + torch.__version__.split("+")[0]  # the one that is in uv's cache
    (tmp_path / "constraints").write_text(have + "\n")
    uv("build", "--wheel", "--out-dir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("hone_rl-*.whl")
    lab = tmp_path / "lab"
    lab.mkdir()
    uv("venv", "--python", sys.executable, tmp_path / "tool")
    uv("pip", "install", "--python", tmp_path / "tool" / "bin" / "python", f"{wheel}[cpu]")
    tool = tmp_path / "tool" / "bin"
    environment = {**os.environ, "PATH": f"{tool}:{Path(UV).parent}:{os.environ['PATH']}"}
    environment |= {"UV_CONSTRAINT": str(tmp_path / "constraints")}
    done = subprocess.run(
        [tool / "hone", "lab", "setup", "--vf-rl"],
        cwd=lab,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "✓ Installed hone-rl" in done.stdout
    project = tomllib.loads((lab / "pyproject.toml").read_text())
    assert project["tool"]["uv"]["sources"]["hone-rl"] == {
        "path": os.path.relpath(wheel, lab)
    } or str(wheel) in str(project)
    trained = uv(
        "run",
        "vf-rl",
        "@",
        "configs/vf-rl/reverse-text-tiny.toml",
        "--trainer.args.max-steps",
        20,
        cwd=lab,
    )
    assert "Step 20/20: reward=" in trained
    place = uv(
        "run",
        "python",
        "-c",
        "import hone, reverse_text; print(hone.__file__, reverse_text.__file__)",
        cwd=lab,
    )
    assert str(ROOT) not in place and str(lab / "environments") in place
    said = uv(
        "run",
        "hone",
        "eval",
        "run",
        "reverse-text",
        "-m",
        "outputs/reverse-text-tiny/checkpoint-20",
        "-n",
        8,
        "-a",
        TINY_ENV,
        cwd=lab,
    )
    assert "reward: avg - " in said
