"""The recurrence of the gated delta rule in chunks of 64 tokens, with gradients (`delta_rule.py`).

    prepare   a program per chunk and value head: gates, the chunk's triangular system, w and u
    scan      a program per sequence, value head and block of a state's columns: chunk after chunk,
              outputs and the state at the end
    backward  scan again for the states, scan back for their gradients, then each chunk by itself

With G the decays added up from the chunk's start, and rows i of a chunk:

    A_ij = beta_i (k_i k_j) e^(G_i - G_j), j < i;   T = (1 + A)^-1;   w = T (beta e^G k);   u = T (beta v)
    v' = u - w S;   o = e^G q S + P v',  P_ij = (q_i k_j) e^(G_i - G_j), j <= i
    S = e^(G_end) S + (e^(G_end - G) k)^T v'

q is scaled. The running state is float32; products, and the copies of states for the backward pass,
have the model's dtype. Shapes as in `delta_rule.py`; M chunks.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.kernels.delta_shape import CHUNK_TOKENS, DeltaShape
from hone.kernels.gpu import processors

CHUNK = tl.constexpr(CHUNK_TOKENS)
BLOCK = tl.constexpr(16)  # rows of a system that are solved one by one
TABLE = tl.constexpr(4)  # columns of the table of chunks
# Columns of a state per program, most first: `_state_columns` takes the first with enough programs.
STATE_COLUMNS = (64, 32, 16)
SCAN_SHARE, BACK_SHARE = 1.5, 0.9  # programs wanted per multiprocessor, forward and back


@triton.jit
def source_rows(order, t, inside, HAS_ORDER: tl.constexpr):
    """Return the rows of tokens t on the flat axis."""
    if HAS_ORDER:
        return tl.load(order + t, inside, other=0)
    return t


@triton.jit
def _decays(between_from, between_to, is_seen):
    """Return e^(G_i - G_j) where j is seen by i, else 0."""
    return tl.where(is_seen, tl.exp(tl.where(is_seen, between_from - between_to, 0.0)), 0.0)


@triton.jit
def _product(a, b):
    """Multiply float32 matrices by three TF32 products, to about float32's precision."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _invert(a):
    """Return (1 + a)^-1 of a strictly lower triangular 64 x 64 matrix, float32.

    Blocks of 16 rows on the diagonal are inverted row by row, then put together by products.
    """
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    one = tl.arange(0, BLOCKS)
    is_same = one[:, None, None, None] == one[None, None, :, None]
    by_block = tl.reshape(a, [BLOCKS, BLOCK, BLOCKS, BLOCK])
    own = tl.sum(tl.where(is_same, by_block, 0.0), 2)  # BLOCKS x BLOCK x BLOCK
    row = tl.arange(0, BLOCK)[None, :, None]
    column = tl.arange(0, BLOCK)[None, None, :]
    inverse = tl.zeros([BLOCKS, BLOCK, BLOCK], tl.float32)
    for i in tl.static_range(1, BLOCK):
        of_row = tl.sum(tl.where(row == i, own, 0.0), 1)
        new = -of_row - tl.sum(of_row[:, :, None] * inverse, 1)
        inverse = tl.where(row == i, new[:, None, :], inverse)
    inverse = inverse + tl.where(row == column, 1.0, 0.0)
    spread = tl.where(is_same, inverse[:, :, None, :], 0.0)
    diagonal = tl.reshape(spread, [CHUNK, CHUNK])
    below = tl.reshape(tl.where(is_same, 0.0, by_block), [CHUNK, CHUNK])
    n = _product(diagonal, below)
    n2 = _product(n, n)
    r = tl.arange(0, CHUNK)
    whole = tl.where(r[:, None] == r[None, :], 1.0, 0.0) - n + n2 - _product(n, n2)
    return _product(whole, diagonal)


@triton.jit
def prepare_kernel(
    mixed,
    b,
    a,
    decay,
    bias,
    order,
    chunks,
    w,
    u,
    inverse,
    decays,
    betas,
    row_stride,
    K: tl.constexpr,
    V: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    IS_SOLVED: tl.constexpr,
    HAS_ORDER: tl.constexpr,
):
    """Compute gates, T, w and u of one chunk and value head; with IS_SOLVED, w and u alone.

    mixed: tokens x (K q heads, K k heads, V v heads); b, a: rows of `row_stride` numbers, token t's
    is order[t].
    """
    i, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.load(chunks + i * TABLE).to(tl.int64)
    count = tl.load(chunks + i * TABLE + 1)
    if count == 0:  # tables of captured passes have room for more chunks
        return
    r = tl.arange(0, CHUNK)
    t = first + r
    inside = r < count
    head = (i * V + h) * CHUNK + r
    if IS_SOLVED:
        total, beta = tl.load(decays + head), tl.load(betas + head)
    else:
        row = source_rows(order, t, inside, HAS_ORDER)
        raw = tl.load(a + row * row_stride + h, inside, other=0.0).to(tl.float32)
        raw += tl.load(bias + h).to(tl.float32)
        soft = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
        g = tl.where(inside, -tl.exp(tl.load(decay + h).to(tl.float32)) * soft, 0.0)
        beta = tl.load(b + row * row_stride + h, inside, other=0.0).to(tl.float32)
        beta = tl.where(inside, tl.sigmoid(beta), 0.0)
        total = tl.cumsum(g, 0)
        tl.store(decays + head, total)
        tl.store(betas + head, beta)
    e, f = tl.arange(0, E), tl.arange(0, F)
    channels = 2 * K * E + V * F
    seen = inside[:, None]
    of_k = mixed + t[:, None] * channels + (K + h // (V // K)) * E + e[None, :]
    k = tl.load(of_k, seen, other=0.0)
    v = tl.load(mixed + t[:, None] * channels + 2 * K * E + h * F + f[None, :], seen, other=0.0)
    place = inverse + ((i * V + h) * CHUNK + r[:, None]) * CHUNK + r[None, :]
    if IS_SOLVED:
        rounded = tl.load(place)
    else:
        between = _decays(total[:, None], total[None, :], r[:, None] > r[None, :])
        rounded = _invert(beta[:, None] * tl.dot(k, tl.trans(k)) * between).to(k.dtype)
        tl.store(place, rounded)
    factor = beta * tl.exp(total)
    of_w = tl.dot(rounded, (k.to(tl.float32) * factor[:, None]).to(k.dtype))
    of_u = tl.dot(rounded, (v.to(tl.float32) * beta[:, None]).to(k.dtype))
    tl.store(w + (t[:, None] * V + h) * E + e[None, :], of_w.to(k.dtype), seen)
    tl.store(u + (t[:, None] * V + h) * F + f[None, :], of_u.to(k.dtype), seen)


@triton.jit
def scan_kernel(
    mixed,
    w,
    u,
    decays,
    chunks,
    sequences,
    before,
    out,
    after,
    states,
    values,
    K: tl.constexpr,
    V: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    KEEPS: tl.constexpr,
):
    """Go through the chunks of one sequence, for one value head and COLUMNS columns of its state.

    With KEEPS, write the state before each chunk and v' instead of the outputs and the last state.
    """
    n, h = (tl.program_id(0) // V).to(tl.int64), tl.program_id(0) % V
    e, f = tl.arange(0, E), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = ((n * V + h) * E + e[:, None]) * F + f[None, :]
    state = tl.zeros([E, COLUMNS], tl.float32)
    if HAS_BEFORE:
        state = tl.load(before + place)
    r = tl.arange(0, CHUNK)
    channels = 2 * K * E + V * F
    of_key = h // (V // K)
    first_chunk = tl.load(sequences + n * 2).to(tl.int64)
    for i in range(first_chunk, first_chunk + tl.load(sequences + n * 2 + 1)):
        t = tl.load(chunks + i * TABLE).to(tl.int64) + r
        seen = (r < tl.load(chunks + i * TABLE + 1))[:, None]
        total = tl.load(decays + (i * V + h) * CHUNK + r)
        end = tl.load(decays + (i * V + h) * CHUNK + CHUNK - 1)
        of_w = tl.load(w + (t[:, None] * V + h) * E + e[None, :], seen, other=0.0)
        of_u = tl.load(u + (t[:, None] * V + h) * F + f[None, :], seen, other=0.0)
        k = tl.load(mixed + t[:, None] * channels + (K + of_key) * E + e[None, :], seen, other=0.0)
        rounded = state.to(k.dtype)
        value = (of_u.to(tl.float32) - tl.dot(of_w, rounded)).to(k.dtype)
        if KEEPS:
            tl.store(states + ((i * V + h) * E + e[:, None]) * F + f[None, :], rounded)
            tl.store(values + (t[:, None] * V + h) * F + f[None, :], value, seen)
        else:
            q = tl.load(mixed + t[:, None] * channels + of_key * E + e[None, :], seen, other=0.0)
            between = _decays(total[:, None], total[None, :], r[:, None] >= r[None, :])
            scores = (tl.dot(q, tl.trans(k)) * between).to(k.dtype)
            decayed = (q.to(tl.float32) * tl.exp(total)[:, None]).to(k.dtype)
            y = tl.dot(decayed, rounded) + tl.dot(scores, value)
            tl.store(out + (t[:, None] * V + h) * F + f[None, :], y.to(k.dtype), seen)
        kept = (k.to(tl.float32) * tl.exp(end - total)[:, None]).to(k.dtype)
        state = state * tl.exp(end) + tl.dot(tl.trans(kept), value)
    if not KEEPS:
        tl.store(after + place, state)


@triton.jit
def scan_back_kernel(
    mixed,
    w,
    decays,
    chunks,
    sequences,
    grad_out,
    grad_after,
    grad_values,
    grad_states,
    grad_before,
    K: tl.constexpr,
    V: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
):
    """Go back through the chunks of one sequence: gradients of v' and of the state after each chunk."""
    n, h = (tl.program_id(0) // V).to(tl.int64), tl.program_id(0) % V
    e, f = tl.arange(0, E), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = ((n * V + h) * E + e[:, None]) * F + f[None, :]
    grad = tl.zeros([E, COLUMNS], tl.float32)
    if HAS_AFTER:
        grad = tl.load(grad_after + place)
    r = tl.arange(0, CHUNK)
    channels = 2 * K * E + V * F
    of_key = h // (V // K)
    first_chunk = tl.load(sequences + n * 2).to(tl.int64)
    count = tl.load(sequences + n * 2 + 1)
    for back in range(count):
        i = first_chunk + count - 1 - back
        t = tl.load(chunks + i * TABLE).to(tl.int64) + r
        seen = (r < tl.load(chunks + i * TABLE + 1))[:, None]
        total = tl.load(decays + (i * V + h) * CHUNK + r)
        end = tl.load(decays + (i * V + h) * CHUNK + CHUNK - 1)
        q = tl.load(mixed + t[:, None] * channels + of_key * E + e[None, :], seen, other=0.0)
        k = tl.load(mixed + t[:, None] * channels + (K + of_key) * E + e[None, :], seen, other=0.0)
        of_w = tl.load(w + (t[:, None] * V + h) * E + e[None, :], seen, other=0.0)
        of_out = tl.load(grad_out + (t[:, None] * V + h) * F + f[None, :], seen, other=0.0)
        rounded = grad.to(k.dtype)
        tl.store(grad_states + ((i * V + h) * E + e[:, None]) * F + f[None, :], rounded)
        # Transposed: row j, column i
        between = _decays(total[None, :], total[:, None], r[:, None] <= r[None, :])
        scores = (tl.dot(k, tl.trans(q)) * between).to(k.dtype)
        kept = (k.to(tl.float32) * tl.exp(end - total)[:, None]).to(k.dtype)
        of_value = (tl.dot(scores, of_out) + tl.dot(kept, rounded)).to(k.dtype)
        tl.store(grad_values + (t[:, None] * V + h) * F + f[None, :], of_value, seen)
        decayed = (q.to(tl.float32) * tl.exp(total)[:, None]).to(k.dtype)
        grad = grad * tl.exp(end) + tl.dot(tl.trans(decayed), of_out)
        grad -= tl.dot(tl.trans(of_w), of_value)
    if HAS_BEFORE:
        tl.store(grad_before + place, grad)


@triton.jit
def chunk_back_kernel(
    mixed,
    decays,
    chunks,
    states,
    values,
    grad_out,
    grad_values,
    grad_states,
    grad_q,
    grad_k,
    grad_w,
    grad_decays,
    K: tl.constexpr,
    V: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the gradients of one chunk and value head, without the triangular system: q, part of k, w, G."""
    i, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    r = tl.arange(0, CHUNK)
    t = tl.load(chunks + i * TABLE).to(tl.int64) + r
    seen = (r < tl.load(chunks + i * TABLE + 1))[:, None]
    e = tl.arange(0, E)
    channels = 2 * K * E + V * F
    of_key = h // (V // K)
    total = tl.load(decays + (i * V + h) * CHUNK + r)
    end = tl.load(decays + (i * V + h) * CHUNK + CHUNK - 1)
    of_scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    of_q = tl.zeros([CHUNK, E], tl.float32)
    of_k = tl.zeros([CHUNK, E], tl.float32)
    of_w = tl.zeros([CHUNK, E], tl.float32)
    of_end = 0.0
    for part in range(F // COLUMNS):
        f = part * COLUMNS + tl.arange(0, COLUMNS)
        row = (t[:, None] * V + h) * F + f[None, :]
        place = ((i * V + h) * E + e[:, None]) * F + f[None, :]
        state, of_state = tl.load(states + place), tl.load(grad_states + place)
        value = tl.load(values + row, seen, other=0.0)
        out = tl.load(grad_out + row, seen, other=0.0)
        of_value = tl.load(grad_values + row, seen, other=0.0)
        of_scores += tl.dot(out, tl.trans(value))
        of_q += tl.dot(out, tl.trans(state))
        of_k += tl.dot(value, tl.trans(of_state))
        of_w -= tl.dot(of_value, tl.trans(state))
        of_end += tl.sum(state.to(tl.float32) * of_state.to(tl.float32))
    q = tl.load(mixed + t[:, None] * channels + of_key * E + e[None, :], seen, other=0.0)
    k = tl.load(mixed + t[:, None] * channels + (K + of_key) * E + e[None, :], seen, other=0.0)
    between = _decays(total[:, None], total[None, :], r[:, None] >= r[None, :])
    rounded = (of_scores * between).to(k.dtype)
    from_state = of_k * tl.exp(end - total)[:, None]
    of_q = of_q * tl.exp(total)[:, None] + tl.dot(rounded, k)
    of_k = from_state + tl.dot(tl.trans(rounded), q)
    wide_k = k.to(tl.float32)
    of_total = tl.sum(q.to(tl.float32) * of_q, 1) - tl.sum(wide_k * of_k, 1)
    of_end = of_end * tl.exp(end) + tl.sum(from_state * wide_k)
    of_total += tl.where(r == CHUNK - 1, of_end, 0.0)
    head = (t[:, None] * V + h) * E + e[None, :]
    tl.store(grad_q + head, of_q.to(k.dtype), seen)
    tl.store(grad_k + head, of_k.to(k.dtype), seen)
    tl.store(grad_w + head, of_w.to(k.dtype), seen)
    tl.store(grad_decays + (i * V + h) * CHUNK + r, of_total)


@triton.jit
def system_back_kernel(
    mixed,
    inverse,
    decays,
    betas,
    chunks,
    grad_values,
    grad_w,
    grad_decays,
    grad_k,
    grad_v,
    grad_g,
    grad_beta,
    K: tl.constexpr,
    V: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """Compute the gradients of one chunk and value head through the triangular system: the rest of k, v, beta, g.

    Adds to `grad_k`; `grad_g` and `grad_beta` are tokens x V.
    """
    i, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    r = tl.arange(0, CHUNK)
    t = tl.load(chunks + i * TABLE).to(tl.int64) + r
    inside = r < tl.load(chunks + i * TABLE + 1)
    seen = inside[:, None]
    e, f = tl.arange(0, E), tl.arange(0, F)
    channels = 2 * K * E + V * F
    total = tl.load(decays + (i * V + h) * CHUNK + r)
    beta = tl.load(betas + (i * V + h) * CHUNK + r)
    of_k = mixed + t[:, None] * channels + (K + h // (V // K)) * E + e[None, :]
    k = tl.load(of_k, seen, other=0.0)
    v = tl.load(mixed + t[:, None] * channels + 2 * K * E + h * F + f[None, :], seen, other=0.0)
    solved = tl.load(inverse + ((i * V + h) * CHUNK + r[:, None]) * CHUNK + r[None, :])
    du = tl.load(grad_values + (t[:, None] * V + h) * F + f[None, :], seen, other=0.0)
    head = (t[:, None] * V + h) * E + e[None, :]
    dw = tl.load(grad_w + head, seen, other=0.0)
    wide_k, wide_v = k.to(tl.float32), v.to(tl.float32)
    grown = tl.exp(total)
    scaled_k = (wide_k * (beta * grown)[:, None]).to(k.dtype)
    scaled_v = (wide_v * beta[:, None]).to(k.dtype)
    of_solved = tl.dot(du, tl.trans(scaled_v)) + tl.dot(dw, tl.trans(scaled_k))
    turned = tl.trans(solved)
    dv = tl.dot(turned, du)
    dk = tl.dot(turned, dw)
    of_beta = tl.sum(dv * wide_v, 1) + tl.sum(dk * wide_k, 1) * grown
    of_total = tl.load(grad_decays + (i * V + h) * CHUNK + r)
    of_total += tl.sum(dk * wide_k, 1) * beta * grown
    # dA = -T^T dT T^T below the diagonal
    of_system = tl.dot(turned, of_solved.to(k.dtype)).to(k.dtype)
    of_system = -tl.dot(of_system, turned)
    between = _decays(total[:, None], total[None, :], r[:, None] > r[None, :])
    weighted = of_system * between
    products = tl.dot(k, tl.trans(k))
    times = weighted * products
    of_beta += tl.sum(times, 1)
    of_total += tl.sum(times, 1) * beta - tl.sum(times * beta[:, None], 0)
    of_products = (weighted * beta[:, None]).to(k.dtype)
    dk = dk * (beta * grown)[:, None] + tl.dot(of_products, k) + tl.dot(tl.trans(of_products), k)
    dk += tl.load(grad_k + head, seen, other=0.0).to(tl.float32)
    tl.store(grad_k + head, dk.to(k.dtype), seen)
    row = (t[:, None] * V + h) * F + f[None, :]
    tl.store(grad_v + row, (dv * beta[:, None]).to(k.dtype), seen)
    # g_i is part of all later sums, so their gradients add up.
    of_g = tl.sum(of_total, 0) - tl.cumsum(of_total, 0) + of_total
    tl.store(grad_g + t * V + h, of_g, inside)
    tl.store(grad_beta + t * V + h, of_beta, inside)


class Gates(NamedTuple):
    """Inputs of the gates: columns b and a of the projection, decay and bias of each head."""

    b_TV: Tensor
    a_TV: Tensor
    decay_V: Tensor
    bias_V: Tensor


class Chunked(NamedTuple):
    """T, G and beta of each chunk and head, which the backward pass uses again."""

    inverse: Tensor
    decays: Tensor
    betas: Tensor


class Level(NamedTuple):
    """Sequences that are computed together, and the tables that kernels read of them.

    Attributes:
        chunks: int32, M x 4: first token, tokens, sequence, and number in it of each chunk.
        sequences: int32, N x 2: first chunk and number of chunks of each sequence.
        order: row on the flat axis of each token; None: the tokens' own places.
    """

    chunks: Tensor
    sequences: Tensor
    order: Tensor | None


class Tokens(NamedTuple):
    """Arrays by token of all levels: q, k and v (T x C), w (T x V x E), u and outputs (T x V x F)."""

    mixed: Tensor
    w: Tensor
    u: Tensor
    out: Tensor


class TokenGrads(NamedTuple):
    """Gradients by token: of each value head's q and k (T x V x E), and v; of g and beta, float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @staticmethod
    def empty(tokens: Tokens) -> "TokenGrads":
        g, beta = tokens.w.new_empty(2, *tokens.w.shape[:2], dtype=torch.float32).unbind()
        of_keys = (torch.empty_like(tokens.w) for _ in range(2))
        return TokenGrads(*of_keys, torch.empty_like(tokens.u), g, beta)


def run_chunks(
    tokens: Tokens, gates: Gates, shape: DeltaShape, level: Level, before: Tensor | None
) -> tuple[Tensor, Chunked]:
    """Fill w, u and the outputs of a level's tokens; return the states after its sequences.

    Args:
        before: states before the sequences, N x V x E x F; None: zeros.

    Returns:
        States after the sequences, and what the backward pass needs.
    """
    M, N = len(level.chunks), len(level.sequences)
    new = tokens.mixed.new_empty
    inverse = new(M, shape.value_heads, CHUNK.value, CHUNK.value)
    of_gates = new(2, M, shape.value_heads, CHUNK.value, dtype=torch.float32)
    chunked = Chunked(inverse, *of_gates.unbind())
    _prepare(tokens, gates, shape, level, chunked, is_solved=False)
    after = new(N, *shape.matrix_sizes, dtype=torch.float32)
    _scan(tokens, chunked, shape, level, before, (tokens.out, after, None, None))
    return after, chunked


def run_chunks_back(
    tokens: Tokens,
    gates: Gates,
    shape: DeltaShape,
    level: Level,
    before: Tensor | None,
    chunked: Chunked,
    grad_after: Tensor | None,
    grads: TokenGrads,
) -> Tensor | None:
    """Fill the gradients of a level's tokens; return those of the states before its sequences.

    `tokens.out` has the gradients of the outputs; w and u are computed again.
    """
    V = shape.value_heads
    sizes = _sizes(shape)
    chunks, sequences, _ = level
    columns = _state_columns(shape, len(sequences), BACK_SHARE)
    mixed, w, u, grad_out = tokens
    _prepare(tokens, gates, shape, level, chunked, is_solved=True)
    states = mixed.new_empty(len(chunks), V, shape.key_size, shape.value_size)
    values, grad_values, grad_w = torch.empty_like(u), torch.empty_like(u), torch.empty_like(w)
    _scan(tokens, chunked, shape, level, before, (None, None, states, values))
    grad_states = torch.empty_like(states)
    grad_before = None if before is None else torch.empty_like(before)
    scan_back_kernel[(len(sequences) * V, shape.value_size // columns)](
        mixed,
        w,
        chunked.decays,
        chunks,
        sequences,
        grad_out,
        grad_after,
        grad_values,
        grad_states,
        grad_before,
        **sizes,
        COLUMNS=columns,
        HAS_AFTER=grad_after is not None,
        HAS_BEFORE=before is not None,
        **_plain(8),
    )
    grad_decays = torch.empty_like(chunked.decays)
    chunk_back_kernel[(len(chunks), V)](
        mixed,
        chunked.decays,
        chunks,
        states,
        values,
        grad_out,
        grad_values,
        grad_states,
        grads.q,
        grads.k,
        grad_w,
        grad_decays,
        **sizes,
        COLUMNS=min(64, shape.value_size),
        **_plain(8),
    )
    system_back_kernel[(len(chunks), V)](
        mixed,
        *chunked,
        chunks,
        grad_values,
        grad_w,
        grad_decays,
        *grads[1:],
        **sizes,
        **_plain(4),
    )
    return grad_before


def _state_columns(shape: DeltaShape, sequences: int, share: float) -> int:
    """Return the columns of a state per program; `share`: programs wanted per multiprocessor."""
    known = [columns for columns in STATE_COLUMNS if columns <= shape.value_size]
    programs = sequences * shape.value_heads * shape.value_size
    wanted = share * processors()
    return next((columns for columns in known if programs // columns >= wanted), known[-1])


def _sizes(shape: DeltaShape) -> dict[str, int]:
    return {
        "K": shape.key_heads,
        "V": shape.value_heads,
        "E": shape.key_size,
        "F": shape.value_size,
    }


def _plain(warps: int) -> dict[str, int]:
    """Return launch options without dependent launch.

    Two stages: with one, Triton 3.6 compiles `scan_back_kernel` wrongly for some tiles.
    """
    return {"num_warps": warps, "num_stages": 2}


def _prepare(
    tokens: Tokens,
    gates: Gates,
    shape: DeltaShape,
    level: Level,
    chunked: Chunked,
    is_solved: bool,
) -> None:
    """Fill w and u, and `chunked` unless it is solved."""
    prepare_kernel[(len(level.chunks), shape.value_heads)](
        tokens.mixed,
        *gates,
        level.order,
        level.chunks,
        tokens.w,
        tokens.u,
        *chunked,
        gates.a_TV.stride(0),
        **_sizes(shape),
        IS_SOLVED=is_solved,
        HAS_ORDER=level.order is not None,
        **_plain(8 if is_solved else 4),
    )


def _scan(
    tokens: Tokens,
    chunked: Chunked,
    shape: DeltaShape,
    level: Level,
    before: Tensor | None,
    results: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """Fill the outputs and the states after sequences, or the states before chunks and v'."""
    columns = _state_columns(shape, len(level.sequences), SCAN_SHARE)
    scan_kernel[(len(level.sequences) * shape.value_heads, shape.value_size // columns)](
        tokens.mixed,
        tokens.w,
        tokens.u,
        chunked.decays,
        level.chunks,
        level.sequences,
        before,
        *results,
        **_sizes(shape),
        COLUMNS=columns,
        HAS_BEFORE=before is not None,
        KEEPS=results[2] is not None,
        **_plain(4),
    )
