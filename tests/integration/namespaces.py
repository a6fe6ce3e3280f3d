"""Nodes on one machine: network namespaces with addresses of their own, joined by a bridge. Needs root and iproute2."""

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

COUNT = itertools.count()


def is_possible() -> bool:
    if os.geteuid() != 0 or not shutil.which("ip"):
        return False
    name = f"hone-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made


class Nodes:
    """Use as a context manager. `names[i]` has the address `address(i)`; all know each other's names, and `others`."""

    def __init__(
        self, names: list[str], net: str = "10.78.3", others: Mapping[str, str] | None = None
    ) -> None:
        self.names, self.net, self.others = names, net, dict(others or {})
        number = next(COUNT)  # the kernel may still be taking down what had the names before
        self.bridge = f"hbr{os.getpid() % 100000}n{number}"
        self.spaces = [f"hone-{os.getpid()}-{number}-{name}" for name in names]

    def address(self, i: int) -> str:
        return f"{self.net}.{10 + i}"

    def words(self, i: int) -> list[str]:
        """What runs a command on a node, under its hostname and with mounts of its own."""
        return [
            "ip",
            "netns",
            "exec",
            self.spaces[i],
            "unshare",
            "-u",
            "bash",
            "-c",
            'hostname "$0"; exec "$@"',
            self.names[i],
        ]

    def link(self, i: int, state: str) -> None:
        """`down` cuts a node off, `up` mends that."""
        self._ip("-n", self.spaces[i], "link", "set", "eth0", state)

    def __enter__(self) -> "Nodes":
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        self._ip("link", "add", self.bridge, "type", "bridge")
        self._ip("addr", "add", f"{self.net}.1/24", "dev", self.bridge)
        self._ip("link", "set", self.bridge, "up")
        hosts = [
            "127.0.0.1 localhost",
            *(f"{self.address(i)} {name}" for i, name in enumerate(self.names)),
        ]
        hosts += [f"{address} {name}" for name, address in self.others.items()]
        for i, space in enumerate(self.spaces):
            self._ip("netns", "add", space)
            outer = f"{self.bridge}v{i}"
            self._ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            self._ip("link", "set", outer, "master", self.bridge, "up")
            self._ip("-n", space, "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
            self._ip("-n", space, "link", "set", "lo", "up")
            self._ip("-n", space, "link", "set", "eth0", "up")
            place = Path("/etc/netns") / space
            place.mkdir(parents=True, exist_ok=True)
            (place / "hosts").write_text("\n".join(hosts) + "\n")

    def __exit__(self, *_: object) -> None:
        for i, space in enumerate(self.spaces):
            self._ip("link", "del", f"{self.bridge}v{i}", ok=False)
            self._ip("netns", "del", space, ok=False)
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)
        self._ip("link", "del", self.bridge, ok=False)
        with contextlib.suppress(OSError):
            Path("/etc/netns").rmdir()

    def _ip(self, *words: str, ok: bool = True) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True)
        assert done.returncode == 0 or not ok, f"ip {' '.join(words)}: {done.stderr}"
