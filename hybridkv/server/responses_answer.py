"""OpenAI's Responses: events written as its clients, and Codex, expect them, whole or streamed. One item is open at a
time: thoughts, a message, or a call.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hybridkv.server.events import CallArguments, CallEnd, CallStart, Event, Finish, Said
from hybridkv.server.generation import Generation
from hybridkv.server.openai_common import kept_object, new_id
from hybridkv.server.problems import ApiError
from hybridkv.server.responses_request import ResponseCall

PREFIXES = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}
CUT = ("length", "context")  # ends that are no end of the model's own


@dataclass
class _Item:
    """An output item on its way: its kind, id, and what it holds so far."""

    kind: str
    id: str
    text: str = ""
    call: CallStart | None = None

    def shown(self, status: str) -> dict[str, Any]:
        """The item as clients see it; the text is left out while it is in progress."""
        found: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        done = status != "in_progress"
        if self.kind == "reasoning":
            found |= {"summary": [], "content": [{"type": "reasoning_text", "text": self.text}] if done else []}
        elif self.kind == "message":
            found |= {"role": "assistant", "content": [self.part] if done else []}
        else:
            assert self.call is not None
            found |= {"call_id": f"call_{self.call.id}", "name": self.call.name, "arguments": self.text if done else ""}
        return found

    @property
    def part(self) -> dict[str, Any]:
        """The one part of a message."""
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}


class ResponseFormat:
    """Events of one generation in the form of Responses."""

    def __init__(self, call: ResponseCall) -> None:
        self._call, self._id, self._created = call, new_id("resp_"), int(time.time())
        self._number = 0  # of the next event
        self._open: _Item | None = None
        self._items: list[dict[str, Any]] = []  # those that have ended
        self._index = -1  # of the item that was opened last
        self._end: Finish | None = None

    # streamed

    def alive(self) -> bytes:
        """A sign of life is an event: clients that wait for one do not count comments."""
        return b"".join(self._begun()) or self._event("in_progress", response=self._response("in_progress"))

    def weighs(self, events: list[Event]) -> bool:
        """A step's events are little."""
        return False

    def chunks(self, events: list[Event], generation: Generation) -> Iterator[bytes]:
        """The events of a step."""
        if events:
            yield from self._begun()
        for event in events:
            if isinstance(event, Said):
                yield from self._said(event)
            elif isinstance(event, CallStart):
                yield from self._close("completed")
                yield from self._begin("function_call", event)
            elif isinstance(event, CallArguments) and self._open is not None:
                self._open.text += event.text
                yield self._item_event("function_call_arguments.delta", delta=event.text)
            elif isinstance(event, CallEnd) and event.whole:
                yield from self._close("completed")
            elif isinstance(event, CallEnd):
                self._open = None  # it was cut, and is none: who acts on items that are done must not see it
            elif isinstance(event, Finish):
                self._end = event
                yield from self._close("incomplete" if event.reason in CUT else "completed")

    def _begun(self) -> Iterator[bytes]:
        """The first two events, if they have not been sent."""
        if self._number == 0:
            for name in ("created", "in_progress"):
                yield self._event(name, response=self._response("in_progress"))

    def _said(self, said: Said) -> Iterator[bytes]:
        kind = "reasoning" if said.reasoning else "message"
        if not said.text:
            return
        if self._open is None or self._open.kind != kind:
            yield from self._close("completed")
            yield from self._begin(kind)
        assert self._open is not None
        self._open.text += said.text
        if said.reasoning:
            yield self._item_event("reasoning_text.delta", content_index=0, delta=said.text)
        else:
            yield self._item_event("output_text.delta", content_index=0, delta=said.text, logprobs=[])

    def _begin(self, kind: str, call: CallStart | None = None) -> Iterator[bytes]:
        item = self._open = _Item(kind, new_id(PREFIXES[kind]), call=call)
        self._index += 1
        yield self._event("output_item.added", output_index=self._index, item=item.shown("in_progress"))
        if kind == "message":
            yield self._item_event("content_part.added", content_index=0, part=item.part)

    def _close(self, status: str) -> Iterator[bytes]:
        item = self._open
        if item is None:
            return
        if item.kind == "reasoning":
            yield self._item_event("reasoning_text.done", content_index=0, text=item.text)
        elif item.kind == "message":
            yield self._item_event("output_text.done", content_index=0, text=item.text, logprobs=[])
            yield self._item_event("content_part.done", content_index=0, part=item.part)
        else:
            yield self._item_event("function_call_arguments.done", arguments=item.text)
        self._open = None
        self._items.append(item.shown(status))
        yield self._event("output_item.done", output_index=self._index, item=self._items[-1])

    def end(self, generation: Generation) -> Iterator[bytes]:
        """What follows the last item."""
        found = self._ended(generation)
        yield self._event(found["status"], response=found)

    def error(self, problem: ApiError) -> bytes:
        """A failure in the middle of a stream; nothing follows it."""
        known = problem.code if problem.code == "context_length_exceeded" else None
        code = known or ("server_is_overloaded" if problem.status in (429, 503) else "server_error")
        failed = self._response("failed", error={"code": code, "message": problem.message})
        return b"".join(self._begun()) + self._event("failed", response=failed)

    def _event(self, name: str, **data: Any) -> bytes:
        """A server-sent event; its name stands in its data, too, beside its number."""
        name = f"response.{name}"
        found = {"type": name, "sequence_number": self._number, **data}
        self._number += 1
        text = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
        return f"event: {name}\ndata: {text}\n\n".encode()

    def _item_event(self, name: str, **data: Any) -> bytes:
        assert self._open is not None
        return self._event(name, item_id=self._open.id, output_index=self._index, **data)

    # whole

    def whole(self, events: list[Event], generation: Generation) -> dict[str, Any]:
        """All of the answer at once."""
        for _ in self.chunks(events, generation):
            pass
        return self._ended(generation)

    def _ended(self, generation: Generation) -> dict[str, Any]:
        assert self._end is not None
        cut = self._end.reason in CUT
        usage = generation.usage
        counts = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "hybridkv": kept_object(usage, generation.job),
        }
        details = {"reason": "max_output_tokens"} if cut else None
        return self._response("incomplete" if cut else "completed", incomplete_details=details, usage=counts)

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        about = {"id": self._id, "object": "response", "created_at": self._created, "status": status}
        about |= {"error": None, "incomplete_details": None, "model": self._call.model, "output": self._items}
        return about | {"usage": None} | self._call.echoed | more
