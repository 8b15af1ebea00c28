"""What eviction runs on the GPU: one-pass scores, selection and compaction at real sizes, in every configuration."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes

from gpu.scored_pages import definition, keys
from hybridkv.cache import KVCacheManager
from hybridkv.config import CacheConfig, EvictionConfig
from hybridkv.errors import HybridKVError
from hybridkv.eviction import Ada, Evictor, find_policy
from hybridkv.eviction.keep import choose_shared
from hybridkv.kernels.eviction import score as score_file
from hybridkv.kernels.eviction.compact import compact_ref, compact_triton
from hybridkv.kernels.eviction.score import window_scores
from hybridkv.kernels.eviction.select import (
    pool_heads_ref,
    pool_heads_triton,
    select_entries_ref,
    select_entries_triton,
)
from hybridkv.models import cache_schema
from hybridkv.models.config import ModelConfig
from hybridkv.models.known import KNOWN

pytestmark = pytest.mark.gpu
# f32 sums of exact products: errors of a few 2^-24 in a score, which a weight takes over
BOUND = 1e-5


@pytest.fixture(autouse=True)
def on_the_gpu() -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield


SHAPES = {  # lengths, query heads of a KV head, D, P, W
    "27B": ([4096, 4095, 70, 1], 6, 256, 64, 64),
    "8B, short window": ([2049, 900, 63], 4, 128, 64, 33),
    "one head, odd pages": ([517, 130, 5], 1, 128, 53, 64),
    "another width": ([300], 2, 96, 16, 16),  # the general kernel
}


@pytest.mark.parametrize("kind", ("bf16", "fp8"))
@pytest.mark.parametrize("shape", SHAPES)
def test_one_pass_with_known_sums_equals_the_definition(shape: str, kind: str) -> None:
    lengths, R, D, P, W = SHAPES[shape]
    pages = keys(kind, lengths, P, D)
    q = torch.randn(W, len(lengths) * R, D).bfloat16()
    args = (q, torch.arange(max(lengths) - W, max(lengths)), *pages, D**-0.5)
    weights, lse = definition(*args)
    want = weights.sum(0)
    got = window_scores(*args, lse.float())
    assert_close_rms("scores", want, got, BOUND)
    assert (got.view(len(lengths), R, -1).transpose(1, 2)[pages[2] < 0] == 0).all()
    strided = torch.full((W, lse.shape[1] + 5), torch.nan)
    strided[:, 2:-3] = lse
    for _ in range(5):
        assert_same_bytes(got, window_scores(*args, strided[:, 2:-3]))
    runs = score_file.has_gluon(q.device) and D != 96
    assert (score_file.hopper_tiles(q, pages[0].values if kind == "fp8" else pages[0], len(lengths)) > 0) == runs


def test_a_nan_key_is_not_hidden() -> None:
    pages, table, positions = keys("bf16", [300, 300], 64, 256)
    pages[table[1, 2], 3, 7] = torch.nan
    q, when = torch.randn(64, 12, 256).bfloat16(), torch.arange(236, 300)
    bad = window_scores(q, when, pages, table, positions, 0.0625, torch.zeros(64, 12)).isnan()
    assert bad[6:, 131].all() and int(bad.sum()) == 6


@pytest.mark.parametrize("R", (4, 64))
@pytest.mark.parametrize(("L", "K"), ((16384, 2048), (131072, 2048), (131072, 8192), (700, 699)))
def test_selection_of_long_rows(L: int, K: int, R: int) -> None:
    lengths = torch.full((R,), L)
    lengths[::5] = L - 1 - L // 3
    count = torch.randint(0, K - 32, (R,))
    count[3], visible = K - 32, lengths - 32
    for x in (torch.rand(R, L) ** 8, torch.randint(0, 50, (R, L)).float()):  # few values: ties
        x.masked_fill_(torch.arange(L) >= visible[:, None], torch.nan)
        args = (x, visible, torch.minimum(count, visible - 1), lengths)
        assert_same_bytes(select_entries_triton(*args, K), select_entries_ref(*args, K))


def test_pooling_of_a_long_prompt() -> None:
    x, lengths = torch.rand(24, 16384), torch.tensor([16384, 16383, 64, 40])
    for pooling in ("none", "avg", "max"):
        got, want = (form(x, lengths, 64, pooling, 5) for form in (pool_heads_triton, pool_heads_ref))
        assert_close_rms(pooling, want, got, 1e-6)  # six sums of six


@pytest.mark.parametrize("apart", (False, True))
@pytest.mark.parametrize("kind", ("bf16", "fp8"))
def test_compaction_of_sixteen_layers_at_once(kind: str, apart: bool) -> None:
    S, L, K, P, D = 64, 4096, 512, 64, 256
    N = S * (L + K) // P
    if kind == "bf16":
        # no NaN: in deterministic mode torch itself moves them through arithmetic, which changes their bits
        pools = [torch.randint(0, 0x7F80, (N, P, D), dtype=torch.int16).view(torch.bfloat16) for _ in range(2)]
    else:
        codes = [torch.randint(0, 256, (N, P, D), dtype=torch.uint8) for _ in range(2)]
        pools = [*codes, torch.rand(N, P), torch.rand(N, P)]
    perm, j = torch.randperm(N), torch.arange(K)
    old, new = perm[: S * L // P].view(S, -1), perm[S * L // P :].view(S, -1)
    keep = torch.rand(S, L).argsort(1)[:, :K].sort(1).values
    source = (old.gather(1, keep // P) * P + keep % P).view(-1)
    target = ((new if apart else old)[:, j // P] * P + j % P).view(-1)
    target[::11] = -1
    want = [p.clone() for p in pools]
    compact_triton(pools, source.where(target >= 0, -1), target, apart)
    for a, b in zip(want, pools):
        compact_ref(a, source, target)
        assert_same_bytes(a, b)


@pytest.fixture(params=("bf16", "fp8"))
def prompt(request: pytest.FixtureRequest) -> tuple[Evictor, KVCacheManager]:
    """A request of 4096 tokens in a cache of the 27B model's shape, filled with random bytes that make sense."""
    model = ModelConfig.from_dict(KNOWN["Qwen3.5-27B"])
    config = CacheConfig(request.param, budget=512, policy="snapkv:pooling=none")
    schema = cache_schema(model, config, torch.bfloat16)
    manager = KVCacheManager(schema, schema.pool_pages(1, 6000), 2, 8192, "cuda")
    pool, state = manager.tables["attention"].pool.tensors, manager.state.tensors
    for t in pool.values():  # keys and values, codes, scales
        if t.dtype == torch.uint8:
            t.random_(0, 120)
        else:
            t.copy_(torch.randn(t.shape) if t.dtype == torch.bfloat16 else torch.rand(t.shape) * 0.01)
    manager.admit_request("r")
    manager.prepare_forward([("r", 4096)])
    manager.commit([("r", 4096)])
    state["queries", "queries"].copy_(torch.randn(state["queries", "queries"].shape))
    evictor = Evictor.make(config, manager, scale=model.attention_scale)
    assert evictor is not None
    return evictor, manager


def test_a_whole_eviction_waits_for_the_device_once(prompt: tuple[Evictor, KVCacheManager]) -> None:
    evictor, manager = prompt
    request = SimpleNamespace(key="r", prompt_tokens=4096, evictions={}, eviction=None)
    table, slot = manager.tables["attention"], manager.slot_of["r"]
    evictor.choose(request, manager)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        [whole] = evictor.layers(request, manager, batched=True)
        scores = evictor.policy.score(whole).split(4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    keep = evictor.choose(request, manager)
    for i, (each, lists) in enumerate(zip(scores, keep)):
        for g, entries in enumerate(lists):
            best = each[g, : 4096 - 64].sort(descending=True, stable=True).indices[: 512 - 64].sort().values.tolist()
            assert entries.tolist() == [*best, *range(4096 - 64, 4096)], (i, g)
    pages, P = torch.from_numpy(table.pages[slot].astype(np.int64)), 64
    kept = torch.from_numpy(np.stack([e for lists in keep for e in lists])).cuda()
    source = pages.cuda().gather(1, kept // P) * P + kept % P
    want = {name: t[0].view(-1, *t.shape[3:])[source].clone() for name, t in table.pool.tensors.items()}
    freed = evictor.evict(request, manager)
    assert freed == 64 * (64 - 8) and set(table.lengths[slot].tolist()) == {512}
    now = torch.from_numpy(table.pages[slot, :, :8].astype(np.int64)).cuda()
    for name, t in table.pool.tensors.items():
        assert_same_bytes(want[name], t[0][now].reshape(want[name].shape))
    manager.check_integrity()


@pytest.mark.parametrize("policy", ("auto", "peak:values=yes:spread=all"))
def test_the_default_chooses_on_the_device_as_on_the_host(prompt: tuple[Evictor, KVCacheManager], policy: str) -> None:
    """Scores of the device, shared on the host by the plain form of the rule; nothing waits before the end."""
    evictor, manager = prompt
    eviction = EvictionConfig(512, policy=policy)
    request = SimpleNamespace(key="r", prompt_tokens=4096, evictions={}, eviction=eviction, policy=None)
    evictor.choose(request, manager)  # compiles
    torch.cuda.synchronize()
    found = find_policy(policy)
    assert isinstance(found, Ada)
    torch.cuda.set_sync_debug_mode("error")
    try:
        [whole] = evictor.layers(request, manager, batched=True)
        scores = found.score(whole)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    keep = evictor.choose(request, manager)
    rows = scores.cpu()
    rows[:, :4] = torch.inf
    lengths = np.full((16, 4), 4096)
    want = choose_shared(list(rows.split(4)), lengths, np.full((16, 4), 512), 64, found.floor, found.layers)
    for ours, its in zip(keep, want, strict=True):
        assert all(map(np.array_equal, ours, its))
    assert len({len(e) for lists in keep for e in lists}) > 1
    evictor.evict(request, manager)
    assert table_mean(manager) == 512
    manager.check_integrity()


def table_mean(manager: KVCacheManager) -> float:
    """Entries of the request's streams on average."""
    return float(manager.tables["attention"].lengths[manager.slot_of["r"]].mean())


def test_nan_scores_stop_an_eviction(prompt: tuple[Evictor, KVCacheManager]) -> None:
    evictor, manager = prompt
    pool = manager.tables["attention"].pool.tensors
    page = manager.tables["attention"].pages[manager.slot_of["r"], 37, 3]
    if "k_scale" in pool:
        pool["k_scale"][0, page, 5] = torch.nan
    else:
        pool["k"][0, page, 5, 9] = torch.nan
    with pytest.raises(HybridKVError, match="attention layer 9"):
        evictor.choose(SimpleNamespace(key="r", prompt_tokens=4096, evictions={}, eviction=None), manager)
