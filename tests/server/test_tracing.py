"""Spans of requests, as a collector of the test's own gets them."""

import gzip
import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hybridkv import LLM
from hybridkv.errors import HybridKVError
from hybridkv.server import tracing
from server.running import HI, Running, failing_at, forward, serving, slowly, until
from server.saying import TOOL
from server.test_command import refused

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry is not here: pip install -c constraints.txt -e '.[dev]'")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="its exporter is not here")

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
SECRET = "xyzzy-plugh"
ASKED = [{"role": "user", "content": f"{SECRET}: say hello."}]
TRACE = f"00-{'ab' * 16}-{'cd' * 8}-01"


class Collector(ThreadingHTTPServer):
    """Takes spans; `go` may hold them up."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Taken)
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.raw, self.asked, self.go = b"", threading.Event(), threading.Event()
        self.go.set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def of(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        """So many spans of this name, once they are there."""
        until(lambda: sum(span.name == name for span in self.spans) >= count)
        return [told(span) for span in self.spans if span.name == name]


class _Taken(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest  # type: ignore

        data = self.rfile.read(int(self.headers["content-length"]))
        data = gzip.decompress(data) if self.headers.get("content-encoding") == "gzip" else data
        self.server.asked.set()
        self.server.go.wait(240)
        assert self.path == "/v1/traces"
        self.server.raw += data
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            self.server.services.add(plain(resource.resource.attributes)["service.name"])
            self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def plain(attributes: Any) -> dict[str, Any]:
    def value(found: Any) -> Any:
        kind = found.WhichOneof("value")
        return [value(v) for v in found.array_value.values] if kind == "array_value" else getattr(found, kind)

    return {pair.key: value(pair.value) for pair in attributes}


def told(span: Any) -> dict[str, Any]:
    events = [(event.name, event.time_unix_nano, plain(event.attributes)) for event in span.events]
    found = {"trace": span.trace_id.hex(), "parent": span.parent_span_id.hex(), "error": span.status.code == 2}
    found |= {"start": span.start_time_unix_nano, "end": span.end_time_unix_nano, "state": span.trace_state}
    return found | {"kind": span.kind, "events": events, **plain(span.attributes)}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    server = Collector()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv(tracing.ENDPOINT, server.address)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # milliseconds
    try:
        yield server
    finally:
        server.go.set()
        server.shutdown()
        server.server_close()


@contextmanager
def traced(llm: LLM, **settings: Any) -> Iterator[Running]:
    with serving(llm, names=("tiny",), **settings) as running:
        yield running
        running.idle()


def test_a_request_is_one_span_with_its_counts_and_none_of_its_text(tiny_llm: LLM, collector: Collector) -> None:
    before = time.time_ns()
    with traced(tiny_llm) as running:
        body = {"model": "tiny", "messages": ASKED, "max_tokens": 3, "temperature": 0.5, "seed": 4, "ignore_eos": True}
        more = {"stop": [SECRET], "user": SECRET, "tools": [TOOL], "metadata": {"a": SECRET}, "cache_salt": SECRET}
        status, headers, found = running.ask("POST", CHAT, body | more, {"x-request-id": "mine-1"})
        assert status == 200
        [span] = collector.of("chat tiny")
    usage, [finish] = found["usage"], [choice["finish_reason"] for choice in found["choices"]]
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "hybridkv",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 4,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.stream": False,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "gen_ai.response.finish_reasons": [finish],
        "http.route": CHAT,
        "http.response.status_code": 200,
        "hybridkv.request_id": "mine-1",
        "hybridkv.kv_bytes": usage["hybridkv"]["kv_bytes"],
    }
    assert {name: span.get(name) for name in expected} == expected and not span["error"] and "error.type" not in span
    names, moments = [event[0] for event in span["events"]], [event[1] for event in span["events"]]
    assert names == ["queued", "first token", "finished"] and span["kind"] == 2  # a server's
    assert before <= span["start"] <= moments[0] <= moments[1] <= moments[2] <= span["end"] <= time.time_ns()
    assert span["parent"] == "" and collector.services == {"hybridkv"}
    assert SECRET.encode() not in collector.raw and b"Weather" not in collector.raw


def test_every_dialect_has_its_span_and_nothing_else_has(tiny_llm: LLM, collector: Collector) -> None:
    with traced(tiny_llm) as running:
        for path in ("/health", "/metrics", "/v1/models", "/v1/cache"):
            assert running.ask("GET", path)[0] == 200
        running.post("/tokenize", {"prompt": "a"})
        running.stream(CHAT, {"messages": HI, "max_tokens": 2})
        assert running.post(TEXT, {"prompt": ["a", "b"], "n": 2, "temperature": 1, "max_tokens": 1})[0] == 200
        assert running.post(MESSAGES, {"model": "tiny", "messages": HI, "max_tokens": 2})[0] == 200
        assert running.post(RESPONSES, {"model": "tiny", "input": "hi", "max_output_tokens": 2})[0] == 200
        chats, [text] = collector.of("chat tiny", 3), collector.of("text_completion tiny")
    assert {span["http.route"] for span in chats} == {CHAT, MESSAGES, RESPONSES} and len(collector.spans) == 4
    assert [span["gen_ai.request.stream"] for span in chats if span["http.route"] == CHAT] == [True]
    assert text["gen_ai.response.finish_reasons"] == ["length"] * 4 and text["gen_ai.request.choice.count"] == 2


def test_a_trace_goes_on_and_says_when_it_must_not(tiny_llm: LLM, collector: Collector) -> None:
    body = {"messages": HI, "max_tokens": 1}
    with traced(tiny_llm) as running:
        running.ask("POST", CHAT, body, {"traceparent": TRACE[:-1] + "0"})  # its caller keeps none
        running.ask("POST", CHAT, body, {"traceparent": "00-zz-cd-01"})
        running.ask("POST", CHAT, body, {"traceparent": TRACE, "tracestate": "a=b"})
        other, mine = collector.of("chat tiny", 2)
    assert (mine["trace"], mine["parent"], mine["state"]) == ("ab" * 16, "cd" * 8, "a=b")
    assert other["parent"] == "" and other["trace"] != "ab" * 16 and len(collector.spans) == 2


def test_an_eviction_is_an_event(tiny_llm: LLM, collector: Collector) -> None:
    with traced(tiny_llm) as running:
        asked = {"messages": [{"role": "user", "content": "y" * 300}], "max_tokens": 4, "ignore_eos": True}
        found = running.chat(**asked, hybridkv={"budget": 96})
        [span] = collector.of("chat tiny")
    assert [event[0] for event in span["events"]][-1] == "finished"
    [(_, _, about)] = [event for event in span["events"] if event[0] == "evicted"]
    assert about["hybridkv.kept_tokens"] == pytest.approx(found["usage"]["hybridkv"]["kept_tokens"], abs=1e-3)
    assert about["hybridkv.evictions"] >= 1 and about["hybridkv.policy"] == found["usage"]["hybridkv"]["policy"]


def test_what_goes_wrong_is_told_by_its_code(tiny_llm: LLM, collector: Collector) -> None:
    with traced(tiny_llm) as running:
        running.post(CHAT, {"messages": ASKED, "temperature": SECRET})
        with forward(tiny_llm, failing_at(0)):
            running.post(CHAT, {"messages": ASKED, "max_tokens": 2})
        with forward(tiny_llm, failing_at(3)):  # in the middle of a stream
            running.post(CHAT, {"messages": ASKED, "max_tokens": 9, "ignore_eos": True, "stream": True})
        [refused_], failed = collector.of("chat"), collector.of("chat tiny", 2)
    assert (refused_["http.response.status_code"], refused_["error.type"], refused_["error"]) == (400, "400", False)
    assert [(span["http.response.status_code"], span["error.type"]) for span in failed] == [(500, "500"), (200, "500")]
    assert all(span["error"] for span in failed) and SECRET.encode() not in collector.raw
    assert b"injected" not in collector.raw


def test_a_collector_that_takes_nothing_disturbs_nobody(
    tiny_llm: LLM, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "END_SECONDS", 0.1)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    collector.go.clear()
    with traced(tiny_llm) as running:
        texts = []
        for _ in range(12):
            texts.append(running.chat(max_tokens=2)["choices"][0]["message"])
            assert running.ask("GET", "/health")[0] == 200
        assert collector.asked.wait(240) and texts.count(texts[0]) == 12
        queue = running.service.tracing._provider._active_span_processor._span_processors[0]._batch_processor._queue
        assert len(queue) <= 4
    assert not collector.spans, "it took some"  # the server has ended all the same


@pytest.mark.parametrize("where", ["http://127.0.0.1:9", "http://no.such.host.invalid:4318"])
def test_a_collector_that_is_not_there_disturbs_nobody(
    tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "END_SECONDS", 0.1)
    monkeypatch.setenv(tracing.ENDPOINT, where)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    caplog.set_level(logging.INFO)
    with traced(tiny_llm) as running, forward(tiny_llm, slowly(0.001)):
        for _ in range(3):
            running.chat(max_tokens=2)
        until(lambda: any(record.name.startswith("opentelemetry") for record in caplog.records))
        running.chat(max_tokens=2)


def test_it_is_off_unless_it_is_asked_for(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tracing.ENDPOINT, raising=False)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "x")
    with serving(tiny_llm) as running:
        assert running.service.tracing is None


def test_what_cannot_be_sent_is_told_at_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(tracing.ENDPOINT, "collector:4317")
    with pytest.raises(HybridKVError, match="must be an http:// or https:// address"):
        tracing.open_tracing()
    monkeypatch.setenv(tracing.ENDPOINT, "http://127.0.0.1:4318")
    monkeypatch.setenv(tracing.PROTOCOL, "grpc")
    assert "http/protobuf alone is spoken here" in refused(capsys, "--port", "0")
    monkeypatch.delenv(tracing.PROTOCOL)

    def missing() -> None:
        raise ModuleNotFoundError("No module named 'opentelemetry.sdk'", name="opentelemetry.sdk")

    monkeypatch.setattr(tracing.Tracing, "__init__", lambda self: missing())
    with pytest.raises(HybridKVError, match=r"pip install 'hybridkv\[otel\]'"):
        tracing.open_tracing()


@pytest.mark.parametrize(("name", "value"), [("OTEL_SDK_DISABLED", "True"), ("OTEL_TRACES_EXPORTER", "none")])
def test_who_wants_no_traces_needs_nothing_for_them(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(tracing.ENDPOINT, "http://127.0.0.1:4318")
    monkeypatch.setenv(tracing.PROTOCOL, "grpc")
    with pytest.raises(HybridKVError):
        tracing.open_tracing()
    monkeypatch.setenv(name, value)
    assert tracing.open_tracing() is None


def test_lines_of_the_log_are_as_before(tiny_llm: LLM, collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hybridkv.server")
    with traced(tiny_llm, log_json=True) as running:
        running.ask("POST", CHAT, {"messages": HI, "max_tokens": 1}, {"traceparent": TRACE})
        collector.of("chat tiny")
    lines = [json.loads(record.message) for record in caplog.records if record.message.startswith("{")]
    assert [line["traceparent"] for line in lines if "traceparent" in line] == [TRACE]
