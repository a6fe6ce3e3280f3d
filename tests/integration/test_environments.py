"""Environments over real processes: tools in a run, rewards of groups, evaluations, those of the verifiers library."""

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest

import hone.environments as vf
from hone.evals.results import Folder
from hone.records import Completion, Sampling, Turn
from tests.hangs import HANG_SECONDS

from .conftest import TINY, V1_ENVIRONMENTS, command, library_home

TOOLS = """
import json
import hone.environments as vf

def add(a: int, b: int) -> int:
    \"\"\"Add.\"\"\"
    return a + b

class Forced(vf.ToolEnv):
    \"\"\"Its model cannot write calls: what it says counts as one, the first time.\"\"\"

    async def env_response(self, messages, state):
        if len(messages) < 4:
            return [await self.call_tool("add", {"a": 1, "b": len(messages)}, "x")]
        return []

    @vf.stop(priority=1)
    async def twice(self, state):
        return state["turn"] >= 2

    async def is_completed(self, state):
        return await self.twice(state)

def longest(completions):
    lengths = [len(one[0]["content"]) for one in completions]
    return [float(length == max(lengths)) for length in lengths]

def load_environment():
    rows = [{"question": f"{i}"} for i in range(40)]
    return Forced(dataset=rows, tools=[add], rubric=vf.Rubric(funcs=[longest]))
"""


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.main_path)])
def test_a_run_with_tools_and_rewards_of_groups(workers, trained, tmp_path):
    (tmp_path / "tools_env.py").write_text(TOOLS)
    out = tmp_path / "run"
    command(
        "rl",
        "@",
        f"{TINY}/rl.toml",
        "--model.name",
        trained,
        "--output-dir",
        out,
        "--max-steps",
        2,
        "--seq-len",
        128,
        "--orchestrator.env",
        json.dumps({"id": "tools-env", "workers": workers}),
        "--orchestrator.batch-size",
        16,
        "--orchestrator.rollouts-per-example",
        4,
        "--orchestrator.sampling.max-tokens",
        8,
        "--trainer.optim.type",
        "adamw",
        "--trainer.optim.lr",
        0,
        env={"PYTHONPATH": str(tmp_path)},
    )
    rollouts = [
        json.loads(line) for line in (out / "rollouts" / "step_2" / "rollouts.jsonl").open()
    ]
    assert len(rollouts) == 16 and {r["stop"] for r in rollouts} == {"is_completed"}
    for r in rollouts:
        assert len(r["turns"]) == 2 and r["completion"][1] == {
            "role": "tool",
            "content": "3",
            "tool_call_id": "x",
        }
        one, two = r["turns"]
        assert two["prompt_ids"][: len(one["prompt_ids"])] == one["prompt_ids"] and set(
            r["timings"]
        ) >= {"model"}
    for i in range(0, 16, 4):
        best = max(len(r["completion"][0]["content"]) for r in rollouts[i : i + 4])
        for r in rollouts[i : i + 4]:
            assert (
                r["reward"]
                == r["metrics"]["longest"]
                == float(len(r["completion"][0]["content"]) == best)
            )


@pytest.mark.main_path
def test_an_evaluation_is_saved_gone_on_with_compared_and_shown(server, trained, tmp_path):
    file = tmp_path / "evals.toml"
    entry = '[[eval]]\nenv_id = "reverse-text"\nenv_args = { texts = "generated", min_chars = 3, max_chars = 6 }\n'
    file.write_text(
        f"model = {str(trained)!r}\nmax_tokens = 16\n{entry}num_examples = 4\n{entry}num_examples = 3\n"
    )
    options = ["-b", server.url, "-r", 2, "-s"]
    done = command("vf-eval", file, *options, "--html", "--token-ids", cwd=tmp_path)
    assert (
        "95 % of the mean reward" in done.stdout
        and "pass@k: 1: " in done.stdout
        and "ended by: " in done.stdout
    )
    assert "tokens: " in done.stdout and done.stdout.count("saved in ") == 2
    first, second = (
        Path(tmp_path / line.split()[-1]) for line in done.stdout.splitlines() if "saved in" in line
    )
    rows = Folder.open(first).read_rows()
    assert (
        len(rows) == 8
        and len(rows[0]["turns"][0]["ids"]) == len(rows[0]["turns"][0]["logprobs"]) > 0
    )
    assert (second / "rollouts.html").read_text().count("<details") == 6
    (first / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    alone = [
        "reverse-text",
        "-m",
        trained,
        "-t",
        16,
        "-n",
        4,
        *options,
        "-a",
        '{"texts": "generated", "min_chars": 3, "max_chars": 6}',
    ]
    again = command("vf-eval", *alone, "--resume", first, cwd=tmp_path)
    assert "3 rollouts are done" in again.stdout
    assert [row["reward"] for row in Folder.open(first).read_rows()] == [
        row["reward"] for row in rows
    ]
    assert "2 examples" not in command("vf-eval", "--compare", first, second, cwd=tmp_path).stdout
    failing = command("vf-eval", *alone, "-S", '{"stream": true}', ok=False, cwd=tmp_path)
    assert "every rollout failed" in failing.stderr
    none = command("vf-eval", "--compare", first, tmp_path, ok=False, cwd=tmp_path)
    assert "no folder of results" in none.stderr


@pytest.mark.verifiers
@pytest.mark.parametrize("client", ["eval", "train"])
def test_the_newest_library_s_own_evaluation_gives_our_rewards(client, server, trained, tmp_path):
    """Its `vf-eval` against our server, and ours: the same rewards at temperature 0.

    Its client `train` renders the prompts itself, and asks the generate route for token ids.
    """
    home = library_home("0.4.0")
    own = tmp_path / "data" / "hone" / "environments"  # where `hone env install --isolated` puts it
    own.mkdir(parents=True)
    (own / "reverse-lines").symlink_to(home)
    places = {"PYTHONPATH": str(V1_ENVIRONMENTS), "XDG_DATA_HOME": str(tmp_path / "data")}
    renderer = f", renderer = {{ name = 'default' }}, renderer_model_name = {str(trained)!r}"
    renderer = renderer if client == "train" else ""
    config = f"""
model = {str(trained)!r}
num_rollouts = 1
push = false
output_dir = {str(tmp_path / "theirs")!r}
client = {{ type = "{client}", base_url = "{server.url}", api_key_var = "NO_KEY"{renderer} }}
sampling = {{ temperature = 0.0, max_tokens = 8 }}
select = {{ limit = 6 }}
[env]
taskset = {{ id = "reverse-lines" }}
agent = {{ harness = {{ id = "null" }}, runtime = {{ type = "subprocess" }} }}
"""
    (tmp_path / "eval.toml").write_text(config)
    done = subprocess.run(
        [f"{home}/bin/vf-eval", "@", str(tmp_path / "eval.toml"), "--no-rich"],
        cwd=tmp_path,
        env=os.environ | places | {"PATH": f"{home}/bin:{os.environ['PATH']}", "NO_KEY": "none"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (traces,) = (tmp_path / "theirs").rglob("traces.jsonl")
    theirs = {}
    for line in traces.open():
        (trace,) = json.loads(line)["traces"]
        reward, length = trace["rewards"]["share_right"]["score"], trace["metrics"]["length"]
        theirs[trace["task"]["data"]["idx"]] = (reward, length)
        sampled = [node for node in trace["nodes"] if node["sampled"]]
        assert all(bool(node["token_ids"]) == (client == "train") for node in sampled)
        assert all(len(node["logprobs"]) == sum(node["mask"]) for node in sampled)
    out = tmp_path / "ours"
    flags = ["-m", trained, "-b", server.url, "-n", 6, "-r", 1, "-T", 0, "-t", 8, "-o", out]
    command("vf-eval", "reverse-lines", *flags, cwd=tmp_path, env=places)
    rows = [json.loads(line) for line in (out / "results.jsonl").open()]
    ours = {row["example_id"]: (row["reward"], row["metrics"]["length"]) for row in rows}
    assert len(ours) == 6 and ours.keys() == theirs.keys()
    assert all(ours[i] == pytest.approx(theirs[i]) for i in ours)
    assert len(set(ours.values())) > 1


class Scripted:
    """A model that always gives the same answer."""

    def __init__(self, text):
        self.text = text

    async def chat(self, messages, sampling, tools=None):
        return Turn([1, 2], Completion([3], [-0.5], [0], "stop"), self.text, [])


@pytest.mark.main_path
def test_mathematics_is_compared_within_a_time():
    pytest.importorskip("math_verify")
    env = vf.SingleTurnEnv(
        dataset=[{"question": "?", "answer": "1/2"}], rubric=vf.MathRubric(timeout_seconds=2.0)
    )

    async def rewards():
        texts = (
            "\\boxed{0.5}",
            "\\boxed{\\frac{2}{4}}",
            "\\boxed{2}",
            "no",
            "\\boxed{9^{9^{9^{9^9}}}}",
            "\\boxed{0.5}",
        )
        return [
            (await env.rollout(Scripted(text), env.get_dataset()[0], Sampling())).reward
            for text in texts
        ]

    assert asyncio.run(rewards()) == [1.0, 1.0, 0.0, 0.0, 0.0, 1.0]
