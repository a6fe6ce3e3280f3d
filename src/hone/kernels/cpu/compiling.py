"""Compile CPU kernels with numba ahead of use, several at once, and cache them.

    a kernel is needed ─► cached? ─ no ─► a separate process (`python -m hone.launch.kernels`)
                               │ yes          calls each kernel, which records its types (`note`)
                               ▼              compiles them, one per core (`compile_all`)
                          loaded, run  ◄──────┘

The cache is in the user's cache directory, keyed by a hash of these sources, instruction set,
processor, and versions of numba and Python: environments and clones with equal keys share it. If
code can be cached, a process runs only cached code, never code that it compiled itself: numba
optimizes the body of a parallel loop once more for the cached code, which may change the order of a
sum. Each kernel is called with only one type per argument, because numba's cache index is not safe
when two processes compile the same kernel.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib
import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone import machine
from hone.child_process import end_with_parent

COMPLETE = "complete"  # a file in the directory of kernels, when all are there
log = logging.getLogger("hone")
# A kernel's module and name, numba's types of its arguments
Call = tuple[str, str, tuple[Any, ...]]
_calls: dict[Call, None] | None = None  # while they are noted
_compiles_itself = False  # in a process that compiles for others


class Kept:
    """numba cache locator with Hone's own path; numba's locators depend on the path of the source."""

    directory = Path()  # set by `_numba`

    def __init__(self, line: int) -> None:
        self._line = line

    @classmethod
    def from_function(cls, function: Any, file: str) -> "Kept":
        return cls(function.__code__.co_firstlineno)

    def ensure_cache_path(self) -> None:
        """Do nothing: `_numba` creates the directory."""

    def get_cache_path(self) -> str:
        return str(self.directory)

    def get_source_stamp(self) -> str:
        return self.directory.name

    def get_disambiguator(self) -> str:
        return str(self._line)


@functools.cache
def _numba() -> tuple[Any, bool]:
    """Return numba, configured by environment variables, and whether compiled code can be cached."""
    here = Path(__file__).parent
    # Whose numbers are compiled in
    beside = [here.parent / name for name in ("row_state.py", "fingerprint_tables.py")]
    sources = b"".join(path.read_bytes() for path in [*sorted(here.glob("*.py")), *beside])
    machine.ensure_home()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hone" / "kernels"
    machine.keep_to_isa()  # also where a program imports this and has prepared nothing
    os.environ.setdefault("NUMBA_THREADING_LAYER_PRIORITY", "omp workqueue tbb")
    import numba
    from llvmlite.binding import get_host_cpu_name

    numba.config.reload_config()
    # Code for two processors in one directory, as of machines that share a home, ended in a segmentation fault.
    processor = os.environ.get("NUMBA_CPU_NAME") or get_host_cpu_name()
    built = f"numba{numba.__version__}-{sys.implementation.cache_tag}"
    Kept.directory = (
        cache
        / f"{hashlib.sha256(sources).hexdigest()[:12]}-{machine.instruction_set()}-{processor}-{built}"
    )
    try:
        Kept.directory.parent.mkdir(parents=True, exist_ok=True)
        Kept.directory.mkdir(mode=0o700, exist_ok=True)
        if problem := machine.written_by_others(Kept.directory):
            raise OSError(problem)
        # Numba asks for a place to write, also to read
        tempfile.TemporaryFile(dir=Kept.directory).close()
    except OSError as error:
        log.warning(
            "The CPU kernels are compiled for this run alone, which takes minutes: %s", error
        )
        return numba, False
    return numba, True


def keeps() -> bool:
    """Return True if compiled code can be cached."""
    return _numba()[1]


def words() -> str:
    return f"Compiling the CPU kernels into {Kept.directory}: a minute or two, once"


@functools.cache
def _prepare() -> None:
    """Ensure that the kernels are compiled, if they can be cached."""
    if keeps() and not _compiles_itself and not (Kept.directory / COMPLETE).exists():
        log.info(words())
        # The other parts of a run wait for this
        cores = os.environ.get(machine.CORES_VARIABLE) or str(machine.usable_cores())
        environment = os.environ | {"HONE_PARENT_PID": str(os.getpid()), "OMP_NUM_THREADS": cores}
        command = [sys.executable, "-P", "-m", "hone.launch.kernels"]
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode:
            log.warning(
                "Kernels are compiled when they are needed: %s",
                (done.stdout + done.stderr).strip()[-1000:],
            )


@dataclass
class _Noted:
    """A kernel that records the types of its calls and computes nothing."""

    function: Any
    calls: dict[Call, None]

    def __call__(self, *arguments: Any) -> None:
        types = tuple(_numba()[0].typeof(argument) for argument in arguments)
        self.calls[self.function.__module__, self.function.__name__, types] = None


def compiled(function: Any, has_loops: bool = True) -> Any:
    """Compile a kernel whose `prange` loops run on torch's threads."""
    if _calls is not None:
        return _Noted(function, _calls)
    _prepare()
    numba, can_keep = _numba()
    others, numba.config.CACHE_LOCATOR_CLASSES = (
        numba.config.CACHE_LOCATOR_CLASSES,
        f"{__name__}.Kept",
    )
    try:
        return numba.njit(parallel=has_loops, fastmath=True, cache=can_keep, error_model="numpy")(
            function
        )
    finally:
        numba.config.CACHE_LOCATOR_CLASSES = others


def sequence(function: Any) -> Any:
    """Compile a function that calls kernels one after the other."""
    return compiled(function, has_loops=False)


def inlined(function: Any) -> Any:
    """Compile a function for use inside kernels, where LLVM may inline it."""
    return _numba()[0].njit(fastmath=True, error_model="numpy")(function)


def note() -> dict[Call, None]:
    """Make kernels imported from now on record their argument types instead of computing.

    Returns the dict to which each later call of a kernel adds its types.
    """
    global _calls
    _calls = {}
    return _calls


@contextlib.contextmanager
def alone() -> Iterator[bool]:
    """Hold a lock so that one process compiles at a time.

    Yields True if kernels have to be compiled and can be cached.
    """
    if not keeps():
        yield False
        return
    with open(Kept.directory / "lock", "w") as lock:
        # A file system without locks: the work may be done twice
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield not (Kept.directory / COMPLETE).exists()


def _works() -> None:
    global _compiles_itself
    _compiles_itself = True
    end_with_parent()


def _compile(call: Call) -> None:
    module, name, types = call
    getattr(importlib.import_module(module), name).compile(types)


def compile_all(calls: dict[Call, None]) -> None:
    """Compile each kernel for its recorded types, in one process per core."""
    # A fork would inherit torch's threads without what runs them
    spawn = multiprocessing.get_context("spawn")
    os.environ["HONE_PARENT_PID"] = str(os.getpid())
    with ProcessPoolExecutor(min(machine.usable_cores(), len(calls)), spawn, _works) as pool:
        list(pool.map(_compile, calls))
    (Kept.directory / COMPLETE).touch()
