"""top_entries: the k largest of each row's visible logits, as ascending indices.

Exact: of equal logits the lower index wins, -0 equals 0, NaN is above +inf. A row that sees k entries or fewer gets
all of them, then -1. What lies past `visible` is never looked at.

The kernel keeps a piece of a row in registers, finds its k-th largest by halving, and writes the k it keeps in order of
their indices. A long row is cut into pieces, and what they keep is a shorter row for the next launch:

    262,144 logits -> 32 pieces of 8,192, each keeps 512 -> 16,384 -> one piece keeps 512

An entry that k of its own piece are ahead of is not among the k of its row, so nothing is lost; pieces and what they
keep stay in order of index, so ties fall as they would in one piece. The launches follow from k and the rows' width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton

PIECE = 8192
LAST = 16384  # entries that one program can hold
HELD, REGISTERS = 32, 128  # entries of a thread, and its registers: 512 threads fill a multiprocessor


def top_entries_ref(logits: Tensor, visible: Tensor, k: int) -> Tensor:
    (T, width), visible = logits.shape, visible[:, None]
    hidden = torch.arange(width, device=logits.device) >= visible
    # a stable sort leaves the hidden, which come last, behind a visible -inf; it takes NaN for the largest
    order = logits.masked_fill(hidden, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    order = order.masked_fill(order >= visible, width).sort(-1).values
    out = torch.full((T, k), -1, dtype=torch.int32, device=logits.device)
    out[:, : order.shape[1]] = order.masked_fill(order == width, -1)
    return out


@triton.jit
def flip_negative(b_x):
    """Bits of a float -> an integer of the same order, and back."""
    return b_x ^ ((b_x >> 31) & 0x7FFFFFFF)


@triton.jit
def order_keys(b_x):
    """Floats -> int32 in the same order, above -2^31 and below 2^31 - 1. NaN is the largest; -0 equals 0."""
    b_key = flip_negative(tl.where(b_x == 0, 0.0, b_x).to(tl.int32, bitcast=True))
    return tl.where(b_x == b_x, b_key, 0x7FFFFFFE)


@triton.jit
def kth_largest(b_key, n, k):
    """A bound that k keys or more reach; more than k only if it is the k-th largest itself, and has equals."""
    low = tl.min(tl.where(b_key == -0x80000000, 0x7FFFFFFF, b_key), 0)  # reached by all n
    high = tl.max(b_key, 0) + 1  # reached by none
    count = n
    by_value = 1
    while (low + 1 < high) & (count != k):
        # The values' middle is quick on ordinary numbers, the keys' middle is at the end in 32 turns whatever they are.
        middle = (low & high) + ((low ^ high) >> 1)
        low_value = flip_negative(low).to(tl.float32, bitcast=True)
        high_value = flip_negative(high).to(tl.float32, bitcast=True)
        between = flip_negative((low_value * 0.5 + high_value * 0.5).to(tl.int32, bitcast=True))
        middle = tl.where((by_value == 1) & (between > low) & (between < high), between, middle)
        reach = tl.sum((b_key >= middle).to(tl.int32), 0)
        count = tl.where(reach >= k, reach, count)
        low = tl.where(reach >= k, middle, low)
        high = tl.where(reach >= k, high, middle)
        by_value = 1 - by_value
    return low


@triton.jit
def kept_of(n, k, PIECE: tl.constexpr):
    """Entries that the pieces of a row of n keep: k of each whole one, and of the rest what there is up to k."""
    return n // PIECE * k + tl.minimum(n % PIECE, k)


@triton.jit(do_not_specialize=["k", "width", "stride_x", "stride_i", "stride_o"])
def top_entries_kernel(
    x,  # [T, ...] f32; after the first launch int32 keys
    indices,  # [T, ...] int32, of x in its row; at the first launch they are 0, 1, 2, ...
    visible,  # [T] int64
    out_keys,  # [T, pieces * k] int32; at the last launch nothing
    out,  # [T, pieces * k] int32
    k,
    width,
    stride_x,
    stride_i,
    stride_o,
    BEFORE: tl.constexpr,  # the piece sizes of the launches before
    PIECE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LAST: tl.constexpr,
):
    i_t, i_p = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.minimum(tl.load(visible + i_t), width).to(tl.int32)
    if n <= k:
        if LAST:
            o_k = tl.arange(0, BLOCK_K)
            tl.store(out + i_t * stride_o + o_k, tl.where(o_k < n, o_k, -1), mask=o_k < k)
        return
    for i in tl.static_range(len(BEFORE)):
        n = kept_of(n, k, BEFORE[i])
    begin = i_p * PIECE
    n = tl.minimum(n - begin, PIECE)
    if n <= 0:
        return
    o_n = tl.arange(0, PIECE)
    m_n = o_n < n
    b_key = tl.load(x + i_t * stride_x + begin + o_n, mask=m_n, other=0)
    if len(BEFORE) == 0:
        b_key = order_keys(b_key)
    b_key = tl.where(m_n, b_key, -0x80000000)
    low = kth_largest(b_key, n, tl.minimum(k, n))
    b_over, b_equal = (b_key > low).to(tl.int32), (b_key == low).to(tl.int32)
    room = k - tl.sum(b_over, 0)  # for the first of the equals
    b_both = (b_over << 16) + b_equal
    b_before = tl.cumsum(b_both, 0) - b_both  # how many of either come before: one sum for both
    b_equals = b_before & 0xFFFF
    m_kept = (b_key > low) | ((b_key == low) & (b_equals < room))
    o_kept = (b_before >> 16) + tl.minimum(b_equals, room)
    b_index = begin + o_n
    if len(BEFORE):
        b_index = tl.load(indices + i_t * stride_i + begin + o_n, mask=m_kept, other=0)
    tl.store(out + i_t * stride_o + i_p * k + o_kept, b_index, mask=m_kept)
    if not LAST:
        tl.store(out_keys + i_t * stride_o + i_p * k + o_kept, b_key, mask=m_kept)


def plan_pieces(width: int, k: int) -> tuple[int, ...]:
    """The piece size of each launch."""
    sizes, n = [], width
    while n > LAST:
        few = -(-n // PIECE) * k <= LAST
        sizes.append(PIECE if few else LAST)
        n = -(-n // sizes[-1]) * k
    return (*sizes, max(128, triton.next_power_of_2(n)))


def top_entries_triton(logits: Tensor, visible: Tensor, k: int) -> Tensor:
    T, width = logits.shape
    assert k <= LAST // 2, "pieces would not get shorter"
    assert logits.dtype == torch.float32 and (width <= 1 or logits.stride(1) == 1) and visible.is_contiguous()
    plan = plan_pieces(width, k)
    x, indices, n = logits, visible, width
    for i, piece in enumerate(plan):
        last = i == len(plan) - 1
        pieces = max(1, -(-n // piece))
        n = k if last else pieces * k
        out = torch.empty((T, n), dtype=torch.int32, device=logits.device)
        keys = torch.empty_like(out)  # the last launch writes none
        if T and k:
            top_entries_kernel[T, pieces](
                x, indices, visible, keys, out, k, width, x.stride(0), indices.stride(0), n,
                BEFORE=plan[:i], PIECE=piece, BLOCK_K=triton.next_power_of_2(k), LAST=last,
                num_warps=max(4, piece // (32 * HELD)), maxnreg=REGISTERS,
            )  # fmt: skip
        x, indices = keys, out
    return indices


def top_entries(logits: Tensor, visible: Tensor, k: int) -> Tensor:
    """Indices [T, k] int32 of the k largest of logits [T, width] f32 before visible [T] int64; ascending, then -1."""
    form = top_entries_triton if use_triton(logits) and k <= LAST // 2 else top_entries_ref
    return form(logits, visible, k)
