"""The append kernel: the reference's bytes in their places, and nothing else changes."""

from typing import Any

import pytest
import torch
from numerics import assert_same_bytes
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.attention.append import append_ref, append_triton
from hybridkv.kernels.formats.fp8 import Fp8Pages
from hybridkv.kernels.formats.kv_format import Pages

pytest.importorskip("triton")
KINDS = ("f32", "bf16", "fp8")


def pool(kind: str, N: int, P: int, D: int) -> Pages:
    """Pages full of bits that arithmetic would not keep."""
    bits = torch.randint(0, 256, (N, P, D * 4), dtype=torch.uint8)
    if kind == "fp8":
        return Fp8Pages(bits[..., :D].contiguous(), torch.randn(N, P))
    return bits.view(torch.float32) if kind == "f32" else bits[..., : 2 * D].contiguous().view(torch.bfloat16)


def copy(pages: Pages, device: str = "cpu") -> Any:
    if isinstance(pages, Fp8Pages):
        return Fp8Pages(*(t.clone().to(device) for t in pages))
    return pages.clone().to(device)


def check(k_pool: Pages, v_pool: Pages, k: Tensor, v: Tensor, index: Tensor) -> None:
    want, got = (copy(k_pool), copy(v_pool)), (copy(k_pool, DEVICE), copy(v_pool, DEVICE))
    append_ref(*want, k, v, index)
    append_triton(*got, k.to(DEVICE), v.to(DEVICE), index.to(DEVICE))
    for a, b in zip(want, got):
        for x, y in zip(a, b) if isinstance(a, Fp8Pages) else ((a, b),):
            assert_same_bytes(x, y)


def places(T: int, G: int, N: int, P: int) -> Tensor:
    return torch.randperm(N * P)[: T * G].view(G, T)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("P", "D"), ((1, 1), (2, 100), (16, 40), (53, 64), (64, 256)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("f32-in", "bf16-in"))
def test_bytes_equal_the_reference(kind: str, P: int, D: int, dtype: torch.dtype) -> None:
    G, T, N = 3, 11, -(-40 // P) + 2
    k, v = torch.randn(T, G, D).to(dtype), (torch.randn(T, G, D) * 1e3).to(dtype)
    check(pool(kind, N, P, D), pool(kind, N, P, D), k, v, places(T, G, N, P))


@pytest.mark.parametrize("kind", KINDS)
def test_slices_of_a_wider_row_and_transposed_inputs_are_read_right(kind: str) -> None:
    G, T, D, P, N = 2, 5, 24, 4, 6
    wide = torch.randn(T, 2 + 3 * G, D)
    index = places(T, G, N, P).repeat_interleave(2, 1)[:, ::2]  # every second column of a wider one
    check(pool(kind, N, P, D), pool(kind, N, P, D), wide[:, 2 : 2 + G], wide[:, -G:], index)
    k, v = torch.randn(G, D, T).permute(2, 0, 1), torch.randn(D, T, G).permute(1, 2, 0)
    check(pool(kind, N, P, D), pool(kind, N, P, D), k, v, index)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skipped", ("some", "all"))
def test_padding_rows_are_not_stored_whatever_they_hold(kind: str, skipped: str) -> None:
    G, T, D, P, N = 2, 9, 32, 16, 3
    k, v, index = torch.randn(T, G, D), torch.randn(T, G, D), places(T, G, N, P)
    pads = torch.tensor([0, 3, 4, 8]) if skipped == "some" else torch.arange(T)
    index[:, pads] = -1
    k[pads], v[pads] = torch.nan, torch.inf
    before = pool(kind, N, P, D), pool(kind, N, P, D)
    check(*before, k, v, index)
    if skipped == "all":
        after = copy(before[0]), copy(before[1])
        append_ref(*after, k, v, index)
        for a, b in zip(before, after):
            assert_same_bytes(a[0], b[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("T", (0, 1))
def test_no_token_and_one_token(kind: str, T: int) -> None:
    check(pool(kind, 2, 2, 8), pool(kind, 2, 2, 8), torch.randn(T, 1, 8), torch.randn(T, 1, 8), places(T, 1, 2, 2))


def test_bf16_storage_rounds_ties_to_even() -> None:
    step = 2.0**-7
    values = torch.tensor([1 + step / 2, 1 + 3 * step / 2, -1 - step / 2, 3.4e38, 1e-40, -0.0, torch.inf])
    k = values.view(1, 1, -1)
    k_pool, v_pool = (torch.zeros(1, 1, len(values), dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    append_triton(k_pool, v_pool, k.to(DEVICE), -k.to(DEVICE), torch.tensor([[0]], device=DEVICE))
    assert k_pool.flatten().tolist()[:3] == [1.0, 1 + 2 * step, -1.0]
    assert_same_bytes(k_pool.flatten(), values.to(torch.bfloat16))
    assert_same_bytes(v_pool.flatten(), (-values).to(torch.bfloat16))


@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinity_of_a_real_row_are_stored_and_stay_in_their_row(kind: str) -> None:
    k = torch.randn(3, 1, 16)
    k[1, 0, 2], k[1, 0, 5] = torch.nan, -torch.inf
    index = torch.tensor([[4, 1, 6]])
    before = pool(kind, 2, 4, 16)
    want, got = copy(before), copy(before, DEVICE)
    append_ref(want, copy(before), k, k, index)
    append_triton(got, copy(before, DEVICE), k.to(DEVICE), k.to(DEVICE), index.to(DEVICE))
    a, b = (p.values if isinstance(p, Fp8Pages) else p for p in (want, got))
    a, b = a.view(8, 16), b.view(8, 16).cpu()
    assert_same_bytes(a[[4, 6]], b[[4, 6]])
    keep = [i for i in range(16) if i != 2]  # the bits of a NaN are the machine's choice, except in FP8
    assert_same_bytes(a[1, keep], b[1, keep])
    assert b[1, 2] == 0x7F if kind == "fp8" else b[1, 2].isnan()
