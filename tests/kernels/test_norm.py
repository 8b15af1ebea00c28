"""Norms against their formulas in float64."""

import pytest
import torch
from torch import Tensor

from hybridkv.kernels.norm import gated_rms_norm, l2_norm, rms_norm, rms_norm_ref
from numerics import assert_close_rms, rel_rms

F32, BF16 = torch.float32, torch.bfloat16
BOUND = {F32: 5e-7, BF16: 2e-3}  # f32 mean and root; bf16: one rounding of the result, 2^-9


def by_formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", (F32, BF16))
@pytest.mark.parametrize("shape", ((1, 1), (5, 96), (3, 2, 100), (2, 4096)))
@pytest.mark.parametrize("size", (1e-4, 1.0, 1e4))
def test_rms_norm_is_the_formula(shape: tuple[int, ...], dtype: torch.dtype, size: float) -> None:
    x, weight = (size * torch.randn(shape)).to(dtype), torch.randn(shape[-1])
    for form in (rms_norm, rms_norm_ref):
        got = form(x, weight, 1e-5)
        assert got.dtype == dtype
        assert_close_rms(form.__name__, by_formula(x, weight, 1e-5), got, BOUND[dtype])


def test_rms_norm_of_a_slice_of_a_wider_row() -> None:
    wide, weight = torch.randn(5, 4, 64), torch.randn(32)
    part = wide.chunk(2, -1)[1]
    assert not part.is_contiguous()
    assert_close_rms("slice", by_formula(part, weight, 1e-6), rms_norm(part, weight, 1e-6), BOUND[F32])


def test_rms_norm_of_zeros_is_zero() -> None:
    assert (rms_norm(torch.zeros(3, 8), torch.ones(8), 1e-6) == 0).all()


@pytest.mark.parametrize("dtype", (F32, BF16))
def test_gated_rms_norm_is_the_formula(dtype: torch.dtype) -> None:
    x, gate, weight = torch.randn(5, 3, 32), torch.randn(5, 3, 32).to(dtype), torch.randn(32)
    silu = gate.double() * gate.double().sigmoid()
    got = gated_rms_norm(x, gate, weight, 1e-6)
    assert got.dtype == F32  # computed on in f32 whatever the gate's dtype
    assert_close_rms("gated", by_formula(x, weight, 1e-6) * silu, got, BOUND[F32])


@pytest.mark.parametrize("dtype", (F32, BF16))
def test_l2_norm_is_the_formula(dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, 16).to(dtype)
    wide = x.double()
    got = l2_norm(x)
    assert got.dtype == F32
    assert_close_rms("l2", wide / (wide.square().sum(-1, keepdim=True) + 1e-6).sqrt(), got, BOUND[F32])
    assert (l2_norm(torch.zeros(2, 4)) == 0).all()


def test_the_bound_would_see_a_forgotten_epsilon() -> None:
    x, weight = 1e-3 * torch.randn(5, 96), torch.randn(96)
    assert rel_rms(by_formula(x, weight, 0.0), rms_norm(x, weight, 1e-6)) > 1e3 * BOUND[F32]
