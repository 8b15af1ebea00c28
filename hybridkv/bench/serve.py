"""A server under load, over real sockets: many clients, each with many requests, one after the other.

The server is a process of its own, `hybridkv serve` with a tiny model of random weights, on a CPU; all clients are in
this process. Chats, completions and messages are asked for in turn, as streams and whole, with prompts and answers of
many lengths. Every answer must have exactly the tokens that were asked for, and its prompt's count must be the one that
the first answer had. Beside them somebody asks for /health all the time, and the server notes how late its event loop
is. At the end all pools are empty.

"First" is the time until a stream's first event. Lag is given by the edges of the boxes of the server's own histogram.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hybridkv.bench.http_client import Answer, Connection, request_bytes
from hybridkv.bench.load_samples import percentile
from hybridkv.bench.options import BenchOptions
from hybridkv.bench.report import Column, Report
from hybridkv.bench.served import MIB, NAME, ServerProcess, served
from hybridkv.bench.shapes import Shape
from hybridkv.bench.timing import Ceilings
from hybridkv.errors import HybridKVError

COLUMNS = (
    Column("requests", "requests", 8, ".0f"),
    Column("failed", "failed", 6, ".0f"),
    Column("s", "seconds", 8, ".2f"),
    Column("req_s", "req/s", 8, ".1f"),
    Column("tok_s", "tok/s", 8, ".0f"),
    Column("first_ms", "first ms", 8, ".1f"),
    Column("p50_ms", "p50 ms", 8, ".1f"),
    Column("p99_ms", "p99 ms", 8, ".1f"),
    Column("max_ms", "max ms", 8, ".1f"),
)
CLIENTS, REQUESTS, SLOTS = 64, 500, 32
LAG_MS, HEALTH_MS = 250.0, 1000.0  # what the event loop may be late in 99 of 100 looks, and what /health may take
HEALTH_EVERY = 0.25  # seconds
CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
WORDS = ("ship", "log", "says", "that", "wind", "and", "sea", "were", "calm", "at", "noon", "while", "birds", "wrote")


@dataclass(frozen=True)
class Wish:
    """One request, ready to be sent, and the tokens that its answer must have."""

    kind: str
    prompt: int  # its number: requests with the same one have equal prompts
    answer: int
    data: bytes


def wishes(count: int, seed: int) -> list[Wish]:
    """Requests of all kinds, prompts of some 4 to 150 tokens, answers of 1 to 15 (8 on average). All from the seed."""
    dice, found = random.Random(seed), []
    for number in range(count):
        text, answer = " ".join(dice.choices(WORDS, k=dice.choice((3, 6, 12, 24, 96)))), 1 + dice.randrange(15)
        more: dict[str, Any] = {"model": NAME, "max_tokens": answer, "temperature": 0, "ignore_eos": True}
        if dice.random() < 0.1:
            more |= {"temperature": 0.8, "top_p": 0.9, "seed": number}
        streams = dice.random() < 0.6
        kind = dice.choice(("chat", "text", "messages"))
        if kind == "text":
            path, body = TEXT, {"prompt": text, **more}
        else:
            path, body = (
                (CHAT if kind == "chat" else MESSAGES),
                {"messages": [{"role": "user", "content": text}], **more},
            )
        if streams:
            body |= (
                {"stream": True} if kind == "messages" else {"stream": True, "stream_options": {"include_usage": True}}
            )
        found.append(Wish(f"{kind}, {'streamed' if streams else 'whole'}", number, answer, request_bytes(path, body)))
    return found


def usage_of(answer: Answer, kind: str) -> tuple[int, int]:
    """Tokens of prompt and answer as the server counts them; ValueError where it does not say."""
    streamed = kind.endswith("streamed")
    found = answer.events() if streamed else [answer.json()]
    if any("error" in event for event in found):
        raise ValueError("an error came in the stream")
    if kind.startswith("messages"):
        before = next(e for e in found if "message" in e)["message"]["usage"] if streamed else found[0]["usage"]
        prompt = sum(before.get(name) or 0 for name in before if name.endswith("input_tokens"))
        last = next(event for event in reversed(found) if "usage" in event)
        return prompt, last["usage"]["output_tokens"]
    usage = found[-1]["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"]


@dataclass
class Tally:
    """What the clients saw."""

    prompts: dict[int, int] = field(default_factory=dict)  # tokens of each prompt
    seconds: dict[str, list[float]] = field(default_factory=dict)  # by kind of request
    firsts: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # the first few

    def add(self, wish: Wish, answer: Answer) -> None:
        """Note an answer, and whether it is exactly what was asked for."""
        try:
            if answer.status != 200:
                raise ValueError(f"status {answer.status}: {answer.body[:200]!r}")
            prompt, given = usage_of(answer, wish.kind)
            if given != wish.answer or prompt != self.prompts.setdefault(wish.prompt, prompt):
                raise ValueError(f"{given} tokens of {wish.answer}, the prompt {prompt} of {self.prompts[wish.prompt]}")
        except (ValueError, KeyError, IndexError, StopIteration) as problem:
            self.fail(wish, problem)
            return
        self.seconds.setdefault(wish.kind, []).append(answer.seconds)
        if answer.pieces > 1:
            self.firsts.setdefault(wish.kind, []).append(answer.first)
        self.tokens[wish.kind] = self.tokens.get(wish.kind, 0) + given

    def fail(self, wish: Wish, problem: BaseException) -> None:
        """Note a request without a right answer."""
        self.failed[wish.kind] = self.failed.get(wish.kind, 0) + 1
        if len(self.problems) < 5:
            self.problems.append(f"{wish.kind}: {type(problem).__name__}: {problem}")

    @property
    def failures(self) -> int:
        return sum(self.failed.values())


async def drive(host: str, port: int, listed: list[list[Wish]], tally: Tally) -> None:
    """One client for each list; each asks for the next thing as soon as it has the last one."""

    async def client(mine: list[Wish]) -> None:
        connection = Connection(host, port)
        for wish in mine:
            try:
                tally.add(wish, await connection.ask(wish.data))
            except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as problem:
                tally.fail(wish, problem)
                connection.close()
        connection.close()

    await asyncio.gather(*map(client, listed))


@contextmanager
def health_asked(server: ServerProcess, every: float = HEALTH_EVERY) -> Iterator[list[float]]:
    """Inside, a thread asks for /health; the seconds that each took, infinite where it was not ok."""
    over, seconds = threading.Event(), []

    def ask() -> None:
        while not over.wait(every):
            begin = time.perf_counter()
            try:
                good = server.get("/health")[0] == 200
            except OSError:
                good = False
            seconds.append(time.perf_counter() - begin if good else float("inf"))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield seconds
    finally:
        over.set()
        thread.join()


def run(shape: Shape, options: BenchOptions, ceilings: Ceilings) -> Report:
    clients, each = (
        options.clients or (8 if options.quick else CLIENTS),
        options.requests or (5 if options.quick else REQUESTS),
    )
    slots = options.slots or min(SLOTS, clients)
    about = {"model": NAME, "clients": clients, "each": each, "slots": slots, "seed": options.seed}
    about["threads"] = os.environ.get("OMP_NUM_THREADS", "all")
    report = Report("serve", "s", COLUMNS, "cpu", ceilings, about, deadline=options.deadline)
    report.start()
    report.attempt("serve", f"{clients} clients x {each}", lambda: measure(report, clients, each, slots, options.seed))
    return report


def measure(report: Report, clients: int, each: int, slots: int, seed: int) -> None:
    """Start a server, load it, and add the rows; HybridKVError where an answer was wrong or something is left over."""
    listed = wishes(min(clients * each, 2000), seed)
    dice = random.Random(seed)
    asked = [[dice.choice(listed) for _ in range(each)] for _ in range(clients)]
    report.doing("starting the server")
    with served("--max-requests", slots, "--context", 1024, "--queue", clients, "--queue-timeout", 0) as server:
        asyncio.run(drive(server.host, server.port, [listed[:8]], Tally()))  # what begins with the first requests
        before, tally = server.resident(), Tally()
        report.doing(f"{clients} clients")
        with health_asked(server) as health:
            begin = time.perf_counter()
            asyncio.run(drive(server.host, server.port, asked, tally))
            took = time.perf_counter() - begin
        held, lag = server.wait_for_rest(), server.lag()
        grown = (server.resident() - before) / MIB
        code = server.stop()
    for kind in sorted(tally.seconds):
        seconds = tally.seconds[kind]
        row = rates(seconds, took, tally.tokens[kind]) | {"failed": tally.failed.get(kind, 0)}
        first = percentile(tally.firsts[kind], 50) * 1e3 if kind in tally.firsts else None
        report.add("serve", kind, first_ms=first, **row)
    every = [s for seconds in tally.seconds.values() for s in seconds]
    report.add("serve", "all", failed=tally.failures, **rates(every, took, sum(tally.tokens.values())))
    report.add("health", "GET /health", failed=sum(s == float("inf") for s in health), **rates(health, took))
    late = {"p50_ms": lag["p50"] * 1e3, "p99_ms": lag["p99"] * 1e3}
    report.add("event loop", "late by at most", requests=lag["looks"], **late)
    report.note(
        f"memory of the server: {grown:+.1f} MiB; left over in its pools: {held or 'nothing'}; exit code {code}"
    )
    report.about |= {"grown_mib": grown, "left_over": held, "exit_code": code}
    for problem in tally.problems:
        report.note(problem)
    if tally.failures or held or code:
        raise HybridKVError(f"{tally.failures} requests failed, {held or 'nothing'} left over, exit code {code}")
    if slow := too_slow(health, late["p99_ms"]):
        if clients * each >= CLIENTS * REQUESTS or float("inf") in health:
            raise HybridKVError(slow)
        report.note(slow)  # too few looks to tell the server from a busy machine


def too_slow(health: list[float], lag_ms: float) -> str:
    """What is wrong with the seconds of /health and the lag of the event loop; "": nothing."""
    if health and max(health) * 1e3 <= HEALTH_MS and lag_ms <= LAG_MS:
        return ""
    most = f"{max(health) * 1e3:.0f} ms" if health else "never asked"
    return f"slower than it should be: /health {most} of {HEALTH_MS:.0f}, event loop {lag_ms:.0f} of {LAG_MS:.0f} ms"


def rates(seconds: list[float], took: float, tokens: int | None = None) -> dict[str, Any]:
    """A row of a table."""
    if not seconds:
        return {"requests": 0, "s": took}
    found: dict[str, Any] = {"requests": len(seconds), "s": took, "req_s": len(seconds) / took}
    if tokens is not None:
        found["tok_s"] = tokens / took
    return found | {f"{name}_ms": percentile(seconds, p) * 1e3 for name, p in (("p50", 50), ("p99", 99), ("max", 100))}
