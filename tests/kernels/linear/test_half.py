"""f16 weights and 4-bit codes on a CPU: products against float64, and which matrices are kept so."""

from collections.abc import Callable

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from numerics import assert_close_rms, assert_same_bytes
from packed_blocks import random_blocks
from torch import Tensor

from hybridkv.kernels.linear import half
from hybridkv.kernels.linear.half import HalfLinear, fits_half, has_half, linear_half_ref
from hybridkv.kernels.linear.int4 import FEW_ROWS, Codes4, Int4Linear, join_codes, linear_int4_ref
from hybridkv.kernels.linear.packed_planes import half_bytes, int4_bytes, suits_half
from hybridkv.kernels.linear.packed_weights import unpack_codes4

needs_half = pytest.mark.skipif(not has_half(), reason="this build of torch has no f16 products on a CPU")


def random_codes(N: int, K: int) -> Codes4:
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8)
    scale = torch.rand(N, K // 32) / 8 + 0.01
    return Codes4(codes, scale, -scale * (torch.rand(N, K // 32) * 4 + 6))


@needs_half
@pytest.mark.parametrize("rows", (0, 1, 2, 5, 33))
@pytest.mark.parametrize("bias", (False, True))
def test_the_product_is_that_of_the_rounded_weight(rows: int, bias: bool) -> None:
    weight, wide = torch.randn(48, 576), torch.randn(rows, 700)
    added = torch.randn(48) if bias else None
    x = wide[:, 50:626]  # not contiguous
    layer = HalfLinear(weight, added)
    want = x.double() @ weight.half().double().T + (0 if added is None else added.double())
    assert layer.shape == (48, 576) and layer.nbytes == half_bytes(48, 576) + (192 if bias else 0)
    for got in (layer(x), linear_half_ref(x, weight, added)):
        assert got.dtype == torch.float32
        assert_close_rms("product", want, got, 1e-6)  # f32 sums of 576 products
    assert_close_rms("true weight", x.double() @ weight.double().T, HalfLinear(weight)(x), 4e-4)  # 2^-11, one rounding
    assert layer.add_to(torch.zeros(rows, 48), x) is not None
    gate, up = layer(x).double().chunk(2, 1)
    assert_close_rms("gated", torch.nn.functional.silu(gate) * up, layer.gated(x), 1e-6)


@needs_half
def test_what_a_matrix_is_known_by_are_its_own_columns() -> None:
    weight = torch.randn(32, 576)
    assert_same_bytes(weight[:, ::144].T.half().contiguous(), HalfLinear(weight).columns())


def test_which_matrices_are_kept_in_f16() -> None:
    assert suits_half(48, 576) and suits_half(16, 512) and not suits_half(16, 256)  # 256: padded to 512
    assert not suits_half(40, 576) and not suits_half(0, 576)
    assert half_bytes(48, 576) == 48 * 1024 * 2 and half_bytes(48, 1536) == 48 * 1536 * 2
    large = torch.randn(16, 512)
    assert fits_half(large) and not fits_half(large.bfloat16())
    large[3, 7] = 70000.0  # f16 ends at 65504
    assert not fits_half(large) and not fits_half(-large)


def missing(*_: object) -> Tensor:
    raise AttributeError("no such function")


@pytest.mark.parametrize("product", (missing, lambda *_: None, lambda x, *_: x.new_zeros(2, 3)))
def test_a_torch_without_the_product_is_noticed(
    product: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half, "linear_half", product)
    assert not has_half.__wrapped__()


@pytest.mark.parametrize("kind", ("Q4_0", "Q4_1", "Q4_K"))
def test_codes_hold_the_weights_of_the_file(kind: str) -> None:
    if kind == "Q4_K":
        blocks = random_blocks(kind, 7, 512)
    else:
        blocks = torch.from_numpy(gguf.quantize(torch.randn(7, 512).numpy(), Type[kind]))
    stored = torch.from_numpy(gguf.dequantize(blocks.numpy(), Type[kind]))
    found = unpack_codes4(blocks, kind)
    assert int(found.codes.max()) <= 15
    assert_close_rms("values", stored.double(), found.values(), 1e-7)  # the same factors, products rounded in f32
    some = torch.tensor([5, 0, 5])
    assert_same_bytes(found.values()[some], found.rows(some).values())
    assert_same_bytes(torch.cat([found.values()] * 2), join_codes([found, found]).values())


@needs_half
@pytest.mark.parametrize("rows", (0, 1, FEW_ROWS, FEW_ROWS + 1))
@pytest.mark.parametrize("shape", ((16, 512), (48, 576), (112, 1536)))
def test_few_rows_are_multiplied_by_codes_and_more_by_f16(rows: int, shape: tuple[int, int]) -> None:
    codes, x, bias = random_codes(*shape), torch.randn(rows, shape[1]), torch.randn(shape[0])
    weight = codes.values()
    layer = Int4Linear(weight, codes, bias)
    assert layer.nbytes == half_bytes(*shape) + int4_bytes(*shape) + bias.nbytes
    assert int4_bytes(*shape) == layer.packed_codes.nbytes + layer.scales.nbytes
    got = layer(x)
    assert got.dtype == torch.float32 and got.shape == (rows, shape[0])
    true = x.double() @ weight.double().T + bias.double()
    if rows > FEW_ROWS:
        assert_close_rms("f16", true, got, 4e-4)
    elif rows:
        assert_close_rms("rounded", linear_int4_ref(x, codes).double() + bias.double(), got, 2e-3)  # bf16 sums: 2^-9
        assert_close_rms("true weight", true, got, 8e-3)  # x, scale, middle and the result in bf16: 2^-9 each


@needs_half
def test_an_error_in_the_codes_would_show() -> None:
    codes, x = random_codes(48, 576), torch.randn(1, 576)
    codes.codes[:, 5] ^= 8
    weight = random_codes(48, 576).values()
    with pytest.raises(AssertionError):
        assert_close_rms("true weight", x.double() @ weight.double().T, Int4Linear(weight, codes)(x), 8e-3)
