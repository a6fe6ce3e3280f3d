"""Proof that weights arrived: a checksum of every byte, and logprobs of a fixed sequence on both sides."""

import hashlib

import torch

from hone.kernels.logprobs import target_logprobs
from hone.models.attention import PackedAttention
from hone.models.hf import hf_tensors
from hone.models.transformer import Transformer

CANARY_LENGTH = 33


def checksum(model: Transformer) -> str:
    """Of names, shapes and bytes of all weights, in the boundary's order."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in hf_tensors(model):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def canary_ids(vocab_size: int) -> list[int]:
    """A fixed sequence all over the vocabulary."""
    return [(7919 * (i + 1)) % vocab_size for i in range(CANARY_LENGTH)]


@torch.no_grad()
def score(model: Transformer, ids: list[int]) -> list[float]:
    """Logprobs, at temperature 1, of every token after the first."""
    device = model.embed.weight.device
    packed = PackedAttention([len(ids) - 1], device)
    tokens = torch.tensor(ids, device=device)
    logits = model.logits(model(tokens[:-1], packed.positions(), packed))
    logprobs, _ = target_logprobs(logits, tokens[1:], torch.ones(len(ids) - 1, device=device))
    values: list[float] = logprobs.tolist()
    return values
