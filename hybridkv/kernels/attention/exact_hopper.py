"""attention_exact through the prompt kernel for Hopper GPUs: a token among many and one alone are the same rows of it.

The keys of every row are cut at multiples of SPLIT, whatever the row's length, and the splits are joined in ascending
order; one that a row does not see adds zeros. In a split a row's numbers come from that row alone. So chunks, batches
and single tokens give the same bits. What splits have gathered lies in memory until they are joined: queries run
together as far as there is room for it, which changes no result.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hybridkv.kernels.attention.prefill_hopper_launch import attention_prefill_wide
from hybridkv.kernels.formats.kv_format import Pages

SPLIT = 2048
WORKSPACE = 1 << 29  # bytes of what the splits have gathered


def exact_runs(lengths: list[int], starts: list[int], room: int) -> list[list[tuple[int, int, int]]]:
    """(request, first query, last) in runs of no more than `room` queries times splits, or of one query.

    `lengths` are the longest streams of the requests.
    """
    runs: list[list[tuple[int, int, int]]] = [[]]
    count = most = 0  # queries of the run, splits of one
    for b, (begin, end) in enumerate(pairwise(starts)):
        splits = max(1, -(-lengths[b] // SPLIT))
        while begin < end:
            left = room // max(most, splits) - count
            if left <= 0 and count:
                runs.append([])
                count = most = 0
                continue
            last = min(end, begin + max(left, 1))
            runs[-1].append((b, begin, last))
            count, most, begin = count + last - begin, max(most, splits), last
    return runs


def attention_exact_wide(
    q: Tensor, k_pool: Pages, v_pool: Pages, table: Tensor, lengths: np.ndarray, starts: list[int], scale: float
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    room = WORKSPACE // (4 * q[:1].numel()) if len(q) else 0
    for run in exact_runs(lengths.max(1).tolist(), starts, room) if len(q) else []:
        owner = [b for b, _, _ in run]
        seen = lengths[owner] - np.array([starts[b + 1] - last for b, _, last in run])[:, None]
        begins = [begin - run[0][1] for _, begin, _ in run] + [run[-1][2] - run[0][1]]
        part, rows = slice(run[0][1], run[-1][2]), torch.tensor(owner).to(q.device)
        out[part] = attention_prefill_wide(q[part], k_pool, v_pool, table, seen, begins, scale, rows=rows, split=SPLIT)
    return out
