"""attention_decode: one query per request over its pages, split along the keys.

The torch form runs all requests together. A tile of keys is read for those requests that reach it; streams shorter
than the tile's end are masked. The tile is the only copy made, so the workspace does not grow with the context.

The Triton form (attention_decode_kernel.py) has a fixed number of programs, whatever the lengths, and gives each the
same number of keys: it can be captured in a graph for a batch size (for few requests with FP8 keys in two, for short
streams and for all), and one long request among short ones is shared by all. So a request's last bits depend on who
runs beside it; attention_exact is the form where they do not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridkv.kernels.activation import sigmoid_mul_ref
from hybridkv.kernels.attention.decode_kernel import attention_decode_kernel, join_parts_kernel
from hybridkv.kernels.attention.prefill import Sink, attention_prefill_ref, keep_sums
from hybridkv.kernels.attention.tile import (
    KEY_TILE,
    LOG2_E,
    TRITON_DTYPE,
    TileSum,
    dot_dtype,
    kernel_pages,
    read_pages,
    tile_attention,
)
from hybridkv.kernels.backend import LARGE_SHARED_MEMORY, has_pdl, shared_memory, sm_count, triton, use_triton
from hybridkv.kernels.formats.fp8 import Pages
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
    lse: Sink | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    if lengths is None:
        assert device_lengths is not None, "attention_decode needs the lengths on the host or on the device"
        lengths = device_lengths.cpu().numpy()
    ends = torch.from_numpy(lengths).to(q.device) if device_lengths is None else device_lengths
    if rows is not None:
        if bool((rows < 0).any()):  # padding
            lengths = np.where(rows.cpu().numpy()[:, None] < 0, 0, lengths)
            ends = torch.from_numpy(lengths).to(q.device)
        P = k_pool.shape[1] if isinstance(k_pool, Tensor) else k_pool.codes.shape[1]
        table = table[rows, :, : -(-int(lengths.max(initial=1)) // P)]
    B, G = table.shape[:2]
    if not B:
        return torch.empty_like(q)
    heads = q.view(B, G, -1, q.shape[-1])  # [B, G, H/G, D]
    longest = lengths.max(axis=1)
    if int(longest.max(initial=0)) <= key_tile:
        stop = max(int(longest.max(initial=0)), 1)
        out, sums = _tile(heads, k_pool, v_pool, table, lengths, ends, 0, stop, scale)
    else:
        out, sums = torch.empty_like(heads), torch.empty(heads.shape[:3], dtype=torch.float32, device=q.device)
        # requests with the same number of tiles run together
        tiles = np.maximum(-(-longest // key_tile), 1)
        for count in np.unique(tiles).tolist():
            same = tiles == count
            at = torch.from_numpy(same).to(q.device)
            total = TileSum()
            for start in range(0, count * key_tile, key_tile):
                stop = min(start + key_tile, max(int(longest[same].max()), 1))
                total.add(*_tile(heads[at], k_pool, v_pool, table[at], lengths[same], ends[at], start, stop, scale))
            assert total.lse is not None
            out[at], sums[at] = total.result(q.dtype), total.lse.float()
    keep_sums(sums.float().reshape(q.shape[:2]), lse)
    out = out.reshape(q.shape)
    return out if gate is None else sigmoid_mul_ref(out, gate).view_as(q)


def _tile(
    q: Tensor,
    k_pool: Pages,
    v_pool: Pages,
    table: Tensor,
    lengths: np.ndarray,
    ends: Tensor,
    start: int,
    stop: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    visible = None
    if int(lengths.min()) < stop:
        visible = torch.arange(start, stop, device=q.device) < ends[:, :, None, None]  # [B, G, 1, tile]
    k, v = read_pages(k_pool, table, start, stop), read_pages(v_pool, table, start, stop)
    return tile_attention(q, k, v, scale, visible=visible)


class DecodeShape(NamedTuple):
    """How the kernels are launched. By head width, dtype, batch size and what the longest stream may hold."""

    keys: int  # of a tile
    warps: int
    stages: int
    programs: int  # on each multiprocessor
    least: int = 1  # tiles of a program at least
    registers: int | None = None  # of a thread at most, so that so many programs fit, and the joining ones beside them


class JoinShape(NamedTuple):
    channels: int  # of a program
    parts: int  # read at once
    warps: int


FEW = 4  # requests up to which a stream has many parts, and a program little to do
SHORT = 12288  # keys of all requests together up to which one program on each multiprocessor is the faster for FP8


def decode_shape(
    B: int, D: int, dot: torch.dtype, pairs: bool, keys: int, group: int = 1, room: bool = True
) -> DecodeShape:
    """The fastest on an H200 at D = 256, where a stream may hold so many keys. Without `room` in shared memory, or
    with many heads a KV head, less of it.
    """
    shape = _fastest_shape(B, D, dot, pairs, keys)
    if group > 32:
        return DecodeShape(32, 4, 1, 1)
    return shape if room else shape._replace(stages=min(shape.stages, 2))


def _fastest_shape(B: int, D: int, dot: torch.dtype, pairs: bool, keys: int) -> DecodeShape:
    if dot == torch.float32:
        return DecodeShape(32, 8 if D > 64 else 4, 1, 2)
    if D > 256:
        return DecodeShape(32, 4, 3, 1)
    if pairs and B > FEW:
        return DecodeShape(64, 4, 2, 3, registers=168)
    if pairs:
        return DecodeShape(64, 8, 2, 1) if B * keys <= SHORT else DecodeShape(32, 4, 3, 3, registers=168)
    return DecodeShape(64, 4, 3, 1) if B <= FEW else DecodeShape(64, 4, 2, 2)


def same_shape_up_to(B: int, keys: int, room: int, fp8: bool) -> int:
    """The most keys of a stream for which the launch is that for `keys`, where a stream has room for `room`."""
    return SHORT // B if fp8 and B <= FEW and B * keys <= SHORT < B * room else room


def join_shape(B: int, BD: int, parts: int) -> JoinShape:
    """Where a stream has about so many parts."""
    return JoinShape(min(BD, 64), 64 if parts > 16 else 32, 2) if B <= FEW else JoinShape(BD, 4, 2)


def even(*xs: Tensor) -> bool:
    """Whether two neighbours of each can be read as one."""
    return all(n % 2 == 0 for x in xs for n in (x.storage_offset(), x.shape[-1], *x.stride()[:-1]))


def on_gpu(q: Tensor) -> bool:
    """Whether the kernels are compiled; the interpreter knows no machine instructions."""
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
    lse: Sink | None = None,
    gate: Tensor | None = None,
    keys: int | None = None,
    shape: DecodeShape | None = None,
) -> Tensor:
    B, H, D = q.shape
    G = table.shape[1]
    pages = kernel_pages(k_pool, v_pool)
    out = torch.empty((B, H, D), dtype=q.dtype, device=q.device)
    if B == 0:
        return out
    if device_lengths is None:
        assert lengths is not None, "attention_decode needs the lengths on the host or on the device"
        device_lengths = torch.from_numpy(lengths).to(q.device)
    dot = dot_dtype(q, k_pool)
    assert q.stride(2) == 1 and table.stride(2) == 1
    pairs = pages["FP8"] and dot == torch.bfloat16 and pages["BD"] >= 32 and even(q, pages["k_pool"], pages["v_pool"])
    if pairs:  # two codes, or two numbers of a query, at once
        k, v = (pages[name].view(torch.int16) for name in ("k_pool", "v_pool"))
        pages.update(k_pool=k, v_pool=v, stride_page=k.stride(0), stride_entry=k.stride(1))
        q = q.view(torch.int32)
    keys = table.shape[2] * pages["P"] if keys is None else keys
    room = shared_memory(q.device) >= LARGE_SHARED_MEMORY
    shape = shape or decode_shape(B, D, dot, pairs, keys, H // G, room)
    programs, early = sm_count(q.device) * shape.programs, can_overlap(q, MANY_TOKENS)
    join = join_shape(B, pages["BD"], programs // (B * G))
    part = torch.empty((B * G + programs, H // G, D), dtype=torch.float32, device=q.device)
    shared = dict(
        part=part,
        lse=torch.empty(part.shape[:2], dtype=torch.float32, device=q.device),
        parts=torch.empty((B * G, 2), dtype=torch.int32, device=q.device),
        rows=rows,
        lengths=device_lengths,
        stride_length_b=device_lengths.stride(0),
        stride_length_g=device_lengths.stride(1),
        G=G,
        GROUP=H // G,
        OVERLAP=has_pdl(q.device),
    )
    attention_decode_kernel[programs,](
        q=q,
        table=table,
        scale=scale * LOG2_E,
        B=B,
        stride_q_b=q.stride(0),
        stride_q_h=q.stride(1),
        stride_table_b=table.stride(0),
        stride_table_g=table.stride(1),
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
        **shared,
    )
    kept, index = lse or (None, None)
    if gate is not None:
        assert gate.shape == out.shape and gate.dtype == out.dtype and gate.stride(2) == 1
    join_parts_kernel[H, B, -(-D // join.channels)](
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
    table: Tensor,  # [B, G, N] page ids, -1 past the end; with rows [slots, G, N]
    lengths: np.ndarray | None,  # [B, G] entries held, the new one included; None: device_lengths has them
    scale: float,
    device_lengths: Tensor | None = None,  # [B, G] the same lengths on q's device, where the caller has them there
    key_tile: int = KEY_TILE,  # of the torch form
    rows: Tensor | None = None,  # [B] int64, each request's row of the table; -1: padding, which gives zeros
    lse: Sink | None = None,  # natural logarithms; index -1: nowhere
    gate: Tensor | None = None,  # [B, H, D] as q: the result, rounded, is multiplied by its sigmoid
    keys: int | None = None,  # that a stream may hold, if fewer than the table has room for: picks how it is launched
) -> Tensor:
    if use_triton(q):
        return attention_decode_triton(q, k_pool, v_pool, table, lengths, scale, device_lengths, rows, lse, gate, keys)
    return attention_decode_torch(q, k_pool, v_pool, table, lengths, scale, device_lengths, key_tile, rows, lse, gate)
