"""Heartbeats of processes, and waits for other processes with a deadline and log messages."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hone import machine

T = TypeVar("T")
BEAT_SECONDS, REMIND_SECONDS, POLL_SECONDS = 0.5, 30.0, 0.004  # seconds
# Seconds of silence after which a process does not come back: a suspended machine has woken by
# then.
DEATH_SECONDS = 120.0


class Beside:
    """Base class of background threads that run while entered as a context manager.

    `_run_thread` must return once `_stop` is set, which happens on exit.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run_thread, name=type(self).__name__.lower(), daemon=True
        )

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5.0)

    def _run_thread(self) -> None:
        raise NotImplementedError


class Pulse(Beside):
    """Heartbeat of this process: a thread that changes a file twice a second."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.path.unlink(missing_ok=True)

    def _run_thread(self) -> None:
        count = 0
        while True:
            count += 1
            partial = self.path.with_suffix(".partial")
            with contextlib.suppress(OSError):  # a network file system may fail once
                partial.write_text(f"{os.getpid()} {count}")
                partial.replace(self.path)
            if self._stop.wait(BEAT_SECONDS):
                return


class PulseOf:
    """Heartbeat of another process, read from its file.

    Beats are detected by changes of the file's contents, not by time stamps, since the clocks of
    two machines may differ.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last = self._read_pulse()
        self._changed: float | None = None  # when a change was last seen
        self._looked = self._since = time.monotonic()

    def is_beating(self) -> bool:
        """Return True if the file changed within `silence_seconds`; False before a first change."""
        now = time.monotonic()
        if now - self._looked > BEAT_SECONDS / 2:
            self._looked, value = now, self._read_pulse()
            if value is not None and value != self._last:
                self._last = value
                self._changed = now
        return self._changed is not None and now - self._changed < machine.silence_seconds()

    def is_silent(self) -> bool:
        """Return True if the heartbeat file has not changed for `machine.silence_seconds`.

        The process may still come back.
        """
        return (
            not self.is_beating()
            and time.monotonic() - (self._changed or self._since) > machine.silence_seconds()
        )

    def is_dead(self) -> bool:
        """Return True if silent for DEATH_SECONDS: the process will not come back."""
        return (
            self.is_silent() and time.monotonic() - (self._changed or self._since) > DEATH_SECONDS
        )

    def _read_pulse(self) -> str | None:
        try:
            return self.path.read_text()
        except OSError:
            return None


class Watch(Beside):
    """A thread that logs when a peer's heartbeat stops and when it returns.

    Peers without any heartbeat so far are not reported.
    """

    def __init__(self, peers: dict[str, Path], log: logging.Logger) -> None:
        super().__init__()
        self.peers = {who: PulseOf(path) for who, path in peers.items()}
        self.log = log

    def _run_thread(self) -> None:
        heard = set[str]()
        missed = set[str]()
        while not self._stop.wait(BEAT_SECONDS):
            for who, pulse in self.peers.items():
                if pulse.is_beating():
                    if who in missed:
                        self.log.info("The %s is back", who)
                    heard.add(who)
                    missed.discard(who)
                elif not pulse.path.exists():  # it has ended normally
                    heard.discard(who)
                elif who in heard and who not in missed:
                    missed.add(who)
                    self.log.warning(
                        "No heartbeat from the %s for %.0f s: has it died, or been stopped?",
                        who,
                        machine.silence_seconds(),
                    )


class Wait:
    """A wait with a deadline. Logs twice a minute what it waits for."""

    def __init__(self, what: str, seconds: float, log: logging.Logger, hint: str = "") -> None:
        self.what = what
        self.seconds = seconds
        self.log = log
        self.hint = hint
        self.start = self.reminded = self.second = time.monotonic()

    def is_check_due(self) -> bool:
        """Return True about once a second, when costly checks are due.

        Raises ConnectionError at the deadline.
        """
        now = time.monotonic()
        if now - self.start > self.seconds:
            raise ConnectionError(
                f"waited {self.seconds:.0f} s for {self.what}{self.hint and '; ' + self.hint}"
            )
        if now - self.reminded > REMIND_SECONDS:
            self.reminded = now
            self.log.info("Waiting for %s (%.0f s so far)", self.what, now - self.start)
        is_due = now - self.second > 1.0
        self.second = now if is_due else self.second
        return is_due


def wait_for(
    wait: Wait, ready: Callable[[], T | None], each_second: Callable[[], None] = lambda: None
) -> T:
    """Return the result of `ready` once it is not None. `each_second` may raise to end the wait."""
    while True:
        value = ready()
        if value is not None:
            return value
        if wait.is_check_due():
            each_second()
        time.sleep(POLL_SECONDS)
