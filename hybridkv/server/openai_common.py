"""What Chat Completions and Completions have in common."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hybridkv.config import EvictionConfig
from hybridkv.request import TokenLogprobs
from hybridkv.server import settings
from hybridkv.server.documents import told_of
from hybridkv.server.events import Event
from hybridkv.server.fields import Fields
from hybridkv.server.generation import Job, Usage
from hybridkv.server.problems import ApiError
from hybridkv.text.stream import TextStream
from hybridkv.text.tokenizer import Tokenizer

FINISH = {"context": "length", "calls": "tool_calls"}  # ours -> OpenAI's words
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class StreamOptions:
    """Whether, and how, an answer is streamed."""

    stream: bool
    include_usage: bool = False
    continuous: bool = False  # usage in every chunk


def stream_options(asked: Fields) -> StreamOptions:
    """stream and stream_options."""
    stream, options = asked.flag("stream"), asked.object("stream_options")
    if options is None:
        return StreamOptions(stream)
    if not stream:
        raise asked.wrong("stream_options", "it is for streams, and stream is not true")
    continuous = options.flag("continuous_usage_stats")
    return StreamOptions(stream, options.flag("include_usage") or continuous, continuous)


def refuse(asked: Fields, names: Iterable[str], why: str) -> None:
    """Fields that are not served; false, empty and null ask for nothing."""
    for name in names:
        if asked.raw(name):
            raise asked.wrong(name, why)


def answers(asked: Fields) -> int:
    """n"""
    found = asked.whole("n", 1, settings.MAX_ANSWERS)
    return 1 if found is None else found


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return prefix + secrets.token_hex(12)


def sse(data: dict[str, Any]) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class OpenAIFormat:
    """What streams of both dialects share."""

    def alive(self) -> bytes:
        """A sign of life: a comment, which clients skip."""
        return b": keep-alive\n\n"

    def weighs(self, events: list[Event]) -> bool:
        """A step's events are little."""
        return False

    def error(self, problem: ApiError) -> bytes:
        """A failure in the middle of a stream; nothing follows it."""
        return sse(problem.openai())


def usage_object(usage: Usage, job: Job) -> dict[str, Any]:
    """OpenAI's counts, and what was kept."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "hybridkv": kept_object(usage, job),
    }


def kept_object(usage: Usage, job: Job) -> dict[str, Any]:
    """What was kept of what a full cache holds, and by which settings."""
    found: dict[str, Any] = {
        "kept_tokens": round(usage.kept_tokens, 3),
        "kv_bytes": usage.kv_bytes,
        "full_bytes": usage.full_bytes,
    }
    first = job.prompts[0]
    if first.document is not None:
        found["prefix"] = told_of(first.document, first.sharing)
    if isinstance(job.eviction, EvictionConfig):
        found["budget"] = job.eviction.budget
    if usage.policy is not None:
        found["policy"] = usage.policy
    if usage.reuse:
        found["reuse"] = usage.reuse
    return found


class TokenNames:
    """Tokens as clients see them in logprobs."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        """A token on its own; half characters show as U+FFFD."""
        return f"<{token}>" if self._tokenizer is None else self._tokenizer.token_text(token)

    def bytes(self, token: int) -> list[int]:
        """Its bytes, from which clients put characters together."""
        tokenizer = self._tokenizer
        if tokenizer is not None and tokenizer.joins_bytes:
            return list(tokenizer.piece(token, skip_special=False))
        return list(self.text(token).encode())

    def entry(self, token: int, scores: TokenLogprobs) -> dict[str, Any]:
        """A token of a chat's logprobs."""
        top = [self._scored(other, value) for other, value in scores.top.items()]
        return self._scored(token, scores.token) | {"top_logprobs": top}

    def _scored(self, token: int, value: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": max(value, -9999.0), "bytes": self.bytes(token)}


class Offsets:
    """Where each token of a text begins, counted in characters."""

    def __init__(self, tokenizer: Tokenizer | None, start: int = 0) -> None:
        self._stream, self._at = TextStream(tokenizer), start

    def push(self, token: int) -> int:
        """Where the next token begins."""
        at = self._at
        self._at += len(self._stream.push(token))
        return at
