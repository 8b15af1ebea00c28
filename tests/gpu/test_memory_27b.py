"""A 16,384-token prompt on the shape of Qwen3.5-27B at a budget of 2048: eight times less memory, for real.

The pools have the full size, but memory that is never touched is not committed: the tests write one entry in a page.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hybridkv.cache import KVCacheManager, OutOfPages
from hybridkv.config import CacheConfig
from hybridkv.eviction import Evictor
from hybridkv.models import cache_schema
from hybridkv.models.config import ModelConfig
from hybridkv.models.known import KNOWN

PROMPT, BUDGET, PAGE = 16384, 2048, 64
MIB = 1 << 20
# bytes of an entry's key and value in head_dim 256; FP8 adds two f32 scales
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
ENTRY = {"f32": 2048, "bf16": 1024, "fp8": 512 + 8}


@pytest.fixture(autouse=True)
def untouched_memory_stays_uncommitted() -> Iterator[None]:
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.utils.deterministic.fill_uninitialized_memory = True


def manager_of(dtype: str, device: str = "cpu") -> KVCacheManager:
    config = ModelConfig.from_dict(KNOWN["Qwen3.5-27B"])
    schema = cache_schema(config, CacheConfig(dtype, PAGE), torch.bfloat16)
    schema = type(schema)(schema.streams)  # the recurrent state is not what is measured
    return KVCacheManager(schema, {"attention": schema.streams[0].pages(PROMPT)}, 9, PROMPT + 1024, device)


def fill(manager: KVCacheManager, name: str, tokens: int = PROMPT) -> None:
    manager.admit_request(name)
    for begin in range(0, tokens, 4096):
        plan = [(name, min(4096, tokens - begin))]
        manager.prepare_forward(plan)
        manager.commit(plan)


def keeps(manager: KVCacheManager, count: int = BUDGET, length: int = PROMPT) -> dict[int, list[np.ndarray]]:
    rng, s = np.random.default_rng(0), manager.tables["attention"].schema
    recent = np.arange(length - 64, length)
    return {
        layer: [
            np.concatenate((np.sort(rng.choice(length - 64, count - 64, replace=False)), recent))
            for _ in range(s.heads)
        ]
        for layer in s.layers
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ENTRY)
def test_the_cache_shrinks_eight_times(dtype: str, device: str) -> None:
    manager = manager_of(dtype, device)
    table = manager.tables["attention"]
    assert (len(table.schema.layers), table.schema.heads, table.schema.streams) == (16, 4, 64)
    fill(manager, "a")
    full = {"f32": 2048 * MIB, "bf16": 1024 * MIB, "fp8": 520 * MIB}[dtype]
    assert manager.held_bytes("a") == full == PROMPT * 64 * ENTRY[dtype]
    assert table.allocator.free == 0 and table.pool.nbytes == full

    # a number in one entry of each page that survives, so that what moves can be seen
    keep = keeps(manager)
    rows, names = table.pages[manager.slot_of["a"]], list(table.pool.tensors)
    probes = []
    for s in range(0, 64, 7):
        layer, g = table.schema.layers[s // 4], s % 4
        for i in range(0, BUDGET, 256):
            entry = int(keep[layer][g][i])
            for name in names:
                pool = table.pool.tensors[name][0]
                pool[rows[s, entry // PAGE], entry % PAGE] = (s * 31 + i) % 200
                probes.append((name, s, i))
    back = manager.compact_request("a", keep)

    assert manager.held_bytes("a") * 8 == full
    assert back == table.allocator.free == table.allocator.total * 7 // 8
    assert (manager.lengths("a")["attention"] == BUDGET).all() and manager.position("a") == PROMPT
    for name, s, i in probes:
        got = table.pool.tensors[name][0][rows[s, i // PAGE], i % PAGE]
        assert (got.float() == float(torch.tensor((s * 31 + i) % 200).to(got.dtype))).all()
    manager.check_integrity()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ENTRY)
def test_others_get_the_memory_that_was_freed(dtype: str, device: str) -> None:
    manager = manager_of(dtype, device)
    fill(manager, "a")
    manager.admit_request("b")
    with pytest.raises(OutOfPages):
        manager.prepare_forward([("b", 1)])
    manager.release_request("b")
    manager.compact_request("a", keeps(manager))
    # seven eighths of the pool: one request of 14,336 tokens, to the last page
    fill(manager, "b", PROMPT - BUDGET)
    assert manager.tables["attention"].allocator.free == 0
    manager.release_request("b")
    # or seven more that were compacted as far
    for name in "cdefghi"[:7]:
        fill(manager, name, BUDGET)
    assert manager.tables["attention"].allocator.free == 0
    assert sum(manager.held_bytes(name) for name in "acdefghi") == manager.tables["attention"].pool.nbytes
    manager.check_integrity()


def test_eviction_needs_no_free_page() -> None:
    """The first layer is compacted in place; what it gives back serves the others, so memory may be short."""
    manager = manager_of("bf16")
    fill(manager, "a")
    table = manager.tables["attention"]
    assert table.allocator.free == 0
    apart, move = [], table.pool.move_entries
    table.pool.move_entries = lambda *args: apart.append(args[-1]) or move(*args)  # type: ignore[method-assign,func-returns-value]
    manager.compact_request("a", keeps(manager))
    assert not apart[0] and all(apart[1:]) and len(apart) < len(table.schema.layers)


def test_decode_goes_on_at_the_old_position() -> None:
    manager = manager_of("bf16")
    fill(manager, "a")
    manager.compact_request("a", keeps(manager))
    held = manager.held_pages("a")["attention"]
    for n in range(65):
        step = manager.prepare_forward([("a", 1)])
        assert step.num_computed == [PROMPT + n] and (step.streams["attention"].lengths == BUDGET + n + 1).all()
        manager.commit([("a", 1)])
    # a page for each stream, then one more
    assert manager.held_pages("a")["attention"] == held + 2 * 64
    assert [p[-1] for p in manager.entry_positions("a", "attention")] == [PROMPT + 64] * 64


def test_the_planned_bytes_are_the_seeds_numbers() -> None:
    config = ModelConfig.from_dict(KNOWN["Qwen3.5-27B"])
    for dtype, mib in (("f32", 2048), ("bf16", 1024), ("fp8", 520)):
        schema = cache_schema(config, CacheConfig(dtype, PAGE), torch.bfloat16)
        assert schema.kv_bytes(PROMPT) == mib * MIB and schema.kv_bytes(BUDGET) * 8 == mib * MIB
    # FP8 with its scales against plain bytes
    assert 520 * 128 == 512 * 130
    budgeted = cache_schema(config, CacheConfig("bf16", PAGE, budget=BUDGET), torch.bfloat16)
    queries = next(s for s in budgeted.states if s.name == "queries")
    assert queries.slot_bytes == 16 * 64 * 24 * (256 * 2 + 4)  # and an f32 sum each
    assert Evictor.make(CacheConfig(), KVCacheManager(schema, {"attention": 64}, 1, 64), scale=1.0) is None
