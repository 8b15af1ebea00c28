"""The Triton kernels of attention_decode: equal shares of all keys, and the joining of the parts of each stream.

A stream's keys lie in tiles. The tiles of all streams, one stream after the other, are divided into equal runs, one for
each program. A program whose run covers parts of several streams computes one after the other.

    streams    | a a a a a a a a a | b | c c c c c |       tiles of three streams
    programs   | 0 0 0 0 0 | 1 1 1 1 1 | 2 2 2 2 2 |       partial results (stream + program): a0 a1 b1 c1 c2

Where a run begins follows from the lengths, which every program reads on the device, so the grid never changes. The
part of stream s by program p is row s + p of the workspace: no other pair has that number, and the parts of a stream
are neighbours. The program with a stream's first tile stores where the parts begin and how many there are.
"""

from __future__ import annotations

from hybridkv.kernels.activation import times_sigmoid
from hybridkv.kernels.backend import tl, triton
from hybridkv.kernels.formats.small_floats import e4m3_pairs_tile


@triton.jit
def stream_ends(
    lengths, rows, stride_length_b, stride_length_g, B, G: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr
):
    """[BS] int32: the tiles of each stream and of all streams before it. A row of padding has none."""
    o_s = tl.arange(0, BS)
    o_b, o_g = (o_s // G).to(tl.int64), o_s % G
    m_s = o_s < B * G
    b_length = tl.load(lengths + o_b * stride_length_b + o_g * stride_length_g, mask=m_s, other=0)
    if rows is not None:
        b_length = tl.where(tl.load(rows + o_b, mask=m_s, other=-1) < 0, 0, b_length)
    return tl.cumsum(tl.cdiv(b_length, BN).to(tl.int32), 0)


@triton.jit
def programs_used(total, programs, LEAST: tl.constexpr):
    """How many programs share the tiles: all of them, or fewer so that each has at least LEAST."""
    return tl.maximum(tl.minimum(programs, total // LEAST), 1)


@triton.jit
def tile_entries(
    i_n, page, end, stride_page, stride_entry, stride_scale, p_table, P: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Where the entries from i_n on lie: a base and offsets [BN]; the same for their scales; which of them exist."""
    o_n = tl.arange(0, BN)
    m_n = o_n < end - i_n
    if P % BN == 0:  # the whole tile lies in one page
        i_entry, o_entry = page * stride_page + (i_n % P) * stride_entry, o_n * stride_entry
        i_scale, o_scale = page * stride_scale + i_n % P, o_n
    else:
        b_page = tl.load(p_table + (i_n + o_n) // P, mask=m_n, other=0).to(tl.int64)
        o_at = (i_n + o_n) % P
        i_entry, o_entry = page, b_page * stride_page + o_at * stride_entry
        i_scale, o_scale = page, b_page * stride_scale + o_at
    return i_entry, o_entry, i_scale, o_scale, m_n


@triton.jit
def load_page(p_table, i_n, end, P: tl.constexpr, BN: tl.constexpr):
    """The page of the tile from i_n on if a tile lies in one page, else 0."""
    page = tl.full([], 0, tl.int64)
    if P % BN == 0:
        page = tl.load(p_table + i_n // P, mask=i_n < end, other=0).to(tl.int64)
    return page


@triton.jit
def attend_run(
    p_q, k_pool, v_pool, k_scale, v_scale, p_table, begin, end, scale,
    stride_q_h, stride_page, stride_entry, stride_scale, p_part, p_lse,
    GROUP: tl.constexpr, P: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, FP8: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Entries [begin, end) of one stream for the queries of its KV head: their result and log-sum-exp."""
    o_m, o_d = tl.arange(0, BM), tl.arange(0, BD)
    m_q = (o_m[:, None] < GROUP) & (o_d[None, :] < D)
    b_q = tl.load(p_q + o_m[:, None] * stride_q_h + o_d[None, :], mask=m_q, other=0).to(DOT)
    b_m = tl.full([BM], float("-inf"), tl.float32)
    b_z = tl.zeros([BM, BN], tl.float32)
    b_o = tl.zeros([BM, BD], tl.float32)
    page = load_page(p_table, begin, end, P, BN)
    for i_n in tl.range(begin, end, BN):
        i_entry, o_entry, i_scale, o_scale, m_n = tile_entries(
            i_n, page, end, stride_page, stride_entry, stride_scale, p_table, P, BN
        )
        page = load_page(p_table, i_n + BN, end, P, BN)  # a tile ahead
        b_k = tl.load(
            k_pool + i_entry + (o_entry[None, :] + o_d[:, None]), mask=m_n[None, :] & (o_d[:, None] < D), other=0
        )
        b_v = tl.load(
            v_pool + i_entry + (o_entry[:, None] + o_d[None, :]), mask=m_n[:, None] & (o_d[None, :] < D), other=0
        )
        if FP8:
            b_k = b_k.to(tl.float8e4nv, bitcast=True)
            b_v = b_v.to(tl.float8e4nv, bitcast=True)
        b_s = tl.dot(b_q, b_k.to(DOT), input_precision="ieee") * scale  # [BM, BN]
        if FP8:
            b_s *= tl.load(k_scale + i_scale + o_scale, mask=m_n, other=0)[None, :]
        b_s = tl.where(m_n[None, :], b_s, float("-inf"))
        b_top = tl.maximum(b_m, tl.max(b_s, 1))
        b_p = tl.exp2(b_s - b_top[:, None])
        b_keep = tl.exp2(b_m - b_top)
        b_z = b_z * b_keep[:, None] + b_p
        if FP8:
            b_p *= tl.load(v_scale + i_scale + o_scale, mask=m_n, other=0)[None, :]
        b_o = b_o * b_keep[:, None] + tl.dot(b_p.to(DOT), b_v.to(DOT), input_precision="ieee")
        b_m = b_top
    b_sum = tl.sum(b_z, 1)
    tl.store(p_part + o_m[:, None] * D + o_d[None, :], b_o / b_sum[:, None], mask=m_q)
    tl.store(p_lse + o_m, b_m + tl.log2(b_sum), mask=o_m < GROUP)


@triton.jit
def attend_run_fp8(
    p_q, k_pool, v_pool, k_scale, v_scale, p_table, begin, end, scale,
    stride_q_h, stride_page, stride_entry, stride_scale, p_part, p_lse,
    GROUP: tl.constexpr, P: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """The same over FP8 pages, read as pairs of values in 16 bits: tensor cores then take them from shared memory as
    they lie there. Products are in f16, which holds every E4M3 number; queries and weights are scaled into its range.
    """
    HALF: tl.constexpr = D // 2
    o_m, o_d = tl.arange(0, BM), tl.arange(0, BD // 2)
    m_q = (o_m[:, None] < GROUP) & (o_d[None, :] < HALF)
    # two bf16 are the upper halves of two f32
    b_q = tl.load(p_q + o_m[:, None] * stride_q_h + o_d[None, :], mask=m_q, other=0)
    b_even = (b_q << 16).to(tl.float32, bitcast=True)
    b_odd = (b_q & -65536).to(tl.float32, bitcast=True)
    b_size = tl.max(tl.maximum(tl.abs(b_even), tl.abs(b_odd)), 1)
    b_power = tl.minimum(tl.maximum(b_size.to(tl.int32, bitcast=True) >> 23, 1), 253)  # biased exponent
    b_shrink = ((254 - b_power) << 23).to(tl.float32, bitcast=True)[:, None]  # a power of two: exact
    b_even, b_odd = (b_even * b_shrink).to(tl.float16), (b_odd * b_shrink).to(tl.float16)
    b_size = (b_power << 23).to(tl.float32, bitcast=True) * scale
    # weights are relative to the largest of weight x (power of two of the value's scale): the products fit into f16
    b_w = tl.full([BM], float("-inf"), tl.float32)
    b_z = tl.zeros([BM, BN], tl.float32)
    b_o0 = tl.zeros([BM, BD // 2], tl.float32)
    b_o1 = tl.zeros([BM, BD // 2], tl.float32)
    page = load_page(p_table, begin, end, P, BN)
    for i_n in tl.range(begin, end, BN):
        i_entry, o_entry, i_scale, o_scale, m_n = tile_entries(
            i_n, page, end, stride_page, stride_entry, stride_scale, p_table, P, BN
        )
        page = load_page(p_table, i_n + BN, end, P, BN)  # a tile ahead
        b_k = tl.load(
            k_pool + i_entry + (o_entry[None, :] + o_d[:, None]), mask=m_n[None, :] & (o_d[:, None] < HALF), other=0
        )
        b_v = tl.load(
            v_pool + i_entry + (o_entry[:, None] + o_d[None, :]), mask=m_n[:, None] & (o_d[None, :] < HALF), other=0
        )
        b_ks = tl.load(k_scale + i_scale + o_scale, mask=m_n, other=0)
        b_vs = tl.load(v_scale + i_scale + o_scale, mask=m_n, other=0)
        b_vp = tl.maximum(((b_vs.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32), -100.0)  # f32 holds the sums
        b_k0, b_k1 = e4m3_pairs_tile(b_k, GPU)
        b_s = tl.dot(b_odd, b_k1, tl.dot(b_even, b_k0))  # [BM, BN]
        b_s = tl.where(m_n[None, :], b_s * b_size[:, None] * b_ks[None, :], float("-inf"))
        b_top = tl.maximum(b_w, tl.max(b_s + b_vp[None, :], 1))
        b_p = tl.exp2(b_s - b_top[:, None])
        b_keep = tl.exp2(b_w - b_top)[:, None]
        b_w = b_top
        b_z = b_z * b_keep + b_p
        b_p = (b_p * b_vs[None, :]).to(tl.float16)  # at most 2
        b_v0, b_v1 = e4m3_pairs_tile(b_v, GPU)
        b_o0 = tl.dot(b_p, b_v0, b_o0 * b_keep)
        b_o1 = tl.dot(b_p, b_v1, b_o1 * b_keep)
    b_sum = tl.sum(b_z, 1)
    b_back = (1 / b_sum)[:, None]
    o_c = tl.arange(0, BD)
    m_c = (o_m[:, None] < GROUP) & (o_c[None, :] < D)
    tl.store(p_part + o_m[:, None] * D + o_c[None, :], tl.interleave(b_o0 * b_back, b_o1 * b_back), mask=m_c)
    tl.store(p_lse + o_m, b_w + tl.log2(b_sum), mask=o_m < GROUP)


@triton.jit
def count_and_largest(count, largest, more, other):
    return count + more, tl.maximum(largest, other)


@triton.jit(do_not_specialize=["stride_table_b", "stride_table_g", "stride_length_b", "stride_length_g", "B"])
def attention_decode_kernel(
    q,  # [B, H, D]
    k_pool,
    v_pool,
    k_scale,
    v_scale,
    table,  # [slots, G, N]
    rows,  # [B] rows of the table, or None: row b is request b's
    lengths,  # [B, G]
    part,  # [B * G + programs, GROUP, D] f32
    lse,  # [B * G + programs, GROUP] f32, in powers of two
    parts,  # [B * G, 2] int32: each stream's first part and their number; not written for a stream without entries
    scale,  # times log2(e)
    B,
    stride_q_b,
    stride_q_h,
    stride_page,
    stride_entry,
    stride_scale,
    stride_table_b,
    stride_table_g,
    stride_length_b,
    stride_length_g,
    G: tl.constexpr,
    GROUP: tl.constexpr,  # query heads that share a KV head
    P: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BS: tl.constexpr,  # B * G at least
    FP8: tl.constexpr,
    DOT: tl.constexpr,
    PAIRS: tl.constexpr,
    LEAST: tl.constexpr,
    GPU: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,  # launched before the kernel before it ends
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()  # the second kernel may come now and wait
    b_end = stream_ends(lengths, rows, stride_length_b, stride_length_g, B, G, BN, BS)
    i_p = tl.program_id(0)
    total = tl.max(b_end, 0)
    used = programs_used(total, tl.num_programs(0), LEAST)
    share, more = total // used, total % used  # the first `more` programs have a tile more
    i_t = tl.minimum(i_p * share + tl.minimum(i_p, more), total)
    last = tl.minimum((i_p + 1) * share + tl.minimum(i_p + 1, more), total)
    while i_t < last:
        # streams that end before this tile, and where the last of them does
        m_s = b_end <= i_t
        i_s, first = tl.reduce((m_s.to(tl.int32), tl.where(m_s, b_end, 0)), 0, count_and_largest)
        i_b, i_g = (i_s // G).to(tl.int64), i_s % G
        length = tl.load(lengths + i_b * stride_length_b + i_g * stride_length_g).to(tl.int32)
        i_row = i_b
        if rows is not None:
            i_row = tl.load(rows + i_b)
        p_table = table + i_row * stride_table_b + i_g * stride_table_g
        p_q = q + i_b * stride_q_b + i_g * GROUP * stride_q_h
        i_part = (i_s + i_p).to(tl.int64) * GROUP
        if i_t == first:
            i_end = first + tl.cdiv(length, BN) - 1  # the stream's last tile, then the program that has it
            past = i_end - more * (share + 1)
            i_last = tl.where(past < 0, i_end // (share + 1), more + past // share)
            tl.store(parts + 2 * i_s, i_s + i_p)
            tl.store(parts + 2 * i_s + 1, i_last - i_p + 1)
        begin, end = (i_t - first) * BN, tl.minimum((last - first) * BN, length)
        if PAIRS:
            attend_run_fp8(
                p_q, k_pool, v_pool, k_scale, v_scale, p_table, begin, end, scale,
                stride_q_h, stride_page, stride_entry, stride_scale, part + i_part * D, lse + i_part,
                GROUP, P, D, BD, BM, BN, GPU,
            )  # fmt: skip
        else:
            attend_run(
                p_q, k_pool, v_pool, k_scale, v_scale, p_table, begin, end, scale,
                stride_q_h, stride_page, stride_entry, stride_scale, part + i_part * D, lse + i_part,
                GROUP, P, D, BD, BM, BN, FP8, DOT,
            )  # fmt: skip
        i_t = first + tl.cdiv(end, BN)


@triton.jit(do_not_specialize=["stride_length_b", "stride_length_g", "stride_lse"])
def join_parts_kernel(
    part,  # [B * G + programs, GROUP, D] f32
    lse,  # [B * G + programs, GROUP] f32
    parts,  # [B * G, 2] int32
    rows,
    lengths,  # [B, G]
    gate,  # [B, H, D] whose sigmoid the result is multiplied by, or None
    out,  # [B, H, D]
    lse_out,  # [R, H] natural log-sum-exp, or None
    lse_index,  # [B] rows of it, -1: nowhere
    stride_gate_b,
    stride_gate_h,
    stride_lse,
    stride_length_b,
    stride_length_g,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,  # channels of a program
    BR: tl.constexpr,  # parts read at once
    OVERLAP: tl.constexpr,
):
    i_h, i_b, i_d = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) * BD
    i_g = i_h // GROUP
    H: tl.constexpr = G * GROUP
    length = tl.load(lengths + i_b * stride_length_b + i_g * stride_length_g)
    if rows is not None:
        length = tl.where(tl.load(rows + i_b) < 0, 0, length)
    p_parts = parts + 2 * (i_b * G + i_g)
    o_d = i_d + tl.arange(0, BD)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    b_gate = None
    if gate is not None:  # on its way while the parts are found
        p_gate = gate + i_b * stride_gate_b + i_h * stride_gate_h + o_d
        b_gate = tl.load(p_gate, mask=(o_d < D) & (length > 0), other=0.0)
    i_part = tl.load(p_parts, mask=length > 0, other=0).to(tl.int64)
    count = tl.load(p_parts + 1, mask=length > 0, other=0)
    b_m = tl.full([1], float("-inf"), tl.float32)
    b_z = tl.zeros([1], tl.float32)
    b_o = tl.zeros([BD], tl.float32)
    for i_r in tl.range(0, count, BR):
        o_r = i_r + tl.arange(0, BR)
        o_part = (i_part + o_r) * GROUP + i_h % GROUP
        b_lse = tl.load(lse + o_part, mask=o_r < count, other=float("-inf"))
        m_part = (o_r[:, None] < count) & (o_d[None, :] < D)
        b_part = tl.load(part + o_part[:, None] * D + o_d[None, :], mask=m_part, other=0)
        b_top = tl.maximum(b_m, tl.max(b_lse, 0))
        b_weight, b_keep = tl.exp2(b_lse - b_top), tl.exp2(b_m - b_top)
        b_z = b_z * b_keep + tl.sum(b_weight, 0)
        b_o = b_o * b_keep + tl.sum(b_weight[:, None] * b_part, 0)
        b_m = b_top
    b_z = tl.where(count == 0, 1.0, b_z)  # a stream without entries gives zeros
    b_out = (b_o / b_z).to(out.dtype.element_ty)
    if gate is not None:
        b_out = times_sigmoid(b_out, b_gate)
    tl.store(out + (i_b * H + i_h) * D + o_d, b_out, mask=o_d < D)
    if lse_out is not None:
        i_row = tl.load(lse_index + i_b)
        p_out = lse_out + i_row * stride_lse + i_h + tl.arange(0, 1)
        tl.store(p_out, (b_m + tl.log2(b_z)) * 0.6931471805599453, mask=(i_row >= 0) & (i_d == 0))
