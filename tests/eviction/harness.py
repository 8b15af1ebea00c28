"""One request through a model and a cache of its own, and two oracles of what eviction must do.

`Run` drives manager, model and evictor by hand. `masked_logits` is transformers: one forward over all tokens without
any cache, each attention layer with a mask of its own that hides dropped entries from later queries. `MaskedRun` is our
own model over a full cache, its attention replaced by a dense one in float64 under the same mask; it differs from a
compacted run by rounding alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor

from hybridkv.cache import KVCacheManager, LayerHandle
from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.engine.runner import Runner
from hybridkv.eviction import Evictor
from hybridkv.models import attention, cache_schema
from hybridkv.models.decoder import Decoder
from hybridkv.request import Request
from hybridkv.text.stream import TextStream

NEVER = 1 << 40
Dropped = dict[int, np.ndarray]  # model layer -> [G, N]: from which position on an entry is out of sight


def request_of(tokens: Sequence[int], key: object = "r") -> Request:
    params = SamplingParams()
    return Request(key, 0, list(tokens), len(tokens), params, TextStream(None), torch.Generator())


class Run:
    """`feed` computes tokens, `evict` cuts the cache; `dropped` says when each entry went."""

    def __init__(
        self, model: Decoder, config: CacheConfig, context: int = 512, slots: int = 3, pool: int | None = None
    ) -> None:
        schema = cache_schema(model.config, config, torch.float32)
        pages = schema.pool_pages(1, pool or 2 * context)
        self.manager = KVCacheManager(schema, pages, slots, context)
        self.model, self.config = model, config
        self.evictor = Evictor.make(config, self.manager, scale=model.config.attention_scale)
        self.runner = Runner(model, self.manager)
        self.layers = model.config.attention_layers
        self.drops: dict[object, Dropped] = {}
        self.context = context

    def admit(self, key: object = "r") -> None:
        self.manager.admit_request(key)
        G = self.model.config.kv_heads
        self.drops[key] = {layer: np.full((G, self.context), NEVER) for layer in self.layers}

    def feed(self, tokens: Sequence[int], chunk: int | None = None, key: object = "r") -> Tensor:
        """Logits [T, vocab] after each token."""
        parts = []
        for i in range(0, len(tokens), chunk or len(tokens)):
            part = list(tokens[i : i + (chunk or len(tokens))])
            step = self.manager.prepare_forward([(key, len(part))])
            parts.append(self.runner.forward(self.runner.inputs([part], range(len(part)), step)))
            self.manager.commit([(key, len(part))])
        return torch.cat(parts)

    def keep(self, keeps: dict[int, list[np.ndarray]], key: object = "r") -> None:
        """Compact, and write down what was dropped."""
        G, at = self.model.config.kv_heads, self.manager.entry_positions(key, "attention")
        for i, layer in enumerate(self.layers):
            for g in range(G):
                gone = np.delete(at[i * G + g], keeps[layer][g])
                self.drops[key][layer][g, gone] = self.manager.position(key)
        self.manager.compact_request(key, keeps)

    def evict(self, tokens: Sequence[int], key: object = "r") -> list[list[np.ndarray]]:
        assert self.evictor is not None
        chosen = self.evictor.choose(request_of(tokens, key), self.manager)
        self.keep(dict(zip(self.layers, chosen, strict=True)), key)
        return chosen

    def stream(self, layer: int, g: int, key: object = "r") -> dict[str, Tensor]:
        """All bytes of one stream's entries, in order."""
        table, slot = self.manager.tables["attention"], self.manager.slot_of[key]
        lane, rows = table.schema.place(layer)
        s, P = rows.start + g, table.schema.entries_per_page
        entry = np.arange(table.lengths[slot, s])
        page = torch.from_numpy(table.pages[slot, s][entry // P].astype(np.int64))
        return {name: t[page, torch.from_numpy(entry % P)] for name, t in table.pool.lane(lane).items()}


class MaskedRun(Run):
    """A full cache; dense attention in float64 that does not see what `dropped` names."""

    def __init__(self, model: Decoder, config: CacheConfig, dropped: Dropped, context: int = 512) -> None:
        super().__init__(model, CacheConfig(config.kv_dtype, config.page_size), context)
        self.dropped = dropped
        self.admit()

    def feed(self, tokens: Sequence[int], chunk: int | None = None, key: object = "r") -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                attention, "attend", lambda handle, q, scale, _, gate=None: self._attend(handle, q, scale, gate)
            )
            return super().feed(tokens, chunk, key)

    def _attend(self, handle: LayerHandle, q: Tensor, scale: float, gate: Tensor | None) -> Tensor:
        layer = next(x for x in self.layers if self.manager.tables["attention"].schema.place(x)[1] == handle.rows)
        assert handle.view is not None
        n, begin = len(q), handle.step.num_computed[0]
        length, P = begin + n, self.config.page_size
        pages = handle.view.table[handle.step.slots[0], handle.rows].long()  # [G, N]
        entry = torch.arange(length)
        k, v = (_dense(handle.paged, name)[pages[:, entry // P], entry % P] for name in "kv")  # [G, L, D]
        when = torch.arange(begin, length)
        gone = torch.from_numpy(self.dropped[layer][:, :length])  # [G, L]
        seen = (entry <= when[:, None]) & (when[:, None] < gone[:, None])  # [G, n, L]
        heads = q.reshape(n, len(k), -1, q.shape[-1]).double()
        scores = torch.einsum("ngfd,gld->gfnl", heads, k.double()) * scale
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        mixed = torch.einsum("gfnl,gld->ngfd", weights, v.double()).reshape(q.shape)
        return (mixed if gate is None else mixed * gate.double().sigmoid()).to(q.dtype)


def _dense(paged: dict[str, Tensor], name: str) -> Tensor:
    """A pool's entries as numbers."""
    if f"{name}_scale" in paged:
        return paged[name].view(torch.float8_e4m3fn).float() * paged[f"{name}_scale"][..., None]
    return paged[name].float()


@torch.no_grad()
def masked_logits(oracle: tiny.Oracle, ids: Sequence[int], dropped: Dropped) -> Tensor:
    """[T, vocab] by transformers."""
    T, model = len(ids), oracle.model
    when = torch.arange(T)

    def mask(layer: int) -> Tensor:
        gone = torch.from_numpy(dropped[layer][:, :T])
        seen = (when <= when[:, None]) & (when[:, None] < gone[:, None])  # [G, T, T]
        heads = model.config.num_attention_heads // len(gone)
        hidden = (~seen).repeat_interleave(heads, 0)[None]
        return torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)

    with _own_masks(model, {layer: mask(layer) for layer in dropped}):
        return model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()


@contextmanager
def _own_masks(model: Any, masks: dict[int, Tensor]) -> Iterator[None]:
    def hook(layer: int) -> Any:
        return lambda module, args, kwargs: (args, {**kwargs, "attention_mask": masks[layer]})

    hooks = [model.model.layers[i].self_attn.register_forward_pre_hook(hook(i), with_kwargs=True) for i in masks]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def dropped_by(request: Request, layers: Sequence[int], heads: int, context: int = 512) -> Dropped:
    """What a request's record of evictions says went out of sight, and when."""
    found: Dropped = {layer: np.full((heads, context), NEVER) for layer in layers}
    for i, layer in enumerate(layers):
        for g in range(heads):
            here, last = np.arange(0), 0
            for position, keep in sorted(request.evictions.items()):
                here, last = np.concatenate((here, np.arange(last, position))), position
                found[layer][g, np.delete(here, keep[i][g])] = position
                here = here[keep[i][g]]
    return found


def record_logits(engine: Engine) -> list[Tensor]:
    """The logits of each forward pass of an engine; grows as it steps."""
    found: list[Tensor] = []
    forward = engine.runner.forward

    def recorded(inputs: Any) -> Tensor:
        found.append(forward(inputs).clone())
        return found[-1]

    engine.runner.forward = recorded  # type: ignore[method-assign]
    return found
