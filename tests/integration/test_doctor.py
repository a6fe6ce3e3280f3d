"""Runs broken on purpose are named right, a good one is left alone; a run that is forked goes on from where it was."""

import json
import shutil
from pathlib import Path

import pytest

from hone.dashboard.views import Runs
from tests.integration.conftest import ROOT, TINY, command

MODEL = ROOT / "src/hone/launch/workspace/models/reverse-text-tiny-sft"
TEXTS = '"texts": "generated", "min_chars": 4, "max_chars": 10'
PLAIN = "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}assistant: "


def rl(out, *words, model=MODEL, **kwargs):
    return command(
        "rl",
        "@",
        f"{TINY}/rl.toml",
        "--model.name",
        model,
        "--seq-len",
        128,
        "--orchestrator.batch-size",
        128,
        "--orchestrator.rollouts-per-example",
        8,
        "--trainer.optim.type",
        "adamw",
        "--trainer.optim.lr",
        "2e-4",
        "--max-steps",
        30,
        "--log-interval",
        0,
        "--output-dir",
        out,
        *words,
        env={"PYTHONPATH": str(Path(__file__).parent)},
        **kwargs,
    )


def paid(kind):
    return (
        "--orchestrator.env",
        f'{{"id": "paid_otherwise", "args": {{"kind": "{kind}", {TEXTS}}}}}',
    )


BROKEN = {
    "good": ((), None),
    "a learning rate 100 times too high": (("--trainer.optim.lr", "2e-2"), "collapse"),
    "paid for length": (
        (*paid("length"), "--orchestrator.sampling.max-tokens", 64, "--trainer.optim.lr", "4e-4"),
        "length",
    ),
    "a reward without variance": (paid("same"), "no_variance"),
    "stale weights": (
        (
            "--deployment",
            "processes",
            "--max-async-level",
            12,
            "--orchestrator.max-off-policy-steps",
            14,
            "--inference.server.port",
            0,
        ),
        "stale",
    ),
    "cut off": (("--orchestrator.sampling.max-tokens", 6), "truncated"),
    "a broken template": ((), "template"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_the_doctor_names_what_is_wrong(what, tmp_path):
    words, expected = BROKEN[what]
    model = MODEL
    if expected == "template":
        model = tmp_path / "model"
        shutil.copytree(MODEL, model)
        (model / "chat_template.jinja").write_text(PLAIN)
    console = rl(tmp_path / "run", *words, model=model).stdout
    told = command("hone", "doctor", tmp_path / "run", "--json", ok=expected is None)
    found = json.loads(told.stdout)["rl"]["findings"]
    assert [finding["kind"] for finding in found] == ([expected] if expected else [])
    if expected:
        lines = command("hone", "doctor", tmp_path / "run", ok=False).stdout
        title = found[0]["title"]
        assert title in lines and "rollout of step" in lines
        assert f"| {title} (since step" in console
        (line,) = Runs(tmp_path, tmp_path / "cache").list_runs()
        assert line["finding"]["title"] == title


def weights(run, step):
    return (run / "weights" / f"step_{step}" / "model.safetensors").read_bytes()


def test_a_fork_goes_on_from_a_step_and_a_resume_points_to_it(tmp_path):
    base, same, other = (tmp_path / name for name in ("base", "same", "other"))
    short = ("--max-steps", 8, "--ckpt.interval", 4, "--ckpt.keep", 5)
    rl(base, *short)
    rl(same, *short, "--fork", f"{base}@4")
    assert weights(same, 8) == weights(base, 8)  # with the same keys it is the same run
    rl(
        other,
        *short,
        "--fork",
        f"{base}@4",
        "--trainer.optim.lr",
        "1e-4",
        "--orchestrator.batch-size",
        64,
    )
    assert weights(other, 8) != weights(base, 8)
    fork = json.loads((other / "run_rl.json").read_text())["fork"]
    assert (fork["run"], fork["step"]) == (str(base), 4)
    assert fork["changed"] == {
        "orchestrator.batch_size": [128, 64],
        "trainer.optim.lr": [2e-4, 1e-4],
    }
    assert (
        "nothing is left to do"
        in rl(tmp_path / "x", *short, "--fork", f"{base}@8", ok=False).stderr
    )
    rows = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert (
        rows[:4]
        == [json.loads(line) for line in (base / "metrics.jsonl").read_text().splitlines()][:4]
    )
    # Asked for again, it goes on where it was; mistakes are told.
    rl(
        other,
        *short,
        "--max-steps",
        10,
        "--fork",
        f"{base}@4",
        "--resume",
        "auto",
        "--trainer.optim.lr",
        "1e-4",
        "--orchestrator.batch-size",
        64,
    )
    assert (other / "weights" / "step_10").exists()
    refused = rl(base, *short, "--resume", "--trainer.optim.lr", "1e-4", ok=False).stderr
    assert f"with other keys it is a new run: --fork {base}@8" in refused
    for fork, words in (
        (base, "it is RUN@N"),
        (f"{base}@5", "but those of steps 4, 8"),
        (f"{tmp_path}@4", "holds no rl run"),
    ):
        refused = rl(tmp_path / "x", "--fork", fork, ok=False).stderr
        assert words in refused and not (tmp_path / "x").exists()
    assert "directory of its own" in rl(base, "--clean", "--fork", f"{base}@4", ok=False).stderr
    assert weights(base, 8)
    picture = tmp_path / "curves.svg"
    command("hone", "plot", base, other, "-o", picture)
    assert picture.read_text().count("<path") > 10
    assert "did you mean" in command("hone", "doctor", tmp_path, ok=False).stderr
