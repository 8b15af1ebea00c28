"""Gated DeltaNet, what it computes: the causal convolution in front of it and the gated delta rule, as a recurrence and
in chunks. gdn_step and gdn_prefill run them, with everything else between a layer's two projections.

For each value head, with state S [K, V], decay g <= 0, strength beta, unit key k and scaled unit query q:

    S <- exp(g) S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q

Over a chunk of 64 tokens with G_i = g_1 + .. + g_i the recurrence becomes a few matrix products: the corrected values
U and the keys' reach W into the incoming state solve one unit lower-triangular system,

    A_ij = beta_i (k_i . k_j) exp(G_i - G_j)  for j < i,    (I + A) [U | W] = diag(beta) [V | exp(G) K]
    V' = U - W S;   O = (q exp(G)) S + tril(q k^T exp(G_i - G_j)) V';   S <- exp(G_64) S + (k exp(G_64 - G))^T V'

A last chunk is padded with zeros (g = 0, beta = 0), which leaves S as it is. All arithmetic is f32. State is changed
in place.

The forms of exact mode are in rule_exact.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


def causal_conv_ref(x: Tensor, weight: Tensor, conv_state: Tensor) -> Tensor:
    """silu of the depthwise causal convolution of x [T, C] with weight [C, W]; the last column meets the newest token.

    `conv_state` [W - 1, C] holds the inputs before x, oldest first, and is left holding those before the next call.
    """
    width, T = weight.shape[1], len(x)
    rows = torch.cat((conv_state, x.float()))  # [W - 1 + T, C]
    out = rows[:T] * weight[:, 0].float()
    for i in range(1, width):
        out.addcmul_(rows[i : i + T], weight[:, i].float())
    conv_state.copy_(rows[T:])
    return F.silu(out)


def causal_conv_step_ref(x: Tensor, weight: Tensor, conv_states: Tensor) -> Tensor:
    """One token of each of B requests: x [B, C], weight [C, W], conv_states [B, W - 1, C] -> [B, C]."""
    rows = torch.cat((conv_states, x.float().unsqueeze(1)), 1)  # [B, W, C]
    conv_states.copy_(rows[:, 1:])
    return F.silu((rows * weight.float().t()).sum(1))


def gated_delta_ref(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The recurrence over T tokens of one request.

    q, k [T, H, K], v [T, H, V], g, beta [T, H], state [H, K, V] -> [T, H, V].
    """
    out = torch.empty_like(v)
    for t in range(len(v)):
        out[t] = gated_delta_step_ref(q[t, None], k[t, None], v[t, None], g[t, None], beta[t, None], state[None])[0]
    return out


def gated_delta_step_ref(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor) -> Tensor:
    """One token of B requests. q, k [B, H, K], v [B, H, V], g, beta [B, H], states [B, H, K, V] -> [B, H, V]."""
    states.mul_(g.exp()[..., None, None])
    u = beta.unsqueeze(-1) * (v - (k.unsqueeze(-2) @ states).squeeze(-2))
    states.add_(k.unsqueeze(-1) * u.unsqueeze(-2))
    return (q.unsqueeze(-2) @ states).squeeze(-2)


def gated_delta_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The same as gated_delta_ref, 64 tokens at a time."""
    T = len(v)
    pad = -T % CHUNK
    q, k, v, g, beta = (
        F.pad(x, (0, 0) * (x.ndim - 1) + (0, pad)).transpose(0, 1).unflatten(1, (-1, CHUNK)) for x in (q, k, v, g, beta)
    )  # [H, chunks, 64, ...]
    decay = g.double().cumsum(-1)  # G; in f32 one strong decay would cost all later differences their digits
    below = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).tril()
    reach = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).float()  # G_i - G_j
    reach = reach.masked_fill(~below, -torch.inf).exp()  # exp(G_i - G_j), j <= i
    to_end, decay = (decay[..., -1:] - decay).float(), decay.float()
    A = (beta.unsqueeze(-1) * (k @ k.transpose(-1, -2)) * reach).tril(-1)
    right = beta.unsqueeze(-1) * torch.cat((v, k * decay.exp().unsqueeze(-1)), -1)
    solved = torch.linalg.solve_triangular(A, right, upper=False, unitriangular=True)
    U, W = solved.split((v.shape[-1], k.shape[-1]), -1)
    within = (q @ k.transpose(-1, -2)) * reach
    q_in = q * decay.exp().unsqueeze(-1)
    k_out = k * to_end.exp().unsqueeze(-1)
    alpha = decay[..., -1].exp()  # [H, chunks]: the decay over a whole chunk
    out = torch.empty_like(v)
    for c in range(v.shape[1]):
        fresh = U[:, c] - W[:, c] @ state
        out[:, c] = q_in[:, c] @ state + within[:, c] @ fresh
        state.mul_(alpha[:, c, None, None]).add_(k_out[:, c].transpose(-1, -2) @ fresh)
    return out.flatten(1, 2)[:, :T].transpose(0, 1)
