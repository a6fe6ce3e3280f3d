"""Whether two mathematical expressions mean the same: math-verify, in a process that is killed when it takes too long.

It may compute for minutes on what a model wrote (towers of powers), in C, where no exception reaches it.
"""

import asyncio
import contextlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from typing import Any

from hone.environments.parsers import Completion, MaybeThinkParser, Parser, extract_boxed_answer
from hone.environments.rubric import RewardFunction, Rubric

WORKER = """
import json, sys, warnings
warnings.simplefilter("ignore")
import logging
logging.disable()
from math_verify import parse, verify
for line in sys.stdin:
    gold, answer = json.loads(line)
    try:
        same = bool(verify(parse(f"\\\\boxed{{{gold}}}", parsing_timeout=None),
                           parse(f"\\\\boxed{{{answer}}}", parsing_timeout=None), timeout_seconds=None))
    except Exception:
        same = False
    print(json.dumps(same), flush=True)
"""
START = 60.0  # seconds that the process may take to import what it needs


class MathRubric(Rubric):
    """Reward 1 for an answer that equals `answer` mathematically, as math-verify sees it.

    The answer is what `parser` finds: after any thinking, inside `\\boxed{}`. A comparison that takes longer than
    `timeout_seconds` counts as different.
    """

    def __init__(
        self,
        funcs: Sequence[RewardFunction] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
        timeout_seconds: float = 5.0,
        max_workers: int = 1,
        **others: Any,
    ) -> None:
        super().__init__(funcs, weights, parser or MaybeThinkParser(extract_fn=extract_boxed_answer), **others)
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError('MathRubric needs the module math_verify: install "hone-rl[math]"')
        self.comparer = Comparer(timeout_seconds)
        self.add_reward_func(self.correct_answer)

    async def correct_answer(self, parser: Parser, completion: Completion, answer: str) -> float:
        given = parser.parse_answer(completion) or ""
        return float(await self.comparer.same(str(answer), given))


class Comparer:
    """One process, asked one question at a time; it ends with this one."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.process: asyncio.subprocess.Process | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def same(self, gold: str, given: str) -> bool:
        if not given.strip():
            return False
        if gold.strip() == given.strip():
            return True
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # that of an earlier `asyncio.run`, with its process
            self._loop, self.process, self._turn = loop, None, asyncio.Lock()
        async with self._turn:
            is_new = self.process is None or self.process.returncode is not None
            if is_new:
                pipe, words = asyncio.subprocess.PIPE, (sys.executable, "-c", WORKER)
                silent = asyncio.subprocess.DEVNULL
                self.process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=silent)
            assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
            try:
                async with asyncio.timeout(self.timeout + START * is_new):
                    self.process.stdin.write(json.dumps([gold, given]).encode() + b"\n")
                    line = await self.process.stdout.readline()
                return bool(json.loads(line or b"false"))
            except BaseException as error:
                with contextlib.suppress(ProcessLookupError):
                    self.process.kill()
                await self.process.wait()
                if isinstance(error, TimeoutError | OSError):
                    return False
                raise
