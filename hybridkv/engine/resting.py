"""RestingCaches: caches of finished requests that wait for a next turn. They need no slot.

A held cache keeps its slot as long as nobody needs that. Then it is frozen (cache/frozen.py), and thawed when its turn
comes. Where pages are short they go to the host, if there is room for them, or the cache is given up, and its next turn
reads it again. All of it goes by what was unused longest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hybridkv.cache import KVCacheManager
from hybridkv.cache.frozen import (
    export_frozen,
    freeze_request,
    import_frozen,
    page_bytes,
    pages_to_import,
    state_bytes,
    thaw_request,
)
from hybridkv.engine.agreement import Agreement
from hybridkv.errors import HybridKVError
from hybridkv.request import Request, RequestKey


class RestingCaches:
    """Requests that have finished and whose cache is held."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.agreed = Agreement()
        self.held: list[Request] = []  # finished, cache kept; longest unused first
        self.counts: Counter[str] = Counter()  # held caches that were frozen, thawed, exported, imported, given_up
        self.lent: set[RequestKey] = set()  # frozen caches that are being saved or restored, and are no request's

    @property
    def holding_pages(self) -> list[Request]:
        """Those of the held requests that have pages on the device, longest unused first."""
        frozen = self.manager.frozen
        return [r for r in self.held if r.key not in frozen or frozen[r.key].exported is None]

    def freeze(self, request: Request) -> None:
        """A held cache gives its slot back. Where the host has no room for its state, those that are frozen longest are
        given up, or the request itself.
        """
        try:
            self.host_room(state_bytes(self.manager, request.key))
            freeze_request(self.manager, request.key)
            self.counts["frozen"] += 1
        except HybridKVError:  # no room, or a step has taken its state further than its tokens
            self.give_up(request)

    def host_room(self, nbytes: int) -> bool:
        """Whether the host has room for so many bytes, at the cost of caches that were frozen longest."""
        host, frozen = self.manager.host, self.manager.frozen
        while nbytes < host.limit and not host.room_for(nbytes):
            older = [held for held in self.held if held.key in frozen and frozen[held.key].host_bytes]
            if not older:
                break
            self.give_up(older[0])
        return host.room_for(nbytes)

    def free_slot(self, keep: Sequence[Request | None] = ()) -> bool:
        """Whether a slot is free, at the cost of held caches' slots; those to `keep` keep theirs."""
        if self.manager.free_slots:
            return True
        resident = self.manager.slot_of
        found = next((held for held in self.held if held.key in resident and held not in keep), None)
        if found is not None:
            self.freeze(found)
        return self.manager.free_slots > 0

    def free_query_buffer(self, keep: Request | None = None) -> bool:
        """Whether a query buffer is free, at the cost of a held cache's slot."""
        buffers, slots = self.manager.query_buffers, self.manager.slot_of
        if buffers.free:
            return True
        others = [held for held in self.held if held.key in slots and held is not keep]
        found = next((held for held in others if buffers.of[slots[held.key]] >= 0), None)
        if found is not None:
            self.freeze(found)
        return buffers.free > 0

    def bring_back(self, request: Request, to_come: Mapping[str, int] | None = None) -> bool:
        """Whether a held request has a slot, and its pages are on the device; other held caches make room for that. One
        that cannot be copied back is given up.

        `to_come`: pages that are to stay free for others.
        """
        manager, frozen = self.manager, self.manager.frozen.get(request.key)
        if request not in self.held or frozen is None:
            return request in self.held
        if not self.free_slot((request,)) or (frozen.since >= 0 and not self.free_query_buffer(request)):
            return False
        if frozen.exported is not None:
            need = {name: int(n.sum()) for name, n in pages_to_import(manager, frozen).items()}
            need = {name: n + (to_come or {}).get(name, 0) for name, n in need.items()}
            while self.agreed.any(any(n > manager.pages_to_be_had()[name] for name, n in need.items())):
                others = [held for held in self.holding_pages if held is not request]
                if not others:
                    return False
                self.spare(others[0])
        try:
            if frozen.exported is not None:
                import_frozen(manager, request.key)
                self.counts["imported"] += 1
            thaw_request(manager, request.key)
        except HybridKVError:  # a copy failed: nobody but this request is to suffer from that
            self.give_up(request)
            return False
        self.counts["thawed"] += 1
        return True

    def spare(self, request: Request) -> None:
        """The pages of a held cache are needed: they go to the host, or it is given up."""
        manager = self.manager
        if manager.host.pages:
            if request.key not in manager.frozen:
                self.freeze(request)
            if request.key in manager.frozen and self._export(request):
                return
        self.give_up(request)

    def _export(self, request: Request) -> bool:
        """Whether a frozen cache's pages are on the host; caches that were unused longer make room for them there."""
        self.host_room(page_bytes(self.manager, self.manager.frozen[request.key]))
        done = request in self.held and export_frozen(self.manager, request.key)
        self.counts["exported"] += done
        return done

    def give_up(self, request: Request) -> None:
        """A held cache goes; its next turn, if one comes, reads it again."""
        if request in self.held:
            self.counts["given_up"] += 1
            self.release_held(request)

    def release_held(self, request: Request) -> None:
        if request in self.held:
            self.manager.release_request(request.key)
            self.held.remove(request)
