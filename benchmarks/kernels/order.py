"""Which operations of a model give a row the same bits whatever stands beside it, on a GPU in bf16, and what it costs.

    products     torch's own by number of rows; a fixed order (one program adds up all of K) by tile, against torch's
    norms        the residual norm, heads with rotation, SwiGLU: as decoding and as training call them
    attention    as training computes it, against decoding: today's kernel, and training's own order a token at a time
    logprobs     of logits, by number of rows

Numbers are random, at the shapes of Qwen3-0.6B and 4B. A row differs where any of its numbers does.
"""

import math
import time
from functools import partial

import _path  # noqa: F401
import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from peer import finish

from hone.kernels import row_state
from hone.kernels.gpu import attention, decode, row_kernels, training_kernels
from hone.kernels.gpu.attention import attend

SHAPES = {  # outputs, inputs
    "0.6B": {
        "qkv": (4096, 1024),
        "out": (1024, 2048),
        "gate_up": (6144, 1024),
        "down": (1024, 3072),
    },
    "4B": {
        "qkv": (6144, 2560),
        "out": (2560, 4096),
        "gate_up": (19456, 2560),
        "down": (2560, 9728),
    },
}
ROWS = (1, 2, 3, 8, 16, 17, 32, 64, 100, 128, 192, 256, 512, 1000, 2048, 4096, 8192, 12345)
MOST = 16384
FEW = (  # rows, columns, inner, warps, stages
    (16, 64, 64, 4, 5),
    (16, 16, 128, 4, 5),
    (64, 16, 128, 4, 5),
    (64, 32, 128, 4, 5),
    (64, 64, 64, 4, 6),
    (128, 16, 128, 4, 4),
    (128, 32, 128, 4, 4),
    (128, 64, 64, 4, 5),
)
MANY = ((128, 128, 64, 4, 4), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3))
STARTED = time.perf_counter()


@triton.jit(do_not_specialize=["M"])
def fixed_kernel(
    x,
    w,
    out,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A tile of x M x K times w N x K transposed: K is added up by one program, BK at a time."""
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    pid = tl.program_id(0)  # GROUP tiles of rows share the columns that they fetch
    band = pid // (GROUP * tiles_n)
    size = tl.minimum(tiles_m - band * GROUP, GROUP)
    pid_m, pid_n = band * GROUP + pid % (GROUP * tiles_n) % size, pid % (GROUP * tiles_n) // size
    m, n, k = pid_m * BM + tl.arange(0, BM), pid_n * BN + tl.arange(0, BN), tl.arange(0, BK)
    left = x + (m % M)[:, None].to(tl.int64) * K + k[None, :]
    right = w + (n % N)[None, :].to(tl.int64) * K + k[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for i in tl.range(0, K, BK, num_stages=STAGES):
        acc = tl.dot(tl.load(left + i), tl.load(right + i), acc)
    inside = (m < M)[:, None] & (n < N)[None, :]
    tl.store(out + m[:, None].to(tl.int64) * N + n[None, :], acc.to(out.dtype.element_ty), inside)


def fixed(x, w, tile, out_dtype=torch.bfloat16):
    BM, BN, BK, warps, stages = tile
    (M, K), N = x.shape, len(w)
    out = x.new_empty(M, N, dtype=out_dtype)
    grid = (-(-M // BM) * -(-N // BN),)
    fixed_kernel[grid](
        x, w, out, M, N, K, BM=BM, BN=BN, BK=BK, STAGES=stages, GROUP=8, num_warps=warps
    )
    return out


@triton.jit
def token_kernel(
    q,
    keys,
    values,
    out,
    lengths,
    table,
    table_row,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    PAGE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One new token of a sequence and a k/v head, in the order of training's kernel: N keys at a time, from the first
    on. The queries that share the head are rows of a tile of M."""
    G: tl.constexpr = H // K
    head, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    m, n, e = tl.arange(0, M), tl.arange(0, N), tl.arange(0, E)[None, :]
    inside = (m < G)[:, None]
    length = tl.load(lengths + b)
    q_ME = tl.load(q + (b * H + head * G + m)[:, None] * E + e, inside, other=0.0)
    top = tl.full([M], -1e30, dtype=tl.float32)
    size = tl.zeros([M], dtype=tl.float32)
    sum_ME = tl.zeros([M, E], dtype=tl.float32)
    for at in tl.range(0, length, N, num_stages=STAGES):
        cell = tl.load(table + b * table_row + at // PAGE).to(tl.int64) * PAGE + at % PAGE
        there = ((cell + n) * K + head)[:, None] * E + e
        seen = at + n < length
        k_NE = tl.load(keys + there, seen[:, None], other=0.0)
        logits = tl.where(seen[None, :], tl.dot(q_ME, tl.trans(k_NE)) * scale, -1e30)
        v_NE = tl.load(values + there, seen[:, None], other=0.0)
        top, size, sum_ME = attend(logits, v_NE, top, size, sum_ME)
    result = (sum_ME / size[:, None]).to(out.dtype.element_ty)
    tl.store(out + (b * H + head * G + m)[:, None] * E + e, result, inside)


def randn(*shape, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def differing(one, two):
    """Share of rows that differ."""
    return round((one.flatten(1) != two.flatten(1)).any(1).double().mean().item(), 4)


def us(function, *arguments):
    return round(triton.testing.do_bench(partial(function, *arguments), warmup=3, rep=10) * 1e3, 1)


def say(*words):
    print(*words, flush=True)


def products():
    for model, shapes in SHAPES.items():
        for name, (N, K) in shapes.items():
            x, w = randn(MOST, K), randn(N, K, scale=0.02)
            whole = F.linear(x, w)
            own = {M: differing(F.linear(x[:M], w), whole[:M]) for M in ROWS}
            same, other = (
                [M for M in own if not own[M]],
                {M: share for M, share in own.items() if share},
            )
            say(
                f"{model} {name:8} torch's rows are those of {MOST} rows with {same}; differ with {other}"
            )
            first = fixed(x[:4096], w, MANY[0])
            among = {tile: differing(fixed(x[:128], w, tile), first[:128]) for tile in FEW + MANY}
            say(
                f"{model} {name:8} fixed order differs from torch's: {differing(first, whole[:4096])}; tiles "
                f"that differ from {MANY[0][:2]}: {({t[:3]: d for t, d in among.items() if d}) or 'none'}"
            )
            for M, tiles in ((8, FEW), (128, FEW), (8192, MANY)):
                times = {tile: us(fixed, x[:M], w, tile) for tile in tiles}
                best = min(times, key=times.get)
                say(
                    f"{model} {name:8} {M:5} rows: torch {us(F.linear, x[:M], w)} us, fixed {times[best]} by {best}; "
                    f"all: {list(times.values())}"
                )


def head():
    x, w = randn(4096, 1024), randn(151_936, 1024, scale=0.02)
    logits = partial(torch.mm, out_dtype=torch.float32)
    whole = logits(x, w.t())
    own = {M: differing(logits(x[:M], w.t()), whole[:M]) for M in (1, 8, 64, 128, 256, 1000)}
    say(
        f"head: torch's rows differ from those of 4096 rows: {own}; 128 rows {us(logits, x[:128], w.t())} us"
    )
    for tile in FEW[4:] + MANY:
        few = fixed(x[:256], w, tile, torch.float32)
        say(
            f"head: fixed {tile[:3]} differs from torch's {differing(few, whole[:256])}, "
            f"128 rows {us(fixed, x[:128], w, tile, torch.float32)} us"
        )
    targets, temperature = (
        torch.randint(0, 151_936, (4096,), device="cuda"),
        torch.ones(4096, device="cuda"),
    )
    logsum, logprobs, _ = training_kernels.statistics(whole, targets, temperature)
    for M in (1, 8, 128, 1000):
        few = training_kernels.statistics(whole[:M].contiguous(), targets[:M], temperature[:M])
        differ = [int((a != b[:M]).sum()) for a, b in zip(few, (logsum, logprobs), strict=False)]
        say(
            f"logprobs of {M} rows of logits: log sums and logprobs that differ from those of 4096: {differ}"
        )
    say(
        f"logprobs of 128 rows: {us(training_kernels.statistics, whole[:128], targets[:128], temperature[:128])} us"
    )


def norms():
    for D in (1024, 2560):
        x, delta, weight = randn(4096, D), randn(4096, D), randn(D)
        whole = row_kernels.add_norm(x, delta, weight, 1e-6)
        for M in (1, 128, 1023):
            few = row_kernels.add_norm(x[:M], delta[:M], weight, 1e-6)
            say(
                f"norm of {D}, {M} rows: {[differing(a, b[:M]) for a, b in zip(few, whole, strict=True)]} differ"
            )
    gate_up = randn(4096, 6144)
    say(
        f"swiglu of 8 rows: {differing(row_kernels.swiglu(gate_up[:8]), row_kernels.swiglu(gate_up)[:8])} differ"
    )
    H, K, E, T = 16, 8, 128, 4096
    qkv, scales = randn(T, H + 2 * K, E), (randn(E), randn(E))
    cos, sin = randn(8192, E), randn(8192, E)
    positions, each = torch.arange(T, device="cuda") % 777, torch.arange(T, device="cuda")
    q, k = training_kernels.rotate_heads(qkv, *scales, cos, sin, positions, 1e-6, H)
    pages = torch.zeros(2, T, K, E, device="cuda", dtype=torch.bfloat16)
    q_too, k_too, _ = row_kernels.heads(qkv, *scales, cos, sin, positions, each, *pages, 1e-6, H)
    say(
        f"heads of prefill against training: q {differing(q, q_too)}, k {differing(k, k_too)} differ"
    )
    state = torch.zeros(T + 1, row_state.FIELDS, dtype=torch.int64, device="cuda")
    state[:T, row_state.LENGTH] = positions
    table = each[:, None].repeat(1, 13)
    paged = torch.zeros(2, T, 64, K, E, device="cuda", dtype=torch.bfloat16)
    newest = row_kernels.newest_heads(qkv, *scales, cos, sin, each, state, table, *paged, 1e-6, H)
    say(
        f"heads of decoding against training: q {differing(q, newest)}, "
        f"k {differing(k, paged[0][each, positions % 64])} differ"
    )


def token(q, pages, lengths, table, M, warps, stages):
    B, H, E = q.shape
    PAGE, K = pages.shape[2:4]
    out = torch.empty_like(q)
    token_kernel[(K, B)](
        q,
        *pages,
        out,
        lengths,
        table,
        table.shape[1],
        math.log2(math.e) / math.sqrt(E),
        H=H,
        K=K,
        E=E,
        PAGE=PAGE,
        M=M,
        N=32,
        STAGES=stages,
        num_warps=warps,
    )
    return out


def mixing():
    H, K, E, PAGE = 16, 8, 128, 64
    ones, zeros = (
        torch.full((8192, E), n, device="cuda", dtype=torch.bfloat16) for n in (1.0, 0.0)
    )
    for L, B in ((192, 128), (1024, 128), (700, 8)):
        q, k, v = randn(L * B, H, E), randn(L * B, K, E), randn(L * B, K, E)
        sequences = np.stack(
            [np.arange(B) * L, np.full(B, L), np.zeros(B, int), np.zeros(B, int)], axis=1
        )
        whole, _ = attention.forward(
            q, k, v, attention.tiles(sequences, np.arange(B + 1), q.device)
        )
        q, whole, count = q.view(B, L, H, E), whole.view(B, L, H, E), -(-L // PAGE)
        padded = (F.pad(x.view(B, L, K, E), (0, 0, 0, 0, 0, count * PAGE - L)) for x in (k, v))
        pages = torch.stack([x.reshape(B * count, PAGE, K, E) for x in padded])
        table = torch.arange(B * count, device="cuda").view(B, count)
        for length in (1, 31, 32, 33, 64, 65, L):
            lengths = torch.full((B,), length, device="cuda", dtype=torch.int32)
            said = []
            for how in ((16, 1, 2), (16, 1, 3), (16, 2, 3), (16, 4, 3), (64, 4, 3)):
                work = (q[:, length - 1].contiguous(), pages, lengths, table, *how)
                said.append(f"{how}: {differing(token(*work), whole[:, length - 1])}")
                said[-1] += f" {us(token, *work)} us" if length == L else ""
            say(
                f"attention {B} x {length}, training's order by rows, warps, stages, against it: {'; '.join(said)}"
            )
        state = torch.zeros(B + 1, row_state.FIELDS, dtype=torch.int64, device="cuda")
        state[:B, row_state.LENGTH] = L - 1
        parts = (q[:, -1], k.view(B, L, K, E)[:, -1], v.view(B, L, K, E)[:, -1])
        for wide in (False, True):
            work = (
                torch.cat(parts, 1),
                None,
                None,
                ones,
                zeros,
                1e-6,
                H,
                *pages,
                table[:, 0] // count,
                state,
                table,
            )
            out = decode.decode(*work, None, wide)
            say(
                f"attention {B} x {L}, today's kernel{' (wide)' if wide else ''}, against training: "
                f"{differing(out, whole[:, -1])}, {us(decode.decode, *work, None, wide)} us with heads"
            )


def main():
    torch.manual_seed(0)
    for section in (norms, mixing, head, products):
        start = time.perf_counter()
        try:
            section()
        except Exception as error:  # the other sections still say what they have to say
            say(f"{section.__name__}: {type(error).__name__}: {str(error)[:300]}")
        say(
            f"[{section.__name__}: {time.perf_counter() - start:.1f} s, {time.perf_counter() - STARTED:.0f} in all]"
        )
    finish(ours_seconds=time.perf_counter() - STARTED)


if __name__ == "__main__":
    main()
