"""Gated DeltaNet in exact mode: the convolution and the delta rule (rule.py) with results that no batch changes.

One formula serves for one token and for many, in operations whose result depends on their own inputs alone
(kernels/exact.py). The kernels of a GPU are in exact_kernel.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.exact import silu_exact, tree_sum


def causal_conv_exact(x: Tensor, weight: Tensor, conv_states: Tensor) -> Tensor:
    """T tokens of each of B requests: x [B, T, C], weight [C, W], conv_states [B, W - 1, C] -> [B, T, C]."""
    T = x.shape[1]
    rows = torch.cat((conv_states, x.float()), 1)  # [B, W - 1 + T, C]
    out = rows[:, :T] * weight[:, 0].float()
    for i in range(1, weight.shape[1]):
        out = out + rows[:, i : i + T] * weight[:, i].float()
    conv_states.copy_(rows[:, T:])
    return silu_exact(out)


def gated_delta_exact(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor) -> Tensor:
    """T tokens of each of B requests.

    q, k [B, T, H, K], v [B, T, H, V], g, beta [B, T, H], states [B, H, K, V] f32, changed in place -> [B, T, H, V].
    """
    out = torch.empty_like(v)
    alpha = g.exp()[..., None, None]
    q, k, v, beta = q.unsqueeze(-1), k.unsqueeze(-1), v.unsqueeze(-2), beta[..., None, None]
    for t in range(v.shape[1]):
        states.mul_(alpha[:, t])
        u = beta[:, t] * (v[:, t] - tree_sum(states * k[:, t], -2))  # [B, H, 1, V]
        states.add_(k[:, t] * u)
        out[:, t] = tree_sum(states * q[:, t], -2).squeeze(-2)
    return out
