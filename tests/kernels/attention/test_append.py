"""append moves bytes: what was stored is compared exactly, and so is everything that must not change."""

import numpy as np
import pytest
import torch
from numerics import assert_same_bytes
from torch import Tensor

from hybridkv.kernels.attention.append import append


def bf16_by_hand(x: Tensor) -> Tensor:
    """Round to nearest, ties to even, on the bits."""
    bits = x.numpy().view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return torch.from_numpy(rounded.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def places(tokens: int, heads: int, pages: int, P: int) -> Tensor:
    return torch.randperm(pages * P)[: tokens * heads].view(heads, tokens)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("P", "D"), ((1, 32), (2, 100), (53, 64), (64, 256)))
def test_entries_land_in_their_places_and_nothing_else_changes(P: int, D: int, dtype: torch.dtype) -> None:
    G, T, N = 3, 11, -(-60 // P) + 2
    k_pool, v_pool = (torch.randn(N, P, D).to(dtype) for _ in range(2))
    k_pool[0, 0, 0] = v_pool[-1, -1, -1] = torch.nan  # bits that arithmetic would not keep
    k, v, index = torch.randn(T, G, D), torch.randn(T, G, D), places(T, G, N, P)
    want = [k_pool.clone(), v_pool.clone()]
    for pool, new in zip(want, (k, v)):
        for g in range(G):
            for t in range(T):
                value = new[t, g] if dtype == torch.float32 else bf16_by_hand(new[t, g])
                pool[index[g, t] // P, index[g, t] % P] = value
    append(k_pool, v_pool, k, v, index)
    assert_same_bytes(want[0], k_pool)
    assert_same_bytes(want[1], v_pool)


def test_bf16_storage_rounds_ties_to_even() -> None:
    one = 2.0**-7  # a bf16 step at 1
    half, bit = one / 2, 2.0**-20
    values = [1 + half, 1 + 3 * half, 1 + half + bit, 1 + half - bit, -1 - half, 3.4e38, 1e-40, -0.0]
    even = [1.0, 1 + 2 * one, 1 + one, 1.0, -1.0]
    k = torch.tensor(values).view(1, 1, -1)
    pool_k, pool_v = (torch.zeros(1, 1, len(values), dtype=torch.bfloat16) for _ in range(2))
    append(pool_k, pool_v, k, k, torch.tensor([[0]]))
    assert pool_k[0, 0, : len(even)].tolist() == even
    assert_same_bytes(bf16_by_hand(k.flatten()), pool_k.flatten())
    assert_same_bytes(pool_k, pool_v)


def test_bf16_entries_are_kept_exactly_in_f32_pools_and_slices_of_wider_rows_are_read_right() -> None:
    G, T, D, P = 2, 5, 32, 4
    wide = torch.randn(T, 3 * G, D).to(torch.bfloat16)  # q | k | v side by side
    k, v = wide[:, G : 2 * G], wide[:, 2 * G :]
    k_pool, v_pool = torch.zeros(4, P, D), torch.zeros(4, P, D)
    index = places(T, G, 4, P)
    append(k_pool, v_pool, k, v, index)
    for pool, new in ((k_pool, k), (v_pool, v)):
        assert_same_bytes(pool.view(-1, D)[index], new.transpose(0, 1).float().contiguous())
