"""The dashboard without a browser: its index, who may ask it what, its archives, its jobs, the doctor's judgement."""

import io
import json
import os
import re
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from hone.config.base import load_config
from hone.config.help import to_toml
from hone.config.rl_config import RLConfig
from hone.dashboard import jobs as jobs_module
from hone.dashboard.archive import tar_directory
from hone.dashboard.dashboard_app import ASSETS, build_app
from hone.dashboard.gpus import parse_gpus
from hone.dashboard.index import Index
from hone.dashboard.jobs import Job, Jobs
from hone.dashboard.notes import Notes, RunNote, parse_note
from hone.dashboard.playground import Playground
from hone.dashboard.runs import Run, find_runs, run_status
from hone.dashboard.tokens import TokenTable
from hone.monitors.diagnosis import (
    RunFacts,
    RunningDiagnosis,
    diagnose_run,
    find_collapse,
    find_solved,
)
from tests.integration.conftest import until

RL = 'max_steps = 3\n[model]\nname = "m"\n[[orchestrator.env]]\nid = "reverse-text"\n'


def rollout(step, i, **more):
    said = [{"role": "assistant", "content": f"said {i} at {step}"}]
    turns = [
        {
            "prompt_ids": [1, 2],
            "ids": [3] * (i + 1),
            "logprobs": [-0.5] * (i + 1),
            "version": step - 1,
        }
    ]
    asked = [{"role": "user", "content": "ask"}]
    row = {
        "env": "e",
        "example_id": i,
        "prompt": asked,
        "completion": said,
        "answer": "",
        "reward": i / 10,
        "metrics": {},
        "stop": "done",
        "error": None,
        "is_truncated": False,
        "seconds": 0.1,
        "turns": turns,
        "group": step,
        "member": i,
        "advantage": 0.0,
        "is_used": True,
        "unused": "",
    }
    return row | more


def write_step(run, step, rows):
    place = run / "rollouts" / f"step_{step}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "rollouts.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    )


@pytest.fixture
def run(tmp_path):
    """A run of three steps below tmp_path/root, and a way to its index."""
    place = tmp_path / "root" / "outputs" / "a"
    for step in (1, 2, 3):
        write_step(place, step, [rollout(step, i) for i in range(4)])
    rows = ({"step": step, "reward/mean": step / 10, "loss/mean": 1.0} for step in (1, 2, 3))
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "configs").mkdir()
    (place / "configs" / "rl.toml").write_text(RL)
    (place / "run_rl.json").write_text("{}")
    return place


def index_of(run):
    root = run.parents[1]
    return Index(root, find_runs(root)["outputs/a:rl"], root / ".cache")


def last(index):
    """The newest value of every metric, with the newest step."""
    found = index.metric_series(index.metric_names())
    return {name: values[-1] for name, (_, values) in found.items()} | {
        "step": max(s[-1] for s, _ in found.values())
    }


def test_an_index_takes_in_what_is_new_and_forgets_what_is_gone(run):
    index = index_of(run)
    assert index.update_index() and not index.update_index()
    assert last(index)["step"] == 3 and index.find_rollouts({}, "step", True, 50, 0)["total"] == 12
    with (run / "metrics.jsonl").open("a") as file:
        # The last line is yet to be whole
        file.write('{"step": 4, "reward/mean": 0.4}\n{"step": 5, "rew')
    write_step(run, 4, [rollout(4, 0)])
    assert index.update_index()
    assert index.metric_series(["reward/mean"])["reward/mean"] == [
        [1, 2, 3, 4],
        [0.1, 0.2, 0.3, 0.4],
    ]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('ard/mean": 0.5}\n')
    index.update_index()
    assert index.metric_series(["reward/mean"], since=3)["reward/mean"] == [[4, 5], [0.4, 0.5]]
    # A run that goes on from step 2 writes its rows anew and takes step 3 again.
    (run / "new").write_text("".join((run / "metrics.jsonl").read_text().splitlines(True)[:2]))
    (run / "new").replace(run / "metrics.jsonl")
    for step in (3, 4):
        (run / "rollouts" / f"step_{step}" / "rollouts.jsonl").unlink()
        (run / "rollouts" / f"step_{step}").rmdir()
    write_step(run, 3, [rollout(3, 9)])
    index.update_index()
    assert last(index)["step"] == 2
    found = index.find_rollouts({"step_from": 3}, "step", True, 50, 0)
    assert found["total"] == 1 and found["rows"][0]["said"] == "said 9 at 3"
    other = index_of(run)
    other.update_index()  # what is kept is read by the next
    assert other.find_rollouts({}, "step", True, 50, 0)["total"] == 9


def test_a_damaged_index_is_made_anew(run):
    index = index_of(run)
    index.update_index()
    index.file.write_bytes(b"no database" * 100)
    again = index_of(run)
    again.update_index()
    assert again.find_rollouts({}, "step", True, 50, 0)["total"] == 12


def test_filters(run):
    write_step(
        run,
        4,
        [
            rollout(4, 0, env="f", unused="no_signal", answer="a 100% right_answer", error="late"),
            rollout(4, 1, is_truncated=True),
        ],
    )
    index = index_of(run)
    index.update_index()

    def count(**wanted):
        return index.find_rollouts(wanted, "reward", False, 50, 0)["total"]

    assert (
        count(reward_from=0.25) == 3
        and count(tokens_to=1) == 4
        and count(env="f") == count(failed=True) == 1
    )
    assert (
        count(truncated=True) == 1
        and count(unused="no_signal") == 1
        and count(step_from=2, step_to=3) == 8
    )
    assert (
        count(text="2 at 3") == 1
        and count(text="SAID") == 14
        and count(text="at") == 14
        and count(text="zz") == 0
    )
    assert (
        count(text="100% right_answer") == 1
        and count(text="100_ right") == 0
        and count(text='"') == 0
    )
    rows = index.find_rollouts({}, "tokens", True, 2, 1)["rows"]
    assert [row["tokens"] for row in rows] == [4, 4]
    with pytest.raises(ValueError, match="step, reward"):
        index.find_rollouts({}, "id; DROP TABLE rollouts", True, 1, 0)
    whole = index.read_rollout(rows[0]["id"])
    assert whole["completion"][0]["content"] == "said 3 at 2" and whole["at"]["step"] == 2


def test_what_cannot_be_read_is_passed_over(run):
    place = run / "rollouts" / "step_4"
    place.mkdir()
    bad = [
        b"\xff\xfe",
        b"[" * 100_000,
        b'"text"',
        b'{"completion": [{"content": "\\ud800"}], "reward": NaN, "turns": 3}',
    ]
    (place / "rollouts.jsonl").write_bytes(b"\n".join(bad) + b'\n{"completion": [')
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(
            b'\xff\n{"step": true}\n{"step": "x", "a": 1}\n{"step": 4, "reward/mean": NaN, "b": 1e400}\n'
        )
        file.write(b'{"step": 4, "c": 2}\n')
    index = index_of(run)
    index.update_index()
    assert index.find_rollouts({"step_from": 4}, "step", True, 9, 0)["total"] == 1
    assert last(index)["c"] == 2 and "b" not in last(index)


def client(root, token="secret", host="127.0.0.1", **kwargs):
    app = build_app(root, token, host, cache=root / ".cache")
    return TestClient(app, base_url=f"http://{host}:8500", raise_server_exceptions=False, **kwargs)


def test_reading_on_loopback_needs_no_token_and_starting_always_does(run):
    ours = client(run.parents[1])
    assert ours.get("/api/runs").json()["runs"][0]["id"] == "outputs/a:rl"
    assert ours.post("/api/lab/check", json={"command": "rl", "toml": ""}).status_code == 401
    wrong = {"authorization": "Bearer wrong"}
    assert ours.post("/api/lab/start", json={}, headers=wrong).status_code == 401
    assert ours.post("/api/jobs/x/stop", json={}).status_code == 401
    told = ours.post(
        "/api/lab/check",
        json={"command": "rl", "toml": RL},
        headers={"authorization": "Bearer secret"},
    )
    assert told.json() == {"ok": True, "max_steps": 3, "model": "m"}


def test_elsewhere_reading_needs_the_token_too(run):
    ours = client(run.parents[1], host="10.1.2.3")
    for path in (
        "/api/runs",
        "/api/run?run=outputs/a:rl",
        "/api/log?run=outputs/a:rl&name=x",
        "/api/lab",
    ):
        assert ours.get(path).status_code == 401, path
    assert ours.get("/").status_code == 200 and ours.get("/assets/app.js").status_code == 200
    assert ours.get("/api/runs", headers={"authorization": "Bearer secret"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example:8500"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
    ],
)
def test_the_page_of_another_site_is_refused(run, headers):
    ours = client(run.parents[1])
    assert ours.get("/api/runs", headers=headers).status_code == 403
    own = {**headers, "authorization": "Bearer secret"}
    assert (
        ours.post("/api/lab/check", json={"command": "rl", "toml": RL}, headers=own).status_code
        == 403
    )


def test_nothing_outside_the_root_is_read(run, tmp_path):
    (tmp_path / "secret.log").write_text("a secret")
    (run / "logs").mkdir()
    (run / "logs" / "a.log").symlink_to(tmp_path / "secret.log")
    (run / "logs" / "own.log").write_text("own")
    (run / "weights" / "step_1").mkdir(parents=True)
    (run / "weights" / "step_1" / "model.safetensors").write_bytes(b"w" * 100)
    (run / "weights" / "step_1" / "link").symlink_to(tmp_path / "secret.log")
    (run / "weights" / "step_2").symlink_to(tmp_path)
    (run / "configs" / "orchestrator.toml").symlink_to(tmp_path / "secret.log")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "run_rl.json").write_text("{}")
    (run.parents[1] / "out").symlink_to(outside)
    ours = client(run.parents[1])
    assert [one["id"] for one in ours.get("/api/runs").json()["runs"]] == ["outputs/a:rl"]
    detail = ours.get("/api/run", params={"run": "outputs/a:rl"}).json()
    assert detail["logs"] == ["own.log"] and "a secret" not in json.dumps(detail)
    assert [one["name"] for one in detail["checkpoints"]] == ["weights/step_1"]
    for name in ("a.log", "../../../secret.log", "/etc/passwd", "..%2f..%2fsecret.log"):
        assert ours.get("/api/log", params={"run": "outputs/a:rl", "name": name}).status_code == 404
    for name in ("../outside:rl", "/etc:rl", "out:rl", "outputs/a:eval"):
        assert ours.get("/api/run", params={"run": name}).status_code == 404
    for path in ("/assets/../server.py", "/assets/%2e%2e/server.py", "/download/x"):
        assert ours.get(path).status_code == 404
    ours.headers["authorization"] = "Bearer secret"
    for name in ("weights/step_2", "../a/weights/step_1", "/etc", "configs"):
        assert (
            ours.post("/api/ticket", json={"run": "outputs/a:rl", "name": name}).status_code == 404
        )
    url = ours.post("/api/ticket", json={"run": "outputs/a:rl", "name": "weights/step_1"}).json()[
        "url"
    ]
    with tarfile.open(fileobj=io.BytesIO(ours.get(url).content)) as archive:
        assert archive.getnames() == ["a-step_1/model.safetensors"]
    assert ours.get(url).status_code == 404  # once


def test_answers_say_what_they_are_and_carry_the_policy(run):
    ours = client(run.parents[1])
    for path in ("/", "/assets/app.js", "/api/runs", "/nothing"):
        headers = ours.get(path).headers
        assert (
            "script" not in headers["content-security-policy"]
            and headers["x-content-type-options"] == "nosniff"
        )
    assert (
        ours.get("/api/rollouts", params={"run": "outputs/a:rl", "reward_from": "x"}).status_code
        == 400
    )
    assert ours.get("/api/rollouts", params={"run": "outputs/a:rl", "sort": "x"}).status_code == 400
    assert ours.get("/api/run").json()["error"] == "missing: run"
    big = {"authorization": "Bearer secret", "content-length": str(2**21)}
    assert ours.post("/api/lab/check", content=b"x", headers=big).status_code == 413


def test_an_archive_is_made_without_being_held(tmp_path):
    place = tmp_path / "a"
    place.mkdir()
    (place / "big").write_bytes(os.urandom(3 * 2**20 + 17))
    (place / "empty").write_bytes(b"")
    parts = list(tar_directory(place, "x"))
    assert max(map(len, parts)) < 2 * 2**20
    with tarfile.open(fileobj=io.BytesIO(b"".join(parts))) as archive:
        assert archive.extractfile("x/big").read() == (place / "big").read_bytes()
        assert archive.getmember("x/empty").size == 0


def test_the_lab_refuses_what_the_command_would_and_what_is_not_its_own(run):
    jobs = Jobs(run.parents[1])
    assert (
        "did you mean max-steps"
        in jobs.check_config("rl", RL.replace("max_steps", "max_step"))["error"]
    )
    assert (
        "rm -rf" in jobs.check_config("rm -rf", "")["error"]
        and not jobs.check_config("sft", "x = ")["ok"]
    )
    with pytest.raises(ValueError, match="not below"):
        jobs.start_run("rl", RL, "../elsewhere", "here", "")
    with pytest.raises(ValueError, match="holds an earlier rl run"):
        jobs.start_run("rl", RL, "outputs/a", "here", "")
    with pytest.raises(KeyError):
        jobs.read_recipe("../../etc/passwd")
    with pytest.raises(KeyError):
        jobs.stop("../a")
    assert jobs.list_jobs() == []


def test_commands_run_where_the_dashboard_was_started(run, monkeypatch):
    """`hone dashboard outputs`: what configurations name is found from there, runs are written below outputs."""
    home = run.parents[1]
    (home / "configs").mkdir()
    (home / "configs" / "own.toml").write_text(RL)
    monkeypatch.chdir(home)
    monkeypatch.setattr(Jobs, "_start_job", lambda self, job: None)
    jobs = Jobs(home / "outputs")
    assert jobs.describe_lab()["recipes"][0] == "configs/own.toml"
    first, second = (jobs.start_run("rl", RL, place, "here", "") for place in ("", "outputs/mine"))
    assert (first["output_dir"], second["output_dir"]) == ("rl-001", "mine")
    words = jobs.command_words(jobs._get_job(second["name"]))
    assert words[words.index("--output-dir") + 1] == "outputs/mine" and jobs.home == home
    for job in (first, second):
        jobs.stop(job["name"])


def test_jobs_run_one_after_the_other(run, monkeypatch):
    jobs = Jobs(run.parents[1])
    monkeypatch.setattr(
        Jobs,
        "command_words",
        lambda self, job: ["sh", "-c", f"echo {job.name}; sleep 0.4; exit {job.more or 0}"],
    )
    monkeypatch.setattr(jobs_module, "POLL_SECONDS", 0.02)
    names = [
        jobs.start_run("rl", RL, f"outputs/{i}", "here", more)["name"]
        for i, more in enumerate(("", "3", ""))
    ]
    until(lambda: sum(job["state"] == "running" for job in jobs.list_jobs()) == 1)
    assert jobs.stop(names[2])["state"] == "stopped"  # taken out of the line
    until(lambda: {job["name"]: job["state"] for job in jobs.list_jobs()}[names[1]] == "failed")
    assert {job["name"]: job["state"] for job in jobs.list_jobs()} == dict(
        zip(names, ("done", "failed", "stopped"))
    )
    assert (
        jobs.read_log(names[1])["text"] == f"{names[1]}\n" and jobs.read_log(names[1])["code"] == 3
    )
    assert jobs.remove(names[0])["state"] == "removed" and len(jobs.list_jobs()) == 2
    until(lambda: jobs._thread is None)  # nothing is looked after any more


def test_a_run_is_silent_and_then_stopped_when_its_pulse_is_old(run, monkeypatch):
    monkeypatch.setattr("hone.machine._slowness", 1.0)  # wherever this runs
    root, one = run.parents[1], find_runs(run.parents[1])["outputs/a:rl"]
    assert run_status(root, one, 3, 3) == "done" and run_status(root, one, 2, 3) == "stopped"
    (run / "alive").mkdir()
    (run / "alive" / "trainer").write_text("1 1")
    assert run_status(root, one, 2, 3) == "running"
    for seconds, word in ((40, "silent"), (90, "stopped")):
        then = time.time() - seconds  # noqa: TID251
        os.utime(run / "alive" / "trainer", (then, then))
        assert run_status(root, one, 2, 3) == word


def test_tokens_follow_the_sequences_that_were_trained():
    turns = [
        {"prompt_ids": [1, 2], "ids": [3, 4], "logprobs": [-1.0, -2.0], "version": 0},
        {"prompt_ids": [1, 2, 3, 4, 5], "ids": [6], "logprobs": [-3.0], "version": 1},
        {"prompt_ids": [9], "ids": [8], "logprobs": [-4.0], "version": 2},
    ]
    import numpy as np

    seen = [
        (np.array([-1.5, -2.5, -3.5], np.float32), np.array([False, True, False])),
        (np.array([-4.5], np.float32), np.array([False])),
    ]
    first, second = TokenTable(None).trained_sequences(turns, seen)
    assert first["ids"] == [1, 2, 3, 4, 5, 6] and first["sampled"] == [
        None,
        None,
        -1.0,
        -2.0,
        None,
        -3.0,
    ]
    assert first["trained"] == [None, None, -1.5, -2.5, None, -3.5] and first["masked"][3] is True
    assert second["trained"] == [None, -4.5] and second["version"] == [None, 2]
    assert TokenTable(None).trained_sequences([{"prompt_ids": 3}, {"ids": None}], []) == []


def find_kinds(count, kind="rl", **series):
    """Return the kinds of findings of a run whose metrics are constant, or listed by step."""
    base = {
        "reward__mean": 0.5,
        "reward__min": 0.0,
        "reward__max": 1.0,
        "completion_len__mean": 10.0,
        "progress__samples": 8.0,
        "logprob__mean": -0.3,
    }
    facts = RunFacts(kind)
    for i in range(count):
        values = {
            name.replace("__", "/"): value[i] if isinstance(value, list) else value
            for name, value in (base | series).items()
        }
        facts.add_row(i + 1, values)
    return [finding.kind for finding in diagnose_run(facts).findings]


def test_the_rules_find_nothing_in_runs_that_learn():
    rising = [0.2 + 0.02 * i for i in range(40)]
    falling = [1.0 - 0.02 * i for i in range(40)]
    longer = [10 + i / 3 for i in range(40)]
    learns = {"reward__mean": rising, "entropy__mean": falling, "completion_len__mean": longer}
    assert find_kinds(40, **learns, mismatch_kl__mean=1e-4, is_masked__mean=0.01) == []
    assert find_kinds(30, reward__mean=[0.5 + 0.2 * (-1) ** i for i in range(30)]) == []
    late = [0.0] * 3 + [0.1 * i for i in range(8)]
    assert find_kinds(11, reward__mean=late, reward__max=[0.0] * 3 + [1.0] * 8) == []


def test_a_solved_task_is_named_and_is_no_problem():
    idle = [1.0 if i > 20 else 0.1 for i in range(40)]
    rewards = [1.0 if i > 20 else 0.5 for i in range(40)]
    solved = {"reward__mean": rewards, "batch__without_signal": idle, "batch__solve_all": idle}
    assert find_kinds(40, **solved) == ["solved"]
    facts = RunFacts("rl", {"batch/solve_all": dict(enumerate(idle, 1))})
    found = find_solved(facts)
    assert found.first_step == 25 and not found.is_problem
    collapsed = [*rewards[:30], *[0.0] * 10]
    assert find_kinds(40, **solved | {"reward__mean": collapsed})[0] == "collapse"


def test_the_rules_on_sides_that_disagree_and_rollouts_that_fail():
    assert find_kinds(20, mismatch_kl__mean=0.2) == ["stale"]
    assert find_kinds(20, batch__off_policy_level__mean=6.0) == ["stale"]
    assert find_kinds(20, progress__failed=8.0) == ["failures"]
    assert find_kinds(20, batch__without_signal=0.95, batch__solve_all=0.1) == ["no_signal"]
    lost = {"entropy__mean": [1.0] * 10 + [0.001] * 10, "reward__mean": [0.9] * 10 + [0.5] * 10}
    assert find_kinds(20, **lost) == ["entropy"]
    assert find_kinds(9, is_truncated__mean=0.9) == ["truncated"]
    dropped = {"tokens__dropped__truncated": 90.0, "completion_len__total": 10.0}
    assert find_kinds(9, **dropped) == ["truncated"]
    longer = {"completion_len__mean": [10.0 + i for i in range(20)]}
    assert find_kinds(20, **longer, reward__length_correlation=0.8) == ["length"]
    assert find_kinds(9, kind="sft", loss__mean=[3, 2, 1, 1, 1, 1, 3, 3, 3]) == ["diverged"]


@pytest.mark.parametrize(("checkpoints", "advice"), [([5, 10, 20], "@10 "), ([], "start the run")])
def test_a_collapse_names_a_checkpoint_that_exists(checkpoints, advice):
    rewards = {step: 0.8 if step < 15 else 0.0 for step in range(1, 31)}
    facts = RunFacts(
        "rl",
        {"reward/mean": rewards},
        list_checkpoints=lambda: checkpoints,
        place="outputs/x",
    )
    found = find_collapse(facts)
    assert found.first_step == 15
    assert any(advice in text for text in found.helps)
    assert ("--fork outputs/x@" in " ".join(found.helps)) is bool(checkpoints)


def test_a_running_diagnosis_names_each_finding_once_and_knows_the_steps_before_a_resume():
    rewards = [0.8] * 12 + [0.0] * 60
    rows = [{"step": step, "reward/mean": reward} for step, reward in enumerate(rewards, 1)]
    whole = RunningDiagnosis(RunFacts("rl"))
    found = [new.kind for row in rows for new in whole.add_step(row["step"], row)]
    assert found == ["collapse"]
    resumed = RunningDiagnosis(RunFacts("rl"), rows[:20])
    found = [new.kind for row in rows[20:] for new in resumed.add_step(row["step"], row)]
    assert found == ["collapse"]
    assert resumed.facts.series == whole.facts.series


def test_notes_are_kept_beside_the_runs_and_made_safe(tmp_path):
    notes = Notes(tmp_path)
    kept = notes.write(
        "outputs/a:rl", {"label": " a\tname ", "tags": ["x", " x", "", 3], "note": "why"}
    )
    assert kept == RunNote("a name", ["x", "3"], "why")
    notes.write("outputs/b:rl", {"is_archived": True})
    assert Notes(tmp_path).read_all() == {
        "outputs/a:rl": kept,
        "outputs/b:rl": RunNote(is_archived=True),
    }
    notes.write("outputs/b:rl", {})
    assert list(notes.read_all()) == ["outputs/a:rl"]
    for broken in ("", "[]", "{", '{"outputs/a:rl": 3, "x": {"tags": "no list", "label": ["a"]}}'):
        notes.file.write_text(broken)
        assert all(isinstance(note, RunNote) for note in notes.read_all().values())
    long = parse_note({"label": "x" * 999, "note": "y" * 99999, "tags": list(range(99))})
    assert len(long.label) == 120 and len(long.note) == 10_000 and len(long.tags) == 20


def test_gpus_are_read_from_the_lines_of_nvidia_smi():
    text = "0, NVIDIA H200, 97, 41337, 143771\n1, Tesla, [N/A], 5, 10\n\nno line of it\n"
    first, second = parse_gpus(text)
    assert first == {
        "index": "0",
        "name": "NVIDIA H200",
        "busy": 0.97,
        "used": 41337.0,
        "total": 143771.0,
    }
    assert second["busy"] is None


def test_rewards_are_counted_by_step_and_bin(run):
    for step in range(4, 10):
        write_step(run, step, [rollout(step, i, reward=i / 4 - 0.3) for i in range(5)])
    index = index_of(run)
    index.update_index()
    found = index.reward_histogram(bins=4, most_columns=5)
    rows = index.find_rollouts({}, "step", False, 1000, 0)["rows"]
    assert (found["width"], found["steps"], found["last"]) == (2, [1, 3, 5, 7, 9], 9)
    assert sum(map(sum, found["counts"])) == len(rows)
    whole = index.reward_histogram(bins=4)
    for step, counts in zip(whole["steps"], whole["counts"], strict=True):
        rewards = [row["reward"] for row in rows if row["step"] == step]
        edges = np.linspace(whole["low"], whole["high"], 5)
        assert counts == np.histogram(rewards, edges)[0].tolist()


def test_another_run_starts_from_the_keys_that_are_no_defaults(tmp_path):
    run = tmp_path / "outputs" / "x"
    config = load_config(
        RLConfig,
        [
            "--model.name",
            "m",
            "--orchestrator.env.id",
            "reverse-text",
            "--max-steps",
            "7",
            "--trainer.optim.lr",
            "3e-5",
        ],
    )
    (run / "configs").mkdir(parents=True)
    (run / "configs" / "rl.toml").write_text(to_toml(config))
    found = Jobs(tmp_path).read_changed_keys(Run("outputs/x:rl", "rl", run))
    assert len(found["toml"].splitlines()) < 30 and found["command"] == "rl"
    file = tmp_path / "again.toml"
    file.write_text(found["toml"])
    again = load_config(RLConfig, ["@", str(file)])
    assert again.model_dump(exclude={"output_dir"}) == config.model_dump(exclude={"output_dir"})


def test_a_model_whose_name_is_an_option_is_not_served(tmp_path):
    with pytest.raises(ValueError, match="no name of a model"):
        Playground(tmp_path).start({"weights": "--model.trust-remote-code"})
    with pytest.raises(ValueError, match="not ready"):
        Playground(tmp_path).ask(0, {})


def test_colours_have_the_contrast_that_small_text_needs():
    """WCAG AA: 4.5 to 1, on the page and on its cards, in both colour schemes."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(a, b):
        low, high = sorted((luminance(a), luminance(b)))
        return (high + 0.05) / (low + 0.05)

    style = (ASSETS / "style.css").read_text()
    schemes = [
        dict(re.findall(r"--([\w-]+): (#\w{6})", block))
        for block in re.findall(r":root[^{]*{([^}]*--back[^}]*)}", style)
    ]
    assert len(schemes) == 3 and schemes[1] == schemes[2]
    for scheme in schemes:
        behind = [
            scheme[name] for name in ("back", "card", "mark", "system", "user", "assistant", "tool")
        ]
        for name in ("text", "soft", "accent", "good", "bad", "warn"):
            on = behind if name in ("text", "soft") else behind[:3]
            assert min(contrast(scheme[name], one) for one in on) >= 4.5, (name, scheme)
        assert contrast(scheme["on-accent"], scheme["accent"]) >= 4.5
        for line in ("c1", "c2", "c3", "c4", "c5", "c6"):
            assert contrast(scheme[line], scheme["card"]) >= 3  # of graphics


@pytest.fixture
def signing_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def job_file(root, folder, **changes):
    name, folder = folder, root / ".hone" / "jobs" / folder
    folder.mkdir(parents=True, exist_ok=True)
    job = {"name": name, "command": "rl", "output_dir": "outputs/x", "state": "queued", **changes}
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "rl.toml").write_text("")
    return folder


def test_jobs_that_somebody_else_wrote_are_shown_and_nothing_more(
    tmp_path, signing_home, monkeypatch
):
    began, killed = [], []
    monkeypatch.setattr(Jobs, "_start_job", lambda self, job: began.append(job.name))
    monkeypatch.setattr(
        "hone.dashboard.jobs.os.kill", lambda pid, number: killed.append(pid) if number else None
    )
    root = tmp_path / "root"
    root.mkdir()
    (root / "precious").write_text("x")
    job_file(root, "rl-001")
    job_file(root, "rl-002", state="running", pid=os.getpid())
    job_file(root, "rl-003", name="..")
    job_file(root, "rl-004", name="../..", state="done")
    job_file(root, "evil name", signature="0" * 64)
    jobs = Jobs(root)
    assert {job["state"] for job in jobs.list_jobs()} == {"foreign"} and len(jobs.list_jobs()) == 5
    for name in ("rl-001", "rl-002", "..", "../..", "rl-003", "evil name"):
        for act in (jobs.stop, jobs.kill, jobs.resume, jobs.remove, jobs.read_log):
            with pytest.raises(KeyError):
                act(name)
    own = Job("rl-010", "rl", "outputs/y")
    job_file(root, "rl-010")
    jobs._write_job(own)
    with jobs._lock:
        queued = [job.name for job in jobs._read_jobs() if job.state == "queued"]
    assert queued == ["rl-010"] and (root / "precious").exists() and not killed
    # Another dashboard's
    assert [job.name for job in Jobs(root)._read_jobs() if job.state == "queued"] == ["rl-010"]
    (root / ".hone" / "jobs" / "rl-010" / "rl.toml").write_text("# changed by somebody")
    assert all(job.state == "foreign" for job in Jobs(root)._read_jobs())
    assert (tmp_path / "data" / "hone" / "dashboard.key").stat().st_mode & 0o777 == 0o600


def test_a_browser_is_told_of_a_private_file_and_not_of_the_token(monkeypatch):
    from urllib.parse import urlsplit

    from hone.dashboard.dashboard_commands import open_in_browser

    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    open_in_browser("http://127.0.0.1:1/#token=secret")
    file = Path(urlsplit(opened[0]).path)
    assert (
        "secret" not in opened[0]
        and "secret" in file.read_text()
        and file.stat().st_mode & 0o777 == 0o600
    )
    file.unlink()
