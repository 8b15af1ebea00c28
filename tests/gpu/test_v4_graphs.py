"""A decode step of DeepSeek-V4 as a captured graph: the bits of the plain step, at every position, and nothing else."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_v4
import torch
from numerics import assert_same_bytes
from torch import Tensor

from gpu.stepping import feed, replay_beside_hostile_rows, replay_quietly
from hybridkv import LLM, CacheConfig, SamplingParams
from hybridkv.cache import KVCacheManager

pytestmark = pytest.mark.gpu
CASES = (("float32", "f32"), ("bfloat16", "bf16"), ("bfloat16", "fp8"))


@pytest.fixture(scope="module")
def open_v4(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LLM]:
    oracle = tiny_v4.Oracle("select", tmp_path_factory.mktemp("select"))
    folder: Path = oracle.folder

    def build(dtype: str, kv: str, requests: int = 6) -> LLM:
        settings = CacheConfig(kv_dtype=kv)
        return LLM(str(folder), "cuda", dtype, cache=settings, max_requests=requests, max_context=1024)

    return build


def bytes_of(manager: KVCacheManager) -> list[Tensor]:
    pools = [t for table in manager.tables.values() for t in table.pool.tensors.values()]
    return [t.clone() for t in (*pools, *manager.state.tensors.values())]


@pytest.mark.parametrize(("dtype", "kv"), CASES)
@pytest.mark.parametrize("requests", (1, 3, 6))
def test_replay_gives_the_bits_of_the_plain_step(dtype: str, kv: str, requests: int, open_v4: Callable) -> None:
    """From 125 to 135 tokens entries of both kinds fill up and pages are added; three requests leave a row empty."""
    streams = {f"r{i}": tiny_v4.token_ids(140, seed=i) for i in range(requests)}
    found: dict[bool, list[Tensor]] = {}
    ends = []
    for graph in (False, True):
        llm = open_v4(dtype, kv)
        for key in streams:
            llm.manager.admit_request(key)
        found[graph] = [feed(llm, streams, 0, 125, False)]
        found[graph] += [feed(llm, streams, p, 1, graph) for p in range(125, 136)]
        ends.append(bytes_of(llm.manager))
        if graph:
            graphs = llm.engine.runner.graphs
            assert graphs.captured.keys() == {(graphs.rows(requests), llm.manager.max_tokens)}
    for plain, replayed in zip(found[False], found[True], strict=True):
        # the plain step has as many rows as requests, the graph a power of two: products may be blocked differently
        if requests in (1, 6):
            assert_same_bytes(plain, replayed)
        torch.testing.assert_close(
            plain, replayed, rtol=0, atol=(1e-4 if dtype == "float32" else 0.1) * plain.abs().max()
        )
    if requests == 1:
        for a, b in zip(*ends, strict=True):
            used = a.view(torch.uint8) != b.view(torch.uint8)
            assert not used.any()


def test_a_replay_moves_no_memory_and_waits_for_nothing(open_v4: Callable) -> None:
    llm = open_v4("bfloat16", "fp8")
    streams = {"a": tiny_v4.token_ids(200), "b": tiny_v4.token_ids(200, seed=1)}
    for key in streams:
        llm.manager.admit_request(key)
    feed(llm, streams, 0, 120, False)
    feed(llm, streams, 120, 1, True)  # captures
    replay_quietly(llm, streams, 121, 137)


def test_empty_rows_touch_nothing(open_v4: Callable) -> None:
    """One request in a graph of eight rows: whatever else is resident keeps every byte."""
    llm = open_v4("bfloat16", "fp8", requests=8)
    manager = llm.manager
    others = {f"o{i}": tiny_v4.token_ids(300, seed=i) for i in range(5)}
    mine = {"mine": tiny_v4.token_ids(300, seed=9)}
    for key in (*others, *mine):
        manager.admit_request(key)
    feed(llm, others, 0, 130, False)
    feed(llm, mine, 0, 126, False)
    slots = [manager.slot_of[key] for key in others]
    pages = {name: t.pages[slots][t.pages[slots] >= 0].tolist() for name, t in manager.tables.items()}

    def held() -> list[Tensor]:
        state = [t[:, slots].clone() for t in manager.state.tensors.values()]
        return state + [
            t[:, pages[name]].clone() for name, table in manager.tables.items() for t in table.pool.tensors.values()
        ]

    before = held()
    replay_beside_hostile_rows(llm, "mine", mine["mine"], 126, 134, rows=8)
    for a, b in zip(before, held(), strict=True):
        assert_same_bytes(a, b)


@pytest.mark.parametrize(("dtype", "kv"), CASES)
def test_the_engine_decodes_through_graphs(dtype: str, kv: str, open_v4: Callable) -> None:
    """Greedy answers of several prompts together are those of each alone (f32: batch blocking flips no argmax here)."""
    llm = open_v4(dtype, kv)
    prompts = [tiny_v4.token_ids(n, seed=n) for n in (3, 126, 250)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    together = llm.generate(prompts, params)
    assert llm.engine.runner.graphs.captured, "nothing was captured"
    assert all(out.finish_reason == "length" and len(out.token_ids) == 12 for out in together)
    if dtype == "float32":
        assert [out.token_ids for out in together] == [llm.generate([p], params)[0].token_ids for p in prompts]
