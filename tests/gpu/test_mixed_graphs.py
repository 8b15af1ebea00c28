"""Steps with prompts, alone or beside decoding requests, as captured graphs: what the plain step gives, and nothing
else.
"""

import gc
import warnings
from collections.abc import Callable

import pytest
import tiny
import torch
from numerics import assert_close_rms, assert_same_bytes
from random_model import engine_for, random_decoder
from torch import Tensor

from engine.driving import run
from gpu.stepping import no_garbage_collection
from hybridkv import LLM, CacheConfig, SamplingParams
from hybridkv.cache import KVCacheManager
from hybridkv.engine import mixed_graphs
from hybridkv.engine.graphs import DecodeGraphs
from hybridkv.engine.mixed_graphs import CapturedMixed, MixedGraphs
from hybridkv.engine.workspace import GRAPH_BYTES
from hybridkv.models.config import ModelConfig
from hybridkv.models.known import KNOWN

pytestmark = pytest.mark.gpu
KINDS = ("llama", "llama_bias", "qwen3_5", "qwen3_5_moe")
CASES = (("float32", "f32"), ("bfloat16", "bf16"), ("bfloat16", "fp8"))
# f32: products of more rows are blocked differently; bf16: and rounded differently, layer after layer
BOUND = {"float32": 1e-5, "bfloat16": 3e-2}
# new tokens of requests at 0, 40 and 130 tokens: decoding beside prompts, prompts alone, more prompts than one
PLANS = ([1, 1, 70], [1, 5, 200], [64, 3, 2], [300], [1, 129], [2, 100, 100, 63])


def ids(n: int, seed: int = 0) -> list[int]:
    return tiny.token_ids(n, seed=seed)


@pytest.fixture(scope="module")
def open_gpu(oracle: Callable) -> Callable[..., LLM]:
    def build(kind: str, dtype: str, kv: str, requests: int = 8, page: int = 64, **cache: int) -> LLM:
        settings = CacheConfig(kv_dtype=kv, page_size=page, **cache)
        return LLM(str(oracle(kind).folder), "cuda", dtype, cache=settings, max_requests=requests, max_context=1024)

    return build


def feed(llm: LLM, tokens: dict[str, list[int]], counts: list[int], graph: bool) -> Tensor:
    """The next tokens of some requests as one step, replayed or computed plainly: logits after each request's last."""
    manager, runner = llm.manager, llm.engine.runner
    plan = sorted(zip(tokens, counts), key=lambda item: item[1] > 1)
    shape = None
    if graph:
        assert runner.mixed is not None
        slots = [manager.slot_of[key] for key, _ in plan]
        shapes = [runner.mixed.shape(slots, [n for _, n in plan]) for _ in range(2)]
        shape = shapes[1]
        assert shape is not None
    step = manager.prepare_forward(plan, shape=shape)
    begins = [manager.position(key) for key, _ in plan]
    parts = [tokens[key][a : a + n] for (key, n), a in zip(plan, begins)]
    last = (step.host.query_start_loc[1:][step.host.real] - 1).tolist()
    inputs = runner.inputs(parts, last, step)
    if graph:
        assert runner.mixed.ready(step) is not None
        out = runner.forward(inputs)
    else:
        out = runner.model.forward(inputs.tokens, step.index.positions, manager.acquire(step), inputs.rows)
    manager.commit(plan)
    return out.clone()


@pytest.mark.parametrize("page", (64, 16))
@pytest.mark.parametrize(("dtype", "kv"), CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_gives_what_the_plain_step_gives(
    kind: str, dtype: str, kv: str, page: int, open_gpu: Callable
) -> None:
    """Every plan, twice in the same graph, then a decode step; what is kept for scoring too."""
    found: dict[bool, list[Tensor]] = {}
    kept: dict[bool, list[Tensor]] = {}
    for graph in (False, True):
        llm = open_gpu(kind, dtype, kv, page=page, budget=512)
        found[graph] = []
        for i, counts in enumerate(PLANS):
            tokens = {f"{i}.{j}": ids(900, seed=7 * i + j) for j in range(len(counts))}
            for key in tokens:
                llm.manager.admit_request(key)
            for j, key in enumerate(tokens):
                if 40 * j:
                    feed(llm, {key: tokens[key]}, [40 * j], False)
            found[graph] += [feed(llm, tokens, counts, graph) for _ in range(2)]
            found[graph] += [feed(llm, tokens, [1] * len(counts), False)]
            for key in tokens:
                llm.manager.release_request(key)
        kept[graph] = [t.clone() for key, t in llm.manager.state.tensors.items() if key[0] == "queries"]
    assert len(llm.engine.runner.mixed.captured) > 3
    for i, (plain, replayed) in enumerate(zip(found[False], found[True], strict=True)):
        assert_close_rms(f"step {i}", plain, replayed, BOUND[dtype])
    for plain, replayed in zip(kept[False], kept[True], strict=True):
        assert_close_rms("what is kept for scoring", plain.float(), replayed.float(), BOUND[dtype])


@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_padding_touches_nothing(kind: str, open_gpu: Callable) -> None:
    """One short prompt in a graph with room for many: whatever else is resident keeps every byte."""
    llm = open_gpu(kind, "bfloat16", "fp8", budget=512)
    manager: KVCacheManager = llm.manager
    others = {f"o{i}": ids(300, seed=i) for i in range(5)}
    for key in (*others, "mine"):
        manager.admit_request(key)
    feed(llm, others, [130] * 5, False)
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

    feed(llm, {"mine": ids(300)}, [10], False)  # its pages are its own from here on
    before = held()
    for n in (3, 20, 2):
        assert feed(llm, {"mine": ids(300)}, [n], True).isfinite().all()
    for a, b in zip(before, held(), strict=True):
        assert_same_bytes(a, b)


def allocations() -> int:
    """Since the process began: what is freed at once counts, too."""
    return torch.cuda.memory_stats()["allocation.all.allocated"]


@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_a_replay_moves_no_memory_and_waits_for_nothing(kind: str, open_gpu: Callable) -> None:
    llm = open_gpu(kind, "bfloat16", "bf16")
    tokens = {"a": ids(900), "b": ids(900, seed=1), "c": ids(900, seed=2)}
    manager, runner = llm.manager, llm.engine.runner
    for key in tokens:
        manager.admit_request(key)
    feed(llm, tokens, [64, 64, 64], False)
    feed(llm, tokens, [1, 1, 100], True)
    plan = [("a", 1), ("b", 1), ("c", 100)]
    with no_garbage_collection():
        for _ in range(4):
            shape = runner.mixed.shape([manager.slot_of[key] for key, _ in plan], [n for _, n in plan])
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                step = manager.prepare_forward(plan, shape=shape)
                inputs = runner.inputs([[1], [2], [3] * 100], [0, 1, 101], step)
                graph = runner.mixed.ready(step)
                before = allocations()
                manager.begin(step)
                graph.replay(inputs.tokens, inputs.rows, step)
                assert allocations() == before
            finally:
                torch.cuda.set_sync_debug_mode("default")
            manager.commit(plan)


@pytest.mark.parametrize(("dtype", "kv"), CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_crowd_answers_as_each_alone(
    kind: str, dtype: str, kv: str, open_gpu: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of all lengths that come while others decode; f32: each as alone, seeds included."""
    replays = []
    monkeypatch.setattr(mixed_graphs, "ASKED", 1)  # all shapes are captured
    original = CapturedMixed.replay
    monkeypatch.setattr(CapturedMixed, "replay", lambda self, *a: replays.append(1) or original(self, *a))
    llm = open_gpu(kind, dtype, kv)
    asked = [
        (ids(n, seed=n), SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8 * (i % 2), seed=i))
        for i, n in enumerate((3, 126, 250, 500, 64, 65, 1, 700, 33, 128, 90, 300))
    ]
    engine = llm.engine
    requests = [engine.add(*each) for each in asked[:4]]

    def late(step: int) -> None:
        if step % 3 == 2 and len(requests) < len(asked):
            requests.append(engine.add(*asked[len(requests)]))

    run(engine, late)
    assert len(requests) == len(asked) and all(len(r.generated) == 24 and not r.error for r in requests)
    assert len(replays) > 3, "prompts did not run through graphs"
    llm.manager.check_integrity()
    if dtype == "float32":
        for request, (tokens, params) in zip(requests, asked):
            assert request.generated == llm.generate([tokens], params)[0].token_ids


def without_memory(capture: Callable) -> Callable:
    """The same capture; meanwhile the process gets no more of the card's memory than it has."""

    def limited(*args: object) -> object:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        try:
            return capture(*args)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    return limited


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def test_a_bucket_that_does_not_fit_the_memory_runs_without_a_graph(
    open_gpu: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said once for each shape, and nothing is lost; once there is memory, other shapes are captured."""
    monkeypatch.setattr(mixed_graphs, "ASKED", 1)
    llm = open_gpu("qwen3_5", "float32", "f32")
    engine, graphs, decodes = llm.engine, llm.engine.runner.mixed, llm.engine.runner.graphs
    asked = [(ids(n, seed=n), SamplingParams(max_tokens=6, ignore_eos=True)) for n in (40, 100, 60)]

    def answers() -> list[list[int]]:
        requests = [engine.add(*each) for each in asked]
        run(engine)
        assert all(request.error is None for request in requests)
        return [request.generated for request in requests]

    engine.runner.mixed = engine.scheduler.mixed = engine.runner.graphs = engine.scheduler.graphs = None
    plain = answers()
    engine.runner.mixed = engine.scheduler.mixed = graphs
    engine.runner.graphs = engine.scheduler.graphs = decodes
    before = allocated()
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for kind in (MixedGraphs, DecodeGraphs):
            patch.setattr(kind, "_capture", without_memory(kind._capture))
        assert answers() == plain
        kept = allocated()
        assert answers() == answers() == plain and allocated() <= kept
    texts = [str(each.message) for each in said if "without a CUDA graph" in str(each.message)]
    assert len(texts) == len(set(texts)) == len(graphs.failed) + len(decodes.failed) > 1
    assert graphs.failed and not graphs.captured and all("out of memory" in text for text in texts)
    assert kept - before <= 64 << 10, "more than what is remembered of steps' divisions, 512 bytes each"
    other = engine.add(ids(600), SamplingParams(max_tokens=2, ignore_eos=True))  # a shape that has not failed
    run(engine)
    assert graphs.captured and other.error is None and llm.manager.free_slots == llm.manager.slots
    llm.manager.check_integrity()


def test_graphs_keep_no_more_than_was_said() -> None:
    """The largest steps of a 27B model's widths, of a few layers: all graphs together stay within the bound."""
    config = ModelConfig.from_dict(KNOWN["Qwen3.5-27B"] | {"num_hidden_layers": 4, "vocab_size": 4096})
    model = random_decoder(config, "cuda", torch.bfloat16)
    cache = CacheConfig("bf16")
    engine = engine_for(model, cache, "cuda", torch.bfloat16, pool=8192, slots=64, context=4096)
    graphs = engine.runner.mixed
    before = None
    for tokens in (graphs.sizes[0], graphs.sizes[-1], graphs.sizes[-3], 512, graphs.sizes[-1]):
        engine.manager.admit_request("a")
        plan = [("a", tokens)]
        shapes = [graphs.shape([engine.manager.slot_of["a"]], [tokens]) for _ in range(2)]
        step = engine.manager.prepare_forward(plan, shape=shapes[1])
        assert graphs.ready(step) is not None
        engine.manager.release_request("a")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved() if before is None else before
    kept = torch.cuda.memory_reserved() - before
    print(f"\ngraphs of up to {graphs.sizes[-1]} tokens keep {kept / 2**20:.0f} MiB, said {GRAPH_BYTES / 2**20:.0f}")
    assert 0.2 * GRAPH_BYTES < kept <= GRAPH_BYTES
