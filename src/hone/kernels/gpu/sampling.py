"""Draw the next token of each row, with logprob, stop test and bookkeeping.

    logits ─ stretch_kernel ─┬─► maximum and sum of exponentials of ─ sample_kernel ─► token, logprob, state
    hidden ─ head_kernel ────┘   every stretch of the vocabulary

The uniform random number selects a stretch of the vocabulary, and only this stretch is read again.
Draws from hidden states never write logits to memory: `sample_kernel` computes the logits of the
selected stretch a second time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.kernels import row_state
from hone.kernels.gpu import has_dependent_launch, options, power_of_2, stages_of
from hone.kernels.gpu.launching import prefetch, wait

FIELDS, PARAMETERS = tl.constexpr(row_state.FIELDS), tl.constexpr(row_state.PARAMETERS)
LAST, LENGTH, COUNT = (
    tl.constexpr(row_state.LAST),
    tl.constexpr(row_state.LENGTH),
    tl.constexpr(row_state.COUNT),
)
MAX, MIN, SEED = (
    tl.constexpr(row_state.MAX),
    tl.constexpr(row_state.MIN),
    tl.constexpr(row_state.SEED),
)
DONE, STOPPED, FULL = (
    tl.constexpr(row_state.DONE),
    tl.constexpr(row_state.STOPPED),
    tl.constexpr(row_state.FULL),
)
TEMPERATURE = tl.constexpr(row_state.TEMPERATURE)
LOGPROB_TEMPERATURE = tl.constexpr(row_state.LOGPROB_TEMPERATURE)


@triton.jit
def _mix(z):
    """Apply splitmix64's finalizer (Steele et al. 2014), on uint64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def uniform(seed, counter):
    """Return number `counter` (from 0) of random stream `seed`: float64 in [0, 1).

    See engine/token_sampler.py.
    """
    state = _mix(seed.to(tl.uint64)) + (counter + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    return (_mix(state) >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _inverse_temperature(parameters, slot):
    """Return 1 / T of sampling (1 if greedy), 1 / T of the logprob, and whether it is greedy."""
    T = tl.load(parameters + slot * PARAMETERS + TEMPERATURE)
    greedy = T < 1e-5
    T = tl.where(greedy, 1.0, T)
    return 1.0 / T, 1.0 / tl.load(parameters + slot * PARAMETERS + LOGPROB_TEMPERATURE), greedy


@triton.jit
def stretch_kernel(
    logits,
    plain,
    threshold,
    parameters,
    active,
    stats,
    V,
    FILTERED: tl.constexpr,
    C: tl.constexpr,
    STRETCHES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the maximum and the sum of exponentials of stretch s of row b of logits (B x V).

    stats: B x 4 x STRETCHES: maxima and sums of `logits` and, only with FILTERED, of `plain`. With
    FILTERED, logits below threshold[b] are left out.
    """
    b, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = s * C + tl.arange(0, C)
    wait(PDL)
    scale, plain_scale, _ = _inverse_temperature(parameters, tl.load(active + b))
    own = stats + b * 4 * STRETCHES + s
    x = tl.load(logits + b * V + i, i < V, other=float("-inf")).to(tl.float32)
    if FILTERED:
        x = tl.where(x >= tl.load(threshold + b), x, float("-inf"))
        y = tl.load(plain + b * V + i, i < V, other=float("-inf")).to(tl.float32) * plain_scale
        top = tl.maximum(tl.max(y), -1e30)
        tl.store(own + 2 * STRETCHES, top)
        tl.store(own + 3 * STRETCHES, tl.sum(tl.exp(y - top)))
    x *= scale
    top = tl.maximum(tl.max(x), -1e30)
    tl.store(own, top)
    tl.store(own + STRETCHES, tl.sum(tl.exp(x - top)))


@triton.jit(do_not_specialize=["M"])
def head_kernel(
    x,
    weight,
    parameters,
    active,
    stats,
    M,
    V,
    D: tl.constexpr,
    BM: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    STRETCHES: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute maximum and sum of exponentials of the logits of each stretch, from hidden states.

    Logits are x (M x D) times the transpose of weight (V x D), and are not written to memory. A
    stretch has C logits.
    """
    m, v = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BV + tl.arange(0, BV)
    k = tl.arange(0, BK)
    rows, there = x + m[:, None].to(tl.int64) * D + k[None, :], (m < M)[:, None]
    columns = weight + (v % V)[None, :].to(tl.int64) * D + k[:, None]
    if PDL:
        prefetch(weight + (v % V)[:, None].to(tl.int64) * D, D, 4)
    wait(PDL)
    acc = tl.zeros((BM, BV), tl.float32)
    for i in tl.range(0, D // BK, num_stages=STAGES):
        acc = tl.dot(tl.load(rows + i * BK, there, other=0.0), tl.load(columns + i * BK), acc)
    scale, _, _ = _inverse_temperature(parameters, tl.load(active + m, m < M, other=0))
    acc = tl.where((v < V)[None, :], acc * scale[:, None], -1e30)
    parts = tl.reshape(acc, (BM, BV // C, C))
    tops = tl.max(parts, axis=2)
    sums = tl.sum(tl.exp(parts - tops[:, :, None]), axis=2)
    s = tl.program_id(1) * (BV // C) + tl.arange(0, BV // C)
    own = stats + m[:, None].to(tl.int64) * 4 * STRETCHES + s[None, :]
    inside = there & (s < STRETCHES)[None, :]
    tl.store(own, tops, inside)
    tl.store(own + STRETCHES, sums, inside)


@triton.jit
def _logits(x, weight, first, V, D: tl.constexpr, BK: tl.constexpr, C: tl.constexpr):
    """Return C logits from token `first` on, of one row of hidden states."""
    v, k = first + tl.arange(0, C), tl.arange(0, BK)
    columns = weight + (v % V)[:, None].to(tl.int64) * D + k[None, :]
    acc = tl.zeros((C, BK), tl.float32)
    for i in tl.range(0, D, BK, num_stages=3):
        acc += tl.load(columns + i).to(tl.float32) * tl.load(x + i + k).to(tl.float32)[None, :]
    return tl.sum(acc, axis=1)


@triton.jit
def _total(tops, sums):
    """Return the highest of the stretches' maxima, and the stretches' sums rescaled to it, float64."""
    top = tl.max(tops)
    return top, sums.to(tl.float64) * tl.exp(tops - top).to(tl.float64)


@triton.jit
def sample_kernel(
    logits,
    plain,
    threshold,
    parameters,
    state,
    active,
    stops,
    tokens,
    logprobs,
    capacity,
    num_stops,
    stats,
    V,
    advance,
    FILTERED: tl.constexpr,
    C: tl.constexpr,
    STRETCHES: tl.constexpr,
    STOPS: tl.constexpr,
    D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Draw the token of batch row b and store it in the row's state (`kernels/row_state.py`).

    If D is 0, `logits` and `plain` are B x V, and with FILTERED the logprob is computed from
    `plain`. Otherwise the token is drawn from hidden states: `logits` holds them, B x D, and
    `plain` holds the LM head's weight, V x D. advance: 1 if this step stored the last token's keys,
    0 after a prefill.
    """
    b = tl.program_id(0).to(tl.int64)
    i, s = tl.arange(0, C), tl.arange(0, STRETCHES)
    wait(PDL)
    slot = tl.load(active + b)
    own_state = state + slot * FIELDS
    if tl.load(own_state + DONE) != 0:
        return
    count = tl.load(own_state + COUNT)
    scale, plain_scale, greedy = _inverse_temperature(parameters, slot)
    own = stats + b * 4 * STRETCHES
    inside = s < tl.cdiv(V, C)
    tops = tl.load(own + s, inside, other=-1e30)
    top, shares = _total(tops, tl.load(own + STRETCHES + s, inside, other=0.0))
    whole = tl.sum(shares)
    target = uniform(tl.load(own_state + SEED), count) * whole
    upto = tl.cumsum(shares, 0)
    first = tl.min(tl.where(tops == top, s, STRETCHES))
    last = tl.max(tl.where(shares > 0, s, 0))
    chosen = tl.where(greedy, first, tl.minimum(tl.sum((upto <= target).to(tl.int32)), last))
    before = tl.sum(tl.where(s < chosen, shares, 0.0))
    own_top = tl.sum(tl.where(s == chosen, tops, 0.0))

    start = chosen.to(tl.int64) * C
    if D:
        x = tl.where(
            start + i < V, _logits(logits + b * D, plain, start, V, D, 64, C), float("-inf")
        )
    else:
        x = tl.load(logits + b * V + start + i, start + i < V, other=float("-inf")).to(tl.float32)
    if FILTERED:
        x = tl.where(x >= tl.load(threshold + b), x, float("-inf"))
    x *= scale
    weights = tl.exp(x - own_top)
    rest = ((target - before) / tl.exp(own_top - top).to(tl.float64)).to(tl.float32)
    drawn = tl.sum((tl.cumsum(weights, 0) <= rest).to(tl.int32))
    drawn = tl.minimum(drawn, tl.max(tl.where(weights > 0, i, 0)))
    place = tl.where(greedy, tl.min(tl.where(x == tl.max(x), i, C)), drawn)
    token = start + place
    value = tl.sum(tl.where(i == place, x, 0.0))
    if FILTERED:
        tops = tl.load(own + 2 * STRETCHES + s, inside, other=-1e30)
        top, shares = _total(tops, tl.load(own + 3 * STRETCHES + s, inside, other=0.0))
        value, whole = tl.load(plain + b * V + token).to(tl.float32) * plain_scale, tl.sum(shares)
    logprob = value - top - tl.log(whole).to(tl.float32)
    tl.store(tokens + slot * capacity + count, token)
    tl.store(logprobs + slot * capacity + count, logprob)
    n = tl.arange(0, STOPS)
    is_stop = (
        tl.max(
            (tl.load(stops + slot * num_stops + n, n < num_stops, other=-1) == token).to(tl.int32)
        )
        > 0
    )
    is_stop = is_stop & (count + 1 >= tl.load(own_state + MIN))
    is_last = count + 1 >= tl.load(own_state + MAX)
    tl.store(own_state + LAST, token)
    tl.store(own_state + LENGTH, tl.load(own_state + LENGTH) + advance)
    tl.store(own_state + COUNT, count + 1)
    tl.store(own_state + DONE, tl.where(is_stop, STOPPED, tl.where(is_last, FULL, 0)).to(tl.int64))


STRETCH = 4096  # logits that one block reads


def draw(
    logits: Tensor,
    plain: Tensor,
    threshold: Tensor | None,
    parameters: Tensor,
    state: Tensor,
    active: Tensor,
    stops: Tensor,
    tokens: Tensor,
    logprobs: Tensor,
    advance: bool,
) -> None:
    """Draw a token for every active row that is not done, as `engine/token_sampler.py` does."""
    B, V = logits.shape
    count = -(-V // STRETCH)
    stats = logits.new_empty(B, 4, power_of_2(count))
    sizes = {"FILTERED": threshold is not None, "C": STRETCH, "STRETCHES": stats.shape[2]}
    inputs = (logits, plain, plain if threshold is None else threshold, parameters)
    stretch_kernel[(B, count)](*inputs, active, stats, V, **sizes, **options(4))
    sample_kernel[(B,)](
        *inputs,
        state,
        active,
        stops,
        tokens,
        logprobs,
        tokens.shape[1],
        stops.shape[1],
        stats,
        V,
        int(advance),
        **sizes,
        STOPS=power_of_2(stops.shape[1]),
        D=0,
        **options(4),
    )


CELL = 64  # logits that sample_kernel computes once more


def draw_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    parameters: Tensor,
    state: Tensor,
    active: Tensor,
    stops: Tensor,
    tokens: Tensor,
    logprobs: Tensor,
    advance: bool,
) -> None:
    """Draw a token for every active row that is not done, from hidden states, without filters.

    hidden: B x D, D a multiple of 64. weight: V x D, of the LM head.
    """
    hidden = hidden.contiguous()
    (B, D), V = hidden.shape, len(weight)
    stats = torch.empty(B, 4, power_of_2(-(-V // CELL)), device=hidden.device)
    sizes = {"D": D, "C": CELL, "STRETCHES": stats.shape[2]}
    BM = min(max(power_of_2(B), 16), 128)
    BV, BK, stages, warps = head_tile(B, D)
    head_kernel[(-(-B // BM), -(-V // BV))](
        hidden,
        weight,
        parameters,
        active,
        stats,
        B,
        V,
        **sizes,
        BM=BM,
        BV=BV,
        BK=BK,
        STAGES=stages_of(stages, BM + BV, BK),
        **options(warps),
    )
    sample_kernel[(B,)](
        hidden,
        weight,
        weight,
        parameters,
        state,
        active,
        stops,
        tokens,
        logprobs,
        tokens.shape[1],
        stops.shape[1],
        stats,
        V,
        int(advance),
        **sizes,
        FILTERED=False,
        STOPS=power_of_2(stops.shape[1]),
        **options(8),
    )


def head_tile(rows: int, inner: int) -> tuple[int, int, int, int]:
    """Return head_kernel's BV, BK, stages and warps (benchmarks/kernels/tiles.py)."""
    if rows <= 32 and inner % 128 == 0 and has_dependent_launch():
        return 64, 128, 5, 4
    return 256 if rows > 128 and has_dependent_launch() else 128, 64, 3, 8
