"""gdn_prefill: a Gated DeltaNet layer over the prompt chunks of a step, between its two projections.

    q, k, v = silu(conv(x));   q, k = l2norm(q) / sqrt(K), l2norm(k);   g = -decay softplus(a + dt_bias)
    o = delta rule (q, k, v, g, sigmoid(b));   out = rms_norm(o) silu(z)

On a GPU: one kernel for everything before the delta rule, the two of chunk.py, one for the norm, each launched once for
all prompts (segments.py). On Hopper GPUs the kernel of scan_hopper.py does the work of the last two. What they hand on
is in the dtype of x, and every prompt has whole chunks of its own there; tokens after its last one have g = 0 and
beta = 0, and so change nothing. Sums are f32. Padding (slot -1) touches no state and gives zeros.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.kernels.attention.tile import LOG2_E
from hybridkv.kernels.backend import has_gluon, sm_count, tl, triton, use_triton
from hybridkv.kernels.gdn.chunk import delta_chunks, solve
from hybridkv.kernels.gdn.rule import CHUNK, causal_conv_ref, gated_delta_chunks
from hybridkv.kernels.gdn.segments import Segments, Span, pieces
from hybridkv.kernels.gdn.weights import DeltaNet
from hybridkv.kernels.gluon import TensorDescriptor, gl
from hybridkv.kernels.norm import gated_rms_norm_ref, l2_norm_ref

PIECE = 1 << 15  # tokens at a time: what the kernels hand on takes about 50 KB a token at 48 heads of 128
DIMS = (16, 32, 64, 128)  # of heads, that the kernels take
TOKENS = 32  # of a program before the delta rule, and of one after it
WARPS = 4  # of a program before the delta rule
REGISTERS: int | None = 80  # of its threads at the most: six programs share a multiprocessor, and not five
CONV_WIDTH = 4  # of the convolution, that the kernels take
MIN_SMS = 64  # for scan_hopper.py: more than there can be processes on a card, which is 60 under MPS
_LOG2_E = tl.constexpr(LOG2_E)


def gdn_prefill_ref(x: Tensor, net: DeltaNet, conv_state: Tensor, state: Tensor) -> Tensor:
    T, Hk, Hv, K, V = len(x), net.key_heads, net.value_heads, net.key_dim, net.value_dim
    mixed, z, b, a = x.split(net.columns, -1)
    q, k, v = causal_conv_ref(mixed, net.conv, conv_state).split([Hk * K, Hk * K, Hv * V], -1)
    q, k = (l2_norm_ref(t.view(T, Hk, K)).repeat_interleave(Hv // Hk, 1) for t in (q, k))
    g = -net.decay * F.softplus(a.float() + net.dt_bias)
    wide = state.float()
    o = gated_delta_chunks(q * K**-0.5, k, v.view(T, Hv, V), g, torch.sigmoid(b.float()), wide)
    state.copy_(wide)
    return gated_rms_norm_ref(o, z.view(T, Hv, V), net.norm, net.eps).flatten(1).to(x.dtype)


@triton.jit
def silu(b_x):
    """x / (1 + exp(-x)) in few instructions; 0 where exp(-x) is infinite."""
    b_r = tl.rsqrt(1.0 + tl.exp2(b_x * -_LOG2_E))
    return b_x * b_r * b_r


@triton.jit
def load_rows(x, o_r, begin, end, stride_x, o_c):
    """Rows o_r of x in f32, zeros where they are not the prompt's."""
    m_r = (o_r >= begin) & (o_r < end)
    return tl.load(x + o_r[:, None] * stride_x + o_c[None, :], mask=m_r[:, None], other=0.0).to(tl.float32)


@triton.jit
def conv_four(x, conv, p_state, half, o_r, begin, end, stride_x, o_c, channels):
    """The convolution of channels o_c [BD] at tokens o_r [BR], from `half` on, and the three after each: four times
    [BR, BD] f32. Tokens are counted from the row of x that is given, also where the prompt begins and ends.

    Seven rows are read for four tokens. The program of a prompt's first tokens writes the conv_state for the next call.
    """
    b_a, b_b = load_rows(x, o_r - 3, begin, end, stride_x, o_c), load_rows(x, o_r - 2, begin, end, stride_x, o_c)
    b_c, b_d = load_rows(x, o_r - 1, begin, end, stride_x, o_c), load_rows(x, o_r, begin, end, stride_x, o_c)
    b_e, b_f = load_rows(x, o_r + 1, begin, end, stride_x, o_c), load_rows(x, o_r + 2, begin, end, stride_x, o_c)
    b_g = load_rows(x, o_r + 3, begin, end, stride_x, o_c)
    if half == begin:
        m_r = (o_r == begin)[:, None]
        b_a += tl.load(p_state + o_c[None, :], mask=m_r, other=0.0)
        b_b += tl.load(p_state + channels + o_c[None, :], mask=m_r, other=0.0)
        b_c += tl.load(p_state + 2 * channels + o_c[None, :], mask=m_r, other=0.0)
        for i in tl.static_range(3):  # row i of the next conv_state is row end + i of (conv_state, x)
            last = end.to(tl.int64) + (i - 3)
            if last < 0:
                b_last = tl.load(p_state + (end + i) * channels + o_c).to(tl.float32)
            else:
                b_last = tl.load(x + last * stride_x + o_c).to(tl.float32)
            tl.debug_barrier()  # a row is read before it is written: above, and for an earlier i
            tl.store(p_state + i * channels + o_c, b_last)
    p_w = conv + o_c * 4
    b_0, b_1 = tl.load(p_w)[None, :], tl.load(p_w + 1)[None, :]
    b_2, b_3 = tl.load(p_w + 2)[None, :], tl.load(p_w + 3)[None, :]
    return (
        b_a * b_0 + b_b * b_1 + b_c * b_2 + b_d * b_3,
        b_b * b_0 + b_c * b_1 + b_d * b_2 + b_e * b_3,
        b_c * b_0 + b_d * b_1 + b_e * b_2 + b_f * b_3,
        b_d * b_0 + b_e * b_1 + b_f * b_2 + b_g * b_3,
    )


@triton.jit
def unit(b_y, scale):
    """silu, then rows of length `scale`."""
    b_y = silu(b_y)
    return b_y * (tl.rsqrt(tl.sum(b_y * b_y, 1) + 1e-6) * scale)[:, None]


@triton.jit
def softplus(b_x):
    """log(1 + exp(x)); log(1 + e) = log(u) e / (u - 1) keeps its digits where u = 1 + e is rounded."""
    b_e = tl.exp(-tl.abs(b_x))
    b_u = 1.0 + b_e
    b_log = tl.where(b_u == 1.0, b_e, tl.log(b_u) * (b_e / tl.where(b_u == 1.0, 1.0, b_u - 1.0)))
    return tl.maximum(b_x, 0.0) + b_log


@triton.jit
def gdn_inputs_kernel(
    x,  # [T, q | k | v | z | b | a], rows stride_x apart
    conv,  # [channels, 4] f32
    conv_states,  # [slots, 3, channels]
    decay,  # [Hv] f32
    dt_bias,
    q,  # [N * 64, Hk, K]
    k,
    v,  # [N, Hv, V, 64]
    g,  # [N * 64, Hv] f32
    beta,
    out,  # [T, Hv, V]: zeros for padding
    parts,  # [N, 4]: slot (-1: padding), begin and end of the prompt, first token
    stride_x,
    stride_conv,
    scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    i_c, i_t = tl.program_id(0), tl.program_id(1)
    channels: tl.constexpr = 2 * HK * K + HV * V
    i_n, half = i_t // (64 // BT), i_t % (64 // BT) * BT
    p_part = parts + i_n.to(tl.int64) * 4
    slot, begin, end, first = tl.load(p_part), tl.load(p_part + 1), tl.load(p_part + 2), tl.load(p_part + 3)
    if slot < 0:
        i_h, o_v, o_r = i_c - 2 * HK, tl.arange(0, V), first + half + tl.arange(0, BT)
        # all of the part is read before the branch: a number that is read behind it takes as long again
        m_r = ((o_r >= begin) & (o_r < end))[:, None] & (o_v >= 0)[None, :] & (i_h >= 0) & (i_h < HV)
        b_0 = tl.zeros([BT, V], out.dtype.element_ty)
        tl.store(out + (o_r[:, None] * HV + i_h) * V + o_v[None, :], b_0, mask=m_r)
        return
    o_i = half + tl.arange(0, BT)  # tokens of the part
    o_t = i_n.to(tl.int64) * 64 + o_i  # in what is handed on
    o_j = half + tl.arange(0, BT // 4) * 4
    o_q = i_n.to(tl.int64) * 64 + o_j
    p_state = conv_states + slot * stride_conv
    x += first * stride_x  # from here on tokens are counted from the part's first: few enough for 32 bits
    begin, end = (begin - first).to(tl.int32), (end - first).to(tl.int32)
    if i_c < 2 * HK:  # a query or a key
        o_k = tl.arange(0, K)
        o_c = i_c * K + o_k
        b_0, b_1, b_2, b_3 = conv_four(x, conv, p_state, half, o_j, begin, end, stride_x, o_c, channels)
        by = tl.where(i_c < HK, scale, 1.0)
        p_y = tl.where(i_c < HK, q + i_c * K, k + (i_c - HK) * K) + o_q[:, None] * (HK * K) + o_k[None, :]
        tl.store(p_y, unit(b_0, by).to(q.dtype.element_ty))
        tl.store(p_y + HK * K, unit(b_1, by).to(q.dtype.element_ty))
        tl.store(p_y + 2 * HK * K, unit(b_2, by).to(q.dtype.element_ty))
        tl.store(p_y + 3 * HK * K, unit(b_3, by).to(q.dtype.element_ty))
    elif i_c < 2 * HK + HV:
        i_h, o_v = i_c - 2 * HK, tl.arange(0, V)
        o_c = 2 * HK * K + i_h * V + o_v
        b_0, b_1, b_2, b_3 = conv_four(x, conv, p_state, half, o_j, begin, end, stride_x, o_c, channels)
        b_even = tl.join(silu(b_0).to(v.dtype.element_ty), silu(b_2).to(v.dtype.element_ty))
        b_odd = tl.join(silu(b_1).to(v.dtype.element_ty), silu(b_3).to(v.dtype.element_ty))
        b_y = tl.join(b_even, b_odd)  # [BT / 4, V, 2, 2]
        p_v = v + (i_n.to(tl.int64) * HV + i_h) * (V * 64) + o_i[None, :] + o_v[:, None] * 64
        tl.store(p_v, tl.reshape(tl.permute(b_y, (1, 0, 2, 3)), [V, BT]))
    else:
        o_h = tl.arange(0, BH)
        m_h, m_t = (o_h < HV)[None, :], (o_i < end)[:, None]
        p_b = x + o_i[:, None] * stride_x + (channels + HV * V + o_h)[None, :]
        b_b = tl.load(p_b, mask=m_t & m_h, other=0.0).to(tl.float32)
        b_a = tl.load(p_b + HV, mask=m_t & m_h, other=0.0).to(tl.float32)
        b_a += tl.load(dt_bias + o_h, mask=o_h < HV, other=0.0)[None, :]
        b_g = -tl.load(decay + o_h, mask=o_h < HV, other=0.0)[None, :] * softplus(b_a)
        o_g = o_t[:, None] * HV + o_h[None, :]
        tl.store(g + o_g, tl.where(m_t, b_g, 0.0), mask=m_h)
        tl.store(beta + o_g, tl.where(m_t, 1.0 / (1.0 + tl.exp(-b_b)), 0.0), mask=m_h)


@triton.jit
def gdn_norm_kernel(
    o,  # [N, Hv, V, 64]
    z,  # [T, Hv, V], rows stride_z apart
    weight,  # [V] f32
    out,  # [T, Hv, V]
    parts,  # [N, 4]
    stride_z,
    eps,
    HV: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
):
    i_h, i_t = tl.program_id(0), tl.program_id(1)
    i_n = (i_t // (64 // BT)).to(tl.int64)
    o_i, o_v = i_t % (64 // BT) * BT + tl.arange(0, BT), tl.arange(0, V)
    slot, end, first = tl.load(parts + i_n * 4), tl.load(parts + i_n * 4 + 2), tl.load(parts + i_n * 4 + 3)
    if slot < 0:
        return
    p_o = o + (i_n * HV + i_h) * (V * 64) + o_i[None, :] + o_v[:, None] * 64
    b_o = tl.trans(tl.load(p_o)).to(tl.float32)  # rows past the prompt's end are not kept
    b_o *= tl.rsqrt(tl.sum(b_o * b_o, 1) / V + eps)[:, None] * tl.load(weight + o_v)[None, :]
    o_t = first + o_i
    m_t = (o_t < end)[:, None]
    b_z = tl.load(z + o_t[:, None] * stride_z + (i_h * V + o_v)[None, :], mask=m_t, other=0.0).to(tl.float32)
    tl.store(out + (o_t[:, None] * HV + i_h) * V + o_v[None, :], (b_o * silu(b_z)).to(out.dtype.element_ty), mask=m_t)


def prepare(
    x: Tensor, net: DeltaNet, conv_states: Tensor, segments: Segments, out: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, g, beta as delta_chunks takes them; conv_states are replaced by the next call's, and the rows of `out`
    that are padding become zeros.
    """
    Hk, Hv, K, V = net.key_heads, net.value_heads, net.key_dim, net.value_dim
    N, BT = len(segments.parts), TOKENS
    q, k = (torch.empty(N * CHUNK, Hk, K, dtype=x.dtype, device=x.device) for _ in range(2))
    v = torch.empty(N, Hv, V, CHUNK, dtype=x.dtype, device=x.device)
    g, beta = (torch.empty(N * CHUNK, Hv, dtype=torch.float32, device=x.device) for _ in range(2))
    gdn_inputs_kernel[2 * Hk + Hv + 1, N * (CHUNK // BT)](
        x, net.conv, conv_states, net.decay, net.dt_bias, q, k, v, g, beta, out,
        segments.parts, x.stride(0), conv_states.stride(0), K**-0.5,
        HK=Hk, HV=Hv, K=K, V=V, BT=BT, BH=triton.next_power_of_2(Hv), num_warps=WARPS,
        maxnreg=REGISTERS,
    )  # fmt: skip
    return q, k, v, g, beta


def suits_hopper(x: Tensor, net: DeltaNet) -> bool:
    """Whether scan_hopper.py takes the place of gdn_scan_kernel and the norm. Its copies begin at every 16 bytes."""
    if not has_gluon(x.device) or sm_count(x.device) < MIN_SMS or x.dtype != torch.bfloat16:
        return False
    aligned = (x.data_ptr() + 2 * net.channels) % 16 == 0 and x.stride(0) % 8 == 0
    return aligned and net.key_dim == net.value_dim == 128


def tiles(x: Tensor, width: int) -> Any:
    """x as a matrix of rows, read and written in tiles of 64 rows and `width` columns."""
    layout = gl.NVMMASharedLayout.get_default_for([64, width], gl.bfloat16)
    return TensorDescriptor.from_tensor(x, [64, width], layout)


def scan_norm_hopper(
    q: Tensor, k: Tensor, v: Tensor, inverse: Tensor, within: Tensor, gates: Tensor, states: Tensor,
    z: Tensor, weight: Tensor, eps: float, segments: Segments, out: Tensor,
) -> None:  # fmt: skip
    """The scan over all chunks, and the gated norm, into out [T, Hv V]; inputs as delta_chunks', z [T, Hv V]."""
    from hybridkv.kernels.gdn.scan_hopper import gdn_scan_hopper_kernel

    (_, Hk, K), (_, Hv, V, C) = k.shape, v.shape
    gdn_scan_hopper_kernel[V // 64, Hv, len(segments.slots)](
        tiles(k.flatten(1), K), tiles(q.flatten(1), K), *(tiles(t.view(-1, C), C) for t in (v, inverse, within)),
        tiles(z, 64), gates, states, weight, tiles(out, 64), out, segments.slots, segments.starts, segments.ends,
        states.stride(0), out.stride(0), eps, HK=Hk, HV=Hv, num_warps=4,
    )  # fmt: skip


def _prefill_piece(
    x: Tensor, net: DeltaNet, conv_states: Tensor, states: Tensor, segments: Segments, out: Tensor
) -> None:
    Hv, V, BT = net.value_heads, net.value_dim, TOKENS
    q, k, v, g, beta = prepare(x, net, conv_states, segments, out)
    z = x[:, net.channels : net.channels + Hv * V]
    if suits_hopper(x, net):
        solved = solve(q, k, g, beta, segments)
        scan_norm_hopper(q, k, v, *solved, states, z, net.norm, net.eps, segments, out)
        return
    o = delta_chunks(q, k, v, g, beta, states, segments)
    gdn_norm_kernel[Hv, len(segments.parts) * (CHUNK // BT)](
        o, z, net.norm, out, segments.parts, x.stride(0), net.eps, HV=Hv, V=V, BT=BT, num_warps=4
    )


@lru_cache(maxsize=32)
def _segments(spans: tuple[Span, ...], device: torch.device) -> Segments:
    """Made once, for all layers; and a copy from the host cannot be captured."""
    return Segments.of(spans, device)


def gdn_prefill_triton(
    x: Tensor, net: DeltaNet, conv_states: Tensor, states: Tensor, segments: Segments, out: Tensor
) -> None:
    assert x.stride(1) == 1 and out.is_contiguous() and net.conv.is_contiguous()
    assert conv_states[0].is_contiguous() and states[0].is_contiguous()
    if len(x) <= PIECE:
        _prefill_piece(x, net, conv_states, states, segments, out)
        return
    assert segments.spans is not None, f"a graph has more than the {PIECE} tokens that are computed at once"
    for spans in pieces(segments.spans, PIECE):
        begin, end = spans[0][1], spans[-1][2]
        own = _segments(tuple((slot, a - begin, b - begin) for slot, a, b in spans), x.device)
        _prefill_piece(x[begin:end], net, conv_states, states, own, out[begin:end])


def gdn_prefill_torch(
    x: Tensor, net: DeltaNet, conv_states: Tensor, states: Tensor, segments: Segments, out: Tensor
) -> None:
    """The definition for each prompt in turn."""
    spans = segments.spans
    if spans is None:
        starts = segments.starts.tolist()
        spans = list(zip(segments.slots.tolist(), starts, starts[1:]))
    for slot, begin, end in spans:
        if slot < 0:
            out[begin:end] = 0
        elif begin < end:
            out[begin:end] = gdn_prefill_ref(x[begin:end], net, conv_states[slot], states[slot])


def gdn_prefill(
    x: Tensor,  # [T, q | k | v | z | b | a]
    net: DeltaNet,
    conv_states: Tensor,  # [slots, W - 1, channels], oldest input first; left as the next call needs them
    states: Tensor,  # [slots, Hv, K, V], likewise
    segments: Segments | None = None,  # of x; None: x is one prompt, whose own conv_state and state these are
    out: Tensor | None = None,  # [T, Hv V]: where results go; rows of tokens in no segment stay as they are
) -> Tensor:  # [T, Hv V] in x's dtype
    if segments is None:
        conv_states, states = conv_states.unsqueeze(0), states.unsqueeze(0)
        segments = _segments(((0, 0, len(x)),), x.device)
    if out is None:
        out = torch.empty(len(x), net.value_heads * net.value_dim, dtype=x.dtype, device=x.device)
    dims = net.key_dim in DIMS and net.value_dim in DIMS
    taken = use_triton(x) and dims and net.conv.shape[1] == CONV_WIDTH
    (gdn_prefill_triton if taken else gdn_prefill_torch)(x, net, conv_states, states, segments, out)
    return out
