"""More rules for the state machine of `reuse_machine.py`: turns that end, also while a step launched ahead has their
last token; turns that follow; texts that are pinned; states that are dropped.
"""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from cache.reuse_machine import MARKS, MAX_TOKENS, PROMPTS, ROWS, SALTS, SLOTS, Q, ReuseMachine, counts
from hybridkv.cache import OutOfPages, tails
from hybridkv.cache.checkpoints import Checkpoint
from hybridkv.cache.pins import Pin, pin, unpin
from hybridkv.errors import HybridKVError

ENDS = ("no", "no", "well", "nan")  # the step that was launched ahead when a turn ended


class TurnsMachine(ReuseMachine):
    def __init__(self) -> None:
        super().__init__()
        self.turns: list[tuple[list[int], bytes]] = []  # that have ended, with their salts
        self.pins: list[tuple[Pin, bytes]] = []  # with their salts

    def some(self) -> bool:
        return bool(self.live)

    # ---- turns

    @rule(choices=PROMPTS, more=st.sampled_from((0, 1, 3, 40)), salt=SALTS, marks=MARKS, ahead=st.sampled_from(ENDS))
    def turn(self, choices: list[int], more: int, salt: bytes, marks: int, ahead: str) -> None:
        """A whole turn: a prompt is read, and ends."""
        self.read(choices, more, salt, marks, 1, 40, "stays")
        if self.names in self.live:
            self.finish(list(self.live).index(self.names), ahead)

    @precondition(lambda self: self.turns)
    @rule(
        which=st.integers(0, 3), more=st.sampled_from((0, 0, 1, 9)), marks=MARKS,
        then=st.sampled_from(("runs", "ends", "nan")),
    )  # fmt: skip
    def next_turn(self, which: int, more: int, marks: int, then: str) -> None:
        """A prompt that begins with a turn that has ended, one of the last."""
        if len(self.live) == SLOTS:
            self.release(0)
        tokens, salt = self.turns[-1 - which % min(4, len(self.turns))]
        self.begin_with([*tokens, *[70] * more][: MAX_TOKENS - 1], salt, marks, 1, True)
        name = self.names
        while name in self.live and self.m.position(name) < len(self.live[name].tokens):
            left = len(self.live[name].tokens) - self.m.position(name)
            self.step(list(self.live).index(name), left, "nan" if then == "nan" else "well")
        if then == "ends" and name in self.live:
            self.finish(list(self.live).index(name), "no")

    @precondition(some)
    @rule(i=st.integers(0, 3), ahead=st.sampled_from(ENDS))
    def finish(self, i: int, ahead: str) -> None:
        """A turn ends, perhaps while a step that was launched ahead has its last token."""
        name = self.pick(i)
        request, position = self.live[name], self.m.position(name)
        if not position or position < self.m.fresh[self.m.slot_of[name]]:
            return self.release(i)
        del request.tokens[position:]
        if ahead != "no" and position < MAX_TOKENS:
            try:
                step = self.m.prepare_forward([(name, 1)])
            except OutOfPages:
                return self.release(i)
            request.tokens.append(90)
            self.write(step, name, [90], ahead == "nan")
        kept = tails.keep_end(self.r, name, request.tokens, None if ahead == "no" else lambda: ahead != "nan")
        counts["ends of turns"] += kept and ahead != "nan"
        counts["ends in doubt"] += bool(self.r.publishing.late)
        self.turns.append((list(request.tokens), request.salt))
        return self.release(i)

    # ---- what stays, and what goes

    @rule(which=st.integers(0, 30), release=st.sampled_from((False, False, True)))
    def pin(self, which: int, release: bool) -> None:
        """Something that is kept stays from here on, or no longer has to."""
        if release and self.pins:
            return unpin(self.m, self.pins.pop(which % len(self.pins))[0])
        there = [each for each in self.columns() if not len(each[0]) % Q]
        if which % 4:
            there = [each for each in there if each[1].checkpoint is not None] or there
        if not there:
            return None
        tokens, column, salt = there[which % len(there)]
        try:
            found = pin(self.m, salt, np.array(tokens, np.int32))
        except HybridKVError:
            counts["more than may be pinned"] += 1
            return None
        assert (found is None) == (column.pages is None or (self.stateful and column.checkpoint is None))
        if found is not None:
            self.pins.append((found, salt))
            counts["pins"] += 1
        rows = {id(each.column) for each, _ in self.pins}
        pages = {int(page) for each, _ in self.pins for page in each.pages(self.r, "kv")}
        assert 2 * len(rows) <= ROWS or not self.stateful, "more rows than half are pinned"
        assert 2 * len(pages) <= self.sizes["kv"], "more pages than half are pinned"
        return None

    @precondition(lambda self: len(self.r.checkpoints.all) > len(self.r.pins))
    @rule(which=st.integers(0, 30))
    def lose(self, which: int) -> None:
        """A state goes that is not pinned, more often than not one at the end of a turn."""
        found = [c for c in self.r.checkpoints.all.values() if not c.pins]
        found = [c for c in found if c.position % Q] or found
        self.r.checkpoints.drop(found[which % len(found)])
        counts["states dropped"] += 1

    def interrupt(self) -> None:
        """What waits for a step is given up, and everything counted anew."""
        self.m.rebuild()
        assert not self.r.publishing.late

    @rule(what=st.sampled_from(("kv", "compressed", "interrupt", "forget")), share=st.integers(1, 2))
    def trouble(self, what: str, share: int) -> None:
        """What waits for a step is settled first; a salt that is forgotten takes its pins along."""
        self.r.settle_late()
        super().trouble(what, share)
        if what == "forget":
            salt = (b"", b"s", None, b"s")[share - 1]
            self.pins = [each for each in self.pins if salt not in (None, each[1])]

    # ---- by hand

    def check(self) -> None:
        """All that must hold."""
        self.everything_is_counted()
        self.everyone_reads_their_own_past()
        self.what_is_kept_is_what_its_tokens_give()
        self.what_is_pinned_is_there()
        self.nobody_reads_what_nobody_owns()

    # ---- what must hold

    @invariant()
    def what_is_pinned_is_there(self) -> None:
        if not hasattr(self, "m"):
            return
        there = {id(column) for column in self.r.columns}
        for each, _ in self.pins:
            assert each in self.r.pins and all(id(column) in there for column in each.column.path())
            assert not self.stateful or isinstance(each.column.checkpoint, Checkpoint), "a pinned state was dropped"

    def teardown(self) -> None:
        if hasattr(self, "m"):
            for each, _ in self.pins:
                unpin(self.m, each)
            self.r.settle_late()
        super().teardown()
