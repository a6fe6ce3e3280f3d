"""What goes wrong on the way: weights that are not those of the trainer, processes that stand still, files that come
late, disks that are full, directories that another run has left."""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.hangs import HANG_SECONDS

from .conftest import BIN, TINY, Server, command, end, processes_now, start
from .test_services import SMALL, TINY_RL, Started, gone, metrics, processes

FAULTY = (BIN / "python", Path(__file__).with_name("faulty_server.py"))


# ------------------------------------------------------------------------------ proof of delivery

ADAPTER = ("--trainer.lora.rank", 4, "--trainer.optim.type", "adamw", "--trainer.optim.lr", 1e-2)


@pytest.mark.parametrize(
    ("fault", "options", "words"),
    [
        ("corrupted", (), "of 35 weights 1 differ: model.layers.1.mlp.down_proj.weight"),
        ("stale", (), "of 35 weights 35 differ: model.embed_tokens.weight, model.norm.weight, "),
        ("dropped-adapter", ADAPTER, "self_attn.q_proj.weight, "),
    ],
)
def test_weights_that_did_not_arrive_end_the_run_at_that_step(
    fault, options, words, trained, tmp_path
):
    server = Server("--model.name", trained, log=tmp_path / "server.log", program=(*FAULTY, fault))
    out = tmp_path / "run"
    try:
        done = command(
            "rl",
            *TINY_RL,
            "--model.name",
            trained,
            "--output-dir",
            out,
            *SMALL,
            "--max-steps",
            6,
            "--orchestrator.client.base-url",
            server.url,
            *options,
            ok=False,
        )
    finally:
        server.stop()
    last = done.stderr.splitlines()[-1]
    assert (
        f"{server.url} serves other weights than version 2: checksum " in last and words in last
    ), last
    assert "and 32 more" in last if fault == "stale" else True
    rows = metrics(out)
    assert [row["step"] for row in rows] == [1, 2]
    # Unless version 2 came before anybody had looked
    assert rows[0].get("weights/canary_difference", 0.0) < 1e-4


@pytest.mark.parametrize("base_bits", [16, 8])
def test_only_the_adapter_travels_and_the_server_has_the_weights_of_the_trainer(
    base_bits, trained, tmp_path
):
    out = tmp_path / "run"
    command(
        "rl",
        *TINY_RL,
        "--inference",
        "@",
        f"{TINY}/rl/infer.toml",
        "--model.name",
        trained,
        "--output-dir",
        out,
        *SMALL,
        "--inference.server.port",
        0,
        "--max-steps",
        4,
        *ADAPTER,
        "--trainer.lora.base-bits",
        base_bits,
        "--trainer.lora.modules-to-save",
        "embed_tokens",
    )
    rows, whole = metrics(out), (trained / "model.safetensors").stat().st_size
    # Of versions that were not passed over
    sizes = [row["weights/bytes"] for row in rows if "weights/bytes" in row]
    assert len(rows) == 4 and sizes and all(0 < size < whole / 2 for size in sizes)
    assert max(row.get("weights/canary_difference", 0.0) for row in rows) < 1e-3
    log = (out / "logs" / "orchestrator.log").read_text()
    assert "Version 4: 1 servers took " in log and "MiB (adapter) in " in log and "checksum " in log
    assert sorted(p.name for p in (out / "broadcasts" / "step_4").iterdir()) == [
        "STABLE",
        "adapter_config.json",
        "adapter_model.safetensors",
        "config.json",
        "delivery.json",
    ]


# ------------------------------------------------------------------------------ ends that are not its own


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own with little room."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", place], capture_output=True
    ).returncode:
        pytest.skip("a file system can be mounted by root alone")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_ends_the_run_with_its_state_intact(trained, small_disk, tmp_path):
    words = (
        "--max-async-level",
        0,
        "--ckpt.interval",
        1,
        "--max-steps",
        12,
        "--trainer.clean",
        "false",
    )
    words += ("--trainer.scheduler.type", "constant", "--resume", "auto")
    processes(tmp_path / "whole", trained, *words)
    out = small_disk / "run"
    full = threading.Thread(target=fill, args=(small_disk, out / "rollouts" / "step_3"))
    full.start()
    done = processes(out, trained, *words, ok=False)
    full.join()
    last = done.stderr.splitlines()[-1]
    assert "the disk is full; make room, then --resume auto continues the run" in last, done.stderr
    (small_disk / "filler").unlink()
    processes(out, trained, *words)
    assert [row["reward/mean"] for row in metrics(out)] == [
        row["reward/mean"] for row in metrics(tmp_path / "whole")
    ]
    mine, other = (
        load_file(x / "weights" / "step_12" / "model.safetensors")
        for x in (out, tmp_path / "whole")
    )
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def fill(place, when):
    while not when.exists():
        time.sleep(0.01)
    with (place / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_rank_of_the_trainer_that_dies_is_named_and_the_run_goes_on_after_it(
    trained, tmp_path, started
):
    options = ("--max-async-level", 0, "--trainer-gpu-ids", "[0, 1]", "--ckpt.interval", 1)
    run = Started(started, tmp_path / "run", trained, "--max-steps", 5000, *options)
    ranks = [
        pid
        for pid, words in children(run.process.pid).items()
        if words[1:5] == ["-P", "-m", "hone", "trainer"]
    ]
    os.kill(max(ranks), signal.SIGKILL)
    assert run.process.wait(HANG_SECONDS) == 1 and gone(tmp_path / "run")
    assert run.log.read_text().splitlines()[-1] == "rl: error: trainer rank 1 was killed (SIGKILL)"
    steps = len(metrics(tmp_path / "run"))
    processes(
        tmp_path / "run",
        trained,
        *options,
        "--max-steps",
        steps + 2,
        "--clean",
        "false",
        "--resume",
        "auto",
    )
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(1, steps + 3))


def test_what_another_run_has_left_is_not_taken_for_this_one(trained, tmp_path):
    out = tmp_path / "run"
    processes(out, trained, "--max-steps", 1)
    server = Server("--model.name", trained, log=tmp_path / "log")
    (out / "alive" / "trainer").write_text("1 1")  # as one that was killed leaves it
    done = command(
        "orchestrator",
        "@",
        f"{TINY}/rl/orch.toml",
        "--model.name",
        trained,
        "--output-dir",
        out,
        "--weights-timeout",
        3,
        "--client.base-url",
        server.url,
        ok=False,
    )
    server.stop()
    assert (
        f"waited 3 s for the trainer of a run in {out}; is there a trainer over it?" in done.stderr
    )
    assert sorted(p.name for p in (out / "rollouts").iterdir()) == ["step_1"]


# ------------------------------------------------------------------------------ processes that stand still, late files

STEPS, STILL, LATE = 12, 60.0, 30.0
ON_POLICY = ("--max-async-level", 0, "--max-steps", STEPS, "--weights.interval", 1)
WORKER = '{"id": "reverse-text", "args": {"texts": "generated", "max_chars": 18}, "workers": 1}'


class Still:
    """An on-policy run, one part of which is stopped for a minute after its second step."""

    def __init__(self, part, out, model):
        self.part, self.out, self.log = part, out, out.with_suffix(".log")
        words = [
            BIN / "rl",
            *TINY_RL,
            "--inference",
            "@",
            f"{TINY}/rl/infer.toml",
            "--model.name",
            model,
            *SMALL,
            "--output-dir",
            out,
            "--inference.server.port",
            0,
            *ON_POLICY,
            "--orchestrator.env",
            WORKER,
        ]
        self.process = start(*words, log=self.log.open("w"))

    def is_there(self):
        assert self.process.poll() is None, self.log.read_text()
        return (self.out / "rollouts" / "step_2").exists()

    def stop(self):
        if self.part == "worker":
            (self.stopped,) = children(self.pid_of("orchestrator"))
        else:
            self.stopped = self.pid_of(self.part)
        os.kill(self.stopped, signal.SIGSTOP)

    def pid_of(self, name):
        return next(
            p
            for p, words in children(self.process.pid).items()
            if words[1:5] == ["-P", "-m", "hone", name]
        )

    def end(self):
        end(self.process)


def children(pid):
    """By number, the command of each."""
    return {child: words for child, (parent, words) in processes_now().items() if parent == pid}


class Late:
    """Copies what is published in one directory to another, late: a network file system that holds its listings."""

    def __init__(self, source, target, names):
        self.source, self.target, self.names = source, target, names
        self.is_over, self.seen, self.waiting = threading.Event(), {}, []
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self):
        while not self.is_over.wait(0.2):
            for name in self.names:
                place = self.source / name
                for path in (
                    [place] if place.is_file() else place.glob("*") if place.is_dir() else []
                ):
                    with contextlib.suppress(FileNotFoundError):  # one that was renamed meanwhile
                        self.look(path)
            while self.waiting and self.waiting[0][0] < time.monotonic():
                _, name, content = self.waiting.pop(0)
                write(self.target / name, content)

    def look(self, path):
        changed = path.stat().st_mtime_ns
        if path.suffix != ".partial" and self.seen.get(path) != changed:
            self.waiting.append(
                (time.monotonic() + LATE, path.relative_to(self.source), read(path))
            )
            self.seen[path] = changed


def read(path):
    return {p.name: p.read_bytes() for p in path.iterdir()} if path.is_dir() else path.read_bytes()


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, dict) and path.exists():  # it was seen before it was whole
        for name, data in content.items():
            write(path / name, data)
        return
    partial = path.with_name(path.name + ".late")
    if isinstance(content, bytes):
        partial.write_bytes(content)
    else:
        partial.mkdir()
        for name, data in content.items():
            (partial / name).write_bytes(data)
    partial.rename(path)


class Minute(threading.Thread):
    """All that takes a minute of waiting, side by side and beside the other tests: runs with a part stopped, and one
    whose files come late."""

    def __init__(self, root, model):
        super().__init__(daemon=True)
        self.root, self.model, self.error = root, model, None
        self.codes, self.runs, self.processes, self.late = {}, {}, [], []
        self.server = Server("--model.name", model, log=root / "server.log")

    def run(self):
        try:
            self.start_late()
            for part in ("inference", "orchestrator", r"trainer", "worker"):
                self.runs[part] = Still(part, self.root / part, self.model)
            waiting, deadline = list(self.runs.values()), time.monotonic() + HANG_SECONDS
            # Each as soon as it is there: it would be at its end when the others are
            while waiting:
                assert time.monotonic() < deadline, [run.part for run in waiting]
                for run in [run for run in waiting if run.is_there()]:
                    run.stop()
                    waiting.remove(run)
                time.sleep(0.01)
            time.sleep(STILL)
            for part, run in self.runs.items():
                if part != "worker":  # that one has been replaced by now
                    os.kill(run.stopped, signal.SIGCONT)
            self.codes |= {part: run.process.wait(HANG_SECONDS) for part, run in self.runs.items()}
            self.codes |= {"late": [process.wait(HANG_SECONDS) for process in self.processes]}
        except BaseException as error:
            self.error = error

    def start_late(self):
        ours, theirs = self.root / "late", self.root / "late_trainer"
        self.late = [
            Late(theirs, ours, ["run_rl.json", "alive", "broadcasts"]),
            Late(ours, theirs, ["rollouts", "alive"]),
        ]
        small = [
            word.replace("orchestrator.", "") if isinstance(word, str) else word for word in SMALL
        ]
        of_orchestrator = ("--client.base-url", self.server.url, "--env", WORKER, *small)
        for name, file, out, options in (
            ("trainer", "train", theirs, ()),
            ("orchestrator", "orch", ours, of_orchestrator),
        ):
            words = [
                BIN / name,
                "@",
                f"{TINY}/rl/{file}.toml",
                "--model.name",
                self.model,
                "--output-dir",
                out,
                "--max-async-level",
                0,
                "--max-steps",
                1,
                *options,
            ]
            log = (self.root / f"late_{name}.log").open("w")
            self.processes.append(start(*words, log=log))

    def end(self):
        for one in self.late:
            one.is_over.set()
        for run in self.runs.values():
            run.end()
        for process in self.processes:
            end(process)
        self.join(30)
        self.server.stop()


@pytest.fixture(scope="module", autouse=True)
def under_way(trained, tmp_path_factory):
    """Begun with the first test of this file."""
    made = Minute(tmp_path_factory.mktemp("faults"), trained)
    made.start()
    yield made
    made.end()


@pytest.fixture
def minute(under_way):
    under_way.join(HANG_SECONDS)
    if under_way.error is not None:
        raise under_way.error
    return under_way


@pytest.mark.parametrize(
    ("part", "who", "words"),
    [
        (
            "inference",
            "orchestrator",
            r"\(/health did not answer within \d+ s\); its requests are retried",
        ),
        ("orchestrator", "trainer", r"No heartbeat from the orchestrator for \d+ s"),
        ("trainer", "orchestrator", r"No heartbeat from the trainer for \d+ s"),
        ("worker", "orchestrator", r"has not responded for \d+ s: it is killed, and its"),
    ],
)
def test_what_stands_still_for_a_minute_is_named_by_the_others_and_changes_nothing(
    part, who, words, minute
):
    root, log = minute.root, minute.runs[part].log.read_text()
    assert minute.codes[part] == 0 and re.search(words, log), log
    assert re.search(words, (root / part / "logs" / f"{who}.log").read_text())
    if part != "worker":
        assert " is back" in log
    mine, other = (root / name / "weights" / f"step_{STEPS}" for name in (part, "orchestrator"))
    mine, other = load_file(mine / "model.safetensors"), load_file(other / "model.safetensors")
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_files_that_appear_30_seconds_late_change_nothing_but_the_time(minute):
    root = minute.root
    logs = [(root / f"late_{name}.log").read_text() for name in ("trainer", "orchestrator")]
    assert minute.codes["late"] == [0, 0], logs
    (row,), first = metrics(root / "late"), metrics(root / "trainer")[0]
    assert row["reward/mean"] == first["reward/mean"] and row["loss/mean"] == first["loss/mean"]
    assert row["time/wait_for_batch"] > LATE
