"""One log line a request: who asked what of which route, how it ended and what it took. Never what was said."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from hybridkv.config import SamplingParams
from hybridkv.server.generation import Times, Usage
from hybridkv.server.log_writer import LineWriter
from hybridkv.server.problems import ApiError

log = logging.getLogger("hybridkv.server")
_GOOD_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
STDERR = 2  # its file descriptor
_PLAIN = re.compile(r"[A-Za-z0-9._:/*+-]*")


def request_id(asked: str | None) -> str:
    """The client's own id if it can stand in a log line, else a new one."""
    return asked if asked is not None and _GOOD_ID.fullmatch(asked) else f"req_{secrets.token_hex(12)}"


def log_left_out(count: int, what: str) -> None:
    """What of a request nothing here can read: one line, however much it is."""
    if count:
        log.info("left out of a request, since nothing here can read or run them: %d %s", count, what)


@dataclass
class Record:
    """What is known of a request; filled in on its way."""

    id: str
    route: str
    begun: float = field(default_factory=time.monotonic)
    status: int = 0
    model: str | None = None
    finish: list[str] = field(default_factory=list)
    usage: Usage | None = None
    problem: ApiError | None = None
    cause: BaseException | None = None  # of a failure that is ours
    trace: str | None = None  # traceparent
    trace_state: str | None = None
    times: Times | None = None
    params: SamplingParams | None = None
    stream: bool = False

    def fields(self) -> dict[str, Any]:
        """The line as names and values."""
        found: dict[str, Any] = {"id": self.id, "route": self.route, "code": self.status}
        found["ms"] = round(1000 * (time.monotonic() - self.begun), 1)
        if self.model is not None:
            found["model"] = self.model
        if self.finish:
            found["finish"] = ",".join(self.finish)
        usage = self.usage
        if usage is not None:
            found |= {"prompt": usage.prompt_tokens, "cached": usage.cached_tokens, "output": usage.completion_tokens}
            for name in ("wait_s", "prefill_s", "decode_s"):
                seconds = getattr(usage, name)
                if seconds is not None:
                    found[f"{name[:-2]}_ms"] = round(1000 * seconds, 1)
            found |= {"kept_bytes": usage.kv_bytes, "full_bytes": usage.full_bytes}
            if usage.reuse:
                found["reuse"] = usage.reuse["reason"]
                if usage.reuse["matched"] and "diverged_at" in usage.reuse:  # the token where it leaves what is kept
                    found["diverged_at"] = usage.reuse["diverged_at"]
        if self.problem is not None:
            found["error"] = self.problem.code or self.problem.status
        if self.trace is not None:
            found["traceparent"] = self.trace
        return found


class RequestLog:
    """Writes the lines. Of requests that are refused alike it writes one a second, with a count."""

    def __init__(self, as_json: bool) -> None:
        self._json = as_json
        self._quiet: dict[tuple[str, int], tuple[float, int]] = {}  # route, status -> until when, and how many since

    def write(self, record: Record) -> None:
        """The line of a request that has ended."""
        more: dict[str, Any] = {}
        if 400 <= record.status < 500:
            now, key = time.monotonic(), (record.route, record.status)
            until, count = self._quiet.get(key, (0.0, 0))
            if now < until:
                self._quiet[key] = (until, count + 1)
                return
            self._quiet[key] = (now + 1.0, 0)
            if count:
                more["alike_before"] = count
        log.info(self._line(record.fields() | more))

    def _line(self, fields: dict[str, Any]) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        if self._json:
            return json.dumps({"time": stamp, **fields})
        shown = (f"{k}={v if _PLAIN.fullmatch(str(v)) else json.dumps(str(v))}" for k, v in fields.items())
        return f"{stamp} {' '.join(shown)}"


def log_to_stderr() -> None:
    """The lines go to standard error, and nowhere else; whoever reads that slowly, or not at all, is not waited for."""
    writer, others = LineWriter(STDERR), [logging.getLogger(name) for name in ("asyncio", "opentelemetry")]
    for logger in (log, *others):
        logger.handlers[:] = [writer]
    log.setLevel(logging.INFO)
    log.propagate = False
