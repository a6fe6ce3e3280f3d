"""GPU kernels in Triton and its language Gluon, each with a plain-torch reference for tests.

A decode step is 150 to 280 small kernels in a CUDA graph, so gaps between kernels cost time. Every
kernel of a step is launched with programmatic dependent launch (PDL): its thread blocks start while
the previous kernel still runs. `wait` (`launching.py`) blocks until the previous kernel is complete
and its results are visible, then lets the next kernel start. `wait_beside_next` lets the next
kernel start first and then waits, so that more than two kernels may overlap. Before its own `wait`
a kernel therefore touches nothing that the same decode step has written. It may touch weights,
which it prefetches into the L2 cache, and data from before the step: the list of decoding
sequences, their newest tokens, and earlier keys and values.

The kernels are for half-precision models. The kernels of `training_kernels.py` and `attention.py`
include backward passes, for `kernels/gpu_training.py` and `kernels/head.py`.
"""

import functools
import importlib.util
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.kernels import numerics

IS_AVAILABLE = (
    importlib.util.find_spec("triton") is not None
    and os.environ.get("HONE_GPU_KERNELS", "1") != "0"
)
HALF = (torch.bfloat16, torch.float16)
FEW_TOKENS = 256  # up to here a product is bound by fetching weights
FUSED_TOKENS = 8  # up to here products also do what stands around them
FUSED_WIDTH = 2048  # of a model; up to here they do so for twice as many tokens
# Up to here with small weights, too; the arithmetic of a tile is a small part of its time.
FEWEST_TOKENS = 32
# Of a model; up to here all weights of a product have room in the registers of the chip.
NARROW_WIDTH = 1024
MOST_PARTS = 8  # of the inner dimension of a product
LONG_PART = 800  # numbers of a part that is worth tiles of 128 columns
# Up to here starting early is worth more than what torch's product gains
MANY_TOKENS, SMALL_WEIGHT = (128, 7 * 2**20)


@dataclass(frozen=True)
class Scaled:
    """Unfinished RMS norm of a residual stream x: x * weight, still to be divided by rms(x).

    Computed by the kernel that adds to x.
    """

    scaled_TD: Tensor  # x * weight, still to be divided by the root mean square of x
    squares_TP: Tensor  # parts of the sum of x * x over D, fp32
    eps: float


def has_kernels(x: Tensor) -> bool:
    """Return True if the Triton kernels support tensors of this device and type."""
    return IS_AVAILABLE and x.is_cuda and x.dtype in HALF and _copies_to_shared_memory()


@functools.cache
def _copies_to_shared_memory() -> bool:
    """Return True if the GPU copies to shared memory asynchronously (Ampere and later)."""
    return torch.cuda.get_device_capability() >= (8, 0)


def takes(x: Tensor) -> bool:
    """Return True if the kernels without gradients support this tensor, and gradients are off."""
    return has_kernels(x) and not torch.is_grad_enabled()


def trains(x: Tensor) -> bool:
    """Return True if the kernels with gradients support this tensor, and gradients are on."""
    return has_kernels(x) and torch.is_grad_enabled()


def takes_model(weight: Tensor, head_size: int) -> bool:
    """Return True if a decode step of a model with such weights and heads needs no host work."""
    return has_kernels(weight) and takes_heads(head_size)


@functools.cache
def has_dependent_launch() -> bool:
    """Return True if kernels can start while the one before them runs (Hopper and later)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@functools.cache
def processors() -> int:
    """Return the number of the GPU's multiprocessors, 1 without a GPU."""
    return (
        torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 1
    )


@functools.cache
def shared_memory() -> int:
    """Return the bytes of shared memory available to a block (CUDA guide, by compute capability)."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if capability[0] in (9, 10):
        return 227 * 2**10
    return (163 if capability in ((8, 0), (8, 7)) else 99) * 2**10


def memory_share(width: int, rows: int) -> int | None:
    """Return the percentage of L1/shared memory to use as shared memory in small decode steps.

    The rest of a multiprocessor's L1/shared memory serves as L1 cache. None, for more than 32 rows,
    leaves the choice to the driver. Attention reads keys and values through shared memory, matrix
    products read weights through the cache. All kernels of a step use the same percentage, since a
    kernel with a different percentage cannot start while the previous kernel runs. The values for
    each model width and number of rows were measured (benchmarks/kernels/tiles.py).
    """
    if rows > FUSED_TOKENS:
        return 58 if rows <= FEWEST_TOKENS else None
    return 72 if width <= NARROW_WIDTH else 44


def stages_of(wanted: int, rows: int, inner: int) -> int:
    """Return `wanted` pipeline stages, or as many as fit into shared memory.

    A stage holds rows x inner half-precision numbers.
    """
    room = shared_memory() - 2**14  # for what becomes of a tile
    return min(wanted, room // (2 * rows * inner))


def options(warps: int) -> dict[str, int | bool]:
    """Return keyword arguments of a kernel launch: number of warps, and PDL if the GPU supports it."""
    is_early = has_dependent_launch()
    return {"num_warps": warps, "PDL": is_early, **({"launch_pdl": True} if is_early else {})}


def power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def takes_heads(head_size: int) -> bool:
    """Return True if attention kernels support heads of this size."""
    return 16 <= head_size <= 512 and head_size & (head_size - 1) == 0


def trains_heads(head_size: int) -> bool:
    """Return True if attention kernels with gradients support heads of this size."""
    return takes_heads(head_size) and head_size <= 128


def trains_model(weight: Tensor, head_size: int) -> bool:
    """Return True if kernels cover a whole training step of a model with such weights and heads."""
    return has_kernels(weight) and trains_heads(head_size)


def takes_head(hidden_TD: Tensor) -> bool:
    """Return True if tokens can be drawn from these hidden states without logits in memory."""
    return takes(hidden_TD) and hidden_TD.shape[1] % 64 == 0


def is_short(x_TI: Tensor, weight_OI: Tensor) -> bool:
    """Return True if x W^T is to use the kernel `products.short` instead of torch.

    That kernel starts while the previous kernel still runs (PDL), and is faster for small weights
    and 33 to 128 rows.
    """
    is_between = x_TI.dim() == 2 and FEWEST_TOKENS < len(x_TI) <= MANY_TOKENS
    is_small = weight_OI.numel() < SMALL_WEIGHT and x_TI.shape[1] % 64 == 0
    return is_between and is_small and takes(x_TI) and has_dependent_launch()


def is_few(x_TI: Tensor, weight_OI: Tensor) -> bool:
    """Return True if x W^T is to use the fused kernel for few rows (`few_row_products.py`).

    With that kernel, hidden states are multiplied by a norm's weight before they are divided by the
    root mean square; that may overflow float16, so only bfloat16 is accepted.
    """
    columns, inner = weight_OI.shape
    most = 2 * FUSED_TOKENS if min(columns, inner) <= FUSED_WIDTH else FUSED_TOKENS
    if weight_OI.numel() <= SMALL_WEIGHT:
        most = FEWEST_TOKENS
    # 16 columns at least, each of gate and up; a long inner size in two warps would be slow, and slow to compile.
    is_cut = columns >= 32 and inner % (64 if inner <= FUSED_WIDTH else 128) == 0
    is_fused = x_TI.dim() == 2 and len(x_TI) <= most and is_cut
    is_taken = x_TI.dtype == torch.bfloat16 and takes(x_TI) and has_dependent_launch()
    return is_fused and is_taken and not numerics.is_exact()


def splits(x_TI: Tensor, weight_OI: Tensor) -> tuple[int, int]:
    """Return into how many parts to split the inner dimension of x W^T, and the tile width.

    For few tokens, the parts keep all multiprocessors busy; the choices were measured
    (benchmarks/kernels/tiles.py). One part means no split.
    """
    (rows, inner), T = weight_OI.shape, len(x_TI)
    if x_TI.dim() != 2 or not 0 < T <= FEW_TOKENS or inner % 64 or not takes(x_TI):
        return 1, 64
    # Programs; two of few tokens find room beside each other
    most = processors() * (2 if T <= FEWEST_TOKENS else 1)

    def cut(width: int) -> tuple[int, int]:  # parts, programs
        tiles = -(-rows // width) * -(-T // 128)
        parts = max(1, min(MOST_PARTS, most // tiles, inner // 128))
        return parts, tiles * parts

    (parts, programs), (wide, as_many) = cut(64), cut(128)
    # Two parts are no quicker than torch's product, and more than four than parts of narrow tiles.
    is_long = 2 < wide <= 4 and inner // wide >= LONG_PART
    if T > FEWEST_TOKENS and wide > 1 and programs <= as_many and (T <= 64 or is_long):
        return wide, 128
    return parts, 64
