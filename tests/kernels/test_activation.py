"""Gates against their formulas in float64, and the kernels against the reference."""

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.activation import (
    sigmoid_mul,
    sigmoid_mul_exact,
    sigmoid_mul_ref,
    sigmoid_mul_triton,
    silu_mul,
    silu_mul_exact,
    silu_mul_ref,
    silu_mul_triton,
)

F32, BF16 = torch.float32, torch.bfloat16
BOUND = {F32: 1e-6, BF16: 4e-3, torch.float16: 5e-4}  # two roundings of 2^-9 at most in bf16, of 2^-12 in f16


def gated(x: Tensor, H: int) -> tuple[Tensor, Tensor]:
    """Gates as they lie in a projection's output, and rows to gate."""
    both = x.unflatten(1, (H, -1))
    D = both.shape[-1] // 2
    return both[..., :D].contiguous(), both[..., D:]


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("shape", ((1, 1), (3, 100), (2, 700), (40, 33), (0, 8), (70, 16)))
def test_silu_mul(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    T, I = shape
    wide = (3 * torch.randn(T, 2 * I + 5)).to(dtype)[:, 2 : 2 + 2 * I]  # rows of a wider product
    gate, up = wide.double().chunk(2, -1)
    want = gate * gate.sigmoid() * up
    forms = {form.__name__: form(wide) for form in (silu_mul, silu_mul_ref, silu_mul_exact)}
    forms["kernel"] = silu_mul_triton(wide.to(DEVICE))
    for name, got in forms.items():
        assert got.dtype == dtype and got.shape == shape and got.is_contiguous()
        assert_close_rms(name, want, got, BOUND[dtype])
    # the same roundings: where f32 functions differ by an ulp, a value may fall to the other side of a border
    assert_close_rms("kernel and reference", forms["silu_mul_ref"], forms["kernel"], 1e-6 if dtype == F32 else 1e-3)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("shape", ((1, 1, 1), (3, 5, 20), (2, 3, 256), (0, 2, 8), (35, 2, 9)))
def test_sigmoid_mul(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    T, H, D = shape
    x, gate = gated((3 * torch.randn(T, H * 2 * D)).to(dtype), H)
    want = (x.double() * gate.double().sigmoid()).flatten(1)
    forms = {form.__name__: form(x, gate) for form in (sigmoid_mul, sigmoid_mul_ref, sigmoid_mul_exact)}
    forms["kernel"] = sigmoid_mul_triton(*gated(torch.cat((x, gate), -1).flatten(1).to(DEVICE), H))
    for name, got in forms.items():
        assert got.dtype == dtype and got.shape == (T, H * D)
        assert_close_rms(name, want, got, BOUND[dtype])
    assert_close_rms("kernel and reference", forms["sigmoid_mul_ref"], forms["kernel"], 1e-6 if dtype == F32 else 1e-3)


def test_inputs_are_not_changed() -> None:
    wide = torch.randn(3, 20, device=DEVICE)
    before = wide.clone()
    for form in (silu_mul, silu_mul_exact, silu_mul_triton):
        form(wide)
    for form in (sigmoid_mul, sigmoid_mul_exact, sigmoid_mul_triton):
        form(*gated(wide, 2))
    assert_same_bytes(before, wide)


@pytest.mark.parametrize("form", (silu_mul_ref, silu_mul_triton))
def test_far_gates_neither_overflow_nor_hide_nan(form) -> None:
    gate = torch.tensor([[-1e4, 1e4, -100.0, torch.nan, 0.0]], device=DEVICE)
    got = form(torch.cat((gate, torch.ones_like(gate)), 1))[0]
    assert got[:3].tolist() == [0.0, 1e4, pytest.approx(0, abs=1e-30)] and got[3].isnan() and got[4] == 0
