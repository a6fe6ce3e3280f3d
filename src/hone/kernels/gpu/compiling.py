"""Kernels compiled before they are needed, several at once. Triton compiles one at its first launch: 0.3 to 2 s each.

    with together():          # every launch inside compiles, none runs
        what will be done     # on memory of the right shapes; the numbers that come out mean nothing

Compiled code is kept in Triton's cache directory, so that this takes a moment from the second time on.
"""

import contextvars
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from hone.kernels import gpu

THREADS = 16
WORTH_SAYING = 1.0  # seconds
log = logging.getLogger("hone")


@contextmanager
def together() -> Iterator[None]:
    """Ends when all is compiled. Nothing else may launch kernels meanwhile."""
    if not gpu.IS_AVAILABLE or not torch.cuda.is_available():
        yield
        return
    import triton
    from triton.runtime.jit import JITFunction

    start, run = time.perf_counter(), JITFunction.run
    in_context = partial(torch.zeros, 1, device="cuda")  # a thread that loads kernels needs the device's context
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), initializer=in_context) as pool:
        with triton.AsyncCompileMode(pool) as compiling:
            # AsyncCompileMode holds for a contextvars context, and autograd runs backward in another thread.
            context = contextvars.copy_context()

            def only_compile(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
                return context.copy().run(run, function, *args, grid=grid, warmup=True, **options)

            JITFunction.run = only_compile
            try:
                yield
            finally:
                JITFunction.run = run
        # Reading `run` makes what launches a kernel, for which Triton may call a C compiler, and loads it.
        list(pool.map(lambda kernel: kernel.result().run, compiling.future_kernels.values()))
    seconds = time.perf_counter() - start
    if seconds > WORTH_SAYING:
        log.info("Compiled %d kernels in %.1f s; Triton keeps them", len(compiling.future_kernels), seconds)
