"""Keep lists of a whole run against the attention that transformers computes for the same tokens."""

import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from eviction.shared_oracle import share_by_loops
from hybridkv.eviction import All
from hybridkv.eviction.named import find_policy
from hybridkv.eviction.policies import Peak

WINDOW, RECENT, BUDGET, PROMPT = 16, 8, 48, 150
NOISE = 1e-5  # of a key difference, between two ways to compute the keys in float32


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
    """The rule of `peak` in loops, over the attention rows, keys and values of transformers: the largest weight of the
    window spreads and fades and counts in all streams, key difference ranks the rest, values weigh both; the first 4
    and the recent entries stay; heads and layers share the budget."""
    found, policy = oracle(kind), find_policy("auto")
    assert isinstance(policy, All) and isinstance(policy.policy, Peak)
    ids = found.ids[:PROMPT]
    run = run_of(kind, budget=BUDGET, window=WINDOW, recent=RECENT)
    run.feed(ids, 64)
    chosen = run.evict(ids)
    with torch.no_grad():
        out = found.model(torch.tensor([ids]), use_cache=True, output_attentions=True)
    cached = [each for each in out.past_key_values.layers if getattr(each, "keys", None) is not None]
    rows = [each for each in out.attentions if each is not None]
    assert len(rows) == len(cached) == len(chosen)
    spreads = [spread_peaks(policy.policy, w[0], c.keys[0]) for w, c in zip(rows, cached, strict=True)]
    looked_at = [max(row[j] for layer in spreads for row in layer) for j in range(PROMPT)]
    shared = [[looked_at for _ in layer] for layer in spreads]
    scores, alone = (
        [by_rule(policy.policy, peaks, c.keys[0], c.values[0]) for peaks, c in zip(each, cached, strict=True)]
        for each in (shared, spreads)
    )
    lengths = np.full((len(chosen), len(chosen[0])), PROMPT)
    want, bounds = share_by_loops(scores, lengths, BUDGET, RECENT, policy.floor, policy.layers)
    by_itself, _ = share_by_loops(alone, lengths, BUDGET, RECENT, policy.floor, policy.layers)
    assert by_itself != want, "guard: with every stream for itself others would stay"
    sizes = {len(keep) for layer in chosen for keep in layer}
    assert sum(len(keep) for layer in chosen for keep in layer) == lengths.size * BUDGET
    assert len(sizes) > 1, "streams were meant to differ in length"
    for i, layer in enumerate(chosen):
        for g, keep in enumerate(layer):
            assert keep[:4].tolist() == [0, 1, 2, 3]
            assert keep[-RECENT:].tolist() == list(range(PROMPT - RECENT, PROMPT))
            # an entry may differ only where its score is at a bound to float32 noise, which may also move it to the
            # next bin, and so over all that share it
            moved = most_at_an_edge(policy.policy, cached[i].keys[0][g])
            for j in set(keep.tolist()) ^ set(want[i][g]):
                assert min(abs(scores[i][g][j] - bound) for bound in bounds) < (moved + 1.5) / PROMPT


def spread_peaks(policy: Peak, weights: Tensor, keys: Tensor) -> list[list[float]]:
    """Of each of a layer's streams the largest weights, spread; attention rows [H, N, N], keys [G, N, D]."""
    (G, N, _), old, found = keys.shape, PROMPT - WINDOW, []
    for rows in weights.double().view(G, -1, N, N):
        peaks, row = rows[:, -WINDOW:].amax((0, 1)).tolist(), []
        for j in range(N):
            near = range(max(0, j - policy.ahead), min(old, j + policy.behind + 1)) if j < old else [j]
            row.append(max(peaks[i] * policy.decay ** abs(i - j) for i in near))
        found.append(row)
    return found


def by_rule(policy: Peak, peaks: list[list[float]], keys: Tensor, values: Tensor) -> list[list[float]]:
    """Scores of a layer's streams, of the peaks that count in each at each position, keys and values [G, N, D]."""
    (G, N, _), found = keys.shape, []
    for g in range(G):
        norms = values[g].double().norm(dim=-1).tolist()
        bins = [bin_of(x) for x in differences(policy, keys[g])]
        row = []
        for j in range(N):
            score = policy.strength * peaks[g][j] + 1 - sum(other > bins[j] for other in bins) / N
            row.append(score * norms[j] * N / sum(norms) if policy.values else score)
        found.append([float("inf")] * 4 + row[4:])
    return found


def differences(policy: Peak, keys: Tensor) -> list[float]:
    """Of keys [N, D] how far each, or the farthest of its neighbours, points from the others."""
    unit, half = torch.nn.functional.normalize(keys.double(), dim=-1), policy.pooling // 2
    apart = (-(unit @ unit.mean(0)) / unit.mean(0).norm()).tolist()
    return [max(apart[max(0, j - half) : j + half + 1]) for j in range(len(apart))]


def bin_of(difference: float) -> int:
    """As kernels/eviction/standing.py has it."""
    return struct.unpack("i", struct.pack("f", 1 + difference))[0] >> 15


def most_at_an_edge(policy: Peak, keys: Tensor) -> int:
    """Entries of the largest bin that float32 noise may move one out of or into; 0: none is near an edge."""
    found = differences(policy, keys)
    bins = [bin_of(x) for x in found]
    near = {b for x in found for b in (bin_of(x - NOISE), bin_of(x + NOISE)) if b != bin_of(x)}
    near |= {bin_of(x) for x in found if {bin_of(x - NOISE), bin_of(x + NOISE)} != {bin_of(x)}}
    return max((bins.count(b) for b in near), default=0)
