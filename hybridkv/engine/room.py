"""Room: pages that requests will take, counted before any is taken, and which held caches go so that there are enough.

Who enters, and who is given up, is admission.py's; here held caches only lose their slots (`room_to_hold`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hybridkv.cache.lookup import Hit, pages_of, pages_to_load, would_keep
from hybridkv.engine.beginnings import Found, prefix_of
from hybridkv.eviction import max_held_tokens
from hybridkv.eviction.entries import lengths_everywhere
from hybridkv.eviction.sizes import bounded_stride
from hybridkv.request import Request

if TYPE_CHECKING:
    from hybridkv.engine.admission import Admission


def until_eviction(admission: Admission, request: Request, position: int, tokens: int) -> int:
    """How many of the next `tokens` tokens come before the next position at which the request is evicted."""
    # a request that is computed again stops where entries were evicted the first time
    stop = tokens
    if request.evictions and position < next(reversed(request.evictions)):
        stop = min(at - position for at in request.evictions if at > position)
    if request.eviction is not None and position < request.prompt_tokens:  # one that was preempted has more
        stop = min(stop, request.prompt_tokens - position)
    if request.eviction is not None and request.eviction.bounded:
        every = bounded_stride(admission.step_tokens) if position < request.prompt_tokens else admission.step_tokens
        stop = min(stop, every - position % every)
    return min(stop, tokens)


def pending_tokens(admission: Admission, request: Request) -> int:
    """Tokens that are still to be computed, those included that only the device knows."""
    return len(request.tokens) + request.unseen - admission.manager.position(request.key)


def tokens_to_come(admission: Admission, request: Request) -> int:
    """Tokens of a running request that are known already, and one more, up to its next eviction."""
    position = admission.manager.position(request.key)
    return until_eviction(admission, request, position, pending_tokens(admission, request) + 1)


def pages_to_come(admission: Admission) -> dict[str, int]:
    """Pages that running requests still need for tokens that are known already, and for one more each."""
    return admission.manager.pages_needed_together([(r.key, tokens_to_come(admission, r)) for r in admission.running])


def held_tokens(admission: Admission, request: Request, tokens: int) -> int:
    """Tokens that a stream holds on average at the most while a request of `tokens` tokens is computed."""
    page_size = max((table.schema.entries_per_page for table in admission.manager.tables.values()), default=0)
    bound = max_held_tokens(request.eviction, admission.step_tokens, page_size, admission.agreed.parts)
    if bound is not None:
        return min(tokens, bound)
    prefix = prefix_of(admission, request)
    if prefix is not None:
        position = admission.manager.position(prefix.key)
        lengths = [each.mean() for each in admission.manager.lengths(prefix.key).values()]
        everywhere = lengths_everywhere(prefix, position)  # over ranks the fullest decides, as below
        if everywhere is not None:
            lengths = everywhere.reshape(len(everywhere), admission.agreed.parts, -1).mean((0, 2)).tolist()
        return min(tokens, math.ceil(max(lengths, default=0)) + page_size + tokens - position)
    # one that is computed again drops the same entries at the same positions
    held, peak, before = 0, 0, 0
    for at, record in request.evictions.items():
        held += at - before
        peak = max(peak, held)
        # streams of different lengths each fill a last page of their own
        held = math.ceil(record.fullest(admission.agreed.parts)) + (0 if record.even else page_size)
        before = at
    return min(tokens, max(peak, held + tokens - before))


def to_give_up(
    admission: Admission, request: Request, to_come: dict[str, int], found: Found | None = None
) -> list[Request] | None:
    """Held caches to give up so that the request can enter, as few as will do; None: it must wait.

    `to_come`: of `pages_to_come`; `found`: what it begins with.
    """
    own = request.continues if request.continues in admission.held else None  # the cache that it goes on in
    if request.params.prompt_logprobs is not None:  # it reads its prompt anew
        own = None
    slots, prefix = admission.manager.free_slots, prefix_of(admission, request) if own is None else None
    if prefix is not None:
        position, tables = admission.manager.position(prefix.key), admission.manager.tables
        new = until_eviction(admission, request, position, len(request.tokens) + 1 - position)
        need = admission.manager.pages_needed(prefix.key, new)
        need = {name: n + tables[name].schema.streams for name, n in need.items()}  # copies of open pages
    elif own is None:
        need = admission.manager.pages_needed(None, held_tokens(admission, request, len(request.tokens) + 1))
        if found is not None and (found.hit.matched or found.hit.load is not None):
            need = _pages_beside(admission, request, found.hit, need)
    else:
        position = admission.manager.position(own.key)
        new = max(1, len(request.tokens) + 1 - position)
        need = admission.manager.pages_needed(own.key, until_eviction(admission, request, position, new))
        slots += 1
    others = [held for held in admission.holding_pages if held not in (own, prefix)]
    return _fewest(admission, others, need, slots, to_come)


def _pages_beside(admission: Admission, request: Request, hit: Hit, need: dict[str, int]) -> dict[str, int]:
    """Pages that a request takes beside those it shares, of those that can be had."""
    reuse = admission.manager.reuse
    assert reuse is not None
    shared, kept = pages_of(reuse, hit), would_keep(reuse, hit)
    if request.eviction is not None or request.evictions:  # what survives moves to pages of its own
        shared = dict.fromkeys(shared, 0)
        kept = {name: n + pages_to_load(reuse, hit)[name] for name, n in kept.items()}
    return {name: max(0, n - shared[name]) + kept[name] for name, n in need.items()}


def room_to_hold(
    admission: Admission, need: dict[str, int], query_buffer: bool, keep: Request | None = None
) -> list[Request] | None:
    """Held caches to give up so that one more can be held, as few as will do; None: there is no room.

    `need`: its pages; `query_buffer`: whether it has a buffer, too; `keep` is not given up, and keeps its slot.
    """
    admission.free_slot((keep,))
    if query_buffer:
        admission.free_query_buffer(keep)
    others = [held for held in admission.holding_pages if held is not keep]
    return _fewest(admission, others, need, admission.manager.free_slots, pages_to_come(admission), int(query_buffer))


def pages_to_hold(admission: Admission, need: dict[str, int]) -> list[Request] | None:
    """The same for a cache that is frozen from the start: it needs pages alone."""
    return _fewest(admission, admission.holding_pages, need, 1, pages_to_come(admission))


def _fewest(
    admission: Admission,
    others: list[Request],
    need: dict[str, int],
    slots: int,
    to_come: dict[str, int],
    buffers: int = 0,
) -> list[Request] | None:
    """Which of the held caches to give up, longest unused first, for a slot, pages and query buffers."""
    manager = admission.manager
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
    fewest = admission.agreed.most(fewest)
    return others[:fewest] if fewest <= len(others) else None
