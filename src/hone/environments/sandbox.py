"""Sandboxed Python sessions for model-written code, isolated by Linux namespaces.

    run(code) ─► unshare ─► sandbox_keeper.py ─► session        (own process namespace, network and files)

Namespaces, resource limits and a system call filter isolate a session; it can start threads but no
processes. `Sandbox.start` raises SandboxError on machines without namespaces. If a session is
killed or its output is truncated, the text that `run` returns says so, and the next call works, in
a new session if necessary.
"""

import asyncio
import contextlib
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEEPER = Path(__file__).with_name("sandbox_keeper.py")
START_SECONDS = 30.0  # seconds until a session must be ready
# First user id of sessions when run as root, so that limits count each session alone.
FIRST_USER_ID = 61_000


@dataclass(frozen=True)
class Limits:
    """Limits of one session.

    Attributes:
        seconds: wall time per call.
        memory: bytes of memory.
        file: bytes of one file.
        disk: bytes of all files.
        output: bytes of output returned per call.
        cpu: seconds of CPU time per session.
        threads: number of threads.
    """

    seconds: float = 10.0
    memory: int = 1 << 30
    file: int = 16 << 20
    disk: int = 64 << 20
    output: int = 8192
    cpu: int = 600
    threads: int = 16


class SandboxError(RuntimeError):
    """Raised if model-written code cannot be run here."""


class Sandbox:
    """A sandboxed session; create it with `await Sandbox.start(limits)`."""

    count = 0

    def __init__(self, process: asyncio.subprocess.Process, limits: Limits, root: str) -> None:
        self.process = process
        self.limits = limits
        self.root = root
        self.is_broken = False  # True while an answer may be pending that nobody awaits

    @classmethod
    async def start(cls, limits: Limits | None = None) -> "Sandbox":
        """Start a sandbox. Raises SandboxError with the reason if this machine cannot contain it."""
        limits = limits or Limits()
        tool = shutil.which("unshare")
        if not sys.platform.startswith("linux") or tool is None:
            missing = (
                "Linux"
                if not sys.platform.startswith("linux")
                else "the program unshare (of util-linux)"
            )
            raise SandboxError(f"code of a model is not run here: containing it needs {missing}")
        is_root = os.geteuid() == 0
        cls.count += 1
        root = tempfile.mkdtemp(prefix="hone-sandbox-")
        readable = [sys.base_prefix, sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")]
        inside: dict[str, Any] = vars(limits) | {
            "root": root,
            "readable": readable,
            "packages": sysconfig.get_path("purelib"),
            "user": FIRST_USER_ID + (os.getpid() * 37 + cls.count) % 4000 if is_root else 0,
        }
        words = [tool, *([] if is_root else ["--user", "--map-root-user"])]
        words += ["--net", "--pid", "--fork", "--mount", "--ipc", "--uts", "--kill-child"]
        words += [sys.executable, "-I", "-S", str(KEEPER), json.dumps(inside)]
        # Without our environment, which may hold keys.
        pipe = asyncio.subprocess.PIPE
        plain = {"PATH": "/usr/bin:/bin"}
        process = await asyncio.create_subprocess_exec(
            *words, stdin=pipe, stdout=pipe, stderr=pipe, limit=1 << 24, env=plain
        )
        made = cls(process, limits, root)
        try:
            async with asyncio.timeout(START_SECONDS):
                assert process.stdout is not None and process.stderr is not None
                if not await process.stdout.readline():
                    said = (
                        (await process.stderr.read()).decode(errors="replace").strip().splitlines()
                    )
                    raise SandboxError(
                        "code of a model is not run here: containing it needs namespaces of Linux (user, network, "
                        f"process, mount), which this machine refuses: {said[-1] if said else 'no reason given'}"
                    )
        except BaseException:
            await made.close()
            raise
        return made

    async def run(self, code: str) -> str:
        """Run code; return its output and the value of a final expression as text.

        Notes in brackets say if output was cut off or if the session has ended. Raises
        ConnectionError if the sandbox is gone.
        """
        if not isinstance(code, str):
            raise ValueError(f"code must be text, found {type(code).__name__}")
        answer = await self._send_request({"code": code, "seconds": self.limits.seconds})
        said = [answer["text"].rstrip("\n")] if answer["text"] else []
        if answer["dropped"]:
            said.append(f"[output cut: {answer['dropped']} more bytes]")
        if answer["what"]:
            said.append(f"[the code {answer['what']}; its names are gone, a new session begins]")
        return "\n".join(said)

    async def reset(self) -> None:
        """Restart the session for another rollout; its variables, files and threads are discarded."""
        await self._send_request({"reset": True})

    async def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        with contextlib.suppress(OSError):
            os.rmdir(self.root)

    async def _send_request(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        if self.is_broken:
            raise ConnectionError("the sandbox is gone")
        self.is_broken = True
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        async with asyncio.timeout(self.limits.seconds + START_SECONDS):
            line = await self.process.stdout.readline()
        if not line:
            raise ConnectionError("the sandbox is gone")
        self.is_broken = False
        found: dict[str, Any] = json.loads(line)
        return found


class Sandboxes:
    """A pool of at most `most` sandboxes, reset between rollouts."""

    def __init__(self, limits: Limits | None = None, most: int = 32) -> None:
        self.limits = limits or Limits()
        self.most = most
        self._free: list[Sandbox] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    async def take(self) -> Sandbox:
        # Sandboxes of an earlier `asyncio.run` have ended with it.
        if self._loop is not asyncio.get_running_loop():
            self._loop = asyncio.get_running_loop()
            self._free = []
            self._room = asyncio.Semaphore(self.most)
        await self._room.acquire()
        try:
            return self._free.pop() if self._free else await Sandbox.start(self.limits)
        except BaseException:
            self._room.release()
            raise

    async def give_back(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.reset()
            self._free.append(sandbox)
        except BaseException as error:
            await sandbox.close()
            if not isinstance(error, ConnectionError | TimeoutError):
                raise
        finally:
            self._room.release()

    async def close(self) -> None:
        free = self._free
        self._free = []
        for sandbox in free:
            await sandbox.close()
