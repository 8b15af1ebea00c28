"""The feed of the page: one snapshot, then what has changed, as server-sent events.

    id: 7f3a91c2.41            a name for what the reader knows now; it comes back as Last-Event-ID
    event: snapshot | delta
    data: {"engine": {...}, "kinds": [...], "requests": {"12": {...}, "9": null}, "map": {...}, "events": [...]}

A delta is the difference of two views, whatever happened between them: changes are joined, and a reader that comes back
gets the difference to the view it had, if that is still known. Nobody waits for the engine, and a reader that lags
behind gets no backlog but a new snapshot.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import socket
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from starlette.types import Receive, Scope, Send

from hybridkv import __version__
from hybridkv.config import POLICY_NAMES
from hybridkv.eviction import find_policy
from hybridkv.server.picture import PERIOD, Cells, Drawn, Kind, Picture, Recorder, draw, spans
from hybridkv.server.problems import busy
from hybridkv.server.protocol import STREAM_HEADERS

if TYPE_CHECKING:
    from hybridkv.server.service import Service

MOST_WATCHERS = 16
BEHIND = 64 << 10  # bytes that a reader may leave unread
KNOWN_VIEWS = 32  # 8 seconds
RATE_SECONDS = 2.0  # over which tokens a second are counted
FIRST_EVENTS = 50  # that a snapshot brings
RETRY_SECONDS = 10


@dataclass(frozen=True)
class View:
    """A picture as it is told, without what only one key may see."""

    version: int
    picture: Picture
    engine: dict[str, Any]
    drawn: dict[str, Drawn]

    @property
    def kinds(self) -> list[dict[str, Any]]:
        """Memory by kind."""
        return [_kind(kind, self.drawn[kind.name]) for kind in self.picture.kinds]


class CacheFeed:
    """Views of one server's cache. All of it is for the event loop."""

    def __init__(self, service: Service, recorder: Recorder) -> None:
        self._service, self.recorder = service, recorder
        self._boot, self._watchers = secrets.token_hex(4), 0
        self._views: deque[View] = deque(maxlen=KNOWN_VIEWS)
        self._totals: deque[tuple[float, int, int]] = deque()  # when, tokens read, tokens written
        self._looked, self._looking = 0.0, asyncio.Lock()

    # ---- views

    async def view(self, fresh: bool = False) -> View:
        """What is known now; at most four of them a second are made for all readers, but for who asks once, `fresh`."""
        async with self._looking:
            now = time.monotonic()
            if self._views and now - self._looked < PERIOD and not fresh:
                return self._views[-1]
            self._looked = now
            picture = self.recorder.latest
            engine = self._engine(picture, now)
            last = self._views[-1] if self._views else None
            if last is None or picture is not last.picture:
                reach = {} if last is None else {name: drawn.cells.reach for name, drawn in last.drawn.items()}
                drawn = await self._service.work(draw, picture, reach)
                self._views.append(View(1 if last is None else last.version + 1, picture, engine, drawn))
            elif engine != last.engine:
                self._views.append(View(last.version + 1, picture, engine, last.drawn))
            return self._views[-1]

    async def once(self, owner: bytes) -> dict[str, Any]:
        """A snapshot for somebody who does not stay."""
        self.recorder.asked = time.monotonic()
        return self.snapshot(await self.view(fresh=True), owner)

    def _engine(self, picture: Picture, now: float) -> dict[str, Any]:
        totals = self._totals
        if not totals or totals[-1][1:] != (picture.read, picture.written):
            totals.append((now, picture.read, picture.written))
        while len(totals) > 1 and totals[1][0] <= now - RATE_SECONDS:
            totals.popleft()
        seconds = max(PERIOD, min(RATE_SECONDS, now - totals[0][0]))
        idle = totals[-1][0] < now - RATE_SECONDS
        rates = [0.0 if idle else (totals[-1][i] - totals[0][i]) / seconds for i in (1, 2)]
        return {
            "status": self._service.status,
            "running": picture.running,
            "waiting": picture.waiting,
            "read_per_s": round(rates[0], 1),
            "written_per_s": round(rates[1], 1),
            "read": picture.read,
            "written": picture.written,
        }

    # ---- what a reader is told

    def snapshot(self, view: View, owner: bytes) -> dict[str, Any]:
        """All of it."""
        picture = view.picture
        return {
            "id": self.id_of(view),
            "server": self._about(),
            "engine": view.engine,
            "kinds": view.kinds,
            "requests": {str(n): self._row(n, row, owner) for n, row in picture.rows.items()},
            "map": {name: _map(drawn.cells) for name, drawn in view.drawn.items()},
            "events": list(picture.events[-FIRST_EVENTS:]),
        }

    def delta(self, before: View, view: View, owner: bytes) -> dict[str, Any]:
        """What has changed; requests that are gone are null."""
        old, new, found = before.picture, view.picture, {}
        if view.engine != before.engine:
            found["engine"] = view.engine
        if view.kinds != before.kinds:
            found["kinds"] = view.kinds
        rows = {str(n): self._row(n, row, owner) for n, row in new.rows.items() if row != old.rows.get(n)}
        if rows := rows | {str(n): None for n in old.rows if n not in new.rows}:
            found["requests"] = rows
        changed: dict[str, Any] = {}
        for name, drawn in view.drawn.items():
            cells, was = drawn.cells, before.drawn[name].cells
            if cells.reach != was.reach:
                changed[name] = _map(cells)
            elif pieces := [[at, _base64(part)] for at, part in spans(cells, was)]:
                changed[name] = pieces
        if changed:
            found["map"] = changed
        last = old.events[-1]["seq"] if old.events else 0
        if events := [event for event in new.events if event["seq"] > last]:
            found["events"] = events
        return found

    def _row(self, number: int, row: dict[str, Any], owner: bytes) -> dict[str, Any]:
        """A request as the key that `owner` stands for sees it: the name of an HTTP request is its own client's."""
        whose = self.recorder.owner(number)
        return {**row, "request": whose[1]} if whose is not None and whose[0] == owner else row

    def _about(self) -> dict[str, Any]:
        service = self._service
        llm = service.llm
        engine = llm.engine
        default = engine.evictor.default if engine.evictor is not None else None
        possible = engine.evictor is not None and (default is not None or engine.manager.query_buffers.count > 0)
        policies = [name for name in POLICY_NAMES if not find_policy(name).needs_replay]
        return {
            "version": __version__,
            "model": service.names[0],
            "context": service.context,
            "slots": engine.manager.slots,
            "streams": self.recorder.streams,
            "eviction": possible,
            "budget": None if default is None else default.budget,
            "policy": str(llm.cache_config.policy) if isinstance(llm.cache_config.policy, str) else "auto",
            "policies": policies,
            "recent": llm.cache_config.recent,
        }

    def id_of(self, view: View) -> str:
        """The name of a view, unlike that of any other server."""
        return f"{self._boot}.{view.version}"

    def known(self, name: str | None) -> View | None:
        """The view with this name, if it is still known."""
        return next((view for view in self._views if self.id_of(view) == name), None)

    # ---- readers

    def watch(self, owner: bytes, last_id: str | None) -> CacheEvents:
        """A further reader, or 429."""
        if self._watchers >= MOST_WATCHERS:
            raise busy(f"{MOST_WATCHERS} readers follow the cache already, and no more are taken", RETRY_SECONDS)
        self._service.llm  # noqa: B018  503 while it is loading
        return CacheEvents(self, self._service, owner, self.known(last_id))

    def count(self, change: int) -> None:
        """Readers that come and go. Without any, pictures are copied less often."""
        self._watchers += change
        self.recorder.watched = self._watchers > 0


class CacheEvents:
    """The stream of one reader, an ASGI answer."""

    def __init__(self, feed: CacheFeed, service: Service, owner: bytes, before: View | None) -> None:
        self._feed, self._service, self._owner, self._before = feed, service, owner, before
        feed.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        transport = scope.get("extensions", {}).get("hybridkv.transport")
        if transport is not None and (connection := transport.get_extra_info("socket")) is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BEHIND)  # what the system holds is a backlog too
        gone = asyncio.ensure_future(_left(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
            await self._follow(gone, transport, send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
            self._feed.count(-1)

    async def _follow(self, gone: asyncio.Future[None], transport: Any, send: Send) -> None:
        async def write(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        feed, service, silent = self._feed, self._service, time.monotonic()
        while not gone.done():
            if transport is not None and transport.get_write_buffer_size() > BEHIND:
                await write(b": behind\n\n")  # waits until it reads, or is cut off as any client that does not
                self._before = None
            view = await feed.view()
            data = self._event(view)
            if data or time.monotonic() - silent >= service.settings.keep_alive:
                await write(data or b": keep-alive\n\n")
                silent = time.monotonic()
            self._before = view
            if service.draining and not service.generations:
                return
            await asyncio.wait([gone], timeout=PERIOD)

    def _event(self, view: View) -> bytes:
        """What this reader does not know yet; empty: nothing."""
        feed, before = self._feed, self._before
        if before is view:
            return b""
        found = feed.snapshot(view, self._owner) if before is None else feed.delta(before, view, self._owner)
        if not found:
            return b""
        name = "snapshot" if before is None else "delta"
        return f"id: {feed.id_of(view)}\nevent: {name}\ndata: {_json(found)}\n\n".encode()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _kind(kind: Kind, drawn: Drawn) -> dict[str, Any]:
    return {**asdict(kind), "used": drawn.used, "later": drawn.later}


def _map(cells: Cells) -> dict[str, Any]:
    return {"reach": cells.reach, "per_cell": cells.per_cell, "cells": _base64(cells.data)}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _json(found: dict[str, Any]) -> str:
    return json.dumps(found, separators=(",", ":"))
