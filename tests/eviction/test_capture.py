"""The last W queries are captured as the layers saw them, however a prompt is cut."""

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor

from eviction.harness import Run
from hybridkv.cache import LayerHandle
from hybridkv.eviction.entries import queries_at
from hybridkv.models import attention

KINDS = ("llama", "qwen3_5")
CUTS = {
    "whole": [100],
    "chunks of 64": [64, 36],
    "uneven": [3, 50, 1, 1, 40, 5],
    "window over three chunks": [90, 5, 3, 2],
    "one by one": [1] * 100,
    "shorter than the window": [5, 4],
    "one token": [1],
}


def captured(run: Run, key: object = "r") -> dict[int, Tensor]:
    """Layer -> the last queries in order of position."""
    slot, position = run.manager.slot_of[key], run.manager.position(key)
    rings = {layer: run.manager.state.layer(layer)["queries"][slot] for layer in run.layers}
    when = torch.arange(max(0, position - run.config.window), position)
    return {layer: ring[when % len(ring)].clone() for layer, ring in rings.items()}


def feed(run: Run, ids: list[int], cuts: list[int], monkeypatch: pytest.MonkeyPatch) -> dict[int, Tensor]:
    """Run the chunks; returns every query that each layer attended with, [T, H, D]."""
    seen: dict[int, list[Tensor]] = {layer: [] for layer in run.layers}
    original = attention.attend
    place = run.manager.tables["attention"].schema.place

    def attend(handle: LayerHandle, q: Tensor, *rest: Any) -> Tensor:
        layer = next(x for x in run.layers if place(x)[1] == handle.rows)
        seen[layer].append(q.clone())
        return original(handle, q, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(attention, "attend", attend)
        at = 0
        for cut in cuts:
            run.feed(ids[at : at + cut])
            at += cut
    return {layer: torch.cat(parts) for layer, parts in seen.items()}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_captured_queries_are_those_the_layer_saw(
    kind: str, cuts: list[int], run_of: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(kind, budget=32, window=16)
    seen = feed(run, tiny.token_ids(100), cuts, monkeypatch)
    for layer, ring in captured(run).items():
        assert len(ring) == min(16, sum(cuts))
        assert_same_bytes(seen[layer][-16:], ring)


@pytest.mark.parametrize("kind", KINDS)
def test_chunkings_agree_on_the_captured_queries(kind: str, run_of: Callable) -> None:
    ids = tiny.token_ids(100)
    rings = []
    for cuts in list(CUTS.values())[:5]:
        run, at = run_of(kind, budget=32, window=16), 0
        for cut in cuts:
            run.feed(ids[at : at + cut])
            at += cut
        rings.append(captured(run))
    for other in rings[1:]:
        for layer in rings[0]:
            assert_close_rms("captured queries", rings[0][layer], other[layer], 1e-4)


@pytest.mark.parametrize("window", (1, 7, 16, 64, 100, 200))
def test_any_window(window: int, run_of: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("llama", budget=32, window=window)
    seen = feed(run, tiny.token_ids(100), [40, 60], monkeypatch)
    for layer, ring in captured(run).items():
        assert_same_bytes(seen[layer][-window:], ring)


def test_requests_in_one_step_capture_their_own(run_of: Callable) -> None:
    """Two num_decodes and a chunk in one step, against the same requests alone."""
    ids = {name: tiny.token_ids(60, seed=i) for i, name in enumerate("abc")}
    run = run_of("qwen3_5", budget=32, slots=4)
    for name in "abc":
        run.admit(name)
        run.feed(ids[name][:20], key=name)
    plan = [("b", 1), ("a", 1), ("c", 30)]
    step = run.manager.prepare_forward(plan)
    parts = [ids[name][20 : 20 + n] for name, n in plan]
    run.runner.forward(run.runner.inputs(parts, [0], step))
    run.manager.commit(plan)
    for name, n in plan:
        single = run_of("qwen3_5", budget=32)
        single.feed(ids[name][:20])
        single.feed(ids[name][20 : 20 + n])
        for layer, ring in captured(single).items():
            assert_close_rms(name, ring, captured(run, name)[layer], 1e-4)


def test_capture_goes_on_after_a_compaction_by_position(run_of: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("llama", budget=32, window=16)
    ids = tiny.token_ids(130)
    first = feed(run, ids[:100], [64, 36], monkeypatch)
    run.evict(ids[:100])
    second = feed(run, ids[100:], [25, 1, 4], monkeypatch)
    for layer, ring in captured(run).items():
        assert_same_bytes(torch.cat((first[layer], second[layer]))[-16:], ring)


def test_without_a_budget_nothing_is_captured(run_of: Callable) -> None:
    run = run_of("llama")
    assert not run.manager.schema.states
    assert run_of("llama", budget=32).manager.schema.states[0].name == "queries"


@pytest.mark.parametrize(("first", "stop"), ((0, 3), (5, 13), (16, 24), (10, 18), (15, 16), (7, 7)))
@pytest.mark.parametrize(("dtype", "width"), ((torch.bfloat16, 8), (torch.float32, 5), (torch.float32, 1)))
def test_queries_are_read_in_order_of_position(dtype: torch.dtype, width: int, first: int, stop: int) -> None:
    """Wherever the window begins in its buffer of 8 rows, whatever whole words fit a row."""
    buffers, at = torch.randn(3, 2, 8, 5, width).to(dtype), torch.arange(first, stop)
    assert_same_bytes(buffers[:, 1].transpose(0, 1)[at % 8], queries_at(buffers, 1, at))
