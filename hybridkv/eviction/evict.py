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
from hybridkv.cache.step import upload
from hybridkv.config import CacheConfig, EngineConfig
from hybridkv.errors import HybridKVError
from hybridkv.eviction.keep import Keep, choose
from hybridkv.eviction.policies import POLICIES, Ada, Pyramid
from hybridkv.eviction.policy import LayerCache, Policy
from hybridkv.kernels.formats.fp8 import Fp8Pages, Pages
from hybridkv.request import Request

STREAMS = "attention"
SCORE_BYTES = 64 << 20  # of scores of query heads, at once
RINGS = EngineConfig.max_requests  # of last queries, at the least: by default every request has one


@dataclass(frozen=True)
class Evictor:
    config: CacheConfig
    policy: Policy
    scale: float  # of attention scores
    step_tokens: int = EngineConfig.step_tokens  # how far apart a bounded request is cut

    @staticmethod
    def make(config: CacheConfig, manager: KVCacheManager, scale: float) -> Evictor | None:
        """None where nothing is ever evicted. `scale`: ModelConfig.attention_scale."""
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
        return Evictor(config, policy, scale)

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

    def reads(self, request: Request, manager: KVCacheManager) -> bool:
        """Whether an eviction that is still to come may choose by the request's last queries. Once no, always no."""
        if self.config.bounded or self.config.decode_every or request.hold:  # held: a next turn may be short
            return True
        left = request.prompt_tokens - manager.position(request.key)
        if left <= 0 or request.prompt_tokens in request.evictions:  # chosen already, if it is computed again
            return False
        assert self.config.budget is not None
        held = float(manager.lengths(request.key)[STREAMS].mean())
        return held + left > self.config.budget + self.config.window

    def cut(self, request: Request, manager: KVCacheManager) -> None:
        """After a step: evict if that is due, and keep last queries no longer than they may be asked for."""
        if self.due(request, manager):
            self.evict(request, manager)
        if not self.reads(request, manager):
            manager.drop_query_buffer(request.key)

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
        parts = [self.policy.score(part) for part in self.layers(request, manager, self.policy.together)]
        scores = [layer for part in parts for layer in part.split(table.schema.heads)]
        budgets = self.policy.budgets(scores, lengths, c.budget, c.recent)
        if budgets.shape != lengths.shape or budgets.sum() > c.budget * budgets.size or budgets.min() < 1:
            raise HybridKVError(f"the policy's budgets must be positive and {c.budget} a stream on average at the most")
        return choose(scores, lengths, budgets, c.recent, c.scope)

    def layers(self, request: Request, manager: KVCacheManager, together: bool = False) -> list[LayerCache]:
        """What the policy sees of each attention layer. Nothing here waits for the device.

        `together`: of several at once, one layer's streams after the other's, as many as SCORE_BYTES of scores allow.
        """
        table, slot, device = manager.tables[STREAMS], manager.slot_of[request.key], manager.device
        schema, position, past = table.schema, manager.position(request.key), manager.compactions.get(slot)
        begin, G, count = max(0, position - self.config.window), schema.heads, len(schema.layers)
        when, pages, places = torch.arange(begin, position, device=device), table.rows(slot), positions(slot, manager)
        ring = manager.query_buffers.whole(slot, begin)
        if ring < 0:
            raise HybridKVError(
                f"the last queries of request {request.key!r} were not kept, and its cache cannot be scored without "
                "them; give it a ring (take_query_buffer) before its prompt is read"
            )
        queries = last(manager.state.tensors["queries", "queries"], ring, when)  # [W, layers, H, D]
        # what softmax summed to holds as long as nothing that was summed is gone
        known = not manager.exact and (past is None or past.position <= begin)
        sums = manager.state.tensors.get(("queries", "lse")) if known else None
        lse = None if sums is None else last(sums, ring, when)
        size = SCORE_BYTES // (4 * queries.shape[2] * max(1, places.shape[1])) if together else 1
        found = []
        for i in range(0, count, max(1, size)):
            n = min(max(1, size), count - i)
            rows = slice(i * G, (i + n) * G)
            lengths = table.lengths[slot, rows]
            found.append(
                LayerCache(
                    layer=i,
                    layers=count,
                    queries=queries[:, i : i + n].flatten(1, 2),
                    query_positions=when,
                    positions=places[rows, : int(lengths.max())],
                    lengths=lengths,
                    k_pool=_pages(table.pool.lane(0), "k"),
                    v_pool=_pages(table.pool.lane(0), "v"),
                    table=pages[rows],
                    scale=self.scale,
                    lse=None if lse is None else lse[:, i : i + n].flatten(1, 2),
                )
            )
        return found


def last(query_buffers: torch.Tensor, ring: int, when: torch.Tensor) -> torch.Tensor:
    """[W, layers, ...] of positions `when`, from buffers [layers, B, W, ...] in which p lies in row p mod W."""
    return query_buffers[:, ring].transpose(0, 1).index_select(0, when % query_buffers.shape[2])


def positions(slot: int, manager: KVCacheManager) -> torch.Tensor:
    """[streams, L] absolute position of every entry of a slot, on the device; -1 past a stream's length."""
    lengths, past = manager.tables[STREAMS].lengths[slot], manager.compactions.get(slot)
    entry = torch.arange(int(lengths.max(initial=0)), device=manager.device)
    found = entry.expand(len(lengths), -1)
    if past is not None and STREAMS in past.kept:
        kept = past.kept[STREAMS]
        counts = np.array([len(each) for each in kept])
        old = np.full((len(kept), int(counts.max())), -1, np.int64)
        old[np.arange(old.shape[1]) < counts[:, None]] = np.concatenate(kept)
        sent = upload([counts, old.ravel()], manager.device)
        counts, old = sent[: len(kept), None], sent[len(kept) :].view(old.shape)[:, : len(entry)]
        later = found - counts + past.position
        old = torch.nn.functional.pad(old, (0, len(entry) - old.shape[1]))
        found = torch.where(entry < counts, old, later)
    if (lengths < len(entry)).any():
        found = torch.where(entry < upload([lengths], manager.device)[:, None], found, -1)
    return found


def most_held(config: CacheConfig, step_tokens: int) -> int | None:
    """Tokens that a stream of a bounded request holds at the most, on average; None: all of them."""
    if config.budget is None or not config.bounded:
        return None
    # streams of different lengths each fill a last page of their own
    uneven = type(find_policy(config.policy)).budgets is not Policy.budgets
    return config.budget + step_tokens + (config.page_size if uneven else 0)


def query_buffers_for(config: CacheConfig, step_tokens: int, slots: int) -> int:
    """Requests whose last queries must be kept at the same time, so that none waits for a ring; 0: nothing is evicted.

    After its prompt a request needs none, unless it is cut again. A prompt that is cut has more than budget + window
    tokens: a step ends one, reads some whole and begins one. Conversations, which keep theirs, share what is left: who
    has many at once sets `query_buffers`.
    """
    if config.budget is None:
        return 0
    if config.bounded or config.decode_every:
        return slots
    return min(slots, config.query_buffers or max(RINGS, step_tokens // (config.budget + config.window + 1) + 2))


def find_policy(policy: object) -> Policy:
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        raise HybridKVError(f"policy {str(policy)[:80]!r} is unknown; choose {', '.join(POLICIES)}, or give a Policy")
    return POLICIES[policy]()


def _pages(pools: dict[str, torch.Tensor], name: str) -> Pages:
    scale = pools.get(f"{name}_scale")
    return pools[name] if scale is None else Fp8Pages(pools[name], scale)
