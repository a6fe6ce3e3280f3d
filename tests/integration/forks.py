"""Commands in processes forked from one that has imported what they import: most of a short command is imports.

    test ─ words, directory, environment, stdout, stderr ─► this process ─ fork ─► keeper ─ fork ─► the command
                                          number, exit status ◄─────────────────────┘

The command's script runs as Python itself would run it, in a session of its own. Where it may matter how a process
starts (its own environment, a module that must not be imported), tests start one afresh.
"""

import atexit
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings

from tests import processor_time

HEAVY = ("hone.trainer.sft.train", "hone.launch.colocated", "tokenizers", "jinja2")
CAN = hasattr(os, "fork") and sys.platform == "linux"
# What may differ from this process in the environment of a command: nothing that an import looks at.
OWN = {"PYTEST_CURRENT_TEST", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
AT_ONCE = 0.0001  # seconds: 0 would make the connection one that never waits
NUMBER = 8  # bytes of a process's number, of its exit status, and of its processor time in microseconds


class Forked:
    """A process as `subprocess.Popen` would have started it, as far as tests ask."""

    def __init__(self, connection):
        self._connection, self.returncode = connection, None
        (self.pid,) = self._read_numbers(1)

    def _read_numbers(self, count):
        data = self._connection.recv(count * NUMBER, socket.MSG_WAITALL)
        assert len(data) == count * NUMBER, "its keeper is gone, and with it how the command ended"
        return [int.from_bytes(data[i : i + NUMBER], "big", signed=True) for i in range(0, len(data), NUMBER)]

    def wait(self, timeout=None):
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode, microseconds = self._read_numbers(2)
            except TimeoutError:
                raise subprocess.TimeoutExpired(str(self.pid), timeout) from None
            processor_time.add_forked(microseconds / 1e6)
        return self.returncode

    def poll(self):
        try:
            return self.wait(AT_ONCE)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


class Forks:
    """The process that forks, seen by the tests."""

    def __init__(self):
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.environment = dict(os.environ)
        words = [sys.executable, "-m", "tests.integration.forks", str(theirs.fileno())]
        self.process = subprocess.Popen(words, pass_fds=[theirs.fileno()], start_new_session=True)
        theirs.close()
        self.requests = mine

    def start(self, words, cwd, environment, out, err):
        """Returns the process; None where one that is forked would differ from one started afresh."""
        one, two = ({k: v for k, v in e.items() if k not in OWN} for e in (environment, self.environment))
        if one != two or self.process.poll() is not None:
            return None
        mine, theirs = socket.socketpair()
        request = json.dumps([words, str(cwd), environment]).encode()
        socket.send_fds(self.requests, [request], [theirs.fileno(), out.fileno(), err.fileno()])
        theirs.close()
        return Forked(mine)


def serve(requests):
    """Until the tests have closed their end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    while True:
        request, files, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not request:
            return
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            try:
                _keep(*json.loads(request), *files)
            finally:
                os._exit(1)
        for file in files:
            os.close(file)


def _keep(words, cwd, environment, connection, out, err):
    """Forks the command, tells its number and then how it ended."""

    def tell(*numbers):
        os.write(connection, b"".join(number.to_bytes(NUMBER, "big", signed=True) for number in numbers))

    pid = os.fork()
    if pid:
        tell(pid)
        os.close(out)
        os.close(err)
        _, status, usage = os.wait4(pid, 0)
        tell(os.waitstatus_to_exitcode(status), int((usage.ru_utime + usage.ru_stime) * 1e6))
        os._exit(0)
    os.close(connection)
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
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
    if os.path.basename(words[0]) != "python":
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

    requests = socket.socket(fileno=int(sys.argv[1]))
    # Python 3.12 warns of forks beside threads; those of numpy's BLAS are made again after a fork.
    warnings.filterwarnings("ignore", message="This process .* is multi-threaded", category=DeprecationWarning)
    start = time.perf_counter()
    for name in HEAVY:
        importlib.import_module(name)
    if importlib.import_module("hone.kernels.cpu").IS_AVAILABLE:  # modules alone: threads would not outlive the fork
        for name in ("attention", "decode", "layers", "logprobs", "orthogonal", "products", "rows"):
            importlib.import_module(f"hone.kernels.cpu.{name}")
    took = time.perf_counter() - start  # by which each command takes the machine to be slow, as it would by itself
    os.register_at_fork(after_in_child=lambda: setattr(cli, "STARTED", time.perf_counter() - took))
    serve(requests)


if __name__ == "__main__":
    main()
