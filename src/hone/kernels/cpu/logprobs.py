"""Log-softmax at the targets, without an intermediate tensor of the logits' size."""

import numpy as np
from numba import prange

from hone.kernels.cpu.compiling import compiled
from hone.kernels.cpu.simd import exp, floats, get, integers, put

_f = np.float32
# Terms that are summed in fp32; the sums are added in fp64. A single sum in fp32 of 49,152 terms is
# off by 2e-5, always to the same side.
BLOCK = 2048


@compiled
def forward(N, V, logits, targets, temperature, logsum, logprobs, entropy):
    """Compute log-sum-exp, target logprob and entropy for each row of logits / temperature.

    logits: N x V; targets, temperature and the three outputs: N.
    """
    logits, targets, temperature = (
        floats(logits, (N, V)),
        integers(targets, N),
        floats(temperature, N),
    )
    for n in prange(N):
        scale = _f(1) / temperature[n]
        top = logits[n, 0]
        for v in range(V):
            top = max(top, logits[n, v])
        whole, weighted = 0.0, 0.0
        for start in range(0, V, BLOCK):
            block_whole, block_weighted = _f(0), _f(0)
            for v in range(start, min(start + BLOCK, V)):
                x = (logits[n, v] - top) * scale
                weight = exp(x)
                block_whole += weight
                block_weighted += weight * x
            whole += np.float64(block_whole)
            weighted += np.float64(block_weighted)
        log_whole = np.log(whole)
        put(logsum, n, _f(np.float64(top * scale) + log_whole))
        put(logprobs, n, _f(np.float64((logits[n, targets[n]] - top) * scale) - log_whole))
        put(entropy, n, _f(log_whole - weighted / whole))


@compiled
def backward(N, V, grad, logits, targets, temperature, logsum, out):
    """Compute the gradient of the logits, N x V, from that of the logprobs."""
    grad, logits, targets = floats(grad, N), floats(logits, (N, V)), integers(targets, N)
    temperature, logsum = floats(temperature, N), floats(logsum, N)
    for n in prange(N):
        scale = _f(1) / temperature[n]
        slope = grad[n] * scale
        for v in range(V):
            put(out, n * V + v, -slope * exp(logits[n, v] * scale - logsum[n]))
        target = n * V + targets[n]
        put(out, target, get(out, target) + slope)
