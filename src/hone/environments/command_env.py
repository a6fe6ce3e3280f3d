"""Rollouts of any program that speaks OpenAI's chat API: an agent, started once for each rollout.

example ─► folder with its files ─► command (OPENAI_BASE_URL) ─► PolicyEndpoint ─► client.chat
                                       └─ ends, or is ended ─► reward_command ─► reward
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from hone.environments.environment import Environment, ModelClient
from hone.records import Example, Message, Rollout, Sampling

BUBBLEWRAP = "bwrap"
# Paths of the system that a contained program can read.
SYSTEM_PATHS = (
    "/usr",
    "/bin",
    "/lib",
    "/lib64",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ssl",
)
KEPT_OUTPUT_BYTES = 1 << 16  # of the end of a program's output
POLL_SECONDS = 0.02
TERM_SECONDS = 2.0  # from SIGTERM to SIGKILL
FOLDER = "{folder}"  # in words of a command: the rollout's folder


@dataclass(frozen=True)
class Ended:
    """How a program ended: its exit code, the limit that ended it, the end of its output."""

    code: int
    limit: str
    output: str


class CommandEnv(Environment):
    """Environment whose rollouts are runs of a program that asks the policy through OpenAI's API.

    The program runs in a folder of its own, with the example's messages as JSON on its standard
    input ({"messages": […]}), and OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL set. Its requests
    may stream and may have tools. Each answer is a turn that is trained on. A row's `info` may have
    `files` ({path: text}), `folder` (a directory that is copied), and `reward_files`, which are
    written over what the program has left before the reward is computed, such as tests.

    Args:
        command: the program and its arguments; "{folder}" is the rollout's folder.
        reward_command: run in the folder when the program has ended. The reward is the number on the
            last line of its output, else 1 if it exits with 0, else 0. It is added to the rubric's,
            whose functions find `folder`, `output` and `exit_code` in the state.
        contain: "bubblewrap" runs both programs with the folder as the only place that they can
            write; "none" runs them as they are; a list is put in front of them, such as
            ["podman", "run", …].
        readable: further paths that contained programs can read.
        seconds: longest run of the program.
        reward_seconds: longest run of the reward command.
        output_bytes: most output of each; a program that writes more is ended.
        at_once: most programs at once.

    Raises ValueError for an empty command, for a row with a file outside of its folder, and if
    bubblewrap is wanted and is not installed.
    """

    def __init__(
        self,
        command: Sequence[str],
        reward_command: Sequence[str] | None = None,
        contain: str | Sequence[str] = "bubblewrap",
        readable: Sequence[str | Path] = (),
        seconds: float = 300.0,
        reward_seconds: float = 60.0,
        output_bytes: int = 1 << 20,
        at_once: int = 32,
        **others: Any,
    ) -> None:
        super().__init__(**others)
        if isinstance(command, str) or not command:
            raise ValueError("command: a list of words is wanted, such as ['python3', 'agent.py']")
        self.command = [_make_absolute(word) for word in command]
        self.reward_command = [_make_absolute(word) for word in reward_command or ()]
        self.contain = contain
        self.readable = [str(Path(path).absolute()) for path in readable]
        self.seconds = seconds
        self.reward_seconds = reward_seconds
        self.output_bytes = output_bytes
        self.at_once = at_once
        self._check_containment()
        for example in [*self.get_dataset(), *self.get_eval_dataset()]:
            written = (example.info.get(key) or {} for key in ("files", "reward_files"))
            for name in chain.from_iterable(written):
                parts = Path(name).parts
                if Path(name).is_absolute() or ".." in parts or not parts:
                    raise ValueError(
                        f"row {example.id}: the file {name!r} is outside of its folder"
                    )
        # Imported late: a web server that other environments do not need.
        from hone.environments.protocols.policy_endpoint import PolicyEndpoint

        self.endpoint = PolicyEndpoint()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def rollout(self, client: ModelClient, example: Example, sampling: Sampling) -> Rollout:
        async with self._get_room():
            folder = Path(tempfile.mkdtemp(prefix="hone-agent-"))
            try:
                return await self._run_in(folder, client, example, sampling)
            finally:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def close(self) -> None:
        await self.endpoint.close()

    async def _run_in(
        self, folder: Path, client: ModelClient, example: Example, sampling: Sampling
    ) -> Rollout:
        info = example.info
        await asyncio.to_thread(_write_files, folder, info.get("folder"), info.get("files"))
        async with self.endpoint.open_access(client, sampling) as access:
            variables = {
                "OPENAI_BASE_URL": access.url,
                "OPENAI_API_KEY": "none",
                "OPENAI_MODEL": "policy",
            }
            task = json.dumps({"messages": example.prompt})
            ended = await self._run_program(self.command, folder, variables, self.seconds, task)
        if not access.turns:
            if access.failure is not None:
                raise access.failure
            raise RuntimeError(
                f"the command asked the model nothing and ended with {ended.limit or ended.code}: "
                f"{_last_line(ended.output)}"
            )
        stop = ended.limit or ("" if ended.code == 0 else f"exit_{ended.code}")
        messages = _continue(example, access.request)
        rollout = Rollout(example, list(access.turns), messages, stop=stop)
        rollout.messages.append(access.turns[-1].assistant_message)
        start = time.perf_counter()
        await asyncio.to_thread(_write_files, folder, None, info.get("reward_files"))
        state = {"folder": folder, "output": ended.output, "exit_code": ended.code}
        await self.score(rollout, state)
        if self.reward_command:
            rollout.reward += await self._compute_reward(folder)
        rollout.metrics["exit_code"] = float(ended.code)
        rollout.state = {"output": ended.output}
        rollout.seconds = access.seconds
        rollout.timings = {
            "model": access.model_seconds,
            "environment": access.seconds - access.model_seconds,
            "scoring": time.perf_counter() - start,
        }
        return rollout

    async def _compute_reward(self, folder: Path) -> float:
        ended = await self._run_program(
            self.reward_command, folder, {}, self.reward_seconds, "", has_errors=False
        )
        if ended.limit:
            return 0.0
        try:
            return float(_last_line(ended.output))  # not finite: the rollout fails
        except ValueError:
            return 1.0 if ended.code == 0 else 0.0

    async def _run_program(
        self,
        words: list[str],
        folder: Path,
        variables: dict[str, str],
        seconds: float,
        task: str,
        has_errors: bool = True,
    ) -> Ended:
        # Not this process's environment, which may hold keys.
        variables = {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "HOME": str(folder),
            "LANG": os.environ.get("LANG", "C.UTF-8"),
            **variables,
        }
        words = [*self._containing_words(folder), *words]
        return await run_limited(
            [word.replace(FOLDER, str(folder)) for word in words],
            folder,
            variables,
            task,
            seconds,
            self.output_bytes,
            has_errors,
        )

    def _check_containment(self) -> None:
        if self.contain == "bubblewrap" and shutil.which(BUBBLEWRAP) is None:
            raise ValueError(
                "a command may run what the model writes, and is contained by bubblewrap, which is not installed: "
                "install it (Debian: apt install bubblewrap), give contain = [words of a container], or allow it to "
                'run as it is: contain = "none"'
            )
        if isinstance(self.contain, str) and self.contain not in ("bubblewrap", "none"):
            raise ValueError(
                f"contain: {self.contain!r} is not one of bubblewrap, none, or a list of words"
            )

    def _containing_words(self, folder: Path) -> list[str]:
        if not isinstance(self.contain, str):
            return list(self.contain)
        if self.contain == "none":
            return []
        return bubblewrap_words(folder, [*self.readable, *self._program_files()])

    def _program_files(self) -> list[str]:
        """Return the files that the commands name, and the Python that runs Hone."""
        named = [word for word in [*self.command, *self.reward_command] if Path(word).is_absolute()]
        return [word for word in named if Path(word).exists()] + [sys.prefix, sys.base_prefix]

    def _get_room(self) -> asyncio.Semaphore:
        if self._loop is not asyncio.get_running_loop():
            self._loop = asyncio.get_running_loop()
            self._room = asyncio.Semaphore(self.at_once)
        return self._room


def bubblewrap_words(folder: Path, readable: Sequence[str]) -> list[str]:
    """Return the words that run a program which can write only below `folder`.

    It sees its own processes alone. The network stays, since the program asks the policy through it.
    """
    words = [BUBBLEWRAP, "--die-with-parent", "--new-session", "--unshare-pid", "--unshare-ipc"]
    # Root would keep its capabilities, by which it can mount.
    words += [
        "--cap-drop",
        "ALL",
        "--unshare-uts",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--tmpfs",
        "/tmp",
    ]
    for path in SYSTEM_PATHS:
        words += ["--ro-bind-try", path, path]
    for path in dict.fromkeys(readable):
        words += ["--ro-bind", path, path]
    return [*words, "--bind", str(folder), str(folder), "--chdir", str(folder), "--"]


async def run_limited(
    words: Sequence[str],
    folder: Path,
    variables: dict[str, str],
    task: str,
    seconds: float,
    output_bytes: int,
    has_errors: bool = True,
) -> Ended:
    """Run a program in a process group of its own; end the group at a limit, and when it has ended.

    Args:
        variables: its whole environment.
        task: text on its standard input.
        seconds: longest run; limit "timeout".
        output_bytes: most output; limit "output".
        has_errors: the output has standard error too, else it is discarded.

    Raises RuntimeError if it cannot be started.
    """
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            cwd=folder,
            env=variables,
            stdin=pipe,
            stdout=pipe,
            stderr=asyncio.subprocess.STDOUT if has_errors else asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise RuntimeError(f"{words[0]} cannot be started: {error.strerror}") from None
    output = _Output(output_bytes)
    reading = asyncio.create_task(output.read_from(process))
    waiting = asyncio.create_task(_wait_for_exit(process))
    feeding = asyncio.create_task(_feed(process, task))
    overflow = asyncio.create_task(output.is_too_long.wait())
    limit = ""
    try:
        async with asyncio.timeout(seconds):
            # Children may keep the output open when the program has ended.
            await asyncio.wait({waiting, overflow}, return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError:
        limit = "timeout"
    finally:
        await _end_group(process)
        # A child that has left the group may keep the output open for ever.
        await asyncio.wait({reading}, timeout=TERM_SECONDS)
        for one in (reading, waiting, feeding, overflow):
            one.cancel()
        process._transport.close()  # type: ignore[attr-defined]
    if output.is_too_long.is_set():
        limit = "output"
    return Ended(process.returncode or 0, limit, output.text)


class _Output:
    """The end of a program's output, which is read until it is closed."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.kept: deque[bytes] = deque()
        self.total = self.held = 0
        self.is_too_long = asyncio.Event()

    async def read_from(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while part := await process.stdout.read(1 << 16):
            self.kept.append(part)
            self.total += len(part)
            self.held += len(part)
            while len(self.kept) > 1 and self.held - len(self.kept[0]) >= KEPT_OUTPUT_BYTES:
                self.held -= len(self.kept.popleft())
            if self.total > self.most:
                self.is_too_long.set()

    @property
    def text(self) -> str:
        return b"".join(self.kept)[-KEPT_OUTPUT_BYTES:].decode(errors="replace")


async def _wait_for_exit(process: asyncio.subprocess.Process) -> None:
    """Wait until the program itself has ended; `process.wait` also waits for its output's end."""
    while process.returncode is None:
        await asyncio.sleep(POLL_SECONDS)


async def _feed(process: asyncio.subprocess.Process, text: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # it does not read its input
        process.stdin.write(text.encode())
        await process.stdin.drain()
    process.stdin.close()


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """End what is left of the program's process group, and wait for the program."""
    for number, wait_seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_wait_for_exit(process), wait_seconds)


def _write_files(folder: Path, source: str | None, files: dict[str, str] | None) -> None:
    """Copy a directory and write files, in place of what a program may have left there."""
    if source:
        shutil.copytree(source, folder, dirs_exist_ok=True)
    for name, text in (files or {}).items():
        parts = Path(name).parts
        for count in range(1, len(parts)):
            parent = folder.joinpath(*parts[:count])
            if not _is_real_folder(parent):
                parent.unlink(missing_ok=True)
                parent.mkdir()
        path = folder / name
        if _is_real_folder(path):
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)  # a link or a pipe too
        # Not through a link that a program puts there meanwhile.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o644), "w") as file:
            file.write(text)


def _is_real_folder(path: Path) -> bool:
    """Return True for a directory, but not for a link to one."""
    return path.is_dir() and not path.is_symlink()


def _continue(example: Example, request: list[Message]) -> list[Message]:
    """Return the messages of a request after the example's prompt."""
    messages = list(request)
    count = len(example.prompt)
    return messages[count:] if messages[:count] == example.prompt else messages


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1].strip()


def _make_absolute(word: str) -> str:
    """Return the absolute path of a word that is a file here, since programs run in other folders."""
    return str(Path(word).absolute()) if os.sep in word and Path(word).is_file() else word
