"""raise_kept: entries that stay for sure get a score above all others, in place. NaN stays: it is refused later."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton

BLOCK = 1024  # entries of a program
BYTES = 16 << 20  # that marking takes at once in torch


def raise_kept_ref(scores: Tensor, entries: Tensor, counts: Tensor) -> None:
    L = scores.shape[1]
    at_once, place = max(1, BYTES // (16 * max(1, L))), torch.arange(entries.shape[1], device=scores.device)
    for part, kept, n in zip(scores.split(at_once), entries.split(at_once), counts.split(at_once), strict=True):
        there = torch.zeros(len(part), L + 1, dtype=torch.bool, device=scores.device)
        there.scatter_(1, torch.where(place < n[:, None], kept, L).long(), True)  # the rest goes to an extra column
        part.masked_fill_(there[:, :L] & ~part.isnan(), torch.inf)


@triton.jit
def raise_kept_kernel(scores, entries, counts, stride_s, stride_e, BLOCK: tl.constexpr):
    i_r = tl.program_id(1).to(tl.int64)
    o_k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_k = o_k < tl.load(counts + i_r)
    p_scores = scores + i_r * stride_s + tl.load(entries + i_r * stride_e + o_k, mask=m_k, other=0)
    b_x = tl.load(p_scores, mask=m_k, other=0.0)
    tl.store(p_scores, tl.full([BLOCK], float("inf"), tl.float32), mask=m_k & (b_x == b_x))


def raise_kept_triton(scores: Tensor, entries: Tensor, counts: Tensor) -> None:
    R, K = entries.shape
    if R and K:
        raise_kept_kernel[(triton.cdiv(K, BLOCK), R)](
            scores, entries, counts, scores.stride(0), entries.stride(0), BLOCK=BLOCK
        )  # fmt: skip


def raise_kept(
    scores: Tensor,  # [R, L] f32, neighbours in a row side by side
    entries: Tensor,  # [R, K] int32; past `counts` anything
    counts: Tensor,  # [R] int64
) -> None:
    """Raise the scores of the first `counts` entries of each row to +inf, in place."""
    form = raise_kept_triton if use_triton(scores) else raise_kept_ref
    form(scores, entries, counts)
