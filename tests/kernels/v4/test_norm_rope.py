"""Norm and rotation of heads against a loop in float64, and the kernel against the reference; products kept in f32."""

import math

import pytest
import torch
from numerics import assert_close_rms, rel_rms
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.linear.f32_out import linear_wide, wide_dtype
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.v4.norm_rope import norm_rope_ref, norm_rope_triton

EPS = 1e-6
BOUND = {torch.float32: 1e-6, torch.bfloat16: 2.5e-3}  # one rounding of the result


def angles(T: int, R: int) -> tuple[Tensor, Tensor]:
    turn = torch.rand(T, R) * 2 * math.pi
    return turn.cos(), turn.sin()


def test_by_hand() -> None:
    x, weight, (cos, sin) = torch.randn(2, 3, 10), torch.randn(10), angles(2, 2)
    got = norm_rope_ref(x, torch.float32, EPS, weight, (cos, sin))
    for t in range(2):
        for h in range(3):
            v = x[t, h].double()
            v = v / (v.square().mean() + EPS).sqrt() * weight
            for i in range(2):  # pairs 6, 7 and 8, 9 turn
                a, b = v[6 + 2 * i].clone(), v[7 + 2 * i].clone()
                v[6 + 2 * i], v[7 + 2 * i] = a * cos[t, i] - b * sin[t, i], a * sin[t, i] + b * cos[t, i]
            assert_close_rms("head", v, got[t, h], 1e-6)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(
    ("T", "H", "D", "R"), ((1, 1, 24, 0), (3, 5, 32, 4), (2, 2, 34, 3), (1, 3, 512, 32), (2, 1, 7, 0), (0, 2, 8, 2))
)
@pytest.mark.parametrize("parts", ("norm weight", "norm", ""))
def test_kernel_equals_the_reference(dtype: torch.dtype, T: int, H: int, D: int, R: int, parts: str) -> None:
    wide = torch.randn(T, H * D + 5)
    x = wide[:, 2 : 2 + H * D].unflatten(1, (H, D))  # rows of a wider product
    eps, weight = EPS if "norm" in parts else None, torch.randn(D) if "weight" in parts else None
    turn = angles(T, R) if R else None
    want = norm_rope_ref(x, dtype, eps, weight, turn)
    there = [None if t is None else t.to(DEVICE) for t in (weight, *(turn or (None, None)))]
    on_device = wide.to(DEVICE)[:, 2 : 2 + H * D].unflatten(1, (H, D))
    got = norm_rope_triton(on_device, dtype, eps, there[0], (there[1], there[2]) if R else None)
    assert got.dtype == dtype and got.is_contiguous()
    assert_close_rms("heads", want, got, BOUND[dtype])


def test_wide_products_are_not_rounded() -> None:
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    stored = Linear(weight.to(wide_dtype(torch.device("cpu"), torch.bfloat16)))
    want = x.double() @ weight.double().T
    assert_close_rms("product", want, linear_wide(x, stored), 1e-6)
    assert rel_rms(want, (x @ weight.T).float()) > 1e-4, "bf16 would have done"
