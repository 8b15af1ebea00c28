"""A generation turned into an HTTP answer, whole or as a stream, in whatever dialect. Who leaves is noticed at once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hybridkv.server.events import Event, Finish
from hybridkv.server.generation import Generation, Job
from hybridkv.server.problems import MODEL_FAILED, ApiError, ClientGone
from hybridkv.server.protocol import STREAM_HEADERS
from hybridkv.server.record import Record
from hybridkv.server.service import Service


class Format(Protocol):
    """A dialect: a pure function of events, but for what it has to remember of a stream."""

    def alive(self) -> bytes:
        """A sign of life in a silent stream."""
        ...

    def chunks(self, events: list[Event], generation: Generation) -> Iterable[bytes]:
        """A step's events as server-sent events."""
        ...

    def weighs(self, events: list[Event]) -> bool:
        """Whether their chunks may be so much that another thread has to write them."""
        ...

    def end(self, generation: Generation) -> Iterable[bytes]:
        """What follows the last event."""
        ...

    def error(self, problem: ApiError) -> bytes:
        """A failure in the middle of a stream."""
        ...

    def whole(self, events: list[Event], generation: Generation) -> dict[str, Any]:
        """All of the answer at once."""
        ...


async def answer(request: Request, service: Service, job: Job, form: Format, stream: bool) -> Any:
    """Run a job and answer with it; whatever is wrong with it is told before the first byte."""
    record: Record = request.scope["state"]["record"]
    record.stream, patience = stream, service.settings.keep_alive if stream else None
    generation = await service.begin(job, patience, (request.scope["state"].get("salt", b""), record.id))
    if stream:
        return EventStream(service, generation, form, record)
    events: list[Event] = []
    with _watched(service, generation, request.receive, record):
        while not generation.over:
            events += await generation.next(3600.0) or ()
        sent = await service.send(generation)
        _count(service, generation, events, record)
    return Json(await service.work(_whole, form, events, generation, sent))


class Json(Response):
    """JSON that was written already, on a worker thread: much of it would hold up everybody's streams."""

    media_type = "application/json"


def _whole(form: Format, events: list[Event], generation: Generation, sent: dict[str, Any] | None) -> bytes:
    found = form.whole(events, generation)
    return as_json(found if sent is None else found | {"kv_transfer_params": sent})


def as_json(found: Any) -> bytes:
    """JSON as it is sent."""
    return json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class EventStream:
    """A stream of server-sent events. Its headers go out with the first one, or with the first sign of life, so that a
    failure before that has a status of its own.
    """

    def __init__(self, service: Service, generation: Generation, form: Format, record: Record) -> None:
        self._service, self._generation, self._form, self._record = service, generation, form, record
        self._started, self._written = False, time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation, form, ends = self._generation, self._form, []
        with _watched(self._service, generation, receive, self._record):
            try:
                if not generation.accepted:  # it has been silent for so long already
                    await self._write(send, form.alive())
                while not generation.over:
                    events = await generation.next(self._patience) or []
                    ends += [event for event in events if isinstance(event, Finish)]
                    if data := await self._chunks(events, send):
                        await self._write(send, data)
                    elif not self._patience:  # thoughts that are not shown are silence, too
                        await self._write(send, form.alive())
                _count(self._service, generation, ends, self._record)
                await self._write(send, b"".join(form.end(generation)), more=False)
            except ApiError as problem:
                if not self._started or isinstance(problem, ClientGone):
                    raise
                self._record.problem = problem
                await self._write(send, form.error(problem), more=False)
            except Exception as problem:  # ours; a stream that is only cut looks whole to clients
                self._record.cause = problem
                if not self._started:
                    raise
                await self._write(send, form.error(ApiError(500, MODEL_FAILED)), more=False)

    @property
    def _patience(self) -> float:
        """Seconds until the stream has been silent for too long."""
        return max(0.0, self._written + self._service.settings.keep_alive - time.monotonic())

    async def _write(self, send: Send, data: bytes, more: bool = True) -> None:
        self._written = time.monotonic()
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
        await send({"type": "http.response.body", "body": data, "more_body": more})

    async def _chunks(self, events: list[Event], send: Send) -> bytes:
        """A step's events as they are sent. What takes long is written beside the loop, with signs of life."""
        form, generation = self._form, self._generation
        if not form.weighs(events):
            return b"".join(form.chunks(events, generation))
        writing = asyncio.ensure_future(self._service.work(lambda: b"".join(form.chunks(events, generation))))
        try:
            while not (await asyncio.wait([writing], timeout=self._patience))[0]:
                await self._write(send, form.alive())
                generation.check()
            return writing.result()
        finally:
            writing.cancel()


def _count(service: Service, generation: Generation, events: Iterable[Event], record: Record) -> None:
    reasons = [event.reason for event in events if isinstance(event, Finish)]
    service.metrics.finished(generation, reasons)
    record.finish = reasons


@contextmanager
def _watched(service: Service, generation: Generation, receive: Receive, record: Record) -> Iterator[None]:
    """Inside, a client that leaves ends its generation. Afterwards nothing of it is left."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.fail(ClientGone())

    watching = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        record.usage, record.times, record.params = generation.usage, generation.times, generation.job.params
        record.cause = record.cause or generation.problem
        service.end(generation)
        service.misses.saw(generation.usage)
