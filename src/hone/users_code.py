"""Call users' code (rewards, tools, environments, callbacks) without letting it end the process.

`exit()` raises SystemExit, which is not a subclass of Exception: asyncio passes it on to whoever
runs the loop, and a command would end with exit code 0 in the middle of its work. Within `with
CONTAINED:` it becomes an ordinary error.
"""

from asyncio import CancelledError

from hone import preemption


class ExitInUserCode(RuntimeError):
    """User code tried to end the process."""


class _Contained:
    """Context manager that turns SystemExit and other non-Exception errors into ExitInUserCode.

    Subclasses of Exception, asyncio's CancelledError and a real Ctrl-C pass unchanged.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if error is None or isinstance(error, (Exception, CancelledError)):
            return
        if isinstance(error, KeyboardInterrupt):
            if not preemption.was_interrupted():
                raise ExitInUserCode("it raised KeyboardInterrupt") from error
        elif isinstance(error, SystemExit):
            raise ExitInUserCode(f"it called exit() (SystemExit: {error.code})") from error
        else:
            raise ExitInUserCode(f"it raised {type(error).__name__}: {error}") from error


# Reused as `with CONTAINED:`, since thousands of rewards per second are computed in it.
CONTAINED = _Contained()
