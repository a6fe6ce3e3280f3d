"""Bind a server's address before weights are loaded; if it is in use, report by which process."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to the address.

    Raises ValueError if the address is unavailable, naming the process that holds it if known.
    """
    # The protocol is explicit: asyncio disables Nagle's algorithm, which costs 40 ms per answer,
    # only for TCP.
    sock = socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ValueError(
            f"server.port: cannot listen on {host}:{port}: {error.strerror}{describe_port_holder(port)}; "
            "stop what listens there or choose another with --server.port (of rl: --inference.server.port; of vf-rl: "
            "--trainer.args.vllm-server-port)"
        ) from None
    return sock


def describe_port_holder(port: int) -> str:
    """Return which process listens on a port, as " by process 42 (python -m …)"; "" if unknown."""
    sockets = {f"socket:[{inode}]" for inode in find_listening_sockets(port)}
    for folder in Path("/proc").glob("[0-9]*") if sockets else ():
        try:
            if any(os.readlink(file) in sockets for file in (folder / "fd").iterdir()):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                shown = b" ".join(words).decode(errors="replace").strip()[:80]
                return f" by process {folder.name} ({''.join(c if c.isprintable() else '?' for c in shown)})"
        except OSError:  # another user's process, or gone
            continue
    return ""


def find_listening_sockets(port: int) -> Iterator[str]:
    """Return the inodes of sockets that listen on a port."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if int(words[1].rpartition(":")[2], 16) == port and words[3] == "0A":
                yield words[9]
