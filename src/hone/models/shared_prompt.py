"""Causal attention for completions that share prompts: each prompt is computed once for all of its completions.

    flat    [prompt 0][completion 00][completion 01]…[prompt 1][completion 10]…

The linear layers see every prompt once, which is most of the saving: a group of n samples costs one prompt
and n completions instead of n of both. The compiled loops of the CPU and the kernels that train on a GPU attend to the
flat axis as it lies. Without them prompts attend to themselves (PackedAttention), and completions, as one rectangle of
B x C queries, to their prompt and to what is before them: B x (P + C) keys, of which the first P are copies of the
group's prompt.
"""

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from hone.kernels.flat_attention import Sequences, flat_attention, takes
from hone.kernels.rows import put_rows, take_rows
from hone.models.attention import Heads, PackedAttention, has_training_kernel, train_on_gpu

if TYPE_CHECKING:
    from hone.kernels.gpu.attention import Tiles


class SharedPromptAttention:
    """G prompts with their completions; `completions[g]` has the lengths of those of prompt g, each 0 or more.

    A prompt may have none: it is a sequence alone.
    """

    def __init__(self, prompts: list[int], completions: list[list[int]], device: torch.device | str = "cpu") -> None:
        self.prompts, self.completions = prompts, completions
        self.device = torch.device(device)
        rows, groups, at = [], [0], 0
        for prompt, group in zip(prompts, completions, strict=True):
            first = at
            rows.append((first, prompt, 0, 0))
            at += prompt
            for length in group:
                rows.append((at, length, first, prompt))
                at += length
            groups.append(len(rows))
        self.sequences = Sequences(np.array(rows), np.array(groups))

    def positions(self) -> Tensor:
        """Position of every flat token in its own sequence: completions go on where their prompt ends."""
        parts = [np.arange(length) + prefix for _, length, _, prefix in self.sequences.rows.tolist()]
        return torch.from_numpy(np.concatenate(parts)).to(self.device)

    def __call__(self, layer: int, qkv_TNE: Tensor, heads: Heads) -> Tensor:
        if has_training_kernel(qkv_TNE, heads):
            return train_on_gpu(qkv_TNE, heads, self.sequences, self.tiles)
        q_THE, k_TKE, v_TKE = heads(qkv_TNE)
        if takes(q_THE):
            return flat_attention(q_THE, k_TKE, v_TKE, self.sequences).reshape(len(q_THE), -1)
        return self.rectangle.attend(q_THE, k_TKE, v_TKE)

    @cached_property
    def tiles(self) -> "Tiles":
        from hone.kernels.gpu import attention

        return attention.tiles(self.sequences.rows, self.sequences.groups, self.device)

    @cached_property
    def rectangle(self) -> "_Rectangle":
        return _Rectangle(self.prompts, self.completions, self.sequences, self.device)


class _Rectangle:
    """The same in torch's own operations: B completions padded to C, behind copies of their prompts padded to P."""

    def __init__(
        self, prompts: list[int], completions: list[list[int]], sequences: Sequences, device: torch.device
    ) -> None:
        lengths = [n for group in completions for n in group]
        self.device, self.G = device, len(prompts)
        self.P, self.C, self.B = max(prompts), max(lengths), len(lengths)
        spans = [np.arange(start, start + length) for start, length, _, _ in sequences.rows.tolist()]
        firsts = set(sequences.groups.tolist())
        self.prompt_flat = self._tensor([span for i, span in enumerate(spans) if i in firsts])
        self.flat = self._tensor([span for i, span in enumerate(spans) if i not in firsts])
        self.prompt_cell = self._tensor([np.arange(n) + g * self.P for g, n in enumerate(prompts)])
        self.cell = self._tensor([np.arange(n) + row * self.C for row, n in enumerate(lengths)])
        self.order = torch.cat([self.prompt_flat, self.flat]).argsort()  # prompts first, then completions, to flat
        self.group_B = self._tensor([np.repeat(np.arange(self.G), [len(group) for group in completions])])
        self.packed = PackedAttention(prompts, device)
        prompt_B1 = torch.tensor(prompts, device=device)[self.group_B][:, None]
        sees_prompt_BP = torch.arange(self.P, device=device) < prompt_B1
        causal_CC = torch.ones(self.C, self.C, dtype=torch.bool, device=device).tril()
        self.mask_B1CS = torch.cat(
            [sees_prompt_BP[:, None].expand(-1, self.C, -1), causal_CC.expand(self.B, -1, -1)], dim=-1
        )[:, None]

    def attend(self, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
        of_prompts = self.packed.attend(*(take_rows(x, self.prompt_flat) for x in (q_THE, k_TKE, v_TKE)))
        q_BHCE = self._rectangle(q_THE).transpose(1, 2)
        k_BKSE, v_BKSE = (
            torch.cat([self._prompts(x), self._rectangle(x)], dim=1).transpose(1, 2) for x in (k_TKE, v_TKE)
        )
        gqa = q_BHCE.shape[1] != k_BKSE.shape[1]
        out = F.scaled_dot_product_attention(q_BHCE, k_BKSE, v_BKSE, attn_mask=self.mask_B1CS, enable_gqa=gqa)
        of_completions = take_rows(out.transpose(1, 2).reshape(self.B * self.C, -1), self.cell)
        return take_rows(torch.cat([of_prompts, of_completions]), self.order)

    def _rectangle(self, x_THE: Tensor) -> Tensor:
        """The completions' rows as B x C, zeros where one is shorter."""
        return put_rows(take_rows(x_THE, self.flat), self.cell, self.B * self.C).view(self.B, self.C, *x_THE.shape[1:])

    def _prompts(self, x_TKE: Tensor) -> Tensor:
        """The prompts' rows as B x P: each group's copied to its samples."""
        padded = put_rows(take_rows(x_TKE, self.prompt_flat), self.prompt_cell, self.G * self.P)
        return padded.view(self.G, self.P, *x_TKE.shape[1:]).index_select(0, self.group_B)

    def _tensor(self, parts: list[NDArray[np.int64]]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self.device)
