"""Kernels for the GPU, in Triton and its language Gluon. Each has a plain-torch twin, beside the function of
`hone.kernels` that calls it or in tests.

A decode step is 150 to 280 small kernels in a CUDA graph, so what counts is the time between them: each is launched
with programmatic dependent launch (PDL), so that its blocks start while the kernel before it runs. `wait` stops until
that kernel is complete and visible, then lets the next one start. Some kernels let the next one start before they wait
themselves (`wait_beside_next`), so that kernels far behind them may run too. So before its own `wait` a kernel touches
nothing that its step has written: weights, which are fetched into the L2 cache there, and what stands before a step:
who decodes, where their tokens are, keys and values of those before the newest.

They take half precision. Those of `training.py` and `attention.py` make gradients, for `kernels/gpu_training.py` and
`kernels/head.py`.
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
FEWEST_TOKENS = (
    32  # up to here with small weights, too; the arithmetic of a tile is a small part of its time
)
NARROW_WIDTH = (
    1024  # of a model; up to here all weights of a product have room in the registers of the chip
)
MOST_PARTS = 8  # of the inner dimension of a product
LONG_PART = 800  # numbers of a part that is worth tiles of 128 columns
MANY_TOKENS, SMALL_WEIGHT = (
    128,
    7 * 2**20,
)  # up to here starting early is worth more than what torch's product gains


@dataclass(frozen=True)
class Scaled:
    """The norm of a residual stream x, T x D, as far as the kernel that adds to the stream can make it."""

    scaled_TD: Tensor  # x * weight, still to be divided by the root mean square of x
    squares_TP: Tensor  # parts of the sum of x * x over D, fp32
    eps: float


def _has_kernels(x: Tensor) -> bool:
    return IS_AVAILABLE and x.is_cuda and x.dtype in HALF and _copies_to_shared_memory()


@functools.cache
def _copies_to_shared_memory() -> bool:
    """Whether the GPU can do so beside other work: from Ampere on."""
    return torch.cuda.get_device_capability() >= (8, 0)


def takes(x: Tensor) -> bool:
    """Whether the Triton kernels take this tensor."""
    return _has_kernels(x) and not torch.is_grad_enabled()


def trains(x: Tensor) -> bool:
    """Whether the kernels with gradients take this tensor."""
    return _has_kernels(x) and torch.is_grad_enabled()


def takes_model(weight: Tensor, head_size: int) -> bool:
    """Whether all that a decode step of such a model does stays on the device."""
    return _has_kernels(weight) and takes_heads(head_size)


@functools.cache
def has_dependent_launch() -> bool:
    """Whether kernels can start while the one before them runs: from Hopper on."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@functools.cache
def processors() -> int:
    """Multiprocessors of the GPU."""
    return (
        torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 1
    )


@functools.cache
def shared_memory() -> int:
    """Bytes of its multiprocessor that a block can have (CUDA's guide, by compute capability)."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if capability[0] in (9, 10):
        return 227 * 2**10
    return (163 if capability in ((8, 0), (8, 7)) else 99) * 2**10


def memory_share(width: int, rows: int) -> int | None:
    """How many percent of a multiprocessor's fast memory are shared memory in a step of few rows, in a model so many
    numbers wide; the rest is cache. None: as the driver has it. As measured (benchmarks/RESULTS.md): attention's keys
    and values go through shared memory, products' weights through the cache; both kernels have the same, so that one
    can start while the other runs."""
    if rows > FUSED_TOKENS:
        return 58 if rows <= FEWEST_TOKENS else None
    return 72 if width <= NARROW_WIDTH else 44


def stages_of(wanted: int, rows: int, inner: int) -> int:
    """How many stages of a tile of half precision, so many rows by so many numbers, there is room for."""
    room = shared_memory() - 2**14  # for what becomes of a tile
    return min(wanted, room // (2 * rows * inner))


def options(warps: int) -> dict[str, int | bool]:
    """Launch options, and the PDL constant of a kernel."""
    is_early = has_dependent_launch()
    return {"num_warps": warps, "PDL": is_early, **({"launch_pdl": True} if is_early else {})}


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def takes_heads(head_size: int) -> bool:
    """Whether attention kernels take heads of this size."""
    return 16 <= head_size <= 256 and head_size & (head_size - 1) == 0


def trains_heads(head_size: int) -> bool:
    """Whether attention with gradients takes heads of this size."""
    return takes_heads(head_size) and head_size <= 128


def trains_model(weight: Tensor, head_size: int) -> bool:
    """Whether all that a step of training such a model does has kernels."""
    return _has_kernels(weight) and trains_heads(head_size)


def takes_head(hidden_TD: Tensor) -> bool:
    """Whether tokens can be drawn from these hidden states without their logits in memory."""
    return takes(hidden_TD) and hidden_TD.shape[1] % 64 == 0


def is_short(x_TI: Tensor, weight_OI: Tensor) -> bool:
    """Whether a product is over so soon that ours, which starts while the kernel before it runs, is the quicker one."""
    is_between = x_TI.dim() == 2 and FEWEST_TOKENS < len(x_TI) <= MANY_TOKENS
    is_small = weight_OI.numel() < SMALL_WEIGHT and x_TI.shape[1] % 64 == 0
    return is_between and is_small and takes(x_TI) and has_dependent_launch()


def is_few(x_TI: Tensor, weight_OI: Tensor) -> bool:
    """Whether products of these rows do what stands around them (`few_row_products.py`): kernels
    for that would take longer.

    Hidden states are multiplied by a norm's weight before they are divided by their size: float16 may not hold that.
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
    """Into how many parts of its inner dimension a product of few tokens is cut, so that all of the chip has a part,
    and how many columns a tile then has. As measured (benchmarks/RESULTS.md)."""
    (rows, inner), T = weight_OI.shape, len(x_TI)
    if x_TI.dim() != 2 or not 0 < T <= FEW_TOKENS or inner % 64 or not takes(x_TI):
        return 1, 64
    most = processors() * (
        2 if T <= FEWEST_TOKENS else 1
    )  # programs; two of few tokens find room beside each other

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
