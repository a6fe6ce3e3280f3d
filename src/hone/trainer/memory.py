"""How much memory a training step takes, before it is taken. Imports no torch.

weights, fp32 masters, moments                         always there
activations of a micro-batch, a part of the logits     going forward, and the most of both where the way back begins
gradients, and those of half precision once more       at its end, when the optimiser moves the masters
"""

from dataclasses import dataclass

from hone.config.rl import TrainerConfig
from hone.models.spec import ModelSpec

TEMPORARY = 1.1  # of what is kept for going back; measured: benchmarks/RESULTS.md, `rl` on one GPU
FEW_TOKENS, MANY_TOKENS = 2**14, 2**15  # of a micro-batch by default
SHARE = 8  # the eighth part of a GPU's memory that more than FEW_TOKENS may take
HEAD = 7 * 2**29  # a part of the logits in fp32, at most 1 GiB, with its gradient and what is made from it


@dataclass(frozen=True)
class Estimate:
    """Bytes of a training step by what they hold."""

    weights: int
    masters: int
    moments: int
    gradients: int
    activations: int
    logits: int

    @property
    def step(self) -> int:
        """Beside weights and the optimiser's state."""
        return self.gradients + self.activations + self.logits

    @property
    def peak(self) -> int:
        return self.weights + self.masters + self.moments + self.step


def estimate(spec: ModelSpec, config: TrainerConfig, tokens: int, itemsize: int) -> Estimate:
    """Of a step with up to so many tokens in a micro-batch; `itemsize`: bytes of a weight."""
    trained = adapter_size(spec, config) if config.lora else spec.parameters()
    is_half = itemsize < 4
    return Estimate(
        weights=(spec.parameters() + (trained if config.lora else 0)) * itemsize,
        masters=4 * trained if is_half else 0,
        moments=8 * trained,
        gradients=trained * (itemsize + (4 if is_half else 0)),
        activations=token_bytes(spec, itemsize, config.activation_checkpointing) * tokens,
        logits=HEAD,
    )


def adapter_size(spec: ModelSpec, config: TrainerConfig) -> int:
    """Numbers that are trained of an adapter."""
    assert config.lora is not None
    sizes = [sum(spec.linears[target]) for target in config.lora.targets or spec.linears]
    return config.lora.rank * sum(sizes) * spec.num_hidden_layers


def token_bytes(spec: ModelSpec, itemsize: int, recomputes: bool) -> int:
    """Bytes of a token's activations."""
    heads = (spec.num_attention_heads + 2 * spec.num_key_value_heads) * spec.head_dim
    of_block = spec.kept_feed_forward + heads + spec.hidden_size
    kept = spec.num_hidden_layers * spec.hidden_size + of_block if recomputes else spec.num_hidden_layers * of_block
    return int(TEMPORARY * kept * itemsize)


def micro_batch_tokens(spec: ModelSpec, itemsize: int, recomputes: bool, device_bytes: int | None) -> int:
    """How many tokens go through the model at once by default: FEW_TOKENS, on a GPU of so many bytes up to MANY_TOKENS,
    as far as their activations take an eighth of its memory at most."""
    if device_bytes is None:
        return FEW_TOKENS
    return max(FEW_TOKENS, min(MANY_TOKENS, device_bytes // SHARE // token_bytes(spec, itemsize, recomputes)))
