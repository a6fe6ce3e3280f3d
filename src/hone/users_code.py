"""Call code of users (rewards, tools, environments, callbacks) so that it cannot end the process.

`exit()` raises SystemExit, which is no Exception: asyncio hands it on to whoever runs the loop, and a command would end
with exit code 0 in the middle of its work. In `contained` it becomes an error like any other that the code raises.
"""

import contextlib
from asyncio import CancelledError
from collections.abc import Iterator

from hone import leaving


class ExitInUserCode(RuntimeError):
    """Code of a user's wanted to end the process."""


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Turn what is no Exception into ExitInUserCode, but for a cancelled task and a real Ctrl-C."""
    try:
        yield
    except (Exception, CancelledError):
        raise
    except KeyboardInterrupt:
        if leaving.was_interrupted():
            raise
        raise ExitInUserCode("it raised KeyboardInterrupt") from None
    except SystemExit as error:
        raise ExitInUserCode(f"it called exit() (SystemExit: {error.code})") from error
    except BaseException as error:
        raise ExitInUserCode(f"it raised {type(error).__name__}: {error}") from error
