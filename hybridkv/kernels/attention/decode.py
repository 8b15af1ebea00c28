"""attention_decode: one query for each request over its pages, split along the keys.

The torch form runs all requests together. A tile of keys is read for the requests that reach it; streams that end
inside the tile are masked. The tile is the only copy made, so the workspace does not grow with the context.

The Triton form (decode_kernel.py, tuned in decode_tuning.py) has a fixed number of programs, whatever the lengths, and
gives each the same number of keys. So one long request among short ones is shared by all programs, and one graph can be
captured for each batch size (two for few requests with FP8 keys: for short streams and for all). The price: the last
bits of a request's result depend on the other requests. In attention_exact they do not.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hybridkv.kernels.activation import sigmoid_mul_ref
from hybridkv.kernels.attention.decode_kernel import attention_decode_kernel, join_parts_kernel
from hybridkv.kernels.attention.decode_tuning import DecodeShape, decode_shape, join_shape
from hybridkv.kernels.attention.launch import dot_dtype, kernel_pages, kernel_streams
from hybridkv.kernels.attention.prefill import attention_prefill_ref
from hybridkv.kernels.attention.tile import (
    KEY_TILE,
    LOG2_E,
    TRITON_DTYPE,
    LseOut,
    TileSum,
    read_both,
    store_lse,
    tile_attention,
)
from hybridkv.kernels.backend import LARGE_SHARED_MEMORY, has_pdl, shared_memory, sm_count, triton, use_triton
from hybridkv.kernels.formats.kv_format import Pages, stored_values
from hybridkv.kernels.overlap import MANY_TOKENS, can_overlap


def attention_decode_ref(
    q: Tensor, k_pool: Pages, v_pool: Pages, table: Tensor, lengths: np.ndarray, scale: float
) -> Tensor:
    """The definition: a prefill of one token for each request."""
    return attention_prefill_ref(q, k_pool, v_pool, table, lengths, list(range(len(q) + 1)), scale)


def attention_decode_torch(
    q: Tensor,
    k_pool: Pages,
    v_pool: Pages,
    table: Tensor,
    lengths: np.ndarray | None,
    scale: float,
    device_lengths: Tensor | None = None,
    key_tile: int = KEY_TILE,
    rows: Tensor | None = None,
    lse: LseOut | None = None,
    gate: Tensor | None = None,
    given: Tensor | None = None,
) -> Tensor:
    if lengths is None:
        assert device_lengths is not None, "attention_decode needs the lengths on the host or on the device"
        lengths = device_lengths.cpu().numpy()
    B, G = lengths.shape
    if not B:
        return torch.empty_like(q) if given is None else given
    ends = torch.from_numpy(lengths).to(q.device) if device_lengths is None else device_lengths
    slots = None if rows is None else rows.tolist()
    if slots is not None and min(slots) < 0:  # padding
        lengths = np.where(np.array(slots)[:, None] < 0, 0, lengths)
        ends = torch.from_numpy(lengths).to(q.device)
    held = lengths.ravel().tolist()  # of a few numbers: numpy's reductions take longer
    most = max(held)
    if slots is not None:
        n = max(-(-most // stored_values(k_pool).shape[1]), 1)
        table = table[slots[0]].narrow(1, 0, n).unsqueeze(0) if B == 1 else table[rows, :, :n]
    heads = q.view(B, G, -1, q.shape[-1])  # [B, G, H/G, D]
    if most <= key_tile:
        out, sums = _tile(heads, k_pool, v_pool, table, min(held), ends, 0, max(most, 1), scale)
    else:
        longest = lengths.max(axis=1)
        out = torch.empty_like(heads)
        sums = torch.empty(heads.shape[:3], dtype=torch.float32, device=q.device)
        # requests with the same number of tiles run together
        tiles = np.maximum(-(-longest // key_tile), 1)
        for count in np.unique(tiles).tolist():
            same = tiles == count
            at = torch.from_numpy(same).to(q.device)
            total = TileSum()
            for start in range(0, count * key_tile, key_tile):
                stop = min(start + key_tile, max(int(longest[same].max()), 1))
                least = int(lengths[same].min())
                total.add(*_tile(heads[at], k_pool, v_pool, table[at], least, ends[at], start, stop, scale))
            assert total.lse is not None
            out[at], sums[at] = total.result(q.dtype), total.lse.float()
    if lse is not None:
        store_lse(sums.float().reshape(q.shape[:2]), lse)
    out = out.reshape(q.shape)
    out = out if gate is None else sigmoid_mul_ref(out, gate).view_as(q)
    return out if given is None else given.copy_(out)


def _tile(
    q: Tensor,
    k_pool: Pages,
    v_pool: Pages,
    table: Tensor,
    shortest: int,
    ends: Tensor,
    start: int,
    stop: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    visible = None
    if shortest < stop:
        visible = torch.arange(start, stop, device=q.device) < ends[:, :, None, None]  # [B, G, 1, tile]
    k, v = read_both(k_pool, v_pool, table, start, stop, visible is None)
    return tile_attention(q, k, v, scale, visible=visible)


def even(*xs: Tensor) -> bool:
    """Whether pairs of neighbouring numbers can be read as one word, in every tensor."""
    return all(n % 2 == 0 for x in xs for n in (x.storage_offset(), x.shape[-1], *x.stride()[:-1]))


def on_gpu(q: Tensor) -> bool:
    """Whether the kernels are compiled: the interpreter has no machine instructions."""
    return q.is_cuda


def attention_decode_triton(
    q: Tensor,
    k_pool: Pages,
    v_pool: Pages,
    table: Tensor,
    lengths: np.ndarray | None,  # not needed where device_lengths is given
    scale: float,
    device_lengths: Tensor | None = None,
    rows: Tensor | None = None,
    lse: LseOut | None = None,
    gate: Tensor | None = None,
    keys: int | None = None,
    shape: DecodeShape | None = None,
    out: Tensor | None = None,
) -> Tensor:
    B, H, D = q.shape
    G = table.shape[1]
    pages = kernel_pages(k_pool, v_pool)
    out = torch.empty((B, H, D), dtype=q.dtype, device=q.device) if out is None else out
    assert out.is_contiguous()
    if B == 0:
        return out
    if device_lengths is None:
        assert lengths is not None, "attention_decode needs the lengths on the host or on the device"
        device_lengths = torch.from_numpy(lengths).to(q.device)
    dot = dot_dtype(q, k_pool)
    assert q.stride(2) == 1
    streams = kernel_streams(table, device_lengths)
    pairs = pages["FP8"] and dot == torch.bfloat16 and pages["BD"] >= 32 and even(q, pages["k_pool"], pages["v_pool"])
    if pairs:  # two FP8 values, or two numbers of a query, in one word
        k, v = (pages[name].view(torch.int16) for name in ("k_pool", "v_pool"))
        pages.update(k_pool=k, v_pool=v, stride_page=k.stride(0), stride_entry=k.stride(1))
        q = q.view(torch.int32)
    keys = table.shape[2] * pages["P"] if keys is None else keys
    room = shared_memory(q.device) >= LARGE_SHARED_MEMORY
    shape = shape or decode_shape(B, D, dot, pairs, keys, H // G, room)
    programs = sm_count(q.device) * shape.programs
    early = can_overlap(q, MANY_TOKENS)
    join = join_shape(B, pages["BD"], programs // (B * G))
    part = torch.empty((B * G + programs, H // G, D), dtype=torch.float32, device=q.device)
    shared = dict(
        part=part,
        lse=torch.empty(part.shape[:2], dtype=torch.float32, device=q.device),
        parts=torch.empty((B * G, 2), dtype=torch.int32, device=q.device),
        rows=rows,
        G=G,
        GROUP=H // G,
        OVERLAP=has_pdl(q.device),
    )
    attention_decode_kernel[programs,](
        q=q,
        scale=scale * LOG2_E,
        B=B,
        stride_q_b=q.stride(0),
        stride_q_h=q.stride(1),
        BM=max(16, triton.next_power_of_2(H // G)),  # the tensor cores take 16 rows or more
        BN=shape.keys,
        BS=max(32, triton.next_power_of_2(B * G)),
        DOT=TRITON_DTYPE[dot],
        PAIRS=pairs,
        LEAST=shape.least,
        GPU=on_gpu(q),
        EARLY=early,
        launch_pdl=early,
        num_warps=shape.warps,
        num_stages=shape.stages,
        maxnreg=shape.registers,
        **pages,
        **streams,
        **shared,
    )
    kept, index = lse or (None, None)
    if gate is not None:
        assert gate.shape == out.shape and gate.dtype == out.dtype and gate.stride(2) == 1
    join_parts_kernel[H, B, -(-D // join.channels)](
        lengths=device_lengths,
        stride_length_b=device_lengths.stride(0),
        stride_length_g=device_lengths.stride(1),
        gate=gate,
        out=out,
        lse_out=kept,
        lse_index=index,
        stride_gate_b=0 if gate is None else gate.stride(0),
        stride_gate_h=0 if gate is None else gate.stride(1),
        stride_lse=0 if kept is None else kept.stride(0),
        D=D,
        BD=join.channels,
        BR=join.parts,
        num_warps=join.warps,
        launch_pdl=has_pdl(q.device),
        **shared,
    )
    return out


def attention_decode(
    q: Tensor,  # [B, H, D]
    k_pool: Pages,  # [N, P, D]
    v_pool: Pages,  # [N, P, D]
    table: Tensor,  # [B, G, N] page ids, -1 past the end; with `rows` it is [slots, G, N]
    lengths: np.ndarray | None,  # [B, G] entries held, the new one included; None: device_lengths has them
    scale: float,
    device_lengths: Tensor | None = None,  # [B, G] the same lengths on q's device, where the caller has them there
    key_tile: int = KEY_TILE,  # of the torch form
    rows: Tensor | None = None,  # [B] int64, each request's row of the table; -1: padding, which gives zeros
    lse: LseOut | None = None,  # where natural log-sum-exps go
    gate: Tensor | None = None,  # [B, H, D] in q's dtype: the rounded result is multiplied by its sigmoid
    keys: int | None = None,  # the largest number that a stream holds; None: what the table has room for. Launch tuning
    out: Tensor | None = None,  # [B, H, D] where results go
) -> Tensor:
    """Attention of each request's one query over all that its streams hold -> [B, H, D]."""
    if use_triton(q):
        return attention_decode_triton(
            q, k_pool, v_pool, table, lengths, scale, device_lengths, rows, lse, gate, keys, out=out
        )
    return attention_decode_torch(
        q, k_pool, v_pool, table, lengths, scale, device_lengths, key_tile, rows, lse, gate, out
    )
