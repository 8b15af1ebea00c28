"""FP8 codes and scales of the kernels: the reference's bytes, for every kind of value. And bf16 in Triton: the same
numbers interpreted and compiled.
"""

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from triton_interpreter import DEVICE

from hybridkv.kernels.backend import tl, triton
from hybridkv.kernels.formats.fp8 import E4M3_NAN, fp8_decode_ref, fp8_decode_triton, fp8_encode_ref, fp8_encode_triton

pytest.importorskip("triton")


def awkward(D: int) -> torch.Tensor:
    """Entries of every kind: plain, zero, tiny, huge, with infinities and NaN of both signs, and all ties."""
    x = torch.randn(12, D) * torch.logspace(-3, 3, 12)[:, None]
    x[1], x[2], x[3], x[4] = 0, 1e-42, 3e38, -0.0
    x[5] *= 1e-36
    x[6, 0], x[6, -1] = torch.inf, torch.nan
    x[7, 0], x[7, -1] = -torch.inf, -torch.nan
    x[8], x[9] = torch.nan, torch.inf
    codes = torch.arange(D) % 0x7E  # midpoints between neighbouring codes, at scale 1
    low, high = (c.to(torch.uint8).view(torch.float8_e4m3fn).float() for c in (codes, codes + 1))
    x[10] = (low + high) / 2
    x[10, 0] = 448
    x[11, 0] = 448.1
    return x


@pytest.mark.parametrize("D", (1, 7, 64, 100, 256))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_codes_and_scales_are_the_reference_bit_for_bit(D: int, dtype: torch.dtype) -> None:
    x = awkward(D).to(dtype)
    want, got = fp8_encode_ref(x), fp8_encode_triton(x.to(DEVICE))
    for a, b in zip(want, got):
        assert_same_bytes(a, b)


def test_every_code_decodes_as_in_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(3, 1)
    scale = torch.tensor([1.0, 2.0**-126, 1.7e35])
    want, got = fp8_decode_ref(codes, scale), fp8_decode_triton(codes.to(DEVICE), scale.to(DEVICE)).cpu()
    assert want.isnan().sum() == 6 and torch.equal(want.isnan(), got.isnan())
    assert_same_bytes(want.nan_to_num(0), got.nan_to_num(0))


def test_round_trip_keeps_every_value_within_the_bound_of_the_format() -> None:
    x = torch.randn(40, 96) * torch.logspace(-30, 30, 40)[:, None]
    codes, scale = fp8_encode_triton(x.to(DEVICE))
    back = fp8_decode_triton(codes, scale).cpu().double()
    # half a step: 1/16 of the value, or 2^-10 of the scale below the smallest normal code; 1e-6 for f32 rounding
    bound = torch.maximum(x.double().abs() / 16, scale.cpu().double()[:, None] * 2.0**-10)
    assert ((back - x).abs() <= bound * (1 + 1e-6)).all()


def test_nan_stays_nan_and_infinity_becomes_the_largest_of_its_entry() -> None:
    x = torch.tensor([[torch.nan, -torch.nan, torch.inf, -torch.inf, 2.0, -1.0]])
    codes, scale = fp8_encode_triton(x.to(DEVICE))
    assert codes[0, :2].tolist() == [E4M3_NAN, E4M3_NAN]
    assert fp8_decode_triton(codes, scale)[0, 2:].tolist() == [2.0, -2.0, 2.0, -1.0]


@pytest.mark.parametrize("shape", ((0, 8), (3, 0, 8), (1, 1), (2, 3, 5)))
def test_shapes_with_no_entry_and_with_one(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for a, b in zip(fp8_encode_ref(x) if x.numel() else fp8_encode_triton(x), fp8_encode_triton(x.to(DEVICE))):
        assert a.shape == b.shape
        assert_same_bytes(a, b)


@triton.jit(do_not_specialize=["n"])
def bf16_kernel(x, y, sums, products, dot, n, B: tl.constexpr):
    o_i = tl.arange(0, B)[:, None] * B + tl.arange(0, B)
    b_x, b_y = tl.load(x + o_i), tl.load(y + o_i)
    tl.store(sums + o_i, b_x + b_y)
    tl.store(products + o_i, b_x * b_y)
    b_dot = tl.zeros([B, B], tl.float32)
    for _ in range(0, n, 2):  # a bound known at run time only
        b_dot = tl.dot(b_x, b_y, b_dot)
    tl.store(dot + o_i, b_dot)


def test_bf16_sums_products_and_dots_round_once() -> None:
    x, y = (torch.randn(16, 16).to(torch.bfloat16) for _ in range(2))
    sums, products = (torch.empty(16, 16, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    dot = torch.empty(16, 16, device=DEVICE)
    bf16_kernel[(1,)](x.to(DEVICE), y.to(DEVICE), sums, products, dot, 5, B=16)
    assert_same_bytes(sums, (x.float() + y.float()).to(torch.bfloat16))
    assert_same_bytes(products, (x.float() * y.float()).to(torch.bfloat16))
    assert_close_rms("dot", 3 * (x.double() @ y.double()), dot, 1e-6)  # exact products, f32 sums of 48
