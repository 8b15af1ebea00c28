"""The cache as a picture: numbers that the engine's thread copies between steps, for whoever looks at the page.

    engine's thread   step, observe(engine) ... step, observe(engine) ...     writes `latest`, one reference
    worker thread                 draw(latest): who has which page (feed.py asks for it)

Neither waits for the other. A copy takes a small part of the engine's time: the longer it took, the later the next one
comes. A picture has counts and no text. Prompts of the server's own requests stay with the recorder, for the key that
asked alone.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hybridkv.cache import KVCacheManager
from hybridkv.cache.page_table import PageTable
from hybridkv.cache.schema import StateSchema, ceil_div
from hybridkv.engine.engine import Engine
from hybridkv.eviction.evict import STREAMS
from hybridkv.eviction_record import EvictionRecord
from hybridkv.request import Request, RequestKey

PERIOD = 0.25  # seconds between two copies while somebody watches
UNWATCHED = 10.0  # and while nobody does
ASKED_SECONDS = 5.0  # that somebody who asks once counts as watching
SHARE, UNWATCHED_SHARE = 50, 200  # a copy is followed by so many times its own time without one
MOST_CELLS = 1 << 14  # of a kind; beyond it a cell stands for 2, 4, 8, ... pages
LEAST_REACH = 1 << 10  # pages that are shown however few were used
MOST_ENDED = 32  # requests that are shown after their end
MOST_ROWS = 256
MOST_EVENTS = 256
MOST_TOKENS = 1 << 18  # of ended prompts that are kept to be looked at
MOST_MARKS = 64  # checkpoints that are shown of a prompt
FREE, LATER, SHARED = 0, 1, 255  # what a cell holds; between them: a request's tag
KEPT = " checkpoint"  # behind the name of a state: its rows in checkpoints, where these are of other bytes
ENDS = {"abort": "cancelled", "error": "failed"}


@dataclass(frozen=True)
class Kind:
    """Memory of one kind: pages of a stream, or state rows."""

    name: str
    what: str  # "pages" | "states"
    total: int
    unit_bytes: int  # of a page, or of a row
    layers: int


@dataclass(frozen=True)
class Cells:
    """The map of one kind: its first `reach` units, a byte for each `per_cell` of them. The others are free."""

    reach: int
    per_cell: int
    data: bytes


@dataclass(frozen=True)
class Holders:
    """Who holds the units of one kind, copied as it is."""

    held: np.ndarray  # [total] bool
    of: tuple[tuple[int, np.ndarray], ...]  # a request's tag, the numbers of its units; -1: none


@dataclass(frozen=True)
class Picture:
    """What the cache held at one moment. Nothing in it is changed afterwards."""

    kinds: tuple[Kind, ...] = ()
    holders: Mapping[str, Holders] = field(default_factory=dict)
    rows: Mapping[int, dict[str, Any]] = field(default_factory=dict)  # by the request's number
    running: int = 0
    waiting: int = 0
    read: int = 0  # prompt tokens computed since the server began
    written: int = 0
    events: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Prompt:
    """What can be shown of one request's prompt, to its owner."""

    owner: bytes  # the salt of the key that asked
    tokens: list[int]
    seen: int  # tokens of prompt and answer
    evictions: dict[int, EvictionRecord]


@dataclass
class _Followed:
    """A request on its way, as the engine's thread follows it."""

    request: Request
    read: int = 0
    written: int = 0
    evictions: int = 0
    preemptions: int = 0
    checkpoints: list[int] = field(default_factory=list)  # positions
    place: tuple[Any, ...] = ()  # where it stood when they were looked for
    begun: bool = False


class Recorder:
    """Follows an engine. `observe` is for the engine's thread; `latest` and `prompt` for any."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.kinds = (
            *(Kind(name, "pages", t.allocator.total, t.schema.page_bytes, len(t.schema.layers))
              for name, t in manager.tables.items()),
            *(kind for s in manager.schema.states if not s.lent for kind in _state_kinds(manager, s)),
        )  # fmt: skip
        self.streams = manager.tables[STREAMS].schema.streams if STREAMS in manager.tables else 0
        self.watched, self.asked = False, 0.0  # whether somebody follows it; when somebody asked last
        self._followed: dict[Request, _Followed] = {}  # one that goes on from a held cache takes over its key
        self._forks: set[RequestKey] = set()  # siblings of those that are followed
        self._ended: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._owners: dict[int, tuple[bytes, str]] = {}  # by number
        self._prompts: OrderedDict[int, Prompt] = OrderedDict()  # of ended requests
        self._events: deque[dict[str, Any]] = deque(maxlen=MOST_EVENTS)
        self._count, self._read, self._written = 0, 0, 0
        self._copied, self._took = 0.0, 0.0
        self.latest = self._picture(manager, 0, 0, {})

    # ---- on the engine's thread

    def own(self, request: Request, whose: tuple[bytes, str]) -> None:
        """Whose request this is: the salt of the key that asked, and the id of its HTTP request."""
        for each in (request, *request.siblings):
            self._owners[each.key.number] = whose

    def observe(self, engine: Engine) -> None:
        """After a step, or a change between steps."""
        scheduler, now = engine.scheduler, time.monotonic()
        for queue in (scheduler.waiting, scheduler.running):
            for request in queue:
                if request not in self._followed:
                    self._follow(request)
        watched = self.watched or now - self.asked < ASKED_SECONDS
        rest, share = (PERIOD, SHARE) if watched else (UNWATCHED, UNWATCHED_SHARE)
        if engine.idle or now - self._copied >= max(rest, share * self._took):
            self._copy(engine)
            self._copied = time.monotonic()
            self._took = self._copied - now
        elif len(self._followed) > len(scheduler.waiting) + len(scheduler.running) + 2 * MOST_ENDED:
            self._end_finished(engine)  # copies are rare while nobody watches, and requests must not pile up until then

    def _follow(self, request: Request) -> None:
        read = request.prompt_tokens if request.key in self._forks else 0  # a sibling begins behind its prompt
        self._followed[request] = _Followed(request, read)
        self._forks |= {sibling.key for sibling in request.siblings}

    def _copy(self, engine: Engine) -> None:
        manager, scheduler = engine.manager, engine.scheduler
        self._end_finished(engine)
        looks = (self._look(followed, engine) for followed in list(self._followed.values()))
        rows = {row["n"]: row for row in looks}
        held = {request.key.number for request in scheduler.held}
        shown = {n: {**row, "state": "held"} if n in held else row for n, row in self._ended.items()}
        rows = {**dict(list(rows.items())[:MOST_ROWS]), **shown}
        if len(self._owners) > 2 * (len(self._followed) + len(self._ended) + MOST_ENDED):  # some were never seen
            known = {request.key.number for request in self._followed} | set(self._ended)
            self._owners = {n: whose for n, whose in self._owners.items() if n in known}
        self.latest = self._picture(manager, len(scheduler.running), len(scheduler.waiting), rows)

    def _end_finished(self, engine: Engine) -> None:
        for followed in list(self._followed.values()):
            if followed.request.finished:
                self._end(followed, self._look(followed, engine))

    def _picture(self, manager: KVCacheManager, running: int, waiting: int, rows: dict[int, dict[str, Any]]) -> Picture:
        keys = [request.key for request in self._followed]
        slots = {manager.slot_of[key]: tag_of(key.number) for key in keys if key in manager.slot_of}
        holders = {
            kind.name: _page_holders(manager.tables[kind.name], slots)
            if kind.what == "pages"
            else _row_holders(manager, slots, kind)
            for kind in self.kinds
        }
        events = tuple(self._events)
        return Picture(self.kinds, holders, rows, running, waiting, self._read, self._written, events)

    def _look(self, followed: _Followed, engine: Engine) -> dict[str, Any]:
        """The request's row, with what happened to it since it was looked at last."""
        request, manager = followed.request, engine.manager
        slot = None if request.finished else manager.slot_of.get(request.key)
        position = 0 if slot is None else int(manager.positions[slot])
        if request.answer_tokens or slot is None:
            read = request.prompt_tokens if request.answer_tokens else followed.read if request.finished else 0
        else:
            read = min(position, request.prompt_tokens)
        self._read += max(0, read - max(followed.read, request.cached_tokens))
        self._written += request.answer_tokens - followed.written
        followed.read, followed.written = read, request.answer_tokens
        self._tell(followed, manager)
        row: dict[str, Any] = {
            "n": request.key.number,
            "tag": tag_of(request.key.number),
            "state": _state(request, slot),
            "prompt": request.prompt_tokens,
            "read": read,
            "written": request.answer_tokens,
            "cached": request.cached_tokens,
            "why": request.reuse.get("why"),
            "checkpoints": followed.checkpoints[-MOST_MARKS:],
            "kept": 0.0,
            "bytes": 0,
            "full": 0,
            "budget": None if request.eviction is None else request.eviction.budget,
            "policy": request.policy,
            "evictions": len(request.evictions),
            "preemptions": request.preemptions,
            "pages": {},
        }
        if slot is not None:
            row["kept"] = round(manager.kept_tokens(request.key), 1)
            row["bytes"], row["full"] = manager.used_bytes(request.key), manager.schema.kv_bytes(position)
            row["pages"] = manager.held_pages(request.key)
        elif request.finished:
            stats = request.stats
            row["kept"] = round(stats.get("kept_tokens", 0.0), 1)
            row["bytes"], row["full"] = int(stats.get("kv_bytes_kept", 0)), int(stats.get("kv_bytes_full", 0))
        return row

    def _tell(self, followed: _Followed, manager: KVCacheManager) -> None:
        """Events since it was looked at last. Evictions are joined: a bounded request is cut at every step."""
        request = followed.request
        if not followed.begun and request.started_at is not None:
            followed.begun = True
            self._event(request, "began", prompt=request.prompt_tokens, cached=request.cached_tokens)
        if (times := len(request.evictions) - followed.evictions) > 0:
            followed.evictions = len(request.evictions)
            at = next(reversed(request.evictions))
            record, table = request.evictions[at], manager.tables[STREAMS]
            pages = (ceil_div(n, table.schema.entries_per_page).sum() for n in (record.lengths, record.counts()))
            freed = (int(next(pages)) - int(next(pages))) * table.schema.page_bytes
            before = float(record.lengths.mean())
            self._event(
                request, "evicted", at=at, before=round(before), kept=round(record.kept), freed=freed, times=times
            )
        if request.preemptions > followed.preemptions:
            followed.preemptions = request.preemptions
            self._event(request, "preempted", times=request.preemptions)
        for at in [at for at in self._checkpoints(followed, manager) if at > request.cached_tokens][-MOST_MARKS:]:
            self._event(request, "checkpoint", at=at)

    @staticmethod
    def _checkpoints(followed: _Followed, manager: KVCacheManager) -> list[int]:
        """Looks for the checkpoints on the request's path; returns those that are new."""
        reuse = manager.reuse
        reading = None if reuse is None else reuse.readings.get(followed.request.key)
        if reuse is None or reading is None:
            return []
        place = reading.column, len(reuse.checkpoints.all), reuse.counts["cuts"]
        if place == followed.place:
            return []
        known, followed.place = followed.checkpoints, place
        followed.checkpoints = [column.end for column in reading.column.path() if column.checkpoint is not None]
        return [at for at in followed.checkpoints if at not in known]

    def _event(self, request: Request, what: str, **numbers: Any) -> None:
        self._count += 1
        found = {"seq": self._count, "time": round(time.time(), 3), "n": request.key.number, "what": what, **numbers}
        self._events.append(found)

    def _end(self, followed: _Followed, row: dict[str, Any]) -> None:
        request, number = followed.request, followed.request.key.number
        end = request.finish_reason or "stop"
        row["end"] = end
        self._event(request, ENDS.get(end, "finished"), written=row["written"], reason=end)
        self._ended[number] = row
        owner = self._owners.get(number)
        if owner is not None:
            self._prompts[number] = Prompt(
                owner[0], request.tokens[: request.prompt_tokens], len(request.tokens), dict(request.evictions)
            )
        self._forks -= {request.key, *(sibling.key for sibling in request.siblings if sibling.finished)}
        del self._followed[request]  # last: another thread finds its prompt in one place or the other
        while len(self._ended) > MOST_ENDED:
            gone, _ = self._ended.popitem(last=False)
            self._owners.pop(gone, None)
            self._prompts.pop(gone, None)
        while len(self._prompts) > 1 and sum(len(p.tokens) for p in self._prompts.values()) > MOST_TOKENS:
            self._prompts.popitem(last=False)

    # ---- on any thread

    def owner(self, number: int) -> tuple[bytes, str] | None:
        """The salt of the key that asked for this request, and the id of its HTTP request."""
        return self._owners.get(number)

    def prompt(self, number: int, owner: bytes) -> Prompt | None:
        """A request's prompt, for the key that asked alone."""
        whose = self._owners.get(number)
        if whose is None or whose[0] != owner:
            return None
        for followed in list(self._followed.values()):
            request = followed.request
            if request.key.number == number:
                tokens = request.tokens[: request.prompt_tokens]
                return Prompt(owner, tokens, len(request.tokens), dict(request.evictions))
        return self._prompts.get(number)


def tag_of(number: int) -> int:
    """A request's tag: LATER < tag < SHARED."""
    return LATER + 1 + number % (SHARED - LATER - 1)


def spans(cells: Cells, before: Cells) -> Iterator[tuple[int, bytes]]:
    """Cells that differ from those before, of the same reach, as pieces (first, cells)."""
    new, old = np.frombuffer(cells.data, np.uint8), np.frombuffer(before.data, np.uint8)
    changed = np.flatnonzero(new != old)
    if not len(changed):
        return
    breaks = np.flatnonzero(np.diff(changed) > 16) + 1  # a gap costs less than a further piece
    for piece in np.split(changed, breaks):
        first, last = int(piece[0]), int(piece[-1]) + 1
        yield first, cells.data[first:last]


def _state(request: Request, slot: int | None) -> str:
    if request.finished:
        return "ended"
    if slot is None:
        return "waiting"
    return "answering" if request.answer_tokens else "reading"


def _page_holders(table: PageTable, slots: Mapping[int, int]) -> Holders:
    rows = [(tag, slot, int(table.held[slot].max(initial=0))) for slot, tag in slots.items()]
    of = tuple((tag, table.pages[slot, :, :width].copy()) for tag, slot, width in rows)
    return Holders(table.allocator.refs > 0, of)


def _state_kinds(manager: KVCacheManager, state: StateSchema) -> list[Kind]:
    """Rows of slots and of checkpoints: one kind where they are of the same bytes."""
    slots, checkpoints, layers = manager.slots, manager.checkpoints or 0, len(state.layers)
    if state.checkpoint_bytes == state.slot_bytes:
        return [Kind(state.name, "states", slots + checkpoints, state.slot_bytes, layers)]
    kept = Kind(state.name + KEPT, "states", checkpoints, state.checkpoint_bytes, layers)
    return [Kind(state.name, "states", slots, state.slot_bytes, layers), *([kept] if checkpoints else [])]


def _row_holders(manager: KVCacheManager, slots: Mapping[int, int], kind: Kind) -> Holders:
    kept = [] if manager.reuse is None else [*manager.reuse.checkpoints.all, *manager.reuse.checkpoints.reserved]
    held = np.zeros(manager.slots + (manager.checkpoints or 0), bool)
    held[[*manager.slot_of.values(), *kept]] = True
    if kind.name.endswith(KEPT):
        return Holders(held[manager.slots :], ())  # no request's
    return Holders(held[: kind.total], tuple((tag, np.array([slot])) for slot, tag in slots.items()))


@dataclass(frozen=True)
class Drawn:
    """The map of one kind, and its counts."""

    used: int  # units of requests that run
    later: int  # kept for later turns
    cells: Cells


def draw(picture: Picture, reach: Mapping[str, int]) -> dict[str, Drawn]:
    """Each kind's map, on any thread. `reach`: units that each shows at least."""
    found = {}
    for kind in picture.kinds:
        tags = _tags(picture.holders[kind.name])
        last = int(np.flatnonzero(tags)[-1]) + 1 if tags.any() else 0  # low page numbers go out first
        cells = _cells(tags, max(reach.get(kind.name, 0), _reach(last, len(tags))))
        found[kind.name] = Drawn(int((tags > LATER).sum()), int((tags == LATER).sum()), cells)
    return found


def _tags(holders: Holders) -> np.ndarray:
    """[total] uint8: who has each unit."""
    found = holders.held.astype(np.uint8)  # LATER, but for those that a request has
    for tag, rows in holders.of:
        ids = rows[rows >= 0]
        found[ids] = np.where(found[ids] > LATER, np.uint8(SHARED), np.uint8(tag))
    return found


def _reach(last: int, total: int) -> int:
    """Units to show where `last` are in use: up to a quarter more, so that it seldom grows, or all."""
    step = 1 << max(0, last.bit_length() - 3)
    return min(total, max(LEAST_REACH, ceil_div(last, step) * step))


def _cells(found: np.ndarray, reach: int) -> Cells:
    """A cell shows what stands highest among its pages: somebody's before kept for later before free."""
    per_cell = 1
    while ceil_div(reach, per_cell) > MOST_CELLS:
        per_cell *= 2
    padded = np.zeros(ceil_div(reach, per_cell) * per_cell, np.uint8)
    padded[:reach] = found[:reach]
    return Cells(reach, per_cell, padded.reshape(-1, per_cell).max(1, initial=0).tobytes())
