"""Codes of four bits in pairs, taken apart on Triton tiles."""

import numpy as np
import pytest
import torch
from numerics import assert_same_bytes
from triton_interpreter import DEVICE
from v4_encoder import E2M1

from hybridkv.kernels.backend import has_pdl, tl, triton
from hybridkv.kernels.formats.small_floats import e2m1_halves_tile

pytest.importorskip("triton")


@triton.jit
def halves_kernel(codes, even, odd, FAST: tl.constexpr):
    o = tl.arange(0, 256)
    b_even, b_odd = e2m1_halves_tile(tl.load(codes + o), FAST)
    tl.store(even + o, b_even)
    tl.store(odd + o, b_odd)


def test_both_halves_of_all_bytes() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    even, odd = (torch.empty(256, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    halves_kernel[(1,)](codes.to(DEVICE), even, odd, FAST=has_pdl(even.device))
    signed = torch.from_numpy(np.concatenate((E2M1, -E2M1))).bfloat16()
    assert_same_bytes(signed[(codes & 15).long()], even.cpu())
    assert_same_bytes(signed[(codes >> 4).long()], odd.cpu())
