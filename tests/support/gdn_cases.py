"""What the tests of the Gated DeltaNet kernels share: small layers, inputs, and the delta rule in float64."""

import torch
from torch import Tensor

from hybridkv.kernels.gdn.prefill import gdn_prefill_triton, prepare
from hybridkv.kernels.gdn.rule import CHUNK
from hybridkv.kernels.gdn.segments import Segments
from hybridkv.kernels.gdn.weights import DeltaNet

# Relative RMS of the delta rule against float64 on the same q, k, v. f32: sums of products of 64 and K, as in rule.py.
# bf16: state, corrected values, (I + A)^-1 and P are rounded to bf16 on their way into products, 1.1e-3 RMS each, and a
# result is a difference of two sums about its size.
BOUND = {torch.float32: 4e-6, torch.bfloat16: 6e-3}


def make_net(
    key_heads: int = 1, value_heads: int = 2, K: int = 16, V: int = 16, width: int = 4, device: str = "cpu"
) -> DeltaNet:
    channels = 2 * key_heads * K + value_heads * V
    return DeltaNet(
        key_heads, value_heads, K, V,
        conv=torch.randn(channels, width, device=device) / width**0.5,
        decay=torch.rand(value_heads, device=device) * 2,
        dt_bias=torch.randn(value_heads, device=device) - 2,
        norm=torch.rand(V, device=device) + 0.5,
        eps=1e-6,
    )  # fmt: skip


def make_x(T: int, net: DeltaNet, dtype: torch.dtype) -> Tensor:
    """A slice of wider rows, as a fused projection may give it."""
    width = sum(net.columns)
    return torch.randn(T, width + 16, device=net.conv.device).to(dtype)[:, 8 : 8 + width]


def start(net: DeltaNet, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Tail and state that something lies in."""
    device = net.conv.device
    conv_state = torch.randn(net.conv.shape[1] - 1, net.channels, device=device)
    state = torch.randn(net.value_heads, net.key_dim, net.value_dim, device=device) * 0.3
    return conv_state, state.to(dtype)


def one_prompt(tokens: int, device: torch.device) -> Segments:
    return Segments.of([(0, 0, tokens)], device)


def prefill_triton(x: Tensor, net: DeltaNet, conv_state: Tensor, state: Tensor) -> Tensor:
    """One prompt through the kernels."""
    out = torch.empty(len(x), net.value_heads * net.value_dim, dtype=x.dtype, device=x.device)
    gdn_prefill_triton(x, net, conv_state[None], state[None], one_prompt(len(x), x.device), out)
    return out


def prepare_one(x: Tensor, net: DeltaNet, conv_state: Tensor) -> tuple[Tensor, ...]:
    return prepare(x, net, conv_state[None], one_prompt(len(x), x.device), x)


def chunked(v: Tensor) -> Tensor:
    """[N * 64, H, V] -> [N, H, V, 64], as the kernels keep values and results."""
    return v.unflatten(0, (-1, CHUNK)).permute(0, 2, 3, 1).contiguous()


def unchunked(v: Tensor) -> Tensor:
    return v.permute(0, 3, 1, 2).flatten(0, 1)


def delta_in_float64(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence, a token at a time. q, k [T, Hk, K], v [T, Hv, V], g, beta [T, Hv]; outputs and the new state."""
    group = v.shape[1] // k.shape[1]
    q, k = (t.double().repeat_interleave(group, 1) for t in (q, k))
    v, g, beta, S = (t.double() for t in (v, g, beta, state))
    out = torch.empty_like(v)
    for t in range(len(v)):
        S = g[t].exp()[:, None, None] * S
        u = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", S, k[t]))
        S = S + k[t].unsqueeze(-1) * u.unsqueeze(-2)
        out[t] = torch.einsum("hkv,hk->hv", S, q[t])
    return out, S
