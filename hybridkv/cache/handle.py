"""LayerHandle: all that a layer sees of the cache in one step. It allocates no pages and decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from hybridkv.cache.step import ForwardStep, StreamView
from hybridkv.kernels.append import append
from hybridkv.kernels.attention_decode import attention_decode
from hybridkv.kernels.attention_exact import attention_exact
from hybridkv.kernels.attention_prefill import attention_prefill
from hybridkv.kernels.gdn import (
    causal_conv,
    causal_conv_exact,
    causal_conv_step,
    gated_delta,
    gated_delta_exact,
    gated_delta_step,
)
from hybridkv.kernels.quant import Fp8Pages, Pages


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
        scale = self.paged.get(f"{name}_scale")
        return self.paged[name] if scale is None else Fp8Pages(self.paged[name], scale)

    def append(self, k: Tensor, v: Tensor) -> None:
        """Store this step's keys and values [T, G, D]."""
        assert self.view is not None and self.view.entry_index is not None
        append(self.pages("k"), self.pages("v"), k, v, self.view.entry_index[self.rows])

    def attend(self, q: Tensor, scale: float) -> Tensor:
        """Causal attention of q [T, H, D] over what is stored, this step's tokens included."""
        assert self.view is not None
        if "queries" in self.state:
            self.capture(q)
        n, pages = self.step.singles, (self.pages("k"), self.pages("v"))
        table, lengths = self.view.table[:, self.rows], self.view.lengths[:, self.rows]
        if self.step.exact:
            return attention_exact(q, *pages, table, lengths, self.step.starts, scale)
        on_device = self.view.device_lengths[:, self.rows]
        parts = []
        if n:
            parts.append(attention_decode(q[:n], *pages, table[:n], lengths[:n], scale, on_device[:n]))
        if n < len(self.step.slots):
            starts = [s - n for s in self.step.starts[n:]]
            parts.append(attention_prefill(q[n:], *pages, table[n:], lengths[n:], starts, scale, on_device[n:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def capture(self, q: Tensor) -> None:
        """Keep the last W queries of each request: the one of position p lies in row p mod W, whatever the chunks
        were.
        """
        ring = self.state["queries"]  # [slots, W, H, D]
        W, step = ring.shape[1], self.step
        last = [range(max(a, b - W), b) for a, b in pairwise(step.starts)]
        rows = [i for r in last for i in r]
        at = [(step.begins[k] + i - step.starts[k]) % W for k, r in enumerate(last) for i in r]
        slots = [step.slots[k] for k, r in enumerate(last) for _ in r]
        ring[slots, at] = q[rows]

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """silu(causal convolution) of x [T, C] f32, each request continuing from its own tail."""
        n, tails = self.step.singles, self.state["conv"]
        if self.step.exact:
            return self._each(tails, lambda rows, part: causal_conv_exact(part(x), weight, rows))
        parts = []
        if n:
            rows = self.step.single_rows(tails)
            parts.append(causal_conv_step(x[:n], weight, rows))
            self.step.store_single_rows(tails, rows)
        parts += [causal_conv(x[a:b], weight, tails[slot]) for slot, a, b in self._chunks()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def delta_rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Gated delta rule over q, k [T, H, K], v [T, H, V], g, beta [T, H], each request on its own state -> [T, H,
        V].
        """
        n, states = self.step.singles, self.state["recurrent"]
        if self.step.exact:
            return self._each(
                states,
                lambda rows, part: gated_delta_exact(part(q), part(k), part(v), part(g), part(beta), rows),
            )
        parts = []
        if n:
            rows = self.step.single_rows(states)
            parts.append(gated_delta_step(q[:n], k[:n], v[:n], g[:n], beta[:n], rows))
            self.step.store_single_rows(states, rows)
        for slot, a, b in self._chunks():
            parts.append(gated_delta(q[a:b], k[a:b], v[a:b], g[a:b], beta[a:b], states[slot]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _each(self, state: Tensor, run: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]) -> Tensor:
        """`run(state rows [B, ...], part)` for the single tokens together and for each chunk, joined as [T, ...].

        `part` cuts [T, ...] down to the tokens in question, [B, tokens, ...].
        """
        n, parts = self.step.singles, []
        if n:
            rows = self.step.single_rows(state)
            parts.append(run(rows, lambda x: x[:n].unsqueeze(1)).squeeze(1))
            self.step.store_single_rows(state, rows)
        for slot, a, b in self._chunks():
            parts.append(run(state[slot : slot + 1], lambda x, a=a, b=b: x[a:b].unsqueeze(0)).squeeze(0))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _chunks(self) -> list[tuple[int, int, int]]:
        """(slot, begin, end) of each prompt chunk."""
        step = self.step
        return [
            (slot, a, b)
            for slot, a, b in zip(step.slots, step.starts, step.starts[1:], strict=False)
            if a >= step.singles
        ]
