"""pool_peaks: peak scores spread to their neighbours, so that a number or a name stays whole.

Only entries older than the window change, and only among themselves. Each becomes the largest of `kernel` neighbours;
with `floor`, no less than the mean of the stream's old entries before that; with `norms`, times its value's norm.

The mean is summed in chunks of CHUNK entries, in ascending order, so its bits do not depend on how long the rows of
other streams are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.errors import HybridKVError
from hybridkv.kernels.exact import tree_sum

CHUNK = 1024  # entries that are summed in one fixed order
MAX_KERNEL = 127


def pool_peaks_ref(
    scores: Tensor, lengths: Tensor, window: int, kernel: int, floor: bool, norms: Tensor | None = None
) -> Tensor:
    G, L = scores.shape
    last = (lengths - window).clamp(min=0)[:, None]
    old = torch.arange(L, device=scores.device) < last
    pooled = scores
    if kernel > 1:
        pooled = F.max_pool1d(scores.masked_fill(~old, -torch.inf)[:, None], kernel, 1, kernel // 2)[:, 0]
    if floor:
        chunks = F.pad(scores.masked_fill(~old, 0), (0, -L % CHUNK)).view(G, -1, CHUNK)
        mean = torch.zeros(G, 1, device=scores.device)
        for chunk in tree_sum(chunks).unbind(1):
            mean = mean + chunk
        pooled = torch.maximum(pooled, mean / last.clamp(min=1))
    return torch.where(old, pooled if norms is None else pooled * norms, scores)


def pool_peaks(
    scores: Tensor,  # [G, L] f32
    lengths: Tensor,  # [G] int64
    window: int,
    kernel: int,
    floor: bool,
    norms: Tensor | None = None,  # [G, L] f32
) -> Tensor:
    """Scores [G, L] f32: those older than the window pooled, floored and weighted. Past `lengths` they mean nothing."""
    if not 1 <= kernel <= MAX_KERNEL or kernel % 2 == 0:
        raise HybridKVError(f"peaks are pooled over an odd number of entries from 1 to {MAX_KERNEL}, not {kernel}")
    return pool_peaks_ref(scores, lengths, window, kernel, floor, norms)
