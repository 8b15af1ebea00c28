"""Reuse under random use: a state machine for Reuse over a manager, beside a plain function that knows what is right.

What is stored for a token, and the state after it, are a function of all tokens up to it, as in a model: the state is
computed from the state before, entries from the state. So pages with another's tokens, a state of another position or a
copy that was not made show as wrong numbers. Whatever nobody owns is poisoned after each rule. Tokens are few, so that
prompts share beginnings. A state is stored as two numbers that bf16 has exactly, so checkpoints may be in that.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache.machine_model import HEADS, INF, LANES, TAIL
from hybridkv.cache import CacheSchema, KVCacheManager, OutOfPages
from hybridkv.cache.checkpoints import Checkpoint
from hybridkv.cache.columns import KEY_DTYPE, Column
from hybridkv.cache.lookup import Asked, Hit
from hybridkv.cache.reuse import Reuse
from hybridkv.cache.tiers import HostTier

SLOTS, MAX_TOKENS, ROWS, Q = 4, 48, 3, 8
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=5)  # one of two texts for every 8 tokens
MORE, SALTS = st.sampled_from((0, 0, 1, 3, 40)), st.sampled_from((b"",) * 5 + (b"s",))
MARKS = st.sampled_from((31, 31, 0, 5, 18))  # a bit for each of five columns
ROUNDED = replace(TAIL, tensors=(replace(TAIL.tensors[0], checkpoint_dtype="bfloat16"), TAIL.tensors[1]))
ENDINGS = ("stays", "stays", "stays", "only reads", "nan")  # what becomes of a prompt
counts: Counter[str] = Counter()  # what really happened, over all runs


def text(choices: list[int], more: int) -> list[int]:
    """A prompt of whole columns, of which there are two kinds, and a few tokens that are its own."""
    return [10 * c + i for c in choices for i in range(Q)] + [50 + more] * (more % 7)


def after(state: int, token: int) -> int:
    return (31 * state + token + 1) % 65521


def state_words(state: int, layer: int) -> list[float]:
    """What a layer stores of a state."""
    return [float(state // 256), float(layer), float(state % 256)]


def states(tokens: list[int]) -> list[int]:
    """The state before each token, and after all of them."""
    found = [7]
    for token in tokens:
        found.append(after(found[-1], token))
    return found


class Live:
    """A request: its tokens, how many have been computed, and which entries it keeps."""

    def __init__(self, tokens: list[int], salt: bytes) -> None:
        self.tokens, self.salt = tokens, salt
        self.kept: list[np.ndarray] | None = None  # positions of each KV stream's entries; None: all
        self.cut_at = 0


class ReuseMachine(RuleBasedStateMachine):
    rounds = False  # whether checkpoints are in bf16

    @initialize(pages=st.sampled_from((28, 48, 80, 160)), stateful=st.booleans())
    def build(self, pages: int, stateful: bool) -> None:
        self.set_up(pages, stateful)

    def set_up(self, pages: int, stateful: bool) -> None:
        self.stateful = stateful
        self.schema = CacheSchema((HEADS, LANES), (ROUNDED if self.rounds else TAIL,) if stateful else ())
        self.sizes = {"kv": pages, "compressed": max(3, pages // 8)}
        self.m = KVCacheManager(self.schema, self.sizes, SLOTS, MAX_TOKENS, checkpoints=ROWS, host=self.tier())
        self.r = Reuse(self.m, every=0)
        assert self.r.q == Q
        self.live: dict[int, Live] = {}
        self.names = 0

    def tier(self) -> HostTier | None:
        """Memory on the host; None: as a CPU has it, where pages do not go there."""
        return None

    def pick(self, i: int) -> int:
        return list(self.live)[i % len(self.live)]

    def some(self) -> bool:
        return bool(self.live)

    # ---- requests

    @rule(
        choices=PROMPTS, more=MORE, salt=SALTS, marks=MARKS,
        window=st.sampled_from((1, 1, 5)), chunk=st.sampled_from((3, 8, 12, 40)), then=st.sampled_from(ENDINGS),
    )  # fmt: skip
    def read(self, choices: list[int], more: int, salt: bytes, marks: int, window: int, chunk: int, then: str) -> None:
        """A whole prompt; the oldest request makes room for it."""
        if len(self.live) == SLOTS:
            self.release(0)
        self.begin(choices, more, salt, marks, window, writes=then != "only reads")
        name = self.names
        while name in self.live and self.m.position(name) < len(self.live[name].tokens):
            left = len(self.live[name].tokens) - self.m.position(name)
            self.step(
                list(self.live).index(name), min(chunk, left), "nan" if then == "nan" and left <= chunk else "well"
            )

    @precondition(lambda self: len(self.live) < SLOTS)
    @rule(
        choices=PROMPTS, more=MORE, salt=SALTS, marks=MARKS,
        window=st.sampled_from((1, 1, 5)), writes=st.sampled_from((True, True, True, False)),
    )  # fmt: skip
    def begin(self, choices: list[int], more: int, salt: bytes, marks: int, window: int, writes: bool) -> None:
        self.begin_with(text(choices, more), salt, marks, window, writes)

    def begin_with(self, tokens: list[int], salt: bytes, marks: int, window: int, writes: bool) -> None:
        wished = [(Q * (i + 1), "client") for i in range(5) if marks >> i & 1]
        most = max(0, len(tokens) - window)
        asked = Asked(salt, np.array(tokens, np.int32), most, len(tokens), marks=wished, writes=writes)
        hit = self.look_up(asked)
        counts["ends of turns taken up"] += hit.cached % Q > 0
        self.names += 1
        slot = self.r.attach(self.names, hit, asked)
        self.live[self.names] = Live(tokens, salt)
        assert int(self.m.positions[slot]) == hit.cached <= most
        counts["hits"] += hit.cached > 0
        counts["replays"] += hit.matched > hit.cached > 0
        counts[hit.reason] += 1

    def look_up(self, asked: Asked) -> Hit:
        hit = self.r.lookup(asked)
        self.check_hit(hit.path, hit.cached, hit.checkpoint, asked.tokens.tolist(), asked.salt, asked.most)
        return hit

    def check_hit(
        self, path: list[Column], cached: int, checkpoint: Checkpoint | None, tokens: list[int], salt: bytes, most: int
    ) -> None:
        """It is the deepest one that there is, found the slow way."""
        there = {prefix for prefix, column, of in self.columns() if of == salt and column.pages is not None}
        deep = max(
            n for n in range(0, len(tokens) + 1, Q) if all(tuple(tokens[:k]) in there for k in range(Q, n + 1, Q))
        )
        assert (path[-1].end if path else 0) == deep, "a lookup is too short or too long"
        if not self.stateful:
            ends = [n for n in range(deep + 1, min(deep + Q, most + 1)) if tuple(tokens[:n]) in there]
            assert cached == max([min(deep, most), *ends]), "a hit is not the longest"
            return
        states = {prefix for prefix, column, of in self.columns() if of == salt and column.checkpoint is not None}
        best = max(n for n in range(min(deep + Q, most + 1)) if not n or tuple(tokens[:n]) in states)
        assert cached == best == (checkpoint.position if checkpoint else 0), "a hit is not the deepest checkpoint"

    def columns(self) -> list[tuple[tuple[int, ...], Column, bytes]]:
        """Every column with the tokens up to its end, and its salt."""
        found = []
        for column in self.r.columns:
            path = column.path()
            tokens = tuple(t for c in path for t in np.frombuffer(c.key, KEY_DTYPE).tolist())
            found.append((tokens, column, path[0].parent.key))  # type: ignore[union-attr]
        return found

    @precondition(some)
    @rule(i=st.integers(0, 3), n=st.integers(1, 12), ending=st.sampled_from(("well",) * 6 + ("nan", "crash")))
    def step(self, i: int, n: int, ending: str) -> None:
        name = self.pick(i)
        request, position = self.live[name], self.m.position(name)
        if position + n > MAX_TOKENS:
            return self.release(i)
        n = self.r.until_stop(name, position, n)
        request.tokens += [90] * (position + n - len(request.tokens))  # an answer
        need, most = self.m.pages_needed(name, n), self.m.pages_to_be_had()
        try:
            step = self.m.prepare_forward([(name, n)])
        except OutOfPages:
            assert any(need[pool] > most[pool] for pool in need), "pages that nobody needs are not given up"
            return self.release(i)
        self.write(step, name, request.tokens[position : position + n], ending == "crash")
        if ending == "crash":  # the pass died
            self.m.rebuild()
            return self.release(i)
        self.m.commit([(name, n)])
        self.r.stage(name, request.tokens)
        if ending == "nan":
            self.spoil(name, step)
            self.r.publish([name])
            self.r.discard(name)
            counts["steps that failed"] += 1
            return self.release(i)
        self.r.publish()
        counts["steps"] += 1

    def write(self, step: object, name: int, fresh: list[int], dies: bool) -> None:
        """What the layers do: state from state, entries from state; nothing on a page that has another owner."""
        handles, slot, position = self.m.acquire(step), self.m.slot_of[name], self.m.position(name)  # type: ignore[arg-type]
        known = states(self.live[name].tokens[:position])[-1]
        if self.stateful:
            high, _, low = self.m.state.tensors["tail", "z"][0, slot].tolist()
            known = int(256 * high + low) if position else 7
        after_each = []
        for token in fresh:
            known = after(known, token) if not dies else 0
            after_each.append(known)
        for s in self.schema.streams:
            index, refs = step.streams[s.name].entry_index, self.m.tables[s.name].allocator.refs  # type: ignore[attr-defined]
            places = index[index >= 0].numpy()
            assert (refs[places // s.entries_per_page] == 1).all(), "a page with another owner is written"
        number = torch.tensor(after_each).float()
        place = torch.arange(position, position + len(fresh)).float()
        for layer in HEADS.layers:
            first = HEADS.place(layer)[1].start
            stream = torch.arange(first, first + HEADS.heads).float().expand(len(number), -1)
            number_g, place_g = (x[:, None].expand(-1, HEADS.heads) for x in (number, place))
            handles[layer].append(torch.stack((number_g, stream), 2), torch.stack((place_g, -number_g), 2))
        index = step.streams["compressed"].entry_index[0]  # type: ignore[attr-defined]
        for t in (index >= 0).nonzero().flatten().tolist():
            page, at = divmod(int(index[t]), LANES.entries_per_page)
            for layer in LANES.layers:
                handles[layer].paged["main"][page, at] = torch.tensor([float(after_each[t]), float(layer)])
                handles[layer].paged["index"][page, at] = (position + t) // 4
        if self.stateful:
            for layer in TAIL.layers:
                handles[layer].state["z"][slot] = torch.tensor(state_words(after_each[-1], layer))
                handles[layer].state["n"][slot] = position + len(fresh)
        self.m.begin(step)  # type: ignore[arg-type]

    def spoil(self, name: int, step: object) -> None:
        """The step's numbers were none."""
        for s in self.schema.streams:
            index = step.streams[s.name].entry_index  # type: ignore[attr-defined]
            places = index[index >= 0]
            for pool in self.m.tables[s.name].pool.tensors.values():
                pool.view(pool.shape[0], -1, *pool.shape[3:])[:, places] = -1

    @precondition(lambda self: 0 < len(self.live) < SLOTS)
    @rule(i=st.integers(0, 3))
    def fork(self, i: int) -> None:
        name = self.pick(i)
        self.names += 1
        self.m.fork_request(name, self.names)
        old, new = self.live[name], Live(list(self.live[name].tokens), self.live[name].salt)
        new.kept, new.cut_at = old.kept, old.cut_at
        del new.tokens[self.m.position(name) :]  # they go on otherwise
        new.tokens += [60 + self.names % 20]
        self.live[self.names] = new
        self.r.readings[self.names].keys = self.r.columns.keys(np.array(new.tokens[: self.m.position(name)]))
        counts["forks"] += 1

    @precondition(some)
    @rule(i=st.integers(0, 3), keep=st.integers(1, 2**20))
    def compact(self, i: int, keep: int) -> None:
        name = self.pick(i)
        request, position = self.live[name], self.m.position(name)
        if not position:
            return
        before = request.kept or [np.arange(position)] * HEADS.streams
        if request.kept is not None:
            before = [np.concatenate((k, np.arange(request.cut_at, position))) for k in before]
        lists = [np.array([j for j in range(len(k)) if keep >> j % 20 & 1] or [0]) for k in before]
        try:
            self.m.compact_request(name, {0: lists[:2], 2: lists[2:]})
        except OutOfPages:
            counts["no pages to compact into"] += 1
            return
        if any(len(k) < len(b) for k, b in zip(lists, before, strict=True)):
            request.kept, request.cut_at = [b[k] for b, k in zip(before, lists, strict=True)], position
            counts["compactions"] += 1

    @precondition(some)
    @rule(i=st.integers(0, 3))
    def release(self, i: int) -> None:
        name = self.pick(i)
        self.m.release_request(name)
        del self.live[name]

    @rule(what=st.sampled_from(("kv", "kv", "compressed", "interrupt", "forget")), share=st.integers(1, 4))
    def trouble(self, what: str, share: int) -> None:
        """Somebody needs pages, and gives them back; everything is counted anew; a salt is forgotten."""
        if what == "interrupt":
            before = {name: t.allocator.refs.copy() for name, t in self.m.tables.items()}
            blocks = self.m.host.blocks.refs.copy()
            self.m.rebuild()
            assert np.array_equal(blocks, self.m.host.blocks.refs)
            assert all(np.array_equal(before[name], t.allocator.refs) for name, t in self.m.tables.items())
        elif what == "forget":
            self.r.forget((b"", b"s", None, b"s")[share - 1])
            counts["forgotten"] += 1
        else:
            allocator = self.m.tables[what].allocator
            want, most = allocator.total * share // 4, allocator.free + allocator.reclaimable
            try:
                allocator.release(allocator.acquire(want))
                assert want <= most, "more pages are to be had than were counted"
            except OutOfPages:
                assert want > most, "pages that nobody needs are not given up"
            counts["shortages"] += 1

    # ---- what must hold

    @invariant()
    def everything_is_counted(self) -> None:
        if not hasattr(self, "m"):
            return
        self.m.check_integrity()
        self.r.check()
        late = sorted(staged.row for staged, _ in self.r.publishing.late if staged.row >= 0)
        assert not self.r.publishing.staged and sorted(self.r.checkpoints.reserved) == late
        assert self.r.checkpoints.nbytes == len(self.r.checkpoints.all) * self.schema.checkpoint_bytes
        assert self.r.readings.keys() == self.live.keys()

    @invariant()
    def everyone_reads_their_own_past(self) -> None:
        for name, request in getattr(self, "live", {}).items():
            slot, position = self.m.slot_of[name], self.m.position(name)
            known = states(request.tokens[:position])
            for s in self.schema.streams:
                t = self.m.tables[s.name]
                for row in range(s.streams):
                    at = np.arange(s.entries(position))
                    if s is HEADS and request.kept is not None:
                        at = np.concatenate((request.kept[row], np.arange(request.cut_at, position)))
                    self.check_entries(s, row, t.pages[slot, row], at, known)
            self.check_state(slot, position, known)

    @invariant()
    def what_is_kept_is_what_its_tokens_give(self) -> None:
        for tokens, column, _ in self.columns() if hasattr(self, "m") else ():
            if column.pages is None:
                continue
            known = states(list(tokens))
            for s in self.schema.streams:
                begin, streams, per = self.r.parts[s.name]
                ids = column.pages[begin : begin + streams * per].reshape(streams, per)
                first, last = s.entries((column.end - 1) // Q * Q), s.entries(column.end)
                for row in range(s.streams):
                    table = np.full(first // s.entries_per_page + per, -1)
                    table[first // s.entries_per_page :] = ids[row]
                    self.check_entries(s, row, table, np.arange(last), known, first)
            if isinstance(column.checkpoint, Checkpoint):
                self.check_state(column.checkpoint.row, column.end, known)
                counts["checkpoints seen"] += 1

    def check_entries(
        self, s: object, row: int, table: np.ndarray, at: np.ndarray, known: list[int], first: int = 0,
        pools: dict[str, torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Entries number first, first + 1, ... of a stream are those of positions (or of fours of them) `at`; `pools`:
        where they lie, if not on the device.
        """
        P = s.entries_per_page  # type: ignore[attr-defined]
        pools = self.m.tables[s.name].pool.tensors if pools is None else pools  # type: ignore[attr-defined]
        for i, where in list(enumerate(at.tolist()))[first:]:
            page, offset = int(table[i // P]), i % P
            assert page >= 0
            if s is HEADS:
                got = [*pools["k"][0, page, offset].tolist(), *pools["v"][0, page, offset].tolist()]
                assert got == [known[where + 1], row, where, -known[where + 1]], "an entry is another's"
            else:
                for lane, layer in enumerate(LANES.layers):
                    got = pools["main"][lane, page, offset].tolist()
                    assert got == [known[4 * where + 4], layer], "an entry is another's"

    def check_state(self, row: int, position: int, known: list[int]) -> None:
        if self.stateful:
            rows = self.m.state.rows(row)
            assert rows["tail", "z"].dtype == (torch.bfloat16 if self.rounds and row >= SLOTS else torch.float32)
            for lane, layer in enumerate(TAIL.layers):
                self.check_layer([rows["tail", t][lane] for t in "zn"], layer, position, known)

    @staticmethod
    def check_layer(state: list[torch.Tensor], layer: int, position: int, known: list[int]) -> None:
        want = [-INF] * 3 if not position else state_words(known[position], layer)
        assert state[0].tolist() == want and int(state[1]) == position, "a state is another's"

    @invariant()
    def nobody_reads_what_nobody_owns(self) -> None:
        if not hasattr(self, "m"):
            return
        for t in self.m.tables.values():
            unowned = torch.from_numpy(np.flatnonzero(t.allocator.refs == 0))
            for pool in t.pool.tensors.values():
                pool[:, unowned] = float("nan") if pool.is_floating_point() else -777
        if self.stateful:
            taken = {*self.r.checkpoints.all, *self.r.checkpoints.reserved}
            rows = [row for row in range(SLOTS, SLOTS + ROWS) if row not in taken]
            rows += [slot for slot in range(SLOTS) if slot not in self.m.slot_of.values()]
            for row in rows:
                self.m.state.rows(row)["tail", "z"].fill_(float("nan"))

    def teardown(self) -> None:
        if not hasattr(self, "m"):
            return
        for name in list(self.live):
            self.m.release_request(name)
        for name, t in self.m.tables.items():
            t.allocator.require(self.sizes[name])
        self.r.host.make_room(self.m.host.blocks.total)
        assert not self.m.host.used, "something on the host is never given up"
        assert not self.r.columns.count and not self.r.checkpoints.all, "something is never given up"
        self.m.check_integrity()
