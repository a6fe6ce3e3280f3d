"""`rl` as processes: starts inference, orchestrator and trainer, watches them, and ends them all when one ends badly.

    rl ─┬─ inference      (unless running servers are used)    logs/inference.log, or inference_0.log, …
        ├─ orchestrator   ── HTTP ──► inference                logs/orchestrator.log, console
        └─ trainer        ── files of the run directory ──     logs/trainer.log, console; a process for each of its GPUs

Each gets its configuration as configs/NAME.toml. A child ends by itself when its launcher is gone (`HONE_PARENT_PID`).
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from hone import machine
from hone.clients.http import connect
from hone.config.base import ConfigError, load_config
from hone.config.help import to_toml
from hone.config.inference import InferenceConfig
from hone.config.rl import OrchestratorRunConfig, RLConfig, TrainerRunConfig
from hone.config.sections import API_KEY_VARIABLE, BACKEND_LOST, LOOPBACK
from hone.inference.address import bind
from hone.launch.watching import Follower, Watcher
from hone.monitors.metrics import check_wandb
from hone.run_directory import RunDirectory
from hone.trainer.checkpoint import refuse_changes, resume_from

GRACE = 5.0  # seconds between SIGTERM and SIGKILL
KILLS, WITHIN = 5, 60.0  # so many kills of inference within so many seconds end a run
SHARED_GPU_GIB = 8.0  # of keys and values
EVERYWHERE = (None, "0.0.0.0", "::")

log = logging.getLogger("hone.rl")


def launch(config: RLConfig, watcher: Watcher | None = None) -> None:
    """Runs the components to their end, or until the watcher has them ended. Raises ValueError with the cause when one
    of them fails."""
    check_wandb(config.wandb)
    run = RunDirectory(config.output_dir, "rl", config.layout)
    sources = resume_from(run, config.resume)
    if config.inference is None:
        asyncio.run(require_servers(config))
    if sources:
        refuse_other_rollouts(sources[0], config)
    weight_steps = config.weights.steps(config.max_steps)
    run.check(clean=config.may_start_anew, resume=bool(sources), weight_steps=weight_steps)
    # The key travels in the environment: what is written down has no secrets.
    key = config.inference and (config.inference.api_key or os.environ.get(API_KEY_VARIABLE))
    keys = {API_KEY_VARIABLE: key} if key else {}
    configs = component_configs(config, has_key=bool(key))
    for server in configs.values():  # before seconds of starting
        if isinstance(server, InferenceConfig) and not server.headless:
            bind(server.server.host or LOOPBACK[0], server.server.port).close()
    run.write_config(to_toml(config))
    gpus: dict[str, list[int] | None] = {"trainer": config.trainer_gpu_ids, **gpus_of_servers(config)}
    children: list[Child] = []

    def interrupt(number: int, _: object) -> None:
        log.warning("%s: ending", signal.Signals(number).name)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, interrupt)
    try:
        for name, component in configs.items():
            file = run.write_config(to_toml(component), name)
            environment = keys | threads(config) | visible_gpus(gpus.get(name), config)
            ranks = environments_of_ranks(len(config.trainer_gpu_ids)) if name == "trainer" else [{}]
            command = "inference" if name.startswith("inference") else name
            children += [Child(name, command, file, environment | rank, run.logs) for rank in ranks]
        log.info("Started %s; logs in %s", ", ".join(f"{c.name} ({c.process.pid})" for c in children), run.logs)
        follower = None
        if watcher is not None:
            if config.inference is not None:
                watcher.serving(configs["orchestrator"].client.base_url)
            told = int(sources[0].name.removeprefix("step_")) if sources else 0
            follower = Follower(watcher, run, weight_steps, told)
        watch(children, follower)
    finally:
        end(children)


def refuse_other_rollouts(source: Path, config: RLConfig) -> None:
    """The trainer's checkpoints know its own configuration; what the orchestrator had is in the run's file."""
    try:
        before = load_config(RLConfig, ["@", str(source.parent.parent / "configs" / "rl.toml")])
    except ConfigError:  # there is none, or of another version of Hone
        return
    refuse_changes(before.public(), config, source)


def component_configs(config: RLConfig, has_key: bool) -> dict[str, Any]:
    """The configuration of each process, from that of the run. `has_key`: the server asks for one."""
    common = config.model_dump(
        include={"model", "output_dir", "layout", "seed", "log_level", "log_interval", "max_steps", "max_async_level"}
    )
    own = config.model_dump(include={"clean", "resume", "ckpt", "weights", "weight_broadcast", "ranks_timeout"})
    configs: dict[str, Any] = {}
    orchestrator = config.orchestrator.model_dump() | common | {"seq_len": config.seq_len}
    orchestrator["wandb"] = config.wandb and config.wandb.model_dump()
    if config.inference is not None:
        server = config.inference.server
        allowed = config.inference.allowed_dirs or [config.output_dir]
        if server.host not in (*EVERYWHERE, *LOOPBACK) and not has_key:
            raise ValueError(
                f"inference.server.host {server.host}: control routes answer to loopback alone without a key; "
                f"give one with --inference.api-key or {API_KEY_VARIABLE}"
            )
        host, urls = "localhost" if server.host in (*EVERYWHERE, *LOOPBACK) else server.host, []
        for i, name in enumerate(names_of_servers(config)):
            port = server.port + i if server.port else free_port()
            urls.append(f"http://{host}:{port}/v1")
            configs[name] = InferenceConfig.model_validate(
                config.inference.model_dump()
                | beside_trainer(config)
                | {"server": {"host": server.host, "port": port}, "allowed_dirs": allowed}
                | {key: common[key] for key in ("model", "seed", "log_level")}
            )
        orchestrator["client"]["base_url"] = urls
        if has_key:
            orchestrator["client"]["api_key_var"] = API_KEY_VARIABLE
    configs["orchestrator"] = OrchestratorRunConfig.model_validate(orchestrator)
    configs["trainer"] = TrainerRunConfig.model_validate(config.trainer.model_dump() | common | own)
    return configs


def names_of_servers(config: RLConfig) -> list[str]:
    count = config.inference_replicas
    return ["inference"] if count == 1 else [f"inference_{i}" for i in range(count)]


def gpus_of_servers(config: RLConfig) -> dict[str, list[int]]:
    """The GPUs of each server: as many for one as for another. Raises ValueError where they cannot be divided."""
    ids, names = config.inference_gpu_ids, names_of_servers(config)
    if len(names) == 1 or not visible_gpus(ids, config):
        return dict.fromkeys(names, ids)
    each, rest = divmod(len(ids), len(names))
    if rest or not each:
        raise ValueError(
            f"inference_gpu_ids: {len(ids)} GPUs cannot be divided among {len(names)} servers (inference_replicas)"
        )
    return {name: ids[i * each : (i + 1) * each] for i, name in enumerate(names)}


def beside_trainer(config: RLConfig) -> dict[str, Any]:
    """What a server is told that has its GPU together with the trainer: not to take what is free when it starts."""
    parts = (config.inference_gpu_ids, config.trainer_gpu_ids)
    server, trainer = (set(visible_gpus(ids, config).get("CUDA_VISIBLE_DEVICES", "").split(",")) for ids in parts)
    given = config.inference and config.inference.kv_cache_gib
    return {"kv_cache_gib": SHARED_GPU_GIB} if server & trainer - {""} and given is None else {}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def threads(config: RLConfig) -> dict[str, str]:
    """OMP_NUM_THREADS, which divides the cores among the trainer's ranks and the inference server."""
    count = len(config.trainer_gpu_ids) + (config.inference_replicas if config.inference is not None else 0)
    return {"OMP_NUM_THREADS": str(max(1, machine.cores() // count))}


def environments_of_ranks(count: int) -> list[dict[str, str]]:
    """What tells each of several processes who it is and where the others are, in torchrun's words."""
    if count == 1:
        return [{}]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    return [meeting | {"RANK": str(i), "LOCAL_RANK": str(i)} for i in range(count)]


def visible_gpus(ids: list[int] | None, config: RLConfig) -> dict[str, str]:
    """The environment that shows a component its GPUs: those of the configuration, out of those that are visible."""
    if ids is None or config.model.device == "cpu":
        return {}
    devices = machine.gpus()
    if not devices:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[i % len(devices)] for i in ids)}


async def require_servers(config: RLConfig) -> None:
    """Raises ConnectionError, with what to do, unless every server that is to be used answers, to our key."""
    for client in connect(config.orchestrator.client, config.model.name):
        async with client:
            if not await client.is_up():
                raise ConnectionError(
                    f"no server answers at {client.base_url}; start one with: inference --model.name "
                    f"{config.model.name}, or let rl start it: --inference @ FILE"
                )
            await client.check_key()


class Child:
    """A component's process, and what it last said."""

    def __init__(self, name: str, command: str, config: Path, environment: dict[str, str], logs: Path) -> None:
        self.name, self.is_server, self.said = name, command == "inference", deque[str](maxlen=50)
        self.title = f"{name} rank {environment['RANK']}" if "RANK" in environment else name
        self.words = [sys.executable, "-m", "hone", command, "@", str(config)]
        self.environment = os.environ | environment | {"HONE_PARENT_PID": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        # Trainer and orchestrator keep their own logs and speak on the console; inference is heard from its log alone.
        self.log = (logs / f"{name}.log").open("w") if self.is_server else None
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches the launcher, which ends its children in order
            env=self.environment,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.rstrip())
            with contextlib.suppress(OSError, ValueError):  # nobody reads (`rl | head`), a full disk: go on draining
                print(line, end="", flush=True, file=self.log or sys.stdout)

    def cause(self) -> str:
        """Why it ended, in one line."""
        self.reader.join(2.0)
        code = self.process.returncode
        how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
        errors = [line for line in self.said if "error:" in line.lower()] or [line for line in self.said if line]
        return f"{self.title} {how}" + (f": {errors[-1]}" if code > 0 and errors else "")


def watch(children: list[Child], follower: Follower | None = None) -> None:
    """Returns when orchestrator and trainer have ended well, or the follower says so. Raises ValueError with the cause
    when any ends badly.

    Inference that is killed is started again: the orchestrator gives it the current weights before it asks it anything.
    """
    kills: deque[float] = deque(maxlen=KILLS)
    while True:
        for child in children:
            code = child.process.poll()
            if child.is_server and code is not None and (code < 0 or code == BACKEND_LOST):
                kills.append(time.monotonic())
                if len(kills) < KILLS or kills[-1] - kills[0] > WITHIN:
                    log.warning("%s; started again", child.cause())
                    child.start()
                    continue
            if code is not None and (code != 0 or child.is_server):
                raise ValueError(child.cause())
        have_ended = all(child.process.poll() == 0 for child in children if not child.is_server)
        if (follower is not None and not follower.look()) or have_ended:
            return
        time.sleep(0.1)


def end(children: list[Child]) -> None:
    """Ends what still runs: SIGTERM, some seconds, SIGKILL."""
    running = [child.process for child in children if child.process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + GRACE
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for child in children:  # each leads a group: what an environment started of its own would outlive it
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)
    for child in children:
        child.reader.join(2.0)
        if child.log:
            child.log.close()
