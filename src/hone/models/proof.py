"""Proof that weights arrived: a checksum of every bit, and logprobs of a fixed sequence on both sides."""

import hashlib
import itertools
from collections.abc import Iterator

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
    found: list[float] = []
    lengths = [len(ids) - 1 for ids in sequences]
    for logits, target in _logits(model, sequences):
        logprobs, _ = target_logprobs(logits, target, torch.full_like(target, temperature, dtype=FP32))
        found += logprobs.tolist()
    ends = list(itertools.accumulate(lengths))
    return [found[end - n : end] for end, n in zip(ends, lengths, strict=True)]


@torch.no_grad()
def likeliest(model: Transformer, ids: list[int], number: int) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """Logprobs of every token after the first, at temperature 1, and at each place the likeliest tokens with theirs."""
    own: list[float] = []
    others: list[list[tuple[int, float]]] = []
    for logits, target in _logits(model, [ids]):
        logprobs = torch.log_softmax(logits.float(), -1)
        own += logprobs.gather(1, target[:, None]).squeeze(1).tolist()
        values, found = logprobs.topk(min(number, logprobs.shape[1]))
        others += [list(zip(*row, strict=True)) for row in zip(found.tolist(), values.tolist(), strict=True)]
    return own, others


def _logits(model: Transformer, sequences: list[list[int]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and the tokens that come there, some rows at a time."""
    device = model.embed.weight.device
    packed = PackedAttention([len(ids) - 1 for ids in sequences], device)
    tokens = torch.tensor([i for ids in sequences for i in ids[:-1]], device=device)
    targets = torch.tensor([i for ids in sequences for i in ids[1:]], device=device)
    for hidden, target in zip(*(x.split(ROWS) for x in (model(tokens, packed.positions(), packed), targets))):
        yield model.logits(hidden), target
