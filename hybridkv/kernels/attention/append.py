"""append: this step's keys and values into their pages.

Every new entry has a flat index `page * P + offset`, worked out once a step for all layers; -1 marks a row of padding,
which is not stored, whatever it holds. Storage rounding happens here (round to nearest even into the pool's dtype, or
FP8 codes and their scale), so attention always reads what was stored.

The kernel writes keys and values in one launch: a program takes a block of tokens of one head of either.
"""

from __future__ import annotations

from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.formats.fp8 import fp8_encode_tile
from hybridkv.kernels.formats.kv_format import Pages, format_of, page_tensors, stored_tensors

BLOCK_VALUES = 2048  # of a tile at most
BLOCK_TOKENS = 8  # of a tile at most


def append_ref(
    k_pool: Pages,  # [N, P, D]
    v_pool: Pages,  # [N, P, D]
    k: Tensor,  # [T, G, D]
    v: Tensor,  # [T, G, D]
    entry_index: Tensor,  # [G, T] int64, all different; -1: not stored
) -> None:
    stored = entry_index >= 0
    every = bool(stored.all())
    index = entry_index if every else entry_index[stored]
    for pool, rows in ((k_pool, k.transpose(0, 1)), (v_pool, v.transpose(0, 1))):  # [G, T, D]
        new = rows if every else rows[stored]
        for tensor, encoded in zip(page_tensors(pool), format_of(pool).encode(new), strict=True):
            tensor.view(-1, *tensor.shape[2:])[index] = encoded


@triton.jit
def append_tile(x, pool, scale, o_e, o_x, o_d, D, FP8: tl.constexpr):
    m_e = o_e >= 0
    m_x = m_e[:, None] & (o_d < D)
    b_x = tl.load(x + o_x, mask=m_x, other=0.0)
    o_p = o_e[:, None] * D + o_d
    if FP8:
        b_code, b_scale = fp8_encode_tile(b_x.to(tl.float32))
        tl.store(pool + o_p, b_code, mask=m_x)
        tl.store(scale + o_e, b_scale, mask=m_e)
    else:
        tl.store(pool + o_p, b_x.to(pool.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize=["T"])
def append_kernel(
    k, v, k_pool, v_pool, k_scale, v_scale, entry_index, T, D,
    stride_kt, stride_kg, stride_kd, stride_vt, stride_vg, stride_vd, stride_eg, stride_et,
    BT: tl.constexpr, BD: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    i_g = tl.program_id(1).to(tl.int64)
    o_t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    o_d = tl.arange(0, BD)
    o_e = tl.load(entry_index + i_g * stride_eg + o_t * stride_et, mask=o_t < T, other=-1)
    if tl.program_id(2) == 0:
        o_k = i_g * stride_kg + o_t[:, None] * stride_kt + o_d * stride_kd
        append_tile(k, k_pool, k_scale, o_e, o_k, o_d, D, FP8)
    else:
        o_v = i_g * stride_vg + o_t[:, None] * stride_vt + o_d * stride_vd
        append_tile(v, v_pool, v_scale, o_e, o_v, o_d, D, FP8)


def kernel_targets(k_pool: Pages, v_pool: Pages, D: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a kernel writes: values of keys, values of values, scales of keys, scales of values.

    Without scales the values stand in their places: a kernel needs a tensor there, which it then never touches.
    """
    (k, k_scale), (v, v_scale) = stored_tensors(k_pool), stored_tensors(v_pool)
    assert format_of(k_pool) is format_of(v_pool) and k.shape[-1] == v.shape[-1] == D
    targets = k, v, k if k_scale is None else k_scale, v if v_scale is None else v_scale
    assert all(x.is_contiguous() for x in targets)
    return targets


def append_triton(
    k_pool: Pages,
    v_pool: Pages,
    k: Tensor,
    v: Tensor,
    entry_index: Tensor,
) -> None:
    T, G, D = k.shape
    assert v.shape == k.shape and entry_index.shape == (G, T)
    if not k.numel():
        return
    columns = triton.next_power_of_2(D)
    rows = max(1, min(BLOCK_TOKENS, BLOCK_VALUES // columns))
    append_kernel[(triton.cdiv(T, rows), G, 2)](
        k, v, *kernel_targets(k_pool, v_pool, D), entry_index, T, D,
        *k.stride(), *v.stride(), *entry_index.stride(),
        BT=rows, BD=columns, FP8=format_of(k_pool).quantised, num_warps=min(4, rows),
    )  # fmt: skip


def append(k_pool: Pages, v_pool: Pages, k: Tensor, v: Tensor, entry_index: Tensor) -> None:
    """Store k and v [T, G, D] at the flat places entry_index [G, T] of pools [N, P, D]."""
    form = append_triton if use_triton(k) else append_ref
    form(k_pool, v_pool, k, v, entry_index)
