"""Pack data with free targets into micro-batches.

tokens    a a a b b          K targets for a position: its hidden state counts K times
targets   x y z u v
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hone.kernels.pinned_memory import to_device
from hone.models.attention_layouts import PackedAttention
from hone.session.session_data import PER_TARGET
from hone.session.session_losses import Targets
from hone.trainer.packing import Packed

Arrays = Mapping[str, NDArray[Any]]


def pack_data(data: Sequence[Arrays], device: torch.device) -> Packed:
    """Pack the arrays of data (`Datum.build_arrays`); every position is computed, also without weight."""
    lengths = [len(one["tokens"]) for one in data]
    per_row = np.concatenate(
        [np.full(len(one["tokens"]), one["targets"].size // len(one["tokens"])) for one in data]
    )
    rows = len(per_row)
    targets = np.concatenate([one["targets"].reshape(-1) for one in data])
    owner = np.repeat(np.arange(len(data)), [one["targets"].size for one in data])
    has_several = bool((per_row > 1).any())
    tokens = np.concatenate([one["tokens"] for one in data])
    return Packed(
        PackedAttention(lengths, device),
        to_device(tokens, device),
        to_device(np.arange(rows), device),
        to_device(np.repeat(np.arange(rows), per_row), device) if has_several else None,
        to_device(targets, device),
        to_device(owner, device),
        np.arange(rows),
        np.arange(len(targets)),
        len(data),
    )


def select_targets(data: Sequence[Arrays], packed: Packed) -> Targets:
    """Return the inputs of losses that all data have."""
    given = {
        name: to_device(
            np.concatenate([one[name].reshape(-1) for one in data]), packed.targets_N.device
        )
        for name in PER_TARGET
        if all(name in one for one in data)
    }
    return Targets(given, packed.sequence_N)


def split_by_datum(
    values_N: NDArray[np.float32], data: Sequence[Arrays]
) -> list[NDArray[np.float32]]:
    """Return the numbers of packed targets for each datum, shaped like its targets."""
    ends = np.cumsum([one["targets"].size for one in data])[:-1]
    parts = np.split(values_N, ends)
    return [part.reshape(one["targets"].shape) for part, one in zip(parts, data, strict=True)]
