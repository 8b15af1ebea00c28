"""What a request begins with: a held cache that it goes on in, one that it shares, or what others have read.

Whether there is room for the rest is room.py's, whose turn it is admission.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hybridkv.cache.lookup import Asked, Hit
from hybridkv.engine.reuse_report import continued, report
from hybridkv.errors import HybridKVError
from hybridkv.request import Request

if TYPE_CHECKING:
    from hybridkv.engine.admission import Admission

PROMISED = 1024  # tokens: a request waits for another one that is about to read so many of its own


@dataclass(frozen=True)
class Found:
    """What a request may begin with, and what is there of it."""

    asked: Asked
    hit: Hit


# ---- what others have read


def asked_of(admission: Admission, request: Request) -> Asked:
    """What a request may begin with. Its last token is computed in any case, and so are the last queries before an
    eviction, by which it chooses what stays.
    """
    length = len(request.tokens)
    most, reach, limit = length - 1, length, "full"
    cut = None if admission.evictor is None else admission.evictor.first_cut(request)
    if cut is not None:
        reach = min(reach, cut)
    if request.eviction is not None:
        end = min(request.prompt_tokens, length if cut is None else cut)
        most = max(0, min(most, end - max(1, request.eviction.window)))
        limit = "bounded" if cut is not None and cut < request.prompt_tokens else "window"
    reads = request.reads and request.params.prompt_logprobs is None
    writes = request.writes and not admission.agreed.uneven  # ranks would give up other columns
    tokens = np.array(request.tokens, np.int32)
    return Asked(request.salt, tokens, most, reach, limit, request.marks, reads, writes)  # type: ignore[arg-type]


def look_up(admission: Admission, request: Request) -> Found | None:
    """What of a request's text others have read; None: nothing is kept, or it begins with a cache of its own."""
    reuse = admission.manager.reuse
    if reuse is None or prefix_of(admission, request) is not None:
        return None
    if request.continues in admission.held and request.params.prompt_logprobs is None:
        return None
    asked = asked_of(admission, request)
    return Found(asked, reuse.lookup(asked))


def awaits(admission: Admission, request: Request) -> bool:
    """Whether the request waits for one that is still reading what it begins with too."""
    if request.awaits is None:
        return False
    reader, position = request.awaits
    reads = reader in admission.running and reader.finish_reason is None
    if reads and admission.manager.position(reader.key) < position:
        return True
    request.awaits = None
    return False


def is_promised(admission: Admission, request: Request, found: Found) -> bool:
    """Whether a running request is about to read much of what this one begins with. It is asked for a checkpoint
    where the two part, and waited for.
    """
    reuse, hit = admission.manager.reuse, found.hit
    if reuse is None or not found.asked.reads or min(found.asked.most, found.asked.reach) - hit.reaches < PROMISED:
        return False
    for reader in admission.running:
        if reader.salt != request.salt or reader.finish_reason is not None:
            continue
        position = admission.manager.position(reader.key)
        shared = reuse.promised(reader.key, hit.keys, min(found.asked.most, found.asked.reach))
        if shared > position and shared - hit.reaches >= PROMISED:
            reuse.ask(reader.key, shared, "branch")
            request.awaits = reader, shared
            return True
    return False


def begin(admission: Admission, request: Request, found: Found | None) -> None:
    """A slot for the request, with what others have read."""
    reuse = admission.manager.reuse
    if reuse is None or found is None:
        admission.manager.admit_request(request.key)
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


# ---- held caches


def take_over(admission: Admission, request: Request) -> bool:
    """Whether the request goes on in the held cache that it continues, as far as their tokens agree."""
    held = request.continues
    if held is None or held not in admission.held:
        request.given_up = held is not None and held.finish_reason != "error"
        request.continues = None
        return False
    if request.params.prompt_logprobs is not None:  # every token's logits are wanted
        admission.release_held(held)
        request.continues = None
        return False
    position = admission.manager.position(held.key)
    same = _common_prefix(held.tokens[:position], request.tokens[:-1])
    resident = held.key in admission.manager.slot_of  # else it is frozen, and only whole
    rewinds = resident and same > 0 and admission.manager.can_rewind(held.key, same) and not held.evictions
    if not (same == position or rewinds) or not _has_queries(admission, held, same, request):
        admission.release_held(held)
        request.continues = None
        return False
    held.hold = False  # if this is interrupted half way, the cache is given back
    if resident:
        admission.manager.truncate_request(held.key, same)
    request.cached_tokens = min(same, request.prompt_tokens)
    request.evictions, request.policy = dict(held.evictions), held.policy
    request.key = held.key  # from here on the cache is the request's
    admission.held.remove(held)
    request.continues = None
    request.reuse = continued(request.cached_tokens, request.prompt_tokens)
    if admission.manager.reuse is not None and resident:
        admission.manager.reuse.adopt(request.key, asked_of(admission, request))
    return True


def _has_queries(admission: Admission, held: Request, position: int, request: Request) -> bool:
    """Whether the last queries before a position are there, if an eviction to come may choose by them."""
    eviction = request.eviction
    if eviction is None:
        return True
    if position >= request.prompt_tokens and not (eviction.bounded or eviction.decode_every or request.hold):
        return True  # it came in the middle of its answer, its prompt read and evicted
    first = max(0, position - eviction.window)
    if held.key in admission.manager.frozen:
        return 0 <= admission.manager.frozen[held.key].since <= first
    return admission.manager.query_buffers.whole(admission.manager.slot_of[held.key], first) >= 0


def prefix_of(admission: Admission, request: Request) -> Request | None:
    """The held request whose cache this one can begin with, if there is one."""
    prefix = request.prefix
    if prefix is None or prefix not in admission.held or request.params.prompt_logprobs is not None:
        return None
    return prefix if admission.manager.position(prefix.key) < len(request.tokens) else None


def share_prefix(admission: Admission, request: Request) -> bool:
    """Whether the request begins with the cache of its prefix: pages are shared, state is copied."""
    prefix = prefix_of(admission, request)
    if prefix is None or not fork_cache(admission, prefix, request):
        return False
    request.cached_tokens = admission.manager.position(prefix.key)
    request.reuse = continued(request.cached_tokens, request.prompt_tokens, "a held prefix")
    admission.held.remove(prefix)
    admission.held.append(prefix)  # used last
    return True


def fork_cache(admission: Admission, request: Request, sibling: Request) -> bool:
    try:
        admission.manager.fork_request(request.key, sibling.key)
    except HybridKVError:  # no query buffer for it, or a position at which the cache cannot be shared
        return False
    return True


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return min(len(a), len(b))
