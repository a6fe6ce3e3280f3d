"""Let clients on this machine detect that a server is starting, by a lock on a file.

The file is named after the server's port. The server holds the lock until it listens; the lock ends
with the server's process, however that ends. A file without a lock therefore means nothing.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: clients there only see servers that listen
    fcntl = None  # type: ignore[assignment]


def _lock_path(port: int) -> Path:
    user = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir()) / f"hone-{user}-starting-{port}.lock"


@contextlib.contextmanager
def announce_start(port: int) -> Iterator[None]:
    """Context manager: make `is_starting(port)` True in other processes while the block runs."""
    with contextlib.ExitStack() as stack:
        if fcntl is not None:
            path = _lock_path(port)
            with contextlib.suppress(OSError):  # a hint for clients; the server works without it
                file = stack.enter_context(path.open("w"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                stack.callback(path.unlink, missing_ok=True)
        yield


def is_starting(port: int) -> bool:
    """Return True if a Hone server of this user is starting on the port."""
    if fcntl is None:
        return False
    try:
        with _lock_path(port).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
