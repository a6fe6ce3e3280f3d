"""Clamped gating of GPT-OSS's experts. Imports no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ClampedGating:
    """(up + 1) * gate * sigmoid(alpha gate), with both clamped first.

    Gates and ups alternate: gate 0, up 0, gate 1, up 1, …

    Attributes:
        alpha: slope of the sigmoid.
        limit: upper bound of gates; ups are clamped to [-limit, limit].
    """

    alpha: float
    limit: float

    def apply(self, gate_up: "Tensor") -> "Tensor":
        """Return the gated units, T x F, of gate_up T x 2F."""
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * (self.alpha * gate).sigmoid()
