"""append: this step's keys and values into their pages.

Every new entry has a flat index `page * P + offset`, computed once a step for all layers. -1 marks a row of padding,
which is not stored, whatever it holds. Storing rounds (to nearest even into the pool's dtype, or to FP8 values and
their scale), so attention always reads what was stored.

The kernel writes keys and values in one launch: a program takes a block of tokens of one head, keys or values.
"""

from __future__ import annotations

from torch import Tensor

from hybridkv.kernels.attention.launch import kernel_targets
from hybridkv.kernels.backend import tl, triton, use_triton
from hybridkv.kernels.formats.kv_format import Pages, format_of, page_tensors
from hybridkv.kernels.formats.kv_tiles import store_entries

BLOCK_VALUES = 2048  # values in a program's tile at most
BLOCK_TOKENS = 8  # tokens in a program's tile at most


def append_ref(
    k_pool: Pages, v_pool: Pages, k: Tensor, v: Tensor, entry_index: Tensor, all_stored: bool = False
) -> None:
    """`all_stored`: no entry index is -1, which is asked here otherwise."""
    every = all_stored or entry_index.numel() == 0 or int(entry_index.min()) >= 0
    stored = None if every else entry_index >= 0
    index = entry_index.reshape(-1) if stored is None else entry_index[stored]
    for pool, rows in ((k_pool, k.transpose(0, 1)), (v_pool, v.transpose(0, 1))):  # [G, T, D]
        new = rows.flatten(0, 1) if stored is None else rows[stored]
        for tensor, encoded in zip(page_tensors(pool), format_of(pool).encode(new), strict=True):
            tensor.view(-1, *tensor.shape[2:]).index_copy_(0, index, encoded)


@triton.jit
def append_tile(x, pool, scale, o_e, o_x, o_d, D, FP8: tl.constexpr):
    """Numbers at o_x [BT, BD] of x to the entries o_e [BT] of a pool."""
    m_x = (o_e >= 0)[:, None] & (o_d < D)
    store_entries(tl.load(x + o_x, mask=m_x, other=0.0), pool, scale, o_e, D, FP8)


@triton.jit(do_not_specialize=["T", "stride_eg"])
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


def append_triton(k_pool: Pages, v_pool: Pages, k: Tensor, v: Tensor, entry_index: Tensor) -> None:
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


def append(
    k_pool: Pages,  # [N, P, D]
    v_pool: Pages,  # [N, P, D]
    k: Tensor,  # [T, G, D]
    v: Tensor,  # [T, G, D]
    entry_index: Tensor,  # [G, T] int64 flat places in the pools, all different; -1: not stored
) -> None:
    """Store this step's keys and values."""
    form = append_triton if use_triton(k) else append_ref
    form(k_pool, v_pool, k, v, entry_index)
