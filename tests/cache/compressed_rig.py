"""A model's part in the tests of compressed caches: what each token brings to each layer, and what must come of it.

Tokens are numbers. Each number has rows of its own in every layer (window, content, gates, queries), so that entries,
windows and attention can be worked out again, in float64 and from their definitions, from the list of numbers alone.
The number -1 is padding: all its rows are NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from compressor import EPS, Compressor
from torch import Tensor

from cache.machine_model import snapshot
from hybridkv.cache import CompressedHandle, CompressedSpec, ForwardStep, KVCacheManager, compressed_schema
from hybridkv.kernels.formats.page_layout import PageFormat
from hybridkv.models import v4_attention

NUMBERS, INDEX_HEADS = 499, 4
KINDS = ("window", "csa", "hca", "csa")
SMALL = CompressedSpec(KINDS, heads=3, head_dim=16, rope=4, index_dim=8, window=8, csa_ratio=4, hca_ratio=16)
REAL = CompressedSpec(KINDS, heads=3, head_dim=16, rope=4, index_dim=8)  # window 128, ratios 4 and 128


class Layer:
    """What tokens bring to one layer; [NUMBERS + 1, ...], the last row NaN."""

    def __init__(self, spec: CompressedSpec, kind: str, device: str) -> None:
        D, I = spec.head_dim, spec.index_dim

        def rows(*shape: int) -> Tensor:
            return _hostile(torch.randn(NUMBERS, *shape, device=device))

        # a window row is normed and turned like an entry of one token
        self.window = Compressor(1, D, spec.rope, 1, device)
        self.parts: dict[str, Compressor] = {}
        if kind == "csa":
            self.parts = {
                name: Compressor(2, c, spec.rope, spec.csa_ratio, device) for name, c in (("main", D), ("index", I))
            }
        if kind == "hca":
            self.parts = {"main": Compressor(1, D, spec.rope, spec.hca_ratio, device)}
        self.x, self.q = rows(D), rows(spec.heads, D)
        self.pz = {name: [_hostile(t) for t in part.rows(NUMBERS)] for name, part in self.parts.items()}
        self.index_q, self.index_weights = rows(INDEX_HEADS, I), rows(INDEX_HEADS)
        self.sink = torch.randn(spec.heads, device=device)
        self.kind = kind


@dataclass(frozen=True)
class Ran:
    """A step that was written."""

    step: ForwardStep
    handles: dict[int, CompressedHandle]
    plan: list[tuple[Hashable, int]]
    out: dict[int, Tensor]  # attention of each layer [T, heads, head_dim], where it was asked for


class Rig:
    def __init__(self, spec: CompressedSpec = SMALL, topk: int = 3, device: str = "cpu") -> None:
        self.spec, self.topk, self.device = spec, topk, device
        self.scale = spec.head_dim**-0.5
        self.nothing = torch.empty(len(spec.kinds), 0, spec.heads, spec.head_dim, device=device)  # of no tokens
        with torch.random.fork_rng():
            torch.manual_seed(12)
            self.layers = [Layer(spec, kind, device) for kind in spec.kinds]

    def manager(
        self,
        tokens: int,  # of a request
        requests: int = 2,
        pages: Mapping[str, int] | None = None,
        kv: str = "f32",
        index: str = "f32",
        **more: int,
    ) -> KVCacheManager:
        block = more.pop("block", self.spec.hca_ratio)
        schema = compressed_schema(self.spec, kv, index, block=block, **more)
        pools = schema.pool_pages(requests, tokens) | dict(pages or {})
        return KVCacheManager(schema, pools, requests, tokens, self.device)

    # ---- what a model does

    def prepare(self, m: KVCacheManager, fresh: Mapping[Hashable, Sequence[int]], rows: int | None = None) -> Ran:
        plan = sorted(((name, len(new)) for name, new in fresh.items()), key=lambda item: item[1] > 1)
        step = m.prepare_forward(plan, rows)
        handles = m.acquire(step)
        return Ran(step, handles, plan, {})  # type: ignore[arg-type]

    def write(self, ran: Ran, fresh: Mapping[Hashable, Sequence[int]], attend: bool = False) -> None:
        """All that the layers do with the step's tokens. `fresh`: their numbers."""
        numbers = [n for name, _ in ran.plan for n in fresh[name]]
        numbers += [-1] * (ran.step.query_start_loc[-1] - len(numbers))
        at = torch.tensor(numbers, device=self.device)
        for i, layer in enumerate(self.layers):
            handle = ran.handles[i]
            positions = handle.index.positions
            angles = _contiguous(layer.window.angles(positions))
            handle.write_swa(layer.x[at], layer.window.weight, EPS, angles)
            for name, part in layer.parts.items():
                p, z = (t[at] for t in layer.pz[name])
                rest = (p, z, part.bias, part.weight, EPS, part.angles(positions))
                handle.maybe_flush_csa(name, *rest) if layer.kind == "csa" else handle.maybe_flush_hca(*rest)
            if attend:
                chosen = None
                if layer.kind == "csa":
                    chosen = v4_attention.select(handle, layer.index_q[at], layer.index_weights[at], self.topk)
                ran.out[i] = v4_attention.attend(handle, layer.q[at], layer.sink, self.scale, angles, chosen)

    def run(
        self,
        m: KVCacheManager,
        fresh: Mapping[Hashable, Sequence[int]],
        rows: int | None = None,
        attend: bool = True,
    ) -> Ran:
        """A whole step."""
        ran = self.prepare(m, fresh, rows)
        self.write(ran, fresh, attend)
        m.commit(ran.plan)
        return ran

    def feed(self, m: KVCacheManager, name: Hashable, tokens: Sequence[int], chunk: int = 0) -> Tensor:
        """One request's tokens in chunks (0: all at once); attention of all layers [layers, T, heads, head_dim]."""
        size, parts = chunk or len(tokens) or 1, [self.nothing]
        for a in range(0, len(tokens), size):
            parts.append(torch.stack([*self.run(m, {name: tokens[a : a + size]}).out.values()]))
        return torch.cat(parts, 1)

    # ---- what must come of it, for a request whose tokens have these numbers

    def window_rows(self, i: int, tokens: Sequence[int]) -> Tensor:
        """Rows [T, head_dim] f64 of all positions."""
        layer, at = self.layers[i], torch.tensor(tokens, dtype=torch.int64, device=self.device)
        x = layer.x[at].double()
        return layer.window.finished(x, torch.arange(len(at), device=self.device)) if len(at) else x

    def entries(self, i: int, tokens: Sequence[int], which: str = "main") -> Tensor:
        """Entries, or index keys, [T // ratio, C] f64."""
        layer, at = self.layers[i], torch.tensor(tokens, dtype=torch.int64, device=self.device)
        part = layer.parts[which]
        if len(tokens) < part.ratio:
            return torch.zeros(0, part.c, dtype=torch.float64, device=self.device)
        return part.entries(*(t[at] for t in layer.pz[which]))

    def chosen(self, i: int, tokens: Sequence[int], t: int) -> Tensor:
        """Numbers of the entries that the token at position t of layer i reads."""
        layer, spec = self.layers[i], self.spec
        visible = torch.arange((t + 1) // spec.ratio(layer.kind), device=self.device)
        if layer.kind == "hca" or len(visible) <= self.topk:
            return visible
        keys = self.entries(i, tokens[: t + 1], "index")
        n = tokens[t]
        hits = (layer.index_q[n].double() @ keys.T).relu()
        scores = layer.index_weights[n].double() @ hits
        return scores.sort(descending=True, stable=True).indices[: self.topk]  # of equal scores the first

    def attention(self, i: int, tokens: Sequence[int], t: int) -> Tensor:
        """[heads, head_dim] f64 of the token at position t."""
        layer, spec = self.layers[i], self.spec
        keys = self.window_rows(i, tokens)[max(0, t - spec.window + 1) : t + 1]
        if layer.parts:
            keys = torch.cat((keys, self.entries(i, tokens)[self.chosen(i, tokens, t)]))
        logits = layer.q[tokens[t]].double() @ keys.T * self.scale
        weights = torch.cat((logits, layer.sink.double()[:, None]), 1).softmax(1)[:, :-1]
        return self.turned_back(weights @ keys, t)

    def turned_back(self, x: Tensor, position: int) -> Tensor:
        still, turned = x.split([x.shape[1] - self.spec.rope, self.spec.rope], 1)
        angle = -position * self.layers[0].window.inv_freq.double()
        pairs = torch.view_as_complex(turned.unflatten(1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(1)
        return torch.cat((still, turned), 1)


def _contiguous(angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return angles[0].contiguous(), angles[1].contiguous()


def _hostile(x: Tensor) -> Tensor:
    """[N, ...] with one row of NaN after it, which index -1 finds."""
    return torch.cat((x, torch.full_like(x[:1], torch.nan)))


def numbers(n: int, start: int = 0) -> list[int]:
    """Token numbers, another list for each start."""
    return [(7 * i + 31 * start) % NUMBERS for i in range(1, n + 1)]


def facts(m: KVCacheManager) -> dict[str, bytes]:
    """Everything that can differ between two managers."""
    found = snapshot(m) | {"reached": m.reached.tobytes()}
    return found | {f"{name}.device_table": t.device_table.numpy().tobytes() for name, t in m.tables.items()}


def refused(m: KVCacheManager, error: type[Exception], call: Callable[[], Any], says: str = ".") -> None:
    before = facts(m)
    with pytest.raises(error, match=says):
        call()
    assert facts(m) == before


def stored(m: KVCacheManager, layer: int, name: Hashable, which: str = "entries") -> tuple[Tensor, PageFormat, Tensor]:
    """Pages, format, and flat places of a request's entries by the host's table: what `load_entries_ref` takes."""
    declared = m.schema.compressed[layer]
    table, slot = m.tables[declared.kind], m.slot_of[name]
    places = torch.from_numpy(table.flat(table.pages[slot, 0], np.arange(table.lengths[slot, 0])))
    pages = table.pool.lane(table.schema.place(layer)[0])[which]
    fmt = declared.entries if which == "entries" else declared.index
    assert fmt is not None
    return pages, fmt, places
