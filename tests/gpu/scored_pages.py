"""Pages of keys on the GPU, and the attention that queries pay to them, by its definition."""

import torch
from torch import Tensor

from hybridkv.kernels.attention.tile import read_pages
from hybridkv.kernels.formats.fp8 import Fp8Pages, fp8_encode
from hybridkv.kernels.formats.kv_format import Pages


def keys(kind: str, lengths: list[int], P: int, D: int) -> tuple[Pages, Tensor, Tensor]:
    """Pages, table, positions; all that is no entry is NaN. Streams end at one position and differ in where."""
    held = [-(-n // P) for n in lengths]
    order, L = torch.randperm(sum(held) + 2).tolist(), max(lengths)
    pages = torch.full((len(order), P, D), torch.nan)
    table = torch.full((len(lengths), max(held) + 1), -1, dtype=torch.int32)
    positions = torch.full((len(lengths), L), -1)
    for g, n in enumerate(lengths):
        mine = torch.tensor([order.pop() for _ in range(held[g])])
        table[g, : held[g]] = mine.int()
        positions[g, :n] = torch.arange(n) + L - n
        new = torch.full((held[g] * P, D), torch.nan)
        new[:n] = torch.randn(n, D)
        pages[mine] = new.view(-1, P, D)
    if kind != "fp8":
        return pages.to(torch.float32 if kind == "f32" else torch.bfloat16), table, positions
    codes, scale = fp8_encode(pages)
    return Fp8Pages(codes, scale.masked_fill(pages.isnan().any(-1), torch.nan)), table, positions


def definition(
    q: Tensor, when: Tensor, k_pool: Pages, table: Tensor, positions: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """(weights [W, H, L], log-sum-exp [W, H]) in float64."""
    (W, H, D), (G, L) = q.shape, positions.shape
    k = read_pages(k_pool, table, 0, L).double().masked_fill(positions[..., None] < 0, 0)
    s = torch.einsum("wgrd,gld->grwl", q.double().view(W, G, -1, D), k) * scale
    hidden = (positions < 0)[:, None, None] | (positions[:, None, None] > when[:, None])
    s = s.masked_fill(hidden, -torch.inf)
    lse = s.logsumexp(-1)
    weights = (s - lse.masked_fill(lse.isneginf(), 0)[..., None]).exp()
    return weights.permute(2, 0, 1, 3).reshape(W, H, L), lse.permute(2, 0, 1).reshape(W, H)
