"""Configuration of the policy loss. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from hone.config.base import Config
from hone.config.sections import Arguments, Positive, named_or_own

# Inputs that a loss may need: whole sequences in one call, entropies with a gradient, logprobs of
# the initial model, and a teacher's.
Need = Literal["whole_sequences", "entropy", "reference", "teacher"]


@dataclass(frozen=True)
class Kind:
    """The keys that apply to a loss, and the inputs that it always needs."""

    keys: frozenset[str]
    needs: frozenset[Need] = frozenset()


BOUNDS = frozenset({"mask_ratio_low", "mask_ratio_high", "kl_tau", "ratio_type"})
KINDS = {
    "mask": Kind(BOUNDS),
    "dppo": Kind(frozenset({"max_shift", "kl_tau", "ratio_type"})),
    "ppo": Kind(frozenset({"clip_low", "clip_high", "ratio_type"})),
    "cispo": Kind(frozenset({"ratio_cap", "ratio_type"})),
    "tis": Kind(frozenset({"ratio_cap", "ratio_type"})),
    "sft": Kind(frozenset()),
    "opd": Kind(BOUNDS, frozenset({"teacher"})),
}
OWN = Kind(frozenset({"args", "ratio_type"}))  # the function declares its own needs


class LossConfig(Config):
    type: str = "mask"
    """Policy loss: mask (importance-weighted; tokens whose ratio is out of bounds are dropped), dppo, ppo (the loss of
    GRPO, and of GSPO with ratio_type sequence), cispo, tis, sft (cross-entropy on the sampled text), opd (distillation
    from a teacher's logprobs), or your own function as package.module:function."""
    args: Arguments = Field(default={})
    """Keys of a loss of your own: the keyword-only parameters of its function."""
    mask_ratio_low: Annotated[float, Field(ge=0)] = 0.125
    """mask, opd: tokens whose importance ratio is below this have no loss."""
    mask_ratio_high: Annotated[float, Field(gt=0)] = 8.0
    """mask, opd: tokens whose importance ratio is above this have no loss."""
    ratio_type: Literal["token", "sequence"] = "token"
    """Importance ratio of each token by itself, or one for the whole sequence: the geometric mean over its tokens."""
    kl_tau: Annotated[float, Field(ge=0)] | None = None
    """Pull towards the policy that sampled. mask, opd: weight of the log of the importance ratio, added to the loss of
    each kept token; 0 unless given. dppo: weight of its square, for each token; 1e-3 unless given."""
    max_shift: Annotated[float, Field(gt=0)] = 0.2
    """dppo: tokens whose probability has already moved further than this in the direction of the advantage have no
    loss."""
    clip_low: Annotated[float, Field(gt=0)] = 0.2
    """ppo: the importance ratio is clipped from below at 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """ppo: the importance ratio is clipped from above at 1 + clip_high; a larger value lets unlikely tokens rise
    faster."""
    ratio_cap: Annotated[float, Field(gt=0)] = 2.0
    """cispo, tis: upper bound of the importance ratio that weights a token."""
    kl_beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence (k3 estimator) from the model that training started from; above 0 a copy of that
    model is kept in memory."""
    entropy_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of a bonus for the policy's entropy; larger keeps sampling more varied."""
    normalize: Literal["tokens", "sequences", "constant"] = "tokens"
    """How token losses are averaged. tokens: each token of the batch counts the same; sequences: each sequence counts
    the same; constant: the sum is divided by sequences x max_length."""
    max_length: Positive = 1024
    """normalize constant: number of tokens that each sequence is counted as."""

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> "LossConfig":
        named_or_own(self.type, KINDS, "loss.type")
        fields = type(self).model_fields
        changed = {key for key, field in fields.items() if getattr(self, key) != field.default}
        everyones = {"type", "kl_beta", "entropy_weight", "normalize", "max_length"}
        idle = sorted(changed - everyones - self.loss_kind.keys)
        if idle:
            raise ValueError(f"loss.{idle[0]} has no effect with loss.type {self.type}")
        if "max_length" in changed and self.normalize != "constant":
            raise ValueError(f"loss.max_length has no effect with loss.normalize {self.normalize}")
        return self

    @property
    def loss_kind(self) -> Kind:
        return KINDS.get(self.type, OWN)

    @property
    def required_inputs(self) -> frozenset[Need]:
        """Return the inputs that this loss needs, except those that a user's function declares."""
        asked: dict[Need, bool] = {
            "whole_sequences": self.ratio_type == "sequence",
            "entropy": self.entropy_weight > 0,
            "reference": self.kl_beta > 0,
        }
        return self.loss_kind.needs | {need for need, is_asked in asked.items() if is_asked}

    @property
    def kl_coefficient(self) -> float:
        return self.kl_tau if self.kl_tau is not None else 1e-3 if self.type == "dppo" else 0.0
