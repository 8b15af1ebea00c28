"""Evictions over ranks keep what one rank keeps, whichever policy chooses, and ranks never part over their pages.

Lists are compared entry for entry. Keys and queries of two ranks differ from those of one in their last bits, so an
entry near a tie might be another one; none is in these texts, and in exact mode none can be.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import rank_jobs
import ranks
import tiny
from long_form import LONG, more
from tiny_ranks import build

from hybridkv.errors import RequestError
from hybridkv.eviction import Ada, All, Peak, Policy, Pyramid, SnapKV
from hybridkv.eviction.over_ranks import OverRanks
from hybridkv.eviction.policy_words import policy_of_words, policy_words
from hybridkv.parallel.group import Alone

Case = dict[str, Any]
TEXT = tiny.token_ids(400, seed=3)
# by themselves, sharing a budget in a layer or in all, by layers
NAMES = (
    "auto", "peak", "heads", "snapkv", "tova", "knorm", "keydiff", "leverage", "streaming", "random",
    "peak:spread=even", "snapkv:spread=layer", "random:spread=layer", "tova:spread=all", "snapkv:spread=pyramid",
)  # fmt: skip
SCOPED = ("peak", "snapkv", "tova", "random", *more("heads", "keydiff", "knorm", "leverage", "streaming"))


def case(policy: str, length: int = 150, max_tokens: int = 2, turn: bool = False, n: int = 1, **eviction: Any) -> Case:
    """A request, and its next turn if it has one."""
    made = dict(prompt=TEXT[:length], max_tokens=max_tokens, n=n, eviction=dict(budget=40, policy=policy, **eviction))
    return made | ({"turn": TEXT[300:340]} if turn else {})


BY_POLICY = [case(name) for name in NAMES]
BY_SCOPE = [case(name, scope=scope) for scope in ("layer", "global") for name in SCOPED]
AGAIN = [
    *(case(name, 300, 3, bounded=True) for name in ("auto", "snapkv", *more("random:spread=layer"))),
    *(case(name, 100, 9, decode_every=4) for name in ("auto", "snapkv", *more("tova:spread=layer"))),
    *(case(name, 120, 3, turn=True) for name in ("auto", *more("snapkv"))),
]
FEW = [case(name) for name in ("auto", "snapkv", "tova", "random", "snapkv:spread=layer")] + AGAIN[:1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`folder(kind, KV heads)`: a tiny model of eight query heads. `lopsided`: its first four look at few entries each,
    so that their streams win more of a budget that all share.
    """

    @cache
    def made(kind: str, heads: int, lopsided: bool = False) -> Path:
        place = tmp_path_factory.mktemp(f"{kind}{heads}")
        model = build(kind, 5, num_key_value_heads=heads)
        for layer in model.model.layers if lopsided else ():
            rows = layer.self_attn.q_proj.weight.data
            rows[: len(rows) // 2] *= 8
        model.save_pretrained(place)
        return place

    return made


def unlike(want: dict[str, Any], found: list[dict[str, Any]], kv_heads: int) -> list[Any]:
    """Evictions whose lists differ: (request, position), or the request alone if it was evicted elsewhere."""
    each = found[:: max(1, len(found) // kv_heads)]  # ranks that hold different heads
    wrong: list[Any] = []
    for i, lists in enumerate(want["kept"]):
        parts = [rank["kept"][i] for rank in each]
        if any(part.keys() != lists.keys() for part in parts):
            wrong.append(i)
            continue
        for at, layers in lists.items():
            joined = [[entries for part in parts for entries in part[at][layer]] for layer in range(len(layers))]
            wrong += [(i, at)] if joined != layers else []
    return wrong


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "kv_heads", "size", "cases"),
    [
        pytest.param("llama", 4, 2, BY_POLICY + BY_SCOPE + AGAIN, id="more KV heads than ranks"),
        pytest.param("llama", 1, 2, BY_POLICY + AGAIN[:2], id="one KV head on two ranks"),
        pytest.param("qwen3_5", 2, 4, FEW, id="two KV heads on four ranks"),
    ],
)
def test_lists_and_answers_are_those_of_one_rank(
    kind: str, kv_heads: int, size: int, cases: list[Case], folder: Callable[..., Path]
) -> None:
    path = folder(kind, kv_heads)
    want = rank_jobs.evictions(Alone(), str(path), cases)
    assert all(want["kept"]) and all(error is None for error, _ in want["answers"])
    found = ranks.run(size, "evictions", path=path, cases=cases)
    assert unlike(want, found, kv_heads) == []
    assert found[0]["answers"] == want["answers"]
    assert all(rank["means"] == want["means"] for rank in found)  # of the streams of all ranks, on each


@pytest.mark.parametrize("kv_heads", (4, *more(1)))
def test_exact_mode_goes_on_with_the_same_bits(kv_heads: int, folder: Callable[..., Path]) -> None:
    path = folder("llama", kv_heads)
    cases = [given | {"logprobs": 3} for given in (case("auto", max_tokens=4), case("tova"), AGAIN[0])]
    want = rank_jobs.evictions(Alone(), str(path), cases, exact=True)
    found = ranks.run(2, "evictions", path=path, cases=cases, exact=True)
    assert unlike(want, found, kv_heads) == []
    assert found[0]["logprobs"] == want["logprobs"]


@pytest.mark.parametrize(
    ("fault", "kv_heads", "given"),
    [
        ("scores are not gathered", 4, case("snapkv", scope="layer")),
        ("scores are not gathered", 4, case("snapkv:spread=layer")),
        ("scores are not gathered", 4, case("tova")),
        ("peaks are not compared", 4, case("peak:spread=even")),
        ("queries are not gathered", 1, case("snapkv")),
    ],
)
def test_what_is_left_out_is_seen(fault: str, kv_heads: int, given: Case, folder: Callable[..., Path]) -> None:
    """Negative controls of the tests above."""
    path = folder("llama", kv_heads)
    want = rank_jobs.evictions(Alone(), str(path), [given])
    assert unlike(want, ranks.run(2, "evictions", path=path, cases=[given], fault=fault), kv_heads) == [(0, 150)]


def test_what_streams_decide_by_themselves_is_not_exchanged(folder: Callable[..., Path]) -> None:
    """Beside two flags for each eviction: that every rank has chosen, and has room."""
    names = ("snapkv", "keydiff", "snapkv:spread=pyramid")
    cases = [*(case(name, 100) for name in names), case("snapkv", 100, scope="layer")]
    alone, *others = ranks.run(2, "count_evictions", path=folder("llama", 4), cases=cases)
    assert alone == [2, 2, 2, 4]  # lengths and scores of all heads
    assert others == [alone]


CROWD = [
    case(name, 100 + 5 * i, 40, n=1 + i % 2)
    for i, name in enumerate(("snapkv:spread=layer", "auto", "snapkv:spread=all:floor=0", "keydiff"))
]


def test_the_fullest_rank_decides_who_is_preempted(folder: Callable[..., Path]) -> None:
    """Few pages, of which ranks need unlike numbers. Everything that was evicted is evicted again."""
    path = folder("llama", 4, lopsided=True)
    want = rank_jobs.evictions(Alone(), str(path), CROWD, together=True)
    found = ranks.run(2, "evictions", path=path, cases=CROWD, together=True, pages=36)
    assert found[0]["preempted"] == found[1]["preempted"] > 0 and found[0]["uneven"]
    kept = [[sum(len(e) for layer in lists for e in layer) for lists in r["kept"][0].values()] for r in found]
    assert kept[0][0] > kept[1][0] + 20  # entries, in pages of 4
    assert unlike(want, found, 4) == [] and found[0]["answers"] == want["answers"]


def test_ranks_that_go_by_their_own_pages_are_seen(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "LIMIT", 5.0)
    how = dict(cases=CROWD, together=True, pages=36, fault="each rank goes by its own pages")
    _, codes, errors = ranks.attempt(2, "evictions", path=folder("llama", 4, lopsided=True), **how)
    assert codes == [1, 1] and all("GroupError" in said for said in errors)


def test_a_rank_without_scores_ends_the_request_and_no_other(folder: Callable[..., Path]) -> None:
    cases = [case("keydiff", 160), case("keydiff", 120)]
    found = ranks.run(2, "evictions", path=folder("llama", 4), cases=cases, fault="a rank has no score")
    (error, tokens), (none, more) = found[0]["answers"]
    assert error == "eviction failed: rank 1 could not choose what to keep" and not tokens
    assert none is None and len(more) == 2
    assert [rank["means"] for rank in found] == [[[], [40.0]]] * 2


@pytest.mark.long
@pytest.mark.parametrize("seed", (1, *more(2, 3)))
@pytest.mark.parametrize("policies", ("shared", "even"))
@pytest.mark.parametrize("ahead", (False, *more(True)))
def test_random_events_never_part_the_ranks(policies: str, ahead: bool, seed: int, folder: Callable[..., Path]) -> None:
    how = dict(seed=seed, events=3000 if LONG else 90, policies=policies, ahead=ahead)
    found = ranks.run(2, "random_evictions", path=folder("llama", 4), **how)
    assert found[0] == found[1] and found[0][0] > 30


def test_a_policy_is_told_by_its_name_and_settings() -> None:
    for policy in ("auto", "peak:ahead=3", Ada(SnapKV("max", 7), floor=0.5), All(Pyramid(Peak(shared=False)))):
        assert policy_of_words(policy_words(policy)) == policy

    class Own(Policy):
        pass

    for policy in (Own(), Ada(Own())):
        with pytest.raises(RequestError, match="policy Own is code of your own"):
            policy_words(policy)


@pytest.mark.parametrize(("heads", "size"), ((8, 2), (4, 4), (2, 8), (1, 2)))
def test_every_rank_knows_its_heads(heads: int, size: int) -> None:
    class Rank(Alone):
        def __init__(self, rank: int) -> None:
            self.rank, self.size = rank, size

    held = [range(heads)[OverRanks(Rank(rank), heads).own] for rank in range(size)]
    assert [list(part) for part in held] == [
        list(range(rank * heads // size, max(rank * heads // size + 1, (rank + 1) * heads // size)))
        for rank in range(size)
    ]
