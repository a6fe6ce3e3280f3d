"""Attention of one new token a sequence over pages of its own, against plain torch. On a GPU alone: Triton's
interpreter does not take Gluon."""

import pytest
import torch

from hone.kernels import gpu
from hone.kernels import row_state as column
from hone.kernels.attention_form import AttentionForm
from hone.kernels.decode import (
    DecodeRows,
    attend_by_pages_reference,
    read_pages,
)
from hone.kernels.norm import offset_norm
from hone.kernels.norm_rope import norm_rope, rotate
from hone.models.attention_layouts import AttentionOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PAGE, LONGEST = 64, 400


def made(H, K, E, rows, with_norm=True, dtype=torch.float16):
    """Inputs of `decode`: those in front of the cache, keys and values, where tokens are. Lengths around the ends of
    pages, and any; pages all over the cache."""
    torch.manual_seed(rows + E)
    lengths = torch.randint(0, LONGEST, (rows,))
    lengths[:7] = torch.tensor([0, 1, PAGE, PAGE - 1, LONGEST, PAGE + 1, 16])
    pages = LONGEST // PAGE + 2
    table = (1 + torch.randperm(rows * pages)).view(rows, pages).cuda()
    state = torch.zeros(rows, column.FIELDS, dtype=torch.int64, device="cuda")
    state[:, column.LENGTH] = lengths.cuda()
    angles = torch.rand(LONGEST + 1, E // 2, device="cuda") * 6
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    qkv = torch.randn(rows, H + 2 * K, E, device="cuda").to(dtype)
    scales = [torch.rand(E, device="cuda").to(dtype) if with_norm else None for _ in "qk"]
    cache = torch.randn(2, rows * pages + 1, PAGE, K, E, device="cuda").to(dtype)
    return (
        (qkv, *scales, cos, sin, 1e-6, H),
        cache,
        (torch.randperm(rows, device="cuda"), state, table),
    )


def expected_of(heads, cache, where):
    """Mixed values, and keys and values as they then are, in fp32."""
    qkv, q_scale, k_scale, cos, sin, eps, H = heads
    at, scales = (
        where[1][where[0], column.LENGTH],
        [s if s is None else s.float() for s in (q_scale, k_scale)],
    )
    turned = norm_rope(qkv.float(), *scales, cos[at][:, None], sin[at][:, None], eps, H)
    cache = cache.float()
    return attend_by_pages_reference(*turned, *cache, DecodeRows(*where)), cache


# Rounding to float16 takes 4e-4 at most here, a token too few 4e-3 at least
def close(one, two, atol=1.5e-3):
    torch.testing.assert_close(one.float(), two, rtol=2e-2, atol=atol)


# One k/v head for many queries, as many as queries, numbers of queries that are no power of 2; all sizes of heads.
@pytest.mark.parametrize(
    "H, K, E, with_norm",
    [
        (16, 8, 128, True),
        (32, 8, 64, True),
        (28, 4, 128, False),
        (4, 2, 16, True),
        (8, 8, 256, True),
        (3, 3, 32, True),
        (32, 2, 64, True),
        (40, 1, 64, True),
        (8, 1, 512, False),
        (8, 2, 512, True),
    ],
)
# From few blocks to many, of few sequences and of more, of narrow models and wide ones.
@pytest.mark.parametrize(
    "parts, processors, rows, width",
    [
        (1, 1000, 8, 1024),
        (1, 1000, 12, 4096),
        (1, 20, 12, 4096),
        (1, 1, 12, 1024),
        (2, 20, 8, 4096),
        (32, 1000, 8, 1024),
    ],
)
def test_blocks_of_every_shape(H, K, E, with_norm, parts, processors, rows, width, monkeypatch):
    from hone.kernels.gpu.decode import decode
    from hone.kernels.gpu.decode_attention import Divided

    monkeypatch.setattr(gpu, "processors", lambda: processors * parts)
    heads, cache, where = made(H, K, E, rows, with_norm)
    expected, expected_cache = expected_of(heads, cache, where)
    arrived = torch.zeros(rows * K, dtype=torch.int32, device="cuda")
    divided = None if parts == 1 else Divided(parts, arrived)
    for is_long in (False, True):
        close(decode(*heads, *cache, *where, None, divided, is_long, width), expected)
        torch.testing.assert_close(cache.float(), expected_cache, rtol=2e-2, atol=2e-2)
        assert not arrived.any()


FORMS = {
    "window": (AttentionForm(window=100), 128),
    "short window": (AttentionForm(window=5), 128),
    "long window": (AttentionForm(window=1000), 128),
    "cap": (AttentionForm(cap=2.0, scale=0.3), 128),
    "offset": (AttentionForm(norm_offset=1.0, window=64), 128),
    "part of a head": (AttentionForm(), 96),
    "growth": (AttentionForm(growth=0.5, growth_length=50), 128),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("parts, processors, rows", [(1, 1000, 8), (1, 1, 12), (8, 1000, 8)])
def test_forms_of_attention(name, parts, processors, rows, monkeypatch):
    from hone.kernels.gpu.decode import decode
    from hone.kernels.gpu.decode_attention import Divided

    monkeypatch.setattr(gpu, "processors", lambda: processors * parts)
    form, rotated = FORMS[name]
    heads, cache, where = made(16, 8, 128, rows, name != "part of a head")
    (qkv, q_scale, k_scale, cos, sin, *rest) = heads
    if rotated < 128:  # each half of a row has the same angles
        cos, sin = cos[:, : rotated // 2], sin[:, 64 : 64 + rotated // 2]
        cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    heads = (qkv, q_scale, k_scale, cos, sin, *rest)
    expected, expected_cache = expected_of_form(heads, cache, where, form)
    arrived = torch.zeros(rows * 8, dtype=torch.int32, device="cuda")
    divided = None if parts == 1 else Divided(parts, arrived)
    for is_long in (False, True):
        found = decode(*heads, *cache, *where, None, divided, is_long, 1024, form)
        close(found, expected)
        torch.testing.assert_close(cache.float(), expected_cache, rtol=2e-2, atol=2e-2)


def expected_of_form(heads, cache, where, form):
    """As `expected_of`, for attention of that form."""
    qkv, q_scale, k_scale, cos, sin, eps, H = heads
    at = where[1][where[0], column.LENGTH]
    q, k, v = qkv.float().split([H, k_heads(qkv, H), k_heads(qkv, H)], 1)
    if q_scale is not None:
        q, k = (offset_norm(x, s, form.norm_offset, eps) for x, s in ((q, q_scale), (k, k_scale)))
    turn, width = (cos[at][:, None], sin[at][:, None]), cos.shape[1]
    q, k = (torch.cat([rotate(x[..., :width], *turn), x[..., width:]], -1) for x in (q, k))
    factors = 1 + form.growth * torch.log1p(torch.floor(at / form.growth_length))
    cache = cache.float()
    k_BLKE, v_BLKE, distance_BL = read_pages(k, v, *cache, DecodeRows(*where))
    options = AttentionOptions(form.scale, form.window, form.cap)
    out = options.attend(
        (q * factors[:, None, None]).unsqueeze(2),
        k_BLKE.transpose(1, 2),
        v_BLKE.transpose(1, 2),
        distance_BL[:, None, None],
    )
    return out.reshape(len(q), -1), cache


def k_heads(qkv, H):
    return (qkv.shape[1] - H) // 2


def test_half_precision_of_the_other_kind():
    from hone.kernels.gpu.decode import decode

    heads, cache, where = made(16, 8, 128, 12, dtype=torch.bfloat16)
    expected, _ = expected_of(heads, cache, where)
    close(decode(*heads, *cache, *where, None, None, False, 1024), expected, atol=1e-2)


@pytest.mark.parametrize("parts", [1, 8])
def test_what_pages_have_from_a_sequences_end_on_does_not_count(parts):
    from hone.kernels.gpu.decode import decode
    from hone.kernels.gpu.decode_attention import Divided

    heads, cache, where = made(16, 8, 128, 12)
    divided = (
        None
        if parts == 1
        else Divided(parts, torch.zeros(12 * 8, dtype=torch.int32, device="cuda"))
    )
    expected = decode(*heads, *cache.clone(), *where, None, divided, False, 1024)
    for length, pages in zip(where[1][:, column.LENGTH].tolist(), where[2].tolist(), strict=True):
        cache[:, pages[length // PAGE], length % PAGE :] = float("nan")
        cache[:, pages[length // PAGE + 1 :]] = float("nan")
    assert torch.equal(decode(*heads, *cache, *where, None, divided, False, 1024), expected)
