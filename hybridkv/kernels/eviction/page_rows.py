"""load_rows: entries of a stream out of its pages, widened, inside a Triton kernel."""

from __future__ import annotations

from hybridkv.kernels.backend import tl, triton


@triton.jit
def load_rows(
    pool,  # [N, P, D], FP8 as uint8
    scale,  # [N, P] f32, read with FP8 only
    table,  # [N] pages of the stream
    first,  # a multiple of BN
    length,  # of the stream
    L,  # up to which the table has pages
    D, stride_tn,
    P: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Numbers [BN, BD] f32 of entries from `first` on as they are stored, 0 where there is no entry, and [BN] what each
    entry's are multiplied by: once for an entry is enough.

    The page is asked for before the stream's length is known: there is a number in the table, if not of a page.
    """
    o_n, o_d = first + tl.arange(0, BN), tl.arange(0, BD)
    if P % BN == 0:  # all of them lie in one page: one address for all
        page = tl.load(table + (first // P) * stride_tn, mask=first < L, other=0).to(tl.int64)
        page = tl.where(first < length, page, 0)
        pool += (page * P + first % P) * D
        scale += page * P + first % P
        o_row = tl.arange(0, BN)
    else:
        b_page = tl.load(table + (o_n // P) * stride_tn, mask=o_n < L, other=0).to(tl.int64)
        o_row = tl.where(o_n < length, b_page, 0) * P + o_n % P
    m_n = o_n < length
    b_x = tl.load(pool + o_row[:, None] * D + o_d, mask=m_n[:, None] & (o_d < D), other=0)
    b_scale = tl.full([BN], 1.0, tl.float32)
    if FP8:
        b_x = b_x.to(tl.float8e4nv, bitcast=True)
        b_scale = tl.load(scale + o_row, mask=m_n, other=0.0)
    return b_x.to(tl.float32), b_scale
