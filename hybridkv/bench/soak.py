"""A server under load for minutes, to see what grows and what drifts.

In one process: a tiny model of random weights in exact mode, an HTTP server around it, and clients on real sockets, a
tenth of whose requests are left before their end. Pools are too small for all of them, and besides a request is
preempted every second. Conversations are saved to a file or to the store and loaded again, or forked, and both must go
on alike. Every 12 seconds a canary asks one of a few questions, and its tokens must be those that it gave at the
beginning, when it was alone. At the end every page and slot is back, and no request is left in memory, however short it
was. Memory of the process is looked at once a second; what it does after the first quarter counts where it ran for ten
minutes or more: then it must not grow.
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridkv.bench.http_client import Connection, request_bytes
from hybridkv.bench.options import BenchOptions
from hybridkv.bench.report import Column, Report
from hybridkv.bench.serve import CHAT, Tally, Wish, wishes
from hybridkv.bench.served import MIB, NAME
from hybridkv.bench.shapes import Shape
from hybridkv.bench.timing import Ceilings
from hybridkv.bench.tiny_folder import write_tiny
from hybridkv.config import SamplingParams
from hybridkv.conversation import Conversation
from hybridkv.engine.engine import Engine
from hybridkv.errors import HybridKVError
from hybridkv.llm import LLM
from hybridkv.request import Request

COLUMNS = (
    Column("count", "count", 8, ".0f"),
    Column("wrong", "wrong", 6, ".0f"),
    Column("a_second", "a second", 9, ".2f"),
    Column("mib", "MiB", 8, ".1f"),
    Column("slope", "MiB/10 min", 11, ".1f"),
)
SECONDS, CLIENTS, SLOTS, CONTEXT = 600.0, 12, 8, 512
LEAVING = 0.1  # share of requests whose client leaves
CANARY_EVERY, PREEMPT_EVERY, TALK_EVERY = 12.0, 1.0, 2.0  # seconds
FLAT = 5.0  # MiB in ten minutes that memory may grow by
TALK = SamplingParams(max_tokens=8, ignore_eos=True)
CANARIES = ("What did the log say?", "Name a bird.", "The wind was", "Who wrote it, and when? " * 6, "Noon.")


@dataclass
class Soaked:
    """What was seen."""

    tally: Tally = field(default_factory=Tally)
    left: int = 0  # requests whose client left
    canaries: int = 0
    strange: list[str] = field(default_factory=list)  # canaries and conversations with other tokens
    preempted: int = 0
    talks: int = 0  # conversations that were saved and restored
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds, MiB

    def settled(self) -> list[tuple[float, float]]:
        """Memory after the first quarter."""
        return self.memory[len(self.memory) // 4 :]

    def slope(self) -> float:
        """MiB in ten minutes, by the straight line through the settled part."""
        seen = self.settled()
        if len(seen) < 3:
            return 0.0
        return 600.0 * statistics.linear_regression([s for s, _ in seen], [m for _, m in seen]).slope

    def grown(self) -> float:
        """MiB by which the mean of the last fifth of the settled part is above that of its first fifth."""
        seen = [m for _, m in self.settled()]
        part = max(1, len(seen) // 5)
        return statistics.fmean(seen[-part:]) - statistics.fmean(seen[:part]) if seen else 0.0


def run(shape: Shape, options: BenchOptions, ceilings: Ceilings) -> Report:
    seconds = options.seconds or (8.0 if options.quick else SECONDS)
    clients = options.clients or (4 if options.quick else CLIENTS)
    about = {"model": NAME, "seconds": seconds, "clients": clients, "slots": SLOTS, "seed": options.seed}
    report = Report("soak", "count", COLUMNS, "cpu", ceilings, about)
    report.start()
    report.attempt("soak", f"{seconds:g} s", lambda: measure(report, seconds, clients, options.seed))
    return report


def measure(report: Report, seconds: float, clients: int, seed: int) -> None:
    """Run it and add the rows; HybridKVError where something was wrong or is left over."""
    found, before = Soaked(), alive()
    with tempfile.TemporaryDirectory(prefix="hybridkv-soak-") as folder, open_small(Path(folder)) as llm:
        with served_here(llm) as port:
            asyncio.run(load(llm, port, found, seconds, clients, seed, Path(folder), report.doing))
        left_over = llm.owner.run(held)
        if (stay := alive() - before) > 0:
            left_over["requests in memory"] = stay
    whole = sum(map(len, found.tally.seconds.values()))
    report.add("requests", "answered", count=whole, wrong=found.tally.failures, a_second=whole / seconds)
    report.add("requests", "left by their client", count=found.left, wrong=0, a_second=found.left / seconds)
    report.add("canaries", f"every {canary_every(seconds):g} s", count=found.canaries, wrong=len(found.strange))
    report.add("preemptions", "forced", count=found.preempted, wrong=0, a_second=found.preempted / seconds)
    report.add("conversations", "saved or forked, continued", count=found.talks, wrong=0)
    last, slope, grown = found.memory[-1][1], found.slope(), found.grown()
    report.add("memory", "of the process", count=len(found.memory), mib=last, slope=slope, grown_mib=grown)
    report.note(f"memory, from the first quarter to the end: {grown:+.1f} MiB; left over: {left_over or 'nothing'}")
    for problem in (*found.tally.problems, *found.strange[:5]):
        report.note(problem)
    report.about["left_over"] = left_over
    if found.tally.failures or found.strange or left_over:
        raise HybridKVError(
            f"{found.tally.failures} requests failed, {len(found.strange)} answers drifted, {left_over}"
        )
    if slope > FLAT and seconds >= SECONDS:
        raise HybridKVError(f"memory grew by {slope:.1f} MiB in ten minutes, {FLAT:g} are allowed")
    if not (found.left and found.canaries and found.preempted and found.talks):
        raise HybridKVError("not everything that was to happen did: see the counts above")


@contextmanager
def open_small(folder: Path) -> Iterator[LLM]:
    """The model in exact mode, with pages for half of what its slots could hold."""
    how: dict[str, Any] = dict(device="cpu", dtype="float32", exact=True, max_requests=SLOTS, max_context=CONTEXT)
    write_tiny(folder)
    with LLM(folder, **how) as whole:
        plan = whole.plan
        memory = whole.model.nbytes + plan.nbytes + plan.workspace - sum(plan.pool_bytes.values()) // 2
    with LLM(folder, memory=memory, disk_cache=folder / "store", **how) as llm:
        yield llm


@contextmanager
def served_here(llm: LLM) -> Iterator[int]:
    """A server around the model on a thread of this process; its port."""
    from hybridkv.server.run import Server
    from hybridkv.server.settings import ServerSettings

    server, ready = Server(ServerSettings(port=0, names=(NAME,), queue=256, queue_seconds=0)), threading.Event()
    problems: list[BaseException] = []

    def serve() -> None:
        try:
            server.run(lambda: llm, lambda _: ready.set(), signals=False)
        except BaseException as problem:
            problems.append(problem)
            ready.set()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    ready.wait()
    try:
        yield server.socket.getsockname()[1]
    finally:
        server.stop()
        thread.join()
        if problems:
            raise problems[0]


def held(engine: Engine) -> dict[str, int]:
    """What requests hold, slots and pages: nothing, if all is at rest."""
    manager = engine.manager
    manager.check_integrity()
    found = {name: table.allocator.total - n for (name, n), table in zip(
        manager.pages_to_be_had().items(), manager.tables.values(), strict=True
    )}  # fmt: skip
    found |= {"slots": manager.slots - manager.free_slots, "held": len(engine.scheduler.held)}
    return {name: n for name, n in found.items() if n}


def canary_every(seconds: float) -> float:
    return min(CANARY_EVERY, seconds / 8)


async def load(
    llm: LLM, port: int, found: Soaked, seconds: float, clients: int, seed: int, folder: Path,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """All that happens at the same time."""
    own = Connection("127.0.0.1", port)
    expected = [await canary(own, text) for text in CANARIES]
    again = [await canary(own, text) for text in CANARIES]
    if again != expected:
        found.strange.append("canaries differ before there is any load")
    listed, begin = wishes(1000, seed), time.monotonic()
    until = begin + seconds

    async def repeat(every: float, do: Callable[[int], Any]) -> None:
        for number in range(int(seconds / every)):
            now = time.monotonic()
            await asyncio.sleep(max(0.0, min(begin + (number + 1) * every, until) - now))
            if time.monotonic() >= until:
                return
            await do(number)

    async def sing(number: int) -> None:
        text = CANARIES[number % len(CANARIES)]
        got = await canary(own, text)
        found.canaries += 1
        if got != expected[number % len(CANARIES)]:
            found.strange.append(f"canary {text[:20]!r} after {time.monotonic() - begin:.0f} s: {got}")

    async def preempt(number: int) -> None:
        found.preempted += await asyncio.to_thread(llm.owner.run, preempt_youngest, True)

    async def talk(number: int) -> None:
        problem = await asyncio.to_thread(talk_twice, llm, folder / "talk.safetensors", number)
        found.talks += 1
        if problem is not None:
            found.strange.append(problem)

    async def look(number: int) -> None:
        now = time.monotonic() - begin
        found.memory.append((now, resident()))
        say(f"{now:.0f} of {seconds:g} s, {found.memory[-1][1]:.0f} MiB")

    await asyncio.gather(
        *(client(port, listed, random.Random(f"{seed} {i}"), until, found) for i in range(clients)),
        repeat(canary_every(seconds), sing),
        repeat(min(PREEMPT_EVERY, seconds / 20), preempt),
        repeat(min(TALK_EVERY, seconds / 8), talk),
        repeat(min(1.0, seconds / 20), look),
    )
    own.close()


async def client(port: int, listed: list[Wish], dice: random.Random, until: float, found: Soaked) -> None:
    """Asks one thing after the other, and leaves some of them."""
    connection = Connection("127.0.0.1", port)
    while time.monotonic() < until:
        wish = dice.choice(listed)
        try:
            if dice.random() < LEAVING:
                reader, _ = await connection.send(wish.data)
                if dice.random() < 0.5:
                    await reader.read(1)
                await asyncio.sleep(dice.random() * 0.05)
                connection.close()
                found.left += 1
            else:
                found.tally.add(wish, await connection.ask(wish.data))
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as problem:
            found.tally.fail(wish, problem)
            connection.close()
    connection.close()


async def canary(connection: Connection, text: str) -> list[int]:
    """The tokens of the answer to a question."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = await connection.ask(request_bytes(CHAT, {"model": NAME, "return_token_ids": True, **body}))
    if answer.status != 200:
        raise HybridKVError(f"a canary got status {answer.status}: {answer.body[:200]!r}")
    return answer.json()["choices"][0]["token_ids"]


def preempt_youngest(engine: Engine) -> int:
    """Whether a request had to give up its cache for a while: the youngest, if others run."""
    running = engine.scheduler.running
    if len(running) < 2:
        return 0
    engine.scheduler.preempt(max(running, key=lambda request: request.order))
    return 1


def talk_twice(llm: LLM, path: Path, number: int) -> str | None:
    """A conversation and the same once more, both continued; what is wrong with that, or None."""
    with closing(Conversation(llm, params=TALK)) as talk:
        said(talk, f"Tell me about bird {number}.")
        with closing(another(llm, talk, path, number)) as other:
            first, second = (said(each, "And then?") for each in (other, talk))
    return None if first == second else f"conversation {number} went on otherwise: {first}, {second}"


def another(llm: LLM, talk: Conversation, path: Path, number: int) -> Conversation:
    """The same conversation once more: from a file, from the store, or as a fork."""
    if number % 3 == 0:
        talk.save(path)
        return Conversation.load(llm, path, TALK)
    if number % 3 == 1:
        llm.save(talk, "bird")
        return llm.load("bird", TALK)
    return talk.fork()


def said(talk: Conversation, text: str) -> list[int]:
    """The tokens of the answer."""
    for _ in talk.send(text):
        pass
    assert talk.last is not None
    return talk.last.token_ids


def alive() -> int:
    """How many requests, of the engine and of the server, are in memory: what has ended must not stay there."""
    from hybridkv.server.generation import Generation

    gc.collect()
    return sum(type(each) in (Request, Generation) for each in gc.get_objects())


def resident() -> float:
    """MiB of this process."""
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1]) / MIB
