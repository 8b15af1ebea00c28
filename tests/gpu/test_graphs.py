"""Decode steps of Llama and Qwen3.5 as captured graphs: what the plain step gives, everywhere, and nothing else."""

from collections.abc import Callable

import pytest
import tiny
import torch
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor

from engine.driving import run
from gpu.stepping import feed, replay_beside_hostile_rows, replay_quietly
from hybridkv import LLM, CacheConfig, SamplingParams
from hybridkv.cache import KVCacheManager
from hybridkv.engine.engine import Engine
from hybridkv.kernels.attention import decode as decode_file
from hybridkv.kernels.attention import decode_tuning

pytestmark = pytest.mark.gpu
KINDS = ("llama", "llama_bias", "qwen3_5", "qwen3_5_moe")
CASES = (("float32", "f32"), ("bfloat16", "bf16"), ("bfloat16", "fp8"))
# f32: products of fewer rows are blocked differently; bf16: and rounded differently, layer after layer
BOUND = {"float32": 1e-5, "bfloat16": 3e-2}


def ids(n: int, seed: int = 0) -> list[int]:
    return tiny.token_ids(n, seed=seed)


@pytest.fixture(scope="module")
def open_gpu(oracle: Callable) -> Callable[..., LLM]:
    def build(kind: str, dtype: str, kv: str, requests: int = 6, **cache: int) -> LLM:
        settings = CacheConfig(kv_dtype=kv, page_size=16, **cache)
        return LLM(str(oracle(kind).folder), "cuda", dtype, cache=settings, max_requests=requests, max_context=1024)

    return build


@pytest.mark.parametrize("requests", (1, 3, 6))
@pytest.mark.parametrize(("dtype", "kv"), CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_gives_what_the_plain_step_gives(
    kind: str, dtype: str, kv: str, requests: int, open_gpu: Callable
) -> None:
    """Over the edges of pages; three requests leave a row empty."""
    streams = {f"r{i}": ids(140, seed=i) for i in range(requests)}
    found: dict[bool, list[Tensor]] = {}
    rings: dict[bool, list[Tensor]] = {}
    for graph in (False, True):
        llm = open_gpu(kind, dtype, kv, budget=512)
        for key in streams:
            llm.manager.admit_request(key)
        found[graph] = [feed(llm, streams, 0, 90, False)]
        found[graph] += [feed(llm, streams, p, 1, graph) for p in range(90, 130)]
        rings[graph] = [t.clone() for key, t in llm.manager.state.tensors.items() if key[0] == "queries"]
    assert llm.engine.runner.graphs.captured.keys() == {(llm.engine.runner.graphs.rows(requests), 1024)}
    for plain, replayed in zip(rings[False], rings[True], strict=True):
        assert_close_rms("what is kept for scoring", plain.float(), replayed.float(), BOUND[dtype])
    for i, (plain, replayed) in enumerate(zip(found[False], found[True], strict=True)):
        assert_close_rms(f"step {i}", plain, replayed, BOUND[dtype])


@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_a_replay_moves_no_memory_and_waits_for_nothing(kind: str, open_gpu: Callable) -> None:
    llm = open_gpu(kind, "bfloat16", "fp8")
    streams = {"a": ids(200), "b": ids(200, seed=1)}
    for key in streams:
        llm.manager.admit_request(key)
    feed(llm, streams, 0, 60, False)
    feed(llm, streams, 60, 1, True)  # captures
    replay_quietly(llm, streams, 61, 100)


@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_a_stream_that_grows_past_short_goes_on_in_another_graph(
    kind: str, open_gpu: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP8 keys in a large room: the answers are those of an engine that has one graph, for all lengths."""
    streams, found, keys, shape = {"a": ids(200), "b": ids(200, seed=1)}, {}, set(), decode_file.decode_shape
    monkeypatch.setattr(decode_file, "decode_shape", lambda *args: keys.add(args[4]) or shape(*args))
    for short in (0, 256):  # of both requests together
        monkeypatch.setattr(decode_tuning, "SHORT", short)
        keys.clear()
        llm = open_gpu(kind, "bfloat16", "fp8")
        for key in streams:
            llm.manager.admit_request(key)
        feed(llm, streams, 0, 120, False)
        found[short] = [feed(llm, streams, p, 1, True) for p in range(120, 140)]
    graphs = llm.engine.runner.graphs
    assert graphs.captured.keys() == {(2, 128), (2, 1024)} and keys == {128, 1024}
    for i, (one, two) in enumerate(zip(found[0], found[256], strict=True)):
        assert_close_rms(f"step {i}", one, two, BOUND["bfloat16"])
    again = {"c": ids(200), "d": ids(200, seed=1)}
    for key in again:
        llm.manager.admit_request(key)
    feed(llm, again, 0, 120, False)
    replay_quietly(llm, again, 120, 140)


@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_empty_rows_touch_nothing(kind: str, open_gpu: Callable) -> None:
    """One request in a graph of eight rows: whatever else is resident keeps every byte."""
    llm = open_gpu(kind, "bfloat16", "fp8", requests=8, budget=512)
    manager = llm.manager
    others, mine = {f"o{i}": ids(300, seed=i) for i in range(5)}, {"mine": ids(300, seed=9)}
    for key in (*others, *mine):
        manager.admit_request(key)
    feed(llm, others, 0, 130, False)
    feed(llm, mine, 0, 126, False)
    own = manager.slot_of["mine"]
    slots = [slot for slot in range(8) if slot != own]  # free ones too

    def held() -> list[Tensor]:
        pages = {name: torch.from_numpy(t.pages[own][t.pages[own] >= 0]).cuda() for name, t in manager.tables.items()}
        found = [t[:, slots].clone() for t in manager.state.tensors.values()]
        for name, table in manager.tables.items():
            for t in table.pool.tensors.values():
                rest = t.clone()
                rest[:, pages[name].long()] = 0
                found.append(rest)
        return found

    manager.allocate_block("mine", "attention")  # the page that the tokens will fill is its own from the start
    before = held()
    replay_beside_hostile_rows(llm, "mine", mine["mine"], 126, 134, rows=8)
    for a, b in zip(before, held(), strict=True):
        assert_same_bytes(a, b)


@pytest.mark.parametrize(("dtype", "kv"), CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_decodes_through_graphs(kind: str, dtype: str, kv: str, open_gpu: Callable) -> None:
    llm = open_gpu(kind, dtype, kv)
    prompts = [ids(n, seed=n) for n in (3, 126, 250)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    together = llm.generate(prompts, params)
    assert llm.engine.runner.graphs.captured, "nothing was captured"
    assert all(out.finish_reason == "length" and len(out.token_ids) == 12 for out in together)
    if dtype == "float32":
        assert [out.token_ids for out in together] == [llm.generate([p], params)[0].token_ids for p in prompts]


@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_answers_on_the_gpu_are_those_of_the_cpu(
    kind: str, open_gpu: Callable, open_llm: Callable, oracle: Callable
) -> None:
    """f32, prompts of several lengths, with and without a budget: greedy tokens of both devices."""
    prompts, params = [ids(n, seed=n) for n in (5, 70, 300)], SamplingParams(max_tokens=24, ignore_eos=True)
    for cache in ({}, {"budget": 128}):
        gpu = open_gpu(kind, "float32", "f32", **cache)
        settings = CacheConfig(kv_dtype="f32", page_size=16, **cache)
        cpu = LLM(str(oracle(kind).folder), "cpu", "float32", cache=settings, max_requests=6, max_context=1024)
        assert [o.token_ids for o in gpu.generate(prompts, params)] == [
            o.token_ids for o in cpu.generate(prompts, params)
        ]


@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_requests_that_wait_for_a_ring_are_cut_as_those_that_do_not(kind: str, open_gpu: Callable) -> None:
    """Prompts are read beside answers that replay graphs in which nothing is kept; f32: greedy tokens are the same."""
    llm, found = open_gpu(kind, "float32", "f32", budget=128), {}
    plan, evictor = llm.plan, llm.engine.evictor
    for rings in (6, 1):
        manager = KVCacheManager(plan.schema, plan.pages, plan.slots, plan.max_tokens, "cuda", query_buffers=rings)
        engine = Engine(llm.model, manager, step_tokens=512, evictor=evictor)
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        requests = [engine.add(ids(n, seed=n), params) for n in (300, 70, 250, 400, 193)]
        run(engine)
        assert [len(r.evictions) for r in requests] == [1, 0, 1, 1, 1] and engine.runner.graphs.captured
        assert not any(r.error or r.preemptions for r in requests)
        manager.check_integrity()
        found[rings] = [r.generated for r in requests]
    assert found[1] == found[6]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_single_steps_are_those_of_the_prompt(kind: str, open_gpu: Callable, oracle: Callable) -> None:
    """Each step's own, though all were given out by one graph."""
    llm, tokens = open_gpu(kind, "float32", "f32"), ids(80)
    stepped = llm.logits(tokens, prefill=40)
    assert llm.engine.runner.graphs.captured
    assert_close_rms("steps against one chunk", llm.logits(tokens), stepped, 1e-4)  # other kernels, f32 in both
    cpu = LLM(str(oracle(kind).folder), "cpu", "float32", cache=CacheConfig("f32", 16), max_requests=1, max_context=128)
    assert_close_rms("against the CPU", cpu.logits(tokens), stepped.cpu(), 1e-4)
