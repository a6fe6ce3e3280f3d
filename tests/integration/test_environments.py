"""Environments over real processes: tools in a run, rewards of groups, evaluations, those of the verifiers library."""

import asyncio
import itertools
import json
import os
import subprocess
from pathlib import Path

import pytest

import hone.environments as vf
from hone.config.sections import EnvConfig
from hone.environments.attempt import attempt
from hone.environments.registry import load_environments
from hone.evals.results import Folder
from hone.records import Completion, Sampling, Turn
from tests.hangs import HANG_SECONDS

from .conftest import TINY, Server, command, train_model
from .scripted_server import start_server

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


V1_ENVIRONMENTS = Path(__file__).parent / "v1_environments"
LIBRARY_ENVIRONMENTS = [
    (version, kind)
    for kind in ("single", "multi", "tool", "group")
    for version in ("0.1.14", "0.3.1")
] + [("0.4.0", kind) for kind in ("three_turns", "glossary", "kuhn_poker", "forgetful")]


def library_home(version):
    """Return the virtual environment of a version of verifiers, or skip the test."""
    home = os.environ.get(f"VERIFIERS_{version.replace('.', '_')}")
    if home is None:
        pytest.skip(f"no virtual environment with verifiers {version} is named")
    return home


@pytest.mark.verifiers
@pytest.mark.parametrize(("version", "kind"), LIBRARY_ENVIRONMENTS)
def test_an_environment_of_the_library_trains_unchanged(version, kind, trained, tmp_path):
    """With the library's own Python, as `hone env install --isolated` makes it: VERIFIERS_0_1_14, VERIFIERS_0_3_1."""
    home = library_home(version)
    source = V1_ENVIRONMENTS / f"{kind}.py"
    if not source.exists():
        source = Path(__file__).parent / f"verifiers_{kind}.py"
    (tmp_path / "library_env.py").write_text(source.read_text())
    size, group = 8, 4
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
        160,
        "--orchestrator.env",
        json.dumps({"id": "library-env", "venv": home}),
        "--orchestrator.batch-size",
        size,
        "--orchestrator.rollouts-per-example",
        group,
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
    rows = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    drawn = sum(len(turn["ids"]) for r in rollouts if r["is_used"] for turn in r["turns"])
    assert not any(r["error"] for r in rollouts)
    assert rows[1]["tokens/trained"] == drawn and rows[1]["mismatch_kl/max"] < 1e-6
    if kind == "kuhn_poker":
        check_both_players(rollouts, size)
        return
    assert len(rollouts) == size
    for r in rollouts:
        turns = len(r["turns"])
        if kind == "forgetful":  # its harness shows the model other messages than the trace keeps
            assert turns == r["reward"] == 3.0
            continue
        said = [m["content"] for m in r["completion"] if m["role"] == "assistant"]
        assert len(said) == turns == (3 if kind in ("multi", "three_turns") else 1)
    if kind == "three_turns":
        assert all(r["reward"] == r["metrics"]["turns"] == 3.0 for r in rollouts)
    if kind == "glossary":
        for r in rollouts:
            assert r["metrics"]["knows_tools"] == 0.25
            assert r["reward"] == 0.25 + r["metrics"]["has_answered"]
    if kind == "group":
        for start in (0, 4):
            group = rollouts[start : start + 4]
            assert (
                len({r["example_id"] for r in group}) == 1
                and min(r["reward"] for r in group) == 0.0
            )
            assert (
                all(r["reward"] == r["metrics"]["place"] for r in group)
                and max(r["reward"] for r in group) <= 1
            )


def check_both_players(rollouts, episodes):
    """Both players of a hand are rollouts of their own, unless the first forfeits at once."""
    first, second = ([r for r in rollouts if r["agent"] == agent] for agent in ("first", "second"))
    assert len(first) == episodes and len(second) <= episodes
    assert len(second) == sum(len(r["turns"]) > 0 for r in second)
    for r in rollouts:
        assert r["reward"] == r["metrics"]["chips"]
        assert [m["role"] for m in r["completion"][:3]] == ["system", "user", "assistant"]
        if r["metrics"]["forfeits"]:
            assert r["reward"] == -1.0


@pytest.mark.verifiers
@pytest.mark.parametrize(
    ("name", "reward", "metrics"),
    [
        ("glossary", 0.75, {"has_answered": 0.5}),
        ("scratchpad", 1.0, {"own_word": 1.0}),
        ("kuhn_poker", 0.0, {"first/forfeits": 0.0, "second/forfeits": 0.0}),
        ("code_golf", 1.5, {"golfer/passes": 1.0, "golfer/is_shortest": 0.5}),
        ("color_codeword", 1.0, {}),
    ],
)
def test_environments_of_the_newest_library_are_evaluated(name, reward, metrics, tmp_path):
    """Against a server that plays by rules: with tools, several agents, code and images."""
    own = tmp_path / "data" / "hone" / "environments"  # where `hone env install --isolated` puts it
    own.mkdir(parents=True)
    (own / name).symlink_to(library_home("0.4.0"))
    places = {"PYTHONPATH": str(V1_ENVIRONMENTS), "XDG_DATA_HOME": str(tmp_path / "data")}
    out = tmp_path / "ours"
    server = start_server()
    flags = [
        "-m",
        "scripted",
        "-b",
        f"http://127.0.0.1:{server.server_port}/v1",
        "-r",
        2,
        "-o",
        out,
    ]
    try:
        if name == "code_golf":
            refused = command("vf-eval", name, *flags, ok=False, cwd=tmp_path, env=places)
            assert "GolfTask.passes can run what the model writes" in refused.stderr
            flags += ["-a", '{"allow_code_on_this_machine": true}']
        command("vf-eval", name, "-n", 4, *flags, "--html", cwd=tmp_path, env=places)
    finally:
        server.shutdown()
    rows = [json.loads(line) for line in (out / "results.jsonl").open()]
    assert len(rows) == (4 if name in ("glossary", "code_golf") else 8)
    assert sum(row["reward"] for row in rows) / len(rows) == reward
    for row in rows:
        assert metrics.items() <= row["metrics"].items() and not row["error"]
        said = [m for m in row["completion"] if m["role"] == "assistant"]
        assert len(said) == len(row["turns"])
    if name == "kuhn_poker":
        assert all(abs(row["metrics"]["first/chips"]) in (1.0, 2.0) for row in rows)
        assert {m["agent"] for row in rows for m in row["completion"]} == {"first", "second"}
    if name == "glossary":
        called = rows[0]["completion"][0]["tool_calls"][0]["function"]
        assert called["name"] == "glossary_look_up"


@pytest.mark.verifiers
def test_environments_of_the_newest_library_are_learned(tmp_path):
    """Two of them in one run: the reward of each rises."""
    names = ("reverse_lines", "scratchpad")
    out = tmp_path / "run"
    home = library_home("0.4.0")
    train_model(tmp_path, 200)
    environments = [{"id": name, "venv": home} for name in names]
    flags = ["--max-steps", 12, "--seq-len", 160, "--orchestrator.sampling.max-tokens", 8]
    flags += ["--orchestrator.batch-size", 96, "--orchestrator.rollouts-per-example", 8]
    flags += ["--orchestrator.env", json.dumps(environments)]
    model = tmp_path / "out" / "weights" / "step_200"
    recipe = ["@", f"{TINY}/rl.toml", "--model.name", model, "--output-dir", out]
    command("rl", *recipe, *flags, env={"PYTHONPATH": str(V1_ENVIRONMENTS)})
    rows = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    for name in names:
        rewards = [row[f"reward/{name}"] for row in rows if f"reward/{name}" in row]
        assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.03
    assert all(0 < row["time/rollout/environment"] < 60 for row in rows)


@pytest.mark.verifiers
def test_512_rollouts_of_the_newest_library_in_flight(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(V1_ENVIRONMENTS))
    settings = EnvConfig(id="three-turns", venv=library_home("0.4.0"), workers=2)
    (environment,) = load_environments([settings]).values()
    waiting = 0
    most = 0

    class Client:
        async def chat(self, prompt, sampling):
            nonlocal waiting, most
            waiting += 1
            most = max(most, waiting)
            for _ in range(100):  # until nearly all rollouts ask the model at the same time
                if most >= 500:
                    break
                await asyncio.sleep(1.0)
            waiting -= 1
            return Turn([1, 2], Completion([3], [-0.5], [0], "stop"), "well")

    async def run_all():
        examples = environment.get_dataset() * 128
        try:
            work = (attempt(environment, Client(), one, Sampling(1.0, 8)) for one in examples)
            return await asyncio.gather(*work)
        finally:
            await environment.close()

    done = asyncio.run(run_all())
    assert len(done) == 512 and most >= 500
    assert [rollout.error for rollout in done if rollout.error] == []
    assert all(rollout.reward == 3.0 and len(rollout.turns) == 3 for rollout in done)


@pytest.mark.verifiers
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"agent": {"harness": {"id": "bash"}}},
            "agent.harness.id 'bash' runs what the model writes",
        ),
        ({"taskset": {"nope": 1}}, r"env.args.taskset.*nope"),
    ],
)
def test_arguments_of_the_newest_library_are_checked(arguments, words, monkeypatch):
    home = library_home("0.4.0")
    monkeypatch.setenv("PYTHONPATH", str(V1_ENVIRONMENTS))
    with pytest.raises(ValueError, match=words):
        load_environments([EnvConfig(id="reverse-lines", venv=home, args=arguments)])


@pytest.mark.verifiers
def test_faults_of_the_newest_library_end_their_rollouts_alone(monkeypatch):
    """A crash, a hang, a flood of output, an error: other rollouts of the same workers are done."""
    home = library_home("0.4.0")
    monkeypatch.setenv("PYTHONPATH", str(V1_ENVIRONMENTS))
    (environment,) = load_environments([EnvConfig(id="faulty", venv=home, workers=2)]).values()

    class Client:
        async def chat(self, prompt, sampling):
            return Turn([1, 2], Completion([3], [-0.5], [0], "stop"), "well")

    faults = {
        one.id: environment.kept_row(one)["data"]["fault"] for one in environment.get_dataset()
    }

    def attempt_once(example, seconds=60.0):
        # Each of these two ends its worker, and with it the attempts of other rollouts there.
        retries = 0 if faults[example.id] in ("hang", "crash") else 5
        return attempt(environment, Client(), example, Sampling(1.0, 8), seconds, retries)

    async def run_all():
        examples = environment.get_dataset()
        hanging = [example for example in examples if faults[example.id] == "hang"]
        others = [example for example in examples if faults[example.id] != "hang"]
        healthy = [example for example in others if faults[example.id] == "none"]
        try:
            # The hang comes later: the end of its worker would hide how the crash ended.
            done = await asyncio.gather(*map(attempt_once, others))
            later = (attempt_once(example, 30.0) for example in hanging + healthy)
            return done + await asyncio.gather(*later)
        finally:
            await environment.close()

    done = {rollout.example.id: rollout for rollout in asyncio.run(run_all())}
    assert [done[i].reward for i in (0, 3, 5)] == [1.0, 1.0, 1.0]
    assert not any(done[i].error for i in (0, 3, 5))
    assert "ended with exit code 3" in done[1].error
    assert "no end within 30 s" in done[2].error
    assert "no reward today" in done[4].error


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


@pytest.mark.main_path
def test_the_worker_of_the_library_needs_nothing_of_hone():
    """It is run by Pythons that have no Hone."""
    place = Path(__file__).parents[2] / "src" / "hone" / "environments" / "protocols"
    script = place / "verifiers_worker.py"
    names = ("verifiers_v1_worker.py", "worker_loop.py", "in_process_chat.py", "forked_tools.py")
    for file in (script, *(place / name for name in names)):
        assert "import hone" not in file.read_text() and "from hone" not in file.read_text()
    done = subprocess.run(
        ["python3", "-I", "-S", script, "x", "examples"], capture_output=True, text=True
    )
    assert done.returncode != 0 and "verifiers" in done.stderr


@pytest.mark.verifiers
@pytest.mark.parametrize("version", ["0.1.14", "0.3.1"])
def test_the_token_client_of_the_library_goes_on_in_the_tokens_that_were_sampled(
    trained, tmp_path, version
):
    home = os.environ.get(f"VERIFIERS_{version.replace('.', '_')}")
    if home is None:
        pytest.skip(f"no virtual environment with verifiers {version} is named")
    here = Path(__file__).parent
    (tmp_path / "library_env.py").write_text((here / "verifiers_multi.py").read_text())
    server = Server("--model.name", trained, log=tmp_path / "log")
    try:
        done = subprocess.run(
            [f"{home}/bin/python", here / "verifiers_tokens.py", server.url, str(trained)],
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
    finally:
        server.stop()
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.strip().splitlines()[-1])
    assert said["version"] == version and not any("fell back" in one for one in said["warnings"])
    went_on = 0
    for turns in said["rollouts"]:
        assert len(turns) == 3
        for before, after in itertools.pairwise(turns):
            # The library writes a conversation anew after one that was cut
            if not before["is_truncated"]:
                whole = before["prompt_ids"] + before["completion_ids"]
                assert after["prompt_ids"][: len(whole)] == whole and len(
                    after["prompt_ids"]
                ) > len(whole)
                went_on += 1
    assert went_on


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
