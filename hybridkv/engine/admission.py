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
now waits for that, so that a text is read once however many prompts begin with it (beginnings.py). room.py counts the
pages that all of them will take.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from hybridkv.cache import KVCacheManager
from hybridkv.engine.beginnings import (
    Found,
    awaits,
    begin,
    fork_cache,
    is_promised,
    look_up,
    prefix_of,
    share_prefix,
    take_over,
)
from hybridkv.engine.preempted import come_back, keep_away
from hybridkv.engine.resting import RestingCaches
from hybridkv.engine.room import pages_to_come, to_give_up, tokens_to_come
from hybridkv.errors import HybridKVError
from hybridkv.eviction import Evictor
from hybridkv.eviction.under_way import finish as finish_eviction
from hybridkv.eviction.under_way import is_ready
from hybridkv.request import Request, RequestKey, Status


class DoesNotFit(Exception):
    """The empty pools are too small for the first request that waits."""

    def __init__(self, request: Request, pinned: int = 0) -> None:
        beside = f", beside the {pinned} tokens of pinned prefixes" if pinned else ""
        super().__init__(f"the empty pools are too small for the {len(request.tokens)} tokens of this request{beside}")
        self.request = request


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
        need = pages_to_come(self)
        for sibling in forming:
            sibling.evictions, sibling.started_at = dict(request.evictions), request.started_at
            sibling.policy = request.policy
            sibling.prompt_logprobs = request.prompt_logprobs
            need = {name: pages + each[name] for name, pages in need.items()}
            if self._make_free(need) and fork_cache(self, request, sibling):
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

    # ---- who is resident

    def _admit(self, preempted: set[Request]) -> None:
        """Move waiting requests in, in order, while a slot and the pages for all their known tokens, and one more, are
        free. Those that wait for what another one is reading are passed by the others.
        """
        to_come: dict[str, int] | None = None  # pages that the running ones still need; None: count them
        while self.waiting:
            if not self.manager.free_slots and not self.held:
                return
            request = next((r for r in self.waiting if not awaits(self, r)), None)
            if request is None or request in preempted:
                return
            if request.key in self.manager.away:
                if not come_back(self, request):
                    return
                to_come = None
                continue
            found = look_up(self, request)
            if found is not None and is_promised(self, request, found):
                continue
            if not self._make_slots(request):
                return
            found = found or look_up(self, request)  # its own cache may have been given up just now
            to_come = pages_to_come(self) if to_come is None else to_come
            given_up = to_give_up(self, request, to_come, found)
            if (
                given_up is None
                and found is not None
                and (found.hit.matched or found.hit.load is not None)
                and not self.running
                and not self.holding_pages
            ):
                nothing = {"path": [], "checkpoint": None, "cached": 0, "matched": 0, "tail": None, "load": None}
                found = Found(found.asked, replace(found.hit, **nothing))
                given_up = to_give_up(self, request, to_come, found)  # its own pages and shared ones are too many
            if given_up is None:
                prefix = prefix_of(self, request)
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
            if take_over(self, request) or share_prefix(self, request) or given_up:
                to_come = None  # what others share has changed
            if request.key not in self.manager.slot_of:
                if found is None:  # what it was to go on in does not fit its text
                    found = look_up(self, request)
                begin(self, request, found)
            request.status = Status.RUNNING
            self.running.append(request)
            self.waiting.remove(request)
            if to_come is not None:
                own = self.manager.pages_needed(request.key, tokens_to_come(self, request))
                to_come = {name: pages + own[name] for name, pages in to_come.items()}

    def _make_slots(self, request: Request) -> bool:
        """Whether there is a slot for a request that is to enter, and the held cache that it goes on in, or begins
        with, has one.
        """
        own = request.continues if request.continues in self.held else None
        if own is None:
            own = prefix_of(self, request)
            if own is not None and not self.bring_back(own, pages_to_come(self)):
                return not self.running and self.free_slot()  # without it, if that is never to change
            return self.free_slot((own,))
        if request.params.prompt_logprobs is not None:  # it reads its prompt anew
            return self.free_slot()
        return self.bring_back(own, pages_to_come(self)) or (own not in self.held and self.free_slot())

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
            if keeps and take_over(self, request):
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
