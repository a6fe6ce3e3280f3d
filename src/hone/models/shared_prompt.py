"""Causal attention for completions that share prompts: each prompt is computed once for all of its completions.

    flat    [prompt 0][completion 00][completion 01]…[prompt 1][completion 10]…
    prompts attend to themselves (PackedAttention); completions, as one rectangle of B x C queries, to their
    prompt and to what is before them: B x (P + C) keys, of which the first P are copies of the group's prompt

The linear layers see every prompt once, which is most of the saving: a group of n samples costs one prompt
and n completions instead of n of both.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from hone.kernels.rows import put_rows, take_rows
from hone.models.attention import PackedAttention


class SharedPromptAttention:
    """G prompts with their completions; `completions[g]` has the lengths of those of prompt g, each 0 or more."""

    def __init__(self, prompts: list[int], completions: list[list[int]], device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        lengths = [n for group in completions for n in group]
        group_B = np.repeat(np.arange(len(prompts)), [len(group) for group in completions])
        self.P, self.C, self.B, self.G = max(prompts), max(lengths), len(lengths), len(prompts)
        prompt_flat, prompt_cell, flat, cell, positions = [], [], [], [], []
        at = row = 0
        for g, (prompt, group) in enumerate(zip(prompts, completions, strict=True)):
            prompt_flat.append(np.arange(at, at + prompt))
            prompt_cell.append(np.arange(prompt) + g * self.P)
            positions.append(np.arange(prompt))
            at += prompt
            for n in group:
                flat.append(np.arange(at, at + n))
                cell.append(np.arange(n) + row * self.C)
                positions.append(np.arange(n) + prompt)
                at, row = at + n, row + 1
        self.prompts = PackedAttention(prompts, self.device)
        self.prompt_flat, self.prompt_cell, self.flat, self.cell, self.positions_T = (
            self._tensor(parts) for parts in (prompt_flat, prompt_cell, flat, cell, positions)
        )
        self.order = torch.empty_like(self.positions_T)  # prompts first, then completions, back to the flat order
        self.order[torch.cat([self.prompt_flat, self.flat])] = torch.arange(at, device=self.device)
        self.group_B = torch.from_numpy(group_B).to(self.device)
        prompt_B1 = torch.tensor(prompts, device=self.device)[self.group_B][:, None]
        sees_prompt_BP = torch.arange(self.P, device=self.device) < prompt_B1
        causal_CC = torch.ones(self.C, self.C, dtype=torch.bool, device=self.device).tril()
        self.mask_B1CS = torch.cat(
            [sees_prompt_BP[:, None].expand(-1, self.C, -1), causal_CC.expand(self.B, -1, -1)], dim=-1
        )[:, None]

    def positions(self) -> Tensor:
        """Position of every flat token in its own sequence: completions go on where their prompt ends."""
        return self.positions_T

    def __call__(self, layer: int, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
        of_prompts = self.prompts(layer, *(take_rows(x, self.prompt_flat) for x in (q_THE, k_TKE, v_TKE)))
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
