"""What is asked of ranks between steps, and what rank 0 alone decides: grammars, hooks, forks, evictions, logits."""

import math
from pathlib import Path
from typing import Any

import pytest
import rank_jobs
import ranks
import torch
from tiny_ranks import build

from hybridkv.parallel.group import Alone

KV_HEADS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens are bytes."""
    place = tmp_path_factory.mktemp("calls")
    build("llama", 5, num_key_value_heads=KV_HEADS, vocab_size=300).save_pretrained(place)
    return place


def both(folder: Path, script: str) -> tuple[list[Any], list[Any]]:
    """What one rank gives, holds and has free, and what each of two does."""
    return rank_jobs.calls(Alone(), str(folder), script), ranks.run(2, "calls", path=folder, script=script)


def test_answers_follow_a_grammar_that_rank_0_has(folder: Path) -> None:
    (want, _, free), found = both(folder, "bound")
    assert found[0][0] == want and [rank[2] for rank in found] == [free, free]
    assert want[0][3] in ("yes", "no") and want[1][3].startswith("{")
    assert "structured output failed" in want[-1][0]


def test_a_text_is_read_again_on_all_ranks_and_its_scores_are_forgotten(folder: Path) -> None:
    (want, _, free), found = both(folder, "replayed")
    assert found[0][0] == want and [rank[2] for rank in found] == [free, free]
    lists = [heads for cut in want[1:3] for layers in cut.values() for heads in layers]
    assert len({len(entries) for heads in lists for entries in heads}) > 2, "the heads kept equally many"


def test_a_logits_hook_is_run_where_tokens_are_drawn(folder: Path) -> None:
    (want, _, _), found = both(folder, "hooked")
    assert found[0][0] == want
    assert want[0][1] == [40, 41, 42, 43, 44, 45] and "on purpose" in want[1][0]


def test_logits_of_a_text_are_those_of_one_rank(folder: Path) -> None:
    (want, _, _), found = both(folder, "score")
    assert torch.equal(want[2], found[0][0][2])  # the answer of the request that ran beside it
    for one, other in zip(want[:2], found[0][0][:2], strict=True):
        # as in test_parity.py: a sum in parts differs in its last bits
        assert float((one - other).abs().max()) <= 1e-5 * float(one.abs().max())


@pytest.mark.parametrize(("kv_heads", "size"), ((KV_HEADS, 2), (1, 2), pytest.param(2, 4, marks=pytest.mark.slow)))
def test_what_evictions_kept_is_told_of_all_heads_in_their_order(
    kv_heads: int, size: int, folder: Path, tmp_path: Path
) -> None:
    """A KV head that lies on several ranks is there once. What nobody holds any more hurts nobody."""
    path = folder
    if kv_heads != KV_HEADS:
        path = tmp_path
        build("llama", 5, num_key_value_heads=kv_heads, vocab_size=300).save_pretrained(path)
    want, _, free = rank_jobs.calls(Alone(), str(path), "recorded")
    found = ranks.run(size, "calls", path=path, script="recorded")
    told = found[0][0]
    # one rank knows what was let go as long as its caller does
    assert (want.pop(), told.pop()) == (4, "refused")
    assert told == want and [rank[2] for rank in found] == [free] * size
    first, after = want[3], want[5]
    assert len(first) == 3 and want[4] == {} and after.keys() == first.keys() | {127}
    assert all(len(layer) == kv_heads for lengths, lists in first.values() for layer in (*lengths, *lists))
    assert want[6] is True and "an answer is still being written" in want[7]


@pytest.mark.parametrize(("kv_heads", "size"), ((KV_HEADS, 2), (1, 2)))
def test_requests_go_on_from_a_held_text_on_all_ranks(kv_heads: int, size: int, folder: Path, tmp_path: Path) -> None:
    """The others hold it as long as a caller of rank 0 has it, also when its cache was given up."""
    path = folder
    if kv_heads != KV_HEADS:
        path = tmp_path
        build("llama", 5, num_key_value_heads=kv_heads, vocab_size=300).save_pretrained(path)
    want, _, free = rank_jobs.calls(Alone(), str(path), "prefixed")
    found = ranks.run(size, "calls", path=path, script="prefixed")
    assert found[0][0] == want and [rank[2] for rank in found] == [free] * size
    cached = [each for each in want if isinstance(each, list) and isinstance(each[0], int)]
    assert cached == [[120, 120], [120], [0], [121]]


def test_what_may_follow_a_held_text_is_bounded_by_the_fullest_rank(folder: Path) -> None:
    """A question that one rank took and another refused would end the group."""
    (want, _, free), found = both(folder, "bounds")
    longest, everywhere, answer = found[0][0]
    own, other = torch.tensor(everywhere, dtype=torch.float32).unflatten(1, (2, -1)).mean((0, 2)).tolist()
    assert own < 60 < other and other > own + 2, "the rank that is told must be the fuller one"
    assert (
        longest == want[0] - math.ceil(other - 60) and answer == want[2] and [rank[2] for rank in found] == [free, free]
    )


def test_logits_after_a_held_cache_are_those_of_one_rank(folder: Path) -> None:
    (want, _, free), found = both(folder, "scored_after")
    assert [rank[2] for rank in found] == [free, free]
    for one, other in zip(want, found[0][0], strict=True):
        if one.dtype == torch.float32:
            assert one.shape[1] == 300 and float((one - other).abs().max()) <= 1e-5 * float(one.abs().max())
        else:
            assert torch.equal(one, other)


def test_held_caches_are_forked_and_evicted_on_all_ranks(folder: Path) -> None:
    (want, held, free), found = both(folder, "held")
    assert found[0][0] == want and [rank[2] for rank in found] == [free, free]
    parts = [rank[1] for rank in found]
    for number, lists in held.items():
        assert all(part[number].keys() == lists.keys() for part in parts) and len(lists) >= 2
        for at, layers in lists.items():
            joined = [[heads for part in parts for heads in part[number][at][i]] for i in range(len(layers))]
            assert joined == layers


@pytest.mark.parametrize("kind", (pytest.param("llama", marks=pytest.mark.slow), "qwen3_5"))
def test_a_conversation_is_saved_whole_and_brought_back_in_parts(kind: str, folder: Path, tmp_path: Path) -> None:
    """Its cache after an eviction is the one of all heads, wherever they were."""
    path = folder if kind == "llama" else tmp_path
    if kind != "llama":
        build(kind, 5).save_pretrained(path)
    (want, _, free), found = both(path, "saved")
    assert found[0][0] == want and [rank[2] for rank in found] == [free, free]


def test_a_conversation_of_which_one_rank_dropped_nothing_is_saved_and_goes_on(folder: Path) -> None:
    (want, _, free), found = both(folder, "saved_unlike")
    assert found[0][0] == want and [rank[2] for rank in found] == [free, free]


def test_what_is_asked_about_a_cache_that_a_later_turn_took_over_is_answered_as_on_one_rank(folder: Path) -> None:
    (want, _, free), found = both(folder, "taken_over")
    assert found[0][0] == want and [rank[2] for rank in found] == [free, free]
    assert sum("not held any more" in str(each) for each in want) == 2 and want[-1][:2] == [0, 0] and want[-1][2] > 60


@pytest.mark.parametrize("kind", (pytest.param("llama", marks=pytest.mark.slow), "qwen3_5"))
def test_ranks_begin_with_what_others_have_read(kind: str, folder: Path, tmp_path: Path) -> None:
    """Until heads share a budget: the last request finds nothing over ranks, and what one rank finds it evicts too."""
    path = folder if kind == "llama" else tmp_path
    if kind != "llama":
        build(kind, 5).save_pretrained(path)
    (want, _, free), found = both(path, "reused")
    assert found[0][0][:-1] == want[:-1] and [rank[2] for rank in found] == [free, free]
    assert found[0][0][-1][0][0] == 0


def test_what_is_to_be_forgotten_is_forgotten_on_all_ranks(folder: Path) -> None:
    (want, _, free), found = both(folder, "forgotten")
    assert found[0][0] == want and [rank[2] for rank in found] == [free, free]
    assert [cached > 0 for cached in want[:-1]] == [False, True, False, True, False, False, True, True, *[False] * 3]


@pytest.mark.parametrize("kind", (pytest.param("llama", marks=pytest.mark.slow), "qwen3_5"))
def test_what_is_pinned_stays_on_all_ranks_until_it_is_given_back(kind: str, folder: Path, tmp_path: Path) -> None:
    path = folder if kind == "llama" else tmp_path
    if kind != "llama":
        build(kind, 5).save_pretrained(path)
    (want, _, free), found = both(path, "pinned")
    assert found[0][0] == want and [rank[2] for rank in found] == [free, free]
    assert [cached for _, cached in want] == [128, 128, 0]
