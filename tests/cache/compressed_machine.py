"""Compressed caches under random use: a state machine, and a model of lists that knows what must be stored.

The model keeps the token numbers of every request and nothing else that the cache computes: entries, index keys and
window rows are worked out again from those lists, by definition and in float64 (`compressed_rig`). Pages are objects
that count their owners; the real page ids must map onto them one to one. Pages without owners are overwritten with NaN
after each rule, and padding rows are NaN, so whatever is read or written by mistake shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from cache.compressed_rig import NUMBERS, Ran, Rig, facts, stored
from hybridkv.cache import CompressedHandle, CompressedSpec, KVCacheManager, OutOfPages, StreamSchema, compressed_schema
from hybridkv.cache.snapshot import restore_request, snapshot_request
from hybridkv.errors import HybridKVError, RequestError

SLOTS = 3
NEAR = 1e-4  # entries are near 1, and f32 sums of a few dozen terms are right to 1e-6
PICKS = st.lists(
    st.tuples(st.integers(0, SLOTS - 1), st.one_of(st.just(1), st.integers(1, 20))), min_size=1, max_size=3
)

Page = list[int]  # the model's page: one number, how many own it. Its identity is what counts
counts: Counter[str] = Counter()  # what really happened, over all runs; tests look at it


class Request:
    """The model of a request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.reached = 0  # furthest position
        self.pages: dict[str, list[Page]] = {"csa": [], "hca": []}


class CompressedMachine(RuleBasedStateMachine):
    spec = CompressedSpec(("csa", "hca", "csa"), 2, 16, 4, 8, window=8, csa_ratio=4, hca_ratio=16)
    longest, scale, device = 52, 1, "cpu"  # tokens of a request; how much longer than drawn chunks are
    csa_pages, hca_pages = (12, 9, 6, 4), (9, 6, 4, 3)

    @classmethod
    @lru_cache
    def rig(cls) -> Rig:
        return Rig(cls.spec, device=cls.device)

    @classmethod
    @lru_cache(4096)
    def want(cls, layer: int, which: str, tokens: tuple[int, ...]) -> Tensor:
        """Entries, index keys or window rows of a request with these tokens."""
        rig = cls.rig()
        found = rig.window_rows(layer, tokens) if which == "window" else rig.entries(layer, tokens, which)
        return found.float()

    @initialize(data=st.data(), drafts=st.sampled_from((2, 3, 0)), blocks=st.sampled_from((1, 1, 2)))
    def build(self, data: st.DataObject, drafts: int, blocks: int) -> None:
        self.block, self.drafts = blocks * self.spec.hca_ratio, drafts
        self.schema = compressed_schema(self.spec, "f32", "f32", block=self.block, drafts=drafts)
        sizes = {"csa": data.draw(st.sampled_from(self.csa_pages)), "hca": data.draw(st.sampled_from(self.hca_pages))}
        self.m = KVCacheManager(self.schema, sizes, SLOTS, self.longest, self.device)
        self.live: dict[int, Request] = {}
        self.gone: list[int] = []
        self.names = self.numbers = 0
        self.poison_free_pages()

    # ---- what requests do

    def some_live(self) -> bool:
        return bool(self.live)

    def slot_free(self) -> bool:
        return len(self.live) < SLOTS

    def can_fork(self) -> bool:
        return 0 < len(self.live) < SLOTS

    def pick(self, i: int) -> int:
        return list(self.live)[i % len(self.live)]

    def new_name(self) -> int:
        self.names += 1
        return self.names

    @precondition(slot_free)
    @rule(prompt=st.one_of(st.just(0), st.integers(1, 24)))
    def admit(self, prompt: int) -> None:
        name = self.new_name()
        slot = self.m.admit_request(name)
        self.live[name] = Request()
        for s in self.schema.states:
            for t in s.tensors:
                assert (self.m.state.tensors[s.name, t.name][:, slot] == t.init).all(), "a fresh slot has old state"
        if prompt:
            self.run({name: prompt * self.scale})

    @precondition(some_live)
    @rule(picks=PICKS, ending=st.sampled_from(("commit", "commit", "retry", "abandon")))
    def step(self, picks: list[tuple[int, int]], ending: str) -> None:
        self.run({self.pick(i): n if n == 1 else n * self.scale for i, n in picks}, ending)

    @precondition(some_live)
    @rule(tokens=st.integers(1, 4), rows=st.sampled_from((None, 3, 5)))
    def decode(self, tokens: int, rows: int | None) -> None:
        """All requests, one token at a time, perhaps beside rows of padding."""
        for _ in range(tokens):
            fresh = {name: 1 for name, r in self.live.items() if len(r.tokens) < self.longest}
            if not fresh or not self.run(fresh, rows=rows):
                return
            counts["steps with padding"] += rows is not None and rows > len(fresh)

    def run(self, lengths: dict[int, int], ending: str = "commit", rows: int | None = None) -> bool:
        """A whole step, whatever comes of it. True: it was committed."""
        plan = sorted(lengths.items(), key=lambda item: item[1] > 1)
        if any(len(self.live[name].tokens) + n > self.longest for name, n in plan):
            self.refused(RequestError, lambda: self.m.prepare_forward(plan), "too long")
            return False
        need = {s.name: self.grow(s, plan, really=False) for s in self.schema.streams}
        if any(need[name] > t.allocator.free for name, t in self.m.tables.items()):
            self.refused(OutOfPages, lambda: self.m.prepare_forward(plan), "out of pages")
            return False
        fresh = {name: [self.number() for _ in range(n)] for name, n in plan}
        held = {name: t.allocator.held for name, t in self.m.tables.items()}
        ran = self.rig().prepare(self.m, fresh, rows)
        for s in self.schema.streams:
            self.grow(s, plan, really=True)
            taken = self.m.tables[s.name].allocator.held - held[s.name]
            assert taken == need[s.name], f"{taken} pages of '{s.name}' were taken, {need[s.name]} are needed"
        counts[ending] += 1
        if ending == "abandon":
            return False
        if ending == "retry":
            before = self.facts()
            again = self.rig().prepare(self.m, fresh, rows)
            assert self.facts() == before and torch.equal(ran.step.packed, again.step.packed), "a retry differs"
            ran = again
        self.rig().write(ran, fresh)
        self.m.commit(plan)
        for name, n in plan:
            request = self.live[name]
            counts["entries"] += (len(request.tokens) + n) // self.spec.csa_ratio - len(
                request.tokens
            ) // self.spec.csa_ratio
            request.tokens += fresh[name]
            request.reached = max(request.reached, len(request.tokens))
        counts["steps with several requests"] += len(plan) > 1
        self.seen_by_layers(ran)
        return True

    @precondition(can_fork)
    @rule(i=st.integers(0, SLOTS - 1), back=st.sampled_from((1, 2, 3, 0)), ahead=st.booleans())
    def fork(self, i: int, back: int, ahead: bool) -> None:
        """Fed to a boundary, perhaps with a step beyond it that never runs. Then the two go different ways, the child
        perhaps after it took some tokens back.
        """
        source = self.pick(i)
        if not self.to_boundary(source, lambda: self.m.fork_request(source, "child")):
            return
        if ahead:
            self.run({source: self.spec.hca_ratio + 4}, "abandon")
        name, parent = self.new_name(), self.live[source]
        free = self.m.free_pages()
        self.m.fork_request(source, name)
        assert self.m.free_pages() == free, "a fork takes no pages"
        child = self.live[name] = Request()
        child.tokens, child.reached = list(parent.tokens), parent.reached
        for s in self.schema.streams:
            child.pages[s.name] = parent.pages[s.name][: s.pages(len(child.tokens))]
            for page in child.pages[s.name]:
                page[0] += 1
        counts["forks"] += 1
        if back:
            self.truncate(list(self.live).index(name), back)
        for _ in range(2):
            self.run({name: 2, source: 3})

    def to_boundary(self, name: int, share: Callable[[], Any]) -> bool:
        """Whether the request is now where it can be shared; before, that is refused."""
        missing = -len(self.live[name].tokens) % self.block
        if not missing:
            return True
        self.refused(RequestError, share, "between boundaries")
        return self.run({name: missing})

    @precondition(some_live)
    @rule(i=st.integers(0, SLOTS - 1), back=st.integers(0, 2), move=st.booleans())
    def restore(self, i: int, back: int, move: bool) -> None:
        """A snapshot brought back under another name, beside the request or in its place. Tokens may have been taken
        back before.
        """
        source = self.pick(i)
        old = self.live[source]
        if not self.to_boundary(source, lambda: snapshot_request(self.m, source)):
            return
        if back and back <= self.drafts and len(old.tokens) + back <= self.longest and self.run({source: back}):
            self.truncate(list(self.live).index(source), back)
        taken = snapshot_request(self.m, source)
        if move:
            self.end(source)
        name = self.new_name()
        if len(self.live) == SLOTS:
            self.refused(HybridKVError, lambda: restore_request(self.m, taken, name), "slots are full")
            return
        need = {s.name: s.pages(len(old.tokens)) for s in self.schema.streams}
        if any(need[s] > t.allocator.free for s, t in self.m.tables.items()):
            self.refused(OutOfPages, lambda: restore_request(self.m, taken, name), "no pages to restore into")
            return
        self.poison_free_pages()
        restore_request(self.m, taken, name)
        request = self.live[name] = Request()
        request.tokens, request.reached = list(old.tokens), len(old.tokens) + self.drafts  # nothing before comes back
        request.pages = {s: [[1] for _ in range(n)] for s, n in need.items()}
        counts["restores"] += 1

    @precondition(some_live)
    @rule(i=st.integers(0, SLOTS - 1), back=st.integers(-1, 4))
    def truncate(self, i: int, back: int) -> None:
        name = self.pick(i)
        request = self.live[name]
        position = len(request.tokens) - back
        if not 0 <= position <= len(request.tokens) or (back and request.reached - position > self.drafts):
            self.refused(RequestError, lambda: self.m.truncate_request(name, position), "truncation refused")
            return
        self.m.truncate_request(name, position)
        if back:
            del request.tokens[position:]
            for s in self.schema.streams:
                for page in request.pages[s.name][s.pages(position) :]:
                    page[0] -= 1
                del request.pages[s.name][s.pages(position) :]
            counts["truncations"] += 1

    @precondition(some_live)
    @rule(i=st.integers(0, SLOTS - 1), pool=st.sampled_from(("csa", "hca")))
    def reserve(self, i: int, pool: str) -> None:
        name, table = self.pick(i), self.m.tables[pool]
        if len(self.live[name].pages[pool]) == table.schema.pages(self.longest):
            self.refused(RequestError, lambda: self.m.allocate_block(name, pool), "all pages held")
        elif not table.allocator.free:
            self.refused(OutOfPages, lambda: self.m.allocate_block(name, pool), "out of pages")
        else:
            self.m.allocate_block(name, pool)
            self.live[name].pages[pool].append([1])

    @precondition(some_live)
    @rule(i=st.integers(0, SLOTS - 1))
    def release(self, i: int) -> None:
        self.end(self.pick(i))
        counts["releases"] += 1

    def end(self, name: int) -> None:
        self.m.release_request(name)
        for pages in self.live.pop(name).pages.values():
            for page in pages:
                page[0] -= 1
        self.gone.append(name)

    @precondition(lambda self: bool(self.gone))
    @rule(i=st.integers(0, SLOTS - 1))
    def misuse(self, i: int) -> None:
        """Requests that are not there, or ask for nothing. One time in three is enough."""
        if i:
            return self.decode(1, None) if self.live else self.admit(18)
        nobody = self.gone[-1]
        self.refused(RequestError, lambda: self.m.release_request(nobody), "unknown request")
        self.refused(RequestError, lambda: self.m.prepare_forward([(nobody, 1)]), "unknown request")
        for name in self.live:
            self.refused(ValueError, lambda name=name: self.m.prepare_forward([(name, 0)]), "no tokens")

    # ---- the model

    def number(self) -> int:
        self.numbers += 1
        return self.numbers % NUMBERS

    def facts(self) -> dict[str, bytes]:
        return facts(self.m)

    def refused(self, error: type[Exception], call: Callable[[], Any], why: str) -> None:
        before = self.facts()
        with pytest.raises(error):
            call()
        assert self.facts() == before, f"changed by a refused call ({why})"
        counts[why] += 1

    def grow(self, s: StreamSchema, plan: list[tuple[int, int]], really: bool) -> int:
        """Pages that a step takes of a pool, worked out request by request; with `really`, the model follows."""
        lost: Counter[int] = Counter()  # owners that a page has lost to copies made earlier in this step
        need = 0
        for name, n in plan:
            request = self.live[name]
            pages, have = request.pages[s.name], s.entries(len(request.tokens))
            at, then = have // s.entries_per_page, s.entries(len(request.tokens) + n)
            if then > have and have % s.entries_per_page and pages[at][0] - lost[id(pages[at])] > 1:
                need += 1  # half full, and not its own
                lost[id(pages[at])] += 1
                if really:
                    lost[id(pages[at])] -= 1
                    pages[at][0] -= 1
                    pages[at] = [1]
                    counts["copies on write"] += 1
            missing = max(s.pages(len(request.tokens) + n) - len(pages), 0)
            need += missing
            if really:
                pages += [[1] for _ in range(missing)]
        return need

    def poison_free_pages(self) -> None:
        for t in self.m.tables.values():
            free = torch.from_numpy(t.allocator._stack[: t.allocator.free].astype("int64")).to(self.device)
            for pool in t.pool.tensors.values():
                pool[:, free] = torch.nan

    # ---- what is stored

    def seen_by_layers(self, ran: Ran) -> None:
        """What the handles of a step that was just written read: the device's page table, positions, gathers."""
        names = [name for name, _ in ran.plan]
        lists = [tuple(self.live[name].tokens) for name in names]
        for layer, kind in enumerate(self.spec.kinds):
            handle, ratio = ran.handles[layer], self.spec.ratio(kind)
            assert isinstance(handle, CompressedHandle)
            dense, view = handle.gather_all_compressed_kv(torch.float32), handle.read_swa_view()
            window, R = handle.gather_swa_kv(torch.float32), self.spec.window + self.drafts
            assert dense.shape[1] == max(len(tokens) for tokens in lists) // ratio
            for row, tokens in enumerate(lists):
                n, W = len(tokens), self.spec.window
                self.near(dense[row, : n // ratio], self.want(layer, "main", tokens), "gathered entries")
                assert not dense[row, n // ratio :].any()
                rows = self.want(layer, "window", tokens)[-W:]
                self.near(window[row, W - len(rows) :], rows, "gathered window")
                where = [-1] * R
                for u in range(max(0, n - W), n):
                    where[u % R] = u
                assert view.positions[row].tolist() == where, "positions in the ring"
            assert not dense[len(lists) :].any() and not window[len(lists) :].any()

    @staticmethod
    def near(got: Tensor, want: Tensor, what: str) -> None:
        assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, not {tuple(want.shape)}"
        error = (got - want).abs().max().item() if want.numel() else 0.0
        assert error < NEAR, f"{what} are off by {error}"  # a NaN fails this too

    @invariant()
    def everything_agrees(self) -> None:
        if not hasattr(self, "m"):
            return
        self.m.check_integrity()
        assert set(self.m.slot_of) == set(self.live) and self.m.free_slots == SLOTS - len(self.live)
        seen: dict[tuple[str, int], Page] = {}
        for name, request in self.live.items():
            slot = self.m.slot_of[name]
            assert self.m.position(name) == len(request.tokens)
            for s in self.schema.streams:
                table, pages = self.m.tables[s.name], request.pages[s.name]
                assert table.lengths[slot].tolist() == [s.entries(len(request.tokens))]
                assert table.held[slot].tolist() == [len(pages)], "pages held"
                for real, page in zip(table.pages[slot, 0].tolist(), pages):
                    assert seen.setdefault((s.name, real), page) is page, "two pages are one, or one is two"
                    assert table.allocator.refs[real] == page[0], "owners of a page"
        assert len({id(page) for page in seen.values()}) == len(seen)
        for s in self.schema.streams:
            assert self.m.tables[s.name].allocator.held == sum(1 for pool, _ in seen if pool == s.name)
        if self.live:
            self.poison_free_pages()
            for layer in range(len(self.spec.kinds)):
                self.layer_agrees(layer)

    def layer_agrees(self, layer: int) -> None:
        """Entries and index keys by the host's page table, and window rows, of all requests at once."""
        lists = [(name, tuple(r.tokens)) for name, r in self.live.items()]
        for which, tensor in (("main", "entries"), ("index", "index"))[: 2 if self.spec.kinds[layer] == "csa" else 1]:
            found = [stored(self.m, layer, name, tensor) for name, _ in lists]
            flat = torch.cat([places for _, _, places in found]).to(self.device)
            pages = found[0][0]
            want = torch.cat([self.want(layer, which, tokens) for _, tokens in lists])
            self.near(pages.flatten(0, 1)[flat], want, f"{tensor} of layer {layer}")
        ring, W = self.m.state.layer(layer)["window"], self.spec.window
        at = [(self.m.slot_of[name], u % ring.shape[1]) for name, t in lists for u in range(max(0, len(t) - W), len(t))]
        where = torch.tensor(at, dtype=torch.int64, device=self.device).view(-1, 2)
        want = torch.cat([self.want(layer, "window", tokens)[-W:] for _, tokens in lists])
        self.near(ring[where[:, 0], where[:, 1]], want, f"window of layer {layer}")


class RealRatios(CompressedMachine):
    """The released models' ratios and window."""

    spec = CompressedSpec(("csa", "hca"), 2, 16, 4, 8)
    longest, scale = 400, 8
    csa_pages, hca_pages = (12, 6, 4), (9, 4, 3)
