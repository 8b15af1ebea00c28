"""More rules for the state machine of `host_machine.py`: requests that go to the host with all that they hold, and come
back, by copies that are late or fail, beside columns that come and go.
"""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from cache.host_machine import HostMachine
from cache.reuse_machine import MARKS, MORE, PROMPTS, SLOTS, Live, counts
from hybridkv.cache import OutOfPages
from hybridkv.cache.away import (
    bring_back,
    bytes_away,
    columns_there,
    is_whole,
    leave_columns,
    pages_to_take,
    send_away,
    shared_column,
)
from hybridkv.cache.lookup import Asked
from hybridkv.errors import HybridKVError


class AwayMachine(HostMachine):
    def set_up(self, pages: int, stateful: bool) -> None:
        super().set_up(pages, stateful)
        self.gone: dict[int, Live] = {}

    def some_gone(self) -> bool:
        return bool(self.gone)

    @precondition(HostMachine.some)
    @rule(i=st.integers(0, 3), then=st.sampled_from(("stay", "back", "starve, back", "back")), lives=st.booleans())
    def send(self, i: int, then: str, lives: bool) -> None:
        """Perhaps pages are needed then, and it comes back at once."""
        name = self.pick(i)
        slot, position = self.m.slot_of[name], self.m.position(name)
        if not position or self.m.fresh[slot] > position:
            return
        shared = shared_column(self.r, name)
        need = bytes_away(self.m, name, shared)
        if not send_away(self.m, name, shared):
            tier = self.m.host
            assert name in self.m.slot_of and (tier.trouble["fails"] or not tier.room_for(need))  # type: ignore[attr-defined]
            counts["stayed"] += 1
            return
        away = self.m.away[name]
        assert away.position == position and (not away.begin or shared is not None)
        self.gone[name] = self.live.pop(name)
        counts["sent away"] += 1
        counts["sent without shared pages"] += away.begin > 0
        self.r.check()
        if not lives:
            leave_columns(self.m)
        if "starve" in then:
            self.starve("kv", 0)
        if "back" in then:
            self.bring(len(self.gone) - 1)

    @rule(
        choices=PROMPTS, more=MORE, marks=MARKS, twice=st.booleans(), keep=st.sampled_from((0, 0, 5, 99)),
        then=st.sampled_from(("stay", "back", "starve, back")), lives=st.booleans(),
    )  # fmt: skip
    def read_and_send(
        self, choices: list[int], more: int, marks: int, twice: bool, keep: int, then: str, lives: bool
    ) -> None:
        """Where two have read the same, the second one's columns are the first one's too."""
        for _ in range(1 + twice):
            self.read(choices, more, b"", marks, 1, 40, "stays")
        if self.names in self.live:
            last = list(self.live).index(self.names)
            if keep:
                self.compact(last, keep)
            self.send(last, then, lives)

    @precondition(some_gone)
    @rule(i=st.integers(0, 9))
    def bring(self, i: int) -> None:
        name = list(self.gone)[i % len(self.gone)]
        request, away = self.gone[name], self.m.away[name]
        if len(self.live) == SLOTS:
            return
        tokens = np.array(request.tokens, np.int32)
        asked = Asked(request.salt, tokens, len(tokens), len(tokens), marks=())
        path = columns_there(self.r, away, asked)
        need, free, failed = pages_to_take(self.m, away, path, 1), self.m.pages_to_be_had(), self.m.host.failed
        try:
            bring_back(self.m, name, path)
        except OutOfPages:
            held = any(c.live for c in self.r.columns)  # of those whose pages others do not use
            assert held or any(need[pool] > free[pool] for pool in need), "there was room"
            counts["no room to come back to"] += 1
            return
        except HybridKVError:
            assert not is_whole(away, path) or self.m.host.failed > failed
            counts["could not come back"] += 1
            self.drop(list(self.gone).index(name))
            return
        self.live[name] = self.gone.pop(name)
        self.r.adopt(name, asked)
        if away.compaction is not None:
            self.r.part(name)
        counts["came back"] += 1
        counts["came back to columns"] += bool(path)

    @precondition(some_gone)
    @rule(i=st.integers(0, 9))
    def drop(self, i: int) -> None:
        """It ends, or is to be read again."""
        name = list(self.gone)[i % len(self.gone)]
        self.m.release_request(name)
        del self.gone[name]

    # ---- columns that wait for what is away do not count as needed by somebody

    @precondition(HostMachine.some)
    @rule(i=st.integers(0, 3), n=st.integers(1, 12), ending=st.sampled_from(("well",) * 6 + ("nan", "crash")))
    def step(self, i: int, n: int, ending: str) -> None:
        leave_columns(self.m)
        super().step(i, n, ending)

    @rule(what=st.sampled_from(("kv", "kv", "compressed", "interrupt", "forget")), share=st.integers(1, 4))
    def trouble(self, what: str, share: int) -> None:
        leave_columns(self.m)
        super().trouble(what, share)

    def teardown(self) -> None:
        if not hasattr(self, "m"):
            return
        for name in list(self.gone):
            self.m.release_request(name)
        super().teardown()
