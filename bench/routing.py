"""Which replica a turn of a conversation goes to, and what that costs, on a thousand simulated replicas.

    python bench/routing.py                              # 1,000 replicas, 10 minutes, seed 1: minutes of one core
    python bench/routing.py --replicas 100 --rates 0.8   # quicker
    python bench/routing.py --plot docs/routing.svg      # needs hybridkv, for the style of the pictures
    python bench/routing.py --real 8000 8001 8002        # turns against `hybridkv serve --replicas 2`, and simulated

Each replica reads one prompt after the other. What reading takes is measured (Qwen3.5-27B on one H200,
docs/performance.md; beyond 64K tokens the last line goes on), and so is how many conversations a card holds. A turn
whose conversation is held reads only what is new. Conversations have 8 turns, one in twenty is an agent's with 40;
lengths and pauses are drawn.

Left out: answers, which share the card with the prompts that are read; batches of prompts; links that are shared; the
router's own time (1 to 2 ms). So times are those of an otherwise idle card, and curves are to be compared with each
other, not with a card's latency.
"""

from __future__ import annotations

import argparse
import heapq
import http.client
import json
import random
import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

READ = ((0, 0.013), (2048, 0.155), (16384, 1.330), (65536, 6.25))  # tokens, seconds; 0: a decode step
HELD_WHOLE, HELD_EVICTED = 26, 214  # conversations of 16K in 80 GiB: bf16; budget 2048, FP8, state in bf16
KEPT = 2048  # tokens, where entries are evicted
MOVE_SECONDS = 0.13  # 140 MiB over 10 GbE at 1.17 GB/s, computed
MOVE_QUEUE = 1.0  # seconds of queue from which a conversation is moved
TURNS, AGENT_TURNS, AGENTS = 8, 40, 0.05
ANSWER_TOKENS, ANSWER_SECONDS = 300, 6.0  # a turn's answer is part of the next prompt
WARM_UP = 240.0  # seconds before turns are counted
LOST = 0.01  # of the replicas, where some are lost


class Policy(NamedTuple):
    name: str
    held: int = HELD_WHOLE
    evicted: bool = False
    affinity: bool = True
    moves: bool = False


POLICIES = (
    Policy("two choices, no affinity", affinity=False),
    Policy("session hash", HELD_WHOLE),
    Policy("and evicted", HELD_EVICTED, evicted=True),
    Policy("and moved", HELD_EVICTED, evicted=True, moves=True),
)


def read_seconds(tokens: float, scale: float = 1.0) -> float:
    """What reading a prompt of so many tokens takes: straight lines between measured points."""
    at = min(max(1, bisect_left([point[0] for point in READ], tokens)), len(READ) - 1)
    (x0, y0), (x1, y1) = READ[at - 1], READ[at]
    return scale * (y0 + (tokens - x0) * (y1 - y0) / (x1 - x0))


@dataclass
class Talk:
    """A conversation."""

    number: int
    left: int  # turns
    agent: bool
    home: int
    tokens: int = 0  # of its prompts and answers so far
    draw: random.Random = field(default_factory=random.Random)


class Replicas:
    """Queues and held conversations of all replicas, under one policy."""

    def __init__(self, policy: Policy, count: int, seed: int, scale: float = 1.0) -> None:
        self.policy, self.count, self.scale = policy, count, scale
        self.free_at = [0.0] * count  # when a replica has read all that waits
        self.held = [OrderedDict[int, int]() for _ in range(count)]  # conversation -> tokens, longest unused first
        self.dead: set[int] = set()
        self.busy, self.moved, self.found = 0.0, 0, 0
        self.draw = random.Random(seed)

    def any_one(self) -> int:
        """A replica that runs, each as likely as the others."""
        while (found := self.draw.randrange(self.count)) in self.dead:
            pass
        return found

    def lighter(self) -> int:
        """Of two, the one with the shorter queue."""
        return min(self.any_one(), self.any_one(), key=self.free_at.__getitem__)

    def turn(self, now: float, talk: Talk, new: int) -> float:
        """Seconds to the first token of a prompt that has `new` more tokens than all before."""
        policy, late = self.policy, 0.0
        if not policy.affinity:
            talk.home = self.lighter()
        elif talk.home in self.dead:
            talk.home = self.any_one()  # the ring without it
        if policy.moves and self.free_at[talk.home] - now > MOVE_QUEUE:
            other = self.lighter()
            if self.free_at[other] + MOVE_SECONDS < self.free_at[talk.home]:
                cache = self.held[talk.home].pop(talk.number, None)
                talk.home = other
                if cache is not None:
                    self.held[other][talk.number] = cache
                    late = MOVE_SECONDS
                    self.moved += 1
        held = self.held[talk.home]
        before = held.pop(talk.number, 0)
        before = before if before == talk.tokens else 0  # it has gone on elsewhere since
        self.found += before > 0
        talk.tokens += new
        base = min(before, KEPT) if policy.evicted else before
        took = max(READ[0][1] * self.scale, read_seconds(base + talk.tokens - before, self.scale))
        if base:
            took = max(READ[0][1] * self.scale, took - read_seconds(base, self.scale))
        begin = max(now + late, self.free_at[talk.home])
        self.free_at[talk.home] = begin + took
        self.busy += took
        talk.tokens += ANSWER_TOKENS
        held[talk.number] = talk.tokens
        if len(held) > policy.held:
            held.popitem(last=False)
        return begin + took - now

    def lose(self, share: float) -> None:
        """Some replicas end, and what they held with them."""
        for replica in self.draw.sample(range(self.count), max(1, round(share * self.count))):
            self.dead.add(replica)
            self.held[replica].clear()


def simulate(
    policy: Policy,
    replicas: int,
    seconds: float,
    rate: float,
    seed: int,
    scale: float = 1.0,
    lose_at: float | None = None,
) -> tuple[Replicas, list[tuple[float, float]]]:
    """`rate`: turns a second and replica. Returns the replicas, and (when, first token after) of each turn counted."""
    draw, state = random.Random(seed), Replicas(policy, replicas, seed + 1, scale)
    mean = TURNS + AGENTS * (AGENT_TURNS - TURNS)
    arrivals = rate * replicas / mean  # conversations a second
    end, number, now = WARM_UP + seconds, 0, 0.0
    events: list[tuple[float, int, Talk | None]] = [(draw.expovariate(arrivals), 0, None)]
    counted: list[tuple[float, float]] = []
    lose_at = None if lose_at is None else WARM_UP + lose_at
    while events:
        now, _, talk = heapq.heappop(events)
        if now > end:
            break
        if lose_at is not None and now >= lose_at:
            state.lose(LOST)
            lose_at = None
        if talk is None:  # a new conversation, and when the next one comes
            number += 1
            agent = draw.random() < AGENTS
            talk = Talk(
                number,
                AGENT_TURNS if agent else TURNS,
                agent,
                state.any_one(),
                draw=random.Random(1_000_003 * seed + number),
            )
            heapq.heappush(events, (now + draw.expovariate(arrivals), -number, None))
            new = _length(talk.draw, 12_000 if agent else 1_500, 60_000)
        else:
            new = _length(talk.draw, 1_500 if talk.agent else 200, 20_000)
        first = state.turn(now, talk, new)
        if now >= WARM_UP:
            counted.append((now - WARM_UP, first))
        talk.left -= 1
        if talk.left:
            pause = ANSWER_SECONDS + talk.draw.expovariate(1 / (2.0 if talk.agent else 30.0))
            heapq.heappush(events, (now + first + pause, talk.number, talk))
    return state, counted


def _length(draw: random.Random, median: int, most: int) -> int:
    return min(most, max(8, round(draw.lognormvariate(0.0, 0.8) * median)))


def part(values: list[float], share: float) -> float:
    """The value below which a share of them lies; nan where there is none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def row(policy: Policy, rate: float, state: Replicas, counted: list[tuple[float, float]], seconds: float) -> dict:
    firsts = [first for _, first in counted]
    return {
        "policy": policy.name, "rate": rate, "turns": len(firsts), "p50": part(firsts, 0.5), "p90": part(firsts, 0.9),
        "p99": part(firsts, 0.99), "busy": state.busy / (state.count * (seconds + WARM_UP)), "moved": state.moved,
    }  # fmt: skip


def shown(found: dict) -> str:
    times = " | ".join(f"{found[name]:.2f}" for name in ("p50", "p90", "p99"))
    rest = f"{found['busy']:.2f} | {found['moved']} | {found['turns']}"
    return f"| {found['policy']} | {found['rate']:g} | {times} | {rest} |"


# ---- a real run


def play(port: int, servers: list[int], seed: int, talks: int = 6, turns: int = 4) -> dict:
    """Turns of conversations against two real replicas, one token each, and the same turns simulated with what a prompt
    alone takes there.
    """
    draw = random.Random(seed)

    def ask(at: int, name: str, text: str) -> float:
        connection = http.client.HTTPConnection("127.0.0.1", at, timeout=120)
        body = {"model": "tiny", "prompt": text, "max_tokens": 1, "temperature": 0}
        headers = {"content-type": "application/json", "x-session-id": name}
        begin = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, answer.status
        return time.monotonic() - begin

    alone = {n: min(ask(servers[0], f"alone {n} {i}", _words(draw, n)) for i in range(3)) for n in (50, 400)}
    slope = (alone[400] - alone[50]) / 350
    trace = sorted((draw.uniform(0, 6.0), i, draw.randrange(60, 400)) for i in range(talks) for _ in range(turns))
    real: list[tuple[float, float, int, int]] = []
    start, threads = time.monotonic(), []

    def later(when: float, talk: int, tokens: int) -> None:
        time.sleep(max(0.0, start + when - time.monotonic()))
        sent = time.monotonic() - start
        real.append((sent, ask(port, f"talk {talk}", _words(random.Random(tokens), tokens)), talk, tokens))

    for when, talk, tokens in trace:
        threads.append(threading.Thread(target=later, args=(when, talk, tokens)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    homes = {}
    for server in servers:
        connection = http.client.HTTPConnection("127.0.0.1", server, timeout=60)
        connection.request("GET", "/v1/cache/sessions")
        for each in json.loads(connection.getresponse().read())["data"]:
            homes[each["name"]] = server
    free = dict.fromkeys(servers, 0.0)
    simulated = []
    for sent, _, talk, tokens in sorted(real):  # prompts that begin differently each time: all of each is read
        home = homes[f"talk {talk}"]
        begin = max(sent, free[home])
        free[home] = begin + max(0.0, alone[50] + slope * (tokens - 50))
        simulated.append(free[home] - sent)
    times = [took for _, took, _, _ in real]
    return {"turns": len(times), "alone_50_ms": 1e3 * alone[50], "alone_400_ms": 1e3 * alone[400],
            **{f"{name}_p{int(100 * share)}_ms": 1e3 * part(some, share)
               for name, some in (("real", times), ("simulated", simulated)) for share in (0.5, 0.9)}}  # fmt: skip


def _words(draw: random.Random, tokens: int) -> str:
    return "".join(draw.choice("abcdefghij ") for _ in range(tokens))  # a character is a token of the tiny models


# ---- all of it


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.4, 0.8, 1.2, 1.6])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--real", type=int, nargs="+", metavar="PORT", help="of the router, and of its servers")
    asked = parser.parse_args()
    if asked.real:
        print(json.dumps({"bench": "routing", "real": play(asked.real[0], asked.real[1:], asked.seed)}))
        return
    seconds, count, seed = 60 * asked.minutes, asked.replicas, asked.seed
    print(f"{count} replicas, {asked.minutes:g} minutes, seed {seed}: seconds to the first token")
    print(
        "| policy | turns/s a replica | p50 | p90 | p99 | mean busy | moved | turns |\n"
        "|---|---:|---:|---:|---:|---:|---:|---:|"
    )
    rows = []
    for policy in POLICIES:
        for rate in asked.rates:
            rows.append(row(policy, rate, *simulate(policy, count, seconds, rate, seed), seconds))
            print(shown(rows[-1]), flush=True)
    middle, lost, wrong = min(asked.rates, key=lambda rate: abs(rate - 0.8)), [], []
    print(f"\n1 % of the replicas lost, {middle:g} turns/s: p99 in the minute before, the one after, the next")
    for policy in POLICIES[1:]:
        _, counted = simulate(policy, count, seconds, middle, seed, lose_at=seconds / 2)
        minutes = [[f for at, f in counted if 0 <= at - seconds / 2 - 60 * i < 60] for i in (-1, 0, 1)]
        lost.append({"policy": policy.name, "p99": [part(each, 0.99) for each in minutes]})
        print(f"| {policy.name} | " + " | ".join(f"{value:.2f}" for value in lost[-1]["p99"]) + " |", flush=True)
    print(f"\nif reading took half, or twice as long, {middle:g} turns/s: p50 / p99")
    for policy in POLICIES:
        some = []
        for scale in (0.5, 2.0):
            firsts = [f for _, f in simulate(policy, count, seconds, middle, seed, scale)[1]]
            some.append([part(firsts, 0.5), part(firsts, 0.99)])
        wrong.append({"policy": policy.name, "half": some[0], "twice": some[1]})
        print(f"| {policy.name} | " + " | ".join(f"{p50:.2f} / {p99:.2f}" for p50, p99 in some) + " |", flush=True)
    if asked.plot:
        plot(asked.plot, rows, count)
    print(json.dumps({"bench": "routing", "seed": seed, "replicas": count, "rows": rows, "lost": lost, "wrong": wrong}))


def plot(path: Path, rows: list[dict], count: int) -> None:
    from plot_load import COLOURS, Line, Panel, draw

    lines = [
        Line(policy.name, [(r["rate"], r["p99"]) for r in rows if r["policy"] == policy.name], colour)
        for policy, colour in zip(POLICIES, COLOURS, strict=False)
    ]
    title = f"{count:,} simulated replicas: p99 to the first token; only prompts queue here"
    draw(path, [Panel(title, "turns a second and replica", "seconds", lines, log_y=True)])


if __name__ == "__main__":
    main()
