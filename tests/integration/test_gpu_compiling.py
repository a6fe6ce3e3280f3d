"""Kernels compiled by other processes, for a card that need not be there."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hangs import HANG_SECONDS

# In a process of its own: whether Triton compiles kernels or, as in other tests, interprets them is settled when it is
# imported.
SCRIPT = """
import os, triton
from concurrent.futures import ThreadPoolExecutor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.experimental.gluon._runtime import GluonASTSource
from hone.kernels import attention_form, gpu
from hone.kernels.gpu import compiling, decode_attention, few_row_products, row_kernels

gpu.processors, gpu.shared_memory = lambda: 132, lambda: 227 * 2**10

seen = []
triton.knobs.compilation.listener = lambda **found: seen.append((found["src"].constants[(4,)], found["cache_hit"]))
kernel = row_kernels.swiglu_kernel
names = dict(gate_up="*bf16", out="*bf16", F="i32", GELU="constexpr", BLOCK="constexpr", PDL="constexpr")
compiling.ALONE = 0  # others compile all

def compiled(compilers, block):
    source = ASTSource(kernel, names, {(3,): False, (4,): block, (5,): False}, {(0,): [["tt.divisibility", 16]]})
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

def in_gluon(kernel, numbers, known, uneven, warps, registers):
    # The PTX for a Hopper; `uneven`: arguments that need not be multiples of 16.
    signature = {name: numbers.get(name, "constexpr") for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): value for name, value in (known | {"PDL": True}).items()}
    even = [n for n, name in enumerate(kernel.arg_names) if name in numbers and name not in uneven]
    source = GluonASTSource(kernel, signature, constants, {(n,): [["tt.divisibility", 16]] for n in even})
    options = {"num_warps": warps, "maxnreg": registers, "launch_pdl": True}
    with compiling.Compilers(1) as compilers:
        made = compilers.compile(source, GPUTarget("cuda", 90, 32), options, get_cache_invalidating_env_vars())
    assert seen[-1] is True, seen
    return made.asm["ptx"]

half = dict.fromkeys(("x", "w", "bias", "residual", "norm", "out", "scaled"), "*bf16")
numbers = half | dict.fromkeys(("squares", "own_squares"), "*fp32") | dict.fromkeys("MNKP", "i32") | {"eps": "fp32"}
for rows, is_swiglu in ((1, False), (16, False), (32, True)):
    tile = few_row_products.held_tile(rows, 1024, 2048, is_swiglu, False).constants(2048)
    registers = tile.pop("maxnreg")
    around = dict(HAS_BIAS=True, SWIGLU=is_swiglu, SQUARES=64 * is_swiglu, ONTO=not is_swiglu, SHARE=None)
    ptx = in_gluon(few_row_products.held_kernel, numbers, tile | around, ("M", "P", "eps"), tile["WARPS"], registers)
    assert "mma.sync" in ptx and "ld.global.v4.b32" in ptx

half = dict.fromkeys(("qkv", "q_scale", "k_scale", "keys", "values", "out", "sinks"), "*bf16")
numbers = half | dict.fromkeys(("cos", "sin", "part_acc", "part_stats"), "*fp32")
numbers |= dict.fromkeys(("active", "state", "table"), "*i64") | dict.fromkeys(("eps", "scale_log2"), "fp32")
numbers |= {"arrived": "*i32", "table_row": "i32"}
shapes = ((16, 8, 128, 1, 8), (16, 8, 128, 1, 256), (28, 4, 128, 8, 300), (32, 8, 64, 1, 2048))
shapes += ((32, 2, 256, 2, 2), (40, 1, 64, 1, 2))
forms = {
    shapes[0]: attention_form.AttentionForm(window=512, norm_offset=1.0),
    shapes[2]: attention_form.AttentionForm(growth=0.1, growth_length=4096),
    shapes[4]: attention_form.AttentionForm(window=4096, cap=50.0),
}
for H, K, E, parts, count in shapes:
    form = forms.get((H, K, E, parts, count), attention_form.PLAIN_FORM)
    rotated = E * 3 // 4 if form.growth else E
    C = gpu.power_of_2(H // K)
    cut = decode_attention.blocks_of(count, 1, 1024, C, E, False)._asdict()
    registers = cut.pop("maxnreg")
    sizes = dict(H=H, K=K, E=E, PAGE=64, C=C, PARTS=parts, NORM=True, ROT=rotated, SHARE=44)
    sizes |= form.constants() | {"SINKS": E == 64}
    ptx = in_gluon(decode_attention.alone_kernel, numbers, cut | sizes, ("eps", "scale_log2"), cut["WARPS"], registers)
    assert all(name in ptx for name in ("mma.sync", "cp.async.cg.shared.global", "ldmatrix"))
print("done")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")
def test_other_processes_compile_what_the_cache_lacks(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr
