"""Inference, orchestrator and trainer as processes: the seeds' commands, the same numbers, life and death."""

import base64
import contextlib
import json
import os
import pty
import re
import shutil
import signal
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hone.kernels import cpu
from hone.models.hf import load_model, save_model
from hone.models.weight_proof import model_checksum
from hone.trainer.checkpoint import is_whole
from tests.hangs import HANG_SECONDS

from .conftest import (
    AFRESH,
    BIN,
    ON_POLICY,
    ON_POLICY_STEPS,
    ROOT,
    SECRET_KEY,
    SMALL,
    TINY,
    TINY_RL,
    Server,
    command,
    http,
    processes_now,
    read_rows,
    until,
)

PORT = ("--inference.server.port", 0)


def metrics(out):
    return read_rows(out / "metrics.jsonl")


def rows_of_steps(out):
    """Return the rows of `metrics` that steps wrote: an evaluation of the first weights has one of its own."""
    return [row for row in metrics(out) if "reward/mean" in row]


def descendants_of_run(out):
    """Processes whose command line names the run directory, wherever they hang."""
    return {
        pid: words
        for pid, (_, words) in processes_now().items()
        if any(str(out) in word for word in words)
    }


def gone(out):
    deadline = time.monotonic() + HANG_SECONDS
    while descendants_of_run(out):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def processes(out, model, *options, **kwargs):
    return command(
        "rl",
        *TINY_RL,
        "--inference",
        "@",
        f"{TINY}/rl/infer.toml",
        "--model.name",
        model,
        "--output-dir",
        out,
        *SMALL,
        *PORT,
        *options,
        **kwargs,
    )


class Started:
    """An `rl` of processes in the background, at work."""

    def __init__(self, started, out, model, *options, env=None):
        self.out, self.log = out, out.with_suffix(".log")
        words = [
            BIN / "rl",
            *TINY_RL,
            "--inference",
            "@",
            f"{TINY}/rl/infer.toml",
            "--model.name",
            model,
            "--output-dir",
            out,
            *SMALL,
            *PORT,
            "--log-interval",
            1,
            *options,
        ]
        self.process = started(*words, log=self.log.open("w"), env=env)
        until(
            lambda: any((out / "checkpoints").glob("step_[3-9]")), self.process, self.log.read_text
        )

    def pid_of(self, name):
        (pid,) = [
            pid
            for pid, words in descendants_of_run(self.out).items()
            if words[1:5] == ["-P", "-m", "hone", name]
        ]
        return pid


to_the_bit = pytest.mark.skipif(
    not cpu.IS_AVAILABLE, reason="torch's own products depend on the batch"
)


def assert_same_weights(one, other, step):
    mine, theirs = (
        load_file(out / "weights" / f"step_{step}" / "model.safetensors") for out in (one, other)
    )
    assert mine.keys() == theirs.keys() and all(
        torch.equal(mine[name], theirs[name]) for name in mine
    )


@pytest.mark.main_path
@to_the_bit
def test_processes_give_the_same_rewards_weights_and_evaluations_as_one_process(
    on_policy_run, trained, tmp_path
):
    words = ("--model.name", trained, "--output-dir", tmp_path / "one", "--deployment", "colocated")
    command("rl", *TINY_RL, *words, *ON_POLICY)
    one, several = metrics(tmp_path / "one"), metrics(on_policy_run)
    for key in (
        "reward/mean",
        "loss/mean",
        "optim/grad_norm",
        "mismatch_kl/mean",
        "completion_len/mean",
    ):
        assert [row[key] for row in one if key in row] == [
            row[key] for row in several if key in row
        ]
    ahead = [
        row["batch/off_policy_level/max"] for row in several if "batch/off_policy_level/max" in row
    ]
    assert ahead == [0] * ON_POLICY_STEPS
    assert_same_weights(tmp_path / "one", on_policy_run, ON_POLICY_STEPS)
    evaluated = [
        {
            row["step"]: row["eval/reverse-text/reward"]
            for row in rows
            if "eval/reverse-text/reward" in row
        }
        for rows in (one, several)
    ]
    assert evaluated[0].keys() == {0, 2, 4, 6} and evaluated[0] == pytest.approx(evaluated[1])
    assert not descendants_of_run(on_policy_run)


@pytest.mark.main_path
def test_a_key_of_the_environment_reaches_both_sides_and_no_file(on_policy_run):
    files = [path for name in ("configs", "logs") for path in (on_policy_run / name).iterdir()]
    assert len(files) > 4 and not any(SECRET_KEY in path.read_text() for path in files)


def test_a_trainer_of_several_processes_that_share_the_model(on_policy_run, trained, tmp_path):
    ranks = (
        "--trainer-gpu-ids",
        "[0, 1]",
        "--trainer.sharding",
        "full",
        "--trainer.micro-batch-tokens",
        200,
    )
    processes(tmp_path / "two", trained, *ON_POLICY, "--max-steps", 3, "--ckpt.interval", 3, *ranks)
    one, two = rows_of_steps(on_policy_run), rows_of_steps(tmp_path / "two")
    for key in ("reward/mean", "loss/mean", "optim/grad_norm", "entropy/mean"):
        assert [row[key] for row in one[:2]] == pytest.approx(
            [row[key] for row in two[:2]], rel=1e-3, abs=1e-6
        ), key
    assert len(two) == 3  # and the server scored the canary of each version as the ranks did
    assert is_whole(tmp_path / "two" / "checkpoints" / "step_3")
    assert (tmp_path / "two" / "weights" / "step_3" / "model.safetensors").exists() and gone(
        tmp_path
    )


@to_the_bit
def test_weights_that_travel_from_memory_to_memory_are_those_of_files(
    on_policy_run, trained, tmp_path
):
    processes(tmp_path / "nccl", trained, *ON_POLICY, "--weight-broadcast.type", "nccl")
    files, memory = rows_of_steps(on_policy_run), rows_of_steps(tmp_path / "nccl")
    assert [row["reward/mean"] for row in files] == [row["reward/mean"] for row in memory]
    sizes = [
        path.stat().st_size for path in (tmp_path / "nccl" / "broadcasts").glob("*/*.safetensors")
    ]
    assert not sizes and all(row["weights/bytes"] > 1e5 for row in memory)
    assert_same_weights(on_policy_run, tmp_path / "nccl", ON_POLICY_STEPS)


def test_a_server_started_again_gets_weights_from_memory(trained, tmp_path, started):
    options = (
        "--max-async-level",
        1,
        "--max-steps",
        150,
        "--ckpt.interval",
        1,
        "--weight-broadcast.type",
        "nccl",
    )
    # A server that is forked is back before anybody misses it.
    run = Started(started, tmp_path / "run", trained, *options, env=AFRESH)
    os.kill(run.pid_of("inference"), signal.SIGKILL)
    assert run.process.wait(HANG_SECONDS) == 0, run.log.read_text()
    log = run.log.read_text()
    assert "did not answer within" not in log  # a server that is gone is known to be at once
    assert "inference was killed (SIGKILL); restarted" in log and " is back, with version " in log
    assert len(metrics(tmp_path / "run")) == 150


def test_sampling_runs_a_step_ahead_and_says_so(trained, tmp_path):
    processes(tmp_path / "run", trained, "--max-steps", 5)
    rows = metrics(tmp_path / "run")
    assert len(rows) == 5 and max(row["batch/async_level"] for row in rows) == 1
    assert (
        rows[0]["batch/off_policy_level/max"] == 0
        and max(r["batch/off_policy_level/max"] for r in rows) <= 1
    )
    kept = sorted(path.name for path in (tmp_path / "run" / "broadcasts").glob("step_*"))
    assert kept == ["step_2", "step_3", "step_4", "step_5"]
    assert all((tmp_path / "run" / "broadcasts" / name / "STABLE").exists() for name in kept)
    rollouts = (
        (tmp_path / "run" / "rollouts" / "step_5" / "rollouts.jsonl").read_text().splitlines()
    )
    assert {json.loads(line)["turns"][0]["version"] for line in rollouts} <= {3, 4}


@pytest.mark.main_path
def test_a_resumed_run_goes_on_from_its_checkpoint(on_policy_run, trained, tmp_path):
    """The run is one that ended after step 4: a copy of the finished one without what came later."""
    out = tmp_path / "run"
    shutil.copytree(on_policy_run, out, ignore=shutil.ignore_patterns("step_5", "step_6"))
    more = (*ON_POLICY, "--trainer.clean", "false", "--resume")
    refused = processes(out, trained, *more, "--orchestrator.sampling.temperature", 0.7, ok=False)
    assert "--resume: orchestrator.sampling.temperature differs from the run in" in refused.stderr
    processes(out, trained, *more)
    assert [row["reward/mean"] for row in rows_of_steps(out)] == [
        row["reward/mean"] for row in rows_of_steps(on_policy_run)
    ]
    assert_same_weights(out, on_policy_run, ON_POLICY_STEPS)


@pytest.mark.parametrize("victim", ["orchestrator", "trainer", "launcher"])
def test_the_death_of_any_process_ends_all(victim, trained, tmp_path, started):
    run = Started(started, tmp_path / "run", trained, "--max-steps", 5000, "--ckpt.interval", 1)
    os.kill(run.process.pid if victim == "launcher" else run.pid_of(victim), signal.SIGKILL)
    assert gone(tmp_path / "run")
    assert run.process.wait(HANG_SECONDS) != 0
    if victim != "launcher":
        last = run.log.read_text().splitlines()[-1]
        assert last == f"rl: error: {victim} was killed (SIGKILL)", run.log.read_text()
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*[0-9]/trainer/*.partial"))
    steps = sorted(
        int(p.name[5:])
        for p in (tmp_path / "run" / "checkpoints").iterdir()
        if p.suffix != ".partial"
    )
    assert is_whole(tmp_path / "run" / "checkpoints" / f"step_{steps[-1]}")


def test_kills_at_random_moments_lose_nothing_and_change_nothing():
    """The short form of `make chaos`: one kill of each part."""
    done = command("python", "-m", "tests.chaos", "--kills", 1, "--steps", 30, "--together")
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] == 4
    assert found["samples_lost"] == found["samples_doubled"] == found["differing_weights"] == 0


def test_several_environments_with_shares_and_algorithms_of_their_own(trained, tmp_path):
    args = {"texts": "generated", "min_chars": 2}
    envs = [
        {"id": "reverse-text", "ratio": [[1, 1.0], [4, 3.0]], "args": {**args, "max_chars": 4}},
        {
            "id": "reverse-text",
            "name": "long",
            "ratio": 1.0,
            "args": {**args, "max_chars": 12},
            "algorithm": "gspo",
            "rollouts_per_example": 4,
            "max_tokens": 20,
        },
    ]
    out = tmp_path / "run"
    processes(
        out,
        trained,
        "--max-steps",
        4,
        "--orchestrator.env",
        json.dumps(envs),
        "--algorithm",
        "cispo",
        "--orchestrator.buffer.easy-threshold",
        0.9,
        "--orchestrator.buffer.replay",
        1,
        "--max-async-level",
        0,
    )
    rows = metrics(out)
    assert [row["batch/long/groups"] for row in rows] == [2, 1, 2, 1]  # of 4 a step
    assert all("reward/long" in row and "pool/easy" in row for row in rows)
    config = (out / "configs" / "trainer.toml").read_text()
    assert "[loss_of.long]" in config and config.count('type = "cispo"') == 1
    rollouts = [json.loads(x) for x in (out / "rollouts" / "step_1" / "rollouts.jsonl").open()]
    assert sorted({(r["env"], r["group"]) for r in rollouts}) == [
        ("long", 1),
        ("long", 3),
        ("reverse-text", 0),
        ("reverse-text", 2),
    ]
    assert sum(r["env"] == "long" for r in rollouts) == 8 and len(rollouts) == 24


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_launcher_leaves_nothing_behind(number, trained, tmp_path, started):
    run = Started(started, tmp_path / "run", trained, "--max-steps", 5000, "--ckpt.interval", 1)
    second = processes(tmp_path / "run", trained, "--clean", ok=False)
    assert "a run is active in" in second.stderr and run.process.poll() is None
    run.process.send_signal(number)
    assert run.process.wait(HANG_SECONDS) == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert gone(tmp_path / "run") and "Traceback" not in run.log.read_text()


def test_a_restarted_orchestrator_goes_on_and_a_taken_over_run_ends(trained, tmp_path, started):
    server = Server("--model.name", trained, log=tmp_path / "server.log")
    out = tmp_path / "run"
    shared = ("--model.name", trained, "--output-dir", out, "--log-interval", 1)

    def begin(name, *options):
        words = [
            BIN / name,
            "@",
            f"{TINY}/rl/{'orch' if name == 'orchestrator' else 'train'}.toml",
            *shared,
            *options,
        ]
        return started(*words, log=(tmp_path / f"{name}.log").open("a"))

    def orchestrator():
        return begin(
            "orchestrator", "--client.base-url", server.url, "--batch-size", 32, "--max-steps", 5000
        )

    def until_step(number):
        log = tmp_path / "orchestrator.log"
        until(
            lambda: (out / "metrics.jsonl").exists() and len(metrics(out)) >= number,
            words=log.read_text,
        )

    try:
        trainer = begin("trainer", "--max-steps", 5000)
        first = orchestrator()
        until_step(3)
        first.kill()
        first.wait()
        second = orchestrator()
        until_step(len(metrics(out)) + 3)
        trainer.kill()
        trainer.wait()
        trainer = begin("trainer", "--max-steps", 5000)  # clean, as its file says: another run
        assert second.wait(HANG_SECONDS) == 1
        log = (tmp_path / "orchestrator.log").read_text()
        assert (
            log.splitlines()[-1].startswith("orchestrator: error: ")
            and "another run has taken over" in log
        )
    finally:
        server.stop()


@pytest.mark.main_path
def test_a_component_that_fails_is_the_cause(trained, tmp_path, port_8000):
    done = processes(tmp_path / "run", trained, "--orchestrator.env", '{"id": "no-such"}', ok=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("rl: error: orchestrator ended with exit code 1: environment")
    nobody = ("--output-dir", tmp_path / "other", "--orchestrator.client.ready-timeout", 0.5)
    done = command("rl", *TINY_RL, "--model.name", trained, *nobody, ok=False)
    assert (
        "no server answers at http://localhost:8000/v1 (ConnectError); start one with: inference"
        in done.stderr
    )


# ------------------------------------------------------------------------------ a server kept alive


def other_model(directory, heads):
    """A random model of another shape, in a directory."""
    config = json.loads((ROOT / TINY / "model" / "config.json").read_text())
    shutil.copytree(ROOT / TINY / "model", directory)
    config |= {"num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": 2}
    (directory / "config.json").write_text(json.dumps(config))
    save_model(load_model(directory, random_init=True, seed=heads), directory, directory)
    return directory


def test_a_server_kept_alive_serves_the_model_of_each_run(trained, tmp_path):
    server = Server("--model.name", trained, log=tmp_path / "server.log")
    root = server.url.removesuffix("/v1")
    try:
        models = [trained, other_model(tmp_path / "two", 2), other_model(tmp_path / "four", 4)]
        for number, model in enumerate(models):
            out = tmp_path / f"run_{number}"
            command(
                "rl",
                *TINY_RL,
                "--model.name",
                model,
                "--output-dir",
                out,
                *SMALL,
                "--max-steps",
                2,
                "--orchestrator.client.base-url",
                server.url,
            )
            state = http.get(f"{root}/version").json()
            assert (state["version"], state["model"]) == (2, str(model))
            assert state["checksum"] == model_checksum(load_model(out / "weights" / "step_2"))
            (served,) = http.get(f"{server.url}/models").json()["data"]
            assert served["id"] == str(model)
    finally:
        server.stop()


@pytest.mark.main_path
def test_several_servers_share_the_groups(trained, tmp_path):
    servers = [Server("--model.name", trained, log=tmp_path / f"server_{i}.log") for i in range(2)]
    try:
        urls = json.dumps([server.url for server in servers])
        command(
            "rl",
            *TINY_RL,
            "--model.name",
            trained,
            "--output-dir",
            tmp_path / "run",
            *SMALL,
            "--max-steps",
            2,
            "--orchestrator.client.base-url",
            urls,
        )
        states = [
            http.get(f"{server.url.removesuffix('/v1')}/version").json() for server in servers
        ]
        assert [state["version"] for state in states] == [2, 2] and states[0]["checksum"] == states[
            1
        ]["checksum"]
        served = [
            http.get(f"{server.url.removesuffix('/v1')}/version").json()["completions"]
            for server in servers
        ]
        assert sum(served) == 64 and min(served) >= 16
    finally:
        for server in servers:
            server.stop()


def test_a_run_starts_several_servers_of_its_own(trained, tmp_path):
    out = tmp_path / "run"
    processes(out, trained, "--max-steps", 3, "--inference-replicas", 2)
    assert len(metrics(out)) == 3 and gone(out)
    logs = [(out / "logs" / f"inference_{i}.log").read_text() for i in range(2)]
    assert all("Took version 3" in log for log in logs)


@pytest.mark.parametrize("deployment", ["colocated", "processes"])
def test_a_terminal_shows_how_far_a_run_is_below_its_lines(deployment, trained, tmp_path, started):
    ours, theirs = pty.openpty()
    words = (
        "--model.name",
        trained,
        "--output-dir",
        tmp_path / "run",
        "--max-steps",
        3,
        "--deployment",
        deployment,
    )
    with os.fdopen(theirs, "w") as terminal:
        screen = {"COLUMNS": "200", "TERM": "xterm"}
        process = started(
            BIN / "rl",
            *TINY_RL,
            *SMALL,
            *PORT,
            "--log-interval",
            1,
            *words,
            log=terminal,
            env=screen,
        )
    shown = b""
    with contextlib.suppress(OSError):  # the other side is closed
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    assert process.wait(HANG_SECONDS) == 0
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode(errors="replace")).replace(
        "\r", "\n"
    )
    seen = re.findall(r"^rl .* (\d)/3 +((?:reward \d\.\d{4} )?\w+)", lines, re.MULTILINE)
    # A frame may be drawn just after the next one
    first_seen = list(dict.fromkeys(step for step, _ in seen))
    assert first_seen == sorted(first_seen)
    assert seen[0][0] == "0" and seen[-1][0] == "3" and seen[-1][1].startswith("reward ")
    assert {"generating", "training"} & {said.split()[-1] for _, said in seen}
    assert lines.count("INFO Step 2 |") == 1


def test_control_routes_ask_for_the_key(trained, tmp_path):
    server = Server(
        "--model.name",
        trained,
        "--api-key",
        "k",
        "--server.host",
        "127.0.0.1",
        log=tmp_path / "log",
    )
    try:
        root = server.url.removesuffix("/v1")
        assert http.post(f"{root}/pause").status_code == 401
        assert http.get(f"{root}/version", headers={"Authorization": "Bearer k"}).status_code == 200
    finally:
        server.stop()


@pytest.fixture
def mixture(tmp_path):
    """A small mixture of experts without weights."""
    model = tmp_path / "model"
    shutil.copytree(ROOT / TINY / "model", model)
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 2}
    (model / "config.json").write_text(
        json.dumps(config | {"moe_intermediate_size": 128, "norm_topk_prob": True})
    )
    return model


def test_a_server_returns_the_experts_of_tokens(mixture, tmp_path):
    """In the form that clients of vLLM read; a later start is the end of the same rows."""
    server = Server("--model.name", mixture, "--model.random-init", log=tmp_path / "log")
    try:
        found = []
        for start in (0, 3):
            params = {"max_tokens": 6, "seed": 1, "ignore_eos": True, "return_routed_experts": True}
            params["routed_experts_prompt_start"] = start
            asked = {"token_ids": [5, 6, 7, 8], "sampling_params": params}
            url = server.url.removesuffix("/v1") + "/inference/v1/generate"
            told = http.post(url, json=asked).json()["choices"][0]["routed_experts"]
            assert told["start"] == start
            numbers = np.frombuffer(base64.b64decode(told["data"]), dtype=told["dtype"])
            found.append(numbers.reshape(told["shape"]))
    finally:
        server.stop()
    whole, end = found
    layers = json.loads((mixture / "config.json").read_text())["num_hidden_layers"]
    assert whole.shape == (4 + 6 - 1, layers, 2) and whole.max() < 6
    assert np.array_equal(whole[3:], end) and (whole[..., 0] != whole[..., 1]).all()
    assert len(np.unique(whole[:, 0])) > 2


def test_the_experts_of_the_sampler_reach_the_trainer(mixture, tmp_path):
    options = ("--model.random-init", "--orchestrator.no-drop-zero-signal", "--max-steps", 2)
    processes(tmp_path / "run", mixture, *options, "--trainer.replay-routing")
    rows = metrics(tmp_path / "run")
    assert rows[0]["routing/differs"] == 0.0 and rows[0]["mismatch_kl/mean"] < 1e-9
    assert all(row["weights/canary_difference"] < 1e-5 for row in rows)
