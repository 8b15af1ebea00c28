"""Gated DeltaNet as a mixer: the fast form and the exact form.

    x -> projection: q | k | v, z, b, a -> causal convolution of q | k | v -> gated delta rule on the recurrent state
      -> norm, gated by z -> projection

Each request continues from its own conv_state and recurrent state. The requests of a step that decode one token run
together, and so do its prompt chunks; in exact mode all of them do, in one form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridkv.cache import ForwardStep, LayerHandle
from hybridkv.kernels.gdn.exact import Requests, gdn_exact
from hybridkv.kernels.gdn.prefill import gdn_prefill
from hybridkv.kernels.gdn.segments import Segments, most_parts
from hybridkv.kernels.gdn.step import gdn_step
from hybridkv.kernels.gdn.weights import DeltaNet
from hybridkv.kernels.linear.linear import Linear
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
        index = handle.step.index
        requests = Requests(index.slots, index.query_start_loc, index.token_to_req)
        return gdn_exact(x, self.net, handle.state["conv"], handle.state["recurrent"], requests)


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
