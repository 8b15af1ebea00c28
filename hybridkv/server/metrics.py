"""Counters and histograms for Prometheus. Names end as vLLM's do, so that its dashboards fit. No label holds a user's
text.
"""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from hybridkv.cache.checkpoints import KINDS
from hybridkv.cache.lookup import Reason

if TYPE_CHECKING:
    from hybridkv.cache.frozen import Frozen
    from hybridkv.cache.reuse import Reuse
    from hybridkv.llm import LLM
    from hybridkv.server.generation import Generation

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000, 1000000)
Values = dict[tuple[str, ...], float]
REASONS = {"context": "length", "calls": "stop"}  # ours -> vLLM's words


class Metrics:
    """What one server counts."""

    def __init__(self, prefix: str) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._prefix, self._model = prefix, ""
        self._speed: Callable[[], float] = lambda: 0.0  # tokens of prompts that are read in a second; 0: not known
        self._plain: list[Counter | Histogram] = []  # those whose one label is the model
        model = ["model_name"]

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            found = Histogram(prefix + name, about, model, registry=self.registry, buckets=buckets)
            self._plain.append(found)
            return found

        def counter(name: str, about: str, *labels: str) -> Counter:
            found = Counter(prefix + name, about, [*model, *labels], registry=self.registry)
            if not labels:
                self._plain.append(found)
            return found

        self.e2e = histogram("e2e_request_latency_seconds", "from a request's arrival to its end", SECONDS)
        self.first = histogram("time_to_first_token_seconds", "from a request's arrival to its first token", SECONDS)
        self.gap = histogram("inter_token_latency_seconds", "between two steps that gave a request tokens", SECONDS)
        self.queue = histogram("request_queue_time_seconds", "before a prompt is read", SECONDS)
        self.prefill = histogram("request_prefill_time_seconds", "while a prompt is read", SECONDS)
        self.decode = histogram("request_decode_time_seconds", "while an answer is written", SECONDS)
        self.prompt = histogram("request_prompt_tokens", "tokens of a request's prompts", TOKENS)
        self.answer = histogram("request_generation_tokens", "tokens of a request's answers", TOKENS)
        self.asked = histogram("request_max_num_generation_tokens", "tokens that were asked for at most", TOKENS)
        self.iteration = histogram("iteration_tokens_total", "tokens that a step of the engine runs", TOKENS)
        self.prompt_total = counter("prompt_tokens", "tokens of prompts")
        self.answer_total = counter("generation_tokens", "tokens of answers")
        self.success = counter("request_success", "answers that came to their end", "finished_reason")
        self.queries = counter("prefix_cache_queries", "tokens of prompts that were looked for in the cache")
        self.hits = counter("prefix_cache_hits", "tokens of prompts that were found there")
        self.preemptions = counter("num_preemptions", "requests that had to give up their cache for a while")
        self.loads = histogram("reuse_load_seconds", "that a prompt waited for its copies from the host", SECONDS)
        self.saved = counter("reuse_saved_seconds", "of reading that was not needed, less what copies took")
        self.evicted = counter("evicted_tokens", "tokens that streams gave up, on average over streams", "policy")
        self.cached_total = counter("prompt_tokens_cached", "tokens of prompts that were not read again")
        self.calls = counter(
            "tool_calls", "calls of functions in answers: whole, or cut by a limit", "format", "outcome"
        )
        self.replayed = counter("replayed_calls", "answers with calls that stood in a prompt as they were written")
        self.transfers = counter("kv_transfers", "prompts read for, or by, another server, or missed there", "what")
        self.cancelled_total = counter("cancelled", "requests whose client left", "stage")
        self.http = Counter(
            prefix + "http_requests", "answers by route and status", ["route", "code"], registry=self.registry
        )
        self.lag = Histogram(
            prefix + "event_loop_lag_seconds", "how late the event loop wakes", registry=self.registry, buckets=SECONDS
        )

    def watch(self, llm: LLM, model: str) -> None:
        """Show what this model's cache holds."""
        self._model, self._speed = model, lambda: llm.manager.host.speed
        about = {"block_size": str(llm.cache_config.page_size), "num_gpu_blocks": str(sum(_totals(llm).values()))}
        about |= {"cache_dtype": llm.cache_config.kv_dtype, "model_name": model}
        info = Gauge(self._prefix + "cache_config_info", "how the cache is laid out", [*about], registry=self.registry)
        info.labels(**about).set(1)
        self.registry.register(_CacheCollector(llm, self._prefix, model))  # type: ignore[arg-type]
        llm.engine.pipeline.on_launch = self.iteration.labels(model).observe
        for metric in self._plain:
            metric.labels(model)  # 0, not missing, before the first request

    def finished(self, generation: Generation, reasons: list[str]) -> None:
        """A request that came to its end."""
        model, usage, times = self._model, generation.usage, generation.times
        now = time.monotonic()
        self.e2e.labels(model).observe(now - times.posted)
        if times.first_token is not None:
            self.first.labels(model).observe(times.first_token - times.posted)
        for gap in times.gaps:
            self.gap.labels(model).observe(gap)
        for histogram, seconds in (
            (self.queue, usage.wait_s),
            (self.prefill, usage.prefill_s),
            (self.decode, usage.decode_s),
        ):
            if seconds is not None:
                histogram.labels(model).observe(seconds)
        self.prompt.labels(model).observe(usage.prompt_tokens)
        self.answer.labels(model).observe(usage.completion_tokens)
        if generation.job.params.max_tokens is not None:
            self.asked.labels(model).observe(generation.job.params.max_tokens)
        self.prompt_total.labels(model).inc(usage.prompt_tokens)
        self.answer_total.labels(model).inc(usage.completion_tokens)
        self.queries.labels(model).inc(usage.prompt_tokens)
        self.hits.labels(model).inc(usage.cached_tokens)
        self.cached_total.labels(model).inc(usage.cached_tokens)
        for seconds in usage.loads:
            self.loads.labels(model).observe(seconds)
        if speed := self._speed():
            self.saved.labels(model).inc(max(0.0, usage.cached_tokens / speed - sum(usage.loads)))
        self.replayed.labels(model).inc(sum(prompt.replayed for prompt in generation.job.prompts))
        self.preemptions.labels(model).inc(usage.preemptions)
        for whole, count in generation.calls.items():
            if count:
                form = generation.job.prompts[0].call_format
                self.calls.labels(model, form, "whole" if whole else "cut").inc(count)
        for reason in reasons:
            self.success.labels(model, REASONS.get(reason, reason)).inc()
        if usage.policy is not None:
            tokens = usage.prompt_tokens + usage.completion_tokens
            self.evicted.labels(model, usage.policy.partition(":")[0]).inc(max(0.0, tokens - usage.kept_tokens))

    def cancelled(self, generation: Generation) -> None:
        """One whose client left, or that failed."""
        stage = "waiting" if generation.waiting else "prefill" if generation.times.first_token is None else "decode"
        self.cancelled_total.labels(self._model, stage).inc()
        self.preemptions.labels(self._model).inc(sum(request.preemptions for request in generation.requests))

    def text(self) -> bytes:
        """All of it in Prometheus' text form."""
        return generate_latest(self.registry)


def _totals(llm: LLM) -> dict[str, int]:
    return {name: table.allocator.total for name, table in llm.manager.tables.items()}


PLACES = ("slot", "frozen", "host")  # of a cache that waits


def _where(frozen: Frozen | None) -> str:
    return "slot" if frozen is None else "frozen" if frozen.exported is None else "host"


COPIES = (
    "columns stored",
    "states stored",
    "columns dropped",
    "states dropped",
    "loads",
    "loads failed",
)
PREEMPTED = ("sent_away", "came_back", "read_again")
WAYS = ("frozen", "thawed", "exported", "imported", "given_up")  # of RestingCaches.counts


class _CacheCollector:
    """What requests hold at this moment: single numbers that the engine's thread writes, read without waiting."""

    def __init__(self, llm: LLM, prefix: str, model: str) -> None:
        self._llm, self._prefix, self._model = llm, prefix, model

    def describe(self) -> Iterator[Metric]:
        return iter(())  # so that registering does not collect

    def collect(self) -> Iterator[Metric]:
        llm, model = self._llm, self._model

        def gauge(name: str, about: str, values: Values, *labels: str) -> Metric:
            found = GaugeMetricFamily(self._prefix + name, about, labels=["model_name", *labels])
            for key, value in values.items():
                found.add_metric([model, *key], value)
            return found

        scheduler = llm.engine.scheduler
        yield gauge("num_requests_running", "requests that have a slot", {(): len(scheduler.running)})
        yield gauge("num_requests_waiting", "requests that wait for one", {(): len(scheduler.waiting)})
        frozen = llm.manager.frozen
        lying = Counts(_where(frozen.get(request.key)) for request in list(scheduler.held))
        held: Values = {(where,): float(lying[where]) for where in PLACES}
        yield gauge("held_conversations", "caches that wait for a next turn, by where they lie", held, "where")
        total, free, there = _totals(llm), llm.manager.free_pages(), llm.manager.pages_to_be_had()
        used = {name: max(0, total[name] - there[name]) for name in total}
        shares = [used[name] / total[name] for name in total if total[name]]
        yield gauge("kv_cache_usage_perc", "pages in use, 0 to 1, of the fullest pool", {(): max(shares, default=0.0)})
        pages: Values = {(name, "used"): float(used[name]) for name in total}
        pages |= {(name, "later"): float(max(0, there[name] - free[name])) for name in total}
        pages |= {(name, "free"): float(free[name]) for name in total}
        yield gauge("cache_pages", "pages by stream and state", pages, "kind", "state")
        size = {name: table.schema.page_bytes for name, table in llm.manager.tables.items()}
        kept: Values = {(name, "kept"): float(used[name] * size[name]) for name in total}
        kept |= {(name, "capacity"): float(total[name] * size[name]) for name in total}
        positions = llm.manager.positions[list(llm.manager.slot_of.values())].tolist()
        for name, table in llm.manager.tables.items():  # what the requests would hold if nothing were evicted
            kept[name, "full"] = float(sum(table.schema.pages(position) for position in positions) * size[name])
        yield gauge("cache_bytes", "bytes by stream", kept, "kind", "what")
        yield from self._reused(gauge)
        yield from self._read_again(gauge)
        host = llm.manager.host
        ways = {("device", "host"): host.copied_down, ("host", "device"): host.copied_up}
        about = "bytes of caches that were copied between device and host"
        moved = CounterMetricFamily(self._prefix + "reuse_copy_bytes", about, labels=["model_name", "from", "to"])
        for way, nbytes in ways.items():
            moved.add_metric([model, *way], nbytes)
        yield moved
        room: Values = {("used",): float(host.used), ("capacity",): float(host.limit)}
        yield gauge("host_cache_bytes", "host memory for caches that wait to be used again", room, "what")
        about = "caches that waited for a next turn, by what became of them"
        resting = CounterMetricFamily(self._prefix + "resting_caches", about, labels=["model_name", "what"])
        for what in WAYS:
            resting.add_metric([model, what], scheduler.counts[what])
        yield resting
        about = "requests that had to make room, by what became of their caches"
        preempted = CounterMetricFamily(self._prefix + "preempted_requests", about, labels=["model_name", "what"])
        for what in PREEMPTED:
            preempted.add_metric([model, what], scheduler.counts[what])
        yield preempted
        grammar = SummaryMetricFamily(
            self._prefix + "grammar_seconds", "what grammars take", labels=["model_name", "phase"]
        )
        for phase, (times, seconds) in llm.engine.grammars.timer.phases.items():
            grammar.add_metric([model, phase], int(times), seconds)
        yield grammar

    def _reused(self, gauge: Callable[..., Metric]) -> Iterator[Metric]:
        """What is kept for prompts to come."""
        reuse = self._llm.manager.reuse
        kinds = Counts(c.kind for c in list(reuse.checkpoints.all.values())) if reuse is not None else Counts()
        counted: Values = {(kind,): float(kinds[kind]) for kind in KINDS}
        yield gauge("checkpoints", "states that prompts can be taken up from, by where they stand", counted, "kind")
        hits = CounterMetricFamily(self._prefix + "checkpoint_hits", "prompts taken up from one", labels=["model_name"])
        hits.add_metric([self._model], 0 if reuse is None else reuse.counts["checkpoint_hits"])
        yield hits
        if reuse is not None:
            yield from self._tiers(gauge, reuse)

    def _tiers(self, gauge: Callable[..., Metric], reuse: Reuse) -> Iterator[Metric]:
        """The same by where it lies."""
        device, host, counts = reuse.columns.count - reuse.columns.away, reuse.host, reuse.counts
        columns: Values = {("device",): float(device), ("host",): float(len(host.alone) + len(host.doubles))}
        yield gauge("reuse_columns", "columns of prompts that are kept, by where they lie", columns, "tier")
        held: Values = {("device", "pages"): float(device * reuse.column_bytes)}
        held |= {("device", "states"): float(reuse.checkpoints.nbytes)}
        held |= {("host", what): float(nbytes) for what, nbytes in host.nbytes.items()}
        yield gauge("reuse_bytes", "their bytes", held, "tier", "what")
        labels = ["model_name", "tier"]
        hits = CounterMetricFamily(self._prefix + "reuse_hit_tokens", "tokens of prompts found there", labels=labels)
        for tier in ("device", "host"):
            hits.add_metric([self._model, tier], counts[f"{tier}_hit_tokens"])
        yield hits
        about = "copies to and from the host, by what became of them"
        copies = CounterMetricFamily(self._prefix + "reuse_copies", about, labels=["model_name", "what"])
        for what in COPIES:
            copies.add_metric([self._model, what.replace(" ", "_")], host.counts[what])
        yield copies

    def _read_again(self, gauge: Callable[..., Metric]) -> Iterator[Metric]:
        """Why prompts were read, and what went that might have spared it."""
        reuse = self._llm.manager.reuse

        def counter(name: str, about: str, values: Values, *labels: str) -> Metric:
            found = CounterMetricFamily(self._prefix + name, about, labels=["model_name", *labels])
            for key, value in values.items():
                found.add_metric([self._model, *key], value)
            return found

        counts = {} if reuse is None else reuse.counts
        looked, cuts = counts.get("lookup_tokens", 0), counts.get("cuts", 0)
        read = {} if reuse is None else reuse.read_again
        dropped = {} if reuse is None else reuse.checkpoints.dropped
        why: Values = {(reason,): float(read.get(reason, 0)) for reason in get_args(Reason)}
        gone: Values = {
            ("checkpoint", reason): float(dropped.get(reason, 0)) for reason in ("rows", "pages", "forgotten")
        }
        gone["column", "pages"] = float(counts.get("columns_dropped", 0))
        bare = reuse.columns.uncovered if reuse is not None and reuse.has_state else 0
        yield counter("reuse_lookup_tokens", "tokens of prompts that were looked for", {(): looked})
        yield counter("reuse_read_again_tokens", "tokens of prompts that were read, by reason", why, "why")
        read_ahead = {name: counts.get(f"warm_{name}", 0) for name in ("tokens", "hits", "hit_tokens")}
        about = "tokens of next turns that were read before these came"
        yield counter("reuse_warm_tokens", about, {(): read_ahead["tokens"]})
        yield counter("reuse_warm_hits", "prompts that began with such", {(): read_ahead["hits"]})
        yield counter("reuse_warm_hit_tokens", "their tokens of it", {(): read_ahead["hit_tokens"]})
        yield counter("reuse_cuts", "steps that ended early for a checkpoint", {(): cuts})
        yield counter("reuse_dropped", "what was kept and had to go, and for what", gone, "what", "why")
        yield gauge("reuse_uncovered_columns", "those that no checkpoint lets a prompt use", {(): bare})
