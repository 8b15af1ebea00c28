"""An engine under load, in process: many requests at once, requests as they arrive, and steps that mix both phases.

    offline   all requests at once: seconds, tokens a second, what kinds of steps ran; greedy, and sampled
    clients   the same by as many clients of AsyncLLM in this process, beside the engine alone
    mixed     a step of decoding requests and a chunk of a prompt, beside the sum of both alone
    online    requests arrive by chance at shares of the capacity that offline has shown: time to first token, time
              between tokens, and how many requests keep limits
    peers     transformers on the same weights and requests

Beside every offline run stands the counted floor of the same requests (load_floor.py). Prompts are random tokens, and
answers have random lengths, whatever the model says. Before, a decode step is compared with a prefill, as decode.py
does, and a warm-up compiles and captures; a run in which a request did not get its tokens is reported, not timed.
"In tok/s" counts until the last prompt has been read; "of alone" is its share of what one prompt of the mean length
alone is read at. A step's milliseconds are by the clock, as the caller of `engine.step()` sees them.
"""

from __future__ import annotations

import re
import time
from typing import Any

import torch

from hybridkv.bench.decode import ANSWER, DecodeBench, StepWork, timed_steps
from hybridkv.bench.load_clients import client_rows
from hybridkv.bench.load_engine import context_of, load_engine, mean_context, pool_tokens
from hybridkv.bench.load_floor import counted_floor
from hybridkv.bench.load_mixed import mixed_rows
from hybridkv.bench.load_samples import Curve, Limits, curve, summary
from hybridkv.bench.load_serve import KINDS, Served, serve, warm_up
from hybridkv.bench.load_workload import Mix, Range, arrivals, sampling
from hybridkv.bench.options import BenchOptions
from hybridkv.bench.prefill import read
from hybridkv.bench.report import Column, Report
from hybridkv.bench.shapes import Shape, random_model
from hybridkv.bench.standin import fill_state, resident
from hybridkv.bench.start import watched_captures
from hybridkv.bench.timing import GIB, Ceilings, free_memory
from hybridkv.config import CacheConfig
from hybridkv.engine.engine import Engine
from hybridkv.errors import HybridKVError
from hybridkv.kernels.compiling import counted
from hybridkv.models.decoder import Model

COLUMNS = (
    Column("s", "seconds", 8, ".3f"),
    Column("tok_s", "out tok/s", 9, ".0f"),
    Column("prompt_tok_s", "in tok/s", 9, ".0f"),
    Column("alone", "of alone", 8, "%"),
    Column("floor_s", "floor s", 8, ".3f"),
    Column("share", "of floor", 8, "%"),
    Column("peak_gib", "peak GiB", 8, ".1f"),
    Column("steps", "steps", 6, ".0f"),
    Column("ms", "ms", 8, ".2f"),
    Column("p99_ms", "p99 ms", 8, ".2f"),
    Column("device_ms", "dev. ms", 8, ".2f"),
    Column("of_sum", "of sum", 6, ".2f"),
    Column("ttft_ms", "ttft ms", 9, ".1f"),
    Column("ttft_times", "of own", 6, ".2f"),
    Column("tbt_times", "of step", 7, ".2f"),
    Column("good", "good", 5, "%"),
)
SHARES = (0.2, 0.4, 0.6, 0.8, 0.9)
LONGEST = (0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)  # steps that requests waited for: these are shown
DRAIN = 2.0  # times as long as requests arrive, that the last may take to end


def run(shape: Shape, options: BenchOptions, ceilings: Ceilings) -> Report:
    kind = (options.kv_dtypes or (("bf16",) if shape.device == "cuda" else ("f32",)))[0]
    mix, count = mix_of(shape, options), count_of(shape, options)
    cache = CacheConfig(kv_dtype=kind, budget=options.budget)
    about = {"model": shape.name, "layers": shape.config.layers, "weights": options.weight_dtype, "kv": kind}
    about |= about_load(shape, options)
    report = Report("load", "s", COLUMNS, shape.device, ceilings, about, deadline=options.deadline)
    report.start()
    if len(options.kv_dtypes) > 1:
        report.note(f"one kind of cache at a time: {kind}")

    def wanted(part: str) -> bool:
        return re.search(options.only or "", part) is not None

    report.doing("making weights")
    model = random_model(shape, options.weight_dtype)
    decoding = DecodeBench(shape, model, report, CacheConfig(kv_dtype=kind))
    checked = report.attempt(
        "load", f"{kind}, compared with prefill", lambda d=decoding: d.agreement(options.weight_dtype)
    )
    del decoding
    if checked is not None:  # what is wrong is not timed
        report.note(f"{kind} KV: decode steps against their prefill: {checked:.0e} of the logits")
        if any(map(wanted, ("offline", "sampled", "clients", "online"))):
            bench = report.attempt("load", "pools", lambda: LoadBench(shape, model, report, options, cache, mix, count))
            if bench is not None:
                bench.rows(wanted)
            del bench
            free_memory(shape.device)
        if wanted("mixed"):
            mixed_rows(shape, model, report, options, cache, mix)
            free_memory(shape.device)
    if wanted("peers") and not options.skip_peers:
        from hybridkv.bench.load_peers import load_peers

        del model
        free_memory(shape.device)
        asked = mix.draw(count, shape.config.vocab, options.seed)
        report.attempt("load", "beside peers", lambda: load_peers(shape, options, report, cache, asked))
    return report


def count_of(shape: Shape, options: BenchOptions) -> int:
    """Requests."""
    return options.requests or (6 if shape.tiny else 64 if options.quick else 256)


def slots_of(shape: Shape, options: BenchOptions) -> int:
    """Requests that run at once, as far as memory goes."""
    return options.slots or min(count_of(shape, options), 256)


def about_load(shape: Shape, options: BenchOptions) -> dict[str, Any]:
    """The requests, in words."""
    mix = mix_of(shape, options)
    return {
        "requests": count_of(shape, options), "prompts": str(mix.prompts), "answers": str(mix.answers),
        "spread": mix.spread, "seed": options.seed, "budget": options.budget, "reuse": options.reuse,
    }  # fmt: skip


def mix_of(shape: Shape, options: BenchOptions) -> Mix:
    """What was asked for, or HybridKVError where the model's context is too short for it."""
    prompts = Range.read("--prompt-tokens", options.prompt_tokens or ("20:120" if shape.tiny else "100:1024"))
    answers = Range.read("--answer-tokens", options.answer_tokens or ("4:12" if shape.tiny else "100:1024"))
    mix, most = Mix(prompts, answers, options.spread), shape.config.max_positions
    if mix.longest >= most:
        raise HybridKVError(
            f"prompts of up to {prompts.high} tokens and answers of up to {answers.high} do not fit the context of "
            f"{shape.name}, {most} tokens; lower --prompt-tokens or --answer-tokens"
        )
    return mix


class LoadBench:
    """One model, one kind of cache, one mix of requests. `engine`: one that is there, else it is made."""

    def __init__(
        self, shape: Shape, model: Model, report: Report, options: BenchOptions, cache: CacheConfig, mix: Mix,
        count: int, engine: Engine | None = None,
    ) -> None:  # fmt: skip
        self.shape, self.model, self.report, self.options, self.cache, self.mix = (
            shape, model, report, options, cache, mix
        )  # fmt: skip
        self.asked = mix.draw(count, shape.config.vocab, options.seed)
        slots = slots_of(shape, options)
        self.engine = load_engine(shape, model, options, cache, slots, context_of(mix)) if engine is None else engine
        self.slots = self.engine.manager.slots
        self.about = {"kv_dtype": cache.kv_dtype, "budget": cache.budget, "slots": self.slots}
        report.note(
            f"{self.slots} slots, pages for {pool_tokens(self.engine):.0f} tokens, steps of up to "
            f"{self.engine.scheduler.step_tokens} tokens"
        )

    def rows(self, wanted: Any) -> None:
        """The parts that were asked for, in order."""
        capacity = None
        by_share = wanted("online") and not self.options.rate
        if wanted("offline") or by_share:
            served = self.report.attempt("offline greedy", self.case, lambda: self.offline(False))
            if served is not None and not served.stopped:
                capacity = len(self.asked) / served.seconds
        if wanted("sampled"):
            sampled = self.report.attempt("offline sampled", self.case, lambda: self.offline(True))
            if capacity is not None and sampled is not None and not sampled.stopped:
                share = len(self.asked) / sampled.seconds / capacity
                self.report.note(f"sampled: {share:.1%} of the greedy run's tokens a second")
        if wanted("clients"):
            self.report.attempt("clients", self.case, self.clients)
        if wanted("online"):
            self.online(capacity)

    @property
    def case(self) -> str:
        budget = "" if self.cache.budget is None else f" budget {self.cache.budget}"
        return f"{len(self.asked)} x {self.mix.prompts} in, {self.mix.answers} out{budget}"

    def warm(self, sampled: bool) -> None:
        with counted() as kernels, watched_captures() as captures:
            took = warm_up(self.engine, self.asked, sampled, self.report.doing)
        self.report.note(
            f"warm-up, {'sampled' if sampled else 'greedy'}: {took:.1f} s; {kernels.compiled} kernels compiled in "
            f"{kernels.seconds:.1f} s, {captures.graphs} graphs captured in {captures.capture_s:.1f} s"
        )
        if cost := sorted(self.engine.runner.cost.seconds.items()):
            times = ", ".join(f"{tokens}: {seconds * 1e3:.2f}" for tokens, seconds in cost)
            self.report.note(f"captured steps, tokens: ms on padding: {times}")

    # ---- all at once

    def offline(self, sampled: bool) -> Served:
        report, asked = self.report, self.asked
        op = "offline sampled" if sampled else "offline greedy"
        self.warm(sampled)
        alone = self.alone_tok_s()
        params = sampling([a.answer for a in asked], sampled, self.options.seed)
        if self.shape.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        served = serve(
            self.engine, asked, params, until=report.deadline, say=lambda text: report.doing(f"{op}: {text}")
        )
        if served.stopped:
            done = sum(r.finish_reason == "length" for r in served.requests)
            report.note(f"{op}: stopped by --limit after {done} of {len(asked)} requests; rates are of what was done")
        else:
            served.check()
        floor = counted_floor(self.model, self.engine.manager.schema, report.ceilings, asked, self.cache.budget)
        if not served.answer_tokens:
            raise HybridKVError("--limit ended the run before a token came; give a larger one")
        prompt_tok_s = served.prompt_tokens / max(served.prompt_s, 1e-9)
        row: dict[str, Any] = {
            "s": served.seconds, "tok_s": served.answer_tokens / served.seconds, "prompt_tok_s": prompt_tok_s,
            "alone": prompt_tok_s / alone, "alone_tok_s": alone, "prompt_s": served.prompt_s,
            "floor_s": floor.seconds, "floor_prompts_s": floor.prompts_s, "floor_decode_s": floor.decode_s,
            "share": None if served.stopped else floor.seconds / served.seconds,
            "peak_gib": torch.cuda.max_memory_allocated() / GIB if self.shape.device == "cuda" else None,
            "prompt_tokens": served.prompt_tokens, "answer_tokens": served.answer_tokens,
            "preemptions": served.preemptions, "stopped": served.stopped,
            "req_s": sum(r.finish_reason == "length" for r in served.requests) / served.seconds,
        }  # fmt: skip
        report.add(op, self.case, **row, **self.about)
        for kind, found in served.steps.table().items():
            report.add(op, f"{len(asked)} requests, {kind} steps", **found)
        return served

    def clients(self) -> float:
        self.warm(False)
        params = sampling([a.answer for a in self.asked], False, self.options.seed)
        return client_rows(self.report, self.engine, self.asked, params, self.case, 1 if self.options.quick else 2)

    def alone_tok_s(self) -> float:
        """Tokens a second of one prompt of the mean length with nothing beside it."""
        length = round(self.mix.prompts.mean(self.mix.spread))
        read(self.engine, length)
        return length / min(read(self.engine, length).seconds for _ in range(2))

    # ---- as they arrive

    def online(self, capacity: float | None) -> None:
        report, options = self.report, self.options
        rates = {f"{rate:g} requests/s": rate for rate in options.rate}
        if not options.rate:
            if capacity is None:
                report.note("online: the capacity is not known, as the offline run did not end; --rate does without")
                report.left_out += 1
                return
            report.about["capacity_req_s"] = capacity
            report.note(f"capacity: {capacity:.4g} requests/s, what all at once took")
            shares = options.load or ((0.5,) if self.shape.tiny else (0.8,) if options.quick else SHARES)
            rates = {f"{share:g} of capacity": share * capacity for share in shares}
        else:
            report.attempt("load", "warm-up", lambda: self.warm(False))
        own = report.attempt("prefill alone", "lengths of the mix", self.own_prefill)
        step = report.attempt("decode by batch", "up to all slots", self.pure_decode)
        if own is None or step is None:
            return
        limits = Limits(options.ttft_limit, options.tbt_limit)
        report.note(f"good: {limits}")
        for name, rate in rates.items():
            report.attempt("online", name, lambda n=name, r=rate: self.at_rate(n, r, own, step, limits))

    def own_prefill(self) -> Curve:
        """Seconds to the first token of a prompt alone, by its length."""
        low, high = self.mix.prompts.low, self.mix.prompts.high
        found: dict[int, float] = {}
        for length in sorted({low, round((low * high) ** 0.5), (low + high) // 2, high}):
            read(self.engine, length)
            seconds = min(read(self.engine, length).seconds for _ in range(2))
            found[length] = seconds
            self.report.add(
                "prefill alone", f"{self.cache.kv_dtype} T={length}", s=seconds, prompt_tok_s=length / seconds,
                ms=seconds * 1e3, tokens=length,
            )  # fmt: skip
        return curve(found)

    def pure_decode(self) -> Curve:
        """Seconds of a decode step of so many requests of the mean length, nothing beside them."""
        schema = self.engine.manager.schema
        work, streams = StepWork.of(self.model, schema), sum(s.streams for s in schema.streams)
        context = min(mean_context(self.mix), self.engine.manager.max_tokens - ANSWER)
        found: dict[int, float] = {}
        for batch in sorted({*(1 << i for i in range(self.slots.bit_length())), self.slots}):
            if found and batch * (context + ANSWER) > pool_tokens(self.engine):
                break
            ms, entries = decode_ms(self.engine, batch, context)
            floor = work.floor_us(self.report.ceilings, batch, entries if streams else 0.0) / 1e3
            found[batch] = ms / 1e3
            self.report.add(
                "decode by batch", f"{self.cache.kv_dtype} B={batch} context {context}", s=ms / 1e3, ms=ms,
                floor_s=floor / 1e3, floor_ms=floor, share=floor / ms, tok_s=batch / ms * 1e3, batch=batch,
                context=context,
            )  # fmt: skip
        return curve(found)

    def at_rate(self, name: str, rate: float, own: Curve, step: Curve, limits: Limits) -> None:
        report, options = self.report, self.options
        seconds = options.seconds or (0.4 if self.shape.tiny else 30.0)
        at = arrivals(rate, seconds, options.seed)
        asked = self.mix.draw(len(at), self.shape.config.vocab, options.seed)
        params = sampling([a.answer for a in asked], False, options.seed)
        until = time.monotonic() + seconds * (1 + DRAIN) + self.mix.answers.high * step(self.slots)
        served = serve(self.engine, asked, params, at, until, lambda text: report.doing(f"online {name}: {text}"))
        if not served.stopped:
            served.check()
        found = summary(served.samples, max(served.seconds, 1e-9), own, step, limits)
        if served.stopped:
            report.note(f"online {name}: {found['unfinished']} of {len(at)} requests were not done in time")
        found |= {"requests": len(at), "rate": rate, "preemptions": served.preemptions}
        found |= {f"{kind}_steps": len(served.steps.seconds[kind]) for kind in KINDS}
        report.add("online", name, s=max(served.seconds, 1e-9), **found, **self.about)
        report.note(
            f"online {name}: {len(at)} requests, batch {found['batch']:.1f}; first token p50 / p99 "
            f"{found['ttft_ms']:.0f} / {found['ttft_p99_ms']:.0f} ms, wait {found['wait_ms']:.0f} / "
            f"{found['wait_p99_ms']:.0f} ms ({found['wait_times']:.2f} x own prefill); good "
            f"{found['good_tok_s']:.0f} tok/s"
        )
        longest = sorted(served.waits, key=lambda wait: -wait.seconds)
        if len(longest) >= 100:
            shown = [f"{share:.1%} {longest[int(len(longest) * share)]}" for share in LONGEST]
            report.note(
                f"online {name}: of {len(longest)} steps that were waited for, the longest are: {'; '.join(shown)}"
            )


def decode_ms(engine: Engine, batch: int, context: int) -> tuple[float, float]:
    """Milliseconds of a decode step of stand-ins, and the entries that they hold together."""
    requests = []
    try:
        requests = [resident(engine, context, ANSWER - 2) for _ in range(batch)]
        fill_state(engine.manager)
        entries = float(sum(n.sum() for r in requests for n in engine.manager.lengths(r.key).values()))
        ms = timed_steps(engine)[0]
        problems = [r.error for r in requests if r.error is not None]
        if problems:
            raise RuntimeError(problems[0])
        return ms, entries
    finally:
        for request in requests:
            engine.abort(request)
