"""One adapter at a time merged into a copy of a frozen model's weights.

frozen base W ─┬─ trainers: W x + B (A x)
               └─ merged copy W + B A of the linears ─► an engine, as fast as without adapters
"""

import torch
from torch import Tensor, nn

from hone.models.adapters import Adapter
from hone.models.hf import hf_names, split_rows
from hone.models.language_model import LanguageModel
from hone.models.lora import HEAD, add_product, list_linears, share_base


class MergedWeights:
    """A model that shares all weights of a frozen base but those of the blocks' linears and the head.

    Attributes:
        model: the model, whose weights keep their addresses.
    """

    def __init__(self, base: LanguageModel) -> None:
        self.model = share_base(base)
        table = hf_names(base.spec)
        # Base weight, merged copy, our name, and the HF linears that they stack by rows.
        self._copies: list[tuple[Tensor, Tensor, str, list[str]]] = []
        for linear, name in list_linears(self.model):
            own = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
            theirs = [one.removesuffix(".weight") for one in table[name]]
            self._copies.append((linear.weight, own, name, theirs))
            linear.weight = own
        head = nn.Parameter(base.head_weight_VD.detach().clone(), requires_grad=False)
        self._copies.append((base.head_weight_VD, head, "head.weight", [HEAD]))
        self.model.head = nn.Module()
        self.model.head.weight = head
        self._is_plain = True

    @torch.no_grad()
    def merge_adapter(self, adapter: Adapter | None) -> None:
        """Merge an adapter in place of the present one; None: none.

        Raises ValueError for an adapter of linears that the model does not have.
        """
        if adapter is None and self._is_plain:
            return
        weights = {} if adapter is None else adapter.weights
        unknown = set(weights) - {name for *_, names in self._copies for name in names}
        if unknown:
            raise ValueError(f"an adapter of {min(unknown)}, which this model does not have")
        self._is_plain = False
        for base, own, ours, names in self._copies:
            found = [name for name in names if name in weights]
            if not found:
                own.copy_(base)
                continue
            merged = base.to(torch.float32, copy=True)
            parts = dict(zip(names, split_rows(self.model.spec, ours, merged), strict=True))
            for name in found:
                add_product(parts[name], *weights[name], 1.0, own.dtype)
            own.copy_(merged)
        self._is_plain = adapter is None
