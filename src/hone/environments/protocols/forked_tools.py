"""Start tool servers of verifiers 0.4 as forks of a process that has imported verifiers.

Verifiers starts a tool server for every rollout, as `python -m MODULE`, and importing verifiers takes
each of them 4 to 9 s of a processor. A fork takes 0.1 s. This module runs without Hone installed.

    worker ── {"module", "environment", "directory", "log"} ──► python forked_tools.py ─ fork ─► MODULE
           ◄─ {"pid"} ──┘
"""

import asyncio
import json
import os
import runpy
import select
import signal
import sys

PRELOADED = ("verifiers.v1.mcp.server", "mcp.server.mcpserver", "uvicorn", "httpx")


def fork_tool_servers():
    """Let verifiers' runtime `subprocess` start Python modules as forks, where the system can."""
    if not hasattr(os, "pidfd_open"):
        return
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime

    start_process = SubprocessRuntime.run_background
    forks = _ForkClient()

    async def run_background(runtime, argv, env, log):
        if argv[:2] != [sys.executable, "-m"] or len(argv) != 3:
            await start_process(runtime, argv, env, log)
            return
        kept = {key: value for key, value in os.environ.items() if "API_KEY" not in key.upper()}
        request = {
            "module": argv[2],
            "environment": kept | runtime.process_env(env),
            "directory": str(runtime.workdir),
            "log": str(runtime.workdir / log),
        }
        runtime._background.append(_Fork(await forks.start_module(request)))

    SubprocessRuntime.run_background = run_background


class _ForkClient:
    """The process that forks, started with the first request."""

    def __init__(self):
        self.process = None
        self.turn = asyncio.Lock()

    async def start_module(self, request):
        """Return the process id of the module; a cancelled caller leaves no process and no answer."""
        exchange = asyncio.ensure_future(self._exchange(request))
        try:
            return await asyncio.shield(exchange)
        except asyncio.CancelledError:
            exchange.add_done_callback(_end_process)
            raise

    async def _exchange(self, request):
        async with self.turn:
            if self.process is None or self.process.returncode is not None:
                pipe = asyncio.subprocess.PIPE
                self.process = await asyncio.create_subprocess_exec(
                    sys.executable, __file__, stdin=pipe, stdout=pipe
                )
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            line = await self.process.stdout.readline()
        if not line:
            raise RuntimeError("the process that starts tool servers ended")
        return json.loads(line)["pid"]


def _end_process(exchange):
    if not exchange.cancelled() and exchange.exception() is None:
        os.kill(exchange.result(), signal.SIGTERM)


class _Fork:
    """A forked process, with what verifiers uses of asyncio's Process."""

    def __init__(self, pid):
        self.pid = pid
        try:
            self.descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self.descriptor = None

    @property
    def returncode(self):
        """None while it runs, then 0: its exit code is not known here."""
        if self.descriptor is None:
            return 0
        return 0 if select.select([self.descriptor], [], [], 0)[0] else None

    async def wait(self):
        if self.descriptor is not None:
            loop = asyncio.get_running_loop()
            ended = loop.create_future()
            loop.add_reader(self.descriptor, lambda: ended.done() or ended.set_result(None))
            try:
                await ended
            finally:
                loop.remove_reader(self.descriptor)
        return 0

    def __del__(self):
        if self.descriptor is not None:
            os.close(self.descriptor)


def main():
    """Fork a child for each request of standard input, until it closes."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path = [path for path in sys.path if path != here]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    for name in PRELOADED:
        __import__(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps the children
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            answers.close()
            _run_module(request)
        answers.write(json.dumps({"pid": pid}) + "\n")
        answers.flush()


def _run_module(request):
    """Become the requested module's process; it does not return."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.chdir(request["directory"])
        os.environ.clear()
        os.environ.update(request["environment"])
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, log), (2, log)):
            os.dup2(source, target)
        sys.argv = [request["module"]]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
