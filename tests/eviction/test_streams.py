"""Many compacted streams beside each other: forks, random survivors, batched decode, pages that nobody loses."""

from collections.abc import Callable

import numpy as np
import pytest
import tiny
import torch
from numerics import assert_same_bytes, logit_gap

from eviction.harness import NEVER, MaskedRun, Run
from hybridkv.errors import OutOfPages

KINDS = ("llama", "qwen3_5")
ROUNDING = 5e-5  # f32 through sums in two orders, single tokens beside chunks: 1.3e-5 seen


def random_keep(run: Run, rng: np.random.Generator, key: object = "r", low: int = 1) -> dict[int, list[np.ndarray]]:
    """Ascending lists of random length for each stream."""
    G, lengths = run.model.config.kv_heads, run.manager.lengths(key)["attention"]
    return {
        layer: [
            np.sort(rng.choice(n, rng.integers(min(low, n), n + 1), replace=False))
            for n in lengths[i * G : (i + 1) * G]
        ]
        for i, layer in enumerate(run.layers)
    }


def together(run: Run, keys: list[object], tokens: list[list[int]]) -> torch.Tensor:
    """One token of each request a step, all in one batch -> [steps, requests, vocab]."""
    steps = []
    for part in zip(*tokens, strict=True):
        plan = [(key, 1) for key in keys]
        step = run.manager.prepare_forward(plan)
        inputs = run.runner.inputs([[t] for t in part], range(len(keys)), step)
        steps.append(run.runner.forward(inputs))
        run.manager.commit(plan)
    return torch.stack(steps)


@pytest.mark.parametrize("dtype", ("f32", "fp8"))
@pytest.mark.parametrize(("kind", "requests"), (("llama", 11), ("qwen3_5", 16)))
def test_64_streams_with_random_survivors(kind: str, requests: int, dtype: str, run_of: Callable) -> None:
    rng = np.random.default_rng(5)
    run = run_of(kind, context=256, slots=requests + 1, pool=requests * 200, kv_dtype=dtype)
    keys = list(range(requests))
    prompts = [tiny.token_ids(int(rng.integers(20, 120)), seed=key) for key in keys]
    firsts = []
    for key, ids in zip(keys, prompts):
        run.admit(key)
        firsts.append(run.feed(ids, 64, key))
        run.keep(random_keep(run, rng, key), key)
        run.manager.check_integrity()
    lengths = np.concatenate([run.manager.lengths(key)["attention"] for key in keys])
    assert len(lengths) >= 64 and len(set(lengths.tolist())) > 20
    # not a page more than the survivors fill
    assert run.manager.tables["attention"].allocator.held == (-(-lengths // 16)).sum()
    more = [tiny.token_ids(8, seed=100 + key) for key in keys]
    got = together(run, keys, more)
    for key in keys[:: 1 if dtype == "f32" else 5]:
        masked = MaskedRun(run.model, run.config, run.drops[key], 256)
        first, want = masked.feed(prompts[key], 64), masked.feed(more[key], 1)
        bound = ROUNDING if dtype == "f32" else 5e-2
        assert logit_gap(first, firsts[key]) < bound and logit_gap(want, got[:, key]) < bound
    for key in keys:
        run.manager.release_request(key)
    run.manager.release_request("r")
    assert run.manager.tables["attention"].allocator.held == 0
    run.manager.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
def test_compacted_again_and_again(kind: str, run_of: Callable) -> None:
    """Five rounds of growing and cutting, with chunks between, against one masked cache."""
    rng, run = np.random.default_rng(1), run_of(kind)
    ids = tiny.token_ids(300)
    got, at = [run.feed(ids[:60])], 60
    for n in (1, 40, 7, 64, 30):
        run.keep(random_keep(run, rng, low=10))
        got.append(run.feed(ids[at : at + n], 32))
        at += n
        run.manager.check_integrity()
    masked = MaskedRun(run.model, run.config, run.drops["r"])
    assert logit_gap(masked.feed(ids[:at], 16), torch.cat(got)) < ROUNDING


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", ("compact then fork", "fork then compact"))
def test_forks_and_compaction_do_not_touch_each_other(kind: str, first: str, run_of: Callable) -> None:
    rng, run = np.random.default_rng(2), run_of(kind)
    ids = tiny.token_ids(100)
    run.feed(ids)
    if first == "compact then fork":
        run.keep(random_keep(run, rng, low=10))
    run.manager.fork_request("r", "f")
    run.drops["f"] = {layer: each.copy() for layer, each in run.drops["r"].items()}
    before = {(layer, g): run.stream(layer, g, "f") for layer in run.layers for g in range(2)}
    run.keep(random_keep(run, rng, low=10))  # pages are shared: the fork must not see this
    for (layer, g), was in before.items():
        for name in was:
            assert_same_bytes(was[name], run.stream(layer, g, "f")[name])
    run.manager.check_integrity()
    more = {"r": tiny.token_ids(20, seed=1), "f": tiny.token_ids(20, seed=2)}
    got = together(run, ["r", "f"], list(more.values()))
    run.keep(random_keep(run, rng, "f", low=10), "f")
    tail = tiny.token_ids(6, seed=3)
    last = {key: run.feed(tail, 1, key) for key in more}
    for i, key in enumerate(more):
        masked = MaskedRun(run.model, run.config, run.drops[key])
        masked.feed(ids)
        want = masked.feed(more[key], 1)
        assert logit_gap(want, got[:, i]) < ROUNDING
        assert logit_gap(masked.feed(tail, 1), last[key]) < ROUNDING
    run.manager.release_request("r")
    run.manager.release_request("f")
    assert run.manager.tables["attention"].allocator.held == 0


def test_compacting_shared_pages_without_room_changes_nothing(run_of: Callable) -> None:
    from cache.machine_model import snapshot as facts

    run = run_of("llama", pool=112)  # 7 pages a stream
    run.feed(tiny.token_ids(96))  # 6 of them
    run.manager.fork_request("r", "f")
    keep = {layer: [np.arange(0, 96, 2)] * 2 for layer in run.layers}  # 3 fresh pages a stream, 1 is free
    before = facts(run.manager)
    with pytest.raises(OutOfPages):
        run.manager.compact_request("r", keep)
    assert facts(run.manager) == before and not run.manager.compactions
    run.manager.release_request("f")
    assert run.manager.compact_request("r", keep) == 3 * 6


def test_a_failure_while_moving_loses_no_page(run_of: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("llama")
    run.feed(tiny.token_ids(96))
    run.manager.fork_request("r", "f")
    pool = run.manager.tables["attention"].pool
    monkeypatch.setattr(pool, "move_entries", _no_memory)
    with pytest.raises(MemoryError):
        run.manager.compact_request("r", {layer: [np.arange(20)] * 2 for layer in run.layers})
    run.manager.check_integrity()
    run.manager.release_request("r")
    run.manager.release_request("f")
    assert run.manager.tables["attention"].allocator.held == 0


def _no_memory(*args: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("kind", KINDS)
def test_one_entry_more_in_one_stream_shows(kind: str, run_of: Callable) -> None:
    """The bound of these comparisons is far below what one wrong entry of one head changes."""
    rng, run = np.random.default_rng(4), run_of(kind)
    ids, tail = tiny.token_ids(90), tiny.token_ids(6, seed=3)
    run.feed(ids)
    run.keep(random_keep(run, rng, low=10))
    got = run.feed(tail, 1)
    wrong = {layer: dropped.copy() for layer, dropped in run.drops["r"].items()}
    first = wrong[run.layers[0]][0]
    first[np.flatnonzero(first != NEVER)[0]] = NEVER
    masked = MaskedRun(run.model, run.config, wrong)
    masked.feed(ids)
    assert logit_gap(masked.feed(tail, 1), got) > 4 * ROUNDING
