"""Decode one token per sequence: attention over the pages of the KV cache, and sampling."""

import numpy as np
from numba import prange

from hone.kernels.cpu.compiling import compiled, inlined
from hone.kernels.cpu.simd import (
    LANES,
    add,
    dots,
    exp,
    get,
    get_integer,
    largest,
    load,
    maximum,
    multiply,
    multiply_add,
    prefetch,
    put,
    put_integer,
    splat,
    store,
    total,
)
from hone.kernels.row_state import (
    COUNT,
    DONE,
    FIELDS,
    FULL,
    LAST,
    LENGTH,
    LOGPROB_TEMPERATURE,
    MAX,
    MIN,
    PARAMETERS,
    SEED,
    STOPPED,
    TEMPERATURE,
)

_f, _u = np.float32, np.uint64


@inlined
def cell_of(position, PAGE, table, pages):
    """Return the KV-cache cell (page number * PAGE + offset) of a token position.

    The sequence's page numbers begin at table[pages].
    """
    return get_integer(table, pages + position // PAGE) * PAGE + position % PAGE


@inlined
def exponentials(scores, at, L):
    """Replace L scores by exp(score - highest), zero-padded to a whole vector; return their sum."""
    whole = (L + LANES - 1) // LANES * LANES
    for j in range(at + L, at + whole):
        put(scores, j, _f(-1e30))
    tops = load(scores, at)
    for j in range(at + LANES, at + whole, LANES):
        tops = maximum(tops, load(scores, j))
    below, sums = splat(-largest(tops)), splat(_f(0))
    for j in range(at, at + whole, LANES):
        share = exp(add(load(scores, j), below))
        store(scores, j, share)
        sums = add(sums, share)
    return total(sums)


# Sums over tokens as several additions that do not wait for each other: of several vectors, of every second token.


@inlined
def mix_four(shares, first, count, values, at, step, out, out_at):
    """Add the values of `count` tokens, weighted by `shares`, to 4 * LANES floats of `out`."""
    a, b = load(out, out_at), load(out, out_at + LANES)
    c, d = load(out, out_at + 2 * LANES), load(out, out_at + 3 * LANES)
    w, x, y, z = splat(_f(0)), splat(_f(0)), splat(_f(0)), splat(_f(0))
    for j in range(0, count - 1, 2):
        one, two = get(shares, first + j), get(shares, first + j + 1)
        here, there = at + j * step, at + (j + 1) * step
        a, w = multiply_add(one, load(values, here), a), multiply_add(two, load(values, there), w)
        b, x = (
            multiply_add(one, load(values, here + LANES), b),
            multiply_add(two, load(values, there + LANES), x),
        )
        here, there = here + 2 * LANES, there + 2 * LANES
        c, y = multiply_add(one, load(values, here), c), multiply_add(two, load(values, there), y)
        d, z = (
            multiply_add(one, load(values, here + LANES), d),
            multiply_add(two, load(values, there + LANES), z),
        )
    if count % 2:
        one, here = get(shares, first + count - 1), at + (count - 1) * step
        a, b = (
            multiply_add(one, load(values, here), a),
            multiply_add(one, load(values, here + LANES), b),
        )
        here += 2 * LANES
        c, d = (
            multiply_add(one, load(values, here), c),
            multiply_add(one, load(values, here + LANES), d),
        )
    store(out, out_at, add(a, w))
    store(out, out_at + LANES, add(b, x))
    store(out, out_at + 2 * LANES, add(c, y))
    store(out, out_at + 3 * LANES, add(d, z))


@inlined
def mix_two(shares, first, count, values, at, step, out, out_at):
    """Add the values of `count` tokens, weighted by `shares`, to 2 * LANES floats of `out`."""
    a, b, w, x = load(out, out_at), load(out, out_at + LANES), splat(_f(0)), splat(_f(0))
    for j in range(0, count - 1, 2):
        one, two = get(shares, first + j), get(shares, first + j + 1)
        here, there = at + j * step, at + (j + 1) * step
        a, w = multiply_add(one, load(values, here), a), multiply_add(two, load(values, there), w)
        b, x = (
            multiply_add(one, load(values, here + LANES), b),
            multiply_add(two, load(values, there + LANES), x),
        )
    if count % 2:
        one, here = get(shares, first + count - 1), at + (count - 1) * step
        a, b = (
            multiply_add(one, load(values, here), a),
            multiply_add(one, load(values, here + LANES), b),
        )
    store(out, out_at, add(a, w))
    store(out, out_at + LANES, add(b, x))


@inlined
def fetch(memory, at, lines):
    """Prefetch `lines` cache lines."""
    for i in range(at, at + 16 * lines, 16):
        prefetch(memory, i)


@inlined
def mix_row(H, K, E, q, q_at, keys, values, PAGE, L, table, pages, next_pages, out, out_at):
    """Compute the attention output of one query token over a sequence's first L positions.

    Args:
        keys, values: KV cache of a layer, pages x PAGE x K x E; PAGE is a multiple of 16.
        pages: where in `table` the sequence's page numbers begin.
        next_pages: where in `table` the next sequence's page numbers begin; its first keys are prefetched.
        out: H * E floats are written from out[out_at] on.
    """
    step, scale = K * E, _f(1) / np.sqrt(_f(E))
    starts = np.empty((L + PAGE - 1) // PAGE, np.int64)
    for p in range(len(starts)):
        starts[p] = get_integer(table, pages + p) * PAGE * step
    # 16 tokens at a time, all heads of them: the cache passes by once, from its start to its end. What comes next is
    # asked for in between, as many lines at once as a core can wait for.
    row = len(starts) * PAGE
    scores = np.empty(H * row, np.float32)
    query = np.empty(H * E, np.float32)
    for i in range(H * E):
        query[i] = get(q, q_at + i) * scale
    group, lines = H // K, -(-step * LANES // (16 * H))
    for first in range(0, L, 16):
        at = starts[first // PAGE] + first % PAGE * step
        coming, ahead = values, starts[0]
        if first + 16 < L:
            coming, ahead = keys, starts[(first + 16) // PAGE] + (first + 16) % PAGE * step
        for h in range(H):
            for j in range(0, 16, LANES):
                fetch(coming, ahead, lines)
                ahead += 16 * lines
                some = dots(query, h * E, keys, at + j * step + h // group * E, step, E)
                store(scores, h * row + first + j, some)
    weights = np.empty(H, np.float32)
    for h in range(H):
        weights[h] = _f(1) / exponentials(scores, h * row, L)
    mixed, lines = np.zeros(H * E, np.float32), -(-step // H)
    for first in range(0, L, 16):
        at, count = starts[first // PAGE] + first % PAGE * step, min(16, L - first)
        coming, ahead = keys, get_integer(table, next_pages) * PAGE * step
        if first + 16 < L:
            coming, ahead = values, starts[(first + 16) // PAGE] + (first + 16) % PAGE * step
        for h in range(H):
            fetch(coming, ahead, lines)
            ahead += 16 * lines
            shares, here, e = h * row + first, at + h // group * E, 0
            while e + 4 * LANES <= E:
                mix_four(scores, shares, count, values, here + e, step, mixed, h * E + e)
                e += 4 * LANES
            while e + 2 * LANES <= E:
                mix_two(scores, shares, count, values, here + e, step, mixed, h * E + e)
                e += 2 * LANES
            while e < E:
                sum_so_far = load(mixed, h * E + e)
                for j in range(count):
                    sum_so_far = multiply_add(
                        get(scores, shares + j), load(values, here + e + j * step), sum_so_far
                    )
                store(mixed, h * E + e, sum_so_far)
                e += LANES
    for h in range(H):
        weight = splat(weights[h])
        for e in range(h * E, (h + 1) * E, LANES):
            store(out, out_at + e, multiply(load(mixed, e), weight))


@compiled
def attend(
    B,
    H,
    K,
    E,
    q,
    q_row,
    k,
    k_row,
    v,
    v_row,
    keys,
    values,
    PAGE,
    active,
    state,
    table,
    table_row,
    out,
):
    """Store the new token's k and v of each sequence in the KV cache, then compute attention.

    Sequence b has row active[b] of the matrix `state` and of the page table `table`. The output
    `out` is B x (H * E).
    """
    step = K * E
    for b in prange(B):
        row, next_row = get_integer(active, b), get_integer(active, min(b + 1, B - 1))
        position = get_integer(state, row * FIELDS + LENGTH)
        cell = cell_of(position, PAGE, table, row * table_row) * step
        for d in range(step):
            put(keys, cell + d, get(k, b * k_row + d))
            put(values, cell + d, get(v, b * v_row + d))
        mix_row(
            H,
            K,
            E,
            q,
            b * q_row,
            keys,
            values,
            PAGE,
            position + 1,
            table,
            row * table_row,
            next_row * table_row,
            out,
            b * H * E,
        )


@inlined
def _mix(z):
    """Apply splitmix64's finalizer (Steele et al. 2014)."""
    z = (z ^ (z >> _u(30))) * _u(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> _u(27))) * _u(0x94D049BB133111EB)
    return z ^ (z >> _u(31))


@inlined
def draw_row(
    row,
    V,
    logits,
    at,
    plain,
    plain_at,
    has_plain,
    parameters,
    state,
    stops,
    num_stops,
    tokens,
    logprobs,
    capacity,
    advance,
    weights,
):
    """Draw the next token of the sequence in row `row` of `state`; store token and logprob.

    The draw is that of `engine/token_sampler.py`.

    Args:
        logits: V logits to draw from, from `at` on.
        plain: V logits for the logprob, from `plain_at` on, if `has_plain`; else pass `logits`.
        advance: number added to LENGTH: 1 if this step stored the last token's keys, 0 after a prefill.
        weights: scratch memory, V floats.
    """
    own = row * FIELDS
    count = get_integer(state, own + COUNT)
    bits = _mix(_mix(_u(get_integer(state, own + SEED))) + _u(count + 1) * _u(0x9E3779B97F4A7C15))
    uniform = np.float64(bits >> _u(11)) * 2.0**-53
    temperature = get(parameters, row * PARAMETERS + TEMPERATURE)
    greedy = temperature < _f(1e-5)
    scale = _f(1) if greedy else _f(1) / temperature
    top = get(logits, at)
    for v in range(V):
        top = max(top, get(logits, at + v))
    for v in range(V):
        weights[v] = exp((get(logits, at + v) - top) * scale)
    whole = 0.0
    for v in range(V):
        whole += np.float64(weights[v])
    token = V - 1
    if greedy:
        token = 0
        while token < V - 1 and get(logits, at + token) != top:
            token += 1
    else:
        target, seen = uniform * whole, 0.0
        for v in range(V):
            seen += np.float64(weights[v])
            if get(logits, at + v) > _f(-1e29):
                token = v
                if seen > target:
                    break
    if has_plain:
        scale = _f(1) / get(parameters, row * PARAMETERS + LOGPROB_TEMPERATURE)
        top = get(plain, plain_at)
        for v in range(V):
            top = max(top, get(plain, plain_at + v))
        whole = 0.0
        for v in range(V):
            whole += np.float64(exp((get(plain, plain_at + v) - top) * scale))
    put_integer(tokens, row * capacity + count, token)
    logprob = np.float64((get(plain, plain_at + token) - top) * scale) - np.log(whole)
    put(logprobs, row * capacity + count, _f(logprob))
    done = FULL if count + 1 >= get_integer(state, own + MAX) else 0
    if count + 1 >= get_integer(state, own + MIN):
        for s in range(num_stops):
            if get_integer(stops, row * num_stops + s) == token:
                done = STOPPED
    put_integer(state, own + LAST, token)
    put_integer(state, own + LENGTH, get_integer(state, own + LENGTH) + advance)
    put_integer(state, own + COUNT, count + 1)
    put_integer(state, own + DONE, done)


@compiled
def draw(
    B,
    V,
    logits,
    plain,
    has_plain,
    parameters,
    state,
    active,
    stops,
    num_stops,
    tokens,
    logprobs,
    capacity,
    advance,
):
    """Draw the next token of each sequence b whose row active[b] of `state` is not done.

    logits, plain: B x V.
    """
    for b in prange(B):
        row = get_integer(active, b)
        if get_integer(state, row * FIELDS + DONE) == 0:
            draw_row(
                row,
                V,
                logits,
                b * V,
                plain,
                b * V,
                has_plain,
                parameters,
                state,
                stops,
                num_stops,
                tokens,
                logprobs,
                capacity,
                advance,
                np.empty(V, np.float32),
            )
