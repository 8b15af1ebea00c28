"""One request whose streams are equally long: against the definition, and which caches do not suit."""

import numpy as np
import pytest
import torch
from numerics import assert_close_rms

from hybridkv.kernels.activation import sigmoid_mul_ref
from hybridkv.kernels.attention.decode import attention_decode_ref
from hybridkv.kernels.attention.decode_even import attention_even, suits_even
from hybridkv.kernels.attention.tile import KEY_TILE
from hybridkv.kernels.even_pages import EvenPages
from hybridkv.kernels.formats.fp8 import Fp8Pages

P, D, N = 4, 16, 40


@pytest.mark.parametrize("gated", (False, True))
@pytest.mark.parametrize("row", (True, False))
@pytest.mark.parametrize(("H", "G", "length"), ((6, 2, 11), (3, 3, 1), (4, 1, 16)))
def test_it_is_attention_over_all_that_the_streams_hold(H: int, G: int, length: int, row: bool, gated: bool) -> None:
    n, q = -(-length // P), torch.randn(1, H, D)
    k, v = (torch.randn(N, P, D) for _ in range(2))
    ids = torch.arange(2 * G * n).view(2 * G, n) if row else torch.randperm(N)[: 2 * G * n].view(2 * G, n)
    gate, layer = torch.randn(1, H, D) if gated else None, slice(G, 2 * G)  # the second of two layers
    held = np.zeros(N * P, bool)
    for stream in ids[layer]:
        entries = (stream[:, None] * P + torch.arange(P)).flatten()[:length]
        held[entries] = True
    for pool in (k, v):  # what no stream of the layer holds is not looked at
        pool.view(N * P, D)[torch.from_numpy(~held)] = torch.nan
    want = attention_decode_ref(q, k, v, ids[layer][None].int(), np.full((1, G), length), 0.3)
    pages = EvenPages.of(ids.int().numpy(), length)
    got = attention_even(q, k, v, pages, layer, 0.3, gate)
    assert got.shape == q.shape and got.is_contiguous()
    assert_close_rms("output", want if gate is None else sigmoid_mul_ref(want, gate).view_as(q), got, 1e-6)  # f32


def test_other_formats_other_dtypes_and_long_streams_do_not_suit() -> None:
    q, pool = torch.randn(1, 2, D), torch.randn(N, P, D)
    scaled = Fp8Pages(torch.zeros(N, P, D, dtype=torch.uint8), torch.ones(N, P))
    assert suits_even(q, pool, pool, KEY_TILE)
    assert not suits_even(q, pool, pool, KEY_TILE + 1)
    assert not suits_even(q, scaled, scaled, 5)
    assert not suits_even(q, pool.bfloat16(), pool.bfloat16(), 5)
    assert not suits_even(q.bfloat16(), pool, pool, 5)
