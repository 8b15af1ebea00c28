"""Keep lists of a whole run against the attention that transformers computes for the same tokens."""

from collections.abc import Callable

import pytest
import torch

WINDOW, RECENT, BUDGET, PROMPT = 16, 8, 48, 150


@pytest.mark.parametrize("cut", (150, 64, 1), ids=("whole", "chunks", "one by one"))
@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_keep_lists_are_those_of_transformers_attention(
    kind: str, cut: int, run_of: Callable, oracle: Callable
) -> None:
    found = oracle(kind)
    ids = found.ids[:PROMPT]
    run = run_of(kind, budget=BUDGET, window=WINDOW, recent=RECENT, policy="snapkv:pooling=none")
    run.feed(ids, cut)
    chosen = run.evict(ids)
    with torch.no_grad():
        rows = found.model(torch.tensor([ids]), use_cache=False, output_attentions=True).attentions
    assert len(rows) == len(chosen)  # one for each full-attention layer
    for layer, weights in zip(chosen, rows):
        scores = weights[0, :, -WINDOW:].double().sum(1)  # [H, N]
        scores = scores.view(len(layer), -1, PROMPT).sum(1)  # [G, N]
        for g, keep in enumerate(layer):
            ranked = scores[g, : PROMPT - RECENT].topk(BUDGET - RECENT)
            want = sorted(ranked.indices.tolist()) + list(range(PROMPT - RECENT, PROMPT))
            # an entry may differ only where two scores agree to float32 noise
            for j in set(keep.tolist()) ^ set(want):
                assert abs(scores[g, j] - ranked.values[-1]) < 1e-4 * ranked.values[0]


@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_the_default_keeps_the_peaks_of_transformers_attention(kind: str, run_of: Callable, oracle: Callable) -> None:
    """The largest weight of the window, over the query heads of a KV head, wins for 15 neighbours; the first 4 and the
    recent entries stay; the heads of a layer share its budget, and none has less than a fifth of its even share."""
    found = oracle(kind)
    ids = found.ids[:PROMPT]
    run = run_of(kind, budget=BUDGET, window=WINDOW, recent=RECENT)
    run.feed(ids, 64)
    chosen = run.evict(ids)
    with torch.no_grad():
        rows = found.model(torch.tensor([ids]), use_cache=False, output_attentions=True).attentions
    assert len(rows) == len(chosen)
    sizes = set()
    for layer, weights in zip(chosen, rows):
        G, old, free = len(layer), PROMPT - WINDOW, PROMPT - RECENT
        peaks = weights[0, :, -WINDOW:].double().amax(1).view(G, -1, PROMPT).amax(1)  # [G, N]
        scores = [[float(peaks[g, j]) for j in range(free)] for g in range(G)]
        for g in range(G):
            for j in range(old):
                scores[g][j] = float(peaks[g, max(0, j - 7) : min(old, j + 8)].max())
            scores[g][:4] = [float("inf")] * 4
        least = max(RECENT, BUDGET // 5) - RECENT
        own = [sorted(range(free), key=lambda j: (-scores[g][j], j)) for g in range(G)]
        kept = [set(own[g][:least]) for g in range(G)]
        rest = sorted((-scores[g][j], g, j) for g in range(G) for j in own[g][least:])
        room = G * (BUDGET - RECENT - least)
        for _, g, j in rest[:room]:
            kept[g].add(j)
        bound = -rest[room - 1][0]
        assert sum(map(len, layer)) == G * BUDGET
        sizes |= set(map(len, layer))
        for g, keep in enumerate(layer):
            assert keep[-RECENT:].tolist() == list(range(free, PROMPT))
            # neighbours share a peak, so ties are common; an entry may differ only where its score is at the bound
            for j in set(keep[:-RECENT].tolist()) ^ kept[g]:
                assert abs(scores[g][j] - bound) < 1e-4 * bound
    assert len(sizes) > 1, "streams were meant to differ in length"
