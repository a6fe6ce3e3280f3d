"""How much memory a training step takes, before it is taken."""

import torch

from hone.models.transformer import Transformer

TEMPORARY = 1.1  # of what is kept for going back; measured: benchmarks/RESULTS.md, `rl` on one GPU
FEW_TOKENS, MANY_TOKENS = 2**14, 2**15  # of a micro-batch by default
SHARE = 8  # the eighth part of a GPU's memory that more than FEW_TOKENS may take
HEAD = 7 * 2**29  # a part of the logits in fp32, at most 1 GiB, with its gradient and what is made from it


def step_bytes(model: Transformer, tokens: int, recomputes: bool) -> int:
    """Bytes that a step needs beside weights and optimiser state: gradients (those of half-precision weights once more
    in fp32), activations of one pass over `tokens` tokens, and logits."""
    item = model.embed.weight.dtype.itemsize
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    gradients = trained * (item + (4 if item < 4 else 0))
    return gradients + _token_bytes(model, recomputes) * tokens + HEAD


def micro_batch_tokens(model: Transformer, recomputes: bool) -> int:
    """How many tokens go through the model at once by default: FEW_TOKENS, on a GPU up to MANY_TOKENS, as far as their
    activations take an eighth of its memory at most."""
    device = model.embed.weight.device
    if device.type != "cuda":
        return FEW_TOKENS
    total = torch.cuda.get_device_properties(device).total_memory
    return max(FEW_TOKENS, min(MANY_TOKENS, total // SHARE // _token_bytes(model, recomputes)))


def _token_bytes(model: Transformer, recomputes: bool) -> int:
    """Bytes of a token's activations."""
    spec = model.spec
    heads = (spec.num_attention_heads + 2 * spec.num_key_value_heads) * spec.head_dim
    of_block = spec.kept_feed_forward + heads + spec.hidden_size
    kept = spec.num_hidden_layers * spec.hidden_size + of_block if recomputes else spec.num_hidden_layers * of_block
    return int(TEMPORARY * kept * model.embed.weight.dtype.itemsize)
