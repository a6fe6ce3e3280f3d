"""Fused operations against their plain twins: values and gradients, in double precision."""

import pytest
import torch

from hone.kernels.norm_rope import norm_rope, norm_rope_reference
from hone.kernels.rows import put_rows, put_rows_reference, take_rows, take_rows_reference
from hone.kernels.swiglu import swiglu, swiglu_reference


def assert_same(fused, reference, *inputs):
    outs, grads = [], []
    for function in (fused, reference):
        leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        out = function(*leaves)
        direction = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        (out * direction).sum().backward()
        outs.append(out)
        grads.append([x.grad for x in leaves if x.requires_grad])
    torch.testing.assert_close(outs[0], outs[1])
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two)


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_swiglu():
    assert_same(swiglu, swiglu_reference, random(7, 12))


@pytest.mark.parametrize("heads", [1, 5])
def test_norm_rope(heads):
    angle = torch.randn(6, 1, 4, dtype=torch.float64)
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([-angle.sin(), angle.sin()], -1)
    assert_same(
        lambda x, scale: norm_rope(x, scale, cos, sin, 1e-3),
        lambda x, scale: norm_rope_reference(x, scale, cos, sin, 1e-3),
        random(6, heads, 8),
        random(heads, 8),
    )


def test_rows():
    index = torch.tensor([4, 0, 3])
    assert_same(lambda x: take_rows(x, index), lambda x: take_rows_reference(x, index), random(5, 2, 3))
    assert_same(lambda x: put_rows(x, index, 6), lambda x: put_rows_reference(x, index, 6), random(3, 2))
