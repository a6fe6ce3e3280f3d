"""Runs started from the dashboard: on this machine, one at a time, or submitted to Slurm.

    ROOT/.hone/jobs/NAME/   job.json (definition and state), COMMAND.toml, log.txt

A job is the command that a person would type, `rl @ rl.toml --output-dir DIR`, in a process session
of its own: it continues when the dashboard ends, and a later dashboard finds it. Stopping a job
asks it to write a checkpoint and exit (`hone/preemption.py`).

Other users may be able to write into ROOT. Therefore each job is signed with a key of this user
(`signing_key`); the signature covers job.json and COMMAND.toml. A job without a valid signature is
shown as foreign, and never started, signalled or removed.
"""

import contextlib
import hmac
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import tomllib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import hone
from hone.child_process import HONE, Process, process_exists, start_process
from hone.config.base import load_config
from hone.config.command_table import COMMANDS, import_object
from hone.config.help import format_toml
from hone.dashboard.runs import (
    Run,
    environments_of,
    find_runs,
    is_below,
    orchestrator_keys,
    read_end,
    read_text,
    run_status,
)
from hone.preemption import EXIT_PREEMPTED
from hone.run_directory import rewrite_file

KINDS = ("rl", "sft", "vf-rl")
TEMPLATES = Path(hone.__file__).parent / "launch" / "workspace" / "configs"
RECIPE_FOLDERS = ("configs", "examples")  # directories below the root with recipes
MAX_RECIPES = 300  # recipes that are listed
CHECKPOINT_INTERVAL = 25  # default checkpoint interval in steps, so that a stopped job can resume
POLL_SECONDS = 0.3  # seconds between looks at what runs
LOG_TAIL_BYTES = 64 * 1024


@dataclass
class Job:
    """A job that was started from the dashboard.

    Attributes:
        name: command and number, such as rl-001.
        command: rl, sft, vf-rl or vf-eval.
        output_dir: directory of the run below the root; for vf-eval the weights to evaluate.
        where: "here" or "slurm".
        state: queued, running, done, stopped (with a checkpoint), failed, submitted (to Slurm)
            or foreign.
        resume: resume from the last checkpoint.
        pid: process id, 0 if it has not been started.
        code: exit code, None while unknown.
        more: further options for Slurm; for vf-eval its settings as JSON.
        begun: local time of creation.
        signature: proof that this user's dashboard wrote the job.
    """

    name: str
    command: str
    output_dir: str  # below the root
    where: str = "here"
    state: str = "queued"
    resume: bool = False
    pid: int = 0
    code: int | None = None
    more: str = ""
    begun: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S"))
    signature: str = field(default="", repr=False)

    @property
    def run_name(self) -> str:
        """Return the id of the run that the job creates, or whose weights it evaluates."""
        if self.command == "vf-eval":
            return f"{Path(self.output_dir).parents[1].as_posix()}:rl"
        return f"{self.output_dir}:{kind_of(self.command)}"


class Jobs:
    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        # Commands run and recipes are found here, so that paths such as `models/x` mean the same.
        self.home = Path.cwd() if self.root.is_relative_to(Path.cwd()) else self.root
        self.directory = self.root / ".hone" / "jobs"
        self._lock = threading.RLock()
        self._key = signing_key()
        self._processes: dict[str, Process] = {}
        self._thread: threading.Thread | None = None

    def describe_lab(self) -> dict[str, Any]:
        """Return what the page for starting runs shows: commands, recipes, jobs and Slurm."""
        return {
            "commands": KINDS,
            "recipes": [name for name, _ in self._find_recipes()],
            "jobs": self.list_jobs(),
            "slurm": shutil.which("sbatch") is not None,
            "home": str(self.home),
        }

    def _find_recipes(self) -> list[tuple[str, Path]]:
        """Return (name, file) of the TOML files in RECIPE_FOLDERS and of Hone's own templates."""
        own = [
            file
            for place in RECIPE_FOLDERS
            for file in sorted((self.home / place).rglob("*.toml"))[:MAX_RECIPES]
        ]
        found = [
            (file.relative_to(self.home).as_posix(), file)
            for file in own
            if is_below(self.home, file)
        ]
        shipped = sorted(TEMPLATES.rglob("*.toml"))
        return found + [
            (f"hone: {file.relative_to(TEMPLATES).as_posix()}", file) for file in shipped
        ]

    def read_recipe(self, name: str) -> dict[str, str]:
        """Return a recipe's text and a guess of its command. Raises KeyError if it is unknown."""
        text = dict(self._find_recipes())[name].read_text(errors="replace")
        guess = (
            "vf-rl"
            if "vf-rl" in name or "[trainer.args]" in text
            else "sft"
            if "sft" in Path(name).name
            else "rl"
        )
        return {"toml": text, "command": guess}

    def read_changed_keys(self, run: Run) -> dict[str, str]:
        """Return the keys of a run's configuration that are not defaults, to start another run.

        Raises ValueError if the run keeps no configuration of its command.
        """
        command = "sft" if run.kind == "sft" else "rl"
        file = run.path / "configs" / f"{command}.toml"
        if not is_below(self.root, file):
            raise ValueError(f"{run.id} keeps no {command}.toml")
        config = load_config(import_object(COMMANDS[command][0]), ["@", str(file)])
        values = config.model_dump(mode="json", exclude_defaults=True)
        for key in ("output_dir", "resume", "clean"):
            values.pop(key, None)
        return {"toml": format_toml(values), "command": command}

    def check_config(self, command: str, toml: str) -> dict[str, Any]:
        """Validate a configuration for a command.

        Returns {"ok": True, "max_steps": …, "model": …}, or {"ok": False, "error": message}.
        """
        if command not in KINDS:
            return {"ok": False, "error": f"command {command!r}: {', '.join(KINDS)}"}
        with tempfile.TemporaryDirectory() as place:
            file = Path(place) / f"{command}.toml"
            file.write_text(toml)
            try:
                config = load_config(import_object(COMMANDS[command][0]), ["@", str(file)])
            except (ValueError, ConnectionError, tomllib.TOMLDecodeError) as error:
                return {"ok": False, "error": str(error).replace(f"{file}", file.name)}
        resolved = config.resolve_config().model_dump(mode="json")
        return {
            "ok": True,
            "max_steps": resolved.get("max_steps"),
            "model": (resolved.get("model") or {}).get("name"),
        }

    def start_run(
        self, command: str, toml: str, output_dir: str, where: str, more: str
    ) -> dict[str, Any]:
        """Queue a run on this machine, or submit it to Slurm; return the job.

        Args:
            command: rl, sft or vf-rl.
            toml: text of the configuration.
            output_dir: directory of the run, below the root; "" chooses a new one.
            where: "here" or "slurm".
            more: further options of `hone slurm`.

        Raises:
            ValueError: the configuration, the directory or the submission is refused.
        """
        checked = self.check_config(command, toml)
        if not checked["ok"]:
            raise ValueError(checked["error"])
        if where not in ("here", "slurm"):
            raise ValueError(f"where {where!r}: here, slurm")
        with self._lock:
            name = self._new_name(command)
            among = self.root if self.root.name == "outputs" else self.root / "outputs"
            place = (self.home / output_dir if output_dir else among / name).resolve()
            if not place.is_relative_to(self.root) or place == self.root:
                raise ValueError(f"output directory {output_dir!r} is not below {self.root}")
            directory = place.relative_to(self.root).as_posix()
            kind = kind_of(command)
            if (place / f"run_{kind}.json").exists():
                raise ValueError(
                    f"{directory} holds an earlier {kind} run; take another directory, or resume that run"
                )
            if any(
                job.output_dir == directory and job.state in ("queued", "running")
                for job in self._read_jobs()
            ):
                raise ValueError(f"{directory} is the directory of another job that waits or runs")
            own = self.directory / name
            own.mkdir(parents=True)
            (own / f"{command}.toml").write_text(toml)
            job = Job(name, command, directory, where, more=more)
            if where == "slurm":
                self._submit_job(job)
            return self._line_up(job)

    def start_evaluation(
        self, run: Run, weights: Path, config: dict[str, Any], examples: int
    ) -> dict[str, Any]:
        """Queue an evaluation of a run's weights on the run's first environment.

        Args:
            run: the RL run.
            weights: directory of the weights.
            config: the run's resolved configuration.
            examples: number of held-out examples.

        Raises:
            ValueError: the run is no RL run, or its configuration names no environment.
        """
        env = next(iter(environments_of(config)), {})
        if run.kind != "rl" or not isinstance(env.get("id"), str):
            raise ValueError(
                "evaluated are weights of rl runs, whose configuration names an environment"
            )
        sampling = orchestrator_keys(config).get("sampling") or {}
        asked = {
            "env": env["id"],
            "args": env.get("args") or {},
            "n": max(1, min(examples, 10_000)),
            "max_tokens": sampling.get("max_tokens"),
        }
        with self._lock:
            name = self._new_name("vf-eval")
            (self.directory / name).mkdir(parents=True)
            place = weights.resolve().relative_to(self.root).as_posix()
            return self._line_up(Job(name, "vf-eval", place, more=json.dumps(asked)))

    def stop(self, name: str) -> dict[str, Any]:
        """Ask a job to checkpoint and exit after its step; remove it from the queue if it waits."""
        return self._signal_job(name, signal.SIGUSR1)

    def kill(self, name: str) -> dict[str, Any]:
        """Kill a job; work since its last checkpoint is lost."""
        return self._signal_job(name, signal.SIGTERM)

    def resume(self, name: str) -> dict[str, Any]:
        """Resume a job from its last checkpoint. Raises ValueError while it runs."""
        with self._lock:
            job = self._get_job(name)
            if job.state in ("queued", "running"):
                raise ValueError(f"{name} is {job.state}")
            if job.where == "slurm":
                raise ValueError("Slurm resumes its own jobs: hone slurm status DIR")
            job.state = "queued"
            job.resume = True
            job.code = None
            return self._line_up(job)

    def remove(self, name: str) -> dict[str, Any]:
        """Remove an ended job from the list; its run stays."""
        with self._lock:
            job = self._get_job(name)
            if job.state == "running":
                raise ValueError(f"{name} is running")
            shutil.rmtree(self.directory / job.name)
            return {"name": name, "state": "removed"}

    def read_log(self, name: str) -> dict[str, Any]:
        job = self._get_job(name)
        text, start = read_end(self.root, self.directory / job.name / "log.txt", LOG_TAIL_BYTES)
        return self._describe_job(job) | {"text": text, "start": start}

    def list_jobs(self) -> list[dict[str, Any]]:
        """Return the jobs, newest first."""
        with self._lock:
            return [self._describe_job(job) for job in reversed(self._read_jobs())]

    def _describe_job(self, job: Job) -> dict[str, Any]:
        shown = asdict(job) | {"run": job.run_name}
        del shown["signature"]
        return shown

    def _read_jobs(self) -> list[Job]:
        found = []
        for file in sorted(self.directory.glob("*/job.json")):
            with contextlib.suppress(ValueError, TypeError, IndexError, RecursionError):
                job = Job(**json.loads(read_text(self.root, file)))
                if not self._is_own(job, file.parent.name):
                    job = Job(
                        file.parent.name, "foreign", str(job.output_dir), state="foreign", begun=""
                    )
                found.append(self._as_it_stands(job))
        return found

    def _get_job(self, name: str) -> Job:
        """Return one of the user's own jobs. Raises KeyError."""
        for job in self._read_jobs():
            if job.name == name and job.state != "foreign":
                return job
        raise KeyError(name)

    def _is_own(self, job: Job, folder: str) -> bool:
        """Return True if this user's dashboard wrote the job and nobody changed it."""
        is_named = (
            job.name == folder
            and re.fullmatch(rf"({'|'.join([*KINDS, 'vf-eval'])})-\d+", folder) is not None
        )
        return is_named and hmac.compare_digest(str(job.signature), self._sign_job(job))

    def _sign_job(self, job: Job) -> str:
        """Return the signature of a job and of the file that it runs."""
        said = asdict(job) | {"signature": ""}
        file = self.directory / job.name / f"{job.command}.toml"
        content = file.read_bytes() if file.is_file() else b""
        text = json.dumps(said, sort_keys=True).encode() + b"\0" + content
        return hmac.new(self._key, text, "sha256").hexdigest()

    def _as_it_stands(self, job: Job) -> Job:
        """Return the job, with "running" changed to "stopped" if it no longer runs.

        A job no longer runs if its process is gone or its run has no heartbeat. Jobs that this
        dashboard process started are returned unchanged.
        """
        if job.state == "running" and job.name not in self._processes:
            run = (
                find_runs(self.root / job.output_dir)
                if (self.root / job.output_dir).is_dir()
                else {}
            )
            alive = any(
                run_status(self.root, one, 0, None) in ("running", "silent") for one in run.values()
            )
            if not (alive and process_exists(job.pid, counts_others=False)):
                job.state = "stopped"
        return job

    def _new_name(self, command: str) -> str:
        taken = [
            re.fullmatch(rf"{command}-(\d+)", path.name)
            for path in self.directory.glob(f"{command}-*")
        ]
        return f"{command}-{1 + max((int(match[1]) for match in taken if match), default=0):03d}"

    def _write_job(self, job: Job) -> None:
        job.signature = self._sign_job(job)
        rewrite_file(
            self.directory / job.name / "job.json", json.dumps(asdict(job), indent=2) + "\n"
        )

    def _signal_job(self, name: str, number: signal.Signals) -> dict[str, Any]:
        with self._lock:
            job = self._get_job(name)
            if job.state == "queued":
                job.state = "stopped"
                self._write_job(job)
            elif job.state == "running" and job.pid > 1:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(job.pid, number)
            return self._describe_job(job)

    def command_words(self, job: Job) -> list[str]:
        """Return the job's command line."""
        file = self.directory / job.name / f"{job.command}.toml"
        if job.command == "vf-eval":
            asked = json.loads(job.more)
            words = [
                asked["env"],
                "-m",
                self._typed_directory(job),
                "-n",
                str(asked["n"]),
                "-a",
                json.dumps(asked["args"]),
                "-s",
            ]
            words += ["--max-tokens", str(asked["max_tokens"])] if asked["max_tokens"] else []
            return [*HONE, "vf-eval", *words]
        if job.where == "slurm":
            own = ["slurm", job.command, str(file), "--output-dir", str(self.root / job.output_dir)]
            return [*HONE, *own, *shlex.split(job.more)]
        words = [*HONE, job.command, "@", str(file)]
        # The run keeps its checkpoints, and its directory is set in its file.
        if job.command == "vf-rl":
            output = ["--trainer.args.output-dir", self._typed_directory(job)]
        else:
            output = ["--output-dir", self._typed_directory(job)]
            if "ckpt" not in tomllib.loads(file.read_text()):
                output += ["--ckpt.interval", str(CHECKPOINT_INTERVAL)]
        return [*words, *output, *(["--resume", "auto"] if job.resume else [])]

    def _typed_directory(self, job: Job) -> str:
        """Return the job's output directory, relative to the working directory of its command."""
        return os.path.relpath(self.root / job.output_dir, self.home)

    def _submit_job(self, job: Job) -> None:
        """Submit a job to Slurm. Raises ValueError with the error of Slurm or of the command."""
        done = subprocess.run(
            self.command_words(job), cwd=self.home, capture_output=True, text=True, timeout=120
        )
        (self.directory / job.name / "log.txt").write_text(done.stdout + done.stderr)
        if done.returncode:
            shutil.rmtree(self.directory / job.name)
            raise ValueError((done.stderr or done.stdout).strip()[-2000:] or "sbatch failed")
        job.state = "submitted"

    def _line_up(self, job: Job) -> dict[str, Any]:
        """Write a job's file, start the queue thread if needed, and return the job for display."""
        self._write_job(job)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run_queue, daemon=True)
            self._thread.start()
        return self._describe_job(job)

    def _run_queue(self) -> None:
        """Start queued jobs one after the other, until none is queued or running."""
        while True:
            with self._lock:
                jobs = self._read_jobs()
                for job in jobs:
                    self._note_end(job)
                queued = [job for job in jobs if job.state == "queued"]
                if not any(job.state == "running" for job in jobs):
                    if not queued:
                        self._thread = None
                        return
                    self._start_job(queued[0])
            time.sleep(POLL_SECONDS)

    def _start_job(self, job: Job) -> None:
        with (self.directory / job.name / "log.txt").open("ab") as log:
            process = start_process(
                self.command_words(job),
                {"HONE_PARENT_PID": "0"},  # it outlives the dashboard
                cwd=self.home,
                stdout=log,
                stderr=log,
            )
        self._processes[job.name] = process
        job.state = "running"
        job.pid = process.pid
        job.code = None
        self._write_job(job)

    def _note_end(self, job: Job) -> None:
        """Record the end of a job if it has ended."""
        process = self._processes.get(job.name)
        if process is None or (code := process.poll()) is None:
            return
        job.code = code
        job.state = (
            "done"
            if code == 0
            else "stopped"
            if code in (EXIT_PREEMPTED, -signal.SIGTERM, 143, 130)
            else "failed"
        )
        del self._processes[job.name]
        self._write_job(job)


def signing_key() -> bytes:
    """Return the key that this user's dashboards sign jobs with, creating it if needed."""
    home = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    file = home / "hone" / "dashboard.key"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as new:
                new.write(secrets.token_bytes(32))
        found = file.stat()
        key = file.read_bytes()
        if found.st_uid == os.getuid() and not found.st_mode & 0o077 and len(key) == 32:
            return key
    except OSError:
        pass
    # Only this dashboard's queue: it does not outlive the dashboard.
    return secrets.token_bytes(32)


def kind_of(command: str) -> str:
    """Return the kind of run that a command makes."""
    return "rl" if command == "vf-rl" else command
