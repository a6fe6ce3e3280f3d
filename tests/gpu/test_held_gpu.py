"""Products of few rows whose weights threads hold, and what stands around them, against plain torch. On a GPU alone:
Triton's interpreter does not take Gluon."""

import pytest
import torch

from hone.kernels import gpu
from tests import twins

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not gpu.has_dependent_launch(), reason="needs a Hopper or newer"),
]


def close(one, two):
    torch.testing.assert_close(one, two, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "inner, width, with_bias",
    [
        (64, 192, True),
        (512, 1024, False),
        (896, 896, True),
        (2560, 2560, True),
        (6144, 2048, False),
    ],
)
@pytest.mark.parametrize("rows", [1, 8, 9, 20, 32])
def test_products_of_few_rows_and_what_stands_around_them(rows, inner, width, with_bias):
    from hone.kernels.gpu import few_row_products

    def made(*shape, size=1.0):
        return (torch.randn(shape, device="cuda") * size).bfloat16()

    torch.manual_seed(rows + inner)
    x, residual, norm = made(rows, inner), made(rows, width), made(width)
    others = 2 * 1048  # neither a multiple of a tile's columns
    weight, following = made(width, inner, size=inner**-0.5), made(others, width, size=width**-0.5)
    bias, other = (made(n) if with_bias else None for n in (width, others))
    total, scaled = few_row_products.few_onto(residual, x, weight, bias, norm, 1e-6)
    expected, expected_scaled = twins.few_onto(residual, x, weight, bias, norm, 1e-6)
    close(total, expected)
    close(scaled.scaled_TD, total * norm)
    torch.testing.assert_close(
        scaled.squares_TP.sum(dim=1), total.float().square().sum(dim=1), rtol=1e-4, atol=1e-4
    )
    assert expected_scaled.eps == scaled.eps == 1e-6
    for is_swiglu in (False, True):
        close(
            few_row_products.few(scaled, following, other, is_swiglu),
            twins.few(scaled, following, other, is_swiglu),
        )
    again, none = few_row_products.few_onto(residual, x, weight, bias, None, 0.0)
    assert none is None and torch.equal(again, total)


@pytest.mark.parametrize(
    "inner, width", [(3584, 3584), (512, 1000), (512, 48), (512, 33), (512, 16)]
)
@pytest.mark.parametrize("rows", [1, 8])
def test_columns_that_the_last_two_tiles_share_count_once(rows, inner, width):
    from hone.kernels.gpu import few_row_products

    torch.manual_seed(rows + width)
    x, residual, norm = (
        torch.randn(size, device="cuda").bfloat16()
        for size in ((rows, inner), (rows, width), width)
    )
    weight = (torch.randn(width, inner, device="cuda") * inner**-0.5).bfloat16()
    total, scaled = few_row_products.few_onto(residual, x, weight, None, norm, 1e-6)
    close(total, twins.few_onto(residual, x, weight, None, norm, 1e-6)[0])
    torch.testing.assert_close(
        scaled.squares_TP.sum(dim=1), total.float().square().sum(dim=1), rtol=1e-4, atol=1e-4
    )
