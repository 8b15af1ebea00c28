"""sample_rows: the next token of each row, by temperature, filters, penalties and counted random numbers.

A row's logits x [V] f32 are adjusted first, in this order: forbidden tokens to -inf, biases added, penalties
(repetition of prompt and answer, then frequency and presence of the answer). A greedy row takes the largest, the first
among equals. For all others a token's distance from the best is d = (largest x - x) / temperature: 0 for the best, inf
for what is ruled out. Tokens in order are those of smaller distance first, and of equal distance the lower ids first.
Then pass

    top-k    the first k
    top-p    of these, in order, as long as the weight of those before is less than the part p of the weight of all
             these; a token's weight is exp(-d), as a whole number of 2^-40 (noise.py)
    min-p    of these, those with d <= -log(min_p)

The best always passes. Of what passes, the token with the largest (Gumbel noise - d) is taken, the lower id among
equals: that draws by exp(-d). Every number is exactly defined, so the same logits give the same tokens on any device
and in any batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hybridkv.kernels.backend import use_triton
from hybridkv.kernels.sampling.launch import sample_rows_triton
from hybridkv.kernels.sampling.noise import (
    MOST_NOISE,
    gumbel_ref,
    random_words_ref,
    uniform_ref,
    weights_ref,
)
from hybridkv.kernels.sampling.rows import SampleRow, seen_words

NO_DISTRIBUTION = 1  # the logits as given are broken
NO_TOKEN_LEFT = 2  # adjusted ones are


def adjusted_ref(logits: Tensor, row: SampleRow) -> Tensor:
    """x [V] f32 of a row, a copy where anything changes it."""
    x = logits[row.row].float() if row.own is None else row.own
    if row.own is None and row.forbidden:
        x = x.index_fill(0, torch.tensor(row.forbidden, device=x.device), -torch.inf)
    if row.own is None and row.bias is not None:
        x = x + row.bias
    if row.seen is not None:
        seen = row.seen[seen_words(len(x)) :]
        times = seen >> 1
        x = torch.where(seen > 0, torch.where(x > 0, x / row.repetition, x * row.repetition), x)
        x = x - row.frequency * times
        x = x - row.presence * (times > 0)
    return x


def passing_ref(distance: Tensor, row: SampleRow) -> Tensor | None:
    """Ids [n] of the tokens that pass the filters, ascending; None: all."""
    V, ids = len(distance), None
    if 0 < row.top_k < V:
        last = distance.topk(row.top_k, largest=False).values.max()
        closer, equal = (distance < last).nonzero().flatten(), (distance == last).nonzero().flatten()
        ids = torch.cat((closer, equal[: row.top_k - len(closer)])).sort().values
    if row.top_p < 1:
        weight = weights_ref(distance if ids is None else distance[ids])
        total = int(weight.sum())
        limit = math.ceil(row.top_p * float(total))
        # Tokens this light do not pass, since all of them together weigh less than what is left out. They are not
        # sorted. The margin is for weights whose rounding is not in the order of their distances.
        heavy = (weight > (total - limit) / len(weight) * 0.999).nonzero().flatten()
        weight, ids = weight[heavy], heavy if ids is None else ids[heavy]
        order = distance[ids].sort(stable=True).indices
        weight = weight[order]
        ids = ids[order[weight.cumsum(0) - weight < limit]].sort().values
    if row.min_p:
        near = distance <= row.farthest if ids is None else distance[ids] <= row.farthest
        ids = near.nonzero().flatten() if ids is None else ids[near]
    return ids


def draw_ref(distance: Tensor, best: int, ids: Tensor | None, row: SampleRow) -> int:
    """The token of the largest noise minus distance. Tokens that cannot reach the best one's are left out."""
    V, device = len(distance), distance.device
    least = float(gumbel_ref(random_words_ref(row.seed, row.position, torch.tensor([best], device=device))))
    within = distance <= MOST_NOISE - least + 0.01
    if ids is not None:
        ids = ids[within[ids]]
    elif 8 * int(within.sum()) < V:
        ids = within.nonzero().flatten()
    if ids is None:
        words = random_words_ref(row.seed, row.position, V, device)
    elif 8 * len(ids) < V:
        words, distance = random_words_ref(row.seed, row.position, ids), distance[ids]
    else:
        words, distance = random_words_ref(row.seed, row.position, V, device)[ids], distance[ids]
    # noise is at most -log(u)
    near = (uniform_ref(words) <= (distance + least).neg_().exp_().mul_(1.01)).nonzero().flatten()
    value = gumbel_ref(words[near]) - distance[near]
    found = near[(value == value.max()).nonzero()[0]]
    return int(found if ids is None else ids[found])


def sample_rows_ref(logits: Tensor, rows: Sequence[SampleRow], found: Tensor) -> None:
    V = logits.shape[1]
    for row in rows:
        if found[1, row.out]:
            continue
        x = adjusted_ref(logits, row)
        largest, best = x.max(-1)
        if not largest.isfinite():
            found[1, row.out] = NO_TOKEN_LEFT
            continue
        token = int(best)
        if row.temperature:
            distance = (largest - x) * row.rate
            token = draw_ref(distance, token, passing_ref(distance, row), row)
        found[0, row.out] = token
        if row.seen is not None:
            place = seen_words(V) + token
            row.seen[place] = (row.seen[place] | 1) + 2
            row.seen[token >> 5] |= 1 << (token & 31) if token & 31 < 31 else -(1 << 31)


def sample_rows(logits: Tensor, rows: Sequence[SampleRow], found: Tensor) -> None:
    """Choose the tokens of rows of logits [R, V], f32 or bf16.

    found [2, n] int64, as best_tokens gives it: the token of the largest logit of row.out's logits, and 1 where they
    are broken. What it says of the rows is replaced: by the token, and by 2 where nothing is left to choose from.
    """
    if use_triton(logits):
        sample_rows_triton(logits, rows, found)
    else:
        sample_rows_ref(logits, rows, found)
