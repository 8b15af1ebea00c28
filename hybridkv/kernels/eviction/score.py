"""window_scores: how much attention the last W queries pay to every key, per query head.

For query head h and key j: sum over the window's queries w that see j of softmax_j(q_w . k_j * scale). Two passes over
tiles of keys: the log-sum-exp of each query, then the weights. Every sum runs in one fixed order, so equal inputs give
equal bits. A query that sees no key adds nothing.

The kernels: `score_lse` takes a block of keys for all query heads of a stream and leaves each query's log-sum-exp over
the block; `score_combine` joins the blocks in ascending order; `score_weights` makes the products again (cheaper than
storing them) and sums the weights over the window. There is no score matrix, and no atomic is used. Blocks are counted
in entries of a stream, so neither the size nor the order of pages changes a bit.

Where the log-sum-exp is known because attention has just computed it, one pass is enough: `score_weights`, or on Hopper
GPUs the kernel of score_hopper.py.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from hybridkv.kernels.attention.tile import KEY_TILE, LOG2_E, read_pages
from hybridkv.kernels.backend import has_gluon, sm_count, tl, triton, use_triton
from hybridkv.kernels.formats.kv_format import Pages, format_of, stored_tensors


class ScoreBlocks(NamedTuple):
    """A launch configuration."""

    keys: int
    dims: int  # channels multiplied at once
    warps: int


# bf16 queries on bf16 or FP8 keys: tensor cores, exact products, f32 sums. Everything else: f32 throughout.
TENSOR_CORES = ScoreBlocks(64, 256, 4)
TENSOR_CORES_WIDE = ScoreBlocks(64, 32, 8)  # windows of more than 128: whole queries would not fit a program
PLAIN = ScoreBlocks(128, 32, 4)
PLAIN_WIDE = ScoreBlocks(128, 32, 8)  # windows of more than 64: the sums of a tile would not fit 4 warps' registers
CONFIGS = (TENSOR_CORES, TENSOR_CORES_WIDE, PLAIN, PLAIN_WIDE)
COMBINE_BLOCKS, COMBINE_ROWS = 64, 16
SHARED_MEMORY = 227 * 1024  # bytes that a program may have on a Hopper GPU


def window_scores_ref(
    queries: Tensor,
    query_positions: Tensor,
    k_pool: Pages,
    table: Tensor,
    positions: Tensor,
    scale: float,
    lse: Tensor | None = None,
    key_tile: int = KEY_TILE,
) -> Tensor:
    W, H, D = queries.shape
    G, L = positions.shape
    if not L:
        return torch.zeros(H, 0, device=queries.device)
    rows = queries.float().view(W, G, H // G, D).permute(1, 2, 0, 3).reshape(G, -1, D)  # [G, H/G * W, D]
    when = query_positions.repeat(H // G).view(1, -1, 1)

    def tile(start: int) -> Tensor:
        stop = min(start + key_tile, L)
        at = positions[:, None, start:stop]  # [G, 1, tile]
        hidden = (at < 0) | (at > when)
        k = read_pages(k_pool, table, start, stop).float().masked_fill(at.transpose(1, 2) < 0, 0)
        return (rows @ k.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)  # [G, H/G * W, tile]

    starts = range(0, L, key_tile)
    if lse is None:
        lse = torch.full(rows.shape[:2], -torch.inf, device=rows.device)
        for start in starts:
            lse = torch.logaddexp(lse, tile(start).logsumexp(-1))
    else:
        lse = lse.view(W, G, -1).permute(1, 2, 0).reshape(G, -1)
    lse = lse.masked_fill(lse.isneginf(), 0)  # a query that sees nothing: weights 0, not NaN
    parts = [(tile(start) - lse.unsqueeze(-1)).exp().view(G, H // G, W, -1).sum(2) for start in starts]
    return torch.cat(parts, -1).view(H, L)


@triton.jit
def load_keys(k_pool, o_row, m_row, o_d, D, DOT: tl.constexpr, FP8: tl.constexpr):
    """Keys [BN, BK] in the dtype of the product; FP8 values without their scale."""
    b_k = tl.load(k_pool + o_row[:, None] * D + o_d, mask=m_row[:, None] & (o_d < D), other=0)
    if FP8:
        b_k = b_k.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return b_k.to(DOT)


@triton.jit
def load_queries(q, i_h, o_w, W, o_d, D, stride_qw, stride_qh, DOT: tl.constexpr):
    o_q = o_w[:, None] * stride_qw + i_h * stride_qh + o_d
    return tl.load(q + o_q, mask=(o_w < W)[:, None] & (o_d < D), other=0.0).to(DOT)


@triton.jit
def head_scores(
    q, k_pool, b_k, b_scale, i_h, o_w, o_row, m_row, b_at, b_when, W, D, stride_qw, stride_qh, scale,
    BD: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Scores [BW, BN] of one query head in units of log 2; -inf where a query does not see a key."""
    if BK == BD:
        b_q = load_queries(q, i_h, o_w, W, tl.arange(0, BD), D, stride_qw, stride_qh, DOT)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    else:
        b_s = tl.zeros([o_w.shape[0], o_row.shape[0]], tl.float32)
        for d in range(0, BD, BK):
            o_d = d + tl.arange(0, BK)
            b_q = load_queries(q, i_h, o_w, W, o_d, D, stride_qw, stride_qh, DOT)
            b_kd = load_keys(k_pool, o_row, m_row, o_d, D, DOT, FP8)
            b_s = tl.dot(b_q, tl.trans(b_kd), b_s, input_precision="ieee")
    b_s *= scale * b_scale[None, :] if FP8 else scale
    m_s = m_row[None, :] & (b_at[None, :] <= b_when[:, None])
    return tl.where(m_s, b_s, float("-inf"))


@triton.jit
def block_keys(
    k_pool, k_scale, table, positions, i_n, i_g, L, D, stride_tg, stride_tn, stride_pg, stride_pl,
    P: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """What every query head needs of a block of keys: numbers, entries, a mask, positions, values, scales."""
    o_n = i_n * BN + tl.arange(0, BN)
    b_at = tl.load(positions + i_g * stride_pg + o_n.to(tl.int64) * stride_pl, mask=o_n < L, other=-1).to(tl.int32)
    m_row = b_at >= 0
    b_page = tl.load(table + i_g * stride_tg + (o_n // P) * stride_tn, mask=m_row, other=0).to(tl.int64)
    o_row = b_page * P + o_n % P
    if BK == BD:
        b_k = load_keys(k_pool, o_row, m_row, tl.arange(0, BD), D, DOT, FP8)
    else:
        b_k = 0.0  # read in head_scores, a part of the channels at a time
    if FP8:
        b_scale = tl.load(k_scale + o_row, mask=m_row, other=0.0)
    else:
        b_scale = 1.0
    return o_n, o_row, m_row, b_at, b_k, b_scale


@triton.jit(do_not_specialize=["L", "W", "blocks"])
def score_lse_kernel(
    q, when, k_pool, k_scale, table, positions, out, L, W, D, blocks, scale,
    stride_qw, stride_qh, stride_tg, stride_tn, stride_pg, stride_pl,
    R: tl.constexpr, P: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
    DOT: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """out [H, blocks, BW]: log2 of the sum of exp2 over each block."""
    i_n, i_g = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_n, o_row, m_row, b_at, b_k, b_scale = block_keys(
        k_pool, k_scale, table, positions, i_n, i_g, L, D, stride_tg, stride_tn, stride_pg, stride_pl,
        P, BN, BD, BK, DOT, FP8,
    )  # fmt: skip
    o_w = tl.arange(0, BW)
    b_when = tl.load(when + o_w, mask=o_w < W, other=-1).to(tl.int32)
    for r in range(R):
        i_h = i_g * R + r
        b_s = head_scores(
            q, k_pool, b_k, b_scale, i_h, o_w, o_row, m_row, b_at, b_when, W, D, stride_qw, stride_qh, scale,
            BD, BK, DOT, FP8,
        )  # fmt: skip
        b_max = tl.max(b_s, 1)
        b_base = tl.where(b_max == float("-inf"), 0.0, b_max)
        b_sum = tl.sum(tl.exp2(b_s - b_base[:, None]), 1)
        b_lse = b_base + tl.log2(tl.where(b_sum == 0, 1.0, b_sum))  # NaN stays NaN
        b_lse = tl.where(b_sum == 0, float("-inf"), b_lse)
        tl.store(out + (i_h * blocks + i_n) * BW + o_w, b_lse)


@triton.jit(do_not_specialize=["blocks"])
def score_combine_kernel(part, out, blocks, BW: tl.constexpr, BB: tl.constexpr, BR: tl.constexpr):
    """part [H, blocks, BW] -> out [H, BW], blocks in ascending order; +inf for a query that sees nothing."""
    i_h = tl.program_id(0).to(tl.int64)
    o_w = tl.program_id(1) * BR + tl.arange(0, BR)
    b_max = tl.full([BR], float("-inf"), tl.float32)
    b_sum = tl.zeros([BR], tl.float32)
    for start in range(0, blocks, BB):
        o_b = start + tl.arange(0, BB)
        p_part = part + (i_h * blocks + o_b[:, None]) * BW + o_w
        b_lse = tl.load(p_part, mask=o_b[:, None] < blocks, other=float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_lse, 0))
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_sum = b_sum * tl.exp2(b_max - b_base) + tl.sum(tl.exp2(b_lse - b_base[None, :]), 0)
        b_max = b_new
    b_lse = b_max + tl.log2(tl.where(b_sum == 0, 1.0, b_sum))
    tl.store(out + i_h * BW + o_w, tl.where(b_sum == 0, float("inf"), b_lse))


@triton.jit(do_not_specialize=["L", "W"])
def score_weights_kernel(
    q, when, k_pool, k_scale, table, positions, lse, out, L, W, D, scale,
    stride_qw, stride_qh, stride_tg, stride_tn, stride_pg, stride_pl, stride_lw, stride_lh, factor,
    R: tl.constexpr, P: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
    DOT: tl.constexpr, FP8: tl.constexpr, PEAK: tl.constexpr, RAISE: tl.constexpr,
):  # fmt: skip
    """lse [W, H]; times `factor` it is log2. out [H, L]: the weights of each key, summed over the window.

    PEAK: out [G, L], the largest weight of each key, and with RAISE of that and what stands there.
    """
    i_n, i_g = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_n, o_row, m_row, b_at, b_k, b_scale = block_keys(
        k_pool, k_scale, table, positions, i_n, i_g, L, D, stride_tg, stride_tn, stride_pg, stride_pl,
        P, BN, BD, BK, DOT, FP8,
    )  # fmt: skip
    o_w = tl.arange(0, BW)
    b_when = tl.load(when + o_w, mask=o_w < W, other=-1).to(tl.int32)
    b_most = tl.full([BW, BN], float("-inf"), tl.float32)  # for PEAK
    for r in range(R):
        i_h = i_g * R + r
        b_s = head_scores(
            q, k_pool, b_k, b_scale, i_h, o_w, o_row, m_row, b_at, b_when, W, D, stride_qw, stride_qh, scale,
            BD, BK, DOT, FP8,
        )  # fmt: skip
        b_lse = tl.load(lse + o_w * stride_lw + i_h * stride_lh, mask=o_w < W, other=float("inf")) * factor
        b_lse = tl.where(b_lse == float("-inf"), float("inf"), b_lse)  # sees nothing: weights 0, not NaN
        if PEAK:  # of logarithms: one power for each key is enough
            b_most = tl.maximum(b_most, b_s - b_lse[:, None], propagate_nan=tl.PropagateNan.ALL)
        else:
            b_weight = tl.sum(tl.exp2(b_s - b_lse[:, None]), 0)
            tl.store(out + i_h * L + o_n, b_weight, mask=o_n < L)
    if PEAK:
        broken = tl.max((b_most != b_most).to(tl.int32), 0) > 0  # the largest of numbers would hide a NaN
        b_peak = tl.where(broken, float("nan"), tl.exp2(tl.max(b_most, 0)))
        p_out = out + i_g * L + o_n
        if RAISE:
            b_before = tl.load(p_out, mask=o_n < L, other=0.0)
            b_peak = tl.maximum(b_peak, b_before, propagate_nan=tl.PropagateNan.ALL)
        tl.store(p_out, b_peak, mask=o_n < L)


def hopper_tiles(queries: Tensor, keys: Tensor, G: int) -> int:
    """Tiles of keys that the Hopper kernel holds in shared memory; 0: the Triton kernels run."""
    W, H, D = queries.shape
    if W > 64 or D not in (128, 256) or any(x % 8 for x in queries.stride()[:2]):
        return 0
    if any(x.data_ptr() % 16 for x in (queries, keys)):
        return 0
    return key_tiles(H // G, D) if has_gluon(queries.device) else 0


def key_tiles(R: int, D: int) -> int:
    """How many tiles of 64 keys, at most 4, fit into shared memory beside R heads' queries and log-sum-exps."""

    def fits(tiles: int) -> bool:
        return (R + tiles) * 128 * D + 256 * R + 512 * tiles + 8 * (R + 3 * tiles) + 768 <= SHARED_MEMORY

    return max((tiles for tiles in range(1, 5) if fits(tiles)), default=0)


@cache
def hopper_programs(processors: int, G: int, tiles: int) -> int:
    """Programs for each KV head: the number whose last wave leaves the fewest multiprocessors idle."""

    def cost(programs: int) -> int:
        waves = -(-G * programs // processors)
        return waves * (-(-tiles // programs) + 2)  # loading the queries costs about 2 tiles

    return min(range(1, min(tiles, processors) + 1), key=cost)


def default_blocks(cores: bool, window: int, peak: bool = False) -> ScoreBlocks:
    """`cores`: whether tensor cores multiply; window: queries, padded to a power of two.

    `peak`: a program holds the largest weights beside the scores of a head.
    """
    if cores:
        return TENSOR_CORES if window <= 128 else TENSOR_CORES_WIDE
    return PLAIN if window <= (32 if peak else 64) else PLAIN_WIDE


def launch_scores(
    queries: Tensor,
    query_positions: Tensor,
    k_pool: Pages,
    table: Tensor,
    positions: Tensor,
    scale: float,
    lse: Tensor | None,
    out: Tensor,
    config: ScoreBlocks | None = None,
    **peak: bool,
) -> None:
    """Weights of a window's queries to `out`; PEAK and RAISE as score_weights_kernel has them."""
    W, H, D = queries.shape
    G, L = positions.shape
    fmt = format_of(k_pool)
    keys, k_scale = stored_tensors(k_pool)
    k_scale = keys if k_scale is None else k_scale  # a kernel needs a tensor, which it then never reads
    cores = queries.dtype == fmt.dot_dtype == torch.bfloat16
    queries = queries if queries.stride(2) == 1 else queries.contiguous()
    query_positions = query_positions.contiguous()
    strides = (queries.stride(0), queries.stride(1), *table.stride(), *positions.stride())
    read = (queries, query_positions, keys, k_scale, table, positions)
    if cores and lse is not None and config is None and (tiles := hopper_tiles(queries, keys, G)):
        from hybridkv.kernels.eviction.score_hopper import KEYS, WARPS, score_known_hopper_kernel

        blocks = triton.cdiv(L, KEYS)
        score_known_hopper_kernel[(hopper_programs(sm_count(queries.device), G, blocks), G)](
            *read, lse, out, L, W, blocks, scale * LOG2_E, LOG2_E, *strides, *lse.stride(),
            R=H // G, D=D, P=keys.shape[1], TILES=tiles, FP8=fmt.quantised, **peak, num_warps=WARPS,
        )  # fmt: skip
        return
    padded = max(16, triton.next_power_of_2(W))
    if config is None:
        config = default_blocks(cores, padded, peak["PEAK"])
    BD = max(16, triton.next_power_of_2(D))
    blocks = triton.cdiv(L, config.keys)
    shared = dict(
        R=H // G, P=keys.shape[1], BW=padded, BN=config.keys, BD=BD, BK=min(config.dims, BD),
        DOT=tl.bfloat16 if cores else tl.float32, FP8=fmt.quantised, num_warps=config.warps, num_stages=2,
    )  # fmt: skip
    factor = LOG2_E  # from natural logarithms to powers of two
    if lse is None:
        part = torch.empty(H, blocks, padded, device=queries.device)
        lse = torch.empty(H, padded, device=queries.device).t()
        factor = 1.0
        score_lse_kernel[(blocks, G)](*read, part, L, W, D, blocks, scale * LOG2_E, *strides, **shared)
        score_combine_kernel[(H, padded // COMBINE_ROWS)](
            part, lse, blocks, BW=padded, BB=COMBINE_BLOCKS, BR=COMBINE_ROWS
        )  # fmt: skip
    score_weights_kernel[(blocks, G)](
        *read, lse, out, L, W, D, scale * LOG2_E, *strides, *lse.stride(), factor, **shared, **peak
    )  # fmt: skip


def window_scores_triton(
    queries: Tensor,
    query_positions: Tensor,
    k_pool: Pages,
    table: Tensor,
    positions: Tensor,
    scale: float,
    lse: Tensor | None = None,
    config: ScoreBlocks | None = None,
) -> Tensor:
    W, H, _ = queries.shape
    L = positions.shape[1]
    out = torch.empty(H, L, device=queries.device)
    if not W or not L:
        return out.zero_()
    where = (queries, query_positions, k_pool, table, positions)
    launch_scores(*where, scale, lse, out, config, PEAK=False, RAISE=False)
    return out


def window_scores(
    queries: Tensor,  # [W, H, D] after norm and rope
    query_positions: Tensor,  # [W]
    k_pool: Pages,  # [N, P, D]
    table: Tensor,  # [G, N] page ids, -1 past the end
    positions: Tensor,  # [G, L] of each entry; -1 past a stream's length
    scale: float,
    lse: Tensor | None = None,  # [W, H] f32, where known: natural logarithms of the queries' sums of exp(q . k * scale)
) -> Tensor:
    """Attention that the queries pay to the entries of a request's streams -> [H, L] f32, 0 past a stream's length."""
    form = window_scores_triton if use_triton(queries) else window_scores_ref
    return form(queries, query_positions, k_pool, table, positions, scale, lse)
