"""What a request remembers of its evictions: the same lists, in few bytes, and counted."""

from collections.abc import Callable

import numpy as np
import pytest
import tiny
import torch

from engine.driving import assert_nothing_held, run
from hybridkv.config import EvictionConfig, SamplingParams
from hybridkv.errors import RequestError
from hybridkv.eviction import LayerCache, Policy, SnapKV
from hybridkv.eviction_record import EvictionRecord

SAY = SamplingParams(max_tokens=12, ignore_eos=True)


def keep_of(lengths: np.ndarray, share: float, seed: int = 0) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [[np.sort(rng.choice(n, max(1, int(n * share)), replace=False)) for n in row] for row in lengths.tolist()]


@pytest.mark.parametrize("share", (0.01, 0.3, 0.9, 0.995, 1.0))
@pytest.mark.parametrize("shape", ((1, 1), (3, 2)))
def test_a_record_gives_back_the_lists(share: float, shape: tuple[int, int]) -> None:
    lengths = np.random.default_rng(1).integers(1, 700, shape)
    keep = keep_of(lengths, share)
    record = EvictionRecord(keep, lengths)
    assert len(record) == len(keep)
    for _ in range(3):  # as it was given, packed, and packed again
        for want, got in zip(keep, record, strict=True):
            for a, b in zip(want, got, strict=True):
                assert b.dtype == np.int64 and np.array_equal(a, b)
        record.pack()


def test_a_record_is_small() -> None:
    """Whatever was kept: no more than a bit an entry, or four bytes for each that stays or goes."""
    lengths = np.full((4, 8), 6144)
    for share in (0.002, 1 / 3, 0.998):
        keep = keep_of(lengths, share)
        kept = sum(len(entries) for row in keep for entries in row)
        total = int(lengths.sum())
        record = EvictionRecord(keep, lengths)
        record.pack()
        assert record.nbytes <= min(total / 8 + 1, 4 * kept, 4 * (total - kept)) + 4 * lengths.size
    # a budget of 2048 in steps of 4096, as lists of int64: 16 KiB a stream; packed under 1 KiB
    record = EvictionRecord(keep_of(lengths, 1 / 3), lengths)
    record.pack()
    assert record.nbytes < 1024 * lengths.size


def test_many_evictions_of_an_answer_take_little_and_are_counted(evicting: Callable) -> None:
    engine = evicting("llama", budget=40, decode_every=4)
    request = engine.add(tiny.token_ids(60), SamplingParams(max_tokens=80, ignore_eos=True))
    run(engine)
    streams = engine.manager.tables["attention"].schema.streams
    assert len(request.evictions) > 15
    lists = len(request.evictions) * streams * 40 * 8  # what int64 lists of the survivors would take
    assert 0 < request.stats["eviction_record_bytes"] < lists / 8


@pytest.mark.parametrize("packed", (False, True), ids=("lists", "packed"))
def test_two_evictions_at_one_position_are_one_record(packed: bool) -> None:
    """A record says which entries stay of what was there: the second's numbers are of the first's survivors."""
    rng = np.random.default_rng(4)
    lengths = np.array([[50, 40], [30, 45]])
    first = [[np.sort(rng.choice(n, 20, replace=False)) for n in layer] for layer in lengths]
    second = [[np.sort(rng.choice(20, rng.integers(1, 20), replace=False)) for _ in layer] for layer in lengths]
    one, two = EvictionRecord(first, lengths), EvictionRecord(second, np.full((2, 2), 20))
    if packed:
        one.pack()
        two.pack()
    both = one.then(two)
    for i in range(2):
        for g in range(2):
            assert both[i][g].tolist() == [first[i][g][j] for j in second[i][g]]
    assert (both.lengths == lengths).all() and both.counts().tolist() == two.counts().tolist()
    assert both.kept == two.kept and one.counts().tolist() == [[20, 20], [20, 20]], "the first stays as it was"


# ---- what a request asks for itself


def test_requests_side_by_side_keep_what_each_asked_for(evicting: Callable) -> None:
    asked = [EvictionConfig(40, 8, 8), EvictionConfig(24, 8, 8, policy="streaming"), None]
    prompts = [tiny.token_ids(100, seed=i) for i in range(3)]

    def answers(together: bool) -> list[tuple[list[int], float]]:
        found = []
        engine = evicting("llama", budget=64, pool=2000)
        requests = []
        for ids, eviction in zip(prompts, asked, strict=True):
            requests.append(engine.add(ids, SAY, eviction=eviction))
            if not together:
                run(engine)
        run(engine)
        for request in requests:
            kept = request.evictions[100].kept if request.evictions else 100
            found.append((request.generated, kept))
        assert_nothing_held(engine)
        return found

    alone, beside = answers(False), answers(True)
    assert alone == beside and [kept for _, kept in alone] == [40, 24, 100]


def test_what_the_cache_was_not_planned_for_is_refused(evicting: Callable) -> None:
    engine = evicting("llama", budget=64)
    with pytest.raises(RequestError, match=r"a window of 100 queries .* CacheConfig\(window=100\)"):
        engine.add([1, 2], SAY, eviction=EvictionConfig(64, window=100))
    for bad in ("64", 64.0, True, [64]):
        with pytest.raises(RequestError, match="EvictionConfig, a budget in tokens, or None"):
            engine.add([1, 2], SAY, eviction=bad)
    with pytest.raises(RequestError, match=r"not stored in this cache.*query_buffers=1"):
        evicting("llama").add([1, 2], SAY, eviction=EvictionConfig(64))


@pytest.mark.parametrize(
    "problem", (RuntimeError("a mistake of the policy"), MemoryError(), torch.OutOfMemoryError("CUDA out of memory"))
)
def test_an_eviction_that_fails_ends_its_request_alone(problem: Exception, evicting: Callable) -> None:
    class Failing(SnapKV):
        def score(self, layer: LayerCache) -> torch.Tensor:
            raise problem

    engine = evicting("qwen3_5", budget=40, pool=900)
    bad = engine.add(tiny.token_ids(150), SAY, eviction=EvictionConfig(40, 8, 8, policy=Failing()))
    good = engine.add(tiny.token_ids(120, seed=3), SAY)
    run(engine)
    assert bad.finish_reason == "error" and "eviction failed" in str(bad.error)
    assert good.finish_reason == "length" and good.evictions
    assert_nothing_held(engine)


def test_a_failure_while_entries_move_ends_its_request_alone(
    evicting: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = evicting("llama", budget=40, pool=900)
    pool = engine.manager.tables["attention"].pool
    move, calls = pool.move_entries, [0]

    def failing(*args: object) -> None:
        calls[0] += 1
        if calls[0] == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        move(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(pool, "move_entries", failing)
    bad, good = engine.add(tiny.token_ids(150), SAY), engine.add(tiny.token_ids(120, seed=3), SAY)
    run(engine)
    assert bad.finish_reason == "error" and "out of memory" in str(bad.error)
    assert good.finish_reason == "length" and good.evictions
    assert_nothing_held(engine)


def test_policies_say_what_they_need() -> None:
    class Own(Policy):
        def budgets(self, *args: object) -> np.ndarray:
            return np.ones(1)

    class Scores(SnapKV):
        def score(self, layer: LayerCache) -> torch.Tensor:
            return super().score(layer)

    assert Own.spread == "heads" and SnapKV.spread is None
    assert SnapKV.batchable and not Scores.batchable  # a score of one's own may look at more than one stream
