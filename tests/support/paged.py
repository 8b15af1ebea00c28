"""Paged keys and values for the tests: all that a kernel must not read is NaN. And attention by its definition."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LAYOUTS = ((1, 1), (1, 3), (2, 1), (2, 3), (3, 1), (3, 3))  # KV heads, query heads that share one


@dataclass
class Paged:
    """B requests of G streams. Page 0 and the table's tail belong to nobody."""

    k_pool: Tensor  # [N, P, D]
    v_pool: Tensor
    table: Tensor  # [B, G, W] int32
    lengths: np.ndarray  # [B, G]
    k: list[list[Tensor]]  # [B][G] -> [length, D], as stored
    v: list[list[Tensor]]

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor, np.ndarray]:
        return self.k_pool, self.v_pool, self.table, self.lengths

    def only(self, b: int) -> tuple[Tensor, Tensor, Tensor, np.ndarray]:
        return self.k_pool, self.v_pool, self.table[b : b + 1], self.lengths[b : b + 1]


def paged(lengths: list[list[int]], P: int, D: int, dtype: torch.dtype = torch.float32) -> Paged:
    held = [[-(-n // P) for n in row] for row in lengths]
    total = sum(map(sum, held))
    order = iter((torch.randperm(total + 2) + 1).tolist())  # pages in no order, two of them unused
    k_pool, v_pool = (torch.full((total + 3, P, D), torch.nan, dtype=dtype) for _ in range(2))
    table = torch.full((len(lengths), len(lengths[0]), max(map(max, held)) + 2), -1, dtype=torch.int32)
    kept: dict[str, list[list[Tensor]]] = {"k": [], "v": []}
    for b, row in enumerate(lengths):
        for rows in kept.values():
            rows.append([])
        for g, n in enumerate(row):
            pages = [next(order) for _ in range(held[b][g])]
            table[b, g, : len(pages)] = torch.tensor(pages)
            for name, pool in (("k", k_pool), ("v", v_pool)):
                new = torch.randn(n, D).to(dtype)
                kept[name][b].append(new)
                for i in range(n):
                    pool[pages[i // P], i % P] = new[i]
    return Paged(k_pool, v_pool, table, np.array(lengths, np.int64), kept["k"], kept["v"])


def dense(q: Tensor, held: Paged, starts: list[int], scale: float, shift: int = 0, wrong_heads: bool = False) -> Tensor:
    """Softmax attention in float64 from plain keys and values. `shift` and `wrong_heads` are deliberate mistakes."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    G = held.table.shape[1]
    group = q.shape[1] // G
    for b in range(len(held.lengths)):
        n = starts[b + 1] - starts[b]
        for h in range(q.shape[1]):
            g = h % G if wrong_heads else h // group
            k, v = held.k[b][g].double(), held.v[b][g].double()
            scores = q[starts[b] : starts[b + 1], h].double() @ k.T * scale  # [n, length]
            seen = torch.arange(len(k)) <= torch.arange(n)[:, None] + len(k) - n + shift
            out[starts[b] : starts[b + 1], h] = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    return out


def edge_lengths(P: int, tile: int) -> list[int]:
    """One entry, round a page's edge, round a tile's edge, several tiles."""
    return sorted({1, max(P - 1, 1), P, P + 1, tile - 1, tile, tile + 1, 3 * tile + 5})
