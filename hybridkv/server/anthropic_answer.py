"""Anthropic's Messages: events written as its clients expect them, whole or streamed. One block is open at a time."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

from hybridkv.server.anthropic_request import MessageCall
from hybridkv.server.events import CallArguments, CallEnd, CallStart, Event, Finish, Said, whole_calls
from hybridkv.server.generation import Generation
from hybridkv.server.openai_common import kept_object, new_id
from hybridkv.server.problems import ApiError

STOP = {"length": "max_tokens", "context": "model_context_window_exceeded", "calls": "tool_use"}  # ours -> Anthropic's
KINDS = {"thinking": "thinking_delta", "text": "text_delta"}


def named(kind: str, **data: Any) -> bytes:
    """A server-sent event; its name stands in its data, too."""
    text = json.dumps({"type": kind, **data}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {text}\n\n".encode()


def signature() -> str:
    """Thoughts are signed so that clients send them back; nothing checks it."""
    return secrets.token_urlsafe(24)


class MessageFormat:
    """Events of one generation in Anthropic's form."""

    def __init__(self, call: MessageCall) -> None:
        self._call, self._id = call, new_id("msg_")
        self._input: dict[str, Any] | None = None  # counts of the prompt, as the beginning of a stream says them
        self._index, self._open = -1, ""  # the block that is open: its number, and its kind or ""
        self._arguments: str | None = None  # of the call that is open, not sent yet; None: some were
        self._end: Finish | None = None

    # streamed

    def alive(self) -> bytes:
        """A sign of life."""
        return named("ping")

    def weighs(self, events: list[Event]) -> bool:
        """A step's events are little."""
        return False

    def chunks(self, events: list[Event], generation: Generation) -> Iterator[bytes]:
        """The events of a step."""
        if events and self._input is None:
            self._input = self._input_counts(generation)
            message = self._message([], None, None) | {"usage": self._usage(generation, output=0)}
            yield named("message_start", message=message)
        for event in events:
            if isinstance(event, Said):
                yield from self._said(event)
            elif isinstance(event, CallStart):
                yield from self._close()
                block = {"type": "tool_use", "id": f"toolu_{event.id}", "name": event.name, "input": {}}
                yield from self._begin("tool_use", block)
                self._arguments = ""
            elif isinstance(event, CallArguments):
                first, text = self._arguments == "", (self._arguments or "") + event.text
                self._arguments = text if first and text == "{}" else None  # the block began with that already
                if self._arguments is None:
                    yield self._delta({"type": "input_json_delta", "partial_json": text})
            elif isinstance(event, CallEnd):
                yield from self._close()
            elif isinstance(event, Finish):
                self._end = event
                if self._index < 0 and not generation.job.read_only:  # never without content
                    yield from self._begin("text", {"type": "text", "text": ""})
                yield from self._close()

    def _said(self, said: Said) -> Iterator[bytes]:
        kind = "thinking" if said.reasoning else "text"
        if self._open != kind:
            yield from self._close()
            empty = {"type": kind, kind: ""} | ({"signature": ""} if said.reasoning else {})
            yield from self._begin(kind, empty)
        if said.text and (self._call.show_thinking or not said.reasoning):
            yield self._delta({"type": KINDS[kind], kind: said.text})

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        self._index, self._open = self._index + 1, kind
        yield named("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if not self._open:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": signature()})
        yield named("content_block_stop", index=self._index)
        self._open = ""

    def end(self, generation: Generation) -> Iterator[bytes]:
        """What follows the last block."""
        assert self._end is not None
        reason, stop = _stopped(self._end)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        yield named("message_delta", delta=delta, usage=self._usage(generation))
        yield named("message_stop")

    def error(self, problem: ApiError) -> bytes:
        """A failure in the middle of a stream; nothing follows it."""
        return named("error", error=problem.anthropic()["error"])

    # whole

    def whole(self, events: list[Event], generation: Generation) -> dict[str, Any]:
        """All of the answer at once."""
        end = next(event for event in events if isinstance(event, Finish))
        content = [] if generation.job.read_only else self._blocks(events) or [{"type": "text", "text": ""}]
        return self._message(content, *_stopped(end)) | {"usage": self._usage(generation)}

    def _blocks(self, events: list[Event]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        calls = dict(whole_calls(events))
        for event in events:
            if isinstance(event, Said):
                kind = "thinking" if event.reasoning else "text"
                if not found or found[-1]["type"] != kind:
                    found.append({"type": kind, kind: ""} | ({"signature": signature()} if event.reasoning else {}))
                if self._call.show_thinking or not event.reasoning:
                    found[-1][kind] += event.text
            elif isinstance(event, CallStart) and event in calls:
                block = {"type": "tool_use", "id": f"toolu_{event.id}", "name": event.name}
                found.append(block | {"input": _object(calls[event])})
        return found

    def _message(self, content: list[Any], reason: str | None, stop: str | None) -> dict[str, Any]:
        about = {"id": self._id, "type": "message", "role": "assistant", "model": self._call.model}
        return about | {"content": content, "stop_reason": reason, "stop_sequence": stop}

    def _usage(self, generation: Generation, output: int | None = None) -> dict[str, Any]:
        usage = generation.usage
        return {
            **(self._input_counts(generation) if self._input is None else self._input),
            "output_tokens": usage.completion_tokens if output is None else output,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
            "hybridkv": kept_object(usage, generation.job),
        }

    @staticmethod
    def _input_counts(generation: Generation) -> dict[str, Any]:
        """The three counts of input add up to the prompt's tokens. What is kept for others is known at the end, so a
        stream, which says these once, counts that as input.
        """
        usage, kept = generation.usage, generation.usage.written_tokens
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens - kept,
            "cache_creation_input_tokens": kept,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation": {"ephemeral_5m_input_tokens": kept, "ephemeral_1h_input_tokens": 0},
        }


def _object(text: str) -> dict[str, Any]:
    """Arguments as an object, which this dialect needs; what is none is passed on under a name of its own."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": text}


def _stopped(end: Finish) -> tuple[str, str | None]:
    if end.reason == "stop":
        return ("end_turn", None) if end.stop is None else ("stop_sequence", end.stop)
    return STOP.get(end.reason, end.reason), None
