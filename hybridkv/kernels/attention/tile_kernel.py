"""attend_tile: one tile of keys out of the pages, joined to the running result of a block of query rows, in Triton.

The kernels of attention_prefill and attention_exact share it; attention_decode has loops of its own (decode_kernel.py).
A row's numbers come from that row and from fixed block sizes alone: tiles are counted from entry 0, and a tile that a
row does not see leaves its result as it was.
"""

from __future__ import annotations

from hybridkv.kernels.backend import tl, triton


@triton.jit
def attend_tile(
    b_q,  # [BM, BD] in the dtype of the dot products
    b_seen,  # [BM] how many entries each row sees
    b_m,  # [BM] running largest score, as a power of two
    b_z,  # [BM] running sum of weights
    b_o,  # [BM, BD] running sum of weighted values
    i_n,  # the tile's first entry
    end,  # entries of the stream that may be read
    p_table,  # the stream's row of the page table
    k_pool,
    v_pool,
    k_scale,
    v_scale,
    stride_page,
    stride_entry,
    stride_scale,
    scale,  # times log2(e)
    P: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    FP8: tl.constexpr,
):
    o_n = i_n + tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    m_n = o_n < end
    if P % BN == 0:  # the whole tile lies in one page
        b_page = tl.load(p_table + i_n // P).to(tl.int64)
    else:
        b_page = tl.load(p_table + o_n // P, mask=m_n, other=0).to(tl.int64)  # [BN]
    o_entry = b_page * stride_page + (o_n % P) * stride_entry  # [BN]
    o_kv = o_entry[:, None] + o_d[None, :]  # [BN, BD]
    o_scale = b_page * stride_scale + o_n % P
    m_kv = m_n[:, None] & (o_d[None, :] < D)

    b_k = tl.load(k_pool + o_kv, mask=m_kv, other=0)
    b_v = tl.load(v_pool + o_kv, mask=m_kv, other=0)
    if FP8:
        b_k = b_k.to(tl.float8e4nv, bitcast=True)
        b_v = b_v.to(tl.float8e4nv, bitcast=True)
    b_s = tl.dot(b_q, tl.trans(b_k.to(b_q.dtype)), input_precision="ieee") * scale  # [BM, BN]
    if FP8:
        b_s *= tl.load(k_scale + o_scale, mask=m_n, other=0)[None, :]
    b_s = tl.where(o_n[None, :] < b_seen[:, None], b_s, float("-inf"))

    b_top = tl.maximum(b_m, tl.max(b_s, 1))
    b_base = tl.where(b_top == float("-inf"), 0.0, b_top)  # a row that sees nothing yet: weights 0, not NaN
    b_p = tl.exp2(b_s - b_base[:, None])
    b_keep = tl.exp2(b_m - b_base)
    b_z = b_z * b_keep + tl.sum(b_p, 1)
    if FP8:
        b_p *= tl.load(v_scale + o_scale, mask=m_n, other=0)[None, :]
    b_o = b_o * b_keep[:, None] + tl.dot(b_p.to(b_q.dtype), b_v.to(b_q.dtype), input_precision="ieee")
    return b_top, b_z, b_o
