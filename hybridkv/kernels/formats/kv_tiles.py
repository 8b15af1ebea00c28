"""Tiles of keys and values as they are stored in pages: the one place that kernels write them."""

from __future__ import annotations

from hybridkv.kernels.backend import tl, triton
from hybridkv.kernels.formats.fp8 import fp8_encode_tile


@triton.jit
def store_entries(b_x, pool, scale, o_e, D, FP8: tl.constexpr):
    """A tile b_x [rows, columns >= D] to the entries o_e [rows] of a pool; -1: not stored. Columns past D must be 0.

    pool, scale: the tensors of values and of scales; without FP8 `scale` is not touched.
    """
    m_e = o_e >= 0
    o_d = tl.arange(0, b_x.shape[1])
    m_x = m_e[:, None] & (o_d < D)[None, :]
    o_p = o_e[:, None] * D + o_d[None, :]
    if FP8:
        b_value, b_scale = fp8_encode_tile(b_x.to(tl.float32))
        tl.store(pool + o_p, b_value, mask=m_x)
        tl.store(scale + o_e, b_scale, mask=m_e)
    else:
        tl.store(pool + o_p, b_x.to(pool.dtype.element_ty), mask=m_x)
