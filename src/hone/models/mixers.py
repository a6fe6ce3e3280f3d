"""Mixers of tokens beside attention (linear attention, convolutions, Mamba) of transformers' modules.

A mixer computes a sequence from its start, or from the state after its earlier tokens. So sequences
that lie end to end are computed one by one, and a completion starts from the state of its prompt.

Shapes: B sequences, L tokens of each, D hidden.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

MIXER_VERSION = "5.21"  # the first whose mixers continue from a state with several tokens
# Names that transformers' mixers give their cache.
CACHE_NAMES = ("cache_params", "past_key_values")


@dataclass(frozen=True)
class MixerState:
    """State of a mixer after the tokens of B sequences; each tensor has B rows.

    A mixer may have several tensors of a kind, by index.
    """

    convolution: dict[int, Tensor] = field(default_factory=dict)
    recurrent: dict[int, Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.convolution.values(), *self.recurrent.values()]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors)

    @property
    def sequence_count(self) -> int:
        return len(self.tensors[0])

    def row(self, index: int) -> "MixerState":
        """Return the state of one sequence."""
        parts = (self.convolution, self.recurrent)
        return MixerState(*({i: x[index : index + 1] for i, x in part.items()} for part in parts))

    @staticmethod
    def stack(states: "Sequence[MixerState]") -> "MixerState":
        """Return the state of all sequences of these states."""
        first = states[0]
        return MixerState(
            {i: torch.cat([one.convolution[i] for one in states]) for i in first.convolution},
            {i: torch.cat([one.recurrent[i] for one in states]) for i in first.recurrent},
        )


# (inputs B x L x D, state before them or None) -> (outputs, state after them)
Mixer = Callable[[Tensor, MixerState | None], tuple[Tensor, MixerState]]


class StateCache:
    """Stand-in for transformers' cache of one mixer: gives the state before, records the one after."""

    def __init__(self, before: MixerState | None) -> None:
        state = before or MixerState()
        # Mixers change what they are given in place.
        self.convolution = {i: x.clone() for i, x in state.convolution.items()}
        self.recurrent = {i: x.clone() for i, x in state.recurrent.items()}

    @property
    def state(self) -> MixerState:
        return MixerState(self.convolution, self.recurrent)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.convolution.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent.get(state_idx)

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **others: Any,
    ) -> Tensor:
        """Append columns (B x C x L); return them after the earlier ones, keep the last."""
        before = self.convolution.get(state_idx)
        whole = conv_states if before is None else torch.cat([before, conv_states], -1)
        kept = conv_kernel_size or conv_states.shape[-1]
        last = whole[..., -kept:]
        self.convolution[state_idx] = nn.functional.pad(last, (kept - last.shape[-1], 0))
        return whole

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **others: Any
    ) -> Tensor:
        self.recurrent[state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


def find_mixers(layer: nn.Module) -> list[nn.Module]:
    """Return the modules of a layer that mix tokens with a causal convolution."""
    return [
        module
        for module in layer.modules()
        if any(isinstance(child, nn.Conv1d) for child in module.children())
    ]


def make_mixer(module: nn.Module) -> Mixer:
    """Return the computation of a transformers module as a Mixer. Raises ValueError."""
    import transformers

    if not hasattr(transformers.Cache, "get_conv_state"):
        raise ValueError(
            f"{type(module).__name__} needs transformers {MIXER_VERSION} or later, found {transformers.__version__}"
        )
    known = inspect.signature(type(module).forward).parameters
    name = next((name for name in CACHE_NAMES if name in known), None)
    if name is None:
        raise ValueError(
            f"{type(module).__name__} is not supported: it takes none of {', '.join(CACHE_NAMES)}"
        )

    return _ModuleMixer(module, name)


@dataclass(frozen=True)
class _ModuleMixer:
    """Mixer that a module of transformers computes. A deep copy of a model has its own modules."""

    module: nn.Module
    cache_name: str

    def __call__(self, x_BLD: Tensor, before: MixerState | None) -> tuple[Tensor, MixerState]:
        if before is not None and x_BLD.shape[1] == 1 and torch.is_grad_enabled():
            # Modules compute a single token in place, without gradients.
            y_BLD, after = self(nn.functional.pad(x_BLD, (0, 0, 0, 1)), before)
            return y_BLD[:, :1], after  # no sequence continues from it
        cache = StateCache(before)
        forward = type(self.module).forward
        y_BLD = forward(self.module, hidden_states=x_BLD, **{self.cache_name: cache})
        return y_BLD, cache.state
