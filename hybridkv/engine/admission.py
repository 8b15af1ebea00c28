"""Admission: who is resident. Requests wait, run, or have ended with their cache held; here they change between these.

Requests that wait are admitted in order of arrival, as long as their pages are free. A request that continues a held
cache waits in the same order; it needs no slot. One that begins with a held cache that others share (`Request.prefix`)
takes a slot of its own and a fork of that cache, which stays held. A prompt that will be evicted needs a query buffer;
while all are taken, it waits where it is. When pages run out, caches held for a next turn go first, then the youngest
running request is preempted: its pages are released and it waits at the front. Its cache waits on the host
(preempted.py), or it is computed again. The oldest request is never preempted, so work always ends.

A held cache needs no slot. Where one is short, the cache that was unused longest is frozen (cache/frozen.py), and it is
thawed when its turn comes. Where pages are short, its pages go to the host, if there is room for them, or it is given
up: then the next turn reads it again.

A request whose eviction is under way on the device (`Request.evicting`) is waited for where its pages are needed, and
before it is forked, preempted or held.

A request begins with what others have read (cache/reuse.py). One that would begin with what another is reading right
now waits for that, so that a text is read once however many prompts begin with it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybridkv.cache import KVCacheManager
from hybridkv.cache.lookup import Asked, Hit, pages_of, pages_to_load, would_keep
from hybridkv.engine.preempted import come_back, keep_away
from hybridkv.engine.resting import RestingCaches
from hybridkv.engine.reuse_report import continued, report
from hybridkv.errors import HybridKVError
from hybridkv.eviction import Evictor, max_held_tokens
from hybridkv.eviction.sizes import bounded_stride
from hybridkv.eviction.under_way import finish as finish_eviction
from hybridkv.eviction.under_way import is_ready
from hybridkv.request import Request, RequestKey, Status


class DoesNotFit(Exception):
    """The empty pools are too small for the first request that waits."""

    def __init__(self, request: Request, pinned: int = 0) -> None:
        beside = f", beside the {pinned} tokens of pinned prefixes" if pinned else ""
        super().__init__(f"the empty pools are too small for the {len(request.tokens)} tokens of this request{beside}")
        self.request = request


PROMISED = 1024  # tokens: a request waits for another one that is about to read so many of its own


@dataclass(frozen=True)
class Found:
    """What a request may begin with, and what is there of it."""

    asked: Asked
    hit: Hit


class Admission(RestingCaches):
    def __init__(self, manager: KVCacheManager, step_tokens: int, evictor: Evictor | None = None) -> None:
        super().__init__(manager)
        self.step_tokens, self.evictor = step_tokens, evictor
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.failed: list[Request] = []  # whose eviction did, found when it was waited for; they are to end
        self._sorting: list[Request] = []  # all requests, while they are sorted anew

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def may_admit(self) -> bool:
        """Whether a request waits for anything but a slot."""
        return bool(self.waiting) and (self.manager.free_slots > 0 or bool(self.held))

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def adopt(self, request: Request) -> None:
        """A request that is resident already, as benchmarks make them."""
        request.status = Status.RUNNING
        self.running.append(request)

    def _until_eviction(self, request: Request, position: int, tokens: int) -> int:
        """How many of the next `tokens` tokens come before the next position at which the request is evicted."""
        # a request that is computed again stops where entries were evicted the first time
        stop = tokens
        if request.evictions and position < next(reversed(request.evictions)):
            stop = min(at - position for at in request.evictions if at > position)
        if request.eviction is not None and position < request.prompt_tokens:  # one that was preempted has more
            stop = min(stop, request.prompt_tokens - position)
        if request.eviction is not None and request.eviction.bounded:
            every = bounded_stride(self.step_tokens) if position < request.prompt_tokens else self.step_tokens
            stop = min(stop, every - position % every)
        return min(stop, tokens)

    def pending(self, request: Request) -> int:
        """Tokens that are still to be computed, those included that only the device knows."""
        return len(request.tokens) + request.unseen - self.manager.position(request.key)

    def held_tokens(self, request: Request, tokens: int) -> int:
        """Tokens that a stream holds on average at the most while a request of `tokens` tokens is computed."""
        page_size = max((table.schema.entries_per_page for table in self.manager.tables.values()), default=0)
        bound = max_held_tokens(request.eviction, self.step_tokens, page_size, self.agreed.parts)
        if bound is not None:
            return min(tokens, bound)
        prefix = self.prefix_of(request)
        if prefix is not None:
            position = self.manager.position(prefix.key)
            lengths = [each.mean() for each in self.manager.lengths(prefix.key).values()]
            return min(tokens, math.ceil(max(lengths, default=0)) + page_size + tokens - position)
        # one that is computed again drops the same entries at the same positions
        held, peak, before = 0, 0, 0
        for at, record in request.evictions.items():
            held += at - before
            peak = max(peak, held)
            # streams of different lengths each fill a last page of their own
            held = math.ceil(record.fullest(self.agreed.parts)) + (0 if record.even else page_size)
            before = at
        return min(tokens, max(peak, held + tokens - before))

    def give_query_buffer(self, request: Request) -> bool:
        """Whether the request can run: it has a query buffer, or needs none.

        Caches held for a next turn are frozen for theirs, longest unused first.
        """
        if self.evictor is None or not self.evictor.needs_queries(request, self.manager):
            return True
        while not self.manager.take_query_buffer(request.key):
            if not self.free_query_buffer():
                return False
        return True

    # ---- evictions under way

    @property
    def evicting(self) -> list[Request]:
        """Running requests whose eviction is under way."""
        return [r for r in self.running if r.evicting is not None] if self.evictor is not None else []

    def settle(self, request: Request) -> None:
        """Finish an eviction of the request that is under way: the host waits for it. Where it failed, the request is
        to end.
        """
        try:
            finish_eviction(request, self.manager)
        except HybridKVError as problem:
            if request.finish_reason != "abort":
                request.finish_reason, request.error = "error", f"eviction failed: {problem}"
                self.failed.append(request)

    def settle_ready(self) -> None:
        """Finish the evictions whose lists have come."""
        for request in self.evicting:
            if is_ready(request):
                self.settle(request)

    def _settle_some(self) -> bool:
        """Whether an eviction was under way, which has been waited for. What is ready by then is finished too."""
        found = self.evicting[:1]
        for request in found:
            self.settle(request)
            self.settle_ready()
        return bool(found)

    # ---- several answers to one prompt

    def fork(self, request: Request) -> None:
        """Begin the other answers to a prompt that has just been read and evicted, its first tokens being sampled.

        Each goes on in a copy of the request: pages are shared until one writes to them, state is copied. One that
        finds no slot, query buffer or page waits, and is computed again from its tokens with the same evictions.
        """
        forming = request.forming
        if not forming:
            return
        self.settle(request)
        if request.finish_reason is not None:
            return
        tables = self.manager.tables
        # each stream's next token needs a page: a new one, or a copy of the one that all share
        each = {name: table.schema.streams for name, table in tables.items()}
        need = self._pages_to_come()
        for sibling in forming:
            sibling.evictions, sibling.started_at = dict(request.evictions), request.started_at
            sibling.policy = request.policy
            sibling.prompt_logprobs = request.prompt_logprobs
            need = {name: pages + each[name] for name, pages in need.items()}
            if self._make_free(need) and self._fork(request, sibling):
                sibling.cached_tokens, sibling.status = sibling.prompt_tokens, Status.RUNNING
                self.running.append(sibling)
            else:
                need = {name: pages - each[name] for name, pages in need.items()}
                self.waiting.append(sibling)
        self.waiting = deque(sorted(self.waiting, key=lambda waiting: waiting.order))

    def _make_free(self, need: dict[str, int]) -> bool:
        """Whether a slot and so many pages are free, at the cost of caches that are only held."""
        if not self.free_slot():
            return False
        while self.agreed.any(any(n > self.manager.pages_to_be_had()[name] for name, n in need.items())):
            if not self.holding_pages:
                return False
            self.spare(self.holding_pages[0])
        return True

    def _fork(self, request: Request, sibling: Request) -> bool:
        try:
            self.manager.fork_request(request.key, sibling.key)
        except HybridKVError:  # no query buffer for it, or a position at which the cache cannot be shared
            return False
        return True

    # ---- who is resident

    def _admit(self, preempted: set[Request]) -> None:
        """Move waiting requests in, in order, while a slot and the pages for all their known tokens, and one more, are
        free. Those that wait for what another one is reading are passed by the others.
        """
        to_come: dict[str, int] | None = None  # pages that the running ones still need; None: count them
        while self.waiting:
            if not self.manager.free_slots and not self.held:
                return
            request = next((r for r in self.waiting if not self._awaits(r)), None)
            if request is None or request in preempted:
                return
            if request.key in self.manager.away:
                if not come_back(self, request):
                    return
                to_come = None
                continue
            found = self._look_up(request)
            if found is not None and self._is_promised(request, found):
                continue
            if not self._make_slots(request):
                return
            found = found or self._look_up(request)  # its own cache may have been given up just now
            to_come = self._pages_to_come() if to_come is None else to_come
            given_up = self._to_give_up(request, to_come, found)
            if (
                given_up is None
                and found is not None
                and (found.hit.matched or found.hit.load is not None)
                and not self.running
                and not self.holding_pages
            ):
                nothing = {"path": [], "checkpoint": None, "cached": 0, "matched": 0, "tail": None, "load": None}
                found = Found(found.asked, replace(found.hit, **nothing))
                given_up = self._to_give_up(request, to_come, found)  # its own pages and shared ones are too many
            if given_up is None:
                prefix = self.prefix_of(request)
                others = [held for held in self.holding_pages if held not in (request.continues, prefix)]
                if prefix is not None and not self.running and not others:
                    raise DoesNotFit(request)
                if self.running or not others:
                    return
                # it goes on in pages that a held fork shares, and would need none of its own without that fork
                self.spare(others[0])
                to_come = None
                continue
            for held in given_up:
                self.spare(held)
            if self.take_over(request) or self.share_prefix(request) or given_up:
                to_come = None  # what others share has changed
            if request.key not in self.manager.slot_of:
                if found is None:  # what it was to go on in does not fit its text
                    found = self._look_up(request)
                self._begin(request, found)
            request.status = Status.RUNNING
            self.running.append(request)
            self.waiting.remove(request)
            if to_come is not None:
                own = self.manager.pages_needed(request.key, self._to_come(request))
                to_come = {name: pages + own[name] for name, pages in to_come.items()}

    def _make_slots(self, request: Request) -> bool:
        """Whether there is a slot for a request that is to enter, and the held cache that it goes on in, or begins
        with, has one.
        """
        own = request.continues if request.continues in self.held else None
        if own is None:
            own = self.prefix_of(request)
            if own is not None and not self.bring_back(own, self._pages_to_come()):
                return not self.running and self.free_slot()  # without it, if that is never to change
            return self.free_slot((own,))
        if request.params.prompt_logprobs is not None:  # it reads its prompt anew
            return self.free_slot()
        return self.bring_back(own, self._pages_to_come()) or (own not in self.held and self.free_slot())

    def _look_up(self, request: Request) -> Found | None:
        """What of a request's text others have read; None: nothing is kept, or it begins with a cache of its own."""
        reuse = self.manager.reuse
        if reuse is None or self.prefix_of(request) is not None:
            return None
        if request.continues in self.held and request.params.prompt_logprobs is None:
            return None
        asked = self.asked(request)
        return Found(asked, reuse.lookup(asked))

    def _awaits(self, request: Request) -> bool:
        """Whether the request waits for one that is still reading what it begins with too."""
        if request.awaits is None:
            return False
        reader, position = request.awaits
        reads = reader in self.running and reader.finish_reason is None
        if reads and self.manager.position(reader.key) < position:
            return True
        request.awaits = None
        return False

    def _is_promised(self, request: Request, found: Found) -> bool:
        """Whether a running request is about to read much of what this one begins with. It is asked for a checkpoint
        where the two part, and waited for.
        """
        reuse, hit = self.manager.reuse, found.hit
        if reuse is None or not found.asked.reads or min(found.asked.most, found.asked.reach) - hit.reaches < PROMISED:
            return False
        for reader in self.running:
            if reader.salt != request.salt or reader.finish_reason is not None:
                continue
            position = self.manager.position(reader.key)
            shared = reuse.promised(reader.key, hit.keys, min(found.asked.most, found.asked.reach))
            if shared > position and shared - hit.reaches >= PROMISED:
                reuse.ask(reader.key, shared, "branch")
                request.awaits = reader, shared
                return True
        return False

    def asked(self, request: Request) -> Asked:
        """What a request may begin with. Its last token is computed in any case, and so are the last queries before an
        eviction, by which it chooses what stays.
        """
        length = len(request.tokens)
        most, reach, limit = length - 1, length, "full"
        cut = None if self.evictor is None else self.evictor.first_cut(request)
        if cut is not None:
            reach = min(reach, cut)
        if request.eviction is not None:
            end = min(request.prompt_tokens, length if cut is None else cut)
            most = max(0, min(most, end - max(1, request.eviction.window)))
            limit = "bounded" if cut is not None and cut < request.prompt_tokens else "window"
        reads = request.reads and request.params.prompt_logprobs is None
        writes = request.writes and not self.agreed.uneven  # ranks would give up other columns
        tokens = np.array(request.tokens, np.int32)
        return Asked(request.salt, tokens, most, reach, limit, request.marks, reads, writes)  # type: ignore[arg-type]

    def _begin(self, request: Request, found: Found | None) -> None:
        """A slot for the request, with what others have read."""
        reuse = self.manager.reuse
        if reuse is None or found is None:
            self.manager.admit_request(request.key)
            request.reuse = report(None, len(request.tokens), 0)
            return
        hit = found.hit if found.hit.load is None else reuse.load(found.asked)
        reuse.attach(request.key, hit, found.asked)
        if request.preemptions:  # it reports how it began the first time
            request.cached_tokens = request.reuse.get("cached", 0)
            return
        request.cached_tokens, request.loading = min(hit.cached, request.prompt_tokens), hit.timer
        stops = [mark.position for mark in reuse.readings[request.key].stops]
        request.reuse = report(hit, request.prompt_tokens, reuse.q, hit.matched in stops)

    def _to_give_up(
        self, request: Request, to_come: dict[str, int], found: Found | None = None
    ) -> list[Request] | None:
        """Held caches to give up so that the request can enter, as few as will do; None: it must wait.

        `to_come`: of `_pages_to_come`; `found`: what it begins with.
        """
        own = request.continues if request.continues in self.held else None  # the cache that it goes on in
        if request.params.prompt_logprobs is not None:  # it reads its prompt anew
            own = None
        slots, prefix = self.manager.free_slots, self.prefix_of(request) if own is None else None
        if prefix is not None:
            position, tables = self.manager.position(prefix.key), self.manager.tables
            new = self._until_eviction(request, position, len(request.tokens) + 1 - position)
            need = self.manager.pages_needed(prefix.key, new)
            need = {name: n + tables[name].schema.streams for name, n in need.items()}  # copies of open pages
        elif own is None:
            need = self.manager.pages_needed(None, self.held_tokens(request, len(request.tokens) + 1))
            if found is not None and (found.hit.matched or found.hit.load is not None):
                need = self._pages_beside(request, found.hit, need)
        else:
            position = self.manager.position(own.key)
            new = max(1, len(request.tokens) + 1 - position)
            need = self.manager.pages_needed(own.key, self._until_eviction(request, position, new))
            slots += 1
        others = [held for held in self.holding_pages if held not in (own, prefix)]
        return self._fewest(others, need, slots, to_come)

    def _pages_beside(self, request: Request, hit: Hit, need: dict[str, int]) -> dict[str, int]:
        """Pages that a request takes beside those it shares, of those that can be had."""
        reuse = self.manager.reuse
        assert reuse is not None
        shared, kept = pages_of(reuse, hit), would_keep(reuse, hit)
        if request.eviction is not None or request.evictions:  # what survives moves to pages of its own
            shared = dict.fromkeys(shared, 0)
            kept = {name: n + pages_to_load(reuse, hit)[name] for name, n in kept.items()}
        return {name: max(0, n - shared[name]) + kept[name] for name, n in need.items()}

    def room_to_hold(
        self, need: dict[str, int], query_buffer: bool, keep: Request | None = None
    ) -> list[Request] | None:
        """Held caches to give up so that one more can be held, as few as will do; None: there is no room.

        `need`: its pages; `query_buffer`: whether it has a buffer, too; `keep` is not given up, and keeps its slot.
        """
        self.free_slot((keep,))
        if query_buffer:
            self.free_query_buffer(keep)
        others = [held for held in self.holding_pages if held is not keep]
        return self._fewest(others, need, self.manager.free_slots, self._pages_to_come(), int(query_buffer))

    def pages_to_hold(self, need: dict[str, int]) -> list[Request] | None:
        """The same for a cache that is frozen from the start: it needs pages alone."""
        return self._fewest(self.holding_pages, need, 1, self._pages_to_come())

    def _fewest(
        self, others: list[Request], need: dict[str, int], slots: int, to_come: dict[str, int], buffers: int = 0
    ) -> list[Request] | None:
        """Which of the held caches to give up, longest unused first, for a slot, pages and query buffers."""
        manager = self.manager
        need = {name: pages + to_come[name] for name, pages in need.items()}
        free = manager.free_pages()
        if any(need[name] > free[name] for name in need):
            free = manager.pages_to_be_had()
        buffers -= manager.query_buffers.free
        fewest = len(others) + 1  # no number of them will do
        for n in range(len(others) + 1):
            given_up = others[:n]
            back = manager.returnable_pages(*(held.key for held in given_up))  # forks share pages
            resident = [manager.slot_of[held.key] for held in given_up if held.key in manager.slot_of]
            lent = sum(manager.query_buffers.of[slot] >= 0 for slot in resident)
            if (
                slots + len(resident) > 0
                and buffers <= lent
                and all(need[name] <= free[name] + back[name] for name in need)
            ):
                fewest = n
                break
        fewest = self.agreed.most(fewest)
        return others[:fewest] if fewest <= len(others) else None

    def _pages_to_come(self) -> dict[str, int]:
        """Pages that running requests still need for tokens that are known already, and for one more each."""
        return self.manager.pages_needed_together([(r.key, self._to_come(r)) for r in self.running])

    def _to_come(self, request: Request) -> int:
        """Tokens of a running request that are known already, and one more, up to its next eviction."""
        return self._until_eviction(request, self.manager.position(request.key), self.pending(request) + 1)

    def take_over(self, request: Request) -> bool:
        """Whether the request goes on in the held cache that it continues, as far as their tokens agree."""
        held = request.continues
        if held is None or held not in self.held:
            request.given_up = held is not None and held.finish_reason != "error"
            request.continues = None
            return False
        if request.params.prompt_logprobs is not None:  # every token's logits are wanted
            self.release_held(held)
            request.continues = None
            return False
        position = self.manager.position(held.key)
        same = _common_prefix(held.tokens[:position], request.tokens[:-1])
        resident = held.key in self.manager.slot_of  # else it is frozen, and only whole
        rewinds = resident and same > 0 and self.manager.can_rewind(held.key, same) and not held.evictions
        if not (same == position or rewinds) or not self._has_queries(held, same, request):
            self.release_held(held)
            request.continues = None
            return False
        held.hold = False  # if this is interrupted half way, the cache is given back
        if resident:
            self.manager.truncate_request(held.key, same)
        request.cached_tokens = min(same, request.prompt_tokens)
        request.evictions, request.policy = dict(held.evictions), held.policy
        request.key = held.key  # from here on the cache is the request's
        self.held.remove(held)
        request.continues = None
        request.reuse = continued(request.cached_tokens, request.prompt_tokens)
        if self.manager.reuse is not None and resident:
            self.manager.reuse.adopt(request.key, self.asked(request))
        return True

    def prefix_of(self, request: Request) -> Request | None:
        """The held request whose cache this one can begin with, if there is one."""
        prefix = request.prefix
        if prefix is None or prefix not in self.held or request.params.prompt_logprobs is not None:
            return None
        return prefix if self.manager.position(prefix.key) < len(request.tokens) else None

    def share_prefix(self, request: Request) -> bool:
        """Whether the request begins with the cache of its prefix: pages are shared, state is copied."""
        prefix = self.prefix_of(request)
        if prefix is None or not self._fork(prefix, request):
            return False
        request.cached_tokens = self.manager.position(prefix.key)
        request.reuse = continued(request.cached_tokens, request.prompt_tokens, "a held prefix")
        self.held.remove(prefix)
        self.held.append(prefix)  # used last
        return True

    def _has_queries(self, held: Request, position: int, request: Request) -> bool:
        """Whether the last queries before a position are there, if an eviction to come may choose by them."""
        eviction = request.eviction
        if eviction is None:
            return True
        if position >= request.prompt_tokens and not (eviction.bounded or eviction.decode_every or request.hold):
            return True  # it came in the middle of its answer, its prompt read and evicted
        first = max(0, position - eviction.window)
        if held.key in self.manager.frozen:
            return 0 <= self.manager.frozen[held.key].since <= first
        return self.manager.query_buffers.whole(self.manager.slot_of[held.key], first) >= 0

    def make_room(self) -> Request | None:
        """Free the pages of a request that can best spare them, and return it; None: only the oldest is left."""
        if self.holding_pages:
            gone = self.holding_pages[0]
            self.spare(gone)
            return gone
        if len(self.running) < 2:
            return None
        gone = max(self.running, key=lambda request: request.order)
        self.preempt(gone)
        return gone

    def preempt(self, request: Request) -> None:
        """Release slot and pages. The cache waits on the host; or the tokens stay, and are computed again later."""
        self.settle(request)  # what was kept is kept again then
        self.waiting.appendleft(request)  # in one queue at least at any moment, or an interrupt would lose it
        if not keep_away(self, request):
            self.counts["read_again"] += self.manager.position(request.key) > 0
            self.manager.release_request(request.key)
            request.cached_tokens = 0
        request.status = Status.WAITING
        request.preemptions += 1
        request.sampler = None
        self.running.remove(request)

    def finish(self, request: Request) -> None:
        """Take the request out of whatever queue it is in. Its cache is released, or held if it asked for that."""
        keeps = request.keeps_cache
        if request in self.waiting:
            # a turn that never began: its conversation's cache is still the one of the turn before
            if keeps and self.take_over(request):
                self.held.append(request)
            elif request.continues is not None:
                self.release_held(request.continues)
                request.continues = None
            if request.key in self.manager.away:
                self.manager.release_request(request.key)
            request.status = Status.FINISHED  # before it leaves its queue: an interrupt then finds it in one or ended
            self.waiting.remove(request)
        if request in self.running:
            if keeps and self.manager.can_continue(request.key):
                self.manager.own_what_follows(request.key)
                self.held.append(request)
            else:  # or it was stopped while a step of it was in flight
                self.manager.release_request(request.key)
            request.status = Status.FINISHED
            self.running.remove(request)
        request.status = Status.FINISHED
        request.sampler = request.evicting = request.following = None
        self.failed = [each for each in self.failed if each is not request]

    def rebuild(self) -> None:
        """Sort all requests anew by what they are, after an interrupt in the middle of moving one. May be repeated."""
        queued = [*self._sorting, *self.held, *self.running, *self.waiting]
        known = list(dict.fromkeys([*queued, *(s for r in queued for s in r.siblings if not s.finished)]))  # each once
        for request in known:
            if request.source is not None and request.source.finish_reason is not None and not request.finish_reason:
                request.error, request.finish_reason = request.source.error, request.source.finish_reason
        self._sorting = known  # until the queues are whole again
        resident, frozen, away = self.manager.slot_of, self.manager.frozen, self.manager.away
        ended = [r for r in known if r.finish_reason is not None]
        live = [r for r in known if r.finish_reason is None and r.source is None]  # others wait for a prompt
        for request in ended:
            request.status = Status.FINISHED
        for request in live:
            request.status = Status.RUNNING if request.key in resident else Status.WAITING
        never_began = {r.continues for r in ended}  # what a turn would have gone on with has no other owner
        keeping = [r for r in ended if r.keeps_cache and r not in never_began]
        keeping = [r for r in keeping if r.key in frozen or (r.key in resident and self.manager.can_continue(r.key))]
        rest = [r for r in live if r.key in resident or r.key in away]
        owner = {r.key: r for r in sorted([*keeping, *rest], key=lambda r: r.order)}
        self.held = [r for r in keeping if owner.get(r.key) is r]
        self.running = [r for r in live if r.key in resident and owner.get(r.key) is r]
        self.waiting = deque(sorted((r for r in live if r.key not in resident), key=lambda r: r.order))
        for key in [
            key
            for key in (*resident, *frozen, *away)
            if isinstance(key, RequestKey) and key not in {*owner, *self.lent}
        ]:
            self.manager.release_request(key)
        for request in ended:
            request.continues = request.evicting = None
        self.failed = []
        self._sorting = []


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return min(len(a), len(b))
