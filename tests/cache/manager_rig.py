"""Small managers, their steps with known contents, and what they have stored."""

import numpy as np
import pytest
import torch

from cache.machine_model import HEADS, LANES, TAIL, snapshot
from hybridkv.cache import CacheSchema, KVCacheManager

PLAIN = CacheSchema((HEADS, LANES))
HYBRID = CacheSchema((HEADS, LANES), (TAIL,))


def manager(
    schema: CacheSchema = PLAIN, kv: int = 64, compressed: int = 16, slots: int = 3, longest: int = 40
) -> KVCacheManager:
    return KVCacheManager(schema, {"kv": kv, "compressed": compressed}, slots, longest)


def write(m: KVCacheManager, plan: list[tuple[str, int]], value: float, commit: bool = True) -> None:
    """Give every new entry of the step this value, in all streams and lanes."""
    step = m.prepare_forward(plan)
    handles = m.acquire(step)
    total = sum(n for _, n in plan)
    for layer in HEADS.layers:
        handles[layer].append(torch.full((total, 2, 2), value), torch.full((total, 2, 2), -value))
    view = step.streams["compressed"]
    for row, (name, _) in enumerate(plan):
        for entry in range(int(m.lengths(name)["compressed"][0]), int(view.lengths[row, 0])):
            for t in m.tables["compressed"].pool.tensors.values():
                t[:, int(view.table[step.slots[row], 0, entry // 2]), entry % 2] = value
    if commit:
        m.commit(plan)


def stored(m: KVCacheManager, name: str) -> list[bytes]:
    """Bytes of all that the request has stored, in order."""
    slot, out = m.slot_of[name], []
    for t in m.tables.values():
        entry = np.arange(int(t.lengths[slot, 0]))
        pages = t.pages[slot][:, entry // t.schema.entries_per_page]
        out += [
            x.view(torch.uint8).numpy()[:, pages, entry % t.schema.entries_per_page].tobytes()
            for x in t.pool.tensors.values()
        ]
    return out


def keys(m: KVCacheManager, name: str) -> list[float]:
    """First component of the keys of stream 0."""
    t = m.tables["kv"]
    rows = t.pages[m.slot_of[name], 0]
    n = int(t.lengths[m.slot_of[name], 0])
    return t.pool.tensors["k"][0, rows[rows >= 0].astype(np.int64)].reshape(-1, 2)[:n, 0].tolist()


def refused(m: KVCacheManager, error: type[Exception], match: str, call) -> None:
    before = snapshot(m)
    with pytest.raises(error, match=match):
        call()
    assert snapshot(m) == before
