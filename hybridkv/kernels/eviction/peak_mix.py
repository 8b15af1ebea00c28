"""What a stream looks at, what others look at, and what stands out, in one score: the elementwise half of policy peak.

raise_strongest   of each token's position the strongest peak of any stream, times how much that stream copies
mix_peaks         strength * the larger of a stream's own peak and that, plus the entry's standing; times the norm of
                  its value, relative to the stream's mean; times what the stream weighs

A NaN stays in its own stream, and is never hidden there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton

BLOCK = 1024  # entries of a program
STREAMS = 8  # whose peaks a program of raise_strongest compares
SMALLEST = 1e-20  # of a mean norm: below it nothing is weighted


def raise_strongest_ref(found: Tensor, peaks: Tensor, positions: Tensor, weights: Tensor | None) -> None:
    weighted = peaks if weights is None else peaks * weights[:, None]
    weighted = weighted.masked_fill((positions < 0) | weighted.isnan(), 0)
    found.scatter_reduce_(0, positions.clamp(min=0).flatten(), weighted.flatten(), "amax")


@triton.jit(do_not_specialize=["L", "G"])
def raise_strongest_kernel(
    found,  # [tokens] f32 from 0 on, as int32, which has their order
    peaks,  # [G, L] f32 from 0 on
    positions,  # [G, L]; -1 past a stream's length
    weights,  # [G] f32, or None
    L, G, stride_pg, stride_pl,
    SAME: tl.constexpr,  # entries of all streams have the same positions
    STREAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    o_l = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_most, b_at = tl.zeros([BLOCK], tl.float32), tl.full([BLOCK], -1, tl.int64)
    for i in range(STREAMS):
        i_g = (tl.program_id(1) * STREAMS + i).to(tl.int64)
        m_l = (o_l < L) & (i_g < G)
        b_at = tl.load(positions + i_g * stride_pg + o_l * stride_pl, mask=o_l < L if SAME else m_l, other=-1)
        b_x = tl.load(peaks + i_g * L + o_l, mask=m_l, other=0.0)
        if weights is not None:
            b_x *= tl.load(weights + i_g, mask=i_g < G, other=0.0)
        if SAME:
            b_most = tl.maximum(b_most, tl.where(b_x == b_x, b_x, 0.0))
        else:
            m_x = m_l & (b_at >= 0) & (b_x > 0)
            tl.atomic_max(found + b_at, b_x.to(tl.int32, bitcast=True), mask=m_x, sem="relaxed")
    if SAME:
        m_x = (b_at >= 0) & (b_most > 0)
        tl.atomic_max(found + b_at, b_most.to(tl.int32, bitcast=True), mask=m_x, sem="relaxed")


def raise_strongest_triton(found: Tensor, peaks: Tensor, positions: Tensor, weights: Tensor | None) -> None:
    G, L = peaks.shape
    if G and L:
        raise_strongest_kernel[(triton.cdiv(L, BLOCK), triton.cdiv(G, STREAMS))](
            found.view(torch.int32), peaks.contiguous(), positions, weights, L, G, *positions.stride(),
            SAME=positions.stride(0) == 0, STREAMS=STREAMS, BLOCK=BLOCK,
        )  # fmt: skip


def raise_strongest(
    found: Tensor,  # [tokens] f32 from 0 on, raised in place
    peaks: Tensor,  # [G, L] f32 from 0 on; past a stream's length anything
    positions: Tensor,  # [G, L] of each entry; -1 past a stream's length
    weights: Tensor | None,  # [G] f32 above 0
) -> None:
    """Raise `found` at each position to the strongest peak there, times the weight of its stream. NaN is left out."""
    form = raise_strongest_triton if use_triton(peaks) else raise_strongest_ref
    form(found, peaks, positions, weights)


def mix_peaks_ref(
    peaks: Tensor,
    positions: Tensor,
    looked_at: Tensor | None,
    standing: Tensor,
    strength: float,
    norms: Tensor | None,
    lengths: Tensor,
    plain: Tensor | None,
    factors: Tensor | None,
) -> Tensor:
    if looked_at is not None:
        peaks = torch.maximum(peaks, looked_at[positions.clamp(min=0)])
    scores = strength * peaks + standing
    if norms is not None:
        norms = norms / (norms.sum(1, keepdim=True) / lengths[:, None].clamp(min=1)).clamp(min=SMALLEST)
        if plain is not None:
            norms = norms.masked_fill(plain[:, None] & ~norms.isnan(), 1)
        scores = scores * norms
    return scores if factors is None else scores * factors[:, None]


@triton.jit(do_not_specialize=["L"])
def mix_peaks_kernel(
    peaks, positions, looked_at, standing, norms,
    totals,  # [G] f32: sums of the norms
    lengths, plain, factors, out, L, strength, smallest, stride_pg, stride_pl,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i_g = tl.program_id(1).to(tl.int64)
    o_l = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_l, o_x = o_l < L, i_g * L + o_l
    b_x = tl.load(peaks + o_x, mask=m_l, other=0.0)
    if looked_at is not None:
        b_at = tl.load(positions + i_g * stride_pg + o_l * stride_pl, mask=m_l, other=0)
        b_far = tl.load(looked_at + tl.maximum(b_at, 0), mask=m_l, other=0.0)
        b_x = tl.maximum(b_x, b_far, propagate_nan=tl.PropagateNan.ALL)
    b_x = strength * b_x + tl.load(standing + o_x, mask=m_l, other=0.0)
    if norms is not None:
        mean = tl.load(totals + i_g) / tl.maximum(tl.load(lengths + i_g), 1).to(tl.float32)
        mean = tl.maximum(mean, smallest, propagate_nan=tl.PropagateNan.ALL)
        b_norm = tl.load(norms + o_x, mask=m_l, other=0.0) / mean
        if plain is not None:
            b_norm = tl.where((tl.load(plain + i_g) != 0) & (b_norm == b_norm), 1.0, b_norm)
        b_x *= b_norm
    if factors is not None:
        b_x *= tl.load(factors + i_g)
    tl.store(out + o_x, b_x, mask=m_l)


def mix_peaks_triton(
    peaks: Tensor,
    positions: Tensor,
    looked_at: Tensor | None,
    standing: Tensor,
    strength: float,
    norms: Tensor | None,
    lengths: Tensor,
    plain: Tensor | None,
    factors: Tensor | None,
) -> Tensor:
    (G, L), peaks = peaks.shape, peaks.contiguous()
    out = torch.empty_like(peaks)
    if G and L:
        totals = None if norms is None else norms.sum(1)
        mix_peaks_kernel[(triton.cdiv(L, BLOCK), G)](
            peaks, positions, looked_at, standing.contiguous(), norms, totals, lengths, plain, factors, out, L,
            float(strength), SMALLEST, *positions.stride(), BLOCK=BLOCK,
        )  # fmt: skip
    return out


def mix_peaks(
    peaks: Tensor,  # [G, L] f32
    positions: Tensor,  # [G, L] of each entry; -1 past a stream's length
    looked_at: Tensor | None,  # [tokens] f32: of each position what any stream pays to it
    standing: Tensor,  # [G, L] f32
    strength: float,
    norms: Tensor | None,  # [G, L] f32 of the values, 0 past a stream's length
    lengths: Tensor,  # [G] int64
    plain: Tensor | None,  # [G] bool: streams in which norms do not count
    factors: Tensor | None,  # [G] f32: what each stream weighs
) -> Tensor:
    """Scores [G, L] f32; past a stream's length anything."""
    form = mix_peaks_triton if use_triton(peaks) else mix_peaks_ref
    return form(peaks, positions, looked_at, standing, strength, norms, lengths, plain, factors)
