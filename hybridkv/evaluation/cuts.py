"""Reading prompts once and cutting copies of their caches: how one reading serves every policy and ratio.

A prompt (or a document) is read into a cache that is held. For each policy and ratio a fork of it, which shares its
pages, is evicted and answers. A fork evicted so holds the same entries as a request that was evicted when its prompt
ended: tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridkv.cache.schema import ceil_div
from hybridkv.config import EvictionConfig, SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.engine.replay import ReplayPart
from hybridkv.engine.stats import kept_bytes, kept_tokens
from hybridkv.errors import HybridKVError
from hybridkv.eviction.named import find_policy, resolved_name
from hybridkv.eviction.replay import RECENT
from hybridkv.eviction.sizes import STREAMS
from hybridkv.request import Request

KEEP_QUERIES = EvictionConfig(budget=1 << 20)  # never evicts, and keeps the last queries for an eviction by hand
OWN = ("first", "recent", "window")  # settings of EvictionConfig that a policy's text may have here
BOUNDED = "bounded=yes"  # part of a policy's text: cut at every step of the reading
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0)


@dataclass(frozen=True)
class Cut:
    """A way to cut a cache: a policy as a text, and how many times smaller the cache gets."""

    policy: str
    ratio: float

    @property
    def full(self) -> bool:
        """Whether nothing is cut."""
        return self.policy == "full"

    @property
    def bounded(self) -> bool:
        """Whether the cache is cut while the text is read."""
        return BOUNDED in self.policy.split(":")

    @property
    def replays(self) -> bool:
        """Whether the text is read once more for the scores."""
        if self.full or not find_policy(self.settings[0]).needs_replay:
            return False
        if any(part.startswith("chunk=") for part in self.policy.split(":")):
            raise HybridKVError(
                f"policy {self.policy!r}: an evaluation reads each text again once for all rows, in parts of the usual "
                "size; leave out chunk"
            )
        return True

    @property
    def settings(self) -> tuple[str, dict[str, int]]:
        """The policy's own text, and what the text says of the eviction beside it (OWN)."""
        name, *parts = self.policy.split(":")
        own = {}
        for part in list(parts):
            setting, _, value = part.partition("=")
            if part == BOUNDED:
                parts.remove(part)
            elif setting in OWN:
                if not value.isdigit():
                    raise HybridKVError(f"policy {self.policy!r}: {setting} takes a whole number, not {value[:40]!r}")
                own[setting] = int(value)
                parts.remove(part)
        return ":".join([name, *parts]), own

    def eviction(self, tokens: int) -> EvictionConfig:
        """Settings for a cache of so many tokens. Where it is small, a part of it is for the most recent."""
        policy, own = self.settings
        budget = max(1, round(tokens / self.ratio))
        recent = min(RECENT, budget // 8) if self.replays else min(EvictionConfig.recent, budget // 2)
        ends = {"recent": recent} | own
        return EvictionConfig(budget=budget, policy=policy, bounded=self.bounded, **ends)  # type: ignore[arg-type]


FULL = Cut("full", 1)


@dataclass(frozen=True)
class Held:
    """Bytes of a request's cache, as the allocator has them."""

    tokens: int
    kept: float
    kv_bytes: int
    state_bytes: int
    table_bytes: int
    peak_bytes: int

    def as_json(self) -> dict[str, float]:
        """For a record."""
        return {
            "tokens": self.tokens, "kept": round(self.kept, 2), "kv_bytes": self.kv_bytes,
            "state_bytes": self.state_bytes, "table_bytes": self.table_bytes, "peak_bytes": self.peak_bytes,
        }  # fmt: skip


class Reader:
    """Caches of prompts that were read once, and forks of them. One engine, which nobody else uses meanwhile."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.manager = engine.manager
        # of texts that may be read once more: their parts, and how many tokens stand before the text and stay
        self.again: dict[Request, Callable[[], tuple[list[ReplayPart], int]]] = {}
        self._replayed: dict[Request, tuple[list[Tensor], int]] = {}

    def run(self) -> None:
        """Until every request has ended; the first that failed ends it all."""
        while not self.engine.idle:
            for update in self.engine.step():
                if update.request.finish_reason == "error":
                    raise HybridKVError(f"a request of the evaluation failed: {update.request.error}")
        self.engine.drain()

    def read(self, prompts: Sequence[Sequence[int]]) -> list[Request]:
        """Requests that have read these tokens, their caches held; each has its first answer token."""
        params = replace(GREEDY, max_tokens=1)
        found = [self.engine.add(tokens, params, hold=True, eviction=KEEP_QUERIES) for tokens in prompts]
        self.run()
        for request, tokens in zip(found, prompts, strict=True):
            self._check_held(request, len(tokens))
        return found

    def read_bounded(self, prompts: Sequence[Sequence[int]], cut: Cut, seen: bool) -> list[Request]:
        """The same, cut on the way: they never held more than a budget and a step."""
        params = replace(GREEDY, max_tokens=1)
        found = []
        for tokens in prompts:
            eviction = cut.eviction(len(tokens))
            if not seen:  # the end of this prompt is not yet the question
                eviction = replace(eviction, policy=resolved_name(eviction.policy, seen=False))
            found.append(self.engine.add(tokens, params, hold=True, eviction=eviction))
        self.run()
        for request, tokens in zip(found, prompts, strict=True):
            self._check_held(request, len(tokens))
        return found

    def peak(self, request: Request) -> int:
        """Page bytes that a request held at its highest, as its evictions remember it."""
        schema = self.manager.tables[STREAMS].schema
        most = [record.lengths for record in self.engine.evictions_of(request).values()]
        pages = [int(ceil_div(lengths, schema.entries_per_page).sum()) for lengths in most]
        return max(pages, default=0) * schema.page_bytes

    def replayed(self, request: Request) -> tuple[list[Tensor], int]:
        """Scores from reading a text once more, which serve every ratio, and how many tokens before it stay."""
        if request not in self._replayed:
            parts, head = self.again[request]()
            scores: list[Tensor] | None = None
            for part in parts:
                scores = self.engine.replay(request, part, scores)
            assert scores is not None
            self._replayed[request] = scores, head
        return self._replayed[request]

    def fork(self, request: Request, cut: Cut, seen: bool) -> Request:
        """A copy of a held cache, cut."""
        position = self.manager.position(request.key)
        scores, head = self.replayed(request) if cut.replays else (None, 0)
        fork = self.engine.fork_held(request)
        self._check_held(fork, position)
        if not cut.full:
            eviction = cut.eviction(position)
            self.engine.evict_held(fork, eviction, scores, [(0, head)] if head else [], seen)
            if position > eviction.budget and kept_tokens(fork, self.manager) > eviction.budget:
                raise HybridKVError(f"policy {cut.policy} kept more than its budget of {eviction.budget} tokens")
        return fork

    def held(self, request: Request, peak: int | None = None) -> Held:
        """What the request holds now; over ranks all of them together. `peak`: page bytes at their highest, where that
        was more.
        """
        manager, schema = self.manager, self.engine.schema
        pages, streams = kept_bytes(request, manager, schema), {s.name: s.streams for s in schema.streams}
        tables = sum(
            t.device_table.nbytes // manager.slots * streams[name] // t.schema.streams
            for name, t in manager.tables.items()
        )
        return Held(
            manager.position(request.key), kept_tokens(request, manager), pages, schema.slot_bytes, tables,
            max(pages, peak or 0) + schema.slot_bytes + tables,
        )  # fmt: skip

    def answer(
        self, forks: Sequence[Request], prompts: Sequence[list[int]], most: Sequence[int], hold: bool
    ) -> list[Request]:
        """Answers of at most `most` tokens to prompts that begin with what each fork has read."""
        params = [replace(GREEDY, max_tokens=n) for n in most]
        begun = []
        for fork, tokens, each in zip(forks, prompts, params, strict=True):
            at = self.manager.position(fork.key)
            request = self.engine.add(tokens, each, hold=hold, after=fork, eviction=None)
            begun.append((request, at))
        self.run()
        for request, at in begun:
            if request.cached_tokens < at:  # it read its prompt anew, with nothing cut
                raise HybridKVError(
                    "a cache of the evaluation had to be given up for want of memory; give more, or ask for fewer "
                    "requests at once (--max-requests)"
                )
        return [request for request, _ in begun]

    def release(self, requests: Sequence[Request]) -> None:
        """Give held caches back."""
        for request in requests:
            self._replayed.pop(request, None)
            self.engine.abort(request)

    def _check_held(self, request: Request, position: int) -> None:
        if request not in self.engine.scheduler.held or self.manager.position(request.key) != position:
            raise HybridKVError(
                "a cache of the evaluation could not be held for want of memory; give more, or ask for fewer requests "
                "at once (--max-requests)"
            )


def divergence(full: Tensor, cut: Tensor) -> tuple[float, float, float]:
    """(mean, 99.9 % quantile) of KL(full || cut) over positions, and the share whose likeliest token agrees.

    Logits [T, vocab] f32 each.
    """
    a, b = full.log_softmax(-1), cut.log_softmax(-1)
    kl = (a.exp() * (a - b)).sum(-1).clamp(min=0)
    agree = (full.argmax(-1) == cut.argmax(-1)).float().mean()
    return float(kl.mean()), float(torch.quantile(kl, 0.999)), float(agree)
