"""Full attention as a mixer: the fast form, the exact form, and what both declare to the cache.

    x -> projection -> norm and rotate queries and keys -> store keys and values -> attend -> (gate) -> projection

A family chooses whether queries and keys are normed head by head and whether a sigmoid gate multiplies the output.
The requests of a step that decode one token run together in one launch, its prompt chunks in another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import ClassVar

import torch
from torch import Tensor

from hybridkv.cache import ForwardStep, LayerHandle
from hybridkv.checkpoint.loader import Loader
from hybridkv.kernels.activation import sigmoid_mul, sigmoid_mul_exact
from hybridkv.kernels.attention.decode import attention_decode
from hybridkv.kernels.attention.decode_even import attention_even, suits_even
from hybridkv.kernels.attention.exact import attention_exact
from hybridkv.kernels.attention.inputs import attention_inputs
from hybridkv.kernels.attention.prefill import attention_prefill
from hybridkv.kernels.attention.prefill_plan import DevicePlan
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.rope import FEW_TOKENS, rope_matrices
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Angles

LseRows = tuple[Tensor, Tensor]  # LayerHandle.lse_rows
TAIL = 64  # tokens of a chunk that the last layer computes at least: as many as a budget's window has


@dataclass(frozen=True)
class Attention:
    """Full attention of a layer: projections, norm and rotation, store, attend, an output gate where there is one."""

    config: ModelConfig
    qkv: Linear  # [(H + 2 G) D, hidden]; gated [(2 H + 2 G) D, hidden]: (query | gate) head by head, keys, values
    out: Linear  # [hidden, H D]
    q_norm: Tensor | None = None  # [D] f32; None: queries are not normed
    k_norm: Tensor | None = None  # [D] f32
    gated: bool = False
    exact: ClassVar[bool] = False

    def __call__(
        self, x: Tensor, angles: Angles, handle: LayerHandle, rows: Tensor | None, h: Tensor | None
    ) -> Tensor | None:
        x = self.qkv(x)
        q = self.store(x, angles, handle)
        mixed = self.attend(handle, q, rows is not None, self.gate(x)).flatten(1)
        handle.observe(q)
        return self.out.add_to(h, mixed if rows is None else mixed[rows])

    def store(self, x: Tensor, angles: Angles, handle: LayerHandle) -> Tensor:
        """Norm and rotate queries and keys, store keys and values, keep the last queries -> queries [T, H, D]."""
        c = self.config
        return attention_inputs(
            x, *angles, handle.pages("k"), handle.pages("v"), handle.places, c.heads, c.kv_heads, c.head_dim,
            self.gated, self.q_norm, self.k_norm, c.eps, handle.query_buffer, handle.query_rows, self.exact,
            None if self.exact else handle.step.once("turn", partial(turn_of, angles, x, c.head_dim)),
            x.device.type == "cpu" and handle.stream.stores_all,
        )  # fmt: skip

    def attend(self, handle: LayerHandle, q: Tensor, last: bool, gate: Tensor | None) -> Tensor:
        """[T, H, D] of queries [T, H, D]. `last`: in the last layer."""
        return attend(handle, q, self.config.attention_scale, last, gate)

    def gate(self, x: Tensor) -> Tensor | None:
        """[T, H, D] of the projection's output."""
        if not self.gated:
            return None
        c = self.config
        both = x[:, : 2 * c.heads * c.head_dim].view(len(x), c.heads, 2 * c.head_dim)
        return both[..., c.head_dim :]


def turn_of(angles: Angles, x: Tensor, head_dim: int, step: ForwardStep) -> Tensor | None:
    """Rotations of a step's tokens as matrices, where they take fewer operations: a few tokens on a CPU."""
    suits = x.device.type == "cpu" and x.dtype == torch.float32 and len(x) <= FEW_TOKENS
    return rope_matrices(*angles) if suits and 2 * angles[0].shape[-1] == head_dim else None


@dataclass(frozen=True)
class ExactAttention(Attention):
    """Attention whose bits do not depend on the batch or on how a prompt is divided into chunks."""

    exact: ClassVar[bool] = True

    def attend(self, handle: LayerHandle, q: Tensor, last: bool, gate: Tensor | None) -> Tensor:
        return attend_exact(handle, q, self.config.attention_scale, gate)


def load_attention(
    config: ModelConfig, loader: Loader, name: str, normed: bool = False, gated: bool = False, norm_plus: float = 0.0
) -> Attention:
    """The mixer of a layer. `normed`: with q_norm and k_norm, to whose weights `norm_plus` is added."""
    c = config
    queries, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    q_rows = 2 * queries if gated else queries
    qkv = loader.linear(c.hidden, (f"{name}.q_proj", q_rows), (f"{name}.k_proj", kv), (f"{name}.v_proj", kv))
    out = loader.linear(queries, (f"{name}.o_proj", c.hidden))
    q_norm = k_norm = None
    if normed:
        q_norm = loader.vector(f"{name}.q_norm.weight", c.head_dim, plus=norm_plus)
        k_norm = loader.vector(f"{name}.k_norm.weight", c.head_dim, plus=norm_plus)
    kind = ExactAttention if loader.exact else Attention
    return kind(c, qkv, out, q_norm, k_norm, gated)


# --- attention over what is stored ----------------------------------------------------------------------------------


def attend(
    handle: LayerHandle,
    q: Tensor,  # [T, H, D]
    scale: float,
    last: bool = False,  # the last layer: rows before the tail of a chunk are not computed and hold anything
    gate: Tensor | None = None,  # [T, H, D]; the result is multiplied by its sigmoid
) -> Tensor:  # [T, H, D]
    """Causal attention over what is stored, this step's tokens included."""
    decodes = handle.step.num_decodes
    lse = handle.lse_rows
    if decodes == handle.step.rows:
        return attend_decodes(handle, q, scale, gate, lse)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if decodes:
        attend_decodes(handle, q, scale, None, lse, out[:decodes])
    # after the others: in a graph, rows of decoding requests that are missing are prompt tokens
    attend_chunks(handle, q, scale, lse, last, out)
    return out if gate is None else sigmoid_mul(out, gate).view_as(out)


def attend_decodes(
    handle: LayerHandle, q: Tensor, scale: float, gate: Tensor | None, lse: LseRows | None, out: Tensor | None = None
) -> Tensor:
    """[num_decodes, H, D] of the requests with one token, the first of the step."""
    n, lengths = handle.step.num_decodes, handle.lengths
    pages, ends, slots = (handle.pages("k"), handle.pages("v"), handle.table), handle.device_lengths, handle.slots
    if n == handle.step.rows:
        if n == 1 and lse is None and out is None and q.device.type == "cpu":
            even = handle.stream.even_pages
            if even is not None and suits_even(q, *pages[:2], even.length):
                return attention_even(q, *pages[:2], even, handle.rows, scale, gate)
        return attention_decode(
            q, *pages, lengths, scale, ends, rows=slots, lse=lse, gate=gate, keys=handle.max_entries, out=out
        )
    return attention_decode(
        q[:n],
        *pages,
        None if lengths is None else lengths[:n],
        scale,
        ends[:n],
        rows=slots[:n],
        lse=None if lse is None else (lse[0], lse[1][:n]),
        gate=None if gate is None else gate[:n],
        keys=handle.max_entries,
        out=out,
    )


def attend_chunks(handle: LayerHandle, q: Tensor, scale: float, lse: LseRows | None, last: bool, out: Tensor) -> None:
    """The prompt chunks' rows of out [T, H, D]."""
    step, n = handle.step, handle.step.num_decodes
    pages, rows, ends = (
        (handle.pages("k"), handle.pages("v"), handle.table),
        handle.slots[n:],
        handle.device_lengths[n:],
    )
    lengths = handle.lengths
    if step.any_length or lengths is None:
        plan = step.once("prompts", device_plan)
        attention_prefill(q, *pages, None, plan, scale, ends, rows=rows, lse=lse, out=out)
        return
    wanted = _computed(step, last, handle.lse_window)
    bounds = [0, *accumulate(part.stop - part.start for part in wanted)]
    joined = all(a.stop == b.start for a, b in pairwise(wanted))
    own = slice(wanted[0].start, wanted[-1].stop)
    mixed = attention_prefill(
        _joined(q, wanted),
        *pages,
        lengths[n:],
        bounds,
        scale,
        ends,
        rows=rows,
        lse=None if lse is None else (lse[0], _joined(lse[1], wanted)),
        out=out[own] if joined else None,
    )
    if not joined:
        for part, result in zip(wanted, mixed.split([part.stop - part.start for part in wanted]), strict=True):
            out[part] = result


def device_plan(step: ForwardStep) -> DevicePlan:
    """The prompt chunks of a step whose lengths only the device knows, as attention_prefill takes them."""
    n, tokens = step.num_decodes, int(step.host.query_start_loc[-1])
    longest = torch.cat([view.device_lengths[n:] for view in step.streams.values()], 1).amax(1)
    return DevicePlan(step.index.query_start_loc[n:], tokens, longest)


def _computed(step: ForwardStep, last: bool, window: int) -> list[slice]:
    """The tokens of each chunk whose attention is computed: all or, in the last layer, its tail."""
    chunks = pairwise(step.query_start_loc[step.num_decodes :])
    if step.tail is None or not last:
        return [slice(begin, end) for begin, end in chunks]
    tail = max(step.tail, TAIL, window)
    return [slice(max(begin, end - tail), end) for begin, end in chunks]


def attend_exact(handle: LayerHandle, q: Tensor, scale: float, gate: Tensor | None = None) -> Tensor:
    """`attend` with bits that depend on a token and its past alone."""
    step, n = handle.step, handle.step.num_decodes
    pages = handle.pages("k"), handle.pages("v"), handle.table
    slots, ends, keys = handle.slots, handle.device_lengths, handle.max_entries
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if n:
        attention_exact(q[:n], *pages, ends[:n], [*range(n + 1)], scale, slots[:n], keys, out[:n])
    if n < step.rows:  # after the others: in a graph, rows of decoding requests that are missing are prompt tokens
        if step.any_length:
            attention_exact(q, *pages, ends[n:], step.once("prompts", device_plan), scale, slots[n:], keys, out)
        else:
            first = step.query_start_loc[n]
            starts = [start - first for start in step.query_start_loc[n:]]
            attention_exact(q[first:], *pages, ends[n:], starts, scale, slots[n:], keys, out[first:])
    return out if gate is None else sigmoid_mul_exact(out, gate).view_as(out)


def _joined(x: Tensor, parts: list[slice]) -> Tensor:
    """Parts of x one after the other, without a copy where there is nothing between them."""
    if all(a.stop == b.start for a, b in pairwise(parts)):
        return x[parts[0].start : parts[-1].stop]
    return torch.cat([x[part] for part in parts])
