"""What changes a layer's attention from its plain form, for GPU kernels of a decode step."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionForm:
    """Form of a layer's attention, as GPU kernels of a decode step read it.

    Attributes:
        scale: factor of q k; None: E^-0.5.
        window: number of latest tokens that a token sees, itself included; None: all.
        cap: attention logits become cap * tanh(logits / cap); None: they do not.
        norm_offset: added to the stored weights of the norms of q and k.
        growth: queries at position p grow by 1 + growth * ln(1 + floor(p / growth_length)).
        growth_length: in tokens.
    """

    scale: float | None = None
    window: int | None = None
    cap: float | None = None
    norm_offset: float = 0.0
    growth: float = 0.0
    growth_length: int = 1

    def scale_log2(self, head_dim: int) -> float:
        """Return the factor of q k for a softmax in base 2."""
        if self.scale is None:
            return math.log2(math.e) / math.sqrt(head_dim)
        return math.log2(math.e) * self.scale

    def constants(self) -> dict[str, float]:
        """Return the constants of `alone_kernel`."""
        return {
            "OFFSET": self.norm_offset,
            "WINDOW": self.window or 0,
            "CAP": self.cap or 0.0,
            "GROWTH": self.growth,
            "GROWTH_LENGTH": self.growth_length,
        }


PLAIN_FORM = AttentionForm()
