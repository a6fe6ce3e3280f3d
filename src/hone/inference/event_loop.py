"""The event loop of a server: uvloop's where it is installed, which takes a quarter less of its time than Python's."""

import asyncio
import importlib.util
from collections.abc import Coroutine
from typing import Any


def run_event_loop(program: Coroutine[Any, Any, None]) -> None:
    """As `asyncio.run`."""
    make = asyncio.new_event_loop
    if importlib.util.find_spec(
        "uvloop"
    ):  # not where only the few packages are that are needed (docs/gpu.md)
        import uvloop

        make = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=make) as runner:
        runner.run(program)
