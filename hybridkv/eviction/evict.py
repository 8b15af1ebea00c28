"""Evictor: when a request's cache is evicted down to its budget, and carrying it out.

    after the last prompt chunk        if streams hold more than budget + window
    every n generated tokens           if streams hold more than the budget
    bounded: at the prompt's end, and  if streams hold more than the budget
    at multiples of a step after it
    bounded: on the way there, at      if streams hold more than budget + 3/4 step, and down to that; chunks end there,
    multiples of a quarter of a step   so that a request never holds more than budget + one step

On the way of a bounded prompt, policy "auto" chooses by the prompt's own end, where the question stands: its last
`window` tokens are read ahead, their queries vote, and what reading them left behind is undone (engine/ahead.py).

Budget, policy and the rest are the request's own (`request.eviction`). Streams of one request may differ in length:
what counts is their mean. When a request is evicted follows from its own positions alone, never from the batch.

A request remembers what was kept and when (`eviction_record.py`). If it is preempted and computed again, the same
entries are dropped at the same positions, so it goes on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hybridkv.cache import KVCacheManager
from hybridkv.cache.step import upload
from hybridkv.config import CacheConfig, EngineConfig, EvictionConfig
from hybridkv.errors import HybridKVError, OutOfPages, RequestError
from hybridkv.eviction.entries import is_alike, mean_length, positions, queries_at
from hybridkv.eviction.keep import Chosen, Keep, Protected, joined, pick, pick_shared
from hybridkv.eviction.named import find_policy, resolved_name
from hybridkv.eviction.over_ranks import OverRanks
from hybridkv.eviction.policy import LayerCache, Policy
from hybridkv.eviction.sizes import SCORE_BYTES, STREAMS, bounded_stride
from hybridkv.eviction.spread import Ada
from hybridkv.eviction.under_way import UnderWay
from hybridkv.eviction_record import EvictionRecord
from hybridkv.kernels.formats.kv_format import pages_of
from hybridkv.request import Request

MAX_BUDGET = 1 << 20  # stands for a budget that is not known


@dataclass(frozen=True)
class Evictor:
    """When requests are evicted, and the eviction itself."""

    default: EvictionConfig | None  # for requests that ask for nothing else; None: they keep everything
    scale: float  # of attention scores
    step_tokens: int = EngineConfig.step_tokens  # a bounded request is evicted at multiples of these
    settings: EvictionConfig | None = None  # of requests that name a budget alone: all but that
    weights: Callable[[], Tensor] | None = None  # [streams] f32, how much each copies; None: not to be had
    deferred: bool | None = None  # whether evictions of running requests are left to the device; None: on a GPU
    ranks: OverRanks | None = None  # the streams here are those of one rank

    @staticmethod
    def make(
        config: CacheConfig,
        manager: KVCacheManager,
        head_dim: int | None = None,  # what was given for the scale before 0.2
        *,
        scale: float | None = None,
        step_tokens: int = EngineConfig.step_tokens,
    ) -> Evictor | None:
        """None where nothing is ever evicted: there is no budget, none for old turns, and no query buffer for one that
        a request brings.
        """
        buffers = manager.query_buffers.count if manager.schema.query_window is not None else 0
        if config.eviction is None and config.keep_turns is None and not buffers:
            return None
        if scale is None:
            if head_dim is None:
                raise HybridKVError("the scale of attention scores is missing: pass scale=config.attention_scale")
            scale = head_dim**-0.5
        settings = config.eviction or replace(config, budget=MAX_BUDGET, query_buffers=None).eviction
        evictor = Evictor(config.eviction, scale, step_tokens, settings)
        if settings is not None and (config.eviction is not None or config.keep_turns is not None):
            evictor.check(settings, manager)
        return evictor

    @property
    def policy(self) -> Policy:
        """The policy of requests that ask for nothing else."""
        return find_policy(EvictionConfig.policy if self.default is None else self.default.policy)

    def with_budget(self, budget: int) -> EvictionConfig:
        """What a request keeps that names a budget alone."""
        return EvictionConfig(budget) if self.settings is None else replace(self.settings, budget=budget)

    def asked_by(self, request: Request) -> EvictionConfig:
        """What a request that is to be evicted keeps."""
        found = request.eviction or self.default
        if found is None:
            raise HybridKVError(f"request {request.key!r} has no budget, and there is none for all requests")
        return found

    @staticmethod
    def check(eviction: EvictionConfig, manager: KVCacheManager) -> None:
        """Whether requests may ask for this, or HybridKVError."""
        if STREAMS not in manager.tables:
            raise HybridKVError(
                "a budget was given, but the model has no full-attention layer: there is nothing to evict"
            )
        for seen in (True, False) if eviction.bounded else (True,):  # auto may stand for two policies
            policy = find_policy(eviction.policy, seen, eviction.scope)
            if policy.needs_replay and (eviction.bounded or eviction.decode_every):
                raise HybridKVError(
                    "policy 'replay' reads a whole text once more; bounded and decode_every evict while it is still "
                    "being read or written, and need another policy"
                )
            spread = policy.spread
            if eviction.scope == "global" and spread or eviction.scope == "layer" and spread == "heads":
                raise HybridKVError(
                    f"scope '{eviction.scope}' keeps one list of entries for several streams, and "
                    f"{type(policy).__name__} gives them different budgets; use scope='head'"
                )
        window = manager.schema.query_window
        if window is not None and eviction.window > window:
            raise RequestError(
                f"a window of {eviction.window} queries was asked for, the cache keeps {window}; ask for less, or open "
                f"the model with CacheConfig(window={eviction.window})"
            )

    def due(self, request: Request, manager: KVCacheManager) -> bool:
        """Whether the request is to be evicted now, after a step that brought it to a new position."""
        position, prompt, eviction = manager.position(request.key), request.prompt_tokens, request.eviction
        if position in request.evictions:
            return True
        if eviction is None or (request.evictions and position < next(reversed(request.evictions))):
            return False  # it keeps everything, or is being computed again
        held = mean_length(request, manager)
        if position == prompt:
            return held > eviction.budget + (0 if eviction.bounded else eviction.window)
        if eviction.bounded and position < prompt:
            return self._due_on_the_way(eviction, position, held)
        every = eviction.decode_every
        again = position > prompt and every > 0 and (position - prompt) % every == 0
        at_step = eviction.bounded and position % self.step_tokens == 0
        return (again or at_step) and held > eviction.budget

    def first_cut(self, request: Request) -> int | None:
        """The first position at which the request is, or may be, evicted, as far as its prompt goes; None: at none."""
        if request.evictions:
            return next(iter(request.evictions))
        eviction, prompt = request.eviction, request.prompt_tokens
        if eviction is None:
            return None
        if not eviction.bounded:
            return prompt if prompt > eviction.budget + eviction.window else None
        stride = bounded_stride(self.step_tokens)
        first = (self._on_the_way(eviction).budget // stride + 1) * stride
        return min(first, prompt)

    def _due_on_the_way(self, eviction: EvictionConfig, position: int, held: float) -> bool:
        return position % bounded_stride(self.step_tokens) == 0 and held > self._on_the_way(eviction).budget

    def _on_the_way(self, eviction: EvictionConfig) -> EvictionConfig:
        """What a bounded prompt keeps before its end: as much as leaves room for what is read until the next eviction,
        and for what is read ahead there.
        """
        room = self.step_tokens - bounded_stride(self.step_tokens)
        if self._reads_ahead(eviction):
            room -= eviction.window
        return replace(eviction, budget=eviction.budget + room)

    def _reads_ahead(self, eviction: EvictionConfig) -> bool:
        room = self.step_tokens - bounded_stride(self.step_tokens)
        return resolved_name(eviction.policy, True) != resolved_name(eviction.policy, False) and eviction.window <= room

    def read_ahead(self, request: Request, manager: KVCacheManager, more: int = 0) -> int:
        """Tokens of the prompt's end that are to be read ahead before the request is evicted on the way there; 0: none.

        Args:
            more: tokens that it will have read by then.
        """
        eviction, position = request.eviction, manager.position(request.key) + more
        if eviction is None or not eviction.bounded or not self._reads_ahead(eviction):
            return 0
        if position >= request.prompt_tokens or position <= next(reversed(request.evictions), -1):
            return 0  # the question has been read, or this is being computed again
        held, tokens = mean_length(request, manager) + more, min(eviction.window, request.prompt_tokens - position)
        # after a long answer there may be no room: then what is known without the question decides
        fits = held + tokens <= eviction.budget + self.step_tokens
        return tokens if fits and self._due_on_the_way(eviction, position, held) else 0

    def needs_queries(self, request: Request, manager: KVCacheManager) -> bool:
        """Whether an eviction that is still to come may choose by the request's last queries. Once no, always no."""
        eviction = request.eviction
        if eviction is None:
            return False
        if eviction.bounded or eviction.decode_every or request.hold:  # held: a next turn may be short
            return True
        left = request.prompt_tokens - manager.position(request.key)
        if left <= 0 or request.prompt_tokens in request.evictions:  # chosen already, if it is computed again
            return False
        return mean_length(request, manager) + left > eviction.budget + eviction.window

    def after_step(self, request: Request, manager: KVCacheManager, ahead: int = 0, wait: bool = True) -> None:
        """Evict if that is due, and keep last queries no longer than they may be asked for.

        Args:
            request: a running one.
            manager: where it is resident.
            ahead: as in `evict`.
            wait: False: the eviction may still be under way afterwards (`Request.evicting`).
        """
        if self.due(request, manager):
            if wait or not self.leaves_to_device(request, manager):
                self.evict(request, manager, ahead)
            else:
                self.start(request, manager, ahead)
        if not self.needs_queries(request, manager):
            manager.drop_query_buffer(request.key)

    reads, cut = needs_queries, after_step  # their names before 0.2

    def leaves_to_device(self, request: Request, manager: KVCacheManager) -> bool:
        """Whether the device can choose, move and free for this request while the host goes on.

        It cannot where the lists are on the host, of a request that is computed again.
        """
        deferred = manager.device.type == "cuda" if self.deferred is None else self.deferred
        return deferred and manager.position(request.key) not in request.evictions

    def evict(self, request: Request, manager: KVCacheManager, ahead: int = 0) -> int:
        """Score, choose, compact. Returns the pages that went back.

        Args:
            request: a resident one.
            manager: where it is resident.
            ahead: tokens of the prompt's end that were read ahead: the last queries are theirs.
        """
        position = manager.position(request.key)
        if position in request.evictions:
            keep = request.evictions[position].lists()
            self._check_room(request, manager, keep)
            return self.carry_out(request, manager, keep)
        eviction, policy, name = self._asked(request, position, ahead)
        freed = self.keep(request, manager, self.choose(request, manager, eviction, policy, ahead=ahead))
        request.policy = name
        return freed

    def start(self, request: Request, manager: KVCacheManager, ahead: int = 0) -> None:
        """`evict`, left to the device (`leaves_to_device`): it is launched, and nothing waits for it. The request must
        not run before `under_way.finish`. Where it shares pages with others and there are none beside them, the host
        sees to it at once.
        """
        eviction, policy, name = self._asked(request, manager.position(request.key), ahead)
        chosen = self.pick(request, manager, eviction, policy, ahead=ahead)
        lists = chosen.entries, chosen.counts, chosen.broken, chosen.most
        try:
            request.evicting = UnderWay(manager.start_compaction(request.key, STREAMS, *lists), name)
        except OutOfPages:
            self.keep(request, manager, chosen.lists())
            request.policy = name

    def _asked(self, request: Request, position: int, ahead: int) -> tuple[EvictionConfig, Policy, str]:
        """What the request keeps at this position, by which policy, and what that is called."""
        eviction = self.asked_by(request)
        if eviction.bounded and position < request.prompt_tokens:
            eviction = self._on_the_way(eviction)
        seen = position + ahead >= request.prompt_tokens or ahead > 0  # before that the question may still be to come
        return eviction, find_policy(eviction.policy, seen, eviction.scope), resolved_name(eviction.policy, seen)

    def evict_held(
        self,
        request: Request,
        manager: KVCacheManager,
        eviction: EvictionConfig,
        scores: Sequence[Tensor] | None = None,
        ranges: Sequence[tuple[int, int]] = (),
        seen: bool = False,
    ) -> int:
        """Evict a request that does not run, down to `eviction.budget`. Returns the pages that went back.

        Args:
            scores: [G, L] of each attention layer, in place of the policy's own.
            ranges: (begin, end) of positions whose entries stay.
            seen: whether the question has been read, for policy "auto".
        """
        if mean_length(request, manager) <= eviction.budget:
            return 0
        policy = find_policy(eviction.policy, seen, eviction.scope)
        freed = self.keep(request, manager, self.choose(request, manager, eviction, policy, scores, ranges))
        request.policy = resolved_name(eviction.policy, seen)
        return freed

    def keep(self, request: Request, manager: KVCacheManager, keep: Keep, alike: bool = True) -> int:
        """Drop all entries but these, and remember them. Returns the pages that went back.

        Over ranks `keep` may have the lists of all streams of the model: those of others are left to them. `alike`:
        where it has those of this rank alone, whether the heads of a layer keep equally many.
        """
        position, table = manager.position(request.key), manager.tables[STREAMS]
        if request.evictions:
            request.evictions[next(reversed(request.evictions))].pack()
        lengths = table.lengths[manager.slot_of[request.key]].reshape(len(table.schema.layers), -1)
        everywhere = None
        if self.ranks is not None:
            keep, everywhere = self.ranks.own_part(keep, alike)
            self._check_room(request, manager, keep)
        record, before = EvictionRecord(keep, lengths, everywhere), dict(request.evictions)
        earlier = request.evictions.pop(position, None)  # evicted twice at one position: both in one record
        request.evictions[position] = record if earlier is None else earlier.then(record)
        try:
            return self.carry_out(request, manager, keep)
        except BaseException:  # what was not carried out is not remembered
            request.evictions = before
            raise

    def _check_room(self, request: Request, manager: KVCacheManager, keep: Keep) -> None:
        """Over ranks: OutOfPages on all of them where one has no room for survivors whose pages others own too."""
        if self.ranks is None:
            return
        problem = None
        counts = np.array([len(entries) for layer in keep for entries in layer])
        try:
            manager.room_to_compact(request.key, STREAMS, counts)
        except OutOfPages as short:
            problem = short
        self.ranks.agree(problem)

    @staticmethod
    def carry_out(request: Request, manager: KVCacheManager, keep: Keep) -> int:
        """Drop all entries but these. Returns the pages that went back."""
        layers = manager.tables[STREAMS].schema.layers
        return manager.compact_request(request.key, dict(zip(layers, keep, strict=True)))

    def choose(
        self,
        request: Request,
        manager: KVCacheManager,
        eviction: EvictionConfig | None = None,
        policy: Policy | None = None,
        scores: Sequence[Tensor] | None = None,
        ranges: Sequence[tuple[int, int]] = (),
        ahead: int = 0,
    ) -> Keep:
        """Lists of `pick`. The device is waited for once, at the end."""
        return self.on_all_ranks(lambda: self.pick(request, manager, eviction, policy, scores, ranges, ahead).lists())

    def on_all_ranks(self, choose: Callable[[], Keep]) -> Keep:
        """What is chosen; over ranks HybridKVError where one cannot choose: broken scores, or a policy that raises."""
        if self.ranks is None:
            return choose()
        found, problem = None, None
        try:
            found = choose()
        except Exception as raised:
            problem = raised
        self.ranks.agree(problem)
        assert found is not None
        return found

    def pick(
        self,
        request: Request,
        manager: KVCacheManager,
        eviction: EvictionConfig | None = None,
        policy: Policy | None = None,
        scores: Sequence[Tensor] | None = None,
        ranges: Sequence[tuple[int, int]] = (),
        ahead: int = 0,
    ) -> Chosen:
        """Survivors of every stream, by the request's own settings unless others are given. `ahead`: as in `evict`.

        Over ranks those of all streams of the model, where streams are compared, or hold unlike numbers of entries.
        """
        eviction = self.asked_by(request) if eviction is None else eviction
        policy = find_policy(eviction.policy, scope=eviction.scope) if policy is None else policy
        table, slot = manager.tables[STREAMS], manager.slot_of[request.key]
        lengths = table.lengths[slot].reshape(len(table.schema.layers), -1)  # [layers, G]
        if scores is None:
            scores = self._parts(request, manager, policy, eviction.window, ahead)
        rows = joined(scores).to(manager.device)  # a policy may have looked elsewhere
        del scores
        first = policy.first if eviction.first is None else eviction.first
        if first or ranges:
            Protected(first, ranges, positions(slot, manager) if ranges else None).mark(rows)
        compared = eviction.scope != "head" or policy.spread == "heads"
        if self.ranks is not None and (compared or not is_alike(request)):
            lengths = self.ranks.lengths(lengths)
            rows = self.ranks.rows(rows, lengths)
        sure, by_layer = eviction.recent + first, list(rows.split(lengths.shape[1]))  # sure of every stream
        if isinstance(policy, Ada):
            even = policy.even(by_layer, lengths, eviction.budget, sure)
            self._check_budgets(even, lengths, eviction)
            return pick_shared(rows, lengths, even, eviction.recent, policy.floor, policy.layers)
        budgets = policy.budgets(by_layer, lengths, eviction.budget, sure)
        self._check_budgets(budgets, lengths, eviction)
        return pick(rows, lengths, budgets, eviction.recent, eviction.scope)

    def scores(
        self, request: Request, manager: KVCacheManager, policy: Policy, window: int, ahead: int = 0
    ) -> list[Tensor]:
        """[G, L] of each attention layer: what the policy gives the request's entries. `ahead`: as in `evict`."""
        heads = manager.tables[STREAMS].schema.heads
        return [layer for part in self._parts(request, manager, policy, window, ahead) for layer in part.split(heads)]

    def _parts(
        self, request: Request, manager: KVCacheManager, policy: Policy, window: int, ahead: int
    ) -> list[Tensor]:
        """[streams, L] of some layers after the other: as many at once as the policy takes."""
        window = window if policy.needs_queries else 0
        return policy.scores(self.layers(request, manager, policy.batchable, window, ahead, policy.needs_weights))

    @staticmethod
    def _check_budgets(budgets: np.ndarray, lengths: np.ndarray, eviction: EvictionConfig) -> None:
        if budgets.shape != lengths.shape or budgets.sum() > eviction.budget * budgets.size or budgets.min() < 1:
            raise HybridKVError(
                f"the policy's budgets must be positive and {eviction.budget} a stream on average at the most"
            )

    def layers(
        self,
        request: Request,
        manager: KVCacheManager,
        batched: bool = False,
        window: int | None = None,
        ahead: int = 0,
        weighted: bool = False,
    ) -> list[LayerCache]:
        """What the policy sees of each attention layer. Nothing here waits for the device.

        Args:
            batched: several layers as one, streams after streams, as many as SCORE_BYTES of scores allow.
            window: how many of the last queries, which then must have been kept; None: as many as the request asks for.
            ahead: tokens past the request's position whose queries are the last ones.
            weighted: with the weights of the streams, which are measured when they are first asked for.
        """
        weights = self.weights() if weighted and self.weights is not None else None
        window = self.asked_by(request).window if window is None else window
        table, slot = manager.tables[STREAMS], manager.slot_of[request.key]
        position, past = manager.position(request.key) + ahead, manager.compactions.get(slot)
        first = max(0, position - window)
        buffer = manager.query_buffers.whole(slot, first)
        if buffer < 0 and window:
            raise HybridKVError(
                f"the last queries of request {request.key!r} were not kept, and its cache cannot be scored without "
                "them; give it a query buffer (take_query_buffer) before its prompt is read"
            )
        heads, count = table.schema.heads, len(table.schema.layers)
        query_positions = torch.arange(first, position, device=manager.device)
        queries, lse = torch.empty(0, count, heads, 0, device=manager.device), None  # [W, layers, H, D]
        if window:
            queries = queries_at(manager.state.tensors["queries", "queries"], buffer, query_positions)
            # the sums of softmax hold as long as no entry that was summed is gone
            known = not manager.exact and not ahead and (past is None or past.position <= first)
            sums = manager.state.tensors.get(("queries", "lse")) if known else None
            lse = None if sums is None else queries_at(sums, buffer, query_positions)
            if self.ranks is not None:
                queries, lse = self.ranks.queries(queries, 2), None if lse is None else self.ranks.queries(lse, 2)
        entry_positions = positions(slot, manager)
        pages, ends = table.rows(slot), upload([table.lengths[slot]], manager.device)
        longest = table.lengths[slot].reshape(count, heads).max(1, initial=0)  # [layers]
        if self.ranks is not None and not is_alike(request):
            longest = self.ranks.lengths(longest[:, None]).max(1, initial=0)
        at_once = SCORE_BYTES // (4 * queries.shape[2] * max(1, entry_positions.shape[1])) if batched else 1
        found = []
        for i in range(0, count, max(1, at_once)):
            n = min(max(1, at_once), count - i)
            streams = slice(i * heads, (i + n) * heads)
            lengths = table.lengths[slot, streams]
            found.append(
                LayerCache(
                    layer=i,
                    layers=count,
                    queries=queries[:, i : i + n].flatten(1, 2),
                    query_positions=query_positions,
                    positions=entry_positions[streams, : int(lengths.max())],
                    lengths=lengths,
                    k_pool=pages_of(table.pool.lane(0), "k"),
                    v_pool=pages_of(table.pool.lane(0), "v"),
                    table=pages[streams],
                    scale=self.scale,
                    lse=None if lse is None else lse[:, i : i + n].flatten(1, 2),
                    tokens=position,
                    weights=None if weights is None else weights[streams],
                    ends=ends[streams],
                    ranks=self.ranks,
                    longest=int(longest[i : i + n].max()),
                )
            )
        return found
