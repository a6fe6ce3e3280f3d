"""The Triton kernels against their plain twins, in Triton's interpreter: what they compute, not how fast.

`make test-gpu` runs the same through the engine on a GPU, and compares the kernels in Gluon, which are not interpreted.
"""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from hone.engine.delta_states import CapturedDelta, DeltaChunk, PrefillDelta
from hone.engine.slots import Slots
from hone.engine.token_sampler import draw_reference, filter_thresholds
from hone.kernels import delta_rule, norm, numerics
from hone.kernels import row_state as column
from hone.kernels.decode import DecodeRows, attend_by_pages_reference
from hone.kernels.delta_plan import DeltaHeads, DeltaPlan, DeltaState
from hone.kernels.delta_shape import DeltaShape
from hone.kernels.expert_products import (
    ExpertWeights,
    decode_experts,
    multiply_experts,
    multiply_groups,
)
from hone.kernels.flat_attention import Sequences
from hone.kernels.gating import ClampedGating
from hone.kernels.norm import add_norm_reference, offset_norm
from hone.kernels.norm_rope import norm_rope, norm_rope_reference
from hone.kernels.swiglu import swiglu_reference
from hone.models import ops
from hone.models.attention_layouts import PackedAttention, Rotation
from hone.models.families import parse_model_config
from hone.models.spec import ModelSpec, make_plain_layers
from hone.models.transformer import Transformer
from tests import twins

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    numerics.use("fast")  # whatever a test before has left


def close(one, two, tolerance=1e-5):
    torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_add_norm(parts):
    from hone.kernels.gpu.row_kernels import add_norm

    x, weight = torch.randn(5, 48, device=DEVICE), torch.rand(48, device=DEVICE)
    delta = (
        None if parts == 0 else torch.randn(*([parts] if parts > 1 else []), 5, 48, device=DEVICE)
    )
    for one, two in zip(
        add_norm(x, delta, weight, 1e-6), add_norm_reference(x, delta, weight, 1e-6), strict=True
    ):
        close(one, two)


@pytest.mark.parametrize("parts", [0, 1, 3])
@pytest.mark.parametrize("has_after, has_before", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("factor, offset", [(1.0, 0.0), (0.25, 1.0)])
def test_add_branch(parts, has_after, has_before, factor, offset):
    from hone.kernels.gpu.row_kernels import add_branch

    x, after, before = (torch.randn(*shape, device=DEVICE) for shape in ((5, 48), (48,), (48,)))
    delta = torch.randn(max(parts, 1), 5, 48, device=DEVICE)
    total = x
    if parts:
        branch = delta.sum(0)
        branch = offset_norm(branch, after, offset, 1e-6) if has_after else branch
        total = x + factor * branch
    expected = offset_norm(total, before, offset, 1e-6) if has_before else total
    found = add_branch(
        x,
        None if parts == 0 else delta[0] if parts == 1 else delta,
        after if has_after else None,
        factor,
        before if has_before else None,
        offset,
        1e-6,
    )
    close(found[0], total)
    close(found[1], expected)


def test_norms_of_whole_projections():
    from hone.kernels.gpu.row_kernels import normalize_projections

    qkv, q, k = torch.randn(5, 48 + 2 * 24, device=DEVICE), torch.rand(48), torch.rand(24)
    q, k = q.to(DEVICE), k.to(DEVICE)
    expected = norm.normalize_projections(qkv, q, k, 1e-6)
    close(normalize_projections(qkv.clone(), q, k, 1e-6), expected)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("E, rotated", [(32, 32), (64, 48)])
def test_prepared_heads(is_shared, E, rotated):
    from hone.kernels.gpu.row_kernels import prepare_heads

    H, K, T = 3, 1, 5
    qkv = torch.randn(T, H if is_shared else H + 2 * K, E, device=DEVICE)
    source = torch.randn(T, H + 2 * K, E, device=DEVICE) if is_shared else None
    q_scale, k_scale = torch.rand(2, E, device=DEVICE)
    angles = torch.rand(9, rotated // 2, device=DEVICE) * 6
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    positions = torch.tensor([0, 8, 3, 3, 1], device=DEVICE)
    rotation = Rotation((cos, sin), positions)
    expected = [rotation.rotate_heads(offset_norm(qkv[:, :H], q_scale, 0.0, 1e-6))]
    if source is None:
        k, v = qkv[:, H:].chunk(2, 1)
        expected += [rotation.rotate_heads(offset_norm(k, k_scale, 0.0, 1e-6))]
        expected += [offset_norm(v, torch.ones_like(k_scale), 0.0, 1e-6)]
    else:
        expected += [source[:, H:]]
    scales = (q_scale, None if is_shared else k_scale)
    found = prepare_heads(qkv, source, *scales, cos, sin, positions, 1e-6, (H, K))
    close(found, torch.cat(expected, 1))


def test_geglu():
    from hone.kernels.gpu.row_kernels import swiglu

    x = 3 * torch.randn(3, 160, device=DEVICE)
    gate, up = x.chunk(2, 1)
    close(swiglu(x, is_gelu=True), F.gelu(gate, approximate="tanh") * up)


def test_embeddings_of_the_newest_tokens():
    from hone.kernels.gpu.row_kernels import newest_embeddings

    embed, active = torch.randn(11, 48, device=DEVICE), torch.tensor([3, 0, 2], device=DEVICE)
    state = torch.zeros(5, column.FIELDS, dtype=torch.int64, device=DEVICE)
    state[:, column.LAST] = torch.tensor([9, 1, 4, 10, 3])
    assert torch.equal(newest_embeddings(embed, active, state), embed[[10, 9, 4]])


@pytest.mark.parametrize(
    "rows, columns", [(3, 160), (40, 3000)]
)  # more blocks of 1,024 than are there at once
def test_swiglu(rows, columns, monkeypatch):
    from hone.kernels.gpu import row_kernels as of_rows

    monkeypatch.setattr(of_rows, "processors", lambda: 2)
    swiglu, x = of_rows.swiglu, torch.randn(rows, columns, device=DEVICE)
    close(swiglu(x), swiglu_reference(x))


@pytest.mark.parametrize("with_norm", [True, False])
def test_heads_of_a_projection_and_their_place_in_the_cache(with_norm):
    from hone.kernels.gpu.row_kernels import heads

    T, H, K, E = 6, 4, 2, 16
    qkv, cells = (
        torch.randn(T, H + 2 * K, E, device=DEVICE),
        torch.tensor([7, 3, 0, 9, 8, 1], device=DEVICE),
    )
    scales = [torch.rand(E, device=DEVICE) if with_norm else None for _ in "qk"]
    cos, sin, positions = *rope(20, E), torch.tensor([4, 0, 19, 2, 3, 3], device=DEVICE)
    keys, values = torch.zeros(10, K, E, device=DEVICE), torch.zeros(10, K, E, device=DEVICE)
    got = heads(qkv, *scales, cos, sin, positions, cells, keys, values, 1e-6, H)
    expected = norm_rope(qkv, *scales, cos[positions][:, None], sin[positions][:, None], 1e-6, H)
    for one, two in zip(got, expected, strict=True):
        close(one, two)
    close(keys[cells], expected[1])
    close(values[cells], expected[2])


@pytest.mark.parametrize(
    "rows, splits, width, with_bias",
    [
        (1, 1, 64, False),
        (20, 2, 64, True),
        (40, 1, 64, True),
        (40, 3, 128, True),
        (200, 4, 128, False),
    ],
)
def test_parts_of_a_product(rows, splits, width, with_bias):
    from hone.kernels.gpu.products import part_tile, parts

    x, weight = torch.randn(rows, 256, device=DEVICE), torch.randn(96, 256, device=DEVICE)
    bias = torch.randn(96, device=DEVICE) if with_bias else None
    found = parts(x, weight, bias, splits, width)
    close(found, twins.linear_parts(x, weight, bias, splits, part_tile(rows, width, 256).BK), 1e-3)
    close(found.sum(0), F.linear(x, weight, bias), 1e-3)


@pytest.mark.parametrize("rows, F_, with_bias", [(40, 40, True), (100, 32, False)])
def test_swiglu_of_a_product(rows, F_, with_bias):
    from hone.kernels.gpu.products import short

    x, weight = torch.randn(rows, 192, device=DEVICE), torch.randn(2 * F_, 192, device=DEVICE) * 0.1
    bias = torch.randn(2 * F_, device=DEVICE) if with_bias else None
    expected = F.linear(x, weight, bias)
    close(short(x, weight, bias), expected, 1e-3)
    close(short(x, weight, bias, is_swiglu=True), swiglu_reference(expected), 1e-3)


@pytest.mark.parametrize(
    "which, products_of_few, adapted",
    [
        (lambda rows, columns: True, 11, False),
        (lambda rows, columns: True, 8, True),  # the first norm comes before them
        (lambda rows, columns: rows == 128, 6, False),
        (lambda rows, columns: rows != 128, 0, False),
        (lambda rows, columns: columns != 192, 6, False),
    ],
)
@torch.no_grad()
def test_a_model_whose_products_do_what_stands_around_them(
    which, products_of_few, adapted, monkeypatch
):
    from hone.kernels import gpu
    from hone.kernels.gpu import few_row_products

    made = Transformer(
        ModelSpec(
            512, 128, 192, 3, 4, 2, 64, 1e-6, make_plain_layers(1e4, 64, 3), True, 256, 0.1, False
        )
    )
    made.init_weights(torch.Generator().manual_seed(0))
    made.to(DEVICE)
    if adapted:
        for block in made.blocks:
            block.mlp.gate_up.delta = lambda x: x[:, :1] * 0.1
    tokens, attention, kept = (
        torch.arange(6, device=DEVICE),
        PackedAttention([6], DEVICE),
        torch.tensor([1, 4, 5]),
    )
    inputs = (tokens, attention.token_positions(), attention, kept.to(DEVICE))
    expected = made(*inputs)
    calls = []
    monkeypatch.setattr("hone.models.transformer.select_ops", lambda x: ops.GPU)
    monkeypatch.setattr(gpu, "takes", lambda x: True)
    monkeypatch.setattr(gpu, "is_few", lambda x, weight: which(*weight.shape))
    monkeypatch.setattr(
        few_row_products, "few", lambda *inputs: calls.append(1) or twins.few(*inputs)
    )
    monkeypatch.setattr(
        few_row_products, "few_onto", lambda *inputs: calls.append(1) or twins.few_onto(*inputs)
    )
    close(made(*inputs), expected, 1e-3)
    assert len(calls) == products_of_few


def test_a_mixture_of_experts_by_kernels(monkeypatch):
    """Without gradients, with every product of few rows offered to the fused kernels."""
    from hone.kernels import gpu
    from hone.kernels.gpu import few_row_products

    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    config = experts | {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config |= {"num_hidden_layers": 3, "intermediate_size": 0, "hidden_size": 128}
    made = Transformer(parse_model_config(config | {"vocab_size": 512, "initializer_range": 0.1}))
    made.init_weights(torch.Generator().manual_seed(0))
    made.to(DEVICE)
    tokens, attention = torch.arange(6, device=DEVICE), PackedAttention([6], DEVICE)
    inputs = (tokens, attention.token_positions(), attention, torch.tensor([1, 4, 5]).to(DEVICE))
    expected = made(*inputs)
    monkeypatch.setattr("hone.models.transformer.select_ops", lambda x: ops.GPU)
    monkeypatch.setattr(gpu, "takes", lambda x: True)
    monkeypatch.setattr(gpu, "is_few", lambda x, weight: True)
    monkeypatch.setattr(few_row_products, "few", twins.few)
    monkeypatch.setattr(few_row_products, "few_onto", twins.few_onto)
    with torch.no_grad():
        close(made(*inputs), expected, 1e-3)


def test_which_products_do_what_stands_around_them(monkeypatch):
    from hone.kernels import gpu

    monkeypatch.setattr(gpu, "takes", lambda x: True)
    monkeypatch.setattr(gpu, "has_dependent_launch", lambda: True)
    most = {
        (4096, 1024): 32,
        (6144, 1024): 32,
        (4096, 2048): 16,
        (2048, 6144): 16,
        (6144, 2560): 8,
        (2560, 9728): 8,
        (16, 512): 0,
        (512, 96): 0,
        (512, 576): 32,
        (4096, 10944): 0,
    }
    for O, I in most:
        rows = [torch.empty(T, I, dtype=torch.bfloat16, device="meta") for T in range(1, 40)]
        assert (
            sum(gpu.is_few(x_TI, torch.empty(O, I, device="meta")) for x_TI in rows) == most[O, I]
        )


def test_tiles_of_few_rows_are_whole_and_their_weights_have_room_in_registers():
    from hone.kernels.gpu.few_row_products import held_tile

    columns_and_inner = itertools.product(
        (16, 32, 48, 256, 1024, 2048, 4096, 9728), range(64, 20_000, 64)
    )
    for rows, (columns, inner), (is_swiglu, is_of_heads) in itertools.product(
        (1, 8, 9, 16, 17, 32),
        list(columns_and_inner),
        ((False, False), (True, False), (False, True)),
    ):
        tile = held_tile(rows, columns, inner, is_swiglu, is_of_heads)
        assert (
            inner % (tile.WARPS * tile.BK) == 0
            and tile.BN % 16 == 0
            and columns >= tile.BN
            and tile.BK % 32 == 0
        )
        assert rows <= tile.R or (rows > 16 and tile.R == 16)
        weights = tile.BN * tile.BK * tile.constants(inner)["HELD"] * (1 + is_swiglu)
        sums = 2 * tile.BN * tile.R * (1 + is_swiglu)  # of 4 bytes each
        assert (weights + sums) // 64 <= (128 if tile.maxnreg else 224), (
            rows,
            columns,
            inner,
            tile,
        )


@pytest.mark.parametrize("memory, stages", [(99, 3), (163, 6), (227, 8)])
def test_stages_have_room_on_a_multiprocessor(memory, stages, monkeypatch):
    from hone.kernels import gpu

    monkeypatch.setattr(gpu, "shared_memory", lambda: memory * 1024)
    assert gpu.stages_of(9, 2 * (64 + 32), 64) == stages and gpu.stages_of(2, 128, 64) == 2


def test_measured_tiles_have_room_on_a_hopper(monkeypatch):
    from hone.kernels import gpu
    from hone.kernels.gpu import products, sampling

    monkeypatch.setattr(gpu, "shared_memory", lambda: 227 * 1024)
    for module in (products, sampling):
        monkeypatch.setattr(module, "has_dependent_launch", lambda: True)
    tiles = [
        (products.short_tile(rows, is_swiglu), is_swiglu)
        for rows in (40, 128)
        for is_swiglu in (False, True)
    ]
    tiles += [
        (products.part_tile(rows, width, 512), False)
        for rows in (8, 32, 64, 256)
        for width in (64, 128)
    ]
    for tile, is_swiglu in tiles:
        assert tile.stages(is_swiglu) == tile.STAGES
    for rows in (16, 32, 128, 256):
        columns, inner, stages, _ = sampling.head_tile(rows, 1024)
        assert gpu.stages_of(stages, min(rows, 128) + columns, inner) == stages


@pytest.mark.parametrize(
    "rows, columns, inner, expected",
    [  # 0.6B, 1.7B, 4B, 7B, others
        (32, 1024, 2048, (8, 64)),
        (64, 1024, 3072, (8, 64)),
        (128, 1024, 3072, (8, 64)),
        (256, 1024, 3072, (4, 64)),
        (64, 2048, 2048, (8, 128)),
        (128, 2048, 6144, (4, 64)),
        (256, 2048, 2048, (2, 64)),
        (256, 2048, 6144, (4, 128)),
        (32, 2560, 9728, (6, 64)),
        (64, 2560, 9728, (6, 128)),
        (128, 2560, 9728, (3, 64)),
        (256, 2560, 9728, (3, 128)),
        (64, 3584, 18944, (4, 128)),
        (128, 3584, 3584, (4, 128)),
        (256, 3584, 18944, (1, 64)),
        (300, 1024, 2048, (1, 64)),
        (32, 1024, 192, (1, 64)),
        (32, 1024, 100, (1, 64)),
    ],
)
def test_into_how_many_parts_a_product_is_cut(rows, columns, inner, expected, monkeypatch):
    from hone.kernels import gpu

    monkeypatch.setattr(gpu, "takes", lambda x: True)
    monkeypatch.setattr(gpu, "processors", lambda: 132)
    assert (
        gpu.splits(
            torch.empty(rows, inner, device="meta"), torch.empty(columns, inner, device="meta")
        )
        == expected
    )


@pytest.mark.parametrize(
    "rows, length, expected",
    [
        (1, 100, 0),
        (1, 150, 0),
        (1, 200, 2),
        (8, 256, 2),
        (1, 800, 8),
        (1, 3000, 16),
        (4, 3000, 4),
        (8, 3000, 2),
        (32, 800, 0),
        (48, 3000, 0),
    ],
)
def test_into_how_many_parts_a_sequence_is_cut(rows, length, expected, monkeypatch):
    from hone.engine.graphs import DecodeGraphs
    from hone.kernels import gpu

    monkeypatch.setattr(gpu, "processors", lambda: 132)
    assert DecodeGraphs._choose_parts(SimpleNamespace(heads=8), rows, length) == expected


@pytest.mark.parametrize(
    "rows, heads, queries, head_size, expected",
    [
        (8, 8, 2, 128, False),
        (16, 8, 2, 128, True),
        (32, 8, 2, 128, False),
        (128, 8, 2, 128, True),
        (256, 8, 2, 128, False),
        (16, 8, 2, 256, False),
        (128, 8, 2, 256, True),
        (16, 1, 40, 64, False),
    ],
)
def test_for_which_sequences_length_matters(rows, heads, queries, head_size, expected, monkeypatch):
    from hone.engine.graphs import LONG_SEQUENCE_TOKENS, DecodeGraphs
    from hone.kernels import gpu

    monkeypatch.setattr(gpu, "processors", lambda: 132)
    monkeypatch.setattr(gpu, "shared_memory", lambda: 227 * 2**10)
    spec = SimpleNamespace(
        num_attention_heads=heads * queries, hidden_size=1024, head_dim=head_size
    )
    graphs = SimpleNamespace(heads=heads, decoder=SimpleNamespace(model=SimpleNamespace(spec=spec)))
    assert DecodeGraphs.is_long(graphs, rows, LONG_SEQUENCE_TOKENS + 1, 0) == expected
    assert not DecodeGraphs.is_long(
        graphs, rows, LONG_SEQUENCE_TOKENS, 0
    ) and not DecodeGraphs.is_long(graphs, rows, LONG_SEQUENCE_TOKENS + 1, 2)


def test_the_longest_sequence_says_whether_a_step_has_long_ones(monkeypatch):
    from hone.engine.graphs import LONG_SEQUENCE_TOKENS, REVIEW_STEPS, DecodeGraphs
    from hone.kernels import gpu

    monkeypatch.setattr(gpu, "processors", lambda: 132)
    monkeypatch.setattr(gpu, "shared_memory", lambda: 227 * 2**10)
    spec = SimpleNamespace(
        num_attention_heads=16,
        num_key_value_heads=8,
        hidden_size=1024,
        head_dim=128,
        shares_pages=True,
    )
    decoder = SimpleNamespace(
        slots=SimpleNamespace(device=DEVICE),
        model=SimpleNamespace(spec=spec),
        cache=SimpleNamespace(pool=SimpleNamespace(size=64)),
    )
    graphs = DecodeGraphs(decoder, None, 128)
    for longest, expected in (
        (100, False),
        (LONG_SEQUENCE_TOKENS - REVIEW_STEPS // 2, False),
        (LONG_SEQUENCE_TOKENS, True),
    ):
        sequences = [
            SimpleNamespace(
                prompt_ids=[0] * length, first_step=7, pages=range(100 * i, 100 * i + 100)
            )
            for i, length in enumerate([100] * 126 + [longest])
        ]
        graphs.set_batch(sequences, 0, False, 7)
        assert graphs.key.is_long == expected and graphs.key.rows == 128


def test_a_kernels_share_of_memory_is_set_once_and_never_waited_for(monkeypatch):
    from hone.kernels.gpu import launching

    class Future:
        def __getattr__(self, name):
            raise AssertionError("waited until it is compiled")

    asked = []
    driver = SimpleNamespace(
        cuFuncSetAttribute=lambda function, which, percent: asked.append((function.value, percent))
    )
    monkeypatch.setattr(launching.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(launching, "_told", set())
    one, other = SimpleNamespace(function=2**40), SimpleNamespace(function=7)
    for kernel, percent in (
        (one, None),
        (None, 44),
        (Future(), 44),
        (one, 44),
        (one, 44),
        (other, 58),
    ):
        launching.set_memory_share(kernel, percent)
    assert asked == [(2**40, 44), (7, 58)]

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(launching.ctypes, "CDLL", missing)
    launching.set_memory_share(SimpleNamespace(function=8), 44)


@pytest.mark.parametrize("rows", [1, 20, 300])
def test_a_product_in_order(rows, monkeypatch):
    from hone.kernels.gpu import products

    monkeypatch.setattr(products, "processors", lambda: 4)
    x, weight = torch.randn(rows, 192, device=DEVICE), torch.randn(72, 192, device=DEVICE)
    close(products.in_order(x, weight, torch.float32), F.linear(x, weight), 1e-3)


def rope(positions, E):
    angles = torch.rand(positions, E // 2, device=DEVICE) * 6
    return torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)


@pytest.mark.parametrize("H, K, with_norm", [(4, 2, True), (6, 2, False), (3, 3, True)])
@pytest.mark.parametrize("how", ["shared", "exact"])
def test_decoding_by_pages(H, K, with_norm, how, monkeypatch):
    from hone.kernels.gpu.decode import MEMBERS, Shared, decode

    is_exact = how == "exact"
    monkeypatch.setattr(numerics, "_kept", numerics.PARTS if is_exact else frozenset())
    # Rows 0, 1 and 4 share their first two pages
    E, PAGE, lengths = (16, 64 if is_exact else 16, [47, 40, 3, 50, 35])
    B, pages = len(lengths), 1 + torch.randperm(40)
    active = torch.tensor([3, 0, 1, 6, 2], device=DEVICE)
    state = torch.zeros(8, column.FIELDS, dtype=torch.int64, device=DEVICE)
    table = torch.zeros(8, 6, dtype=torch.int64, device=DEVICE)
    for b, (slot, length) in enumerate(zip(active.tolist(), lengths, strict=True)):
        state[slot, column.LENGTH] = length
        table[slot, :5] = pages[2 + 5 * b : 7 + 5 * b]
        if b in (0, 1, 4) and not is_exact:
            table[slot, :2] = pages[:2]
            state[slot, column.OWN_PAGE] = 2
    before = torch.randn(2, 41, PAGE, K, E, device=DEVICE)
    qkv, (cos, sin) = torch.randn(B, H + 2 * K, E, device=DEVICE), rope(60, E)
    scales = [torch.rand(E, device=DEVICE) if with_norm else None for _ in "qk"]
    at = torch.tensor(lengths, device=DEVICE)
    turned = norm_rope(qkv, *scales, cos[at][:, None], sin[at][:, None], 1e-6, H)

    expected_cache, cache = before.clone(), before.clone()
    expected = attend_by_pages_reference(*turned, *expected_cache, DecodeRows(active, state, table))
    shared = None
    if not is_exact:
        shared = Shared.empty(4, B, 2, H, E, torch.device(DEVICE))
        for i in range(2):  # each page a stretch of its own, the other two are empty
            shared.stretches_I2[i] = torch.tensor([i, i + 1])
            for place, row in enumerate((0, 1, 4)):
                shared.members_IR[i, place] = row
                shared.parts_BS[row, i] = i * MEMBERS + place
    got = decode(
        qkv, *scales, cos, sin, 1e-6, H, *cache, active, state, table, shared, None, False, 64
    )
    close(got, expected)
    close(cache, expected_cache)


@pytest.mark.parametrize("source", ["logits", "filtered logits", "hidden states"])
@pytest.mark.parametrize("advance", [False, True])
def test_draw(source, advance):
    from hone.kernels.gpu.sampling import draw, draw_from_hidden

    B, V, D = 6, 9000, 64  # more than two stretches
    hidden, weight = torch.randn(B, D, device=DEVICE), torch.randn(V, D, device=DEVICE) * 3 / D**0.5
    logits, is_filtered = hidden @ weight.t(), source == "filtered logits"
    one, two = (Slots(8, 16, 4, 2, torch.device(DEVICE)) for _ in range(2))
    active = torch.tensor([5, 1, 2, 7, 0, 3], device=DEVICE)
    one.state[:8, column.MAX] = 10
    one.state[:8, column.COUNT] = torch.tensor([0, 1, 2, 3, 9, 5, 6, 7])
    one.state[:8, column.SEED] = torch.tensor([7, 123456789012345678, -5, 2**62, 1, 2, 3, 99])
    one.state[3, column.DONE] = column.STOPPED
    one.parameters[1, column.TEMPERATURE], one.parameters[2, column.TEMPERATURE] = 0.0, 0.5
    one.parameters[2, column.LOGPROB_TEMPERATURE] = 0.5
    for mine, other in zip(vars(one).values(), vars(two).values(), strict=True):
        if isinstance(mine, torch.Tensor):
            other.copy_(mine)
    threshold = torch.full((B,), 5.0, device=DEVICE) if is_filtered else None
    kept = logits if threshold is None else logits.masked_fill(logits < 5.0, -1e30)
    draw_reference(kept, logits, two, active, advance)
    one.stops[5, 1] = two.stops[5, 1] = two.state[5, column.LAST]  # so that one of them stops
    two.state.copy_(one.state)
    draw_reference(kept, logits, two, active, advance)
    inputs = (one.parameters, one.state, active, one.stops, one.tokens, one.logprobs)
    if source == "hidden states":
        draw_from_hidden(hidden, weight, *inputs, advance)
    else:
        draw(logits, logits, threshold, *inputs, advance)
    assert torch.equal(one.state, two.state) and torch.equal(one.tokens, two.tokens)
    close(one.logprobs, two.logprobs)
    assert one.state[5, column.DONE] == column.STOPPED


def test_norm_rope_and_twin_agree_without_scales():
    qkv, (cos, sin) = torch.randn(3, 8, 16), (x.cpu()[:3, None] for x in rope(5, 16))
    ones = torch.ones(16)
    rms = qkv.square().mean(-1, keepdim=True).sqrt()
    q, _, v = norm_rope(qkv, None, None, cos, sin, 0.0, 4)
    expected, _, _ = norm_rope_reference(qkv, ones, ones, cos, sin, 0.0, 4)
    close(q, expected * rms[:, :4])
    assert torch.equal(v, qkv[:, 6:])


def test_thresholds_are_those_of_a_sorted_list():
    logits = torch.log(torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]])).repeat(5, 1)[
        :, torch.tensor([3, 0, 4, 2, 1])
    ]
    parameters = torch.ones(5, column.PARAMETERS)
    parameters[:, column.TOP_K] = torch.tensor([0.0, 2.0, 0.0, 0.0, 3.0])
    # The last: 0.8 of what top-3 leaves
    parameters[:, column.TOP_P] = torch.tensor([1.0, 1.0, 0.6, 1.0, 0.8])
    parameters[:, column.MIN_P] = torch.tensor([0.0, 0.0, 0.0, 0.25, 0.0])
    expected = [0.05, 0.2, 0.2, 0.5 * 0.25, 0.2]
    close(filter_thresholds(logits, parameters), torch.tensor([math.log(p) for p in expected]))


def gradients_like_twin(function, twin, tensors, tolerance=1e-4):
    """Results and the gradients of all tensors."""
    results = []
    for call in (function, twin):
        inputs = [None if x is None else x.clone().requires_grad_() for x in tensors]
        out = call(*inputs)
        outs = out if isinstance(out, tuple) else (out,)
        torch.manual_seed(1)
        sum((x * torch.randn_like(x)).sum() for x in outs).backward()
        results.append([*outs, *(x.grad for x in inputs if x is not None)])
    for one, two in zip(*results, strict=True):
        close(one, two, tolerance)


@pytest.mark.parametrize("has_delta", [True, False])
@pytest.mark.parametrize("has_bias_and_adapter", [True, False])
def test_norm_linear_and_its_gradients(has_delta, has_bias_and_adapter):
    from hone.kernels.gpu_training import norm_linear

    x, delta = torch.randn(7, 40), torch.randn(7, 40) if has_delta else None
    more = (
        [torch.randn(24), torch.randn(4, 40), torch.randn(24, 4)]
        if has_bias_and_adapter
        else [None] * 3
    )
    gradients_like_twin(
        lambda x, d, s, w, *more: norm_linear(x, d, s, 1e-6, w, *more),
        lambda x, d, s, w, *more: twins.norm_linear(x, d, s, 1e-6, w, *more),
        [x, delta, torch.rand(40) + 0.5, torch.randn(24, 40), *more],
    )


@pytest.mark.parametrize("is_whole", [False, True])
def test_swiglu_linear_and_its_gradients(is_whole):
    from hone.kernels.gpu_training import swiglu_linear

    def ours(x, weight, bias, a, b):
        return swiglu_linear(x, weight, bias, a, b, (weight + b @ a).detach() if is_whole else None)

    tensors = [
        torch.randn(5, 2 * 48),
        torch.randn(16, 48),
        None,
        torch.randn(4, 48),
        torch.randn(16, 4),
    ]
    gradients_like_twin(ours, twins.swiglu_linear, tensors)


@pytest.mark.parametrize("has_bias", [True, False])
def test_projections_by_a_weight_that_has_its_adapter_merged(has_bias):
    from hone.kernels.gpu_training import norm_linear, whole_linear

    def whole(weight, a, b):
        return (weight + b @ a).detach()

    bias = torch.randn(24) if has_bias else None
    tensors = [
        torch.randn(7, 40),
        torch.randn(24, 40),
        bias,
        torch.randn(4, 40),
        torch.randn(24, 4),
    ]
    gradients_like_twin(
        lambda x, w, bias, a, b: whole_linear(whole(w, a, b), x, w, bias, a, b),
        lambda x, w, bias, a, b: F.linear(x, w, bias) + x @ a.t() @ b.t(),
        tensors,
    )
    x, *rest = tensors
    gradients_like_twin(
        lambda x, s, w, bias, a, b: norm_linear(x, None, s, 1e-6, w, bias, a, b, whole(w, a, b)),
        lambda x, s, w, bias, a, b: twins.norm_linear(x, None, s, 1e-6, w, bias, a, b),
        [x, torch.rand(40) + 0.5, *rest],
    )


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("has_delta", [True, False])
def test_a_norm_of_its_own_and_its_gradients(has_delta, offset):
    from hone.kernels.norm import _OnGpu

    gradients_like_twin(
        lambda x, d, s: _OnGpu.apply(x, d, s, 1e-6, offset),
        lambda x, d, s: add_norm_reference(x, d, s + offset, 1e-6),
        [torch.randn(7, 40), torch.randn(7, 40) if has_delta else None, torch.rand(40) + 0.5],
    )


def sequences_of(lengths, prompts):
    """Alone, or with `prompts`: groups of a prompt and completions."""
    if not prompts:
        starts = np.cumsum([0, *lengths])
        rows = np.stack([starts[:-1], lengths, *np.zeros((2, len(lengths)), dtype=int)], axis=1)
        return Sequences(rows, np.arange(len(rows) + 1)), np.concatenate(
            [np.arange(n) for n in lengths]
        )
    shared = PackedAttention(prompts[0], "cpu", prompts[1])
    return shared.sequences, shared.token_positions().numpy()


@pytest.mark.parametrize(("H", "K", "has_norm"), [(3, 1, True), (4, 2, False)])
@pytest.mark.parametrize("prompts", [None, ([7, 70, 2], [[3, 66], [1, 5], []])])
@pytest.mark.parametrize("least", [512, 64])
def test_heads_attention_and_its_gradients(monkeypatch, H, K, has_norm, prompts, least):
    """Sequences of less than a tile, of one and a bit, of whole ones; prompts that completions share; keys that several
    programs go over."""
    from hone.kernels.gpu.attention import TILE, tiles
    from hone.kernels.gpu_training import heads_attention

    monkeypatch.setattr("hone.kernels.gpu.attention.LEAST", least)
    sequences, positions = sequences_of([3, TILE + 5, 1, 2 * TILE], prompts)
    positions, E = torch.from_numpy(positions), 16
    angles = torch.outer(torch.arange(200.0), 1 / 100 ** (torch.arange(0, E, 2) / E))
    cos, sin = angles.cos(), angles.sin()
    table = (torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))
    scales = [torch.rand(E) + 0.5 if has_norm else None for _ in range(2)]
    of_keys = tiles(sequences.rows, sequences.groups, torch.device("cpu"))
    assert (of_keys.parts > 0) == (least < 512)
    rest = (table, positions, sequences, of_keys, 1e-6, H)
    gradients_like_twin(
        lambda x, q, k: heads_attention(x, q, k, *rest),
        lambda x, q, k: twins.heads_attention(x, q, k, *rest),
        [torch.randn(len(positions), H + 2 * K, E), *scales],
    )


def test_statistics_and_slopes_of_logits():
    from hone.kernels.gpu import training_kernels

    logits, targets, T = 3 * torch.randn(5, 5003), torch.randint(0, 5003, (5,)), torch.rand(5) + 0.5
    x = logits.clone().requires_grad_()
    logprobs = torch.log_softmax(x / T[:, None], -1)
    expected = (
        logprobs.gather(1, targets[:, None]).squeeze(1),
        -(logprobs.exp() * logprobs).sum(-1),
    )
    logsum, of_targets, entropy = training_kernels.statistics(logits, targets, T)
    close(of_targets, expected[0])
    close(entropy, expected[1])
    a, b = torch.randn(5), torch.randn(5)
    (expected[0] * a + expected[1] * b).sum().backward()
    close(training_kernels.slope(logits, targets, T, logsum, entropy, a, b, torch.float32), x.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_weight", [True, False])
def test_adamw(dtype, has_weight):
    """Several tensors in one launch; a gradient that does not begin at 16 bytes."""
    from hone.kernels.adamw import Change, adamw_reference
    from hone.kernels.gpu.optimizer import OptimizerTable

    sizes, decays, change, results = (
        [5000, 7, 4096],
        [0.1, 0.0, 0.2],
        Change(0.7, 0.01, (0.9, 0.95), 3),
        [],
    )
    start = [[torch.randn(n, device=DEVICE) for n in sizes] for _ in range(3)]
    grads = list(torch.randn(sum(sizes), device=DEVICE).bfloat16().split(sizes))
    for is_kernel in (True, False):
        masters, first = [x.clone() for x in start[0]], [x.to(dtype, copy=True) for x in start[1]]
        second = [x.abs().to(dtype) for x in start[2]]
        weights = [x.bfloat16() for x in masters] if has_weight else masters
        if is_kernel:
            numbers = (change.scale, change.lr, change.betas, change.corrections, change.eps)
            OptimizerTable([weights, masters, first, second], decays).step(grads, *numbers, seed=9)
        else:
            for i, rows in enumerate(
                zip(weights, masters, first, second, grads, decays, strict=True)
            ):
                adamw_reference(*rows, change, seed=i)
        results.append(
            [torch.cat([x.float() for x in xs]) for xs in (masters, weights, first, second)]
        )
    (master, weight, *moments), (exact, rounded, *others) = results
    close(master, exact, 1e-5)
    close(weight, rounded, 1e-2)
    for one, two in zip(moments, others, strict=True):
        # Neighbours in bfloat16, by draws of its own
        close(one, two, 1e-5 if dtype == torch.float32 else 2**-7)
        assert abs(float((one - two).mean())) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_master", [True, False])
@pytest.mark.parametrize("shapes", [[(3000,), (70, 130), (5,)], [(3008,), (70, 128), (16,)]])
def test_adamw_by_portions_gives_the_same_bits(monkeypatch, dtype, has_master, shapes):
    """Of a state that stands elsewhere: its moments, and masters where weights are in half precision."""
    from hone.kernels.gpu import optimizer

    results, elsewhere, are_even = [], (1, 2, 3) if has_master else (2, 3), shapes[0] == (3008,)
    monkeypatch.setattr(optimizer, "PORTION", optimizer.BLOCK)
    for away, loads_one_by_one in (((), False), (elsewhere, False), ((), True)):
        torch.manual_seed(0)
        masters = [torch.randn(shape, device=DEVICE) for shape in shapes]
        weights = [m.bfloat16() for m in masters] if has_master else masters
        moments = [
            [torch.rand(shape, device=DEVICE).to(dtype) for shape in shapes] for _ in range(2)
        ]
        columns = [weights, masters, *moments]
        addresses = [columns[c][0].data_ptr() for c in away]
        monkeypatch.setattr(
            optimizer, "is_away", lambda x, _, addresses=addresses: x.data_ptr() in addresses
        )
        table = optimizer.OptimizerTable(columns, [0.1, 0.2, 0.0])
        assert sorted(table.away) == list(away) and len(table.portions) == (5 if away else 3)
        assert table.is_even == are_even
        table.is_even &= not loads_one_by_one
        for step in (1, 2):
            grads = [torch.randn(shape, device=DEVICE) for shape in shapes]
            table.step(grads, 0.5, 1e-2, (0.9, 0.999), (0.1, 0.03), 1e-8, step * 3)
        results.append([x.clone() for column in columns for x in column])
    assert all(
        torch.equal(one, other) for one, *others in zip(*results, strict=True) for other in others
    )


@pytest.mark.parametrize("count", [40, 48])
def test_adamw_is_rehearsed_on_numbers_of_its_own(monkeypatch, count):
    from hone.kernels import adamw

    monkeypatch.setattr(adamw, "takes", lambda tensor: True)
    tensors = [
        [torch.ones(count, device=DEVICE, dtype=dtype)]
        for dtype in (torch.bfloat16, *[torch.float32] * 3)
    ]
    own = adamw.AdamW(tensors, [0.1])
    own.rehearse()
    assert own.table is not None and all(bool((column[0] == 1).all()) for column in tensors)
    own.step([torch.ones(count, device=DEVICE)], adamw.Change(1.0, 0.1, (0.9, 0.999), 1))
    assert not any(bool((column[0] == 1).any()) for column in tensors[:2])


def test_fingerprints():
    from hone.kernels.fingerprint_tables import WORDS
    from hone.kernels.fingerprints import sums_reference
    from hone.kernels.gpu.fingerprints import GpuTable

    few = [
        torch.randn(3, 5),
        torch.randn(WORDS + 7).bfloat16(),
        torch.randn(2 * WORDS),
        torch.randn(1).half(),
    ]
    words = [
        one.to(DEVICE).view(torch.int32 if one.dtype == torch.float32 else torch.int16).flatten()
        for one in few
    ]
    table, expected = GpuTable(words), sums_reference(words)
    assert torch.equal(table.sums(), expected) and len(set(expected.tolist())) == 4
    words[1][WORDS + 2] ^= 1
    assert (table.sums() == expected).tolist() == [True, False, True, True]
    assert torch.equal(table.sums(), sums_reference(words))
    table.add((2,))  # what has come while others have not
    words[0][3] ^= 1
    table.add((3, 0))
    assert torch.equal(table.sums(), sums_reference(words))
    table.add((0, 1))
    table.forget()  # they come once more
    words[1][5] ^= 1
    table.add((1,))
    assert torch.equal(table.sums(), sums_reference(words))


GATING = ClampedGating(alpha=1.702, limit=0.8)


def draw_experts(E, D, width, is_gpt_oss):
    """The shapes of an `ExpertWeights`' tensors, drawn: with biases and input-major, or without."""
    shapes = [(E, 2 * width, D), (E, D, width)]
    if is_gpt_oss:
        shapes = [(E, D, 2 * width), (E, width, D), (E, 2 * width), (E, D)]
    return [torch.randn(*shape, device=DEVICE) / shape[-1] ** 0.5 for shape in shapes]


def make_experts(tensors, is_gpt_oss, **deltas):
    form = {"is_input_major": True, "gating": GATING} if is_gpt_oss else {}
    return ExpertWeights(*tensors, **form, **deltas)


@pytest.mark.parametrize("sizes", [(1, 6, 2, 32, 16), (33, 8, 8, 64, 40), (40, 7, 3, 130, 16)])
@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize("is_gpt_oss", [True, False])
def test_experts_of_few_tokens(sizes, normalizes, is_gpt_oss):
    T, E, K, D, width = sizes
    x, router = torch.randn(T, D, device=DEVICE), torch.randn(E, D, device=DEVICE)
    bias = torch.randn(E, device=DEVICE) if is_gpt_oss else None
    own = make_experts(draw_experts(E, D, width, is_gpt_oss), is_gpt_oss)
    with torch.no_grad():
        parts, experts = decode_experts(x, router, bias, own, K, normalizes)
    weights, wanted = F.linear(x, router, bias).softmax(-1).topk(K)
    assert torch.equal(experts, wanted.int())
    if normalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    close(parts.sum(0), multiply_experts(x, own, weights, wanted), 1e-4)


@pytest.mark.parametrize("sizes", [(5, 7, 3, 48, 24), (70, 4, 2, 64, 40)])
@pytest.mark.parametrize("has_deltas", [False, True])
@pytest.mark.parametrize("is_gpt_oss", [True, False])
def test_gradients_of_experts(monkeypatch, sizes, has_deltas, is_gpt_oss):
    T, E, K, D, width = sizes
    added = [(E, 2 * width, D), (E, D, width)]
    tensors = [torch.randn(T, D, device=DEVICE), torch.rand(T, K, device=DEVICE)]
    tensors += [torch.randn(*shape, device=DEVICE) / shape[-1] ** 0.5 for shape in added]
    tensors += draw_experts(E, D, width, is_gpt_oss)
    experts = torch.stack([torch.randperm(E, device=DEVICE)[:K] for _ in range(T)])
    direction = torch.randn(T, D, device=DEVICE)
    results = []
    for has_kernels in (True, False):
        monkeypatch.setattr("hone.kernels.gpu.has_kernels", lambda x, found=has_kernels: found)
        leaves = [x.clone().requires_grad_() for x in tensors]
        names = ("gate_up_delta", "down_delta") if has_deltas else ()
        deltas = {
            name: lambda x, counts, w=w: multiply_groups(x, w, counts)
            for name, w in zip(names, leaves[2:4], strict=False)
        }
        own = make_experts(leaves[4:], is_gpt_oss, **deltas)
        out = multiply_experts(leaves[0], own, leaves[1], experts)
        (out * direction).sum().backward()
        results.append([out, *(x.grad for x in leaves if x.grad is not None)])
    assert len(results[0]) == 1 + len(tensors) - (0 if has_deltas else 2)
    for one, two in zip(*results, strict=True):
        close(one, two, 1e-4)


@pytest.mark.parametrize("completions", [(), [[30, 1], [9]]])
def test_padded_tables_of_attention(completions):
    """Rows of padding in the tables of a captured pass change nothing."""
    from hone.kernels.gpu import attention
    from hone.trainer.training_graphs import PassInputs, _PaddedPlan

    packed = SimpleNamespace(attention=PackedAttention([40, 7], DEVICE, completions))
    count = int(packed.attention.count)
    packed.tokens_T = torch.arange(count, device=DEVICE)
    plan = _PaddedPlan(packed)
    inputs = PassInputs(plan.shape, torch.device(DEVICE))
    plan.fill_inputs(inputs)
    assert plan.shape.tokens >= count and plan.shape.queries > len(plan.plan.of_queries)
    assert torch.equal(inputs.positions_T[:count], packed.attention.token_positions())
    whole = [torch.randn(plan.shape.tokens, heads, 16, device=DEVICE) for heads in (4, 2, 2, 4)]
    results = []
    for q, k, v, grad, tiles in (
        (*whole, inputs.attention.tile_plan),
        (*(x[:count].contiguous() for x in whole), packed.attention.tile_plan),
    ):
        out, logsum = attention.forward(q, k, v, tiles)
        found = [out, *attention.backward(q, k, v, out, logsum, grad, tiles)]
        assert all(x.isfinite().all() for x in found)
        results.append([x[:count] for x in found])
    for padded, wanted in zip(*results, strict=True):
        assert torch.equal(padded, wanted)


def test_gradients_of_captured_passes_add_up():
    """Also those of passes whose gradients nobody took before the next one."""
    from hone.trainer.training_graphs import TrainingGraphs

    layer = torch.nn.Linear(3, 2)
    model = SimpleNamespace(parameters=layer.parameters, embed=SimpleNamespace(weight=layer.weight))
    graphs = TrainingGraphs(model)
    graphs._grads = [torch.empty_like(p) for p in graphs.parameters]
    passes = iter((1.0, 2.0, 5.0))

    def replay():
        value = next(passes)
        for grad in graphs._grads:
            grad.fill_(value)

    captured = SimpleNamespace(backward=SimpleNamespace(replay=replay))
    layer.bias.grad = torch.full((2,), 10.0)  # as the head's, of a weight that is tied
    for weight, bias in ((1.0, 11.0), (3.0, 13.0)):
        graphs.replay_backward(captured)
        assert layer.weight.grad.eq(weight).all() and layer.bias.grad.eq(bias).all()
    layer.weight.grad = None
    graphs.replay_backward(captured)
    assert layer.weight.grad.eq(5.0).all() and layer.bias.grad.eq(18.0).all()


def draw_delta_layer(shape, tokens):
    weights = (
        torch.randn(shape.channels, 1, shape.conv_width, device=DEVICE) * 0.5,
        torch.empty(shape.value_heads, device=DEVICE).uniform_(-1, 1.5),
        torch.randn(shape.value_heads, device=DEVICE),
        torch.randn(shape.value_size, device=DEVICE),
    )
    projected = torch.randn(tokens, sum(shape.projection_rows), device=DEVICE)
    return projected.requires_grad_(), [x.requires_grad_() for x in weights]


@pytest.mark.parametrize("kind", ["sequences", "states", "prompts"])
def test_delta_rule_with_gradients(kind):
    """Sequences of 1 to 70 tokens, from zeros or states; completions behind prompts, and padding."""
    from hone.kernels.gpu import delta_kernels

    shape = DeltaShape(1, 2, 16, 32, 4)
    lengths = np.array([1, 64, 2, 70])
    plan = DeltaPlan.for_lengths(lengths, torch.device(DEVICE))
    if kind == "prompts":  # prompts at 0 and 80; two and one completions; three tokens of nothing
        rows = [(0, 2, 0, 0), (2, 66, 0, 2), (68, 1, 0, 2), (71, 40, 0, 0), (111, 26, 71, 40)]
        plan = DeltaPlan(Sequences(np.array(rows), np.array([0, 3, 5])), torch.device(DEVICE))
    projected, weights = draw_delta_layer(shape, lengths.sum() + (kind == "prompts"))
    before, leaves = None, [projected, *weights]
    if kind == "states":
        columns = torch.randn(4, 3, shape.channels, device=DEVICE)
        before = DeltaState(columns, torch.randn(4, *shape.matrix_sizes, device=DEVICE))
        leaves += [x.requires_grad_() for x in before.tensors]
    heads = DeltaHeads(shape, *weights, 1e-6)
    results = []
    for run in (delta_kernels.run_plan, delta_rule.run_plan_reference):
        y, *states = run(projected, heads, plan, before)
        results.append([y, *(x for state in states if state is not None for x in state.tensors)])
    for one, two in zip(*results, strict=True):
        close(one, two, 1e-4)
    factors = [torch.randn_like(x) for x in results[1]]
    gradients = (
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(y, factors, strict=True)), leaves)
        for y in results
    )
    for one, two in zip(*gradients, strict=True):
        # Gradients of decays are small differences of large sums.
        assert (one - two).norm() <= 1e-3 * two.norm() + 2e-3


@pytest.mark.parametrize("has_snapshots", [False, True])
def test_captured_passes_of_the_delta_rule(has_snapshots):
    """Tables of a fixed size give the outputs and states of plans, pass after pass."""
    shape = DeltaShape(1, 2, 16, 32, 4)
    spare = 5
    stores = [
        SimpleNamespace(
            device=torch.device(DEVICE),
            pool=SimpleNamespace(size=64),
            layers=[
                DeltaState(
                    torch.zeros(12, 3, shape.channels, device=DEVICE),
                    torch.zeros(12, *shape.matrix_sizes, device=DEVICE),
                )
            ],
        )
        for _ in range(2)
    ]
    captured = CapturedDelta(stores[0], 192, 5, has_snapshots, spare)
    passes = [{2: 70, 0: 64, 4: 3}, {3: 2, 1: 65}, {0: 192}]  # prompt tokens by slot
    for lengths in passes:
        chunks = [DeltaChunk(slot, True) for slot in lengths]
        if has_snapshots:
            # That of slot 0 may be where its chunk ends, as in a prompt of several chunks.
            ends = [(n - (slot > 0)) // 64 * 64 for slot, n in lengths.items()]
            chunks = [
                DeltaChunk(slot, True, 6 + slot if end else None, end)
                for slot, end in zip(lengths, ends, strict=True)
            ]
        own = [*lengths.values()]
        captured.fill_tables(chunks, own)
        projected, weights = draw_delta_layer(shape, 192)
        heads = DeltaHeads(shape, *weights, 1e-6)
        with torch.no_grad():
            found = captured.mix_delta(0, projected, heads)
            plain = PrefillDelta(stores[1], chunks, own)
            expected = plain.mix_delta(0, projected[: sum(own)], heads)
        close(found[: sum(own)], expected, 1e-4)
        rows = [row for row in range(12) if row != spare]
        for one, two in zip(*(store.layers[0].tensors for store in stores), strict=True):
            close(one[rows], two[rows], 1e-4)


def test_decode_step_of_the_delta_rule():
    """States change in place, but not those of rows that are done or not active."""
    from hone.kernels.gpu import delta_kernels

    shape = DeltaShape(2, 4, 16, 32, 4)
    active = torch.tensor([4, 0, 6, 2], device=DEVICE)
    projected, weights = draw_delta_layer(shape, len(active))
    state = torch.zeros(7, column.FIELDS, dtype=torch.int64, device=DEVICE)
    state[6, column.DONE] = column.FULL
    store = DeltaState(
        torch.randn(7, 3, shape.channels, device=DEVICE),
        torch.randn(7, *shape.matrix_sizes, device=DEVICE),
    )
    other = DeltaState(*(x.clone() for x in store.tensors))
    heads = DeltaHeads(shape, *weights, 1e-6)
    with torch.no_grad():
        found = delta_kernels.decode_delta(projected, heads, store, active, state)
        expected = delta_rule.decode_delta_reference(projected, heads, other, active, state)
    close(found, expected, 1e-4)
    for one, two in zip(store.tensors, other.tensors, strict=True):
        close(one, two, 1e-4)
