"""One DeepSeek-V4 attention layer on the cache: plain f32 projections, KVCacheManager and CompressedHandle besides.

`wrong` names one thing to do wrong on the way; see `WRONG`.
"""

import math
from collections.abc import Hashable

import torch
from torch import Tensor
from v4_stream import EPS, CompressorWeights, LayerWeights, normed, rotate

from hybridkv.cache import CompressedHandle, CompressedSpec, ForwardStep, KVCacheManager, compressed_schema
from hybridkv.kernels.formats.page_format import load_entries_ref
from hybridkv.kernels.v4.gather import flat_entries
from hybridkv.models.v4_attention import attend, select

WRONG = {  # -> the kinds of layer it makes a difference to
    "read before the flush": ("csa", "hca"),
    "entry visible one token late": ("csa", "hca"),
    "entry angles of the last token": ("csa", "hca"),
    "angles of the other kind": ("window", "csa", "hca"),
    "own stream handed to the next entry": ("csa",),
    "streams swapped": ("csa",),
    "bias of the next token": ("csa", "hca"),
    "index keys not written": ("csa",),
    "all entries read": ("csa",),
    "no sink": ("window", "csa", "hca"),
    "turned on instead of back": ("window", "csa", "hca"),
}
LAYER = 3  # of five; the first CSA and the first HCA layer are others


def stored_vectors(handle: CompressedHandle, T: int) -> dict[str, Tensor]:
    """What the cache holds of the one request of a step: T window rows (its ring has as many), entries, index keys."""
    rows = load_entries_ref(handle.state["window"], handle.schema.entries, handle.index.slots[0] * T + torch.arange(T))
    found = {"rows": rows}
    if handle.schema.ratio:
        found["entries"] = handle.gather_all_compressed_kv(torch.float32)[0]
    if handle.schema.index is not None:
        view = handle.read_indexer_view()
        number = torch.arange(int(view.lengths[0]))
        flat = flat_entries(view.table, view.slots.expand(len(number)), number, view.pages.shape[1])
        found["keys"] = load_entries_ref(view.pages, view.format, flat)
    return found


class CachedLayer:
    def __init__(
        self,
        weights: LayerWeights,
        kv: str = "f32",
        index: str = "f32",
        max_tokens: int = 320,
        slots: int = 1,
        drafts: int = 0,
        ring: int | None = None,
        wrong: str = "",
    ) -> None:
        assert not wrong or weights.kind in WRONG[wrong]
        self.w, self.wrong, s = weights.cast(torch.float32), wrong, weights.shape
        self.turns = self.w.other_turns if wrong == "angles of the other kind" else self.w.turns
        kinds = ("csa", "hca", "window", weights.kind, "window")
        sizes = (s.heads, s.head_dim, s.rope, s.index_dim, s.window, s.csa_ratio, s.hca_ratio)
        block = math.lcm(s.csa_ratio, s.hca_ratio)
        schema = compressed_schema(CompressedSpec(kinds, *sizes), kv, index, block, drafts, ring)
        self.manager = KVCacheManager(schema, schema.pool_pages(slots, max_tokens), slots, max_tokens)
        self.chosen: Tensor | None = None  # of the last step
        self.handle: CompressedHandle | None = None
        self.out = torch.empty(0)  # of the last step, padding included

    def admit(self, *requests: Hashable) -> "CachedLayer":
        for request in requests:
            self.manager.admit_request(request)
        return self

    def step(self, tokens: dict[Hashable, Tensor], rows: int | None = None) -> dict[Hashable, Tensor]:
        """New tokens [n, hidden] of each request, one-token requests first -> [n, heads, head_dim] of each."""
        plan = [(request, len(x)) for request, x in tokens.items()]
        step = self.manager.prepare_forward(plan, rows)
        handle = self.manager.acquire(step)[LAYER]
        assert isinstance(handle, CompressedHandle)
        self.handle = handle
        padding = torch.full((step.query_start_loc[-1] - sum(n for _, n in plan), self.w.shape.hidden), torch.nan)
        self.out = self.forward(handle, step, torch.cat((*tokens.values(), padding)))
        self.manager.commit(plan)
        return {request: self.out[a:b] for request, a, b in zip(tokens, step.query_start_loc, step.query_start_loc[1:])}

    def run(self, x: Tensor, chunks: list[int], request: Hashable = 0) -> Tensor:
        """All of x [T, hidden] of one request, in chunks of these sizes."""
        assert sum(chunks) == len(x)
        return torch.cat([self.step({request: part})[request] for part in x.split(chunks)])

    def forward(self, handle: CompressedHandle, step: ForwardStep, x: Tensor) -> Tensor:
        w, s, read_first = self.w, self.w.shape, self.wrong == "read before the flush"
        assert step.index is not None
        angle = step.index.positions.float()[:, None] * self.turns  # [T, r/2]
        angles = angle.cos(), angle.sin()
        low = normed(x @ w.q_down.T, w.q_norm)
        q = rotate(normed((low @ w.q_up.T).view(-1, s.heads, s.head_dim)), angle[:, None])
        handle.write_swa(x @ w.kv.T, w.kv_norm, EPS, angles)
        if not read_first:
            self.flush(handle, step, x)
        chosen = self.choose(handle, step, x, low, angle)
        sink = torch.full_like(w.sink, -math.inf) if self.wrong == "no sink" else w.sink
        back = (angles[0], -angles[1]) if self.wrong == "turned on instead of back" else angles
        out = attend(handle, q, sink, s.head_dim**-0.5, back, chosen)
        if read_first:
            self.flush(handle, step, x)
        return out

    def flush(self, handle: CompressedHandle, step: ForwardStep, x: Tensor) -> None:
        assert step.index is not None
        w, late = self.w, self.wrong == "entry angles of the last token"
        first = step.index.positions + 1 - (1 if late else w.ratio)
        angle = first.clamp(min=0).float()[:, None] * self.turns
        angles = angle.cos(), angle.sin()
        if w.kind == "hca":
            handle.maybe_flush_hca(*self.projected(w.main, x), EPS, angles)
        if w.kind == "csa":
            handle.maybe_flush_csa("main", *self.projected(w.main, x), EPS, angles)
            if self.wrong != "index keys not written":
                handle.maybe_flush_csa("index", *self.projected(w.index, x), EPS, angles)

    def projected(self, c: CompressorWeights | None, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Content, gate, bias, norm weight."""
        assert c is not None
        p, z, bias = x @ c.content.T, x @ c.gate.T, c.bias
        if self.wrong == "bias of the next token":
            bias = bias.roll(-1, 0)
        if self.wrong == "streams swapped":
            p, z, bias = (a.roll(len(c.norm), -1) for a in (p, z, bias))
        if self.wrong == "own stream handed to the next entry":
            p, z, bias = (a[:, len(c.norm) :].repeat(1, 2) for a in (p, z, bias))
        return p, z, bias, c.norm

    def choose(
        self, handle: CompressedHandle, step: ForwardStep, x: Tensor, low: Tensor, angle: Tensor
    ) -> Tensor | None:
        w, s = self.w, self.w.shape
        self.chosen = None
        if w.kind == "csa" and self.wrong != "all entries read":
            assert w.index_q is not None and w.index_weights is not None
            q = rotate((low @ w.index_q.T).view(-1, s.index_heads, s.index_dim), angle[:, None])
            weights = x @ w.index_weights.T * (s.index_heads * s.index_dim) ** -0.5
            self.chosen = select(handle, q, weights, s.topk)
        if self.wrong == "entry visible one token late":
            assert step.index is not None
            seen = step.index.positions[:, None] // w.ratio
            every = torch.arange(int(seen.max()) + 1).expand(len(seen), -1)
            chosen = every if self.chosen is None else self.chosen
            return torch.where(chosen < seen, chosen, -1).int()
        return self.chosen
