"""Resources of the machine that this process may use, and how slow the machine is.

Resources are cores, memory, GPUs and vector instructions. `prepare_environment` runs before torch
and numba are imported, since their threads and instruction sets are chosen then.
"""

import contextlib
import functools
import gc
import getpass
import os
import platform
import sys
import tempfile
import threading
import time
from pathlib import Path

GPUS_VARIABLE = "HONE_GPUS"  # GPU indices on its node, which a launcher assigns to a process
CORES_VARIABLE = "HONE_CORES"  # number of cores that the processes of a run share
# Seconds of silence after which a process counts as silent, on a machine of usual speed.
SILENCE_SECONDS = 15.0
# Seconds that imports usually take; the largest factor for deadlines.
USUAL_START = 3.0
MAX_SLOWNESS = 3.0
ALLOCATOR_VARIABLE, ALLOCATOR_SETTING = "PYTORCH_ALLOC_CONF", "expandable_segments:True"
GC_ALLOCATIONS = 20_000  # allocations between two runs of the young generation's collection
_slowness = 1.0
# Variables that restrict torch, MKL, oneDNN and numba to AVX2.
TO_AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx2,+fma",
}


# A waiting thread spins this many times, 20 to 50 us, then sleeps. libgomp's default of 300,000
# takes milliseconds, in which an idle thread keeps a core from a busy one. `Neighbours` adjusts
# this where the kernel reports how long threads waited for a core.
_LOOKS = "1000"
_TASKS = Path("/proc/self/task")


def prepare_environment() -> None:
    """Set variables that torch and numba read on import, unless the user has set them.

    Python's garbage collector also runs less often from then on: by default it takes 4 % of a busy
    server's time.
    """
    ensure_home()
    trust_triton_cache()
    young, *older = gc.get_threshold()
    if 0 < young < GC_ALLOCATIONS:
        gc.set_threshold(GC_ALLOCATIONS, *older)
    if "OMP_WAIT_POLICY" not in os.environ:
        if not _can_switch(usable_cores()):
            os.environ.setdefault("GOMP_SPINCOUNT", _LOOKS)
        os.environ.setdefault("KMP_BLOCKTIME", "0")  # the same for LLVM's OpenMP, in ms (macOS)
    os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))
    keep_to_isa()
    if wanted := os.environ.pop(GPUS_VARIABLE, ""):
        there = usable_gpus()
        own = [there[int(i) % len(there)] for i in wanted.split(",")] if there else []
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)


def grow_gpu_segments() -> None:
    """Let torch's segments of GPU memory grow, unless the user has set how it allocates.

    Blocks of other sizes than the freed ones then fit. Call this before torch is imported, in
    processes that share no GPU memory with others: a handle of such memory needs further rights.
    """
    if usable_gpus() and not {ALLOCATOR_VARIABLE, "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ[ALLOCATOR_VARIABLE] = ALLOCATOR_SETTING


def ensure_home() -> None:
    """Set HOME (below the temporary directory) and USER, each if the user has none.

    In a container a user id may have no entry in passwd and no HOME. Many libraries ask for both.
    """
    if "HOME" not in os.environ:
        try:
            Path.home()
        except RuntimeError:
            place = Path(tempfile.gettempdir()) / f"hone-home-{os.getuid()}"
            with contextlib.suppress(OSError):
                place.mkdir(mode=0o700)
            is_ours = (
                place.is_dir() and not place.is_symlink() and place.stat().st_uid == os.getuid()
            )
            os.environ["HOME"] = str(place) if is_ours else tempfile.mkdtemp(prefix="hone-home-")
    if not {"LOGNAME", "USER", "LNAME", "USERNAME"} & set(os.environ):
        try:
            getpass.getuser()
        except (KeyError, OSError, ImportError):
            os.environ["USER"] = f"uid{os.getuid()}"


def written_by_others(directory: Path) -> str:
    """Return why other users can write to a directory with code, or "" if they cannot.

    If the directory belongs to this user and only its group can write to it, the group's permission
    is removed.
    """
    try:
        found = directory.stat()
    except OSError:
        return ""
    if found.st_uid not in (os.getuid(), 0):
        return f"{directory} belongs to another user ({found.st_uid})"
    if found.st_mode & 0o002:
        return f"everybody may write to {directory}; chmod 700 it after a look at what is there"
    if found.st_mode & 0o020 and found.st_uid == os.getuid():
        with contextlib.suppress(OSError):
            directory.chmod(found.st_mode & 0o7755)
    return ""


def trust_triton_cache() -> None:
    """Give Triton a new kernel cache if other users can write to the usual one."""
    place = os.environ.get("TRITON_CACHE_DIR")
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    if problem := written_by_others(Path(place) if place else home / ".triton" / "cache"):
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="hone-triton-")
        print(f"Triton's kernels are compiled for this run alone: {problem}", file=sys.stderr)


def keep_to_isa() -> None:
    """Restrict torch and numba to AVX2 if HONE_CPU_ISA requests it."""
    if os.environ.get("HONE_CPU_ISA") == "avx2":
        os.environ.update(TO_AVX2)


def usable_cores() -> int:
    """Return the number of compute threads: OMP_NUM_THREADS, or the cores of affinity and cgroup."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted):
        return int(wanted)
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(count, int(_cpu_quota(Path("/sys/fs/cgroup")) or count)))


def usable_gpus() -> list[str]:
    """Return the usable GPUs, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        count = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
        visible = ",".join(str(i) for i in range(count))
    return [device for device in visible.split(",") if device]


def usable_memory(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that processes here may use: the machine's, or the control group's limit."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroup version 2, 1
        try:
            said = (root / name).read_text().strip()
        except OSError:
            continue
        found += [int(said)] if said.isdigit() else []
    return min(found)


def _cpu_quota(root: Path) -> float | None:
    """Return the control group's CPU quota in cores (version 2, then 1), None without a limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = (
                (root / "cpu" / f"cpu.cfs_{name}_us").read_text().strip()
                for name in ("quota", "period")
            )
        except OSError:
            return None
    return None if quota in ("max", "-1") else max(1.0, int(quota) / int(period))


def _can_switch(threads: int) -> bool:
    """Return True if `Neighbours` can change how long waiting threads spin.

    This requires that the kernel reports how long threads waited for a core, and that a second team
    of `threads` OpenMP threads makes the total exceed the number of processors in the affinity
    mask. libgomp compares with this number, even if a control group grants less time.
    """
    tells = Path("/proc/self/schedstat").exists() and hasattr(os, "sched_getaffinity")
    return tells and 2 * threads - 1 > len(os.sched_getaffinity(0))


class Neighbours(threading.Thread):
    """Make waiting threads sleep while other programs need the cores, and spin otherwise.

    A spinning thread continues at once. A sleeping thread has to be woken, which takes up to
    milliseconds on a virtual machine, hundreds of times per step. libgomp stops spinning early
    while there are more threads than cores. So to make threads sleep, this class starts a spare
    thread that computes once with torch and then waits; to let them spin, it ends that thread.
    """

    # Seconds; shares of the time that threads waited for a core.
    EVERY = 0.5
    BUSY = 0.1
    FREE = 0.03

    def __init__(self) -> None:
        super().__init__(name="neighbours", daemon=True)
        self.before = (0, 0)
        self.before = self._thread_times()
        self.end_of_spare: threading.Event | None = None

    @classmethod
    def start_watching(cls) -> None:
        """Start watching, unless the user or `prepare_environment` has decided how threads wait."""
        if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
            cls().start()

    def run(self) -> None:
        while True:
            time.sleep(self.EVERY)
            now = self._thread_times()
            computed, waited = (one - other for one, other in zip(now, self.before, strict=True))
            self.before = now
            if computed + waited > 0.1 * self.EVERY * 1e9:
                self.adapt_threads(waited / (computed + waited))

    def adapt_threads(self, share: float) -> None:
        if self.end_of_spare is not None and share < self.FREE:
            self.end_of_spare.set()
            self.end_of_spare = None
        elif self.end_of_spare is None and share > self.BUSY and _is_torch_computing():
            self.end_of_spare = threading.Event()
            threading.Thread(
                target=_spare_cores, args=[self.end_of_spare], name="spare", daemon=True
            ).start()

    def _thread_times(self) -> tuple[int, int]:
        """Return how long this process's threads ran and waited for a core, in nanoseconds."""
        computed = waited = 0
        try:
            tasks = os.listdir(_TASKS)
        except OSError:  # too many open files, temporarily
            return self.before
        for task in tasks:
            with contextlib.suppress(OSError, ValueError):  # it has ended
                one, other, _ = (_TASKS / task / "schedstat").read_text().split()
                computed = computed + int(one)
                waited = waited + int(other)
        return computed, waited


def _is_torch_computing() -> bool:
    """Return True if torch is fully imported and uses several threads."""
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and not getattr(torch.__spec__, "_initializing", True)
        and torch.get_num_threads() > 1
    )


def _spare_cores(end: threading.Event) -> None:
    import torch

    torch.ones(2**17).add_(1.0)  # large enough for torch to use several threads
    end.wait()


def started_in(seconds: float) -> None:
    """Set how much slower than usual this machine is, from the seconds that imports took."""
    global _slowness
    _slowness = min(max(1.0, seconds / USUAL_START), MAX_SLOWNESS)


def silence_seconds() -> float:
    """Return after how many seconds without a heartbeat a process counts as silent.

    Longer on a slow machine.
    """
    return SILENCE_SECONDS * _slowness


@functools.cache
def instruction_set() -> str:
    """Return the instruction set of the CPU kernels: the processor's, or that of HONE_CPU_ISA.

    One of avx512, avx2, neon, or none for plain torch. Raises ValueError if HONE_CPU_ISA is not
    supported.
    """

    wanted = os.environ.get("HONE_CPU_ISA")
    possible = instruction_sets()
    if wanted and wanted not in possible:
        raise ValueError(f"HONE_CPU_ISA={wanted}: this processor runs {', '.join(possible)}")
    return wanted or possible[0]


def instruction_sets() -> tuple[str, ...]:
    """Return the instruction sets of this processor, the widest first."""
    import torch

    if platform.machine().lower() in ("aarch64", "arm64"):
        return ("neon", "none")
    widest = {"AVX512": 0, "AVX2": 1}.get(torch.backends.cpu.get_cpu_capability(), 2)
    return ("avx512", "avx2", "none")[widest:]


if __name__ == "__main__":  # narrower ones, for tests
    print(*[name for name in instruction_sets()[1:] if name != "none"])
