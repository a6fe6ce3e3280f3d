"""Compile Triton kernels ahead of use, several at once; a first launch takes 0.3 to 2 s each.

    with together():          # every launch inside compiles, none runs
        rehearsal             # launches on tensors of the right shapes; their values are meaningless

For half of this time, compilation holds the GIL. Kernels that Triton's cache directory lacks are
therefore compiled by other processes, which write to the cache. Two threads of this process compile
too, because they can begin at once:

    a launch ─► a thread ─► is it in the cache? ─► a process, or the thread itself ─► loaded from the cache

Compiled code stays in the cache: later runs load it quickly and start no process.
"""

import contextvars
import hashlib
import importlib
import importlib.metadata
import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from hone.kernels import gpu
from hone.machine import usable_cores

THREADS, PROCESSES = 16, 8  # at most; processes are half as many as cores
ALONE = 2  # threads that compile themselves
WORTH_SAYING = 1.0  # seconds
DONE = b"+"  # what a process says when it has started, and after each kernel
log = logging.getLogger("hone")


@contextmanager
def together() -> Iterator[None]:
    """Context manager in which kernel launches only compile; it exits when all kernels are
    compiled.

    No other code may launch kernels meanwhile.
    """
    if not gpu.IS_AVAILABLE or not torch.cuda.is_available():
        yield
        return
    import triton
    from triton.runtime.jit import JITFunction

    start, run = time.perf_counter(), JITFunction.run
    # A thread that loads kernels needs the device's context
    in_context = partial(torch.zeros, 1, device="cuda")
    functions = set[Any]()
    try:
        with (
            ThreadPoolExecutor(min(THREADS, usable_cores()), initializer=in_context) as pool,
            Compilers(min(PROCESSES, usable_cores() // 2)) as compilers,
            triton.AsyncCompileMode(pool) as compiling,
        ):
            # AsyncCompileMode holds for a contextvars context, and autograd runs backward in another thread.
            context = contextvars.copy_context()

            def loaded(*args: Any, **options: Any) -> Any:
                kernel = compilers.compile(*args, **options)
                # Makes what launches it, for which Triton may call a C compiler, and loads it
                _ = kernel.run
                return kernel

            def only_compile(
                function: Any, *args: Any, grid: Any, warmup: bool, **options: Any
            ) -> Any:
                # Of a function that is new this sets `compile`
                _ = function.device_caches[torch.cuda.current_device()]
                function.compile = loaded
                functions.add(function)
                return context.copy().run(run, function, *args, grid=grid, warmup=True, **options)

            JITFunction.run = only_compile
            try:
                yield
            finally:
                JITFunction.run = run
    finally:  # only now: kernels that are queued look up `compile` when a thread takes them
        for function in functions:
            function.compile = triton.compile
    seconds = time.perf_counter() - start
    if seconds > WORTH_SAYING:
        log.info(
            "Compiled %d kernels in %.1f s; Triton keeps them",
            len(compiling.future_kernels),
            seconds,
        )


class KeptKernels:
    """Note in Triton's cache directory that it has all kernels of a rehearsal.

    Kernels that are kept load in some hundredths of a second each, so that a start may leave the
    rehearsal out. The note goes with the directory.

    Args:
        subject: what was rehearsed: the model's shape, sizes of the engine.
    """

    def __init__(self, subject: str) -> None:
        here = Path(__file__).parent
        sources = [path.read_bytes() for path in sorted(here.glob("*.py"))]
        is_gpu = torch.cuda.is_available()
        card = (torch.cuda.get_device_name(), torch.cuda.get_device_capability()) if is_gpu else ()
        versions = [torch.__version__, *map(str, card), _find_version("triton")]
        digest = hashlib.sha256(b"".join(sources) + "\n".join([subject, *versions]).encode())
        home = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
        self.file = Path(home) / f"hone-{digest.hexdigest()[:32]}.kept"

    def are_there(self) -> bool:
        return self.file.is_file()

    def note(self) -> None:
        """Note that all kernels are kept; without a place for the note, the next start rehearses."""
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.touch()


def _find_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


class Compilers:
    """Replacement for Triton's `compile` that many threads call and that uses several processes.

    Up to `processes` processes start with the first kernel that Triton's cache lacks and end with
    the `with` block.
    """

    def __init__(self, processes: int) -> None:
        self.wanted, self.lock = processes, threading.Lock()
        self.started: list[tuple[subprocess.Popen[bytes], threading.Thread]] = []
        self.idle: queue.SimpleQueue[Callable[[bytes], None]] = queue.SimpleQueue()
        for _ in range(ALONE):
            self.idle.put(lambda job: None)

    def __enter__(self) -> "Compilers":
        return self

    def __exit__(self, *_: object) -> None:
        for process, joining in self.started:
            process.kill()
            joining.join()
            process.communicate()

    def compile(
        self, src: Any, target: Any, options: dict[str, Any], _env_vars: dict[str, str]
    ) -> Any:
        import triton

        here = partial(triton.compile, src, target=target, options=options, _env_vars=_env_vars)
        if _is_kept(src, target, options, _env_vars):
            return here()
        self._start()
        elsewhere, function = self.idle.get(), src.fn
        job = (
            type(src),
            function.module,
            function.fn.__qualname__,
            src.signature,
            src.constants,
            src.attrs,
        )
        try:
            elsewhere(pickle.dumps((job, target, options, _env_vars)))
            return here()
        finally:
            self.idle.put(elsewhere)

    def _start(self) -> None:
        with self.lock:
            wanted, self.wanted = self.wanted, 0
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "CUDA_VISIBLE_DEVICES": "",
        }
        for _ in range(wanted):
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "hone.kernels.gpu.compiling"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=environment,
                    start_new_session=True,
                )
            except OSError:  # no more processes may be started: it takes longer
                return
            joining = threading.Thread(target=self._join, args=(process,), daemon=True)
            self.started.append((process, joining))
            joining.start()

    def _join(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None and process.stdout is not None
        if process.stdout.read(1) == DONE:
            self.idle.put(partial(_ask, process.stdin, process.stdout))


def _is_kept(src: Any, target: Any, options: dict[str, Any], env_vars: dict[str, str]) -> bool:
    """Return True if Triton's cache has this kernel."""
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import get_cache_key, get_cache_manager

    backend = make_backend(target)
    key = get_cache_key(src, backend, backend.parse_options(dict(options)), env_vars)
    name = f"{src.name[:150]}.json"
    return name in (
        get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(name) or {}
    )


def _ask(to: IO[bytes], back: IO[bytes], job: bytes) -> None:
    """Send a compile job to a worker process; return when the job has ended or the process has
    exited.
    """
    try:
        to.write(job)
        to.flush()
        back.read(1)
    except (OSError, ValueError):
        return  # it has ended; who asked compiles


def serve(jobs: IO[bytes], results: IO[bytes]) -> None:
    """Compile the kernels requested through the pipe `jobs` until the pipe is closed.

    Writes DONE to `results` once ready for the first kernel, and after each kernel.
    """
    import triton

    while True:
        results.write(DONE)
        results.flush()
        try:
            (kind, module, name, *source), target, options, env_vars = pickle.load(jobs)
        except EOFError:
            return
        with suppress(Exception):  # who asked compiles once more, and says what is wrong
            function = getattr(importlib.import_module(module), name)
            triton.compile(
                kind(function, *source), target=target, options=options, _env_vars=env_vars
            )


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # nothing else is written to them
        serve(sys.stdin.buffer, answers)
