"""AdamW in a single pass over memory.

Masters and moments in host memory are copied to the GPU in portions. Each of a few buffers has its
own stream, so that one portion is copied in while another is updated and a third is copied back:

    host ── copy ─► buffer ── adamw_kernel, with the gradient ─► buffer, and the weight ── copy ─► host
"""

from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.kernels.pinned_memory import PORTION, ROOMS

BLOCK = 4096  # divides PORTION
# Where all portions have multiples of so many numbers, a thread loads several at once
EVENLY = tl.constexpr(16)
DENSE = torch.contiguous_format
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def at_random(x, draws):
    """Round x to bfloat16 stochastically, by 16 random bits."""
    bits = x.to(tl.uint32, bitcast=True) + (draws & 0xFFFF)
    return (bits & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["seed"])
def adamw_kernel(
    tensors,
    decays,
    blocks,
    scale,
    lr,
    size,
    beta1,
    beta2,
    of_second,
    eps,
    seed,
    GRAD: tl.constexpr,
    MOMENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one block of one portion of a tensor.

    Args:
        tensors: N x 8, a row per portion: addresses of its weight, master, both moments and
            gradient; its length; the index of its tensor; its offset in that tensor.
        blocks: P x 2, a row per program: index of the portion, and of the block in the portion.
        size: learning rate divided by the first moment's bias correction.
    """
    i = tl.load(blocks + 2 * tl.program_id(0) + 1) * BLOCK + tl.arange(0, BLOCK)
    row = tensors + tl.load(blocks + 2 * tl.program_id(0)) * 8
    which = tl.load(row + 6)
    weight = tl.multiple_of(tl.load(row).to(tl.pointer_type(WEIGHT)), 16)
    master = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.float32)), 16)
    first = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(MOMENT)), 16)
    second = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(MOMENT)), 16)
    grad = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(GRAD)), 16)
    count = tl.load(row + 5)
    if EVEN:  # else numbers are loaded one by one, since any of them might be the last
        count = tl.multiple_of(count, EVENLY)
    inside = i < count
    g = tl.load(grad + i, inside, other=0.0).to(tl.float32) * scale
    m = tl.load(first + i, inside, other=0.0).to(tl.float32)
    v = tl.load(second + i, inside, other=0.0).to(tl.float32)
    m += (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    x = tl.load(master + i, inside, other=0.0) * (1 - lr * tl.load(decays + which))
    x -= size * m / (tl.sqrt(v) / of_second + eps)
    tl.store(master + i, x, inside)
    if HAS_WEIGHT:
        tl.store(weight + i, x.to(WEIGHT), inside)
    if tl.bfloat16 == MOMENT:
        draws = tl.randint(seed + which, (tl.load(row + 7) + i).to(tl.int32))
        m, v = at_random(m, draws), at_random(v, draws >> 16)
    tl.store(first + i, m.to(MOMENT), inside)
    tl.store(second + i, v.to(MOMENT), inside)


class OptimizerTable:
    """Addresses of all tensors, for one launch that updates them all.

    Separate launches would cost more host time. If masters or moments are in host memory
    (`kernels/pinned_memory.py`), each portion is a launch.
    """

    def __init__(self, columns: list[list[Tensor]], decays: list[float]) -> None:
        weights, masters, first, _ = columns
        device, self.has_weight = weights[0].device, weights[0].data_ptr() != masters[0].data_ptr()
        self.dtypes = {"MOMENT": TYPES[first[0].dtype], "WEIGHT": TYPES[weights[0].dtype]}
        self.away = {
            c: [x.view(-1) for x in columns[c]] for c in (1, 2, 3) if is_away(columns[c][0], device)
        }
        sizes = [x.numel() for x in masters]
        step = PORTION if self.away else max(1, *sizes)
        self.portions = [
            (i, at, min(step, n - at)) for i, n in enumerate(sizes) for at in range(0, n, step)
        ]
        self.rows = np.zeros((len(self.portions), 8), dtype=np.int64)
        for c, column in enumerate(columns):
            self._put(c, column)
        self.rows[:, 5:] = [(count, i, at) for i, at, count in self.portions]
        self.decays = torch.tensor(decays, dtype=torch.float32, device=device)
        self.is_even = not (self.rows[:, 5] % EVENLY.value).any()
        # Numbers of a tensor for which the kernel is the same
        self.fewest = EVENLY.value if self.is_even else 1
        counts = -(-self.rows[:, 5] // BLOCK)
        self.ends = np.cumsum(counts)  # behind the blocks of each portion
        which = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(which)) - np.repeat(self.ends - counts, counts)
        self.blocks = torch.from_numpy(np.stack([which, number], axis=1)).to(device)

    def _put(self, c: int, column: list[Tensor]) -> None:
        """Fill column `c` with the addresses of these tensors' portions."""
        self.rows[:, c] = [
            column[i].data_ptr() + at * column[i].element_size() for i, at, _ in self.portions
        ]

    def step(
        self,
        grads: list[Tensor],
        scale: float,
        lr: float,
        betas: tuple[float, float],
        corrections: tuple[float, float],
        eps: float,
        seed: int,
    ) -> None:
        """Run an AdamW step with the values of a `Change` (`kernels/adamw.py`).

        Stochastic rounding draws other numbers than the reference.
        """
        grads = [
            g if g.is_contiguous() and g.data_ptr() % 16 == 0 else g.clone(memory_format=DENSE)
            for g in grads
        ]
        self._put(4, grads)
        device = self.blocks.device
        rooms = [self._room(device) for _ in range(ROOMS if self.away else 0)]
        for k, room in enumerate(rooms):
            for c, numbers in room.items():
                self.rows[k::ROOMS, c] = numbers.data_ptr()
        tensors = torch.from_numpy(self.rows.copy()).to(device)
        of_first, of_second = corrections

        def move(blocks: Tensor) -> None:
            adamw_kernel[(len(blocks),)](
                tensors,
                self.decays,
                blocks,
                scale,
                lr,
                lr / of_first,
                *betas,
                of_second,
                eps,
                seed,
                GRAD=TYPES[grads[0].dtype],
                HAS_WEIGHT=self.has_weight,
                EVEN=self.is_even,
                BLOCK=BLOCK,
                num_warps=8,
                **self.dtypes,
            )

        if self.away:
            self._move_by_portions(move, rooms)
        else:
            move(self.blocks)

    def _room(self, device: torch.device) -> dict[int, Tensor]:
        """Return GPU buffers for one portion: one for each table column that is in host memory."""
        most = max(count for *_, count in self.portions)
        return {
            c: torch.empty(most, dtype=column[0].dtype, device=device)
            for c, column in self.away.items()
        }

    def _move_by_portions(
        self, move: Callable[[Tensor], None], rooms: list[dict[int, Tensor]]
    ) -> None:
        device, first = self.blocks.device, 0
        streams = [torch.cuda.Stream(device) for _ in rooms] if device.type == "cuda" else []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(device))
        for p, ((i, at, count), end) in enumerate(zip(self.portions, self.ends, strict=True)):
            here = [
                (self.away[c][i][at : at + count], room[:count])
                for c, room in rooms[p % ROOMS].items()
            ]
            with torch.cuda.stream(streams[p % ROOMS] if streams else None):
                for home, room in here:
                    room.copy_(home, non_blocking=True)
                move(self.blocks[first:end])
                for home, room in here:
                    home.copy_(room, non_blocking=True)
            first = end
        for stream in streams:
            torch.cuda.current_stream(device).wait_stream(stream)


def is_away(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device != device
