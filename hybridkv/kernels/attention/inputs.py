"""attention_inputs: all that happens between the projection of an attention layer and attention, in one launch.

    x [T, heads, D]    query | gate | query | gate | ...    key ...    value ...      (without gates: query | query ...)
                          |                                  |           |
                       norm, rope                       norm, rope       |
                          |                                  |           |
                       q [T, H, D], query buffer        pages of keys, pages of values, at entry_index

Norm and rope each round to x's dtype. Pages receive what `append` would store of the result. A token whose entry index
is -1 is not stored, and one whose row of the query buffer is -1 is not kept there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.attention.append import append_ref
from hybridkv.kernels.attention.launch import kernel_targets
from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.formats.kv_format import Pages, format_of
from hybridkv.kernels.formats.kv_tiles import store_entries
from hybridkv.kernels.norm import rms_norm, rms_norm_exact
from hybridkv.kernels.overlap import MANY_TOKENS, can_overlap, wait_for_inputs
from hybridkv.kernels.rope import rope, rope_exact

BLOCK_VALUES = 512  # values in a program's tile
BLOCK_TOKENS = 8  # tokens in a program's tile at most


def attention_inputs_ref(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pool: Pages,
    v_pool: Pages,
    entry_index: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    gated: bool,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    query_buffer: Tensor | None = None,
    query_rows: Tensor | None = None,
    exact: bool = False,
    turn: Tensor | None = None,
    all_stored: bool = False,
) -> Tensor:
    H, G = heads, kv_heads
    norm = rms_norm_exact if exact else rms_norm

    def rotate(heads: Tensor) -> Tensor:
        if exact:
            return rope_exact(heads, cos, sin)
        return rope(heads, cos, sin) if turn is None else torch.bmm(heads, turn)

    step = 2 if gated else 1  # from one query to the next
    rows = x.view(x.shape[0], step * H + 2 * G, head_dim)
    v = rows[:, step * H + G :]
    if not gated and q_norm is None and k_norm is None:
        q, k = rotate(rows[:, : H + G]).split_with_sizes([H, G], 1)
    else:
        q, k = rows[:, : step * H : step], rows[:, step * H : step * H + G]
        q, k = (t if w is None else norm(t, w, eps) for t, w in ((q, q_norm), (k, k_norm)))
        q, k = (rotate(t) for t in (q, k))
    append_ref(k_pool, v_pool, k, v, entry_index, all_stored)
    if query_buffer is not None and query_rows is not None:
        kept = query_rows >= 0
        query_buffer.view(-1, H, head_dim)[query_rows[kept]] = q[kept].to(query_buffer.dtype)
    return q


@triton.jit
def rotated_heads(p_x, p_cos, p_sin, weight, m_t, D, R, eps, NORM: tl.constexpr, BD: tl.constexpr):
    """One head of a block of tokens after norm and rope, in x's dtype. p_*: [tokens, 1] pointers."""
    o_d = tl.arange(0, BD)
    # the channel that each is rotated with: a second load of the same cache line
    o_pair = tl.where(o_d < R, o_d + R, o_d - R)
    m_d, m_r = o_d < D, o_d < 2 * R
    m_x, m_pair = m_t[:, None] & m_d[None, :], m_t[:, None] & m_r[None, :]
    b_x = tl.load(p_x + o_d[None, :], mask=m_x, other=0.0)
    b_pair = tl.load(p_x + o_pair[None, :], mask=m_pair, other=0.0)
    o_a = tl.where(o_d < R, o_d, o_d - R)
    b_cos = tl.load(p_cos + o_a[None, :], mask=m_pair, other=1.0)
    b_sin = tl.load(p_sin + o_a[None, :], mask=m_pair, other=0.0)
    dtype = b_x.dtype
    b_x, b_pair = b_x.to(tl.float32), b_pair.to(tl.float32)
    if NORM:
        b_scale = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)[:, None]
        b_x = b_x * b_scale * tl.load(weight + o_d, mask=m_d, other=0.0)[None, :]
        b_pair = b_pair * b_scale * tl.load(weight + o_pair, mask=m_r, other=0.0)[None, :]
        b_x, b_pair = b_x.to(dtype).to(tl.float32), b_pair.to(dtype).to(tl.float32)
    b_sin = tl.where((o_d < R)[None, :], -b_sin, b_sin)
    b_rotated = b_x * b_cos + b_pair * b_sin
    return tl.where(m_r[None, :], b_rotated, b_x).to(dtype)  # infinity x 0 would be NaN


@triton.jit(do_not_specialize=["T", "stride_eg"])
def attention_inputs_kernel(
    x, cos, sin, k_pool, v_pool, k_scale, v_scale, entry_index, q_norm, k_norm, q, query_buffer, query_rows,
    T, H, G, D, R, eps, stride_x, stride_cos, stride_sin, stride_eg, stride_et,
    STEP: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, KEEP: tl.constexpr, FP8: tl.constexpr,
    OVERLAP: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One head of queries, keys or values of a block of tokens."""
    i_h = tl.program_id(0) % (H + 2 * G)
    o_t = (tl.program_id(0) // (H + 2 * G)).to(tl.int64) * BT + tl.arange(0, BT)
    o_d = tl.arange(0, BD)
    m_t = o_t < T
    p_x = x + o_t[:, None] * stride_x
    p_cos, p_sin = cos + o_t[:, None] * stride_cos, sin + o_t[:, None] * stride_sin
    wait_for_inputs(OVERLAP)
    if i_h < H:
        b_q = rotated_heads(p_x + i_h * STEP * D, p_cos, p_sin, q_norm, m_t, D, R, eps, Q_NORM, BD)
        o_q = i_h * D + o_d[None, :]
        m_d = (o_d < D)[None, :]
        tl.store(q + o_t[:, None] * H * D + o_q, b_q, mask=m_t[:, None] & m_d)
        if KEEP:
            o_r = tl.load(query_rows + o_t, mask=m_t, other=-1)
            b_q = b_q.to(query_buffer.dtype.element_ty)
            tl.store(query_buffer + o_r[:, None] * H * D + o_q, b_q, mask=(o_r >= 0)[:, None] & m_d)
    else:
        i_g = (i_h - H) % G
        o_e = tl.load(entry_index + i_g * stride_eg + o_t * stride_et, mask=m_t, other=-1)
        p_x += (i_h + (STEP - 1) * H) * D
        if i_h < H + G:
            b_k = rotated_heads(p_x, p_cos, p_sin, k_norm, o_e >= 0, D, R, eps, K_NORM, BD)
            store_entries(b_k, k_pool, k_scale, o_e, D, FP8)
        else:
            b_v = tl.load(p_x + o_d[None, :], mask=(o_e >= 0)[:, None] & (o_d < D)[None, :], other=0.0)
            store_entries(b_v, v_pool, v_scale, o_e, D, FP8)


def attention_inputs_triton(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pool: Pages,
    v_pool: Pages,
    entry_index: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    gated: bool,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    query_buffer: Tensor | None = None,
    query_rows: Tensor | None = None,
    exact: bool = False,  # tiles of one size, and products that are not fused with sums: a head's bits have one way
) -> Tensor:
    T, H, G, D = len(x), heads, kv_heads, head_dim
    step = 2 if gated else 1  # from one query to the next
    assert x.shape[1] == (step * H + 2 * G) * D and entry_index.shape == (G, T)
    x, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, cos, sin))
    q = torch.empty((T, H, D), dtype=x.dtype, device=x.device)
    if query_buffer is None or query_rows is None:
        query_buffer = query_rows = None
    else:
        assert query_buffer.is_contiguous() and query_buffer.shape[-2:] == (H, D) and query_rows.shape == (T,)
        query_rows = query_rows.contiguous()
    columns = triton.next_power_of_2(D)
    rows = max(1, min(BLOCK_TOKENS, BLOCK_VALUES // columns)) if T > 1 or exact else 1
    if x.numel():
        overlap = can_overlap(x, MANY_TOKENS)
        attention_inputs_kernel[((H + 2 * G) * triton.cdiv(T, rows),)](
            x, cos, sin, *kernel_targets(k_pool, v_pool, D), entry_index,
            x if q_norm is None else q_norm, x if k_norm is None else k_norm, q,
            q if query_buffer is None else query_buffer, entry_index if query_rows is None else query_rows,
            T, H, G, D, cos.shape[-1], eps, x.stride(0), cos.stride(0), sin.stride(0), *entry_index.stride(),
            STEP=step, Q_NORM=q_norm is not None, K_NORM=k_norm is not None, KEEP=query_buffer is not None,
            FP8=format_of(k_pool).quantised, OVERLAP=overlap, BT=rows, BD=columns,
            num_warps=min(4, max(1, rows * columns // 256)), launch_pdl=overlap, enable_fp_fusion=not exact,
        )  # fmt: skip
    return q


def attention_inputs(
    x: Tensor,  # [T, (2 H + 2 G) D] with gates, [T, (H + 2 G) D] without
    cos: Tensor,  # [T, 1, R] f32
    sin: Tensor,  # [T, 1, R] f32
    k_pool: Pages,  # [N, P, D]
    v_pool: Pages,  # [N, P, D]
    entry_index: Tensor,  # [G, T] int64 flat places in the pools, all different; -1: not stored
    heads: int,
    kv_heads: int,
    head_dim: int,
    gated: bool,
    q_norm: Tensor | None = None,  # [D] f32; None: no norm
    k_norm: Tensor | None = None,  # [D] f32
    eps: float = 0.0,
    query_buffer: Tensor | None = None,  # [..., H, D]: where the last queries are kept
    query_rows: Tensor | None = None,  # [T] int64 rows of it, seen as [rows, H, D], all different; -1: not kept
    exact: bool = False,  # a token's bits depend on nothing but its own row
    turn: Tensor | None = None,  # rope_matrices of cos and sin: x is f32 on a CPU and all channels turn
    all_stored: bool = False,  # no entry index is -1: a CPU need not look
) -> Tensor:
    """Queries [T, H, D] of a projection's output after norm and rope. Its keys and values go to their pages."""
    what = x, cos, sin, k_pool, v_pool, entry_index, heads, kv_heads, head_dim, gated, q_norm, k_norm, eps
    if use_triton(x):
        return attention_inputs_triton(*what, query_buffer, query_rows, exact)
    return attention_inputs_ref(*what, query_buffer, query_rows, exact, turn, all_stored)
