"""Traces run through the cache's own bookkeeping (`cache/columns.py`, `cache/checkpoints.py`, `cache/worth.py`)
without a model: which share of the prompt tokens is not read again, in so many bytes.

Sizes are those of Qwen3.5-27B with bf16 pages and f32 states, read at 12,500 tokens a second.

    python bench/reuse_simulation.py [--seeds 1 3] [--only agent] [--gib 16 6 0] [--rows 16]        0: no limit
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, stdev

import numpy as np
from reuse_traces import DOCUMENT_REQUESTS, TRACES, Asked, Segment, documents

from hybridkv.cache.checkpoints import Checkpoint, Checkpoints, LeastRecentlyUsed, Mark, Policy, grid_marks, spaced
from hybridkv.cache.columns import Column, Columns
from hybridkv.cache.worth import ByWorth

RATE = 12_500.0  # tokens read a second
ROWS = 1 << 20  # checkpoints, where bytes alone limit them
SALT = b""


@dataclass(frozen=True)
class Sizes:
    """Of a model: tokens of a column, bytes of a token's pages and of a state."""

    q: int = 64
    token_bytes: int = 64 << 10
    state_bytes: int = int(146.8 * 2**20)

    @property
    def column_bytes(self) -> int:
        return self.q * self.token_bytes


@dataclass
class Result:
    """What a trace took."""

    prompts: int = 0
    hits: list[int] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Of prompt tokens, not read again."""
        return sum(self.hits) / self.prompts

    @property
    def seconds(self) -> float:
        """Of reading, a request."""
        return (self.prompts - sum(self.hits)) / RATE / len(self.hits)


class Numbers:
    """Token ids of segments: each has its own, so that texts agree only where they are the same."""

    def __init__(self) -> None:
        self._begins: dict[int, int] = {}
        self._next = 0

    def tokens(self, segments: Iterable[Segment]) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.int32), *map(self._of, segments)])

    def _of(self, segment: Segment) -> np.ndarray:
        if segment.number not in self._begins:
            self._begins[segment.number], self._next = self._next, self._next + segment.size
        begin = self._begins[segment.number]
        return np.arange(begin, begin + segment.size, dtype=np.int32)


class Simulator:
    """What the engine does with columns and checkpoints, one request after the other.

    Args:
        limit: bytes for pages and states together; 0: no limit.
        policy: which checkpoint goes first: "value" or "lru".
        trials: whether the end of a turn goes before all others until it was used.
        tails: whether there is a checkpoint at the end of a turn.
        rows: checkpoints at the most.
    """

    def __init__(
        self,
        limit: int,
        policy: str = "value",
        trials: bool = True,
        tails: bool = True,
        rows: int = ROWS,
        sizes: Sizes | None = None,
    ) -> None:
        self.limit, self.trials, self.tails, self.sizes = limit, trials, tails, sizes or Sizes()
        self.columns = Columns(self.sizes.q, 0)
        by_worth = ByWorth(self.sizes.state_bytes, self.sizes.column_bytes)
        chosen: Policy = by_worth if policy == "value" else LeastRecentlyUsed()
        self.checkpoints = Checkpoints(self.columns, rows, self.sizes.state_bytes, policy=chosen)
        self.numbers = Numbers()

    @property
    def nbytes(self) -> int:
        return self.columns.count * self.sizes.column_bytes + self.checkpoints.nbytes

    def run(self, trace: Iterable[Asked]) -> Result:
        found = Result()
        for asked in trace:
            found.prompts += asked.tokens
            found.hits.append(self.ask(asked))
        return found

    def ask(self, asked: Asked) -> int:
        """How many tokens of the prompt are not read again."""
        q, columns = self.sizes.q, self.columns
        tokens = self.numbers.tokens(asked.prompt)
        keys = columns.keys(tokens)
        path = columns.match(SALT, keys, len(tokens))
        found = self.checkpoints.deepest(path, len(tokens) - 1)
        hit = 0 if found is None else found.position
        matched = path[-1].end if path else 0
        if found is not None:
            self.checkpoints.use(found)
        columns.touch(path)
        begins = [at for at, _ in asked.marks]
        marks = [Mark(at, kind) for at, kind in asked.marks if kind != "begin"]
        marks += grid_marks(len(tokens), begins, self.sizes.state_bytes, self.sizes.token_bytes, q)
        if matched > hit:
            marks.append(Mark(matched, "branch"))
        end = min(len(tokens) - 1, len(tokens) // q * q)
        wished = {m.position: m for m in spaced(marks, self._taken(path), q, hit, end)}
        here = path[-1] if path else columns.root(SALT)
        columns.occupy(here)
        here = self._read(here, path, keys, len(tokens) // q, wished)
        if here.end == len(tokens) // q * q:
            here = self._answer(here, asked, tokens)
        columns.leave(here)
        self._fit()
        return hit

    def _taken(self, path: list[Column]) -> list[int]:
        return [column.end for column in path if column.checkpoint is not None]

    def _read(self, here: Column, path: list[Column], keys: bytes, count: int, wished: dict[int, Mark]) -> Column:
        """Columns and checkpoints of a text, from the end of the path on; as far as there is room."""
        for column in path:
            if column.end in wished:
                self._take(column, wished[column.end])
        size = self.sizes.q * 4
        for i in range(here.end // self.sizes.q, count):
            if not self._make_room(self.sizes.column_bytes):
                break
            before = here
            here, _ = self.columns.insert(here, keys[i * size : (i + 1) * size], np.zeros(0, np.int32))
            self.columns.occupy(here, before)
            if here.end in wished:
                self._take(here, wished[here.end])
        return here

    def _answer(self, here: Column, asked: Asked, tokens: np.ndarray) -> Column:
        whole = np.concatenate([tokens, self.numbers.tokens(asked.answer)])[:-1]  # the last token is never read
        keys, count = self.columns.keys(whole), len(whole) // self.sizes.q
        wished = {}
        if asked.shown_again and self.tails:
            taken = [c.position for c in self._above(here)]
            wished = {m.position: m for m in spaced([Mark(len(whole), "turn")], taken, self.sizes.q, 0, len(whole))}
        return self._read(here, [here] if here.parent is not None else [], keys, count, wished)

    def _above(self, column: Column | None) -> Iterator[Checkpoint]:
        while column is not None and column.parent is not None:
            if isinstance(column.checkpoint, Checkpoint):
                yield column.checkpoint
            column = column.parent

    def _take(self, column: Column, mark: Mark) -> None:
        if column.checkpoint is None and self._make_room(self.sizes.state_bytes, self.checkpoints.give_row):
            row = self.checkpoints.reserve()
            made = None if row is None else self.checkpoints.add(column, row, mark.kind)
            if made is not None and made.on_trial and not self.trials:
                made.uses = 1

    def _make_room(self, nbytes: int, give: Callable[[], bool] | None = None) -> bool:
        """Whether so many bytes more fit, after what is worth least has gone. `give`: drops a checkpoint; None: one
        whose pages are not the running request's.
        """
        give = partial(self.checkpoints.give_way, rows=True) if give is None else give
        while self.limit and self.nbytes + nbytes > self.limit:
            if self.columns.drop_oldest() is None and not give():
                return False
        return True

    def _fit(self) -> None:
        self._make_room(0)


def mean(
    name: str, seeds: Sequence[int], limit: int, policy: str, trials: bool, rows: int
) -> tuple[float, float, float]:
    """Share and seconds over some seeds, and how far apart these are (standard deviation of the share)."""
    results = [Simulator(limit, policy, trials, rows=rows).run(TRACES[name](seed)) for seed in seeds]
    shares = [r.share for r in results]
    return fmean(shares), fmean(r.seconds for r in results), stdev(shares) if len(seeds) > 1 else 0.0


def lost_to_strangers(
    seeds: Sequence[int], limit: int, policy: str = "value", unique: int = 512, sizes: Sizes | None = None
) -> tuple[float, float]:
    """Share of documents' prompt tokens not read again, without and with `unique` prompts mixed in that come once."""
    found = []
    for more in (0, unique):
        shares = []
        for seed in seeds:
            simulator, hits, tokens = Simulator(limit, policy, policy == "value", sizes=sizes), 0, 0
            for asked in documents(seed, unique=more):
                hit = simulator.ask(asked)
                if asked.who < DOCUMENT_REQUESTS:
                    hits, tokens = hits + hit, tokens + asked.tokens
            shares.append(hits / tokens)
        found.append(fmean(shares))
    return found[0], found[1]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, nargs=2, default=[1, 3], metavar=("FIRST", "LAST"))
    options.add_argument("--only", nargs="*", default=list(TRACES), choices=list(TRACES))
    options.add_argument("--gib", nargs="*", type=float, default=[16.0, 6.0, 0.0])
    options.add_argument("--rows", type=int, default=ROWS, help="checkpoints at the most")
    given = options.parse_args()
    seeds = range(given.seeds[0], given.seeds[1] + 1)
    print("| GiB, policy | " + " | ".join(given.only) + " |")
    print("|---|" + "---|" * len(given.only))
    for gib in given.gib:
        for policy, trials in (("value", True), ("lru", False)) if gib or given.rows < ROWS else (("value", True),):
            shown = [mean(name, seeds, int(gib * 2**30), policy, trials, given.rows) for name in given.only]
            row = " | ".join(f"{share:.3f} ± {apart:.3f} / {seconds:.2f}" for share, seconds, apart in shown)
            print(f"| {gib:g} {policy} | {row} |", flush=True)
    if "documents" in given.only and given.rows == ROWS:
        print()
        for policy in ("value", "lru"):
            alone, crowded = lost_to_strangers(seeds, 16 << 30, policy)
            print(
                f"documents at 16 GiB, {policy}: {alone:.3f}; with 512 prompts mixed in that come once: {crowded:.3f}"
            )


if __name__ == "__main__":
    main()
