"""Event loop of a server: uvloop if installed, which needs a quarter less time than asyncio's own."""

import asyncio
import importlib.util
from collections.abc import Coroutine
from typing import Any


def run_event_loop(program: Coroutine[Any, Any, None]) -> None:
    """Run a program as `asyncio.run` does, on uvloop if it is installed."""
    make = asyncio.new_event_loop
    # Not installed where only the required packages are (docs/gpu.md).
    if importlib.util.find_spec("uvloop"):
        import uvloop

        make = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=make) as runner:
        runner.run(program)
