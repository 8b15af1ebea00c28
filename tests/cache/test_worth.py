"""Which checkpoint goes: the one that saves least reading for its bytes, aged by use."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest
from long_form import LONG

from hybridkv.cache.checkpoints import Checkpoint, Checkpoints, Kind
from hybridkv.cache.columns import Column, Columns
from hybridkv.cache.pins import may_pin
from hybridkv.cache.worth import BELIEVED, INTERIOR, OFTEN, REMEMBERED, ByWorth, Fates
from hybridkv.config import ReuseConfig
from hybridkv.errors import HybridKVError

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from reuse_simulation import Simulator, Sizes, lost_to_strangers
from reuse_traces import TRACES, agent, chat, documents

STATE, PAGES = 1000, 10
HALF = 0.5  # the chance that anything is used while nothing is known


class Tree:
    """Texts by name, each some columns of one token below another."""

    def __init__(self, rows: int = 100) -> None:
        self.columns = Columns(1, 0)
        self.policy = ByWorth(STATE, PAGES)
        self.checkpoints = Checkpoints(self.columns, rows, STATE, policy=self.policy)
        self.ends: dict[str, Column] = {"": self.columns.root(b"")}
        self._tokens = 0

    def grow(self, name: str, tokens: int, below: str = "", kind: Kind = "message") -> Checkpoint:
        column = self.ends[below]
        for _ in range(tokens):
            self._tokens += 1
            column, _ = self.columns.insert(column, Columns.keys(np.array([self._tokens])), np.zeros(0, np.int32))
        self.ends[name] = column
        row = self.checkpoints.reserve()
        assert row is not None
        return self.checkpoints.add(column, row, kind)


def test_worth_is_reading_saved_for_each_byte_that_is_kept() -> None:
    tree = Tree()
    system = tree.grow("system", 100)
    one, other = tree.grow("one", 30, "system"), tree.grow("other", 300, "system")
    worth = tree.policy.worth
    # its columns are needed by the others, too, and those are found before it
    assert worth(system) == pytest.approx(INTERIOR * HALF * 100 / STATE)
    assert worth(one) == HALF * 30 / (STATE + 30 * PAGES) and worth(other) == HALF * 300 / (STATE + 300 * PAGES)
    tree.checkpoints.drop(system)
    assert worth(one) == HALF * 130 / (STATE + 30 * PAGES)  # what it alone saves now


def test_states_inside_a_document_go_before_its_end() -> None:
    """Prompts are taken up at its end. Counted whole, each of those above would seem worth ten times as much."""
    tree = Tree(rows=5)
    above = ["a", "b", "c"]
    inner = [tree.grow(name, 100, *above[:i][-1:]) for i, name in enumerate(above)]
    end = tree.grow("end", 100, "c")
    other = tree.grow("other", 400)
    for _ in range(3):
        tree.checkpoints.use(end)
    tree.grow("once", 60)
    tree.grow("once more", 60)
    left = list(tree.checkpoints.all.values())
    assert end in left and other in left and sum(each in left for each in inner) <= 2


def test_the_least_worth_goes_and_all_later_uses_begin_above_it() -> None:
    tree = Tree()
    small, large = tree.grow("small", 10), tree.grow("large", 500)
    assert tree.policy.victim([small, large]) is small
    level = tree.policy.level
    assert level == HALF * 10 / (STATE + 10 * PAGES)
    tree.checkpoints.drop(small)
    tree.checkpoints.use(large)
    assert large.value == level and tree.grow("next", 10).value == level
    assert large.stamp < tree.grow("later", 1).stamp


def test_what_is_used_outlives_what_is_worth_more_and_is_not() -> None:
    tree = Tree(rows=8)
    used, idle = tree.grow("used", 40), tree.grow("idle", 200)
    for i in range(60):
        tree.checkpoints.use(used)
        tree.grow(f"new {i}", 30)
    assert used in tree.checkpoints.all.values() and idle not in tree.checkpoints.all.values()


def test_only_the_one_that_was_used_is_refreshed() -> None:
    tree = Tree()
    above, below = tree.grow("above", 100), tree.grow("below", 100, "above")
    tree.policy.level = 5.0
    tree.checkpoints.use(below)
    assert (above.value, below.value) == (0.0, 5.0)


def test_ends_of_turns_go_first_once_they_have_waited_unless_they_are_used() -> None:
    tree = Tree(rows=4)
    trial, worthless = tree.grow("trial", 900, kind="turn"), tree.grow("worthless", 1)
    used = tree.grow("used", 900, kind="turn")
    tree.checkpoints.use(used)
    fresh = tree.grow("fresh", 900, kind="turn")
    tree.grow("more", 5)
    left = tree.checkpoints.all.values()
    assert trial not in left and worthless in left and used in left
    tree.grow("and more", 5)
    assert fresh in left and used in left and worthless not in left, "it had no time to be used"


def test_chances_are_shares_of_what_became_of_others_like_it() -> None:
    fates = Fates()
    assert fates.chance("reply", 0) == fates.chance("grid", 5) == HALF
    for again in (True, True, True, False):
        fates.note("reply", 0, again)
    assert fates.chance("reply", 0) == (3 + BELIEVED / 2) / (4 + BELIEVED)
    assert fates.chance("grid", 0) == fates.chance("reply", 1) == HALF, "others say nothing about it"
    fates.note("reply", OFTEN + 7, False)
    assert fates.chance("reply", OFTEN) == fates.chance("reply", OFTEN + 1) < HALF


def test_chances_follow_the_requests() -> None:
    """Whatever was seen before, after twice as many others as are remembered it hardly counts."""
    fates = Fates()
    for _ in range(10_000):
        fates.note("grid", 0, True)
    assert fates.chance("grid", 0) > 0.95
    for _ in range(2 * int(REMEMBERED)):
        fates.note("grid", 0, False)
    assert 0 < fates.chance("grid", 0) < 0.1


def test_what_is_cut_away_says_nothing_about_its_kind() -> None:
    """A branch that gave no numbers, or that was forgotten, was not dropped for want of use."""
    tree = Tree(rows=1)
    tree.checkpoints.drop(tree.grow("forgotten", 5))
    assert tree.policy.fates.chance("message", 0) == HALF
    tree.grow("first", 5)
    tree.grow("second", 5)
    assert tree.policy.fates.chance("message", 0) < HALF


def test_texts_that_come_once_do_not_drive_out_what_is_asked_for_again() -> None:
    """Eight documents are asked about in turn, and five texts that come once lie between two questions: forty between
    two about one document, in sixteen rows. By last use, or by worth without chances, hardly one is ever found.
    """
    tree, found = Tree(rows=16), []
    documents = [tree.grow(f"document {i}", 50, kind="branch") for i in range(8)]
    for i in range(1200):
        if i % 5 == 0:
            asked = documents[i // 5 % 8]
            found.append(asked in tree.checkpoints.all.values())
            if not found[-1]:
                asked = documents[i // 5 % 8] = tree.grow(f"document {i // 5 % 8}", 50, kind="branch")  # read again
            else:
                tree.checkpoints.use(asked)
        tree.grow(f"once {i}", 60, kind="grid")
    assert all(found[-80:]), f"{sum(found)} of {len(found)} were found"


def test_what_is_always_used_in_the_end_is_kept_before_its_first_use() -> None:
    """Chats: each turn leaves a state that the next one takes up, a while later. Texts that come once lie between, of
    another kind; they save more for their bytes, and the chats' states outlive them all the same.
    """
    tree, found = Tree(rows=24), []
    waiting = [tree.grow(f"chat {i}", 20, kind="reply") for i in range(8)]
    for i in range(600):
        if i % 4 == 0:
            turn = waiting.pop(0)
            found.append(turn in tree.checkpoints.all.values())
            if found[-1]:
                tree.checkpoints.use(turn)
            waiting.append(tree.grow(f"turn {i}", 20, kind="reply"))
        tree.grow(f"once {i}", 60, kind="grid")
    assert all(found[-100:]) and not all(found)  # it had to be learned


def test_what_is_pinned_stays_and_is_half_at_the_most() -> None:
    tree = Tree(rows=2)
    pinned = tree.grow("pinned", 1)
    pinned.pins += 1
    for i in range(5):
        tree.grow(f"new {i}", 100)
    assert pinned in tree.checkpoints.all.values()
    assert [may_pin(n, 1, 8) for n in range(6)] == [True, True, True, True, False, False]


def test_the_policy_has_a_name() -> None:
    assert ReuseConfig().policy == "value" and ReuseConfig(policy="lru").policy == "lru"
    with pytest.raises(HybridKVError, match="policy must be value or lru, not 'random'"):
        ReuseConfig(policy="random")


# ---- traces


@pytest.mark.parametrize("name", TRACES)
def test_traces_are_the_same_for_a_seed(name: str) -> None:
    if name in ("chat", "documents"):
        assert TRACES[name](5) == TRACES[name](5) != TRACES[name](6)
    for asked in TRACES[name](5)[:40]:
        assert all(0 < at <= asked.tokens for at, _ in asked.marks) and asked.answer
        assert [kind for _, kind in asked.marks].count("reply") == 1


def test_the_simulator_finds_what_prompts_share() -> None:
    """Without a limit a chat reads each answer and question once more, and an agent the results of its calls."""
    talks = chat(1, conversations=6)
    found = Simulator(0).run(talks)
    assert found.prompts == sum(asked.tokens for asked in talks) and 0.7 < found.share < 0.95
    loops = agent(1, agents=2)[:60]
    tails, without = (Simulator(0, tails=each).run(loops) for each in (True, False))
    assert without.share < tails.share and tails.share > 0.9


def test_the_simulator_keeps_to_its_bytes_and_counts() -> None:
    sizes, rng = Sizes(64, 1 << 10, 1 << 17), random.Random(1)
    for policy in ("value", "lru"):
        simulator = Simulator(20 << 20, policy, sizes=sizes)
        for asked in rng.sample(documents(1), 60):
            simulator.ask(asked)
            assert simulator.nbytes <= simulator.limit
        simulator.columns.check()
        simulator.checkpoints.check()
        assert simulator.checkpoints.dropped["pages"] > 0


def test_documents_outlast_prompts_that_come_once() -> None:
    """512 of 6,000 tokens each, mixed into 300 questions, in 16 GiB; columns of 256 tokens, for speed."""
    alone, crowded = lost_to_strangers(range(1, 4), 16 << 30, sizes=Sizes(q=256))
    assert alone - crowded < 0.05, (alone, crowded)


@pytest.mark.long
@pytest.mark.parametrize("gib", [16, 6])
@pytest.mark.parametrize("name", TRACES if LONG else ["chat", "documents"])
def test_by_value_no_more_is_read_than_by_last_use(name: str, gib: int) -> None:
    """Nowhere more than a point below it, and clearly above where memory is short; columns of 256 tokens, for speed."""
    sizes, seeds = Sizes(q=256), (1, 2, 3) if LONG else (1,)
    traces = [TRACES[name](seed) for seed in seeds]
    value, lru = (
        [Simulator(gib << 30, policy, policy == "value", sizes=sizes).run(trace).share for trace in traces]
        for policy in ("value", "lru")
    )
    assert sum(value) > sum(lru) - 0.01 * len(seeds), (value, lru)
    if gib == 6 and name in ("chat", "documents"):
        assert sum(value) > sum(lru) + 0.01 * len(seeds), (value, lru)
