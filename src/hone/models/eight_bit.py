"""Frozen linear layers whose weights are stored in 8 bits, for LoRA on cards with little memory.

    w[o, i] ~ codes[o, i] * scales[o, i // SIZE]     int8, one scale per row and block of inputs

A layer computes its weight in the model's dtype when it is used. Training keeps these weights only
within a block, provided that blocks are recomputed in the backward pass.
"""

import torch
from torch import Tensor, nn

from hone.models.language_model import LanguageModel
from hone.models.layers import Linear
from hone.models.spec import BLOCK_INPUTS

MAX_CODE = 127


class EightBitLinear(Linear):
    """y = W x + b with W in 8 bits; not trained."""

    def __init__(self, source: Linear) -> None:
        """Quantize the weight of `source`; share its bias."""
        nn.Module.__init__(self)  # Linear's constructor would allocate the weight
        self.bias = source.bias
        self.delta = source.delta
        weight = source.weight.detach()
        outputs, inputs = weight.shape
        size = next(n for n in range(min(BLOCK_INPUTS, inputs), 0, -1) if inputs % n == 0)
        blocks = weight.float().view(outputs, inputs // size, size)
        # Scales are exact in bfloat16, so that all dtypes represent the same weights.
        scales = (blocks.abs().amax(-1) / MAX_CODE).to(torch.bfloat16)
        scales = torch.where(scales == 0, torch.ones_like(scales), scales)
        codes = (blocks / scales.float()[..., None]).round().clamp(-MAX_CODE, MAX_CODE)
        self.register_buffer("codes", codes.to(torch.int8), persistent=False)
        self.register_buffer("scales", scales.to(weight.dtype)[..., None], persistent=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Return the weight (outputs x inputs) in the model's dtype, computed anew."""
        codes: Tensor = self.codes  # type: ignore[assignment]
        scales: Tensor = self.scales  # type: ignore[assignment]
        return (codes * scales).flatten(1)


def quantize_blocks(model: LanguageModel, device: torch.device | str | None = None) -> None:
    """Replace the linear layers of the model's blocks by layers with 8-bit weights.

    With `device` each layer is moved there first; the other weights stay where they are. A layer
    is released before the next one is read, so that the device never holds the whole model in its
    dtype.
    """
    places = [
        (module, name)
        for module in model.blocks.modules()
        for name, layer in module.named_children()
        if type(layer) is Linear
    ]
    for module, name in places:
        layer = getattr(module, name)
        setattr(module, name, EightBitLinear(layer if device is None else layer.to(device)))
        del layer


def count_weights(model: nn.Module) -> int:
    """Return the number of the model's weights, with adapters and those in 8 bits."""
    codes = [module for name, module in model.named_buffers() if name.endswith(".codes")]
    return sum(x.numel() for x in [*model.parameters(), *codes])
