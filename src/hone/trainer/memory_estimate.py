"""Estimate the memory of a training step in advance. Imports no torch.

    weights, fp32 masters, moments, a reference model         always
    activations of a micro-batch, a chunk of the logits       peak at the start of the backward pass
    gradients, and fp32 copies of half-precision gradients    peak in the optimizer step

The two peaks do not coincide: activations are freed while gradients are computed.
benchmarks/memory_gpu.py compares the estimate with measured memory.
"""

from dataclasses import dataclass, fields

from hone.config.lora_config import LoRAConfig
from hone.config.rl_config import TrainerConfig
from hone.config.sections import OptimConfig
from hone.models.families.qwen3_5 import DELTA_PROJECTIONS
from hone.models.spec import BLOCK_INPUTS, ModelSpec

ACTIVATION_SLACK = 1.03  # factor for activations; measured 1.01 to 1.03
FEW_TOKENS, MANY_TOKENS = 2**14, 2**15  # per micro-batch by default
MEMORY_DIVISOR = 5  # one over the share of GPU memory that more than FEW_TOKENS may take
MUON_BLOCKS = 4  # blocks per Muon step, of four matrices each (muon.AT_ONCE)
# Weights whose offloaded state is on the device at a time (kernels/pinned_memory.py).
AT_ONCE = 2**25
CHUNK = 2**30  # bytes of logits at a time, in fp32 (kernels/head.py)


@dataclass(frozen=True)
class Estimate:
    """Estimated bytes of a training step, by what they hold."""

    weights: int
    masters: int
    moments: int
    gradients: int
    activations: int
    logits: int
    sums: int  # fp32 sums of the gradients of earlier micro-batches
    host: int = 0  # bytes of host memory

    @property
    def step_bytes(self) -> int:
        """Return the peak bytes in addition to weights and optimizer state."""
        return self.sums + max(self.gradients, self.activations + self.logits)

    @property
    def peak_bytes(self) -> int:
        return self.weights + self.masters + self.moments + self.step_bytes

    def describe_estimate(self) -> str:
        parts = [
            f"{field.name} {getattr(self, field.name) / 2**30:.2f}"
            for field in fields(self)
            if field.name != "host" and (field.name != "sums" or self.sums)
        ]
        away = f", and {self.host / 2**30:.2f} GiB of the machine's memory" if self.host else ""
        return f"{', '.join(parts)} GiB; at most {self.peak_bytes / 2**30:.2f} at once{away}"


def estimate_step(
    spec: ModelSpec,
    lora: LoRAConfig | None,
    optim: OptimConfig,
    tokens: int,
    itemsize: int,
    *,
    recomputes: bool = False,
    has_reference: bool = False,
    is_split: bool = False,
) -> Estimate:
    """Estimate the memory of a training step.

    Args:
        tokens: maximum number of tokens of a micro-batch.
        itemsize: bytes per weight.
        recomputes: True with activation checkpointing.
        has_reference: True if a copy of the model is kept as reference.
        is_split: True if several micro-batches accumulate gradients.
    """
    trained = spec.parameter_count() if lora is None else adapter_size(spec, lora)
    copies = (2 if has_reference else 1) * spec.parameter_count() + (0 if lora is None else trained)
    in_fp32 = 4 * trained if itemsize < 4 else 0
    # The head's gradient is summed over parts.
    of_head = spec.vocab_size * spec.hidden_size * 4 if lora is None else 0
    # Muon has one moment, not two.
    by_muon = trained - spec.vocab_size * spec.hidden_size if optim.type == "muon" else 0
    # Weights that Muon updates together.
    at_once = int(by_muon * min(1.0, MUON_BLOCKS / spec.num_hidden_layers))
    # AdamW's buffers.
    rooms = min(trained - by_muon, AT_ONCE) * (4 * (itemsize < 4) + 2 * optim.moment_bytes)
    # Masters and moments brought to the device.
    brought = 8 * at_once + rooms if optim.offload else 0
    moments = 2 * optim.moment_bytes * (trained - by_muon) + 4 * by_muon
    return Estimate(
        weights=copies * itemsize - _saved_by_eight_bits(spec, lora, itemsize),
        masters=0 if optim.offload else in_fp32,
        moments=0 if optim.offload else moments,
        host=in_fp32 + moments if optim.offload else 0,
        gradients=trained * itemsize + (0 if is_split else 4 * at_once * (itemsize < 4)) + brought,
        activations=token_bytes(spec, itemsize, recomputes) * tokens,
        logits=min(CHUNK, 4 * tokens * spec.vocab_size) * 3 // 2 + of_head,
        sums=in_fp32 if is_split else 0,
    )


def _saved_by_eight_bits(spec: ModelSpec, lora: LoRAConfig | None, itemsize: int) -> int:
    """Return by how many bytes 8-bit blocks are smaller; one block is in the model's dtype at a time."""
    if lora is None or lora.base_bits == 16:
        return 0
    # Experts keep their dtype
    dense = {name: s for name, s in spec.linear_shapes.items() if spec.count_linears(name) == 1}
    of_block = sum(a * b for a, b in dense.values())
    weights = sum(a * b for name in dense for a, b in spec.list_linears(name))
    return weights * itemsize - weights - weights * itemsize // BLOCK_INPUTS - of_block * itemsize


def estimate_rl(
    spec: ModelSpec, config: TrainerConfig, step_tokens: int, itemsize: int, micro_batch_tokens: int
) -> Estimate:
    """Estimate the memory of an RL step of up to `step_tokens` tokens with this configuration."""
    losses = [config.loss, *config.loss_of.values()]
    is_split = step_tokens > micro_batch_tokens or any(loss != config.loss for loss in losses)
    return estimate_step(
        spec,
        config.lora,
        config.optim,
        min(step_tokens, micro_batch_tokens),
        itemsize,
        recomputes=config.activation_checkpointing is True,
        is_split=is_split,
        has_reference=not (config.lora and config.lora.keeps_reference)
        and any("reference" in loss.required_inputs for loss in losses),
    )


def adapter_size(spec: ModelSpec, lora: LoRAConfig) -> int:
    """Return the number of trained adapter weights, without those of `modules_to_save`."""
    targets = lora.targets or spec.linear_shapes
    return lora.rank * sum(sum(shape) for name in targets for shape in spec.list_linears(name))


def merged_copy_bytes(spec: ModelSpec, lora: LoRAConfig, itemsize: int) -> int:
    """Return the bytes of the fused weights that the sampler holds again with the adapter merged."""
    names = set(lora.targets or spec.linear_shapes)
    fused = [{"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}, set(DELTA_PROJECTIONS)]
    for group in fused:
        names |= group & spec.linear_shapes.keys() if names & group else set()
    return itemsize * sum(a * b for name in names for a, b in spec.list_linears(name))


def token_bytes(spec: ModelSpec, itemsize: int, recomputes: bool) -> int:
    """Return the bytes per token of the activations that are kept for the backward pass.

    Each block keeps the inputs of its two norms, q, k, v, the attention output, and intermediate
    activations of its feed-forward layer. With activation checkpointing (`recomputes`) each block
    keeps only its input, and one block at a time keeps all of these activations.
    """
    layers = spec.num_hidden_layers
    of_blocks = layers * (2 * spec.hidden_size + spec.kept_feed_forward) + spec.kept_mixers
    kept = 2 * layers * spec.hidden_size + of_blocks / layers if recomputes else of_blocks
    return int(ACTIVATION_SLACK * kept * itemsize)


def micro_batch_tokens(
    spec: ModelSpec, itemsize: int, recomputes: bool, device_bytes: int | None
) -> int:
    """Return the default number of tokens per micro-batch, from FEW_TOKENS to MANY_TOKENS.

    Within these limits, it is the number of tokens whose activations fit into a fifth of the GPU's
    memory, `device_bytes`; FEW_TOKENS if `device_bytes` is None.
    """
    if device_bytes is None:
        return FEW_TOKENS
    return max(
        FEW_TOKENS,
        min(MANY_TOKENS, device_bytes // MEMORY_DIVISOR // token_bytes(spec, itemsize, recomputes)),
    )
