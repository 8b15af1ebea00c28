"""What a model with compressed attention stores: the released models' sizes, to the byte, and what cannot be built."""

import re
from dataclasses import replace
from math import prod

import pytest
import torch

from cache.compressed_rig import SMALL
from hybridkv.cache import (
    BLOCK_SIZE_ORIGINAL_TOKENS,
    CacheSchema,
    CompressedSpec,
    KVCacheManager,
    compressed_schema,
    compute_block_budget,
)
from hybridkv.errors import HybridKVError
from hybridkv.planner import longest_context, most_requests, plan_cache

MiB, GiB, INF = 2**20, 2**30, float("inf")
KINDS = {
    "flash": ("window", "window", *("csa", "hca") * 20, "csa"),
    "pro": ("hca", "hca", *("csa", "hca") * 29, "csa"),
}
ENTRY_BYTES = {"f32": 2048, "bf16": 1024, "fp8": 584, "fp8_entry": 580}
INDEX_BYTES = {"f32": 512, "bf16": 256, "fp8": 132, "mxfp4": 68, "nvfp4": 72}


def released(model: str, kv: str = "fp8", index: str = "mxfp4", **more: int) -> CacheSchema:
    heads = 64 if model == "flash" else 128
    return compressed_schema(CompressedSpec(KINDS[model], heads, 512, 64, 128), kv, index, **more)


def few_layers(kv: str = "fp8", index: str = "mxfp4", **more: int) -> CacheSchema:
    return compressed_schema(CompressedSpec(("window", "csa", "hca"), 64, 512, 64, 128), kv, index, **more)


def state_bytes(schema: CacheSchema, tensor: str) -> int:
    return sum(len(s.layers) * t.nbytes for s in schema.states for t in s.tensors if t.name == tensor)


def compressor_bytes(schema: CacheSchema) -> int:
    return schema.slot_bytes - state_bytes(schema, "window")


@pytest.mark.parametrize(
    ("model", "kv", "index", "per_token", "gib"),
    [
        ("flash", "bf16", "bf16", 6880.0, 6.724),
        ("flash", "fp8", "fp8", 3850.25, 3.763),
        ("flash", "fp8", "mxfp4", 3514.25, 3.435),
        ("flash", "fp8_entry", "nvfp4", 3513.625, 3.434),
        ("pro", "bf16", "bf16", 9848.0, 9.625),
        ("pro", "fp8", "fp8", 5511.4375, 5.387),
        ("pro", "fp8", "mxfp4", 5031.4375, 4.918),
        ("pro", "fp8_entry", "nvfp4", 5030.46875, 4.917),
    ],
)
def test_bytes_of_a_million_tokens_are_the_published_ones(
    model: str, kv: str, index: str, per_token: float, gib: float
) -> None:
    schema = released(model, kv, index)
    assert schema.kv_bytes(MiB) == per_token * MiB  # 2**20 tokens fill every page
    total = schema.kv_bytes(MiB) + state_bytes(schema, "window")
    assert total == pytest.approx(gib * GiB, abs=0.0005 * GiB)
    need = schema.kv_bytes(MiB) + schema.slot_bytes + 2 * 2**13 * 4  # page ids of 4 bytes
    pages = {s.name: 2**13 for s in schema.streams}  # pages of 128 tokens each, of either kind
    assert compute_block_budget(schema, need, 1, MiB) == pages
    assert schema.bytes(pages, 1, MiB) == need == plan_cache(schema, 1, MiB, need).nbytes
    with pytest.raises(HybridKVError, match=str(need)) as refused:
        compute_block_budget(schema, need - 1, 1, MiB)
    parts = re.findall(r"(\d+) of (?:pages|state|page tables)", str(refused.value))
    assert len(parts) == 3 and sum(map(int, parts)) == need


@pytest.mark.parametrize(("model", "block", "window"), [("flash", 449_824, 3.07), ("pro", 644_024, 4.35)])
def test_bytes_of_a_block_and_of_a_request(model: str, block: int, window: float) -> None:
    schema = released(model)
    csa, hca = KINDS[model].count("csa"), KINDS[model].count("hca")
    assert sum(s.page_bytes for s in schema.streams) == block == schema.kv_bytes(128)
    assert released(model, block=256).kv_bytes(256) == 2 * block == schema.kv_bytes(256)
    assert state_bytes(schema, "window") == len(KINDS[model]) * 128 * 584
    assert state_bytes(schema, "window") / MiB == pytest.approx(window, abs=0.005)
    # 8 rows of content and gate in two streams, main and index; running sums instead of 128 rows
    assert compressor_bytes(schema) == csa * (65_536 + 16_384) + hca * 6_144


def test_the_layers_of_flash() -> None:
    schema = released("flash")
    csa, hca = schema.streams
    assert csa.layers == tuple(range(2, 43, 2)) and hca.layers == tuple(range(3, 42, 2))
    assert (csa.lanes, csa.streams, hca.lanes, hca.streams) == (21, 1, 20, 1)  # one row of page ids for all of a kind
    assert csa.place(42) == (20, slice(0, 1)) and hca.place(41) == (19, slice(0, 1))
    assert [c.kind for c in schema.compressed] == list(KINDS["flash"])
    assert [(c.ratio, c.window, c.heads, c.head_dim) for c in schema.compressed[1:4]] == [
        (0, 128, 64, 512),
        (4, 128, 64, 512),
        (128, 128, 64, 512),
    ]
    assert [c.index is not None for c in schema.compressed[1:4]] == [False, True, False]


def test_the_layers_of_pro() -> None:
    csa, hca = released("pro").streams
    assert csa.layers == tuple(range(2, 61, 2)) and hca.layers == (0, 1, *range(3, 60, 2))


@pytest.mark.parametrize("k", [1, 2, 9])
def test_a_page_covers_a_block_of_any_multiple_of_128_tokens(k: int) -> None:
    assert BLOCK_SIZE_ORIGINAL_TOKENS == 128
    schema = few_layers(block=128 * k)
    csa, hca = schema.streams
    assert (csa.entries_per_page, hca.entries_per_page) == (32 * k, k)
    assert {t.name for t in csa.tensors} == {"entries", "index"} and {t.name for t in hca.tensors} == {"entries"}
    assert [s.entries(128) for s in (csa, hca)] == [32, 1]
    assert schema.share_every == 128 * k
    assert csa.pages(128 * k) == hca.pages(128 * k) == 1 and csa.pages(128 * k + 4) == 2


@pytest.mark.parametrize("kinds", [("window",), ("csa",), ("hca",), ("hca", "window"), ("csa", "csa")])
def test_models_without_one_of_the_kinds(kinds: tuple[str, ...]) -> None:
    schema = compressed_schema(CompressedSpec(kinds, 4, 512, 64, 128))
    assert [s.name for s in schema.streams] == [k for k in ("csa", "hca") if k in kinds]
    assert state_bytes(schema, "window") == len(kinds) * 128 * 1024
    assert ("main_p" in {t.name for s in schema.states for t in s.tensors}) == ("csa" in kinds)
    m = KVCacheManager(schema, schema.pool_pages(1, 300), 1, 300)
    m.admit_request(0)
    handles = m.acquire(m.prepare_forward([(0, 300)]))
    assert [handles[i].schema.kind for i in range(len(kinds))] == list(kinds)


@pytest.mark.parametrize("index", INDEX_BYTES)
@pytest.mark.parametrize("kv", ENTRY_BYTES)
def test_bytes_of_every_format(kv: str, index: str) -> None:
    schema = few_layers(kv, index)
    csa, hca = schema.streams
    assert hca.page_bytes == ENTRY_BYTES[kv] and csa.page_bytes == 32 * (ENTRY_BYTES[kv] + INDEX_BYTES[index])
    assert state_bytes(schema, "window") == 3 * 128 * ENTRY_BYTES[kv]
    assert compressor_bytes(schema) == compressor_bytes(few_layers())  # f32 whatever the formats


@pytest.mark.parametrize("drafts", [0, 1, 5])
def test_what_waits_to_become_an_entry(drafts: int) -> None:
    """Both streams of both compressors of a CSA layer; running sums of an HCA layer; more of each for drafts."""
    schema = few_layers("bf16", drafts=drafts)
    found = {t.name: (t.shape, t.torch_dtype, t.init) for s in schema.states for t in s.tensors}
    f32, rows, banks = torch.float32, 8 + drafts, 1 + drafts
    assert found == {
        "window": ((128 + drafts, 512), torch.bfloat16, 0.0),
        "main_p": ((rows, 1024), f32, 0.0),
        "main_z": ((rows, 1024), f32, -INF),
        "index_p": ((rows, 256), f32, 0.0),
        "index_z": ((rows, 256), f32, -INF),
        "top": ((banks, 512), f32, -INF),
        "total": ((banks, 512), f32, 0.0),
        "mixed": ((banks, 512), f32, 0.0),
    }
    assert schema.rewind == drafts
    layers = {t.name: s.layers for s in schema.states for t in s.tensors}
    assert (layers["window"], layers["index_z"], layers["top"]) == ((0, 1, 2), (1,), (2,))


def test_a_ring_may_be_longer_than_it_must() -> None:
    longer = {t.name: t.shape for s in few_layers("bf16", drafts=3, ring=200).states for t in s.tensors}
    assert longer["window"] == (200, 512) and longer["main_p"] == (11, 1024)
    few_layers(drafts=3, ring=131)


@pytest.mark.parametrize(("kv", "index"), [("bf16", "bf16"), ("fp8", "mxfp4"), ("fp8_entry", "nvfp4")])
@pytest.mark.parametrize("tokens", [1024, 65_536])
def test_physical_bytes_are_logical_bytes_are_planned_bytes(tokens: int, kv: str, index: str) -> None:
    schema, requests = few_layers(kv, index), 2 if tokens < 2048 else 1
    pages = tokens // 4 * (ENTRY_BYTES[kv] + INDEX_BYTES[index]) + tokens // 128 * ENTRY_BYTES[kv]
    state = 3 * 128 * ENTRY_BYTES[kv] + 81_920 + 6_144
    plan = plan_cache(schema, requests, tokens, None)
    m = KVCacheManager(schema, plan.pages, plan.slots, plan.max_tokens)
    tensors = [*(t for table in m.tables.values() for t in table.pool.tensors.values()), *m.state.tensors.values()]
    tensors += [table.device_table for table in m.tables.values()]
    assert sum(t.untyped_storage().nbytes() for t in tensors) == m.memory_bytes() == plan.nbytes
    assert plan.nbytes == requests * (pages + state + 2 * tokens // 128 * 4)
    for r in range(requests):  # and all of it can be used
        m.admit_request(r)
        m.prepare_forward([(r, tokens)])
        assert m.held_bytes(r) == pages
    assert set(m.free_pages().values()) == {0}
    assert longest_context(schema, plan.nbytes, requests, 2 * tokens) in range(tokens, tokens + 4)
    assert most_requests(schema, plan.nbytes, tokens) == requests


@pytest.mark.parametrize("tokens", [0, 1, 127, 128, 129, 1000])
def test_bytes_grow_by_whole_blocks(tokens: int) -> None:
    schema = few_layers()
    blocks = [-(-(tokens // ratio) // (128 // ratio)) for ratio in (4, 128)]
    assert schema.kv_bytes(tokens) == blocks[0] * 32 * 652 + blocks[1] * 584
    need = schema.kv_bytes(tokens) + schema.slot_bytes + 4 * sum(blocks)
    assert list(compute_block_budget(schema, need, 1, tokens).values()) == blocks
    assert list(compute_block_budget(schema, 3 * need, 3, tokens).values()) == [3 * n for n in blocks]
    with pytest.raises(HybridKVError, match=f"3 requests of {tokens} tokens"):
        compute_block_budget(schema, 3 * need - 1, 3, tokens)


@pytest.mark.parametrize("block", [0, -128, 1, 64, 100, 127, 129, 192])
def test_a_block_that_is_no_multiple_of_both_ratios_is_refused(block: int) -> None:
    with pytest.raises(HybridKVError, match=f"multiple of 128 .*{block}"):
        few_layers(block=block)
    with pytest.raises(HybridKVError, match="multiple of 16"):
        compressed_schema(SMALL, block=block + 8 if block % 16 == 0 else block)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"drafts": 4, "ring": 131}, "131 rows is too small.*128 tokens and 4 drafts.*132"),
        ({"ring": 127}, "127 rows is too small"),
        ({"ring": 0}, "0 rows is too small"),
        ({"drafts": -1}, "drafts"),
        ({"drafts": 1000}, "drafts"),
        ({"kv": "fp4"}, "fp4.*f32, bf16, fp8, fp8_entry"),
        ({"kv": "mxfp4"}, "mxfp4.*fp8_entry"),
        ({"index": "fp8_entry"}, "fp8_entry.*f32, bf16, fp8, mxfp4, nvfp4"),
        ({"index": ""}, "mxfp4"),
    ],
)
def test_what_cannot_be_built_is_said(more: dict, says: str) -> None:
    with pytest.raises(HybridKVError, match=says):
        few_layers(**more)


@pytest.mark.parametrize("kinds", [(), ("csa", "mla"), ("full",), ("",)])
def test_unknown_kinds_of_layers_are_refused(kinds: tuple[str, ...]) -> None:
    with pytest.raises(HybridKVError, match="window, csa, hca"):
        CompressedSpec(kinds, 4, 512, 64, 128)


def test_pool_shapes() -> None:
    schema = few_layers(block=256)
    m = KVCacheManager(schema, {"csa": 5, "hca": 3}, slots=2, max_tokens=1000)
    shapes = {f"{s}.{name}": tuple(t.shape) for s, table in m.tables.items() for name, t in table.pool.tensors.items()}
    assert shapes == {"csa.entries": (1, 5, 64, 584), "csa.index": (1, 5, 64, 68), "hca.entries": (1, 3, 2, 584)}
    state = {name: tuple(t.shape) for (_, name), t in m.state.tensors.items()}
    assert state["window"] == (3, 2, 128, 584) and state["main_z"] == (1, 2, 8, 1024) and state["top"] == (1, 2, 1, 512)
    assert (
        m.memory_bytes()
        == 5 * 64 * 652
        + 3 * 2 * 584
        + 4 * sum(prod(s) for name, s in state.items() if name != "window")
        + prod(state["window"])
        + 2 * (4 + 4) * 4
    )  # page ids: 4 pages of 64 and of 2 entries hold 1000 tokens


@pytest.mark.parametrize("wrong", [{"csa_ratio": 0}, {"hca_ratio": -1}, {"window": 0}, {"heads": 0}])
def test_sizes_that_make_no_sense(wrong: dict[str, int]) -> None:
    with pytest.raises(HybridKVError, match=f"'{next(iter(wrong))}': {next(iter(wrong.values()))}"):
        replace(SMALL, **wrong)


@pytest.mark.parametrize(("requests", "tokens"), [(0, 64), (-1, 64), (1, -1)])
def test_a_budget_for_nobody(requests: int, tokens: int) -> None:
    with pytest.raises(HybridKVError, match="at least"):
        compute_block_budget(compressed_schema(SMALL, block=16), 1 << 30, requests, tokens)
