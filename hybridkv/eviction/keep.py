"""Which entries survive: one rule for all policies.

Of a stream with budget b the last `recent` entries stay whatever their score, and the best of the others fill the
rest. The budget includes the recent ones. Ties go to the lower position. Lists are ascending, so survivors keep their
order.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hybridkv.errors import HybridKVError

Keep = list[list[np.ndarray]]  # [layers][G] ascending entry numbers


def best(scores: Tensor, length: int, budget: int, recent: int) -> np.ndarray:
    """Ascending numbers of the entries that stay, of `length` with scores [>= length]."""
    if budget >= length:
        return np.arange(length)
    fixed = min(recent, budget)
    order = scores[: length - fixed].sort(descending=True, stable=True).indices[: budget - fixed]  # stable: ties go low
    return np.concatenate((np.sort(order.cpu().numpy()), np.arange(length - fixed, length)))


def choose(scores: list[Tensor], lengths: np.ndarray, budgets: np.ndarray, recent: int, scope: str) -> Keep:
    """Survivors of every stream. `scores`: a [G, L] for each layer; lengths and budgets [layers, G].

    scope "head": each stream by its own scores; "layer": one list for the heads of a layer, by the sum of their scores;
    "global": one list for all streams.
    """
    for layer, each in enumerate(scores):
        past = (
            torch.arange(each.shape[1], device=each.device) >= torch.from_numpy(lengths[layer]).to(each.device)[:, None]
        )
        if bool(each.masked_fill(past, 0).isnan().any()):
            raise HybridKVError(f"the policy gave NaN scores in attention layer {layer}; nothing was evicted")
    if scope != "head":
        same = lengths == lengths[:, :1] if scope == "layer" else lengths == lengths[0, 0]
        even = budgets == budgets[:, :1] if scope == "layer" else budgets == budgets[0, 0]
        if not same.all() or not even.all():
            raise HybridKVError(f"scope '{scope}' needs streams of one length and one budget; use scope='head'")
        scores = [each.sum(0, keepdim=True).expand_as(each) for each in scores]
    if scope == "global":
        whole = torch.stack([each[0] for each in scores]).sum(0)
        scores = [whole.expand_as(each) for each in scores]
    return [
        [best(each[g], int(n), int(b), recent) for g, (n, b) in enumerate(zip(lengths[i], budgets[i], strict=True))]
        for i, each in enumerate(scores)
    ]
