"""The cache of compressed attention on a GPU: nothing allocated, nothing waited for, kernels seen through handles."""

import gc

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor

from cache.compressed_machine import CompressedMachine
from cache.compressed_rig import KINDS, NUMBERS, SMALL, Rig, numbers
from hybridkv.cache import CompressedSpec, KVCacheManager, compressed_schema
from hybridkv.planner import plan_cache

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
FLASH = CompressedSpec(KINDS, heads=64, head_dim=512, rope=64, index_dim=128)
F32 = 1e-5  # sums of some hundred terms in f32, in an order of the kernels' own, against float64
FORMATS = [("f32", "f32"), ("bf16", "bf16"), ("fp8", "mxfp4"), ("fp8_entry", "nvfp4"), ("fp8", "fp8")]


def bytes_of(m: KVCacheManager) -> list[Tensor]:
    pools = [t for table in m.tables.values() for t in table.pool.tensors.values()]
    return [t.clone() for t in (*pools, *m.state.tensors.values())]


def test_a_decode_step_is_prepared_without_waiting_and_acquired_without_memory() -> None:
    """Across the ends of entries and pages, with and without padding."""
    rig = Rig(SMALL, device=DEVICE)
    m = rig.manager(96, requests=3)
    for name in "abc":
        m.admit_request(name)
    rig.run(m, {"a": numbers(13), "b": numbers(30, 1), "c": numbers(5, 2)})
    plan = [(name, 1) for name in "abc"]
    grown: set[int] = set()
    for i in range(24):
        torch.cuda.synchronize()
        reserved = torch.cuda.memory_reserved()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step = m.prepare_forward(plan, rows=8 if i % 2 else None)
            before = torch.cuda.memory_allocated()
            handles = m.acquire(step)
            assert torch.cuda.memory_allocated() == before
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if i > 4:
            assert torch.cuda.memory_reserved() == reserved
        assert handles[1].state["main_p"].data_ptr() == m.state.layer(1)["main_p"].data_ptr()
        grown.add(m.held_pages("a")["csa"])
        del step, handles
        m.commit(plan)
    assert len(grown) > 1  # pages were taken on the way


def requested_bytes() -> int:
    """What tensors asked for. memory_allocated may be more: cached blocks of other tests are handed out whole. Cycles
    of tests before are collected first: else they go in between, and less is counted.
    """
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


@pytest.mark.parametrize(("kv", "index"), [("fp8", "mxfp4"), ("bf16", "bf16")])
def test_a_million_tokens_take_what_the_plan_says(kv: str, index: str) -> None:
    tokens, entry, key = 1 << 20, {"fp8": 584, "bf16": 1024}[kv], {"mxfp4": 68, "bf16": 256}[index]
    schema = compressed_schema(FLASH, kv, index)
    plan = plan_cache(schema, 1, tokens, None)
    logical = tokens // 4 * 2 * (entry + key) + tokens // 128 * entry + 4 * 128 * entry + 2 * 81_920 + 6_144
    before = requested_bytes()
    m = KVCacheManager(schema, plan.pages, plan.slots, plan.max_tokens, DEVICE)
    physical = requested_bytes() - before
    tables = sum(t.device_table.nbytes for t in m.tables.values())
    assert m.memory_bytes() == plan.nbytes == logical + tables
    assert logical + tables <= physical <= logical + tables + 16 * 512  # 13 tensors, each to a multiple of 512
    m.admit_request("a")
    m.prepare_forward([("a", tokens)])
    assert set(m.free_pages().values()) == {0}


@pytest.mark.parametrize("spec", [SMALL, FLASH], ids=["small", "flash"])
def test_attention_is_what_the_definition_says(spec: CompressedSpec) -> None:
    """A chunk, two requests token by token beside padding, then chunks and single tokens in one step."""
    rig = Rig(spec, device=DEVICE)
    unit = spec.hca_ratio
    lists = {"a": [7 * i % NUMBERS for i in range(3 * unit)], "b": [5 * i % NUMBERS for i in range(3 * unit)]}
    m = rig.manager(4 * unit, requests=3)
    m.admit_request("old")
    rig.run(m, {"old": numbers(2 * unit + 3, 5)})
    m.release_request("old")
    at = {"a": 0, "b": 0}
    for name in at:
        m.admit_request(name)
    steps: list[tuple[dict[str, int], int | None]] = [({"a": 2 * unit - 2, "b": unit - 3}, None)]
    steps += [({"a": 1, "b": 1}, 4)] * 5 + [({"a": 1, "b": unit + 5}, None), ({"a": unit // 2, "b": 1}, None)]
    for lengths, rows in steps:
        ran = rig.run(m, {name: lists[name][at[name] : at[name] + n] for name, n in lengths.items()}, rows=rows)
        start = 0
        for name, n in ran.plan:
            for t in {0, n // 2, n - 1}:
                for layer in range(len(spec.kinds)):
                    want = rig.attention(layer, lists[name][: at[name] + n], at[name] + t)
                    assert_close_rms(f"layer {layer} of {name} at {at[name] + t}", want, ran.out[layer][start + t], F32)
            start += n
            at[name] += n
        assert all(not out[start:].any() for out in ran.out.values())
    for layer, kind in enumerate(spec.kinds):
        if kind != "window":
            dense = ran.handles[layer].gather_all_compressed_kv(torch.float32)
            for row, (name, _) in enumerate(ran.plan):
                want = rig.entries(layer, lists[name][: at[name]])
                assert_close_rms(f"entries of layer {layer}", want, dense[row, : len(want)], F32)
                assert not dense[row, len(want) :].any()


@pytest.mark.parametrize(("kv", "index"), FORMATS)
def test_rows_of_padding_change_nothing(kv: str, index: str) -> None:
    """NaN in every row of padding; real rows keep their bits."""
    rig = Rig(FLASH, topk=16, device=DEVICE)
    managers = [rig.manager(256, requests=3, kv=kv, index=index) for _ in range(2)]
    for m in managers:
        for t in (t for table in m.tables.values() for t in table.pool.tensors.values()):
            t.zero_()
        for name in "abc":
            m.admit_request(name)
        rig.run(m, {"a": numbers(126), "b": numbers(130, 1), "c": numbers(100, 2)})
    fresh = [{"a": numbers(1, k), "c": numbers(1, k + 1)} for k in range(4)]
    for new in fresh:  # across an entry of either kind
        padded, plain = rig.run(managers[0], new, rows=8), rig.run(managers[1], new)
        for layer in range(len(KINDS)):
            assert not padded.out[layer][2:].any()
            # more rows may split the keys otherwise: the same sums in another order
            assert_close_rms(f"layer {layer}", plain.out[layer], padded.out[layer][:2], F32)
    for a, b in zip(bytes_of(managers[0]), bytes_of(managers[1]), strict=True):
        assert_same_bytes(a, b)


class OnDevice(CompressedMachine):
    device = DEVICE

    def facts(self) -> dict[str, bytes]:
        """What the host knows."""
        found = {f"{name}.pages": t.pages.tobytes() for name, t in self.m.tables.items()}
        found |= {f"{name}.refs": t.allocator.refs.tobytes() for name, t in self.m.tables.items()}
        return found | {"positions": self.m.positions.tobytes(), "reached": self.m.reached.tobytes()}


def test_random_use_agrees_with_the_model() -> None:
    run_state_machine_as_test(
        OnDevice,
        settings=settings(max_examples=12, stateful_step_count=15, derandomize=True, deadline=None, database=None),
    )
