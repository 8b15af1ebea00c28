"""The cache under random use: a state machine for KVCacheManager beside a plain model that knows the right answer.

The model is in `machine_model.py`; here are the rules, which is all that requests do. Compaction keeps any ascending
choice of a stream's entries, so streams have lengths of their own.
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from cache.machine_model import (
    HEADS,
    INF,
    LANES,
    MAX_TOKENS,
    POISON,
    SLOTS,
    TAIL,
    CacheModel,
    Sequence,
    counts,
    snapshot,
)
from hybridkv.cache import CacheSchema, KVCacheManager, OutOfPages
from hybridkv.cache.snapshot import restore_request, snapshot_request
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.kernels.eviction.to_fresh import most_pages

CHOICES = st.one_of(st.integers(0, 2**MAX_TOKENS - 1), st.just(2**MAX_TOKENS - 1), st.sampled_from((0, 1, 0b1010101)))
THEN = st.sampled_from(("stay", "fork", "copy", "move"))  # what a compacted request does next
PICKS = st.lists(st.tuples(st.integers(0, 3), st.one_of(st.just(1), st.integers(1, 9))), min_size=1, max_size=3)


def tables(m: KVCacheManager) -> dict[str, bytes]:
    """What the host knows of pages and lengths."""
    kinds = (".pages", ".held", ".lengths", ".refs", ".free", "compactions")
    return {what: facts for what, facts in snapshot(m).items() if what.endswith(kinds)}


class CacheMachine(CacheModel):
    @initialize(
        kv_pages=st.sampled_from((40, 29, 24, 18, 56, 8, 4)),
        compressed_pages=st.sampled_from((6, 4, 12, 3, 1)),
        stateful=st.booleans(),
    )
    def build(self, kv_pages: int, compressed_pages: int, stateful: bool) -> None:
        self.schema = CacheSchema((HEADS, LANES), (TAIL,) if stateful else ())
        self.sizes = {"kv": kv_pages, "compressed": compressed_pages}
        self.m = KVCacheManager(self.schema, self.sizes, SLOTS, MAX_TOKENS)
        self.live: dict[int, Sequence] = {}
        self.gone: list[int] = []
        self.names = self.numbers = self.turns = 0

    def pick(self, i: int) -> int:
        return list(self.live)[i % len(self.live)]

    def some_live(self) -> bool:
        return bool(self.live)

    def slot_free(self) -> bool:
        return len(self.live) < SLOTS

    def can_fork(self) -> bool:
        return 0 < len(self.live) < SLOTS

    # ---- what requests do

    @precondition(slot_free)
    @rule(prompt=st.integers(0, 13))
    def admit(self, prompt: int) -> None:
        self.names += 1
        self.start(self.names)
        if prompt:
            self.run([(self.names, prompt)], {self.names: [self.number() for _ in range(prompt)]})

    def start(self, name: int) -> None:
        slot = self.m.admit_request(name)
        self.live[name] = Sequence()
        for (_, tensor), t in self.m.state.tensors.items():
            assert (t[:, slot] == (-INF if tensor == "z" else 0)).all(), "a fresh slot has its last owner's state"

    @precondition(some_live)
    @rule(picks=PICKS, ending=st.sampled_from(("commit", "retry", "abandon")))
    def step(self, picks: list[tuple[int, int]], ending: str) -> None:
        plan = sorted({self.pick(i): n for i, n in picks}.items(), key=lambda item: item[1] > 1)
        fresh = {name: [self.number() for _ in range(n)] for name, n in plan}
        self.run(plan, fresh, ending)

    @precondition(some_live)
    @rule(n=st.sampled_from((1, 1, 1, 2, 3, 4, 5, 8)))
    def step_all(self, n: int) -> None:
        """All at once: forks of one request then ask for copies of the same page in the same step."""
        fresh = {name: [self.number() for _ in range(n)] for name in self.live}
        if not self.run([(name, n) for name in self.live], fresh):  # too long, or no pages: make room
            self.release(max(range(len(self.live)), key=lambda i: len(self.live[self.pick(i)].tokens)))

    def run(self, plan: list[tuple[int, int]], fresh: dict[int, list[int]], ending: str = "commit") -> bool:
        """A whole step, whatever comes of it. True: it was committed."""
        if any(len(self.live[name].tokens) + n > MAX_TOKENS for name, n in plan):
            self.refused(RequestError, lambda: self.m.prepare_forward(plan), "too long")
            return False
        need = {s.name: self.needed(s, plan) for s in self.schema.streams}
        if any(need[name] > t.allocator.free for name, t in self.m.tables.items()):
            self.refused(OutOfPages, lambda: self.m.prepare_forward(plan), "out of pages")
            self.refused(OutOfPages, lambda: self.m.prepare_forward(plan), "out of pages again")
            return False
        before = {name: t.allocator.held for name, t in self.m.tables.items()}
        step = self.m.prepare_forward(plan)
        for s in self.schema.streams:
            self.grow(s, plan)
            taken = self.m.tables[s.name].allocator.held - before[s.name]
            assert taken == need[s.name], f"{taken} pages of '{s.name}' were taken, {need[s.name]} are needed"
        if ending != "commit":
            self.write(step, {name: [POISON] * n for name, n in plan})  # a pass that dies leaves garbage behind
            counts[ending] += 1
            if ending == "abandon":
                return False
            before_retry = snapshot(self.m)
            tables = {name: view.table.clone() for name, view in step.streams.items()}
            again = self.m.prepare_forward(plan)
            assert snapshot(self.m) == before_retry, "a retry took something twice"
            for name, view in step.streams.items():
                assert torch.equal(tables[name], again.streams[name].table), "a retry sees other pages"
                assert np.array_equal(view.lengths, again.streams[name].lengths)
            step = again
        self.write(step, fresh)
        self.write_state(step, fresh)
        self.m.commit(plan)
        counts["steps"] += 1
        counts["steps with several requests"] += len(plan) > 1
        for row, (name, _) in enumerate(plan):
            for kept in self.live[name].kept:
                kept += range(len(self.live[name].tokens), len(self.live[name].tokens) + len(fresh[name]))
            self.live[name].tokens += fresh[name]
            assert self.m.position(name) == len(self.live[name].tokens)
            for s in self.schema.streams:  # as the layers see it
                view = step.streams[s.name]
                self.read(s, name, view.table[step.slots[row]].numpy(), view.lengths[row])
        return True

    @precondition(can_fork)
    @rule(i=st.integers(0, SLOTS - 1), picks=PICKS, reserved=st.integers(0, 6))
    def fork(self, i: int, picks: list[tuple[int, int]], reserved: int) -> None:
        """Perhaps after a step of the parent that never ran. Then parent and child go different ways."""
        source = self.pick(i)
        if reserved:
            self.run([(source, reserved)], {}, "abandon")
        self.fork_of(source)
        if len(picks) > 1:
            self.step(picks, "commit")
        else:
            self.step_all(4 if reserved % 2 else 1)

    def fork_of(self, source: int) -> None:
        self.names += 1
        name = self.names
        free = {s: t.allocator.free for s, t in self.m.tables.items()}
        self.m.fork_request(source, name)
        assert free == {s: t.allocator.free for s, t in self.m.tables.items()}, "a fork takes no pages"
        child = self.live[name] = Sequence()
        self.inherit(child, self.live[source])
        counts["forks of compacted requests"] += child.compacted
        for s in self.schema.streams:
            used = [-(-n // s.entries_per_page) for n in child.lengths(s)]
            child.pages[s.name] = [row[:n] for row, n in zip(self.live[source].pages[s.name], used)]
            for row in child.pages[s.name]:
                for page in row:
                    page[0] += 1
        counts["forks"] += 1
        if self.m.schema.states:
            slots = [self.m.slot_of[source], self.m.slot_of[name]]
            for t in self.m.state.tensors.values():
                assert torch.equal(t[:, slots[0]], t[:, slots[1]])

    @staticmethod
    def inherit(child: Sequence, source: Sequence) -> None:
        child.tokens, child.kept = list(source.tokens), [list(row) for row in source.kept]
        child.compacted = source.compacted

    @precondition(some_live)
    @rule(
        i=st.integers(0, SLOTS - 1),
        choice=st.lists(CHOICES, min_size=4, max_size=4),
        fork=st.booleans(),
        then=THEN,
        later=st.booleans(),
    )
    def compact(self, i: int, choice: list[int], fork: bool, then: str, later: bool) -> None:
        """Bit j of a stream's number says whether entry j stays; perhaps right after a fork, all pages shared.

        later: from lists on the device, settled by whatever comes next.
        """
        name = self.pick(i)
        if fork and len(self.live) < SLOTS:
            self.fork_of(name)
        request = self.live[name]
        if not request.tokens:
            self.refused(ValueError, lambda: self.m.compact_request(name, {0: [[], []], 2: [[], []]}), "nothing kept")
            return
        keeps = [
            [j for j in range(len(row)) if bits >> j & 1] or [len(row) - 1] for row, bits in zip(request.kept, choice)
        ]
        lists = [np.array(keep) for keep in keeps]
        keep = {0: lists[:2], 2: lists[2:]}
        wrong = {**keep, 2: [lists[2], np.append(lists[3], len(request.kept[3]))]}
        self.refused(ValueError, lambda: self.m.compact_request(name, wrong), "entry past the end")
        P, need, back = HEADS.entries_per_page, 0, 0
        cuts = []
        for row, pages, kept in zip(request.kept, request.pages["kv"], keeps):
            n = -(-len(kept) // P)
            shrinks = len(kept) < len(row)
            fresh = shrinks and any(page[0] > 1 for page in pages[:n])
            need += n if fresh else 0
            back += len(pages) - n if shrinks else 0
            cuts.append((shrinks, fresh, n))
        own = all(page[0] == 1 for pages in request.pages["kv"] for page in pages)
        apart = later and not own and any(shrinks for shrinks, _, _ in cuts)
        if apart:  # all streams go into fresh pages, as many as they may need: the host does not know more
            need, cuts = most_pages(sum(map(len, keeps)), 4, P), [(True, True, n) for _, _, n in cuts]
            back = sum(len(pages) - n for pages, (_, _, n) in zip(request.pages["kv"], cuts))
        if need > self.m.tables["kv"].allocator.free:
            if apart:
                self.refused(OutOfPages, lambda: self.start_compaction(name, lists), "no fresh pages to compact into")
            else:
                self.refused(OutOfPages, lambda: self.m.compact_request(name, keep), "no pages to compact into")
            return
        if later and (own or apart):
            self.start_compaction(name, lists, 0 if own else need)
        else:
            assert self.m.compact_request(name, keep) == back
        for stream, (shrinks, fresh, n) in enumerate(cuts):
            pages = request.pages["kv"][stream]
            if shrinks:
                for page in pages[0 if fresh else n :]:
                    page[0] -= 1
                pages[:] = [[1] for _ in range(n)] if fresh else pages[:n]
                request.kept[stream] = [request.kept[stream][j] for j in keeps[stream]]
        happened = any(shrinks for shrinks, _, _ in cuts)
        request.compacted |= happened
        counts["compactions"] += happened
        counts["compactions of shared pages"] += need > 0
        counts["compactions of shared pages on the device"] += apart
        counts["compactions that give pages back"] += back > 0
        if then not in ("copy", "move"):  # a snapshot settles by itself
            assert self.m.settle(name) == (back if later and (own or apart) else 0)
        if then == "fork" and len(self.live) < SLOTS:
            self.fork_of(name)
        elif then in ("copy", "move"):
            self.bring_back(name, then == "move")

    def start_compaction(self, name: int, lists: list[np.ndarray], fresh: int = 0) -> None:
        """The tables stay as they are, to the page, until it is settled, but for `fresh` pages that it has taken."""
        before, free = tables(self.m), self.m.tables["kv"].allocator.free
        entries = torch.full((4, max(len(kept) for kept in lists)), 1 << 30, dtype=torch.int32)
        for row, kept in zip(entries, lists, strict=True):
            row[: len(kept)] = torch.from_numpy(kept)
        sizes = torch.tensor([len(kept) for kept in lists])
        flags = torch.zeros(2, dtype=torch.int32)
        self.m.start_compaction(name, "kv", entries, sizes, flags, int(sizes.sum()))
        after = tables(self.m)
        counted = {what for what in before if fresh and what.endswith((".refs", ".free")) and "kv" in what}
        assert {what for what in before if after[what] != before[what]} == counted
        assert self.m.tables["kv"].allocator.free == free - fresh
        self.m.check_integrity()
        counts["compactions from lists on the device"] += 1

    @precondition(some_live)
    @rule(i=st.integers(0, SLOTS - 1), move=st.booleans())
    def restore(self, i: int, move: bool) -> None:
        """A snapshot brought back under another name, beside the request or in its place."""
        self.bring_back(self.pick(i), move)

    def bring_back(self, source: int, move: bool) -> None:
        taken, old = snapshot_request(self.m, source), self.live[source]
        if move:
            self.end(source)
        self.names += 1
        name = self.names
        if len(self.live) == SLOTS:
            self.refused(HybridKVError, lambda: restore_request(self.m, taken, name), "slots are full")
            return
        need = {s.name: [-(-n // s.entries_per_page) for n in old.lengths(s)] for s in self.schema.streams}
        if any(sum(need[s]) > t.allocator.free for s, t in self.m.tables.items()):
            self.refused(OutOfPages, lambda: restore_request(self.m, taken, name), "no pages to restore into")
            return
        self.poison_free_pages()
        restore_request(self.m, taken, name)
        request = self.live[name] = Sequence()
        self.inherit(request, old)
        for s, rows in need.items():
            request.pages[s] = [[[1] for _ in range(n)] for n in rows]
        counts["restores"] += 1
        counts["restores of compacted requests"] += old.compacted

    @precondition(some_live)
    @rule(i=st.integers(0, SLOTS - 1))
    def release(self, i: int) -> None:
        name = self.pick(i)
        self.end(name)
        self.gone.append(name)
        counts["releases"] += 1

    def end(self, name: int) -> None:
        slot = self.m.slot_of[name]
        self.m.release_request(name)
        self.forget(self.live.pop(name))
        for t in self.m.tables.values():
            assert (t.pages[slot] == -1).all() and not t.held[slot].any() and not t.lengths[slot].any()
        assert self.m.positions[slot] == 0

    @precondition(some_live)
    @rule(i=st.integers(0, SLOTS - 1), cut=st.integers(0, MAX_TOKENS))
    def preempt(self, i: int, cut: int) -> None:
        """Released, admitted again, and its tokens computed again in two chunks, as far as the pages go."""
        name = self.pick(i)
        tokens = self.live[name].tokens
        self.end(name)
        self.start(name)
        counts["preemptions"] += 1
        for chunk in (tokens[:cut], tokens[cut:]):
            if chunk and not self.run([(name, len(chunk))], {name: list(chunk)}):
                return
        counts["preemptions recomputed in full"] += bool(tokens)

    @precondition(some_live)
    @rule(i=st.integers(0, SLOTS - 1), back=st.integers(-1, 12))
    def truncate(self, i: int, back: int) -> None:
        name = self.pick(i)
        request = self.live[name]
        now = len(request.tokens)
        position = now - back
        if not 0 <= position <= now or ((self.schema.states or request.compacted) and position != now):
            self.refused(RequestError, lambda: self.m.truncate_request(name, position), "truncation refused")
            return
        self.m.truncate_request(name, position)
        counts["truncations"] += position < now
        if position == now:
            return
        del request.tokens[position:]
        for kept in request.kept:
            del kept[position:]
        for s in self.schema.streams:
            keep = -(-s.entries(position) // s.entries_per_page)
            for row in request.pages[s.name]:
                for page in row[keep:]:
                    page[0] -= 1
                del row[keep:]

    @rule(tokens=st.integers(0, 2))
    def misuse(self, tokens: int) -> None:
        """Requests that are not there, twice there, or ask for nothing. One time in four is enough."""
        self.turns += 1
        if self.turns % 4:
            return self.step_all(1) if self.live else self.admit(5)
        nobody = self.gone[-1] if self.gone else "nobody"
        for call in (self.m.release_request, self.m.position, self.m.lengths, lambda r: self.m.commit([(r, 1)])):
            self.refused(RequestError, lambda call=call: call(nobody), "unknown request")
        self.refused(RequestError, lambda: self.m.fork_request(nobody, "child"), "unknown request")
        self.refused(ValueError, lambda: self.m.prepare_forward([]), "empty step")
        if self.live:
            name = next(iter(self.live))
            if len(self.live) == SLOTS:
                self.refused(HybridKVError, lambda: self.m.admit_request("one more"), "slots are full")
                self.refused(HybridKVError, lambda: self.m.fork_request(name, "one more"), "slots are full")
            self.refused(RequestError, lambda: self.m.admit_request(name), "already resident")
            self.refused(RequestError, lambda: self.m.fork_request(name, name), "already resident")
            self.refused(RequestError, lambda: self.m.prepare_forward([(name, 1), (nobody, 1)]), "unknown request")
            self.refused(RequestError, lambda: self.m.commit([(name, 1), (nobody, 1)]), "unknown request")
            self.refused(ValueError, lambda: self.m.prepare_forward([(name, 1), (name, tokens)]), "twice in a step")
            self.refused(ValueError, lambda: self.m.prepare_forward([(name, 0)]), "no tokens")
            over = MAX_TOKENS + 1 - len(self.live[name].tokens)
            self.refused(RequestError, lambda: self.m.prepare_forward([(name, over)]), "too long")

    def teardown(self) -> None:
        if not hasattr(self, "m"):
            return
        for name in list(self.live):
            self.end(name)
        self.m.check_integrity()
        assert self.m.free_slots == SLOTS and not self.m.slot_of
        for name, t in self.m.tables.items():
            assert t.allocator.free == self.sizes[name] and t.allocator.held == 0
            assert sorted(t.allocator._stack.tolist()) == list(range(self.sizes[name])), (
                "the free list is not all pages"
            )
