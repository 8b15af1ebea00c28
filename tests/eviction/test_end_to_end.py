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
    run = run_of(kind, budget=BUDGET, window=WINDOW, recent=RECENT)
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
