"""OpenTelemetry: one span a request that asks for an answer, by the names of gen_ai, with what its log line says and no
more: never what was said.

Off unless OTEL_EXPORTER_OTLP_ENDPOINT is set; this is the one connection that a server opens by itself. A span is made
when its request has ended and laid into a queue, from which a thread sends: where nobody takes them, the oldest go.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from hybridkv import __version__
from hybridkv.errors import HybridKVError
from hybridkv.server.openai_common import FINISH
from hybridkv.server.record import Record

ENDPOINT, PROTOCOL = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL"
OFF = {"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "none"}  # either: no traces, whatever the endpoint is for
END_SECONDS = 2.0  # that the end of a server waits for spans that are not sent yet
OPERATIONS = {
    "POST /v1/chat/completions": "chat",
    "POST /v1/messages": "chat",
    "POST /v1/responses": "chat",
    "POST /v1/completions": "text_completion",
}
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")


def open_tracing() -> Tracing | None:
    """What the environment asks for; None: nothing. HybridKVError where it asks for what is not there."""
    endpoint = os.environ.get(ENDPOINT, "").strip()
    if not endpoint or any(os.environ.get(name, "").strip().lower() == value for name, value in OFF.items()):
        return None
    if not endpoint.startswith(("http://", "https://")):
        raise HybridKVError(f"{ENDPOINT} must be an http:// or https:// address, such as http://localhost:4318")
    spoken = os.environ.get(PROTOCOL, "").strip() or "http/protobuf"
    if spoken != "http/protobuf":
        raise HybridKVError(f"{PROTOCOL} is {spoken!r}, and http/protobuf alone is spoken here; collectors take it too")
    try:
        return Tracing()
    except ModuleNotFoundError as problem:
        raise HybridKVError(
            f"{ENDPOINT} is set, and sending traces needs {problem.name}: pip install 'hybridkv[otel]', or unset it"
        ) from None


class Tracing:
    """Where spans go. Everything else that OpenTelemetry reads from the environment (OTEL_SERVICE_NAME,
    OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_*) works as it does elsewhere.
    """

    def __init__(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # type: ignore
        from opentelemetry.sdk.resources import Resource  # type: ignore
        from opentelemetry.sdk.trace import TracerProvider  # type: ignore
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # type: ignore
        from opentelemetry.trace import SpanKind, StatusCode  # type: ignore
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # type: ignore

        about = {"service.version": __version__}
        named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        if not named:
            about["service.name"] = "hybridkv"
        # not the process' provider: whoever embeds a server may have one; and nothing waits for it at the very end
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("hybridkv.server", __version__)
        self._parent_of = TraceContextTextMapPropagator().extract
        self._server, self._error = SpanKind.SERVER, StatusCode.ERROR

    def finished(self, record: Record) -> None:
        """The span of a request that has ended; it waits for nothing."""
        operation = OPERATIONS.get(record.route)
        if operation is None:
            return
        now, ended = time.time_ns(), time.monotonic()

        def at(moment: float) -> int:
            """A moment of the monotonic clock as nanoseconds of the day's."""
            return now - int(1e9 * (ended - moment))

        headers = {"traceparent": record.trace or "", "tracestate": record.trace_state or ""}
        parent = self._parent_of({name: value for name, value in headers.items() if value})
        name = operation if record.model is None else f"{operation} {record.model}"
        span = self._tracer.start_span(
            name,
            context=parent,
            kind=self._server,
            attributes=_attributes(record, operation),
            start_time=at(record.begun),
        )
        times, usage = record.times, record.usage
        if times is not None and usage is not None:
            span.add_event("queued", {}, at(times.posted))
            if times.first_token is not None:
                span.add_event("first token", {}, at(times.first_token))
            if times.evicted is not None:
                kept = {"hybridkv.kept_tokens": usage.kept_tokens, "hybridkv.evictions": usage.evictions}
                kept |= {"hybridkv.policy": usage.policy or ""}
                span.add_event("evicted", kept, at(times.evicted))
        if record.finish:
            span.add_event("finished", {"gen_ai.response.finish_reasons": _reasons(record)}, now)
        if record.cause is not None or (record.problem is not None and record.problem.status >= 500):
            span.set_status(self._error)
        span.end(now)

    def close(self) -> None:
        """Send what is left, for some seconds at the most."""
        ending = threading.Thread(target=self._provider.shutdown, name="hybridkv-traces", daemon=True)
        ending.start()
        ending.join(END_SECONDS)


def _attributes(record: Record, operation: str) -> dict[str, Any]:
    """What is known of a request without its text. Stop sequences are text."""
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "hybridkv",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "http.request.method": "POST",
        "http.route": record.route.partition(" ")[2],
        "http.response.status_code": record.status,
        "hybridkv.request_id": record.id,
        "error.type": _error(record),
    }
    params, usage, times = record.params, record.usage, record.times
    if params is not None:
        found |= {f"gen_ai.request.{name}": getattr(params, name) for name in SAMPLING}
        found |= {"gen_ai.request.choice.count": params.n, "gen_ai.request.stream": record.stream}
    if usage is not None:
        found |= {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
            "hybridkv.kv_bytes": usage.kv_bytes,
            "hybridkv.full_bytes": usage.full_bytes,
        }
    if times is not None and times.first_token is not None:
        found["gen_ai.response.time_to_first_chunk"] = times.first_token - record.begun
    if record.finish:
        found["gen_ai.response.finish_reasons"] = _reasons(record)
    return {name: value for name, value in found.items() if value is not None}


def _reasons(record: Record) -> list[str]:
    return [FINISH.get(reason, reason) for reason in record.finish]


def _error(record: Record) -> str | None:
    if record.problem is not None:
        return record.problem.code or str(record.problem.status)
    return str(record.status) if record.status >= 400 else None
