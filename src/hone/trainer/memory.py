"""How much memory a training step takes, before it is taken."""

from hone.models.transformer import Transformer

TEMPORARY = 1.1  # of what is kept for going back; measured: benchmarks/RESULTS.md, `rl` on one GPU
HEAD = 7 * 2**29  # a part of the logits in fp32, at most 1 GiB, with its gradient and what is made from it


def step_bytes(model: Transformer, tokens: int, recomputes: bool) -> int:
    """Bytes that a step needs beside weights and optimiser state: gradients (those of half-precision weights once more
    in fp32), activations of one pass over `tokens` tokens, and logits."""
    spec, item = model.spec, model.embed.weight.dtype.itemsize
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    heads = (spec.num_attention_heads + 2 * spec.num_key_value_heads) * spec.head_dim
    of_block = 2 * spec.intermediate_size + heads + spec.hidden_size
    kept = spec.num_hidden_layers * spec.hidden_size + of_block if recomputes else spec.num_hidden_layers * of_block
    gradients = trained * (item + (4 if item < 4 else 0))
    return gradients + int(TEMPORARY * kept * item * tokens) + HEAD
