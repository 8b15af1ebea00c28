"""Products with packed weights: the kernels against float64 on the weights of the file, and what a layer is made of."""

import pytest
import torch
import torch.nn.functional as F
from long_form import LONG
from numerics import assert_close_rms, assert_same_bytes
from own_process import compile_alone
from packed_blocks import random_blocks
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.linear import packed as file
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.linear.packed import (
    keeps_packed,
    linear_packed,
    linear_packed_ref,
    linear_packed_triton,
    linear_written_out,
)
from hybridkv.kernels.linear.packed_dequantise import dequantise_ref, dequantise_triton
from hybridkv.kernels.linear.packed_linear import PackedLinear
from hybridkv.kernels.linear.packed_planes import BITS
from hybridkv.kernels.linear.packed_weights import Packed, pack

pytest.importorskip("triton")
BOUND = 3e-3  # one rounding of the result to bf16, 2^-9 at most; gated, of a product of two sums
WIDE_BOUND = 5e-3  # the weights are rounded to bf16 as well


def drawn(kind: str, N: int, K: int, order: Tensor | None = None) -> Packed:
    """16 rows beside each other, where their number allows it."""
    return pack(random_blocks(kind, N, K, K**-0.5).to(DEVICE), BITS[kind], order).laid(16)


def dense(x: Tensor, weight: Packed, bias: Tensor | None = None, gated: bool = False) -> Tensor:
    y = F.linear(x.double(), dequantise_ref(weight).double(), None if bias is None else bias.double())
    if not gated:
        return y
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize(
    ("T", "N", "K", "bias", "gated"),
    [(1, 33, 1280, True, False), (3, 48, 1280, False, False), (16, 8, 1024, True, True), (17, 20, 256, False, False)],
)
def test_few_rows(kind: str, T: int, N: int, K: int, bias: bool, gated: bool) -> None:
    rows = 2 * N if gated else N
    weight = drawn(kind, rows, K, torch.randperm(10) if K == 1280 else None)  # heads of 128 columns
    x = torch.randn(T, K + 9, device=DEVICE).bfloat16()[:, 4 : 4 + K]  # a slice of a wider row
    added = torch.randn(rows, device=DEVICE).bfloat16() if bias else None
    want = dense(x, weight, added, gated)
    assert_close_rms("ref", want, linear_packed_ref(x, weight, added, gated), BOUND)
    wide = torch.full((T, N + 5), 7.0, device=DEVICE, dtype=torch.bfloat16)
    got = linear_packed_triton(x, weight, added, gated, out=wide[:, 2 : 2 + N])
    assert_close_rms("kernel", want, got, BOUND)
    assert (wide[:, :2] == 7).all() and (wide[:, 2 + N :] == 7).all()


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_tiles_of_32_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for matrices of many rows; the last tile is half full."""
    wide = file.tile(BITS[kind], 1, 1 << 20, False)
    assert wide[0] == 32
    monkeypatch.setattr(file, "tile", lambda *_: wide)
    weight, x = drawn(kind, 48, 512), torch.randn(3, 512, device=DEVICE).bfloat16()
    assert_close_rms("kernel", dense(x, weight), linear_packed_triton(x, weight), BOUND)


def test_q8_0_with_an_odd_number_of_groups() -> None:
    weight, x = drawn("Q8_0", 19, 13 * 32), torch.randn(5, 13 * 32, device=DEVICE).bfloat16()
    assert_close_rms("kernel", dense(x, weight), linear_packed_triton(x, weight), BOUND)


@pytest.mark.parametrize("kind", BITS)
def test_every_code_is_widened_to_its_number(kind: str) -> None:
    """With rows of the unit matrix for x the result is the weight. One code that is off by one is over the bound."""
    weight = drawn(kind, 16, 256)
    one = torch.eye(256, dtype=torch.bfloat16, device=DEVICE)[::17]
    assert_close_rms("weights", dequantise_ref(weight)[:, ::17].T, linear_packed_triton(one, weight), BOUND)


def test_a_row_does_not_see_its_neighbours() -> None:
    weight, x = drawn("Q4_K", 20, 512), torch.randn(5, 512, device=DEVICE).bfloat16()
    x[3] = torch.nan
    got, keep = linear_packed_triton(x, weight), [0, 1, 2, 4]
    assert got[3].isnan().all()
    assert_close_rms("others", dense(x[keep], weight), got[keep], BOUND)


@pytest.mark.parametrize("kind", BITS)
def test_many_rows_through_weights_written_out(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "ALIGNED", 16)
    monkeypatch.setattr(file, "WORKSPACE", 40 * 512)  # 32 rows at a time
    weight = drawn(kind, 80, 512, torch.randperm(4) if kind != "Q8_0" else None)
    wide = dequantise_triton(weight, torch.empty(80, 512, dtype=torch.bfloat16, device=DEVICE))
    assert_same_bytes(dequantise_ref(weight).bfloat16(), wide)
    x, bias = torch.randn(40, 512, device=DEVICE).bfloat16(), torch.randn(80, device=DEVICE).bfloat16()
    y = torch.full((40, 90), 7.0, dtype=torch.bfloat16, device=DEVICE)
    assert_close_rms("product", dense(x, weight, bias), linear_written_out(x, weight, bias, y[:, 4:84]), WIDE_BOUND)
    assert (y[:, :4] == 7).all() and (y[:, 84:] == 7).all()


def test_q8_0_written_out_with_an_odd_number_of_groups() -> None:
    weight = drawn("Q8_0", 9, 96)
    wide = dequantise_triton(weight, torch.empty(9, 96, dtype=torch.bfloat16, device=DEVICE))
    assert_same_bytes(dequantise_ref(weight).bfloat16(), wide)


@pytest.mark.parametrize("triton", [False, True])
def test_a_layer_of_parts(triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that become one, another format, plain rows that become one; few and many rows of x, and none."""
    monkeypatch.setattr(file, "use_triton", lambda x: triton)
    monkeypatch.setattr(file, "FEW_ROWS", dict.fromkeys(file.FEW_ROWS, 2))
    parts = [
        pack(random_blocks(kind, rows, 256, 1 / 16).to(DEVICE), BITS[kind])
        for kind, rows in (("Q4_K", 16), ("Q4_K", 16), ("Q6_K", 24))
    ]
    plain = torch.randn(8, 256, device=DEVICE).bfloat16() / 16
    bias = torch.randn(64, device=DEVICE).bfloat16()
    wide = torch.cat([*map(dequantise_ref, parts), plain.float()]).double()
    layer = PackedLinear([*parts, plain[:3], plain[3:]], bias)
    assert [type(part) for part in layer.parts] == [Packed, Packed, Linear] and layer.shape == (64, 256)
    assert [part.beside for part in layer.parts if isinstance(part, Packed)] == [16, 1]  # 24 rows are no whole tiles
    assert layer.packed and layer.nbytes == sum(part.nbytes for part in parts) + plain.nbytes + bias.nbytes
    for T in (0, 1, 3):
        x = torch.randn(T, 256, device=DEVICE).bfloat16()
        want = F.linear(x.double(), wide, bias.double())
        gate, up = want.chunk(2, -1)
        for got in (layer(x), layer.add_to(torch.zeros_like(want).bfloat16(), x)):
            assert got is not None and got.shape == (T, 64) and got.dtype == torch.bfloat16
            assert not T or assert_close_rms("layer", want, got, WIDE_BOUND) is None
        assert not T or assert_close_rms("gated", F.silu(gate) * up, layer.gated(x), 2 * WIDE_BOUND) is None
    whole = PackedLinear(parts[:2], bias[:32])
    for T in (1, 3):
        x = torch.randn(T, 256, device=DEVICE).bfloat16()
        gate, up = F.linear(x.double(), wide[:32], bias[:32].double()).chunk(2, -1)
        assert_close_rms("gated", F.silu(gate) * up, whole.gated(x), 2 * WIDE_BOUND)


def test_a_cpu_and_other_dtypes_keep_nothing_packed() -> None:
    assert not keeps_packed(torch.device("cpu"), torch.bfloat16)
    x = torch.randn(3, 256)
    assert linear_packed(x, drawn("Q6_K", 8, 256).rows(slice(0, 8))).dtype == torch.float32


COMPILE = """
import os
import torch
from long_form import more
from no_device import built
from hybridkv.kernels.linear import packed as file
from hybridkv.kernels.linear.packed_planes import plane_bytes
from hybridkv.kernels.linear.packed_weights import Packed

hopper = "COMPILE_FOR" not in os.environ
file.has_pdl = lambda device: hopper
for bits in (4,) if hopper else (4, 8, *more(5, 6)):  # on Hopper a GPU runs the others
    N, K, each = 34816, 5120, 256
    sizes = zip(plane_bytes(bits, K, each), (torch.uint8, torch.uint8, torch.int32, torch.int32))
    weight = Packed(bits, K, *(torch.empty(N, n // t.itemsize, dtype=t) for n, t in sizes), each, 16)
    for T in (16, 1) if bits == 4 and not hopper else (16,):  # the largest tiles; a request alone
        file.linear_packed_triton(torch.empty(T, K, dtype=torch.bfloat16), weight, gated=True)
file.dequantise_triton(weight, torch.empty(N, K, dtype=torch.bfloat16))
for name, kernel in built:
    limit = 227 if hopper else 99
    assert kernel.metadata.shared <= limit * 1024, (name, kernel.metadata.shared)
    ptx = kernel.asm["ptx"]
    assert ("griddepcontrol" in ptx) == (hopper and name == "linear_packed_kernel"), name
print(len(built))
"""


@pytest.mark.long
@pytest.mark.parametrize("card", [None, "89"])
def test_the_tiles_of_a_27b_model_compile_and_fit(card: str | None) -> None:
    """In a process without the interpreter: for Hopper, and for an RTX 40 card."""
    printed = compile_alone(COMPILE, **({"COMPILE_FOR": card} if card else {}))
    assert printed.split() == [str(4 + 2 * LONG) if card else "2"]
