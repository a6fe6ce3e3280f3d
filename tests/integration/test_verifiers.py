"""Environments of the verifiers library, each version in a virtual environment of its own."""

import asyncio
import itertools
import json
import os
import subprocess
from pathlib import Path

import pytest

from hone.config.sections import EnvConfig
from hone.environments.attempt import attempt
from hone.environments.registry import load_environments
from hone.records import Completion, Sampling, Turn
from tests.hangs import HANG_SECONDS

from .conftest import TINY, V1_ENVIRONMENTS, Server, command, library_home, train_model
from .scripted_server import start_server

LIBRARY_ENVIRONMENTS = [
    (version, kind)
    for kind in ("single", "multi", "tool", "group")
    for version in ("0.1.14", "0.3.1")
] + [("0.4.0", kind) for kind in ("three_turns", "glossary", "kuhn_poker", "forgetful")]


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
    assert all(row["time/rollout/environment"] > 0 for row in rows)


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
