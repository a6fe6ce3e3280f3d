"""The interface of a causal language model, for training and for sampling.

    LanguageModel ◄── Transformer      Hone's own blocks (transformer.py)
                  ◄── HFModel          transformers' modules (hf_model.py)

Shapes: T tokens, N kept tokens, D hidden, V vocabulary.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.kernels import gpu, row_state
from hone.kernels.head import cap_logits
from hone.kernels.linear import linear
from hone.models.layers import Attention
from hone.models.spec import ModelSpec


class LanguageModel(nn.Module):
    """A causal language model; `forward` returns hidden states, `compute_logits` logits.

    Attributes:
        spec: shape of the model.
        embed: token embedding, with a `weight` (V x D).
        blocks: the model's layers, which training shards and stores in 8 bits.
        head: linear layer to logits; None if it is the embedding.
        head_delta: adapter of the head in training; None if it has none.
        recomputes: with gradients, keep only the inputs of blocks and compute the rest in backward.
        routing_TR: experts to use in all blocks, -1 for the router's choice; None: its choice.
    """

    has_other_forms: ClassVar[bool] = False  # files may store weights under other names, or split

    embed: Any
    blocks: nn.ModuleList
    head: Any

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.recomputes = False
        self.head_delta: Any = None
        self.routing_TR: Tensor | None = None

    @classmethod
    def weight_names(cls, spec: ModelSpec) -> dict[str, list[str]]:
        """Return, by parameter name, the names of the HF tensors that the parameter stacks by rows."""
        raise NotImplementedError

    if TYPE_CHECKING:

        def __call__(
            self,
            tokens_T: Tensor,
            positions_T: Tensor,
            attend: Attention,
            keep_N: Tensor | None = None,
        ) -> Tensor: ...

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attention, keep_N: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states after the final norm, T x D, or only the rows `keep_N`, N x D.

        `positions_T` are the tokens' positions in their own sequences. `attend` determines which
        tokens of the flat axis T see each other.
        """
        raise NotImplementedError

    def read_converted(self, directory: Path) -> dict[str, Tensor]:
        """Return the weights of files that store them in another form, by HF name.

        For models with `has_other_forms`. Raises ValueError for missing or further tensors.
        """
        raise NotImplementedError

    def convert_for_files(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return all of the model's tensors, given by HF name, in the form that its files have."""
        return tensors

    def refuse_unsupported(self) -> None:
        """Raise ValueError if a pass of this model would not be what its config.json says."""

    def forward_newest(self, active_B: Tensor, state: Tensor, attend: Attention) -> Tensor:
        """Run `forward` on the newest token of each active row of the state matrix, B x D.

        `row_state.py` has the columns of `state`.
        """
        # Two gathers: kernels need contiguous tensors, which columns of one are not.
        tokens_B, positions_B = state[active_B, row_state.LAST], state[active_B, row_state.LENGTH]
        return self(tokens_B, positions_B, attend)

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw new weights."""
        raise NotImplementedError

    @property
    def stays_on_device(self) -> bool:
        """Return True if a pass over few tokens needs no host work, as CUDA graphs require."""
        return False

    @property
    def prefills_on_device(self) -> bool:
        """Return True if a pass over whole prompts needs no host work either."""
        return self.stays_on_device

    @property
    def trains_prefixes(self) -> bool:
        """Return True if a GPU computes attention to shared prompts, with gradients, without padding."""
        return gpu.trains_model(self.embed.weight, self.spec.head_dim)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of a sequence's state, in models with other mixers than attention."""
        return 0

    @property
    def expert_layers(self) -> list[Any]:
        """Return the mixture of experts of each block, for models with replayed routing."""
        return []

    def compute_logits(self, hidden_TD: Tensor) -> Tensor:
        """Return logits (T x V) in the dtype of the weights."""
        return cap_logits(linear(*self.head_inputs(hidden_TD)), self.spec.logit_cap)

    def head_inputs(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states and the head's weight, whose product are the logits.

        Both have further columns for the head's adapter: x W^T + (x A^T) B^T = [x, x A^T] [W, B]^T.
        """
        weight_VD = self.head_weight_VD
        if self.head_delta is None:
            return hidden_TD, weight_VD
        a_RD, b_VR = self.head_delta.scaled_factors()
        # Products of a GPU want a multiple of 16 columns.
        more = -(weight_VD.shape[1] + len(a_RD)) % 16
        inner_TR = F.pad(F.linear(hidden_TD, a_RD), (0, more))
        wide_VD = torch.cat([weight_VD, F.pad(b_VR, (0, more))], 1)
        return torch.cat([hidden_TD, inner_TR], 1), wide_VD

    @property
    def head_weight_VD(self) -> Tensor:
        """Return the head's weight, which is the embedding's if they are tied."""
        weight: Tensor = self.embed.weight if self.head is None else self.head.weight
        return weight
