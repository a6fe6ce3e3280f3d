"""Compiles all CPU kernels by running each once: `python -m hone.launch.kernels`, part of `make setup`."""

import logging
import time

import numpy as np
import torch

from hone.engine.cache import KVCache
from hone.engine.packed import PackedModel
from hone.kernels import cpu, row_state
from hone.kernels.decode import Rows, attend_by_pages
from hone.kernels.flat_attention import Sequences, flat_attention
from hone.kernels.linear import product
from hone.kernels.logprobs import target_logprobs
from hone.kernels.norm import add_norm
from hone.kernels.norm_rope import norm_rope
from hone.kernels.orthogonal import orthogonal
from hone.kernels.swiglu import swiglu
from hone.models.spec import ModelSpec
from hone.models.transformer import Transformer


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
        product(x, x.t()), product(x.t(), x)
        orthogonal([x])
        ones = torch.ones(T, dtype=torch.int64)
        rows = Rows(ones, torch.zeros(T, row_state.FIELDS, dtype=torch.int64), ones[:, None])
        keys, values = torch.zeros(2, 2, 16, 1, E)
        attend_by_pages(q, k, v, keys, values, rows)
        spec = ModelSpec(2 * E, E, 2 * E, 1, 1, 1, E, 1e-6, 1e4, True, 64, 0.1, False)
        model = Transformer(spec)
        if PackedModel.takes(model):
            model.init_weights(torch.Generator())
            PackedModel(model, KVCache(spec, torch.float32, x.device, 32)).decode(rows)
        tokens, chosen, stops = torch.zeros(T, E, dtype=torch.int64), torch.zeros(T, E), ones[:, None]
        parameters, logits = torch.ones(T, row_state.PARAMETERS), x.contiguous()
        inputs = [t.data_ptr() for t in (parameters, rows.state, ones, stops)]
        outputs = (tokens.data_ptr(), chosen.data_ptr(), E)
        decode.draw(T, E, logits.data_ptr(), logits.data_ptr(), 0, *inputs, 1, *outputs, 1)
    print(f"CPU kernels ready ({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()
