"""Gated DeltaNet as a mixer: the fast form and the exact form.

    x -> projection: q | k | v, z, b, a -> causal convolution of q | k | v -> gated delta rule on the recurrent state
      -> norm, gated by z -> projection

Each request continues from its own conv_state and recurrent state. The requests of a step that decode one token run
together, and so do its prompt chunks. In exact mode the chunks run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridkv.cache import ForwardStep, LayerHandle
from hybridkv.kernels.exact import sigmoid_exact, softplus_exact
from hybridkv.kernels.gdn.prefill import gdn_prefill
from hybridkv.kernels.gdn.rule_exact import causal_conv_exact, gated_delta_exact
from hybridkv.kernels.gdn.segments import Segments, most_parts
from hybridkv.kernels.gdn.step import gdn_step
from hybridkv.kernels.gdn.weights import DeltaNet
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.norm import gated_rms_norm_exact, l2_norm_exact
from hybridkv.models.decoder import Angles


@dataclass(frozen=True)
class GatedDeltaNet:
    """A layer with recurrent state: projections, convolution, the gated delta rule, a gated norm."""

    inputs: Linear  # [channels + Hv V + 2 Hv, hidden]: q | k | v, z, b, a
    net: DeltaNet
    out: Linear  # [hidden, Hv V]

    def __call__(
        self, x: Tensor, angles: Angles, handle: LayerHandle, rows: Tensor | None, h: Tensor | None
    ) -> Tensor | None:
        mixed = self.mix(self.inputs(x), handle)
        return self.out.add_to(h, mixed if rows is None else mixed[rows])

    def mix(self, x: Tensor, handle: LayerHandle) -> Tensor:
        """What the layer computes between its projections: [T, q | k | v, z, b, a] -> [T, Hv V]."""
        return delta_net(handle, x, self.net)


@dataclass(frozen=True)
class ExactGatedDeltaNet(GatedDeltaNet):
    """Gated DeltaNet whose bits do not depend on the batch or on how a prompt is divided into chunks."""

    def mix(self, x: Tensor, handle: LayerHandle) -> Tensor:
        net, T = self.net, len(x)
        keys, values = net.key_heads * net.key_dim, net.value_heads * net.value_dim
        mixed, z, b, a = x.split(net.columns, -1)
        q, k, v = convolve_exact(handle, mixed, net.conv).split([keys, keys, values], -1)
        group = net.value_heads // net.key_heads
        q, k = (l2_norm_exact(t.view(T, net.key_heads, net.key_dim)).repeat_interleave(group, 1) for t in (q, k))
        v, z = (t.view(T, net.value_heads, net.value_dim) for t in (v, z))
        g = -net.decay * softplus_exact(a.float() + net.dt_bias)
        beta = sigmoid_exact(b.float())
        o = delta_rule_exact(handle, q * net.key_dim**-0.5, k, v, g, beta)
        return gated_rms_norm_exact(o, z, net.norm, net.eps).reshape(T, -1).to(x.dtype)


def delta_net(handle: LayerHandle, x: Tensor, net: DeltaNet) -> Tensor:
    """[T, q | k | v, z, b, a] -> [T, Hv V]; the state rows of the step's requests move on."""
    step, n = handle.step, handle.step.num_decodes
    conv_states, states = handle.state["conv"], handle.state["recurrent"]
    out = torch.empty(len(x), net.value_heads * net.value_dim, dtype=x.dtype, device=x.device)
    if n:
        gdn_step(x[:n], net, conv_states, states, handle.slots[:n], out[:n])
    if n < step.rows:  # after the others: in a graph, rows of decoding requests that are missing are prompt tokens
        gdn_prefill(x, net, conv_states, states, step.once("segments", segments), out)
    return out


def segments(step: ForwardStep) -> Segments:
    """The prompt chunks of a step, as gdn_prefill takes them."""
    n, index, tokens = step.num_decodes, step.index, int(step.host.query_start_loc[-1])
    spans = None if step.any_length else step.chunks
    return Segments.make(index.slots[n:], index.query_start_loc[n:], most_parts(tokens, step.rows - n), spans)


def convolve_exact(handle: LayerHandle, x: Tensor, weight: Tensor) -> Tensor:
    """silu(causal convolution) of x [T, C] f32, each request continuing from its own conv_state."""
    return _each(handle, "conv", lambda state, part: causal_conv_exact(part(x), weight, state))


def delta_rule_exact(handle: LayerHandle, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule over q, k [T, H, K], v [T, H, V], g, beta [T, H], each request on its own state.

    Returns [T, H, V].
    """
    return _each(
        handle,
        "recurrent",
        lambda state, part: gated_delta_exact(part(q), part(k), part(v), part(g), part(beta), state),
    )


def _each(handle: LayerHandle, name: str, run: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]) -> Tensor:
    """`run(state rows [B, ...], part)` for the decoding requests together and for each chunk, joined as [T, ...].

    `part` takes the tokens in question out of a tensor [T, ...], as [B, tokens, ...].
    """
    state, n, results = handle.state[name], handle.step.num_decodes, []
    if n:
        slots = handle.slots[:n]
        rows = state[slots]
        results.append(run(rows, lambda x: x[:n].unsqueeze(1)).squeeze(1))
        state[slots] = rows
    for slot, begin, end in handle.step.chunks:
        rows = state[slot : slot + 1]
        results.append(run(rows, lambda x, a=begin, b=end: x[a:b].unsqueeze(0)).squeeze(0))
    return results[0] if len(results) == 1 else torch.cat(results)
