"""The commands of the pages in docs/, as they stand there, and that no page has commands that nothing tries."""

import asyncio
import json
import os
import random
import re
import shlex
import socket
import subprocess
import sys

import pytest
import torch

import hone
from hone.trainer.sft.data_sources import to_messages
from tests.hangs import HANG_SECONDS
from tests.integration.conftest import BIN, ROOT, answers, at_a_shell, command, until

RECIPE = ROOT / "src/hone/launch/workspace/configs/prime-rl/reverse-text-tiny.toml"
MODEL = ROOT / "src/hone/launch/workspace/models/reverse-text-tiny-sft"
TEXTS = """ -a '{"texts": "generated", "min_chars": 4, "max_chars": 8}'"""  # what is not named comes from the hub
# Pages with commands, and what tries them.
TRIED = {
    "algorithms.md": "here",
    "checkpoints.md": "here",
    "dashboard.md": "here",
    "environments.md": "here",
    "evaluation.md": "here",
    "exact.md": "here",
    "inference.md": "here; with vLLM in test_samplers.py",
    "lora.md": "here",
    "models.md": "test_hf_model_commands.py",
    "preferences.md": "here",
    "nodes.md": "test_seed_commands.py, test_nodes.py",
    "rl.md": "here",
    "session.md": "here",
    "services.md": "test_seed_commands.py, test_nodes.py",
    "sft.md": "here",
    "slurm.md": "test_slurm.py",
    "tinker.md": "here",
    "tutorial.md": "test_tutorial.py",
}


def scripts_of(page):
    return re.findall(
        r"^```bash\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE
    )


def commands_of(page):
    lines = "".join(scripts_of(page)).replace("\\\n", " ").splitlines()
    return [line.split(" #")[0].strip() for line in lines if line.strip()]


def run_python_of(page):
    """Run the Python blocks of a page; return the names that they define."""
    text = (ROOT / "docs" / page).read_text()
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        exec(compile(block, page, "exec"), names)
    return names


def test_own_data_is_converted_and_rewarded_as_the_page_says(tmp_path):
    page = run_python_of("data.md")
    shared = {
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    }
    alpaca = {"instruction": "Add.", "input": "2, 2", "output": "4"}
    table = {"question": "2 + 2?", "answer": "4"}
    rows = [page["from_sharegpt"](shared), page["from_alpaca"](alpaca), page["from_table"](table)]
    page["write_rows"](tmp_path / "rows.jsonl", rows)
    read = [json.loads(line) for line in (tmp_path / "rows.jsonl").open()]
    texts = [[turn["content"] for turn in to_messages(row)] for row in read]
    assert texts == [["Hi", "Hello"], ["Add.\n\n2, 2", "4"], ["2 + 2?", "4"]]
    page["write_rows"](tmp_path / "questions.jsonl", [table] * 5)
    environment = page["load_environment"](str(tmp_path / "questions.jsonl"), held_out=2)
    train, held_out = environment.get_dataset(), environment.get_eval_dataset()
    assert (len(train), len(held_out)) == (3, 2) and train[0].answer == "4"


def test_rewards_of_the_page_give_partial_credit():
    page = run_python_of("rewards.md")
    said = [{"role": "assistant", "content": "abcX"}]
    assert page["right_beginning"](said, "abcd") == 0.75
    assert page["right_beginning"]([{"content": ""}], "") == 0
    tests = {"tests": [lambda text: True, lambda text: "X" not in text]}
    assert page["share_of_tests"](said, tests) == 0.25
    assert page["share_of_tests"]([{"content": "abcd"}], tests) == 1


def test_the_conversation_and_the_tool_of_the_page_answer_the_model():
    page = run_python_of("multi_turn.md")
    game = page["load_environment"]()
    assert len(game.get_dataset()) == len(game.get_eval_dataset()) == 10
    said = [{"role": "assistant", "content": one} for one in ("3", "many", "18", "7")]
    state = {"answer": "7", "completion": said}
    hints = [asyncio.run(game.env_response([one], state))[0]["content"] for one in said[:3]]
    assert hints == ["Higher.", "A number only.", "Lower."]
    assert asyncio.run(game.is_found(state)) and page["found"](said[:3], "7") == 0.0
    products = page["load_products"]()
    example = products.get_dataset()[0]
    assert page["multiply"](10, 17) == 170 == int(example.answer)
    assert products.demonstrate(example.prompt, example, random.Random(0))


def rows_of(page):
    """The rows of data that a page shows."""
    text = (ROOT / "docs" / page).read_text()
    (rows,) = re.findall(r"^```jsonl\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return rows


@pytest.mark.main_path
def test_all_pages_with_commands_are_tried():
    assert {path.name for path in (ROOT / "docs").glob("*.md") if scripts_of(path.name)} == set(
        TRIED
    )


@pytest.fixture
def place(tmp_path):
    """With FILE, the tutorial's recipe made smaller, which leaves its run in outputs/."""
    text = (
        RECIPE.read_text()
        .replace("models/reverse-text-tiny-sft", str(MODEL))
        .replace("batch_size = 128", "batch_size = 32")
    )
    text = text.replace("max_steps = 100", "max_steps = 42").replace(
        "rollouts_per_example = 16", "rollouts_per_example = 8"
    )
    (tmp_path / "FILE").write_text(re.sub("output_dir.*\n", "", text))
    return tmp_path


@pytest.fixture
def served(place, port_8000, started):
    """The model on the port that pages name, as they start it, under the name MODEL."""
    (place / "MODEL").symlink_to(MODEL)
    first = commands_of("inference.md")[0]
    assert first == "uv run inference --model.name DIR_OR_HUB_ID"
    words = first.replace("DIR_OR_HUB_ID", "MODEL").split()[2:]
    with (place / "server.log").open("w") as log:
        started(BIN / words[0], *words[1:], cwd=place, log=log)
    until(lambda: answers("http://localhost:8000/v1"), words=(place / "server.log").read_text)
    return place


def typed(script, cwd, **kwargs):
    """Types it; what it printed, on both streams."""
    done = at_a_shell(script, cwd, **kwargs)
    assert done.returncode == 0 and "Traceback" not in done.stderr, (
        f"{script}\n{done.stdout}\n{done.stderr}"
    )
    return done.stdout + done.stderr


def test_the_dashboard_page(place):
    # a run in outputs/ that has a checkpoint of step 40
    command(
        "rl", "@", "FILE", "--ckpt.interval", 40, "--ckpt.keep", 9, "--log-interval", 0, cwd=place
    )
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
        seen.append(
            command(*words, cwd=place, env={"WANDB_MODE": "offline", "WANDB_SILENT": "true"}).stdout
        )
    assert "Dashboard over" in seen[0] and "no known problems found" in seen[1]
    assert (place / "outputs" / "slower" / "weights" / "step_42").exists()
    assert (place / "outputs" / "curves.png").stat().st_size > 10_000 and "<svg" in (
        place / "both.svg"
    ).read_text()
    assert list((place / "outputs").glob("*/wandb/offline-run-*/*.wandb"))
    assert list((place / "outputs").glob("*/tensorboard/events.*"))


def test_the_algorithms_page(place, started):
    page = (ROOT / "docs" / "algorithms.md").read_text()
    files = re.findall(r"`(my_\w+\.py)`:\n```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert [name for name, _ in files] == ["my_loss.py", "my_advantage.py"]
    for name, text in files:
        (place / name).write_text(text)
    (place / "FILE").rename(place / "rl.toml")
    (place / "TEACHER").symlink_to(MODEL)
    serve, *train = commands_of("algorithms.md")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    words = serve.replace("8001", port).split()[2:]
    with (place / "teacher.log").open("w") as log:
        started(BIN / words[0], *words[1:], cwd=place, log=log)
    until(lambda: answers(f"http://localhost:{port}/v1"), words=(place / "teacher.log").read_text)
    assert len(train) == 2
    for i, line in enumerate(train):
        said = typed(f"{line.replace('8001', port)} --max-steps 3 --output-dir outputs/{i}", place)
        assert "Step 3" in said and (place / f"outputs/{i}/weights/step_3").exists()


def test_the_session_page(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (line,) = commands_of("session.md")
    steps = re.findall(r"Reward: (\d\.\d+)", typed(line, tmp_path))
    assert len(steps) == 10 and float(steps[-1]) > 0.1 > float(steps[0])
    assert (tmp_path / "outputs/session/model/model.safetensors").exists()
    # The page's own loss, which gets what `forward_backward` hands to functions.
    page = (ROOT / "docs" / "session.md").read_text()
    (code,) = re.findall(r"^```python\n(def dpo.*?)^```", page, re.DOTALL | re.MULTILINE)
    session = hone.TrainingSession(tmp_path / "outputs/session/model", device="cpu")
    pairs = [hone.Datum.from_completion([5, 6], [7, i]) for i in (8, 9, 10, 11)]
    before = session.forward(pairs).logprobs
    sums = [float(one[1:].sum()) for one in before]
    margins = torch.tensor([sums[0] - sums[1], sums[2] - sums[3]])
    names = {"torch": torch, "session": session, "pairs": pairs, "reference_margins": margins}
    for _ in range(5):
        exec(code, names)  # of this repository's page
        session.optim_step(hone.AdamParams(1e-3))
    after = [float(one[1:].sum()) for one in session.forward(pairs).logprobs]
    assert after[0] - after[1] > sums[0] - sums[1] and after[2] - after[3] > sums[2] - sums[3]


def test_the_environments_page(tmp_path, monkeypatch):
    make, install, check = commands_of("environments.md")
    typed(make, tmp_path)
    # Into the environment of the tests: not done
    assert install == "hone env install environments/my_task"
    assert "my-task" in typed(f"{check} -p environments", tmp_path)


def test_the_evaluation_and_the_inference_page(served):
    first, several, file, again, compare = commands_of("evaluation.md")
    assert "num_examples: 20" in typed(first + TEXTS, served)
    typed("hone env init my-task", served)
    few = several.replace("-n 200 -r 4", "-n 20 -r 2 -t 8")
    assert few != several
    typed(few, served)
    kept = list((served / "outputs" / "evals").glob("my-task--*/*"))
    assert len(kept) == 1 and {"results.jsonl", "metadata.json"} < {
        path.name for path in kept[0].iterdir()
    }
    (served / "evals.toml").write_text(
        'model = "MODEL"\nnum_examples = 4\nmax_tokens = 8\n[[eval]]\nenv_id = "my-task"\n'
    )
    typed(file, served)
    about = json.loads((kept[0] / "metadata.json").read_text())
    lines = (kept[0] / "results.jsonl").read_text().splitlines()
    about.pop("seconds")  # as when it was killed after half
    (kept[0] / "metadata.json").write_text(json.dumps(about))
    (kept[0] / "results.jsonl").write_text("\n".join(lines[:20]) + "\n")
    typed(again.replace("-n 200 -r 4", "-n 20 -r 2 -t 8"), served)
    assert len((kept[0] / "results.jsonl").read_text().splitlines()) == len(lines) == 40
    for name in ("A", "B"):
        os.symlink(kept[0], served / "outputs" / "evals" / name)
    assert re.search(r"reward +.*0\.0", typed(compare, served))

    _, with_key, ask, *vllm = commands_of("inference.md")
    assert '"content"' in typed(ask.replace('"DIR"', '"MODEL"'), served)
    assert with_key.startswith("HONE_API_KEY=KEY ") and all("vllm" in line for line in vllm)


def test_the_page_on_exact_numerics(served):
    (served / "FILE").rename(served / "rl.toml")
    rl, *probes = commands_of("exact.md")
    refused = at_a_shell(f"{rl} --model.device cpu", served)
    assert refused.returncode == 1 and "model.numerics exact is for a GPU" in refused.stderr
    assert "Traceback" not in refused.stderr and len(probes) == 4
    for line in probes:
        said = typed(f"{line} --model.device cpu --rollouts 20 --max-tokens 20", served)
        assert (
            float(
                re.search(r"logprobs differ between sampler and trainer, by up to (\S+);", said)[1]
            )
            < 1e-3
        )


def test_the_pages_of_training(tmp_path):
    """SFT, RL, LoRA, checkpoints: one after the other, with fewer steps."""
    (sft,) = commands_of("sft.md")
    first, *others = [to_messages(json.loads(row)) for row in rows_of("sft.md").splitlines()]
    assert len(first) == 2 and others == [first] * 2
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    typed(
        "python -m reverse_text --out outputs/data/sft.jsonl -n 200 --min-chars 12 --max-chars 20",
        tmp_path,
    )
    typed(f"{sft} --max-steps 3", tmp_path)
    (rl,), (lora,), (begin, go_on) = map(commands_of, ("rl.md", "lora.md", "checkpoints.md"))
    for line, steps in ((rl, 2), (lora, 1), (begin, 5), (go_on, 6)):
        words = f" --max-steps {steps} --orchestrator.batch-size 32"
        typed(line.replace("step_350", "step_3") + words, tmp_path)
    outputs = tmp_path / "outputs"
    check_metrics_are_documented(outputs / "metrics.jsonl")
    check_metrics_are_documented(outputs / "metrics_sft.jsonl")
    assert (outputs / "weights/step_2").exists()
    assert (outputs / "lora/weights/step_1/lora_adapters/adapter_config.json").exists()
    assert (outputs / "run/checkpoints/step_5").exists() and (
        outputs / "run/weights/step_6"
    ).exists()


def check_metrics_are_documented(file):
    """Each key of a run is on the page of metrics, or has its name before /mean and its like there."""
    named = set(re.findall(r"`([\w/]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    named |= {"rewards/" + name for name in ("accuracies", "margins", "chosen", "rejected")}
    for key in {key for line in file.open() for key in json.loads(line)}:
        general = re.sub(r"^(reward|eval)/reverse-text", r"\1/ENV", key)
        general = re.sub(r"^metrics/.*", "metrics/ENV/NAME", general)
        general = re.sub(r"^(failures|tokens/dropped)/.*", r"\1/CAUSE", general)
        general = re.sub(r"^(eval/ENV)/(?!failed|reward).*", r"\1/NAME", general)
        found = {general, re.sub(r"/(mean|median|std|min|max)$", "", general)}
        assert found & named, f"{key} is not on the page of metrics"


def test_the_tinker_page(place, port_8000, started):
    """The server as the page starts it, and the page's client as a program of its own."""
    (place / "MODEL").symlink_to(MODEL)
    (line,) = commands_of("tinker.md")
    words = line.replace("DIR_OR_HUB_ID", "MODEL").split()[2:]
    started(BIN / words[0], *words[1:], cwd=place)
    until(lambda: answers("http://localhost:8000"))
    page = (ROOT / "docs" / "tinker.md").read_text()
    exports = re.search(r"^export (TINKER_BASE_URL.*)", page, re.MULTILINE).group(1)
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=os.environ
        | dict(one.split("=") for one in exports.split())
        | {"TINKER_TELEMETRY": "0"},
        cwd=place,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *losses, sampled = done.stdout.splitlines()
    assert len(losses) == 5 and float(losses[-1]) < float(losses[0])
    assert len(json.loads(sampled)) <= 8


def test_the_page_of_preference_pairs(place):
    """Its command, on the rows that the page shows."""
    (place / "MODEL").symlink_to(MODEL)
    (line,) = commands_of("preferences.md")
    page = (ROOT / "docs" / "preferences.md").read_text()
    (place / "PAIRS.jsonl").write_text(rows_of("preferences.md"))
    command(*line.replace("DIR_OR_HUB_ID", "MODEL").split()[2:], cwd=place)
    (row,) = map(json.loads, (place / "outputs/dpo/metrics_sft.jsonl").open())
    named = set(re.findall(r"`((?:rewards|logps)/\w+)`", page))
    assert len(named) == 6 and all(name in row for name in named)
