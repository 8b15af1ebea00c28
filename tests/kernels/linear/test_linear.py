"""The packed product against float64, for one row and for many."""

import pytest
import torch
from numerics import assert_close_rms

from hybridkv.kernels.linear.linear import Linear

BOUND = {torch.float32: 1e-6, torch.bfloat16: 2.5e-3}  # f32 sums of 96 products; bf16: one rounding of the result, 2^-9


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("rows", (1, 2, 33))
@pytest.mark.parametrize("bias", (False, True))
def test_linear_is_the_product(dtype: torch.dtype, rows: int, bias: bool) -> None:
    weight, x = torch.randn(40, 96).to(dtype), torch.randn(rows, 96).to(dtype)
    added = torch.randn(40).to(dtype) if bias else None
    want = x.double() @ weight.double().T + (added.double() if added is not None else 0)
    layer = Linear(weight, added)
    got = layer(x)
    assert got.dtype == dtype and layer.shape == (40, 96)
    assert_close_rms("product", want, got, BOUND[dtype])


def test_a_slice_of_a_wider_row_and_of_a_wider_weight() -> None:
    wide, weight = torch.randn(5, 300), torch.randn(80, 96)
    layer = Linear(weight[::2])
    assert_close_rms("slice", wide[:, 100:196].double() @ weight[::2].double().T, layer(wide[:, 100:196]), 1e-6)


def test_few_rows_are_not_added_but_handed_on() -> None:
    weight, x, h = torch.randn(6, 16), torch.randn(3, 16), torch.randn(3, 6)
    before, linear = h.clone(), Linear(weight)
    for target in (h, None):
        found = linear.add_to(target, x)
        assert found is not None
        assert_close_rms("product", x.double() @ weight.double().T, found, 1e-6)
    assert torch.equal(before, h)


def test_where_a_layer_adds_in_place_a_subclass_can_refuse_it() -> None:
    """As one must whose product is a part of the sum, such as inputs split over devices."""

    class Adding(Linear):
        def adds_in_place(self, h: torch.Tensor, x: torch.Tensor) -> bool:
            return True

    class Part(Linear):
        def adds_in_place(self, h: torch.Tensor, x: torch.Tensor) -> bool:
            return False

    weight, x, h = torch.randn(6, 16).double(), torch.randn(3, 16).double(), torch.randn(3, 6).double()
    before = h.clone()
    found = Part(weight).add_to(h, x)
    assert found is not None and torch.equal(before, h)
    assert_close_rms("product", x @ weight.T, found, 1e-6)
    assert Adding(weight).add_to(h, x) is None
    assert_close_rms("sum", before + x @ weight.T, h, 1e-6)
