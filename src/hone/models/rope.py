"""Rotary positions (Su et al. 2021): frequencies of a layer, what scales them, and config.json keys.

Imports no torch; the methods `scale` compute on tensors that they are given.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


PROPORTIONAL = "proportional"  # rope type


class NotImplementedHere(ValueError):
    """An architecture or option that Hone's own implementation does not have."""


class RopeScaling(Protocol):
    """Change of the frequencies, for contexts longer than a model was pretrained with."""

    @property
    def original_length(self) -> int | None:
        """Return the context length in tokens before scaling, if the scaling depends on it."""
        ...

    @property
    def amplitude(self) -> float:
        """Return the factor of cos and sin."""
        ...

    def scale(self, frequencies: "Tensor", theta: float) -> "Tensor":
        """Return the scaled frequencies, in radians per token."""
        ...


@dataclass(frozen=True)
class LinearRope:
    """All frequencies are divided by `factor` (position interpolation)."""

    factor: float
    original_length: int | None = None
    amplitude: float = 1.0

    def scale(self, frequencies: "Tensor", theta: float) -> "Tensor":
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Rope:
    """Scaling of Llama 3.1.

    Low frequencies are divided by `factor`, high ones are kept, and those between are blended, by
    their number of turns within the original context length.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int
    amplitude: float = 1.0

    def scale(self, frequencies: "Tensor", theta: float) -> "Tensor":
        turns = self.original_length * frequencies / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        kept = ((turns - self.low_freq_factor) / span).clamp(0, 1)
        return kept * frequencies + (1 - kept) * frequencies / self.factor


@dataclass(frozen=True)
class YarnRope:
    """YaRN (Peng et al. 2023): frequencies that turn seldom are divided by `factor`.

    Between `beta_fast` and `beta_slow` turns within the original length, the share that is divided
    grows linearly with the index of the frequency; with `truncate` from and to whole indices.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_length: int
    amplitude: float
    truncate: bool = True

    def scale(self, frequencies: "Tensor", theta: float) -> "Tensor":
        width = 2 * len(frequencies)

        def find_index(turns: float) -> float:
            length = self.original_length / (turns * 2 * math.pi)
            return width * math.log(length) / (2 * math.log(theta))

        low, high = find_index(self.beta_fast), find_index(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        index = frequencies.new_tensor(range(len(frequencies)))
        kept = 1 - ((index - low) / (high - low or 0.001)).clamp(0, 1)
        return kept * frequencies + (1 - kept) * frequencies / self.factor


@dataclass(frozen=True)
class ProportionalRope:
    """Gemma 4: the first `share` of the frequencies rotate, divided by `factor`; the others do not."""

    share: float
    factor: float = 1.0
    original_length: int | None = None
    amplitude: float = 1.0

    def scale(self, frequencies: "Tensor", theta: float) -> "Tensor":
        kept = int(self.share * len(frequencies))
        scaled = frequencies / self.factor
        scaled[kept:] = 0.0
        return scaled


@dataclass(frozen=True)
class ShortRope:
    """LongRoPE (Ding et al. 2024) within the original length: a divisor for each frequency.

    Longer sequences need other divisors for all tokens, so the parser limits the context to the
    original length.
    """

    divisors: tuple[float, ...]
    original_length: int
    amplitude: float

    def scale(self, frequencies: "Tensor", theta: float) -> "Tensor":
        if len(self.divisors) != len(frequencies):
            raise ValueError(
                f"rope short_factor has {len(self.divisors)} numbers, the model {len(frequencies)} frequencies"
            )
        return frequencies / frequencies.new_tensor(self.divisors)


@dataclass(frozen=True)
class Rope:
    """Rotary positions of a layer.

    Attributes:
        theta: base; frequency i is theta^(-2i / width).
        width: how many numbers of a head are rotated, the first ones.
        scaling: change of the frequencies; None: none.
        query_growth: queries grow by 1 + query_growth * log(1 + position // original_length).
    """

    theta: float
    width: int
    scaling: RopeScaling | None = None
    query_growth: float = 0.0

    @property
    def original_length(self) -> int | None:
        return None if self.scaling is None else self.scaling.original_length

    @property
    def growth(self) -> tuple[float, int] | None:
        """Return `query_growth` and the original length if queries grow, else None."""
        if not self.query_growth or self.original_length is None:
            return None
        return self.query_growth, self.original_length


def parse_rope(keys: dict[str, Any], config: dict[str, Any], head_dim: int, origin: str) -> Rope:
    """Return the rope of layers from its keys (`rope_parameters` or `rope_scaling`).

    Args:
        keys: what config.json says of these layers, may be empty.
        config: whole config.json; `rope_theta`, `partial_rotary_factor` and the original length may
            stand there.

    Raises:
        NotImplementedHere: an unsupported kind of scaling.
        KeyError: a missing key.
    """
    share = keys.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if keys.get("rope_type") == PROPORTIONAL:
        share = None  # of the frequencies, which the scaling selects
    theta = keys.get("rope_theta", config.get("rope_theta"))
    return Rope(
        theta=float(10000.0 if theta is None else theta),
        width=int(head_dim * (1.0 if share is None else float(share))),
        scaling=_parse_scaling(keys, config, origin),
        query_growth=float(keys.get("llama_4_scaling_beta") or 0.0),
    )


def _parse_scaling(keys: dict[str, Any], config: dict[str, Any], origin: str) -> RopeScaling | None:
    kind = keys.get("rope_type", keys.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearRope(float(keys["factor"]))
    if kind == PROPORTIONAL:
        share = float(keys.get("partial_rotary_factor", 1.0))
        return ProportionalRope(share, float(keys.get("factor") or 1.0))
    if kind == "llama3":
        return Llama3Rope(
            factor=float(keys["factor"]),
            low_freq_factor=float(keys["low_freq_factor"]),
            high_freq_factor=float(keys["high_freq_factor"]),
            original_length=int(keys.get("original_max_position_embeddings") or 0)
            or int(config["max_position_embeddings"]),
        )
    longest = int(config.get("max_position_embeddings") or 0)
    original = int(keys.get("original_max_position_embeddings") or longest)
    if kind == "yarn":
        factor = float(keys["factor"])
        return YarnRope(
            factor=factor,
            beta_fast=float(keys.get("beta_fast") or 32.0),
            beta_slow=float(keys.get("beta_slow") or 1.0),
            original_length=original,
            amplitude=_compute_yarn_amplitude(keys, factor),
            truncate=bool(keys.get("truncate", True)),
        )
    if kind == "longrope":
        given = keys.get("attention_factor")
        factor = float(keys.get("factor") or longest / original)
        grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return ShortRope(
            divisors=tuple(map(float, keys["short_factor"])),
            original_length=original,
            amplitude=float(grown if given is None else given),
        )
    raise NotImplementedHere(
        f"{origin}: rope type {kind!r} is not supported; supported: default, linear, llama3, longrope, "
        "proportional, yarn"
    )


def _compute_yarn_amplitude(keys: dict[str, Any], factor: float) -> float:
    """Return the factor of cos and sin in YaRN, as transformers derives it."""
    if keys.get("attention_factor") is not None:
        return float(keys["attention_factor"])

    def grow(share: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0

    share, of_all = keys.get("mscale"), keys.get("mscale_all_dim")
    return grow(share) / grow(of_all) if share and of_all else grow(1.0)
