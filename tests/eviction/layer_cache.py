"""A layer's cache as a policy sees it, made from dense keys, values and queries; pages in random order, dirty tails."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridkv.eviction import LayerCache
from hybridkv.kernels.formats.fp8 import Fp8Pages, fp8_decode, fp8_encode


@dataclass
class Dense:
    cache: LayerCache
    keys: list[Tensor]  # [n_g, D] as stored, f64
    values: list[Tensor]
    positions: list[np.ndarray]


def make(
    lengths: list[int],
    window: int = 7,
    folds: int = 3,
    dim: int = 8,
    position: int | None = None,  # of the next token; entries before it are a random ascending choice
    dtype: str = "f32",
    seed: int = 0,
    page: int = 4,
    layer: int = 0,
) -> Dense:
    rng, G = np.random.default_rng(seed), len(lengths)
    torch.manual_seed(seed)
    position = max(lengths) if position is None else position
    W = min(window, position)
    when = np.arange(position - W, position)
    # recent entries are there in every stream, older ones are a choice
    places = []
    for n in lengths:
        tail = min(n, W)
        old = np.sort(rng.choice(position - tail, n - tail, replace=False))
        places.append(np.concatenate((old, np.arange(position - tail, position))))
    widest = -(-max(lengths) // page)
    pages = G * widest + 3
    ids, table = rng.permutation(pages), np.full((G, widest), -1, np.int32)
    pools = {name: torch.full((pages, page, dim), torch.nan) for name in "kv"}
    stored: dict[str, list[Tensor]] = {"k": [], "v": []}
    for g, n in enumerate(lengths):
        count = -(-n // page)
        table[g, :count] = ids[g * widest : g * widest + count]
        entry = np.arange(n)
        for name in "kv":
            x = torch.randn(n, dim)
            pools[name][torch.from_numpy(table[g][entry // page]).long(), torch.from_numpy(entry % page)] = x
            x = x.bfloat16().float() if dtype == "bf16" else fp8_decode(*fp8_encode(x)) if dtype == "fp8" else x
            stored[name].append(x.double())
    if dtype == "bf16":
        pools = {name: x.bfloat16() for name, x in pools.items()}
    paged = {name: Fp8Pages(*fp8_encode(x)) if dtype == "fp8" else x for name, x in pools.items()}
    at = np.full((G, max(lengths)), -1, np.int64)
    for g, place in enumerate(places):
        at[g, : len(place)] = place
    cache = LayerCache(
        layer=layer, layers=4, queries=torch.randn(W, G * folds, dim), query_positions=torch.from_numpy(when),
        positions=torch.from_numpy(at), lengths=np.array(lengths), k_pool=paged["k"], v_pool=paged["v"],
        table=torch.from_numpy(table), scale=dim**-0.5, tokens=position,
    )  # fmt: skip
    return Dense(cache, stored["k"], stored["v"], places)


def attention(dense: Dense, w: int, h: int) -> Tensor:
    """[n] softmax row of one query and query head over its KV head's entries, f64."""
    c = dense.cache
    g = h // (c.queries.shape[1] // len(c.lengths))
    logits = dense.keys[g] @ c.queries[w, h].double() * c.scale
    hidden = torch.from_numpy(dense.positions[g] > int(c.query_positions[w]))
    return logits.masked_fill(hidden, -torch.inf).softmax(0)
