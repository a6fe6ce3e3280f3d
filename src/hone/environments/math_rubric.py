"""Compare mathematical expressions with math-verify, in processes that are killed on a timeout.

Some expressions, such as towers of powers, take minutes to evaluate in C code that a Python
exception cannot interrupt.
"""

import asyncio
import contextlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from typing import Any

from hone import machine
from hone.environments.parsers import Completion, MaybeThinkParser, Parser, extract_boxed_answer
from hone.environments.rubric import RewardFunction, Rubric

WORKER = """
import json, sys, warnings
warnings.simplefilter("ignore")
import logging
logging.disable()
from math_verify import parse, verify
print("ready", flush=True)
for line in sys.stdin:
    gold, answer = json.loads(line)
    try:
        same = bool(verify(parse(f"\\\\boxed{{{gold}}}", parsing_timeout=None),
                           parse(f"\\\\boxed{{{answer}}}", parsing_timeout=None), timeout_seconds=None))
    except Exception:
        same = False
    print(json.dumps(same), flush=True)
"""
MOST_WORKERS = 4
START_SECONDS = 60.0  # seconds in which a process has to import what it needs


class MathRubric(Rubric):
    r"""Reward 1 if math-verify finds the answer equal to the example's `answer`.

    Args:
        parser: extracts the answer; by default the content of the last `\boxed{}` after any
            thinking.
        timeout_seconds: a comparison that takes longer counts as different.
        max_workers: processes that compare in parallel; by default one per core, up to four.
    """

    def __init__(
        self,
        funcs: Sequence[RewardFunction] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
        timeout_seconds: float = 5.0,
        max_workers: int | None = None,
        **others: Any,
    ) -> None:
        super().__init__(
            funcs, weights, parser or MaybeThinkParser(extract_fn=extract_boxed_answer), **others
        )
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError('MathRubric needs the module math_verify: install "hone-rl[math]"')
        self.comparer = Comparer(
            timeout_seconds, max_workers or min(MOST_WORKERS, machine.usable_cores())
        )
        self.add_reward_func(self.correct_answer)

    async def correct_answer(self, parser: Parser, completion: Completion, answer: str) -> float:
        given = parser.parse_answer(completion) or ""
        return float(await self.comparer.is_equal(str(answer), given))


class Comparer:
    """Pool of processes that compare expressions; they exit with this process.

    A comparison has `timeout` seconds from its start in a process; starting a process and waiting
    for a free one do not count. A timeout kills the process; another is started on demand.
    """

    def __init__(self, timeout: float, workers: int = 1) -> None:
        self.timeout = timeout
        self.workers = workers
        self._loop: asyncio.AbstractEventLoop | None = None
        self._free: asyncio.LifoQueue[asyncio.subprocess.Process | None]

    async def is_equal(self, gold: str, given: str) -> bool:
        """Return True if two expressions are mathematically equal, False on a timeout."""
        if not given.strip():
            return False
        if gold.strip() == given.strip():
            return True
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # of an earlier `asyncio.run`, with its processes
            self._loop = loop
            self._free = asyncio.LifoQueue()
            for _ in range(self.workers):
                self._free.put_nowait(None)
        process = await self._free.get()
        try:
            if process is None or process.returncode is not None:
                process = await self._start_process()
            assert process.stdin is not None and process.stdout is not None
            async with asyncio.timeout(self.timeout):
                process.stdin.write(json.dumps([gold, given]).encode() + b"\n")
                line = await process.stdout.readline()
            return bool(json.loads(line or b"false"))
        except BaseException as error:
            await self._end_process(process)
            process = None
            if isinstance(error, TimeoutError | OSError | ValueError):
                return False
            raise
        finally:
            self._free.put_nowait(process)

    async def _start_process(self) -> asyncio.subprocess.Process:
        """Return a process that is ready to compare. Raises RuntimeError if it cannot start."""
        pipe = asyncio.subprocess.PIPE
        words = (sys.executable, "-P", "-c", WORKER)
        silent = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            *words, stdin=pipe, stdout=pipe, stderr=silent
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_SECONDS):
                is_ready = bool(await process.stdout.readline())
        except TimeoutError:
            is_ready = False
        except BaseException:
            await self._end_process(process)
            raise
        if not is_ready:
            await self._end_process(process)
            raise RuntimeError(
                f"the process that compares answers by math_verify did not start within {START_SECONDS:.0f} s"
            )
        return process

    async def _end_process(self, process: asyncio.subprocess.Process | None) -> None:
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
