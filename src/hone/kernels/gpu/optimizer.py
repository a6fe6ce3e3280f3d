"""AdamW in one pass: what it reads and writes once is all that goes through memory."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
DENSE = torch.contiguous_format
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def at_random(x, draws):
    """x as bfloat16 rounded up or down, by 16 random bits."""
    bits = x.to(tl.uint32, bitcast=True) + (draws & 0xFFFF)
    return (bits & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["seed"])
def adamw_kernel(
    tensors, decays, blocks, scale, lr, size, beta1, beta2, of_second, eps, seed,
    GRAD: tl.constexpr, MOMENT: tl.constexpr, WEIGHT: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one tensor. blocks P x 2: which, and its number in it; tensors N x 6: addresses, and how many
    numbers. size: learning rate over the first moment's correction."""
    which = tl.load(blocks + 2 * tl.program_id(0))
    i = tl.load(blocks + 2 * tl.program_id(0) + 1) * BLOCK + tl.arange(0, BLOCK)
    row = tensors + which * 6
    weight = tl.multiple_of(tl.load(row).to(tl.pointer_type(WEIGHT)), 16)
    master = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.float32)), 16)
    first = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(MOMENT)), 16)
    second = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(MOMENT)), 16)
    grad = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(GRAD)), 16)
    inside = i < tl.load(row + 5)
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
        draws = tl.randint(seed + which, i.to(tl.int32))
        m, v = at_random(m, draws), at_random(v, draws >> 16)
    tl.store(first + i, m.to(MOMENT), inside)
    tl.store(second + i, v.to(MOMENT), inside)


class Table:
    """Where the tensors stand, for one launch that moves all of them: launches of their own take the host longer than
    the device. Masters and moments may stand in the machine's memory (`kernels/host.py`)."""

    def __init__(self, columns: list[list[Tensor]], decays: list[float]) -> None:
        weights, masters, first, _ = columns
        device, self.has_weight = weights[0].device, weights[0].data_ptr() != masters[0].data_ptr()
        self.dtypes = {"MOMENT": TYPES[first[0].dtype], "WEIGHT": TYPES[weights[0].dtype]}
        self.rows = np.zeros((len(masters), 6), dtype=np.int64)
        for i, column in enumerate(columns):
            self.rows[:, i] = [x.data_ptr() for x in column]
        self.rows[:, 5] = [x.numel() for x in masters]
        self.decays = torch.tensor(decays, dtype=torch.float32, device=device)
        counts = -(-self.rows[:, 5] // BLOCK)
        which = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.blocks = torch.from_numpy(np.stack([which, number], axis=1)).to(device)

    def step(
        self, grads: list[Tensor], scale: float, lr: float, betas: tuple[float, float],
        corrections: tuple[float, float], eps: float, seed: int,
    ) -> None:  # fmt: skip
        """What `Change` says (`kernels/adamw.py`); the draws are others than the twin's."""
        grads = [g if g.is_contiguous() and g.data_ptr() % 16 == 0 else g.clone(memory_format=DENSE) for g in grads]
        self.rows[:, 4] = [g.data_ptr() for g in grads]
        tensors = torch.from_numpy(self.rows.copy()).to(self.blocks.device)
        of_first, of_second = corrections
        adamw_kernel[(len(self.blocks),)](
            tensors, self.decays, self.blocks, scale, lr, lr / of_first, *betas, of_second, eps, seed,
            GRAD=TYPES[grads[0].dtype], HAS_WEIGHT=self.has_weight, BLOCK=BLOCK, num_warps=8, **self.dtypes,
        )  # fmt: skip
