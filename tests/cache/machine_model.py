"""The plain model beside a KVCacheManager under random use: what each request has stored, and who owns which page.

Every token that is computed gets a number of its own. What is stored for it names that number, the stream and the
position, so a page that two requests own by mistake, or a copy that was not made, shows as wrong bytes. The model keeps
lists of page objects; the real page ids must map onto them one to one. Pages without owners are overwritten with poison
after each rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine, invariant

from hybridkv.cache import CacheSchema, ForwardStep, KVCacheManager, StateSchema, StreamSchema, TensorSpec

SLOTS, MAX_TOKENS, POISON = 4, 26, -777
KV = tuple(TensorSpec(name, (2,), torch.float32) for name in "kv")
HEADS = StreamSchema("kv", (0, 2), KV, entries_per_page=4, heads=2)
LANES = StreamSchema(
    "compressed",
    (1, 3, 4),
    (TensorSpec("main", (2,), torch.float32), TensorSpec("index", (), torch.int64)),
    entries_per_page=2,
    shared=True,
    tokens_per_entry=4,
)
INF = float("inf")
TAIL = StateSchema("tail", (1, 5), (TensorSpec("z", (3,), torch.float32, -INF), TensorSpec("n", (), torch.int64)))

Page = list[int]  # the model's page: one number, how many own it. Its identity is what counts
counts: Counter[str] = Counter()  # what really happened, over all runs; tests look at it


class Sequence:
    """The model of a request: its tokens, and the page objects of each stream."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.pages: dict[str, list[list[Page]]] = {s.name: [[] for _ in range(s.streams)] for s in (HEADS, LANES)}
        self.kept: list[list[int]] = [[] for _ in range(HEADS.streams)]  # positions of the entries of each KV stream
        self.compacted = False

    def lengths(self, s: StreamSchema) -> list[int]:
        return [len(row) for row in self.kept] if s is HEADS else [s.entries(len(self.tokens))] * s.streams


def snapshot(m: KVCacheManager) -> dict[str, bytes]:
    """Everything a refused call must leave as it was."""
    facts = {"positions": m.positions.tobytes(), "slots": repr((m.slot_of, m._free_slots)).encode()}
    for name, t in m.tables.items():
        arrays = {"pages": t.pages, "held": t.held, "lengths": t.lengths, "refs": t.allocator.refs}
        arrays["free"] = t.allocator._stack[: t.allocator.free]
        facts |= {f"{name}.{what}": array.tobytes() for what, array in arrays.items()}
        for what, tensor in t.pool.tensors.items():
            facts[f"{name}.{what}"] = tensor.view(torch.uint8).numpy().tobytes()
    for key, tensor in m.state.tensors.items():
        facts[str(key)] = tensor.view(torch.uint8).numpy().tobytes()
    facts["compactions"] = repr(m.compactions).encode()
    return facts


class CacheModel(RuleBasedStateMachine):
    """What the model knows, how it follows a step, and what must hold after each rule."""

    schema: CacheSchema
    sizes: dict[str, int]
    m: KVCacheManager
    live: dict[int, Sequence]
    numbers: int

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def refused(self, error: type[Exception], call: Callable[[], Any], why: str) -> None:
        before = snapshot(self.m)
        with pytest.raises(error):
            call()
        after = snapshot(self.m)
        assert not [key for key in before if before[key] != after[key]], f"changed by a refused call ({why})"
        counts[why] += 1

    def grown(self, s: StreamSchema, plan: list[tuple[int, int]], really: bool) -> tuple[int, int]:
        """Pages to add and pages to copy, worked out stream by stream; with `really`, the model follows."""
        lost: Counter[int] = Counter()  # owners that a page has lost to copies made earlier in this step
        add = copies = 0
        for name, n in plan:
            request = self.live[name]
            new = s.entries(len(request.tokens) + n) - s.entries(len(request.tokens))
            for row, have in zip(request.pages[s.name], request.lengths(s)):
                at, then = have // s.entries_per_page, have + new
                if then > have and have % s.entries_per_page and row[at][0] - lost[id(row[at])] > 1:
                    copies += 1
                    if really:
                        row[at][0] -= 1
                        row[at] = [1]
                    else:
                        lost[id(row[at])] += 1
                missing = max(-(-then // s.entries_per_page) - len(row), 0)
                add += missing
                if really:
                    row += [[1] for _ in range(missing)]
        return add, copies

    def needed(self, s: StreamSchema, plan: list[tuple[int, int]]) -> int:
        return sum(self.grown(s, plan, really=False))

    def grow(self, s: StreamSchema, plan: list[tuple[int, int]]) -> None:
        _, copies = self.grown(s, plan, really=True)
        counts["copies on write"] += copies

    def forget(self, request: Sequence) -> None:
        for rows in request.pages.values():
            for row in rows:
                for page in row:
                    page[0] -= 1

    # ---- bytes

    def write(self, step: ForwardStep, fresh: dict[int, list[int]]) -> None:
        """What the layers would do: keys and values through `append`, compressed entries through table and lengths."""
        handles = self.m.acquire(step)
        names = [name for slot in step.slots for name, s in self.m.slot_of.items() if s == slot]
        number = torch.tensor([t for name in names for t in fresh[name]], dtype=torch.float32)
        place = torch.tensor([self.m.position(name) + i for name in names for i in range(len(fresh[name]))]).float()
        for layer in HEADS.layers:
            first = HEADS.place(layer)[1].start
            stream = torch.arange(first, first + HEADS.heads).float().expand(len(number), -1)  # [T, G]
            number_g, place_g = (x[:, None].expand(-1, HEADS.heads) for x in (number, place))
            handles[layer].append(torch.stack((number_g, stream), 2), torch.stack((place_g, -number_g), 2))
        view = step.streams["compressed"]
        places = []
        for row, name in enumerate(names):
            history = self.live[name].tokens + fresh[name]
            have = LANES.entries(len(self.live[name].tokens))
            for entry in range(have, int(view.lengths[row, 0])):
                page, at = int(view.table[step.slots[row], 0, entry // 2]), entry % 2
                places.append(2 * page + at)
                for layer in LANES.layers:
                    paged = handles[layer].paged
                    paged["main"][page, at] = torch.tensor([float(history[4 * entry + 3]), float(layer)])
                    paged["index"][page, at] = 1000 * history[4 * entry] + entry
        index = view.entry_index[0]
        assert index[index >= 0].tolist() == places, "the step names other places than table and lengths do"

    def write_state(self, step: ForwardStep, fresh: dict[int, list[int]]) -> None:
        """The tail holds the last three tokens, each layer its own way."""
        if not self.schema.states:
            return
        handles = self.m.acquire(step)
        for name in fresh:
            slot, history = self.m.slot_of[name], self.live[name].tokens + fresh[name]
            for layer in TAIL.layers:
                state = handles[layer].state
                for token in fresh[name][-3:]:
                    state["z"][slot] = torch.cat((state["z"][slot, 1:], torch.tensor([float(token + layer)])))
                state["n"][slot] = len(history)

    def read(self, s: StreamSchema, name: int, table: np.ndarray, lengths: np.ndarray) -> None:
        """Each entry of the request is its own: number, stream, position."""
        request, P = self.live[name], s.entries_per_page
        want_lengths = request.lengths(s)
        assert lengths.tolist() == want_lengths, f"streams of '{s.name}' are {lengths} long, not {want_lengths}"
        history = np.array(request.tokens, np.int64)
        stream = np.repeat(np.arange(s.streams), want_lengths)  # [n], of the entries of all streams
        entry = np.concatenate([np.arange(length) for length in want_lengths])
        page = table[stream, entry // P]
        assert (page >= 0).all(), "an entry in use has no page"
        if s is HEADS:
            place = np.array([at for row in request.kept for at in row], np.int64)
            number = history[place]
            want = {"k": np.stack((number, stream), 1)[None], "v": np.stack((place, -number), 1)[None]}
        else:
            [n] = want_lengths  # one stream, which all layers share
            number = np.broadcast_to(history[3 : 4 * n : 4], (s.lanes, n))
            lane = np.broadcast_to(np.array(s.layers)[:, None], number.shape)
            index = np.broadcast_to(1000 * history[0 : 4 * n : 4] + entry, number.shape)
            want = {"main": np.stack((number, lane), 2), "index": index}
        for key, tensor in self.m.tables[s.name].pool.tensors.items():
            got = tensor.numpy()[:, page, entry % P]  # [lanes, n, ...]
            assert np.array_equal(got, want[key]), f"request {name} reads another's '{key}' in '{s.name}'"

    # ---- after each rule

    @invariant()
    def pages_are_accounted_for(self) -> None:
        self.m.check_integrity()
        for s in self.schema.streams:
            t = self.m.tables[s.name]
            real: dict[int, int] = {}  # the model's page -> page id
            owners: Counter[int] = Counter()
            for name, request in self.live.items():
                table = t.pages[self.m.slot_of[name]]
                for row, pages in zip(table, request.pages[s.name]):
                    assert (row[len(pages) :] == -1).all(), "table entries past the end are not -1"
                    for i, page in zip(row.tolist(), pages):
                        assert real.setdefault(id(page), i) == i, "a shared page is two pages"
                        owners[i] += 1
            assert len(set(real.values())) == len(real), "a page has two owners that do not share it"
            assert [owners[i] for i in range(t.allocator.total)] == t.allocator.refs.tolist(), "owners are miscounted"
            assert t.allocator.free + len(real) == t.allocator.total == self.sizes[s.name], "a page is lost"
            assert t.allocator.held == len(real)

    @invariant()
    def everyone_reads_their_own_past(self) -> None:
        for name, request in self.live.items():
            slot = self.m.slot_of[name]
            for s in self.schema.streams:
                t = self.m.tables[s.name]
                self.read(s, name, t.pages[slot], t.lengths[slot])
            at = [p.tolist() for p in self.m.entry_positions(name, "kv")]
            assert at == request.kept, "entries are not where the manager thinks they are"
            if self.schema.states:
                for lane, layer in enumerate(TAIL.layers):
                    last = [float(n + layer) for n in request.tokens[-3:]]
                    z = self.m.state.tensors["tail", "z"][lane, slot].tolist()
                    assert z == [-INF] * (3 - len(last)) + last, "recurrent state is another's"
                    assert int(self.m.state.tensors["tail", "n"][lane, slot]) == len(request.tokens)

    @invariant()
    def free_slots_are_empty(self) -> None:
        assert self.m.free_slots == SLOTS - len(self.live)
        free = sorted(set(range(SLOTS)) - {self.m.slot_of[name] for name in self.live})
        assert not self.m.positions[free].any()
        assert not self.m.compactions.keys() & set(free), "a free slot has a past"
        for t in self.m.tables.values():
            assert (t.pages[free] == -1).all() and not t.held[free].any() and not t.lengths[free].any()
        self.poison_free_pages()

    def poison_free_pages(self) -> None:
        """Whoever gets one of these pages next must write before reading."""
        for t in self.m.tables.values():
            unowned = torch.from_numpy(np.flatnonzero(t.allocator.refs == 0))
            for tensor in t.pool.tensors.values():
                tensor[:, unowned] = float("nan") if tensor.is_floating_point() else POISON
