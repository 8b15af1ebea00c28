"""gdn_exact: a Gated DeltaNet layer of exact mode between its two projections, for all tokens of a step.

    q, k, v = silu(conv(x));   q, k = l2norm(q) / sqrt(K), l2norm(k);   alpha = exp(-decay softplus(a + dt_bias))
    S <- alpha S;   u = sigmoid(b) (v - S^T k);   S <- S + k u^T;   o = S^T q;   out = rms_norm(o) silu(z)

A token's result depends on its own inputs and on the state before it: prompts in any chunks, single tokens, any company
give the same bits, state included. On a CPU this is rule_exact.py, for decoding requests together and for each prompt.
On a GPU it is three launches for all requests of a step, whatever they are: rows before the rule, the recurrence (with
the state in registers, o = alpha S^T q + (k . q) u from one pass over it), and the norm. Padding (slot -1) touches no
state and gives zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybridkv.kernels.backend import has_gluon, has_pdl, triton, use_triton
from hybridkv.kernels.exact import sigmoid_exact, softplus_exact
from hybridkv.kernels.gdn.exact_kernel import gdn_exact_inputs_kernel, gdn_exact_norm_kernel, gdn_exact_scan_kernel
from hybridkv.kernels.gdn.rule_exact import causal_conv_exact, gated_delta_exact
from hybridkv.kernels.gdn.weights import DeltaNet
from hybridkv.kernels.norm import gated_rms_norm_exact, l2_norm_exact
from hybridkv.kernels.overlap import MANY_TOKENS, can_overlap

ROWS = 8  # tokens of a program before the rule and in the norm
COLUMNS = 16  # value channels of a program of the recurrence, in Triton


class Requests(NamedTuple):
    """Whose tokens those of a step are, on the device."""

    slots: Tensor  # [B] state row of each request; -1: padding
    starts: Tensor  # [B + 1] first token of each request
    of_token: Tensor  # [T] request of each token


class ScanShape(NamedTuple):
    """How the recurrence is dealt out on Hopper GPUs (exact_hopper.py). One shape for any number of tokens."""

    channels: int  # value channels of a program
    columns: int  # of them that a thread has
    threads: int  # that share a column's key channels
    warps: int
    block: int  # tokens that are brought at a time
    blocks: int  # in shared memory
    registers: int | None = None  # of a thread at most


HOPPER_SHAPE = ScanShape(32, 2, 4, 2, 16, 2, 232)


def gdn_exact_torch(x: Tensor, net: DeltaNet, conv_states: Tensor, states: Tensor, requests: Requests) -> Tensor:
    T, keys, values = len(x), net.key_heads * net.key_dim, net.value_heads * net.value_dim
    parts = _parts(requests)
    if not parts:
        return x.new_zeros(T, values)
    mixed, z, b, a = x.split(net.columns, -1)
    q, k, v = _each(parts, T, conv_states, lambda rows, own: causal_conv_exact(own(mixed), net.conv, rows)).split(
        [keys, keys, values], -1
    )
    group = net.value_heads // net.key_heads
    q, k = (l2_norm_exact(t.view(T, net.key_heads, net.key_dim)).repeat_interleave(group, 1) for t in (q, k))
    v, z = (t.view(T, net.value_heads, net.value_dim) for t in (v, z))
    g = -net.decay * softplus_exact(a.float() + net.dt_bias)
    q, beta = q * net.key_dim**-0.5, sigmoid_exact(b.float())
    o = _each(parts, T, states, lambda s, own: gated_delta_exact(own(q), own(k), own(v), own(g), own(beta), s))
    out = gated_rms_norm_exact(o, z, net.norm, net.eps).reshape(T, -1).to(x.dtype)
    return out.masked_fill_(requests.slots[requests.of_token].unsqueeze(1) < 0, 0)


Part = tuple[Tensor, Tensor]  # slots [B], tokens [B, n]: requests with n tokens each


def _parts(requests: Requests) -> list[Part]:
    """Requests with one token together, then each prompt; without padding."""
    slots, starts = requests.slots.tolist(), requests.starts.tolist()
    spans = [span for span in zip(slots, starts, starts[1:]) if span[0] >= 0 and span[1] < span[2]]
    single = [span for span in spans if span[2] - span[1] == 1]
    groups = ([single] if single else []) + [[span] for span in spans if span[2] - span[1] > 1]
    device = requests.slots.device
    return [
        (
            torch.tensor([slot for slot, _, _ in group], device=device),
            torch.tensor([list(range(begin, end)) for _, begin, end in group], device=device),
        )
        for group in groups
    ]


def _each(parts: Sequence[Part], T: int, states: Tensor, run: Callable[[Tensor, Callable], Tensor]) -> Tensor:
    """`run(state rows [B, ...], own)` for each part, joined as [T, ...], zeros for padding. `own` takes a part's tokens
    out of a tensor [T, ...], as [B, n, ...].
    """
    out = None
    for slots, tokens in parts:
        rows = states[slots]
        found = run(rows, lambda x, at=tokens: x[at])
        states[slots] = rows
        out = found.new_zeros(T, *found.shape[2:]) if out is None else out
        out[tokens] = found
    assert out is not None
    return out


def suits_hopper(x: Tensor, net: DeltaNet, states: Tensor) -> bool:
    """Whether exact_hopper.py's kernel computes this. Its copies take 16 bytes at a time."""
    if not has_gluon(x.device) or net.key_dim != 128 or net.value_dim != 128 or net.conv.shape[1] != 4:
        return False
    return states.data_ptr() % 16 == 0 and states.stride(0) % 4 == 0


def gdn_exact_triton(
    x: Tensor,
    net: DeltaNet,
    conv_states: Tensor,
    states: Tensor,
    requests: Requests,
    shape: ScanShape | None = None,
) -> Tensor:
    T, B, (Hk, Hv, K, V) = len(x), len(requests.slots), (net.key_heads, net.value_heads, net.key_dim, net.value_dim)
    assert x.stride(1) == 1 and conv_states.stride()[1:] == (net.channels, 1) and net.conv.is_contiguous()
    assert states.stride()[1:] == (K * V, V, 1) and states.dtype == torch.float32
    out = torch.empty(T, Hv * V, dtype=x.dtype, device=x.device)
    if not T:
        return out
    width, BK, BV = net.conv.shape[1], triton.next_power_of_2(K), triton.next_power_of_2(V)
    qk = torch.empty(T, Hk, 2, K, dtype=torch.float32, device=x.device)
    v = torch.empty(T, Hv, V, dtype=x.dtype, device=x.device)
    gates = torch.empty(T, Hv, 4, dtype=torch.float32, device=x.device)
    o = torch.empty(T, Hv, V, dtype=torch.float32, device=x.device)
    slots, starts, of_token = requests
    overlap = has_pdl(x.device)  # in the code, so that it is the same for any number of tokens
    early = can_overlap(x, MANY_TOKENS)  # with more, programs that wait would take the place of those that work
    gdn_exact_inputs_kernel[Hk + Hv + 1, triton.cdiv(T, ROWS)](
        x, net.conv, conv_states, net.decay, net.dt_bias, qk, v, gates, slots, starts, of_token, T,
        x.stride(0), conv_states.stride(0), K**-0.5, HK=Hk, HV=Hv, K=K, V=V, WIDTH=width, BK=BK, BV=BV,
        BH=triton.next_power_of_2(Hv), BT=ROWS, OVERLAP=overlap, num_warps=4, launch_pdl=early,
        enable_fp_fusion=False,
    )  # fmt: skip
    strides = x.stride(0), conv_states.stride(0), states.stride(0)
    args = x, qk, v, gates, o, conv_states, states, slots, starts, *strides
    if shape is not None or suits_hopper(x, net, states):
        from hybridkv.kernels.gdn.exact_hopper import gdn_exact_hopper_kernel

        shape = shape or HOPPER_SHAPE
        gdn_exact_hopper_kernel[V // shape.channels, Hv, B](
            *args, HK=Hk, HV=Hv, BV=shape.channels, COLUMNS=shape.columns, THREADS=shape.threads, BLOCK=shape.block,
            BLOCKS=shape.blocks, num_warps=shape.warps, maxnreg=shape.registers, launch_pdl=early,
        )  # fmt: skip
    else:
        parts = triton.cdiv(V, COLUMNS)
        gdn_exact_scan_kernel[parts, Hv, B](
            *args, HK=Hk, HV=Hv, K=K, V=V, WIDTH=width, BK=BK, BV=COLUMNS,
            BC=triton.next_power_of_2(triton.cdiv(K, parts)), STAGES=3, OVERLAP=overlap, num_warps=2,
            launch_pdl=early,
        )  # fmt: skip
    z = x[:, net.channels : net.channels + Hv * V]
    gdn_exact_norm_kernel[Hv, triton.cdiv(T, ROWS)](
        o, z, net.norm, out, slots, of_token, T, x.stride(0), net.eps, HV=Hv, V=V, BV=BV, BT=ROWS, OVERLAP=overlap,
        num_warps=4, launch_pdl=early, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def gdn_exact(
    x: Tensor,  # [T, q | k | v, z, b, a]
    net: DeltaNet,
    conv_states: Tensor,  # [slots, W - 1, channels], oldest input first; left as the next call needs them
    states: Tensor,  # [slots, Hv, K, V] f32, likewise
    requests: Requests,
) -> Tensor:  # [T, Hv V] in x's dtype
    taken = use_triton(x) and net.conv.shape[1] > 1
    return (gdn_exact_triton if taken else gdn_exact_torch)(x, net, conv_states, states, requests)
