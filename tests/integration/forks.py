"""Commands in processes forked from one that has imported what they import: most of a short command is imports.

    test, or a command that starts others ─ arguments, directory, environment, standard streams ─► template process
                                                                                      fork ─► keeper ─ fork ─► command
                                                              pid, exit code, processor time ◄─┘

There is a template process for each environment that matters to imports (threads are chosen then); the processes of a
test run share them. The command's script runs as Python itself would run it, in a session of its own, and so do the
parts that `rl` starts. Where it may matter how a process starts (an environment without a template, a module that must
not be imported), processes are started afresh.
"""

import atexit
import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

from tests import processor_time
from tests.shared_run import is_run_alive, run_directory

HEAVY = (
    "hone.trainer.sft.train",
    "hone.launch.colocated",
    "tokenizers",
    "jinja2",
    "hone.inference.serve",
    "uvicorn",
    "hone.inference.app",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.checkpoint.state_dict_loader",
    "torch.distributed.checkpoint.filesystem",
)
CPU_KERNELS = (
    "attention",
    "decode",
    "logprobs",
    "orthogonal",
    "products",
    "row_kernels",
    "whole_model",
)
CAN_FORK = hasattr(os, "fork") and sys.platform == "linux"
# Variables that are read when a process or a library starts, by their beginnings: a template has them as its commands
# do. What a command reads later is in the environment that it is given.
FIXED = (
    "ATEN_",
    "CUDA_",
    "GOMP_",
    "HF_HUB_OFFLINE",
    "HOME",
    "HONE_CPU_ISA",
    "HONE_GPUS",
    "HONE_TEST_AFRESH",
    "KMP_",
    "LANG",
    "LC_",
    "LD_",
    "MKL_",
    "NUMBA_CACHE",
    "NUMBA_CPU",
    "NUMBA_DEBUG",
    "NUMBA_DISABLE",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS",
    "PYTHON",
    "TMPDIR",
    "TRITON_",
    "TZ",
    "XDG_",
)
APPLIED = ("PYTHONPATH", "PYTHONUNBUFFERED")  # which `_keep` sees to
AT_ONCE_SECONDS = 0.0001  # 0 would make the connection one that never waits
NUMBER_BYTES = 8  # of a pid and of an exit code
LOOK_SECONDS = 2.0  # between looks whether the test run still lives


def _socket_path(environment):
    """Return where the template of such an environment listens."""
    kept = sorted(
        one for one in environment.items() if one[0].startswith(FIXED) and one[0] not in APPLIED
    )
    return run_directory() / f"{hashlib.sha256(repr(kept).encode()).hexdigest()[:16]}.sock"


def start_templates(environment):
    """Start the template processes of a test run, unless another process of the run has."""
    with (run_directory() / "templates.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Commands of one process, parts of a run
        for threads in (environment.get("OMP_NUM_THREADS", "1"), "1"):
            wanted = {**environment, "OMP_NUM_THREADS": threads}
            path = _socket_path(wanted)
            if path.exists():
                continue
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listening.bind(str(path))
            listening.listen(64)  # who connects meanwhile waits for the imports
            words = [sys.executable, "-m", "tests.integration.forks", str(listening.fileno())]
            process = subprocess.Popen(
                words,
                env=wanted,
                cwd=Path(__file__).parents[2],
                pass_fds=[listening.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
            )
            path.with_suffix(".pid").write_text(str(process.pid))
            listening.close()


def end_templates():
    """End the template processes; what they have forked has ended with the tests."""
    for path in run_directory().glob("*.pid"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)


class ForkedProcess:
    """A process as `subprocess.Popen` would have started it, as far as tests ask."""

    def __init__(self, connection):
        self._connection, self.returncode = connection, None
        self.pid = self._read_number()

    def _read_number(self):
        data = self._connection.recv(NUMBER_BYTES)
        assert len(data) == NUMBER_BYTES, "its keeper is gone, and with it how the command ended"
        return int.from_bytes(data, "big", signed=True)

    def wait(self, timeout=None):
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = self._read_number()
            except TimeoutError:
                raise subprocess.TimeoutExpired(str(self.pid), timeout) from None
            self._connection.close()
        return self.returncode

    def poll(self):
        try:
            return self.wait(AT_ONCE_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def fork_command(words, cwd, environment, files):
    """Run a command in a fork of its environment's template; return None where there is no such template.

    Args:
        words: the script or Python, and its arguments.
        files: descriptors of standard input, output and error.
    """
    words = list(map(str, words))
    if words[1:2] == ["-c"]:  # such a program asks what a process has imported, and when
        return None
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    path = _socket_path(environment)
    if not path.exists() or any(
        (Path(folder) / "sitecustomize.py").exists() for folder in folders if folder
    ):
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        return None
    request = json.dumps([words, str(cwd), dict(environment), os.getpid()]).encode()
    socket.send_fds(connection, [request], files)
    return ForkedProcess(connection)


class ForkingPopen(subprocess.Popen):
    """`subprocess.Popen` of a forked command: the parts of Hone that it starts are forked too."""

    _forked = None

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more):
        if not (
            isinstance(args, (list, tuple))
            and list(map(str, args[:4])) == [sys.executable, "-P", "-m", "hone"]
        ):
            return super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more
            )
        pipes = more[3:9]  # the same in Python 3.11 to 3.13; -1 where the stream is inherited
        stdin, _, _, stdout, _, stderr = pipes
        files = [given if given != -1 else own for own, given in enumerate((stdin, stdout, stderr))]
        environment = os.environ if env is None else env
        self._forked = fork_command(args, cwd or os.getcwd(), environment, files)
        if self._forked is None:
            return super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more
            )
        self.pid, self._child_created = self._forked.pid, True
        self._close_pipe_fds(*pipes)

    def _internal_poll(self, *arguments, **keywords):
        if self._forked is None:
            return super()._internal_poll(*arguments, **keywords)
        self.returncode = self._forked.poll()
        return self.returncode

    def _wait(self, timeout):
        if self._forked is None:
            return super()._wait(timeout)
        try:
            self.returncode = self._forked.wait(timeout)
        except subprocess.TimeoutExpired:
            raise subprocess.TimeoutExpired(self.args, timeout) from None
        return self.returncode


def forked_processes():
    """Return (parent, arguments) of each forked command by pid, as /proc would tell of one that was started afresh."""
    found = {}
    for path in run_directory().glob("process_*.json") if run_directory() else ():
        with contextlib.suppress(FileNotFoundError, ValueError):  # it has just ended, or begins
            found[int(path.stem.removeprefix("process_"))] = tuple(json.loads(path.read_text()))
    return found


def serve_requests(listening):
    """Fork a keeper for each request."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    while is_run_alive():
        if not select.select([listening], [], [], LOOK_SECONDS)[0]:
            continue
        connection, _ = listening.accept()
        request, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        if request and not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listening.close()
            try:
                _keep(*json.loads(request), connection, files)
            finally:
                os._exit(1)
        for file in files:
            os.close(file)
        connection.close()


def _keep(words, cwd, environment, requester, connection, files):
    """Fork the command; tell its pid, and how it ended."""

    def tell(number):
        with contextlib.suppress(BrokenPipeError):  # whoever asked for it is gone
            connection.send(number.to_bytes(NUMBER_BYTES, "big", signed=True))

    pid = os.fork()
    if pid:
        record = run_directory() / f"process_{pid}.json"
        partial = record.with_suffix(".partial")
        partial.write_text(json.dumps([requester, words]))
        partial.rename(record)
        tell(pid)
        for file in files:
            os.close(file)
        _, status, usage = os.wait4(pid, 0)
        record.unlink(missing_ok=True)
        processor_time.add_forked(environment, usage.ru_utime + usage.ru_stime)
        tell(os.waitstatus_to_exitcode(status))
        os._exit(0)
    connection.close()
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)
    sys.path[1:1] = [
        folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder
    ]
    subprocess.Popen = ForkingPopen
    code = 1
    try:
        _run(words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(words):
    # `hone` keeps to its own path anyway
    words = [word for i, word in enumerate(words) if (i, word) != (1, "-P")]
    if not os.path.basename(words[0]).startswith("python"):
        sys.argv, sys.path[0] = words, os.path.dirname(words[0])
        runpy.run_path(words[0], run_name="__main__")
    elif words[1] == "-m":
        sys.argv, sys.path[0] = words[2:], os.getcwd()
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words[1:], os.path.dirname(words[1])
        runpy.run_path(words[1], run_name="__main__")


def main():
    from hone import cli

    listening = socket.socket(fileno=int(sys.argv[1]))
    # Python 3.12 warns of forks beside threads; those of numpy's BLAS are made again after a fork.
    warnings.filterwarnings(
        "ignore", message="This process .* is multi-threaded", category=DeprecationWarning
    )
    start = time.perf_counter()
    for name in HEAVY:
        importlib.import_module(name)
    # Only modules are imported here: threads would not survive the fork.
    if importlib.import_module("hone.kernels.cpu").IS_AVAILABLE:
        for name in CPU_KERNELS:
            importlib.import_module(f"hone.kernels.cpu.{name}")
    # Each command measures how slow the machine is by its imports, as it would in a process of its own.
    took = time.perf_counter() - start
    os.register_at_fork(after_in_child=lambda: setattr(cli, "STARTED", time.perf_counter() - took))
    serve_requests(listening)


if __name__ == "__main__":
    main()
