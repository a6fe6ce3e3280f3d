"""Proof that weights arrived: a checksum of every bit, and logprobs of a fixed sequence on both sides."""

import hashlib
import itertools

import torch
from torch import Tensor

from hone.kernels.logprobs import target_logprobs
from hone.models.attention import PackedAttention
from hone.models.hf import hf_tensors
from hone.models.transformer import Transformer

CANARY_LENGTH = 33
ROWS, FP32 = 4096, torch.float32  # tokens whose logits are there at a time
WORDS, STRETCHES = 2**18, 16  # of a tensor, in a stretch; stretches at a time on a GPU
ODD, MIX = -7046029254386353131, 6364136223846793005  # 64-bit multipliers of well-spread bits
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(model: Transformer) -> dict[str, str]:
    """Of each weight, by its HF name: 64 bits that any one changed bit changes, computed where the weight is, alike on
    every device."""
    device = model.embed.weight.device
    factors = (torch.arange(WORDS, device=device) * ODD) | 1
    sums = {name: _sums(tensor, factors) for name, tensor in hf_tensors(model)}
    values = iter(torch.cat(list(sums.values())).tolist())  # the device is waited for once
    found = {}
    for name, parts in sums.items():
        total = 0
        for _ in range(len(parts)):
            total = (total * MIX + next(values)) % 2**64
        found[name] = f"{total:016x}"
    return found


def _sums(tensor: Tensor, factors: Tensor) -> Tensor:
    """The words of each stretch of a tensor, each times an odd number of its place's own; integers wrap, so order does
    not matter."""
    words = tensor.contiguous().view(INTEGERS[tensor.element_size()]).flatten()
    whole = len(words) // WORDS * WORDS
    many = WORDS * (STRETCHES if tensor.is_cuda else 1)  # a CPU keeps one in its cache
    parts = [(part.view(-1, WORDS) * factors).sum(1) for part in words[:whole].split(many)] if whole else []
    if whole < len(words):
        parts.append((words[whole:] * factors[: len(words) - whole]).sum()[None])
    return torch.cat(parts)


def checksum(model: Transformer) -> str:
    """Of names, shapes and bits of all weights, in the boundary's order."""
    return checksum_of(model, fingerprints(model))


def checksum_of(model: Transformer, of_each: dict[str, str]) -> str:
    """The same, where the fingerprints are there already."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in hf_tensors(model):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {of_each[name]}".encode())
    return digest.hexdigest()


def canary_ids(vocab_size: int) -> list[int]:
    """A fixed sequence all over the vocabulary."""
    return [(7919 * (i + 1)) % vocab_size for i in range(CANARY_LENGTH)]


def score(model: Transformer, ids: list[int]) -> list[float]:
    """Logprobs, at temperature 1, of every token after the first."""
    return scores(model, [ids], 1.0)[0]


@torch.no_grad()
def scores(model: Transformer, sequences: list[list[int]], temperature: float) -> list[list[float]]:
    """The same of several sequences, at a temperature."""
    device, lengths = model.embed.weight.device, [len(ids) - 1 for ids in sequences]
    packed = PackedAttention(lengths, device)
    tokens = torch.tensor([i for ids in sequences for i in ids[:-1]], device=device)
    targets = torch.tensor([i for ids in sequences for i in ids[1:]], device=device)
    found: list[float] = []
    for hidden, target in zip(*(x.split(ROWS) for x in (model(tokens, packed.positions(), packed), targets))):
        logprobs, _ = target_logprobs(model.logits(hidden), target, torch.full_like(target, temperature, dtype=FP32))
        found += logprobs.tolist()
    ends = list(itertools.accumulate(lengths))
    return [found[end - n : end] for end, n in zip(ends, lengths, strict=True)]
