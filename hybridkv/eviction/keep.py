"""Which entries survive: one rule for all policies.

Of a stream with budget b the last `recent` entries stay whatever their score, and the best of the others fill the
rest. The budget includes the recent ones. Ties go to the lower position. Lists are ascending, so survivors keep their
order.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.cache.step import upload
from hybridkv.errors import HybridKVError
from hybridkv.eviction_record import Keep
from hybridkv.kernels.eviction.select import select_entries


def joined(scores: list[Tensor]) -> Tensor:
    """Scores [G, L] of each layer as rows [layers * G, L] f32; what stands past a layer's own L is never looked at."""
    L = max(each.shape[1] for each in scores)
    return torch.cat([each if each.shape[1] == L else F.pad(each, (0, L - each.shape[1])) for each in scores]).float()


def survivors(scores: Tensor, lengths: np.ndarray, budgets: np.ndarray, recent: int) -> Tensor:
    """Entries [R, K] int32 that stay of rows [R, L], on the device: ascending, then -1. lengths and budgets [R]."""
    fixed, whole = np.minimum(recent, budgets), budgets >= lengths
    visible, count = np.where(whole, 0, lengths - fixed), np.where(whole, 0, budgets - fixed)
    seen, most, ends = upload([visible, count, lengths], scores.device).view(3, -1)
    return select_entries(scores, seen, most, ends, int(np.minimum(budgets, lengths).max(initial=0)))


def best(scores: Tensor, length: int, budget: int, recent: int) -> np.ndarray:
    """Ascending numbers of the entries that stay, of `length` with scores [>= length]."""
    return survivors(scores[None], np.array([length]), np.array([budget]), recent)[0].cpu().numpy().astype(np.int64)


def choose(scores: list[Tensor], lengths: np.ndarray, budgets: np.ndarray, recent: int, scope: str) -> Keep:
    """Survivors of every stream. `scores`: a [G, L] for each layer; lengths and budgets [layers, G].

    scope "head": each stream by its own scores; "layer": one list for the heads of a layer, by the sum of their scores;
    "global": one list for all streams. The device is waited for once, at the end.
    """
    (layers, G), rows = lengths.shape, joined(scores)
    there = torch.arange(rows.shape[1], device=rows.device) < upload([lengths.ravel()], rows.device)[:, None]
    broken = (rows.isnan() & there).view(layers, -1).any(1)
    lists, ends, room = layers * G, lengths, budgets
    if scope != "head":
        same = lengths == lengths[:, :1] if scope == "layer" else lengths == lengths[0, 0]
        even = budgets == budgets[:, :1] if scope == "layer" else budgets == budgets[0, 0]
        if not same.all() or not even.all():
            raise HybridKVError(f"scope '{scope}' needs streams of one length and one budget; use scope='head'")
        rows, ends, room, lists = rows.view(layers, G, -1).sum(1), lengths[:, 0], budgets[:, 0], layers
    if scope == "global":
        rows, ends, room, lists = rows.sum(0, keepdim=True), ends[:1], room[:1], 1
    found = survivors(rows, ends.ravel(), room.ravel(), recent)
    host = torch.cat((found.view(-1), broken.to(torch.int32))).cpu().numpy().astype(np.int64)
    if host[found.numel() :].any():
        layer = int(host[found.numel() :].argmax())
        raise HybridKVError(f"the policy gave NaN scores in attention layer {layer}; nothing was evicted")
    each = [row[:n] for row, n in zip(host[: found.numel()].reshape(found.shape), np.minimum(ends, room).ravel())]
    return [[each[(i * G + g) * lists // (layers * G)] for g in range(G)] for i in range(layers)]
