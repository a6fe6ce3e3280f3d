"""Compiles all CPU kernels by running each once: `python -m hone.kernels.cpu`, part of `make setup`."""

import logging
import time

import numpy as np
import torch

from hone.kernels import cpu
from hone.kernels.flat_attention import Sequences, attend_to_cache, flat_attention
from hone.kernels.linear import product
from hone.kernels.logprobs import target_logprobs
from hone.kernels.norm import add_norm
from hone.kernels.norm_rope import norm_rope
from hone.kernels.swiglu import swiglu


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not cpu.IS_AVAILABLE:
        print("numba is not installed (hone-rl[cpu]): the CPU runs on plain torch")
        return
    from hone.kernels.cpu import decode

    start = time.perf_counter()
    T, E = 4, 16
    x, weight = torch.ones(T, E, requires_grad=True), torch.ones(E)
    qkv, cos, sin = torch.ones(T, 3, E, requires_grad=True), torch.ones(T, 1, E), torch.ones(T, 1, E)
    q, k, v = norm_rope(qkv, weight, weight, cos, sin, 1e-6, 1)
    mixed = flat_attention(q, k, v, Sequences(np.array([[0, T, 0, 0]]), np.array([0, 1])))
    _, normed = add_norm(x, mixed.reshape(T, E), weight, 1e-6)
    logprobs, _ = target_logprobs(swiglu(normed), torch.zeros(T, dtype=torch.int64), torch.ones(T))
    logprobs.sum().backward()
    with torch.no_grad():
        product(x, x.t())
        attend_to_cache(q, k, v, torch.zeros(2, T, 8, 1, E), torch.zeros(T, dtype=torch.int64))
        tokens, chosen = torch.zeros(T, dtype=torch.int64), torch.zeros(T)
        uniform = torch.zeros(T, dtype=torch.float64)
        inputs = (x, torch.ones(T), uniform, tokens, chosen)
        decode.sample(T, E, *(t.data_ptr() for t in inputs))
    print(f"CPU kernels ready ({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()
