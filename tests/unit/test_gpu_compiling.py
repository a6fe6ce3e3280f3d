"""Kernels compiled by other processes, for a card that need not be there."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own: whether Triton compiles kernels or, as in other tests, interprets them is settled when it is
# imported.
SCRIPT = """
import os, triton
from concurrent.futures import ThreadPoolExecutor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.experimental.gluon._runtime import GluonASTSource
from hone.kernels.gpu import compiling, held, rows

seen = []
triton.knobs.compilation.listener = lambda **found: seen.append((found["src"].constants[(3,)], found["cache_hit"]))
kernel = rows.swiglu_kernel
names = dict(gate_up="*bf16", out="*bf16", F="i32", BLOCK="constexpr", PDL="constexpr")
compiling.ALONE = 0  # others compile all

def compiled(compilers, block):
    source = ASTSource(kernel, names, {(3,): block, (4,): False}, {(0,): [["tt.divisibility", 16]]})
    made = compilers.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 4}, get_cache_invalidating_env_vars())
    assert made.asm["cubin"] and made.metadata.num_warps == 4

with compiling.Compilers(2) as compilers:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda block: compiled(compilers, block), (128, 256, 512)))
    others = [process.pid for process, _ in compilers.started]
assert sorted(seen) == [(128, True), (256, True), (512, True)], seen
assert len(others) == 2 and not any(os.path.exists(f"/proc/{pid}") for pid in others)

with compiling.Compilers(2) as compilers:  # what is kept needs nobody
    compiled(compilers, 256)
    assert compilers.started == []

with compiling.Compilers(1) as compilers:  # one that has ended leaves it to who asks
    compilers._start()
    ask = compilers.idle.get()
    process, _ = compilers.started[0]
    process.kill()
    process.wait()
    compilers.idle.put(ask)
    compiled(compilers, 1024)
assert seen[-1] == (1024, False), seen

triton.knobs.compilation.listener = lambda **found: seen.append(found["cache_hit"])
half = dict.fromkeys(("x", "w", "bias", "residual", "norm", "out", "scaled"), "*bf16")
numbers = half | dict.fromkeys(("squares", "own_squares"), "*fp32") | dict.fromkeys("MNKP", "i32") | {"eps": "fp32"}
kernel = held.held_kernel
for rows, is_swiglu in ((1, False), (16, False), (32, True)):  # in Gluon
    K, width = 2048, 1024
    tile = held.held_tile(rows, width, K, is_swiglu, False).constants(K)
    registers = tile.pop("maxnreg")
    around = dict(HAS_BIAS=True, SWIGLU=is_swiglu, SQUARES=64 * is_swiglu, ONTO=not is_swiglu, PDL=True)
    known = {(kernel.arg_names.index(name),): value for name, value in (tile | around).items()}
    signature = {name: numbers.get(name, "constexpr") for name in kernel.arg_names}
    even = [n for n, name in enumerate(kernel.arg_names) if name in numbers and name not in ("M", "P", "eps")]
    source = GluonASTSource(kernel, signature, known, {(n,): [["tt.divisibility", 16]] for n in even})
    options = {"num_warps": tile["WARPS"], "maxnreg": registers, "launch_pdl": True}
    with compiling.Compilers(1) as compilers:
        made = compilers.compile(source, GPUTarget("cuda", 90, 32), options, get_cache_invalidating_env_vars())
        assert "mma.sync" in made.asm["ptx"] and "ld.global.v4.b32" in made.asm["ptx"] and seen[-1] is True, seen
print("done")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")
def test_other_processes_compile_what_the_cache_lacks(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr
