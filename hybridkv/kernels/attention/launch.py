"""What the launchers of attention kernels share: pages, page tables and lengths as kernel arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridkv.kernels.backend import triton
from hybridkv.kernels.formats.kv_format import Pages, format_of, stored_tensors


def dot_dtype(q: Tensor, pool: Pages) -> torch.dtype:
    """The dtype of the factors of dot products; sums are f32.

    Queries keep their dtype where it holds every stored value: bf16 over bf16 or FP8 pages. All else runs in f32.
    """
    return q.dtype if q.dtype == format_of(pool).dot_dtype else torch.float32


def kernel_pages(k_pool: Pages, v_pool: Pages) -> dict[str, Any]:
    """The arguments by which a kernel reads two pools of one shape and format."""
    (k, k_scale), (v, v_scale) = stored_tensors(k_pool), stored_tensors(v_pool)
    assert format_of(k_pool) is format_of(v_pool)
    if k_scale is not None and v_scale is not None:
        assert k_scale.stride() == v_scale.stride() and k_scale.stride(1) == 1
    assert k.shape == v.shape and k.stride() == v.stride() and k.stride(2) == 1
    return dict(
        k_pool=k,
        v_pool=v,
        k_scale=k_scale,
        v_scale=v_scale,
        stride_page=k.stride(0),
        stride_entry=k.stride(1),
        stride_scale=0 if k_scale is None else k_scale.stride(0),
        P=k.shape[1],
        D=k.shape[2],
        BD=max(16, triton.next_power_of_2(k.shape[2])),
        FP8=format_of(k_pool).quantised,
    )


def kernel_targets(k_pool: Pages, v_pool: Pages, D: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a kernel writes: values of keys, values of values, scales of keys, scales of values.

    Without scales the values stand in their places: a kernel needs a tensor there, which it then never touches.
    """
    (k, k_scale), (v, v_scale) = stored_tensors(k_pool), stored_tensors(v_pool)
    assert format_of(k_pool) is format_of(v_pool) and k.shape[-1] == v.shape[-1] == D
    targets = k, v, k if k_scale is None else k_scale, v if v_scale is None else v_scale
    assert all(x.is_contiguous() for x in targets)
    return targets


def kernel_streams(table: Tensor, lengths: Tensor) -> dict[str, Any]:
    """The arguments by which a kernel finds streams: table [B or slots, G, N], lengths [B, G] on the device."""
    assert table.stride(2) == 1
    return dict(
        table=table,
        lengths=lengths,
        stride_table_b=table.stride(0),
        stride_table_g=table.stride(1),
        stride_length_b=lengths.stride(0),
        stride_length_g=lengths.stride(1),
    )
