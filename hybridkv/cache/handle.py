"""LayerHandle: all that a layer sees of the cache in one step. It allocates no pages and decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hybridkv.cache.step import ForwardStep, StreamView
from hybridkv.kernels.activation import sigmoid_mul, sigmoid_mul_exact
from hybridkv.kernels.attention.append import append
from hybridkv.kernels.attention.decode import attention_decode
from hybridkv.kernels.attention.exact import attention_exact
from hybridkv.kernels.attention.inputs import attention_inputs
from hybridkv.kernels.attention.prefill import attention_prefill
from hybridkv.kernels.formats.kv_format import Pages, pages_of
from hybridkv.kernels.gdn.prefill import gdn_prefill
from hybridkv.kernels.gdn.rule_exact import causal_conv_exact, gated_delta_exact
from hybridkv.kernels.gdn.step import gdn_step
from hybridkv.kernels.gdn.weights import DeltaNet

Angles = tuple[Tensor, Tensor]  # cos, sin [T, 1, R]
TAIL = 64  # tokens of a chunk whose attention the last layer computes at the least: as many as a budget's window has


class LayerHandle:
    """A layer's pages and state rows, and the step's ops on them."""

    def __init__(
        self,
        step: ForwardStep,
        view: StreamView | None,  # None: the layer has no pages
        rows: slice,  # its streams in the view
        paged: dict[str, Tensor],  # [N, P, ...]
        state: dict[str, Tensor],  # [slots, ...]
    ) -> None:
        self.step, self.view, self.rows, self.paged, self.state = step, view, rows, paged, state

    def pages(self, name: str) -> Pages:
        """The layer's pool of keys ("k") or values ("v")."""
        return pages_of(self.paged, name)

    @property
    def places(self) -> Tensor:
        """[G, T] where the step's keys and values go."""
        assert self.view is not None and self.view.entry_index is not None
        return self.view.entry_index[self.rows]

    # ---- attention

    def append(self, k: Tensor, v: Tensor) -> None:
        """Store this step's keys and values [T, G, D]."""
        append(self.pages("k"), self.pages("v"), k, v, self.places)

    def store(
        self,
        x: Tensor,  # [T, (H + 2 G) D], gated [T, (2 H + 2 G) D]: (query | gate) head by head, keys, values
        angles: Angles,
        heads: int,
        head_dim: int,
        gated: bool = False,
        norms: tuple[Tensor, Tensor] | None = None,  # [D] f32 of queries and of keys
        eps: float = 0.0,
    ) -> Tensor:
        """Norm and turn queries and keys, store keys and values, keep the last queries -> queries [T, H, D]."""
        pages, ring = (self.pages("k"), self.pages("v")), self.state.get("queries")
        q_norm, k_norm = norms or (None, None)
        kv_heads = self.rows.stop - self.rows.start
        return attention_inputs(
            x, *angles, *pages, self.places, heads, kv_heads, head_dim, gated, q_norm, k_norm, eps,
            ring, self.step.query_rows if ring is not None else None,
        )  # fmt: skip

    def attend(self, q: Tensor, scale: float, last: bool = False, gate: Tensor | None = None) -> Tensor:
        """Causal attention of q [T, H, D] over what is stored, this step's tokens included, multiplied by sigmoid(gate)
        if there is one. `last`: this is the last layer, where only the tails of chunks are computed; the other rows
        hold anything.
        """
        assert self.view is not None
        step, n, pages = self.step, self.step.num_decodes, (self.pages("k"), self.pages("v"))
        table, ends, rows = self.view.table[:, self.rows], self.view.device_lengths[:, self.rows], step.index.slots
        lengths = None if self.view.lengths is None else self.view.lengths[:, self.rows]
        if step.exact:
            assert lengths is not None
            mixed = attention_exact(q, *pages, table[rows], lengths, step.query_start_loc, scale)
            return mixed if gate is None else sigmoid_mul_exact(mixed, gate).view_as(mixed)
        ring, kept = self.state.get("lse"), step.query_rows  # [query_buffers, W, H]
        lse = None if ring is None or kept is None else (ring.view(-1, ring.shape[-1]), kept)
        parts = []
        if n:
            part, few = None if lse is None else (lse[0], lse[1][:n]), None if lengths is None else lengths[:n]
            own = None if gate is None else gate[:n]
            parts.append(
                attention_decode(
                    q[:n],
                    *pages,
                    table,
                    few,
                    scale,
                    ends[:n],
                    rows=rows[:n],
                    lse=part,
                    gate=own,
                    keys=self.view.max_entries,
                )
            )
        if n < len(step.slots):
            assert lengths is not None
            keep = len(q) if step.tail is None or not last else max(step.tail, TAIL)
            if lse is not None and ring is not None:
                keep = max(keep, ring.shape[1])  # the sums of these queries are kept
            some = [slice(max(a, b - keep), b) for a, b in pairwise(step.query_start_loc[n:])]
            at = [0, *accumulate(part.stop - part.start for part in some)]
            part = None if lse is None else (lse[0], _joined(lse[1], some))
            args = (lengths[n:], at, scale, ends[n:])
            mixed = attention_prefill(_joined(q, some), *pages, table, *args, rows=rows[n:], lse=part)
            if gate is not None:
                mixed = sigmoid_mul(mixed, _joined(gate, some)).view_as(mixed)
            parts.append(mixed if at[-1] == len(q) - n else _spread(mixed, some, n, len(q)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def capture(self, q: Tensor) -> None:
        """Keep the last W queries of each request that has a ring: the one of position p lies in row p mod W, whatever
        the chunks were. `store` does it too.
        """
        if "queries" in self.state and self.step.query_rows is not None:
            ring, rows = self.state["queries"], self.step.query_rows  # [query_buffers, W, H, D]
            kept = rows >= 0
            ring.view(-1, *q.shape[1:])[rows[kept]] = q[kept].to(ring.dtype)

    # ---- Gated DeltaNet

    def delta_net(self, x: Tensor, net: DeltaNet) -> Tensor:
        """What a layer computes between its projections: x [T, q | k | v, z, b, a] -> [T, Hv V]."""
        step, n, tails, states = self.step, self.step.num_decodes, self.state["conv"], self.state["recurrent"]
        parts = [gdn_step(x[:n], net, tails, states, step.index.slots[:n])] if n else []
        parts += [gdn_prefill(x[a:b], net, tails[slot], states[slot]) for slot, a, b in step.chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def convolve_exact(self, x: Tensor, weight: Tensor) -> Tensor:
        """silu(causal convolution) of x [T, C] f32, each request continuing from its own tail."""
        return self._each(self.state["conv"], lambda rows, part: causal_conv_exact(part(x), weight, rows))

    def delta_rule_exact(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Gated delta rule over q, k [T, H, K], v [T, H, V], g, beta [T, H], each request on its own state -> [T, H,
        V].
        """
        return self._each(
            self.state["recurrent"],
            lambda rows, part: gated_delta_exact(part(q), part(k), part(v), part(g), part(beta), rows),
        )

    def _each(self, state: Tensor, run: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]) -> Tensor:
        """`run(state rows [B, ...], part)` for the single tokens together and for each chunk, joined as [T, ...].

        `part` cuts [T, ...] down to the tokens in question, [B, tokens, ...].
        """
        n, parts = self.step.num_decodes, []
        if n:
            slots = self.step.index.slots[:n]
            rows = state[slots]
            parts.append(run(rows, lambda x: x[:n].unsqueeze(1)).squeeze(1))
            state[slots] = rows
        for slot, a, b in self.step.chunks:
            parts.append(run(state[slot : slot + 1], lambda x, a=a, b=b: x[a:b].unsqueeze(0)).squeeze(0))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _joined(x: Tensor, parts: list[slice]) -> Tensor:
    """Parts of x one after the other, without a copy where there is nothing between them."""
    if all(a.stop == b.start for a, b in pairwise(parts)):
        return x[parts[0].start : parts[-1].stop]
    return torch.cat([x[part] for part in parts])


def _spread(x: Tensor, parts: list[slice], first: int, last: int) -> Tensor:
    """The reverse, as rows `first` to `last` of what the parts are parts of; the others hold anything."""
    out = x.new_empty(last - first, *x.shape[1:])
    for part, own in zip(parts, x.split([part.stop - part.start for part in parts]), strict=True):
        out[part.start - first : part.stop - first] = own
    return out
