"""What attention has summed stands in for a pass over the keys, as long as nothing that was summed is gone."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from long_form import spread

from eviction.harness import Run, request_of
from hybridkv.eviction import LayerCache
from hybridkv.eviction import evict as evict_file
from hybridkv.eviction.policies import Peak, SnapKV, Tova
from hybridkv.eviction.spread import Ada, Pyramid

KINDS = ("llama", "qwen3_5")
WINDOW = 16


def layers_of(run: Run) -> list[LayerCache]:
    assert run.evictor is not None
    return run.evictor.layers(request_of([]), run.manager)


@pytest.mark.parametrize("policy", (Peak(), SnapKV("none"), SnapKV("avg"), SnapKV("max"), Tova()), ids=str)
@spread("kind, chunk", KINDS, (None, 64, 7, 1))
def test_scores_with_known_sums_equal_those_of_two_passes(
    kind: str, chunk: int | None, policy: Peak | SnapKV | Tova, run_of: Callable
) -> None:
    run = run_of(kind, budget=64)
    run.feed(tiny.token_ids(100), chunk)
    for layer in layers_of(run):
        assert layer.lse is not None and layer.lse.shape == layer.queries.shape[:2]
        want = policy.score(replace(layer, lse=None))
        assert torch.allclose(policy.score(layer), want, rtol=2e-5, atol=1e-7)  # f32 sums in another order
        assert not torch.allclose(policy.score(replace(layer, lse=layer.lse + 0.1)), want, rtol=1e-2), "not used"


def test_a_prompt_shorter_than_the_window(run_of: Callable) -> None:
    run = run_of("llama", budget=64)
    run.feed(tiny.token_ids(5))
    for layer in layers_of(run):
        assert layer.lse is not None and len(layer.lse) == 5
        assert SnapKV("none").score(layer).sum().item() == pytest.approx(layer.lse.numel(), rel=1e-5)


def test_sums_that_counted_evicted_entries_are_not_used(run_of: Callable) -> None:
    run = run_of("llama", budget=32)
    ids = tiny.token_ids(200)
    run.feed(ids[:100])
    run.evict(ids[:100])
    for n in range(WINDOW):  # some of the window's queries saw what is gone
        assert all(layer.lse is None for layer in layers_of(run)), n
        run.feed(ids[100 + n : 101 + n])
    for layer in layers_of(run):
        assert layer.lse is not None
        want = SnapKV().score(replace(layer, lse=None))
        assert torch.allclose(SnapKV().score(layer), want, rtol=2e-5, atol=1e-7)  # f32 sums in another order


def test_positions_on_the_device_are_the_managers(run_of: Callable) -> None:
    run, rng = run_of("llama", budget=32), np.random.default_rng(3)
    ids = tiny.token_ids(300)
    run.feed(ids[:90])
    for n in (1, 30, 4):
        at = run.manager.entry_positions("r", "attention")
        heads = run.model.config.kv_heads
        for i, layer in enumerate(layers_of(run)):
            for g, row in enumerate(layer.positions.tolist()):
                assert [p for p in row if p >= 0] == at[i * heads + g].tolist()
                assert row == sorted(row[: len(at[i * heads + g])]) + [-1] * (len(row) - len(at[i * heads + g]))
        keep = iter([np.sort(rng.choice(len(x), rng.integers(1, len(x)), replace=False)) for x in at])
        run.keep({layer: [next(keep) for _ in range(heads)] for layer in run.layers})
        run.feed(ids[100 : 100 + n])


@pytest.mark.parametrize("kind", KINDS)
def test_layers_scored_together_keep_what_each_alone_would(
    kind: str, run_of: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(kind, budget=32)
    run.feed(tiny.token_ids(100))
    assert run.evictor is not None
    one_by_one = [SnapKV().score(layer) for layer in layers_of(run)]
    row = 4 * run.model.config.heads * 100
    for size in (1, row, 2 * row, 1 << 30):
        monkeypatch.setattr(evict_file, "SCORE_BYTES", size)
        parts = run.evictor.layers(request_of([]), run.manager, batched=True)
        assert len(parts) == -(-len(run.layers) // max(1, min(len(run.layers), size // row)))
        scores = torch.cat([SnapKV().score(part) for part in parts])
        assert torch.allclose(scores, torch.cat(one_by_one), rtol=1e-5, atol=1e-7)


def test_a_policy_that_changes_the_scores_sees_one_layer_at_a_time(run_of: Callable) -> None:
    seen = []

    class Own(SnapKV):
        def score(self, layer: LayerCache) -> torch.Tensor:
            seen.append((layer.layer, layer.positions.shape[0]))
            return super().score(layer)

    assert Peak().batchable and SnapKV().batchable and Ada().batchable and Pyramid().batchable and not Tova().batchable
    assert not Own().batchable and not Ada(Own()).batchable
    run = run_of("llama", budget=32)
    run.feed(tiny.token_ids(100))
    replace(run.evictor, default=replace(run.evictor.default, policy=Own())).choose(request_of([]), run.manager)
    assert seen == [(i, run.model.config.kv_heads) for i in range(len(run.layers))]
