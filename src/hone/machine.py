"""What this process may use of the machine: cores, the processor's vectors. Imports nothing until it is asked.

`prepare` comes before torch and numba are imported, since their threads and instruction sets are chosen then.
"""

import functools
import os
import platform
from pathlib import Path

ISAS = ("avx512", "avx2", "neon", "none")
# What keeps torch, its MKL and oneDNN, and numba to AVX2 on a processor that has more.
_TO_AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx2,+fma",
}


def prepare() -> None:
    """Sets what torch and numba read from the environment when they are imported, where the user has not."""
    if os.environ.get("HONE_CPU_ISA") == "avx2":
        os.environ.update(_TO_AVX2)


@functools.cache
def isa() -> str:
    """The instruction set of the CPU's kernels, one of ISAS: what the processor has, or what HONE_CPU_ISA asks for.

    "none" is plain torch. Raises ValueError where HONE_CPU_ISA asks for what is not there.
    """
    import torch

    wanted = os.environ.get("HONE_CPU_ISA")
    prepare()
    if platform.machine().lower() in ("aarch64", "arm64"):
        there = "neon"
    else:
        there = {"AVX512": "avx512", "AVX2": "avx2"}.get(torch.backends.cpu.get_cpu_capability(), "none")
    possible = ISAS[ISAS.index(there) :] if there in ("avx512", "avx2") else (there, "none")
    possible = tuple(dict.fromkeys(name for name in possible if name != "neon" or there == "neon"))
    if wanted and wanted not in possible:
        raise ValueError(f"HONE_CPU_ISA={wanted}: this processor runs {', '.join(possible)}")
    return wanted or there
