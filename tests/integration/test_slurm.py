"""Runs as jobs of a real Slurm: the seed's commands, preemption, the end of the wall time, strings of all kinds."""

import json
import os
import re
import subprocess
import sys
import time

import pytest

from hone.dashboard.jobs import Jobs
from hone.launch.lab import list_templates, write_templates
from hone.launch.plan import free_port
from hone.models.hf import load_model, save_model
from tests.processor_time import HELP_PROCESSOR_SECONDS, read_children_seconds

from . import namespaces
from .conftest import AFRESH, ROOT, TINY, command, until
from .slurm_cluster import Cluster, is_possible

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(not is_possible(), reason="needs root and Debian's Slurm"),
]
RL = "configs/prime-rl/reverse-text-tiny.toml"
EVIL = "a b'c\"d $(touch {}) `touch {}` ; ü\\ %j\nsecond line"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm"), free_port()) as cluster:
        yield cluster


@pytest.fixture
def place(tmp_path):
    """A workspace to submit from."""
    write_templates(dict(list_templates(["configs/prime-rl", "models"])), tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def submit(cluster, place, *words, ok=True):
    done = command("medarc_slurm", *words, cwd=place, env=cluster.environment, ok=ok)
    return re.findall(r"Submitted job (\d+)", done.stdout), done


def ended(cluster, job, state="COMPLETED"):
    until(
        lambda: cluster.state(job) in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    )
    assert cluster.state(job) == state


def log_of(place, run, job):
    return (place / run / "slurm" / f"job_{job}.log").read_text()


def weights(place, run, step):
    return (place / run / "weights" / f"step_{step}" / "model.safetensors").read_bytes()


def test_the_seeds_commands(cluster, place):
    """As the page of medarc_slurm writes them, with a tiny model instead of Qwen3-0.6B."""
    model = ROOT / TINY / "model"
    save_model(load_model(model, random_init=True, seed=0), model, place / "model")
    rows = [{"prompt": "p", "completion": "c" * n} for n in range(1, 40)]
    (place / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny = ("--model.name", "model", "--max-steps", 2)
    sft = ("sft", "examples/reverse_text/sft.toml", "--output-dir", "runs/reverse-sft", "--gpus", 1)
    tiny_sft = (
        *tiny,
        "--data.name",
        "data.jsonl",
        "--data.batch-size",
        2,
        "--data.micro-batch-size",
        2,
    )
    tiny_sft = (*tiny_sft, "--data.seq-len", 64)
    _, shown = submit(cluster, place, *sft, "--dry-run", *tiny_sft)
    assert "#SBATCH --gres=gpu:1" in shown.stdout and "Slurm says: sbatch: Job" in shown.stdout
    assert (
        "#SBATCH --job-name=sft-sft" in shown.stdout
        and not (place / "runs/reverse-sft/slurm/jobs.jsonl").exists()
    )
    (job,), _ = submit(cluster, place, *sft, *tiny_sft)
    ended(cluster, job)
    assert weights(place, "runs/reverse-sft", 2)
    rl = (
        "rl",
        "examples/reverse_text/rl.toml",
        "--output-dir",
        "runs/reverse-rl",
        "--train-gpus",
        1,
        "--infer-gpus",
        1,
    )
    env = '{"id": "reverse-text", "args": {"texts": "generated", "num_examples": 64}}'
    tiny_rl = (
        *tiny,
        "--orchestrator.env",
        env,
        "--orchestrator.batch-size",
        32,
        "--orchestrator.sampling.max-tokens",
        8,
    )
    _, shown = submit(cluster, place, *rl, "--dry-run", *tiny_rl)
    assert re.search(r"inference +node 1 +GPU 0 ", shown.stdout) and re.search(
        r"trainer +node 1 +GPU 1", shown.stdout
    )
    (job,), _ = submit(cluster, place, *rl, *tiny_rl)
    ended(cluster, job)
    assert weights(place, "runs/reverse-rl", 2)
    assert (
        f"job {job}  COMPLETED"
        in command(
            "hone", "slurm", "status", "runs/reverse-rl", cwd=place, env=cluster.environment
        ).stdout
    )
    assert (
        "attempt 0 ended with code 0"
        in command("hone", "slurm", "logs", "runs/reverse-rl", cwd=place).stdout
    )


def test_the_dashboards_lab_hands_a_run_over(cluster, place, monkeypatch):
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    jobs, toml = Jobs(place), (place / RL).read_text().replace("max_steps = 100", "max_steps = 2")
    assert jobs.describe_lab()["slurm"]
    with pytest.raises(ValueError, match="--train-gpus"):
        jobs.start_run("rl", toml, "runs/lab", "slurm", "--train-gpus many")
    job = jobs.start_run("rl", toml, "runs/lab", "slurm", "--train-gpus 1 --infer-gpus 1")
    assert job["state"] == "submitted" and len(jobs.list_jobs()) == 1
    ended(cluster, re.search(r"Submitted job (\d+)", jobs.read_log(job["name"])["text"])[1])
    assert weights(place, "runs/lab", 2)


def test_cut_by_preemption_and_the_wall_time_it_ends_as_undisturbed(cluster, place):
    """Preempted twice without warning and once at the end of its wall time: the same weights, to the bit."""
    steps, same = 400, ("--max-steps", 400, "--max-async-level", 0, "--ckpt.interval", 20)
    whole = (
        "rl",
        "@",
        RL,
        *same,
        "--deployment",
        "processes",
        "--inference.server.port",
        0,
        "--log-interval",
        0,
    )
    start = time.monotonic()
    command("rl", *whole[1:], "--output-dir", "whole", cwd=place, env=AFRESH)
    elapsed = time.monotonic() - start
    training = sum(
        json.loads(line).get("time/step", 0.0)
        for line in (place / "whole" / "metrics.jsonl").open()
    )
    # An attempt starts, trains a quarter of the run, and is asked to leave `grace` seconds before its minute ends.
    grace = min(50, max(10, int(60 - (elapsed - training) - training / 4)))
    words = (
        "rl",
        RL,
        "--output-dir",
        "cut",
        "--partition",
        "spot",
        *same,
        "--time",
        "1:00",
        "--grace",
        grace,
    )
    (job,), _ = submit(cluster, place, *words)
    for after in (25, 65):
        until(lambda after=after: latest(place / "cut") >= after)
        taking = subprocess.run(
            ["sbatch", "--parsable", "--partition=gpu", "--gres=gpu:8", "--wrap=sleep 2"],
            cwd=place,
            text=True,
            env={**os.environ, **cluster.environment},
            capture_output=True,
            check=True,
        )
        ended(cluster, taking.stdout.strip())
    ended(cluster, job)
    log = log_of(place, "cut", job)
    attempts = log.count("=== attempt ") - log.count(" ended with code ")
    assert attempts >= 4, log[-2000:]
    assert "ended with code 85" in log and "as requested; its checkpoint is in" in log
    assert weights(place, "cut", steps) == weights(place, "whole", steps)
    assert (place / "cut" / "logs" / "attempt_0" / "trainer.log").exists()
    rows = [json.loads(line) for line in (place / "cut" / "metrics.jsonl").open()]
    # 0.75 before
    assert sum(row["reward/mean"] for row in rows[-20:] if "reward/mean" in row) / 20 > 0.93


def latest(run):
    """The step of the newest row."""
    file = run / "metrics.jsonl"
    rows = (
        [line for line in file.read_text().splitlines() if line.endswith("}")]
        if file.exists()
        else []
    )
    return json.loads(rows[-1])["step"] if rows else 0


def test_two_jobs_share_a_node_and_neither_a_device_nor_a_port(cluster, place):
    few = ("--max-steps", 5)
    (one,), _ = submit(cluster, place, "rl", RL, "--output-dir", "one", *few)
    (two,), _ = submit(cluster, place, "rl", RL, "--output-dir", "two", *few)
    for job in (one, two):
        ended(cluster, job)
    gpus = [
        re.search(r"GPUs ([\d,]+)", log_of(place, run, job))[1]
        for run, job in (("one", one), ("two", two))
    ]
    assert len({*gpus[0].split(","), *gpus[1].split(",")}) == 4
    ports = [
        re.search(r":(\d+)/v1", (place / run / "configs" / "orchestrator.toml").read_text())[1]
        for run in ("one", "two")
    ]
    assert ports[0] != ports[1]


def test_several_ranks_leave_together(cluster, place):
    rows = [{"prompt": "p", "completion": "c" * n} for n in range(1, 40)]
    (place / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (
        "sft",
        "examples/reverse_text/sft.toml",
        "--output-dir",
        "ranks",
        "--gpus",
        2,
        "--max-steps",
        100000,
    )
    tiny = (
        "--model.name",
        "models/reverse-text-tiny-sft",
        "--data.name",
        "data.jsonl",
        "--data.batch-size",
        2,
        "--data.micro-batch-size",
        2,
    )
    (job,), _ = submit(cluster, place, *words, *tiny, "--data.seq-len", 64, "--model.device", "cpu")
    until(lambda: (place / "ranks" / "metrics_sft.jsonl").exists())
    cluster._run("scancel", "--batch", "--signal=USR1", job)
    until(lambda: "ended with code 85" in log_of(place, "ranks", job))
    assert "on cpu" in log_of(place, "ranks", job)
    until(lambda: cluster.state(job) in ("PENDING", "RUNNING"))  # requeued
    command("hone", "slurm", "cancel", "ranks", cwd=place, env=cluster.environment)
    ended(cluster, job, "CANCELLED")


def test_cancel_leaves_no_process(cluster, place):
    (job,), _ = submit(cluster, place, "rl", RL, "--output-dir", "gone", "--max-steps", 100000)
    until(lambda: latest(place / "gone") > 2)
    command("hone", "slurm", "cancel", "gone", cwd=place, env=cluster.environment)
    ended(cluster, job, "CANCELLED")
    until(lambda: not processes_of(place / "gone"))


def processes_of(run):
    found = []
    for folder in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{folder}/cmdline", "rb") as file:
                words = file.read()
        except OSError:
            continue
        found += [folder] if os.fsencode(run) in words and int(folder) != os.getpid() else []
    return found


def test_strings_arrive_as_they_are_and_nothing_executes(cluster, place):
    trap = place / "executed"
    evil = EVIL.format(trap, trap)
    assert (
        "with a backslash"
        in submit(cluster, place, "rl", RL, "--output-dir", "a\\b", ok=False)[1].stderr
    )
    run = place / f"out {evil.splitlines()[0].replace('/', '_').replace(chr(92), '')}"
    words = ("rl", RL, "--output-dir", run, "--max-steps", 1)
    options = (
        "--job-name",
        evil,
        "--sbatch",
        f"comment={evil}",
        "--mail-user",
        "o'brien $(id)@example.org",
    )
    (job,), _ = submit(cluster, place, *words, *options)
    ended(cluster, job)
    known = json.loads(cluster._run("squeue", "--states=all", "--json"))["jobs"]
    found = next(one for one in known if one["job_id"] == int(job))
    assert found["name"] == evil and found["comment"] == evil
    assert not trap.exists() and (run / "weights" / "step_1").exists()
    assert "=== attempt 0 ended with code 0" in (run / "slurm" / f"job_{job}.log").read_text()


def test_jobs_in_a_chain_wait_for_each_other(cluster, place):
    jobs, _ = submit(
        cluster, place, "rl", RL, "--output-dir", "chain", "--max-steps", 3, "--chain", 2
    )
    assert len(jobs) == 2
    for job in jobs:
        ended(cluster, job)
    assert "Resuming from" in log_of(place, "chain", jobs[1])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("rl", "configs/prime-rl/reverse-txt.toml"),
            "no such file; did you mean configs/prime-rl/reverse-text",
        ),
        (("rl", RL, "--train-gpus", 8), "a node has up to 8"),
        (("rl", RL, "--max-step", 3), "did you mean max-steps"),
        (("rl", RL, "--clean"), "a job that is started again would lose its run"),
        (("rl", RL, "--sbatch", "Nice"), "write it as KEY=VALUE"),
        (("rl", RL, "--partition", "nowhere"), "sbatch: "),
    ],
    ids=lambda x: " ".join(map(str, x[1:])) if isinstance(x, tuple) else None,
)
def test_mistakes(cluster, place, words, said):
    _, done = submit(cluster, place, *words, "--output-dir", "bad", ok=False)
    assert said in done.stderr


def test_a_run_without_jobs(cluster, place):
    done = command("hone", "slurm", "status", "nothing", cwd=place, ok=False)
    assert "nothing has no job" in done.stderr


def test_help_and_dry_run_are_quick_and_need_no_torch(cluster, place):
    for words in (("--help",), ("rl", "--help"), ("rl", RL, "--output-dir", "dry", "--dry-run")):
        start = read_children_seconds()
        code = (
            f"import sys; sys.argv[1:] = {list(words)!r}; from hone.cli import slurm\ntry: slurm()\nfinally: "
            "assert 'torch' not in sys.modules"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=place,
            env={**os.environ, **cluster.environment},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert read_children_seconds() - start < HELP_PROCESSOR_SECONDS


# ---------------------------------------------------------------------------------------------- several nodes


@pytest.fixture
def two(tmp_path_factory):
    if not namespaces.is_possible():
        pytest.skip("network namespaces need root and iproute2")
    root, nodes = tmp_path_factory.mktemp("slurm"), namespaces.Nodes(["node0", "node1"])
    with nodes, Cluster(root, free_port(), nodes) as cluster:
        yield cluster


LONG_STEPS = 150  # of a run that is to be disturbed after eight
RL_TINY = (
    "--model.device",
    "cpu",
    "--max-async-level",
    0,
    "--max-steps",
    LONG_STEPS,
    "--orchestrator.batch-size",
    32,
    "--ckpt.interval",
    5,
)


def test_trainer_and_server_on_two_nodes_lose_one_and_end_at_the_same_weights(two, place):
    """As on one node that nothing happens to. srun starts the parts; the server asks for the job's key."""
    alone = ("rl", RL, "--train-gpus", 1, "--infer-gpus", 1, *RL_TINY)
    (first,), _ = submit(two, place, *alone, "--output-dir", "runs/alone")
    ended(two, first)
    (job,), _ = submit(
        two, place, *alone, "--output-dir", "runs/two", "--train-nodes", 1, "--infer-nodes", 1
    )
    metrics = place / "runs/two/metrics.jsonl"
    until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 8)
    two.control("update", "nodename=node1", "state=down", "reason=lost")
    until(lambda: two.state(job) != "RUNNING")
    two.bring_back("node1")
    until(lambda: two.state(job) != "RUNNING" or "attempt 1" in log_of(place, "runs/two", job))
    two.control("update", f"jobid={job}", "StartTime=now")
    ended(two, job)
    said = log_of(place, "runs/two", job)
    assert "=== attempt 1" in said and "inference" in said, said
    assert weights(place, "runs/two", LONG_STEPS) == weights(place, "runs/alone", LONG_STEPS), said
    config = (place / "runs/two/configs/orchestrator.toml").read_text()
    assert 'base_url = ["http://node1:' in config, config


def test_two_nodes_train_one_model(two, place):
    """SFT by two processes, a node each, gives the bits of two on one node."""
    model = ROOT / TINY / "model"
    save_model(load_model(model, random_init=True, seed=0), model, place / "model")
    rows = [{"prompt": "p", "completion": "c" * n} for n in range(1, 40)]
    (place / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sft = (
        "sft",
        "examples/reverse_text/sft.toml",
        "--model.name",
        "model",
        "--model.device",
        "cpu",
        "--max-steps",
        4,
        "--data.name",
        "data.jsonl",
        "--data.batch-size",
        4,
        "--data.micro-batch-size",
        2,
        "--data.seq-len",
        64,
    )
    (one,), _ = submit(two, place, *sft, "--gpus", 2, "--output-dir", "runs/one")
    (both,), _ = submit(two, place, *sft, "--gpus", 1, "--nodes", 2, "--output-dir", "runs/both")
    ended(two, one)
    ended(two, both)
    assert weights(place, "runs/one", 4) == weights(place, "runs/both", 4)
