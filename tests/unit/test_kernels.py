"""Fused operations against their plain twins: values and gradients.

float64 takes the plain-torch path; float32 the compiled one, where numba is installed.
"""

import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hone import machine
from hone.config.lora_config import LoRAConfig
from hone.engine.slots import Slots
from hone.engine.token_sampler import FILTERED_OUT, draw_reference, draw_tokens
from hone.kernels import cpu, flash_sinks
from hone.kernels import row_state as column
from hone.kernels.decode import DecodeRows, attend_by_pages, attend_by_pages_reference
from hone.kernels.fingerprint_tables import WORDS
from hone.kernels.fingerprints import Fingerprints, sums_reference
from hone.kernels.flat_attention import Sequences, flat_attention
from hone.kernels.linear import linear, product
from hone.kernels.logprobs import target_logprobs, target_logprobs_reference
from hone.kernels.norm import add_norm, add_norm_reference
from hone.kernels.norm_rope import norm_rope, norm_rope_reference
from hone.kernels.orthogonal import orthogonal, orthogonal_reference
from hone.kernels.row_gather import put_rows, take_rows
from hone.kernels.swiglu import swiglu, swiglu_reference
from hone.models.attention_layouts import AttentionOptions
from hone.models.lora import add_lora
from hone.models.ops import CPU, CpuOps
from hone.models.spec import ModelSpec, make_plain_layers
from hone.models.transformer import Transformer
from hone.trainer.packing import pack_sequences, pack_shared
from tests import twins

both = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
compiled = pytest.mark.skipif(not cpu.IS_AVAILABLE, reason="needs numba")


def assert_same(fused, reference, *inputs, tolerance=None):
    """Same outputs, same gradients, for every output weighted differently."""
    results = []
    for function in (fused, reference):
        leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        outs = function(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        loss = sum(
            (out * torch.linspace(-1, 1 + i, out.numel(), dtype=out.dtype).view_as(out)).sum()
            for i, out in enumerate(outs)
            if out.requires_grad
        )
        loss.backward()
        results.append([*outs, *(x.grad for x in leaves if x.requires_grad)])
    limits = {} if tolerance is None else {"rtol": tolerance, "atol": tolerance}
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, **limits)


def random(*shape, dtype=torch.float64):
    return torch.randn(
        *shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape))
    ).requires_grad_()


def test_the_compiled_kernels_are_tested():
    assert cpu.IS_AVAILABLE, "numba is a development dependency"


@compiled
def test_compiled_kernels_are_kept_by_their_sources_wherever_these_lie():
    from hone.kernels.cpu import compiling, whole_model

    assert whole_model.run.stats.cache_path == str(compiling.Kept.directory)
    assert f"-{machine.instruction_set()}-" in compiling.Kept.directory.name
    # Two of a kernel, by the types of its arguments, could be mistaken for each other when processes write both.
    assert len(list(compiling.Kept.directory.glob("*.1.nbc"))) > 20
    assert not list(compiling.Kept.directory.glob("*.2.nbc"))


@both
@pytest.mark.parametrize("rows, width", [(1, 6), (7, 48), (40, 384)])
def test_swiglu(dtype, rows, width):
    assert_same(swiglu, swiglu_reference, random(rows, 2 * width, dtype=dtype), tolerance=1e-5)


@both
@pytest.mark.parametrize("with_delta", [False, True])
@pytest.mark.parametrize("rows, width", [(1, 5), (37, 128)])
def test_add_norm(dtype, with_delta, rows, width):
    x, delta, weight = (
        random(rows, width, dtype=dtype),
        random(rows, width, dtype=dtype),
        random(width, dtype=dtype),
    )
    inputs = (x, delta, weight) if with_delta else (x, weight)

    def bound(function):
        return lambda x, *rest: function(x, rest[0] if with_delta else None, rest[-1], 1e-3)

    assert_same(bound(add_norm), bound(add_norm_reference), *inputs, tolerance=2e-5)


@both
@pytest.mark.parametrize("H, K, E", [(1, 1, 8), (4, 2, 32), (3, 3, 10)])
def test_norm_rope(dtype, H, K, E):
    angle = torch.randn(6, 1, E // 2, dtype=dtype)
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([-angle.sin(), angle.sin()], -1)
    assert_same(
        lambda *inputs: norm_rope(*inputs, cos, sin, 1e-3, H),
        lambda *inputs: norm_rope_reference(*inputs, cos, sin, 1e-3, H),
        random(6, H + 2 * K, E, dtype=dtype),
        random(E, dtype=dtype),
        random(E + 1, dtype=dtype)[1:],
        tolerance=2e-5,
    )


def test_rows():
    index = torch.tensor([4, 0, 3])
    assert_same(lambda x: take_rows(x, index), lambda x: twins.take_rows(x, index), random(5, 2, 3))
    assert_same(
        lambda x: put_rows(x, index, 6), lambda x: twins.put_rows(x, index, 6), random(3, 2)
    )


@compiled
@pytest.mark.parametrize(
    "T, inputs, outputs",
    [(32, 1, 1), (33, 17, 45), (64, 128, 384), (301, 300, 96), (600, 70, 33), (259, 20, 901)],
)
def test_linear(T, inputs, outputs):
    x, weight, bias = (
        random(*shape, dtype=torch.float32)
        for shape in ((T, inputs), (outputs, inputs), (outputs,))
    )
    assert_same(linear, F.linear, x, weight, bias, tolerance=2e-3)
    exact = F.linear(x.double(), weight.double(), bias.double())
    ours, torchs = ((f(x, weight, bias) - exact).abs().max() for f in (linear, F.linear))
    assert ours <= 4 * torchs + 1e-6


@pytest.mark.skipif(not cpu.IS_AVAILABLE, reason="a kernel of the CPU")
@pytest.mark.parametrize("M, K, N", [(1, 5, 1), (5, 300, 31), (133, 513, 70), (901, 40, 129)])
def test_a_product_of_a_transposed_matrix_has_the_bits_of_one_that_was_copied(M, K, N):
    a_KM, b_KN = (
        random(K, M, dtype=torch.float32).detach(),
        random(K, N, dtype=torch.float32).detach(),
    )
    assert torch.equal(product(a_KM.t(), b_KN), product(a_KM.t().contiguous(), b_KN))


@compiled
def test_fingerprints():
    tensors = [
        torch.randn(3, 5),
        torch.randn(2 * WORDS + 7),
        torch.randn(1),
        torch.randn(WORDS),
        torch.empty(0, 2),
    ]
    of = Fingerprints(tensors)
    assert of.table is not None
    before = of()
    expected = sums_reference(of.words)
    assert before == [value % 2**64 for value in expected.tolist()] and len(set(before)) == len(
        tensors
    )
    for tensor, at in ((0, 14), (1, WORDS), (1, 2 * WORDS + 6), (3, 1)):
        of.words[tensor][at] ^= 1
        assert [a != b for a, b in zip(of(), before, strict=True)] == [
            i == tensor for i in range(len(tensors))
        ]
        of.words[tensor][at] ^= 1
    assert of() == before
    assert Fingerprints([one.bfloat16() for one in tensors]).table is None  # by torch


@both
def test_orthogonal(dtype):
    """Wide, tall and square at once, of sizes that fill no tile; singular values near 1; the same bits every time."""
    shapes = [(128, 128), (1, 3), (47, 33), (33, 47), (130, 64), (47, 33), (5, 300)]
    matrices = [random(*shape, dtype=dtype).detach() for shape in shapes]
    found = orthogonal(matrices)
    for matrix, one in zip(matrices, found, strict=True):
        torch.testing.assert_close(one, orthogonal_reference([matrix])[0], rtol=0, atol=1e-5)
    assert (
        torch.linalg.svdvals(found[-1]).min() > 0.6 and torch.linalg.svdvals(found[0]).max() < 1.3
    )
    for number in range(100):  # wherever they lie in memory
        elsewhere = torch.empty(1 + 37 * number)
        again = orthogonal([matrix.clone() for matrix in matrices])
        assert all(map(torch.equal, found, again)) and len(elsewhere)


GROUPS = {  # prompt and completion lengths of each group
    "alone": [(5, []), (1, []), (70, []), (16, [])],
    "shared": [(5, [3, 70, 9]), (130, [200, 1]), (1, []), (16, [16, 17])],
}


@compiled
@pytest.mark.parametrize("H, K, E", [(4, 4, 32), (6, 2, 16), (4, 1, 48)])
@pytest.mark.parametrize("kind", GROUPS)
def test_flat_attention(kind, H, K, E):
    rows, groups, T = [], [0], 0
    for prompt, completions in GROUPS[kind]:
        rows.append((T, prompt, 0, 0))
        prefix, T = T, T + prompt
        for length in completions:
            rows.append((T, length, prefix, prompt))
            T += length
        groups.append(len(rows))
    sequences = Sequences(np.array(rows), np.array(groups))
    inputs = (random(T, n, E, dtype=torch.float32) for n in (H, K, K))
    assert_same(
        lambda q, k, v: flat_attention(q, k, v, sequences),
        lambda q, k, v: twins.flat_attention(q, k, v, sequences),
        *inputs,
        tolerance=5e-5,
    )


@compiled
@pytest.mark.parametrize("H, K, E", [(4, 2, 32), (3, 3, 16), (4, 1, 48)])
def test_attention_by_pages(H, K, E):
    lengths, PAGE = torch.tensor([0, 5, 63, 17, 16]), 16
    q, k, v = (torch.randn(5, n, E) for n in (H, K, K))
    active = torch.tensor([3, 0, 4, 1, 6])
    state = torch.zeros(7, column.FIELDS, dtype=torch.int64)
    state[active, column.LENGTH] = lengths
    table = torch.randperm(7 * 4).view(7, 4)
    before = torch.randn(2, 28, PAGE, K, E)
    one, two = before.clone(), before.clone()
    rows = DecodeRows(active, state, table)
    torch.testing.assert_close(
        attend_by_pages(q, k, v, *one, rows),
        attend_by_pages_reference(q, k, v, *two, rows),
        rtol=1e-5,
        atol=1e-5,
    )
    assert torch.equal(one, two)


@compiled
@pytest.mark.parametrize("is_filtered", [False, True])
def test_draw(is_filtered):
    """Compiled and plain agree on tokens, logprobs and on all that is noted."""
    B = 400
    logits = 3 * torch.randn(B, 151)
    slots = [Slots(B, 4, 1, 2, torch.device("cpu")) for _ in range(2)]
    active = torch.randperm(B)
    for s in slots:
        s.state[:B, column.SEED] = torch.arange(B) * 7919 - 50_000
        s.state[:B, column.COUNT] = torch.arange(B) % 3
        s.state[:B, column.MAX] = 3
        s.state[:B, column.DONE] = (torch.arange(B) % 7 == 0).long()
        s.state[:B, column.MIN] = torch.arange(B) % 5
        s.parameters[:B, column.TEMPERATURE] = torch.tensor([1.0, 0.5, 0.0, 2.0]).repeat(100)
        s.parameters[:B, column.LOGPROB_TEMPERATURE] = torch.tensor([1.0, 0.5, 1.0, 2.0]).repeat(
            100
        )
        s.stops[:B] = torch.arange(2 * B).view(B, 2) % 151
    threshold = logits.sort(descending=True).values[:, 20] if is_filtered else None
    draw_tokens(logits, logits, threshold, slots[0], active, True)
    kept = (
        logits
        if threshold is None
        else logits.masked_fill(logits < threshold[:, None], FILTERED_OUT)
    )
    draw_reference(kept, logits, slots[1], active, True)
    assert torch.equal(slots[0].state, slots[1].state) and torch.equal(
        slots[0].tokens, slots[1].tokens
    )
    torch.testing.assert_close(slots[0].logprobs, slots[1].logprobs, rtol=1e-5, atol=1e-5)


@both
def test_target_logprobs(dtype):
    targets, temperature = (
        torch.randint(0, 67, (30,)),
        torch.tensor([1.0, 0.5, 2.0], dtype=dtype).repeat(10),
    )
    assert_same(
        lambda x: target_logprobs(x, targets, temperature),
        lambda x: target_logprobs_reference(x, targets, temperature),
        random(30, 67, dtype=dtype),
        tolerance=1e-5,
    )


@compiled
@pytest.mark.parametrize("pack_samples", [pack_sequences, pack_shared])
@pytest.mark.parametrize("T", [9, 40])
def test_a_block_in_two_calls_gives_the_bits_of_its_operations(monkeypatch, pack_samples, T):
    model = Transformer(
        ModelSpec(
            40, 48, 72, 2, 4, 2, 16, 1e-6, make_plain_layers(100.0, 16, 2), True, 64, 0.3, False
        )
    )
    model.init_weights(torch.Generator().manual_seed(0))
    ids = [[1, 2, *range(3, n)] for n in (T, T - 4, T - 1, 4)]
    packed, results = pack_samples(ids, [[j > 1 for j in range(len(row))] for row in ids]), []
    for is_whole in (True, False):
        if not is_whole:
            monkeypatch.setattr(CpuOps, "can_fuse", lambda *_: False)
        model.zero_grad()
        hidden = packed.target_hidden(model)
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
        results.append([hidden.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@compiled
def test_a_block_with_an_adapter_a_bias_or_frozen_weights_is_computed_by_its_operations():
    spec = ModelSpec(
        40, 48, 72, 1, 4, 2, 16, 1e-6, make_plain_layers(100.0, 16, 1), True, 64, 0.3, False
    )
    x = torch.ones(4, 48)
    assert CPU.can_fuse(Transformer(spec).blocks[0], x)
    frozen, adapted = Transformer(spec), Transformer(spec)
    next(frozen.blocks.parameters()).requires_grad_(False)
    add_lora(adapted, LoRAConfig(rank=2), 0)
    biased, unscaled = (
        Transformer(replace(spec, **change)) for change in ({"qkv_bias": True}, {"qk_norm": None})
    )
    others = (frozen, adapted, biased, unscaled)
    assert not any(CPU.can_fuse(model.blocks[0], x) for model in others)
    with torch.no_grad():
        assert not CPU.can_fuse(Transformer(spec).blocks[0], x)


@compiled
def test_who_compiles_kernels_ends_with_whoever_asked_for_them():
    """As those do that a killed `rl` had started."""
    worker = "import time; from hone.kernels.cpu import compiling; compiling._works(); "
    worker += "print('works', flush=True); time.sleep(60)"
    parent = "import os, subprocess, sys; own = {'HONE_PARENT_PID': str(os.getpid())}; "
    parent += f"subprocess.run([sys.executable, '-c', {worker!r}], env=os.environ | own)"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "works\n"
    process.kill()
    process.wait()
    start = time.monotonic()
    process.communicate()  # until nobody can write there any more
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("window", [None, 5])
def test_flash_attention_with_sinks_by_plain_torch(monkeypatch, window):
    """The algebra around torch's flash attention, which a CPU does not have: against autograd."""
    T, H, K, E = 11, 4, 2, 8
    draw = torch.Generator().manual_seed(0)
    shapes = [(T, H, E), (T, K, E), (T, K, E), (H,)]
    leaves = [torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes]
    direction = torch.randn(T, H, E, generator=draw, dtype=torch.float64)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    left = -1 if window is None else window - 1
    is_seen = (distance >= 0) & (distance <= left if window else True)

    def compute_logits(q, k):
        logits = torch.einsum("the,she->hts", q, k.repeat_interleave(H // K, 1)) / E**0.5
        return logits.masked_fill(~is_seen, -torch.inf)

    def call_flash(q, k, v, call):
        assert call.left == left
        logits = compute_logits(q, k)
        share, wide = logits.softmax(-1), v.repeat_interleave(H // K, 1)
        nothing = torch.zeros(1)
        return torch.einsum("hts,she->the", share, wide), logits.logsumexp(-1), nothing, nothing

    def differentiate_flash(grad, qkv, found, call):
        """Flash attention's backward pass: from the outputs and the logsumexp alone."""
        q, k, v = qkv
        wide_k, wide_v = (x.repeat_interleave(H // K, 1) for x in (k, v))
        share = (compute_logits(q, k) - found[1][:, :, None]).exp()
        delta = (grad * found[0]).sum(-1).T[:, :, None]
        of_share = torch.einsum("the,she->hts", grad, wide_v)
        of_logits = share * (of_share - delta) / E**0.5
        of_q = torch.einsum("hts,she->the", of_logits, wide_k)
        of_k = torch.einsum("hts,the->she", of_logits, q)
        of_v = torch.einsum("hts,the->she", share, grad)
        return of_q, *(x.unflatten(1, (K, H // K)).sum(2) for x in (of_k, of_v))

    monkeypatch.setattr(flash_sinks, "call_flash", call_flash)
    monkeypatch.setattr(flash_sinks, "differentiate_flash", differentiate_flash)
    ends = torch.tensor([0, T])
    call = flash_sinks.FlashCall(ends, ends, T, T, left)
    results = []
    for is_flash in (True, False):
        q, k, v, sinks = (x.clone().requires_grad_() for x in leaves)
        if is_flash:
            out = flash_sinks.attend_with_sinks(q, k, v, sinks, call)
        else:
            heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
            options = AttentionOptions(window=window, sinks_H=sinks)
            out = options.attend(*heads, distance)[0].transpose(0, 1)
        (out * direction).sum().backward()
        results.append([out, *(x.grad for x in (q, k, v, sinks))])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)  # sums of sinks are fp32
