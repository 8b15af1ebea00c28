"""Norms against their formulas in float64, and the kernel against the reference."""

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes, rel_rms
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.norm import (
    add_rms_norm,
    add_rms_norm_exact,
    add_rms_norm_ref,
    add_rms_norm_triton,
    gated_rms_norm,
    l2_norm,
    rms_norm,
    rms_norm_exact,
    rms_norm_ref,
)

F32, BF16 = torch.float32, torch.bfloat16
BOUND = {F32: 5e-7, BF16: 2**-8}  # f32 mean and root; bf16: one rounding of the result, by 2^-8 at most


def by_formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", (F32, BF16))
@pytest.mark.parametrize("shape", ((1, 1), (1, 576), (1, 1, 33), (5, 96), (3, 2, 100), (2, 4096)))
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


# ---- the residual stream


@pytest.mark.parametrize("dtype", (F32, BF16))
def test_add_rms_norm_is_a_sum_in_the_dtype_and_its_norm(dtype: torch.dtype) -> None:
    x, delta, weight = torch.randn(5, 96).to(dtype), torch.randn(5, 96).to(dtype), torch.randn(96)
    for form, norm in (
        (add_rms_norm, rms_norm),
        (add_rms_norm_ref, rms_norm_ref),
        (add_rms_norm_exact, rms_norm_exact),
    ):
        total, normed = form(x, delta, weight, 1e-6)
        assert_same_bytes(x + delta, total)
        assert_same_bytes(norm(x + delta, weight, 1e-6), normed)
        total, normed = form(x, None, weight, 1e-6)
        assert total is x
        assert_same_bytes(norm(x, weight, 1e-6), normed)


@pytest.mark.parametrize("dtype", (F32, BF16, torch.float16))
@pytest.mark.parametrize("shape", ((0, 8), (1, 1), (3, 96), (17, 100), (2, 3, 33), (2, 2, 2, 16), (1, 5120), (40,)))
@pytest.mark.parametrize("add", (False, True))
def test_kernel_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype, add: bool) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1])
    delta = torch.randn(shape).to(dtype) if add else None
    want, normed = add_rms_norm_ref(x, delta, weight, 1e-6)
    there = [None if t is None else t.to(DEVICE) for t in (x, delta, weight)]
    total, got = add_rms_norm_triton(*there, 1e-6)
    assert got.dtype == dtype and (add or total is there[0])
    assert_same_bytes(want, total)
    # bf16, f16: sums in another order move a value over the border of two of them now and then
    assert_close_rms("norm", normed, got, 1e-6 if dtype == F32 else 1e-3)


def test_kernel_reads_slices_of_wider_rows() -> None:
    wide, weight = torch.randn(7, 3, 2 * 24, device=DEVICE), torch.randn(24, device=DEVICE)
    for part in (wide[..., 24:], wide[:, 1, :24], wide.transpose(0, 2)[:24].permute(2, 1, 0)):
        assert not part.is_contiguous()
        _, got = add_rms_norm_triton(part, part, weight, 1e-6)
        assert_close_rms("slice", rms_norm_ref(part + part, weight, 1e-6), got, 1e-6)


def test_a_broken_row_stays_alone() -> None:
    x, weight = torch.randn(20, 24, device=DEVICE), torch.randn(24, device=DEVICE)
    x[3] = torch.nan
    x[4, 2] = torch.inf
    good = [i for i in range(20) if i not in (3, 4)]
    _, got = add_rms_norm_triton(x, None, weight, 1e-6)
    assert_close_rms("others", rms_norm_ref(x[good], weight, 1e-6), got[good], 1e-6)
    assert got[3].isnan().all()
