"""load_rows: entries of a stream out of its pages, widened, inside a Triton kernel."""

from __future__ import annotations

from hybridkv.kernels.backend import tl, triton


@triton.jit
def load_rows(
    pool,  # [N, P, D], FP8 as uint8
    scale,  # [N, P] f32, read with FP8 only
    table,  # [N] pages of the stream
    o_n,  # [BN] entries
    m_n,  # [BN] which of them there are
    D, stride_tn,
    P: tl.constexpr, BD: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Numbers [BN, BD] f32 as they are stored, 0 where there is no entry, and [BN] what each entry's are multiplied by:
    once for an entry is enough.
    """
    o_d = tl.arange(0, BD)
    b_page = tl.load(table + (o_n // P) * stride_tn, mask=m_n, other=0).to(tl.int64)
    o_row = b_page * P + o_n % P
    b_x = tl.load(pool + o_row[:, None] * D + o_d, mask=m_n[:, None] & (o_d < D), other=0)
    b_scale = tl.full(o_n.shape, 1.0, tl.float32)
    if FP8:
        b_x = b_x.to(tl.float8e4nv, bitcast=True)
        b_scale = tl.load(scale + o_row, mask=m_n, other=0.0)
    return b_x.to(tl.float32), b_scale
