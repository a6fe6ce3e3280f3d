"""Run `rl` as processes: inference, orchestrator and trainer. If one fails, end all.

    rl ─┬─ inference      (unless running servers are used)    logs/inference.log, or inference_0.log, …
        ├─ orchestrator   ── HTTP ──► inference                logs/orchestrator.log, console
        └─ trainer        ── files of the run directory ──     logs/trainer.log, console; one process per GPU

Each gets its configuration as configs/NAME.toml. A child exits when its launcher is gone
(`HONE_PARENT_PID`).
"""

import asyncio
import contextlib
import logging
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

from hone import preemption
from hone.child_process import HONE, describe_exit, end_processes, start_process
from hone.clients.http import NO_SIGN_SECONDS, connect_clients
from hone.config.base import ConfigError, load_config
from hone.config.help import to_toml
from hone.config.rl_config import RLConfig
from hone.config.secrets import secrets_variable
from hone.config.sections import BACKEND_LOST
from hone.inference.socket_binding import bind_socket
from hone.launch.plan import Component, plan_components
from hone.launch.run_follower import Follower
from hone.monitors import trackers
from hone.monitors.diagnosis_monitor import DiagnosisMonitor
from hone.monitors.events import EventList, Events
from hone.monitors.progress_line import ProgressLine
from hone.monitors.step_lines import QUIET_VARIABLE, RLStepLines, format_outcome
from hone.process_report import read_report
from hone.run_directory import RunDirectory
from hone.trainer.checkpoint import refuse_changes, resume_from, step_of

# This many kills of inference within this many seconds, or of one server between two steps, end a run.
MAX_KILLS = 5
KILLS_WITHIN_SECONDS = 60.0

log = logging.getLogger("hone.rl")


def run_components(config: RLConfig, callbacks: Events | None = None) -> None:
    """Run the components until they end or a callback stops them.

    Raises ValueError with the cause if one of them fails.
    """
    trackers.check_trackers(config.wandb, config.tensorboard)
    run = RunDirectory(config.output_dir, "rl", config.layout)
    sources = resume_from(run, config.resume)
    if config.inference is None:
        asyncio.run(require_servers(config))
    if sources:
        refuse_other_rollouts(sources[0], config)
    weight_steps = config.weights.list_steps(config.max_steps)
    run.check_claim(clean=config.may_start_anew, resume=bool(sources), weight_steps=weight_steps)
    parts = plan_components(config)
    # Nothing to sample: the trainer writes what is missing.
    if sources and step_of(sources[0]) >= config.max_steps:
        parts = [part for part in parts if part.role == "trainer"]
    for part in parts:  # before slow start-up
        if part.address and not part.node:
            host, _, port = part.address.rpartition(":")
            bind_socket(host, int(port)).close()
    run.write_config(to_toml(config))
    children: list[Child] = []

    def handle_signal(number: int, _: object) -> None:
        log.warning("%s: ending", signal.Signals(number).name)
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handle_signal)
    done = step_of(sources[0]) if sources else 0
    progress_line = ProgressLine("rl")
    monitor = DiagnosisMonitor(run, log, done, config.orchestrator.stop_when, logs_findings=False)
    events = EventList(RLStepLines(config), progress_line, monitor, callbacks)
    try:
        for part in parts:
            children.append(
                Child(part, run.write_config(to_toml(part.config), part.name), run.logs)
            )
        preemption.steps_begin()
        log.info(
            "Started %s; logs in %s",
            ", ".join(f"{c.name} ({c.process.pid})" for c in children),
            run.logs,
        )
        if config.inference is not None:
            events.on_servers([part.address for part in parts if part.address])
        with progress_line:
            events.on_start(config.max_steps, done)
            events.on_activity("starting")
            watch_children(children, Follower(events, run, weight_steps, done))
    finally:
        end_children(children)
    log.info("%s", format_outcome(run))


def refuse_other_rollouts(source: Path, config: RLConfig) -> None:
    """Raise ValueError if `config` changes keys that a run resumed from `source` must keep.

    The keys are compared with the run's configs/rl.toml, since trainer checkpoints record only the
    trainer's configuration.
    """
    try:
        before = load_config(RLConfig, ["@", str(source.parent.parent / "configs" / "rl.toml")])
    except ConfigError:  # missing, or of another version of Hone
        return
    refuse_changes(before.to_public_dict(), config, source)


async def require_servers(config: RLConfig) -> None:
    """Require that every configured server answers and accepts the API key.

    Raises ConnectionError, or ValueError for a refused key, with what to do.
    """
    for client in connect_clients(config.orchestrator.client, config.model.name):
        async with client:
            try:
                await client.wait_until_up(
                    min(NO_SIGN_SECONDS, config.orchestrator.client.ready_timeout)
                )
            except ConnectionError as error:
                raise ConnectionError(f"{error}, or let rl start it: --inference @ FILE") from None
            await client.check_key()


class Child:
    """Process of a component, and its report file (`process_report.py`)."""

    def __init__(self, part: Component, config: Path, logs: Path) -> None:
        self.name = part.name
        self.title = part.display_name
        self.is_server = part.restarts
        self.is_trainer = part.role == "trainer"
        self.report = (logs / f".{part.display_name.replace(' ', '_')}.report.json").absolute()
        self.is_elsewhere = bool(part.node)
        self.words = [
            *on_node(part.node),
            *HONE,
            part.role,
            "@",
            str(config.absolute()),
        ]
        secrets = secrets_variable(part.config.model_dump(mode="json"))
        own = {"PYTHONUNBUFFERED": "1", QUIET_VARIABLE: "1"}
        self.environment = {**part.environment, **own, **secrets}
        if part.node:
            self.environment["HONE_PARENT_PID"] = "0"
        # Trainer and orchestrator write their own logs and print to the console; inference only has
        # a log.
        self.log = (logs / f"{part.name}.log").open("w") if self.is_server else None
        self.start_process()

    def start_process(self) -> None:
        with contextlib.nullcontext() if self.is_elsewhere else preemption.hold_signals():
            self.process = start_process(
                self.words,
                self.environment,
                self.report,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        self.output_ended_at = float("inf")  # time.monotonic()
        self.reader = threading.Thread(target=self._read_output, daemon=True)
        self.reader.start()

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # No reader (`rl | head`) or a full disk: keep draining the pipe.
            with contextlib.suppress(OSError, ValueError):
                print(line, end="", flush=True, file=self.log or sys.stdout)
        self.output_ended_at = time.monotonic()

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal as in Popen; None while it runs.

        srun reports signals as a shell does (128 + number); they are converted.
        """
        code = self.process.poll()
        return 128 - code if self.is_elsewhere and code is not None and code > 128 else code

    def is_killed_server(self) -> bool:
        """Return True for a server that was killed, or ended because its engine process died."""
        code = self.exit_code()
        return self.is_server and code is not None and (code < 0 or code == BACKEND_LOST)

    def has_failed(self) -> bool:
        """Return True if the process ended with an error or is a server that ended.

        Preemption of a trainer is no error.
        """
        code = self.exit_code()
        if code is None or (self.is_trainer and code == preemption.EXIT_PREEMPTED):
            return False
        return code != 0 or self.is_server

    def describe_failure(self) -> str:
        """Return one line on why the process ended."""
        self.reader.join(2.0)
        code = self.exit_code() or 0
        error = read_report(self.report).get("error")
        return f"{self.title} {describe_exit(code)}" + (f": {error}" if error else "")


def on_node(node: str) -> list[str]:
    """Return the srun prefix that starts a command on a node of this Slurm job.

    The list is empty for this machine.
    """
    if not node:
        return []
    return [
        "srun",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node}",
        "--unbuffered",
        "--mpi=none",
    ]


def watch_children(children: list[Child], follower: Follower) -> None:
    """Return when orchestrator and trainer have succeeded, or a callback stops the run.

    An inference server that is killed is restarted; the orchestrator loads the current weights into
    the server before it sends requests. Raises ValueError with the cause if a component fails,
    Preempted if the trainer was preempted.
    """
    restarts = Restarts()
    trainers = [child for child in children if child.is_trainer]
    is_signalled = False
    while True:
        if preemption.is_asked() and not is_signalled:
            is_signalled = True
            for child in trainers:
                child.process.send_signal(signal.SIGUSR1)
        _raise_if_preempted(trainers)
        for child in children:
            if child.is_killed_server() and restarts.may_restart(child.title, follower.done):
                log.warning("%s; restarted", child.describe_failure())
                child.start_process()
            elif child.has_failed():
                raise ValueError(find_first_failure(children, child).describe_failure())
        have_ended = all(child.process.poll() == 0 for child in children if not child.is_server)
        if not follower.follow_once(have_ended) or have_ended:
            return
        time.sleep(0.1)


def _raise_if_preempted(trainers: list[Child]) -> None:
    """Raise Preempted once all trainers have ended and one was preempted."""
    codes = [child.exit_code() for child in trainers]
    if preemption.EXIT_PREEMPTED in codes and None not in codes:
        report = read_report(trainers[0].report)
        message = report.get("preempted", "stopped on request")
        raise preemption.Preempted(message, report.get("can_resume", False))


class Restarts:
    """Ends of inference servers, counted to end a run whose servers do not stay up."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=MAX_KILLS)
        self._steps: dict[str, deque[int]] = {}  # by server, the steps before its ends

    def may_restart(self, server: str, step: int) -> bool:
        """Record that a server was killed after `step` steps of the run.

        Returns False after MAX_KILLS of all servers within KILLS_WITHIN_SECONDS, and after as many
        of one server without a step between them.
        """
        self._times.append(time.monotonic())
        steps = self._steps.setdefault(server, deque(maxlen=MAX_KILLS))
        steps.append(step)
        span = self._times[-1] - self._times[0]
        is_frequent = len(self._times) == MAX_KILLS and span <= KILLS_WITHIN_SECONDS
        return not is_frequent and steps.count(step) < MAX_KILLS


def find_first_failure(children: list[Child], found: Child) -> Child:
    """Return the child that failed first: ranks that lose a peer fail a moment later."""
    failed = [
        child
        for child in children
        if child is found or (child.exit_code() or 0) not in (0, preemption.EXIT_PREEMPTED)
    ]
    for child in failed:
        child.reader.join(0.5)
    return min(failed, key=lambda child: ((child.exit_code() or 0) >= 0, child.output_ended_at))


def end_children(children: list[Child]) -> None:
    """End running children: send SIGTERM, and SIGKILL after TERM_SECONDS."""
    end_processes(*(child.process for child in children))
    for child in children:
        child.reader.join(2.0)
        child.report.unlink(missing_ok=True)
        if child.log:
            child.log.close()
