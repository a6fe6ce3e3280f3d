"""Kernels of the CPU compiled by numba, before they are needed and several at once, and kept.

    a kernel is asked for ─► kept already? ─ no ─► a process of its own (`python -m hone.launch.kernels`)
                                   │ yes               calls each kernel, which notes its types (`note`)
                                   ▼                   compiles them, one a core (`compile_all`)
                              loaded, run  ◄───────────┘

They lie in the user's cache directory, by a hash of these sources, instruction set, processor, and versions of numba
and Python: all environments and clones that have the same ones use them. A process does not run what it compiled
itself, where there is a place to keep it: numba optimises the body of a parallel loop once more where it goes into the
code that is kept, which may change the order of a sum. A kernel has one type of each argument, since numba's index of
what it keeps is not safe for two processes that compile the same one.
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

from hone import machine, preemption

COMPLETE = "complete"  # a file in the directory of kernels, when all are there
log = logging.getLogger("hone")
Call = tuple[
    str, str, tuple[Any, ...]
]  # a kernel's module and name, numba's types of its arguments
_calls: dict[Call, None] | None = None  # while they are noted
_compiles_itself = False  # in a process that compiles for others


class Kept:
    """Tells numba where a kernel's compiled code lies; numba's own locators go by the path of the source."""

    directory = Path()  # set by `_numba`

    def __init__(self, line: int) -> None:
        self._line = line

    @classmethod
    def from_function(cls, function: Any, file: str) -> "Kept":
        return cls(function.__code__.co_firstlineno)

    def ensure_cache_path(self) -> None:
        """There since `_numba`."""

    def get_cache_path(self) -> str:
        return str(self.directory)

    def get_source_stamp(self) -> str:
        return self.directory.name

    def get_disambiguator(self) -> str:
        return str(self._line)


@functools.cache
def _numba() -> tuple[Any, bool]:
    """numba, set up, and whether compiled code can be kept. Its settings come from the environment, also later on."""
    here = Path(__file__).parent
    beside = [
        here.parent / name for name in ("row_state.py", "fingerprint_tables.py")
    ]  # whose numbers are compiled in
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
        tempfile.TemporaryFile(
            dir=Kept.directory
        ).close()  # numba asks for a place to write, also to read
    except OSError as error:
        log.warning(
            "The CPU kernels are compiled for this run alone, which takes minutes: %s", error
        )
        return numba, False
    return numba, True


def keeps() -> bool:
    """Whether compiled code can be kept."""
    return _numba()[1]


def words() -> str:
    return f"Compiling the CPU kernels into {Kept.directory}: a minute or two, once"


@functools.cache
def _prepare() -> None:
    """Sees to it that the kernels have been compiled, where they can be kept."""
    if keeps() and not _compiles_itself and not (Kept.directory / COMPLETE).exists():
        log.info(words())
        cores = os.environ.get(machine.CORES_VARIABLE) or str(
            machine.usable_cores()
        )  # the other parts of a run wait for this
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
    """A kernel that notes how it is called, and does nothing."""

    function: Any
    calls: dict[Call, None]

    def __call__(self, *arguments: Any) -> None:
        types = tuple(_numba()[0].typeof(argument) for argument in arguments)
        self.calls[self.function.__module__, self.function.__name__, types] = None


def compiled(function: Any, has_loops: bool = True) -> Any:
    """Compiles a kernel whose `prange` loops are shared among torch's threads."""
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
    """Compiles a function that calls kernels, one after the other."""
    return compiled(function, has_loops=False)


def inlined(function: Any) -> Any:
    """Compiles a part of kernels."""
    return _numba()[0].njit(fastmath=True, error_model="numpy")(function)


def note() -> dict[Call, None]:
    """From now on kernels that are imported note how they are called, in here, and compute nothing."""
    global _calls
    _calls = {}
    return _calls


@contextlib.contextmanager
def alone() -> Iterator[bool]:
    """Only one process at a time goes on. Whether there is something to compile, and a place to keep it."""
    if not keeps():
        yield False
        return
    with open(Kept.directory / "lock", "w") as lock:
        with contextlib.suppress(
            OSError
        ):  # a file system without locks: the work may be done twice
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield not (Kept.directory / COMPLETE).exists()


def _works() -> None:
    global _compiles_itself
    _compiles_itself = True
    preemption.end_with_parent()


def _compile(call: Call) -> None:
    module, name, types = call
    getattr(importlib.import_module(module), name).compile(types)


def compile_all(calls: dict[Call, None]) -> None:
    """Compiles these kernels for these types, one a core at a time."""
    spawn = multiprocessing.get_context(
        "spawn"
    )  # a fork would inherit torch's threads without what runs them
    os.environ["HONE_PARENT_PID"] = str(os.getpid())
    with ProcessPoolExecutor(min(machine.usable_cores(), len(calls)), spawn, _works) as pool:
        list(pool.map(_compile, calls))
    (Kept.directory / COMPLETE).touch()
