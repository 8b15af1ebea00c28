"""Evictor: when a request's cache is cut to its budget, and carrying it out.

    after the last prompt chunk        if streams hold more than budget + window
    every n generated tokens           if streams hold more than the budget
    bounded: at every multiple of      if streams hold more than the budget, in the prompt and in the answer; prompt
    the step's tokens, and at the      chunks end there, so that a request never holds more than budget + one step
    prompt's end

Streams of one request may differ in length: what counts is their mean. When a request is cut follows from its own
positions alone, never from who else is in the batch.

A request remembers what was kept and when. If it is preempted and computed again, the same entries are dropped at the
same positions, so it goes on as if nothing had happened.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hybridkv.cache import KVCacheManager
from hybridkv.config import CacheConfig, EngineConfig
from hybridkv.errors import HybridKVError
from hybridkv.eviction.keep import Keep, choose
from hybridkv.eviction.policies import POLICIES, Ada, Pyramid
from hybridkv.eviction.policy import LayerCache, Policy
from hybridkv.kernels.quant import Fp8Pages, Pages
from hybridkv.request import Request

STREAMS = "attention"


@dataclass(frozen=True)
class Evictor:
    config: CacheConfig
    policy: Policy
    scale: float  # of attention scores
    step_tokens: int = EngineConfig.step_tokens  # how far apart a bounded request is cut

    @staticmethod
    def make(config: CacheConfig, manager: KVCacheManager, head_dim: int) -> Evictor | None:
        """None where nothing is ever evicted."""
        if config.budget is None:
            return None
        if STREAMS not in manager.tables:
            raise HybridKVError(
                "a budget was given, but the model has no full-attention layer: there is nothing to evict"
            )
        policy = find_policy(config.policy)
        one_list = "layer" if isinstance(policy, Ada) else "global" if isinstance(policy, Pyramid) else None
        if config.scope == "global" and one_list or config.scope == one_list:
            raise HybridKVError(
                f"scope '{config.scope}' keeps one list of entries for several streams, and {type(policy).__name__} "
                "gives them different budgets; use scope='head'"
            )
        return Evictor(config, policy, head_dim**-0.5)

    def due(self, request: Request, manager: KVCacheManager) -> bool:
        """Whether the request's cache is to be cut now, a step after which it stands at a new position."""
        position, prompt = manager.position(request.key), request.prompt_tokens
        if position in request.evictions:
            return True
        if request.evictions and position < max(request.evictions):
            return False  # being computed again
        budget = self.config.budget
        assert budget is not None
        held = float(manager.lengths(request.key)[STREAMS].mean())  # heads and layers may share a budget unevenly
        bounded, every = self.config.bounded, self.config.decode_every
        if position == prompt:
            return held > budget + (0 if bounded else self.config.window)
        again = position > prompt and every > 0 and (position - prompt) % every == 0
        return (again or (bounded and position % self.step_tokens == 0)) and held > budget

    def evict(self, request: Request, manager: KVCacheManager) -> int:
        """Score, choose, compact. Returns the pages that went back."""
        position, layers = manager.position(request.key), manager.tables[STREAMS].schema.layers
        if position not in request.evictions:
            request.evictions[position] = self.choose(request, manager)
        keep = request.evictions[position]
        return manager.compact_request(request.key, dict(zip(layers, keep, strict=True)))

    def choose(self, request: Request, manager: KVCacheManager) -> Keep:
        """Survivors of every stream under the policy."""
        c, table = self.config, manager.tables[STREAMS]
        assert c.budget is not None
        lengths = table.lengths[manager.slot_of[request.key]].reshape(len(table.schema.layers), -1)  # [layers, G]
        scores = [self.policy.score(layer) for layer in self.layers(request, manager)]
        budgets = self.policy.budgets(scores, lengths, c.budget, c.recent)
        if budgets.shape != lengths.shape or budgets.sum() > c.budget * budgets.size or budgets.min() < 1:
            raise HybridKVError(f"the policy's budgets must be positive and {c.budget} a stream on average at the most")
        return choose(scores, lengths, budgets, c.recent, c.scope)

    def layers(self, request: Request, manager: KVCacheManager) -> list[LayerCache]:
        """What the policy sees of each attention layer."""
        table, slot, device = manager.tables[STREAMS], manager.slot_of[request.key], manager.device
        schema, position = table.schema, manager.position(request.key)
        when = torch.arange(max(0, position - self.config.window), position, device=device)
        by_stream = manager.entry_positions(request.key, STREAMS)
        found = []
        for i, layer in enumerate(schema.layers):
            lane, rows = schema.place(layer)
            lengths = table.lengths[slot, rows]
            places = np.full((schema.heads, int(lengths.max())), -1, np.int64)
            for g, at in enumerate(by_stream[rows]):
                places[g, : len(at)] = at
            pools = table.pool.lane(lane)
            ring = manager.state.layer(layer)["queries"][slot]  # [W, H, D]
            found.append(
                LayerCache(
                    layer=i,
                    layers=len(schema.layers),
                    queries=ring[when % len(ring)],
                    query_positions=when,
                    positions=torch.from_numpy(places).to(device),
                    lengths=lengths,
                    k_pool=_pages(pools, "k"),
                    v_pool=_pages(pools, "v"),
                    table=torch.from_numpy(table.pages[slot, rows]).to(device),
                    scale=self.scale,
                )
            )
        return found


def most_held(config: CacheConfig, step_tokens: int) -> int | None:
    """Tokens that a stream of a bounded request holds at the most, on average; None: all of them."""
    if config.budget is None or not config.bounded:
        return None
    # streams of different lengths each fill a last page of their own
    uneven = type(find_policy(config.policy)).budgets is not Policy.budgets
    return config.budget + step_tokens + (config.page_size if uneven else 0)


def find_policy(policy: object) -> Policy:
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        raise HybridKVError(f"policy {str(policy)[:80]!r} is unknown; choose {', '.join(POLICIES)}, or give a Policy")
    return POLICIES[policy]()


def _pages(pools: dict[str, torch.Tensor], name: str) -> Pages:
    scale = pools.get(f"{name}_scale")
    return pools[name] if scale is None else Fp8Pages(pools[name], scale)
