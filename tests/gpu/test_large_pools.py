"""append, compact and window_scores in pools past 2^31 elements."""

from typing import Any

import pytest
import torch
from numerics import assert_same_bytes

from gpu.page_pools import D, P, copy_like
from hybridkv.kernels.attention.append import append
from hybridkv.kernels.eviction.compact import compact_triton
from hybridkv.kernels.eviction.score import window_scores_triton
from hybridkv.kernels.formats.fp8 import Fp8Pages, fp8_encode_ref

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_the_gpu")]


@pytest.mark.parametrize("kind", ("bf16", "fp8"))
def test_pools_past_two_to_the_31_elements(kind: str) -> None:
    """Entries near both ends of a pool of 2.3e9 elements: stored, moved, scored."""
    N = 140_000
    assert N * P * D > 2**31
    if kind == "fp8":
        pages: Any = Fp8Pages(torch.zeros(N, P, D, dtype=torch.uint8), torch.zeros(N, P))
    else:
        pages = torch.zeros(N, P, D, dtype=torch.bfloat16)
    values = pages.values if kind == "fp8" else pages
    order = torch.tensor([N - 1, 2, N - 3, 131072, 131071, 7, N - 9, 3])  # 8 pages, two streams
    table, L, T = order.view(2, 4).int(), 4 * P, 4 * P
    e = torch.arange(L)
    index = table.long()[:, e // P] * P + e % P
    k = torch.randn(T, 2, D).to(torch.bfloat16)
    append(pages, copy_like(pages), k, k, index)
    flat = values.view(-1, D)
    if kind == "fp8":
        codes, scale = fp8_encode_ref(k.transpose(0, 1))
        assert_same_bytes(flat[index], codes)
        assert_same_bytes(pages.scale.view(-1)[index], scale)
    else:
        assert_same_bytes(flat[index], k.transpose(0, 1).contiguous())
    assert int((values.view(N, -1) != 0).any(-1).sum()) == 8  # no other page was touched

    q, when = torch.randn(16, 4, D).to(torch.bfloat16), torch.arange(L - 16, L)
    small_table = torch.arange(8).view(2, 4).int()
    pick = order.long()
    small = Fp8Pages(pages.values[pick], pages.scale[pick]) if kind == "fp8" else pages[pick]
    positions = e.repeat(2, 1)
    want = window_scores_triton(q, when, small, small_table, positions, D**-0.5)
    assert_same_bytes(want, window_scores_triton(q, when, pages, table, positions, D**-0.5))

    source, target = index[:, ::3].reshape(-1), index[:, : -(-L // 3)].reshape(-1)
    for t in list(pages) if kind == "fp8" else [pages]:
        entries = t.view(-1, *t.shape[2:])
        moved = entries[source].clone()
        compact_triton([t], source, target)
        assert_same_bytes(entries[target], moved)
    assert int((values.view(N, -1) != 0).any(-1).sum()) == 8
