"""One token a sequence: attention over the cache, and the draw of the next token."""

import numpy as np
from numba import prange

from hone.kernels.cpu import compiled
from hone.kernels.cpu.lanes import (
    doubles,
    exp,
    floats,
    get,
    integers,
    load,
    multiply_add,
    put,
    put_integer,
    splat,
    store,
    total,
)

_f = np.float32


@compiled
def attend(B, H, K, E, q, q_row, k, k_row, v, v_row, keys, values, positions, lengths, out):
    """Stores k, v of the new token in its row of the cache, then mixes what the row holds: out B x (H * E).

    keys, values: the cache of a layer, rows x positions x K x E; lengths B counts the tokens stored before.
    """
    step, scale, lengths = K * E, _f(1) / np.sqrt(_f(E)), integers(lengths, B)
    for b in prange(B):
        row, L = b * positions * step, lengths[b] + 1
        for d in range(step):
            put(keys, row + (L - 1) * step + d, get(k, b * k_row + d))
            put(values, row + (L - 1) * step + d, get(v, b * v_row + d))
        scores = np.empty(L, np.float32)
        query = np.empty(E, np.float32)
        for h in range(H):
            at = row + h // (H // K) * E
            for e in range(E):
                query[e] = get(q, b * q_row + h * E + e) * scale
            top = _f(-1e30)
            for j in range(L):
                products = splat(_f(0))
                for e in range(0, E, 16):
                    products = multiply_add(load(query, e), load(keys, at + j * step + e), products)
                scores[j] = total(products)
                top = max(top, scores[j])
            weight = _f(0)
            for j in range(L):
                scores[j] = exp(scores[j] - top)
                weight += scores[j]
            weight = _f(1) / weight
            for e in range(0, E, 16):
                mixed = splat(_f(0))
                for j in range(L):
                    mixed = multiply_add(scores[j] * weight, load(values, at + j * step + e), mixed)
                store(out, (b * H + h) * E + e, mixed)


@compiled
def sample(B, V, logits, temperature, uniform, tokens, logprobs):
    """Tokens and their logprobs from logits B x V: see `engine/sampler.py`."""
    logits, temperature, uniform = floats(logits, (B, V)), floats(temperature, B), doubles(uniform, B)
    for b in prange(B):
        weights = np.empty(V, np.float32)
        greedy = temperature[b] < _f(1e-5)
        scale = _f(1) if greedy else _f(1) / temperature[b]
        top = logits[b, 0]
        for v in range(V):
            top = max(top, logits[b, v])
        for v in range(V):
            weights[v] = exp((logits[b, v] - top) * scale)
        whole = 0.0
        for v in range(V):
            whole += np.float64(weights[v])
        token = V - 1
        if greedy:
            token = 0
            while token < V - 1 and logits[b, token] != top:
                token += 1
        else:
            target, seen = uniform[b] * whole, 0.0
            for v in range(V):
                seen += np.float64(weights[v])
                if seen > target:
                    token = v
                    break
        put_integer(tokens, b, token)
        put(logprobs, b, _f(np.float64((logits[b, token] - top) * scale) - np.log(whole)))
