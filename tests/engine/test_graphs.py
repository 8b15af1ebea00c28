"""Which decode steps a graph runs, without a GPU: the capture itself is stood in for, all else is real."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import tiny
import tiny_v4
import torch

from hybridkv import LLM, CacheConfig
from hybridkv.engine import graphs
from hybridkv.engine.graphs import Captured, DecodeGraphs
from hybridkv.kernels.attention import decode as decode_file


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = tiny_v4.Oracle("mini", tmp_path_factory.mktemp("mini")).folder
    return LLM(
        str(folder), "cpu", "float32", cache=CacheConfig(kv_dtype="f32", block=16), max_requests=6, max_context=64
    )


class Replayed:
    """Runs on what lies in the static buffers, as a graph does."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture makes a call of the model on the same buffers."""

    def capture(self: DecodeGraphs, rows: int, reach: int) -> Captured:
        step = self.manager.padding_step(rows, reach)
        tokens = torch.zeros(rows, dtype=torch.int64)
        handles, logits = self.manager.acquire(step), torch.empty(rows, self.model.config.vocab)

        def run() -> None:
            assert all(int(view.device_lengths.max()) <= view.max_entries for view in step.streams.values())
            logits.copy_(self.model.forward(tokens, step.index.positions, handles, None))

        run()
        return Captured(reach, Replayed(run), tokens, step.packed, logits)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(DecodeGraphs, "_capture", capture)


@pytest.fixture
def decode(llm: LLM, stand_in: None) -> DecodeGraphs:
    return DecodeGraphs(llm.model, llm.manager)


def test_sizes_are_powers_of_two_and_all_slots(decode: DecodeGraphs) -> None:
    assert decode.sizes == [1, 2, 4, 6]
    assert [decode.rows(n) for n in range(1, 7)] == [1, 2, 4, 4, 6, 6]


@pytest.mark.parametrize("requests", (1, 3, 6))
def test_a_replay_is_the_plain_step(requests: int, llm: LLM, decode: DecodeGraphs) -> None:
    """At every position, full entries and new pages among them; rows that are not filled change nothing."""
    manager, runner = llm.manager, llm.engine.runner
    streams = {f"{kind}{i}": tiny_v4.token_ids(30, seed=i) for kind in "ab" for i in range(3 if requests < 6 else 0)}
    streams = streams or {f"a{i}": tiny_v4.token_ids(30, seed=i) for i in range(6)}
    found: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    for kind in ("a", "b") if requests < 6 else ("a",):
        keys = [key for key in streams if key[0] == kind][:requests]
        for key in keys:
            manager.admit_request(key)
        for p in range(20):
            plan = [(key, 1) for key in keys]
            step = manager.prepare_forward(plan, decode.rows(len(keys)))
            tokens = [streams[key][p : p + 1] for key in keys]
            inputs = runner.inputs(tokens, range(len(keys)), step)
            if kind == "a":
                graph = decode.ready(step)
                assert graph is not None
                manager.begin(step)
                found[kind].append(graph.replay(inputs.tokens, step)[: len(keys)].clone())
            else:
                found[kind].append(runner.forward(inputs))
            manager.commit(plan)
            assert manager.reached[manager.slot_of[keys[0]]] == p + 1
        for key in keys:
            manager.release_request(key)
    assert decode.captured.keys() == {(decode.rows(requests), 64)}
    for a, b in zip(found["a"], found["b"]):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)  # the head has a row of padding more or less
    want = llm.logits(streams["a0"][:20], prefill=0)
    # alone instead of beside others: f32 sums in another order, a few 1e-6 of logits of up to 5
    torch.testing.assert_close(torch.stack([x[0] for x in found["a"]]), want, rtol=0, atol=1e-4)


def steps(llm: LLM, begin: int, end: int) -> list[torch.Tensor]:
    """Logits of request "a" token by token, as its graphs give them."""
    found, tokens = [], tiny.token_ids(64)
    for p in range(begin, end):
        step = llm.manager.prepare_forward([("a", 1)], 1)
        inputs = llm.engine.runner.inputs([tokens[p : p + 1]], [0], step)
        found.append(llm.engine.runner.forward(inputs).clone())
        llm.manager.commit([("a", 1)])
    return found


@pytest.fixture
def open_qwen(oracle: Callable, stand_in: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """Streams of up to 16 entries are short; request "a" is admitted."""

    def build(kv: str = "fp8", requests: int = 2) -> LLM:
        cache = CacheConfig(kv_dtype=kv, page_size=16)
        llm = LLM(oracle("qwen3_5").folder, "cpu", "float32", cache=cache, max_requests=requests, max_context=64)
        monkeypatch.setattr(llm.engine.runner, "graphs", DecodeGraphs(llm.model, llm.manager))
        llm.manager.admit_request("a")
        return llm

    monkeypatch.setattr(decode_file, "SHORT", 16)
    return build


def test_a_stream_that_grows_past_short_goes_on_in_another_graph(
    open_qwen: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_qwen()
    found = steps(llm, 0, 16)
    assert llm.engine.runner.graphs.captured.keys() == {(1, 16)}
    found += steps(llm, 16, 20)
    assert llm.engine.runner.graphs.captured.keys() == {(1, 16), (1, 64)}
    monkeypatch.setattr(llm.engine.runner, "graphs", None)
    llm.manager.release_request("a")
    llm.manager.admit_request("a")
    for replayed, plain in zip(found, steps(llm, 0, 20)):
        assert torch.equal(replayed, plain)  # one row either way


@pytest.mark.parametrize(("kv", "few", "short"), (("f32", 4, 16), ("fp8", 0, 16), ("fp8", 4, 64)))
def test_where_the_launch_is_the_same_there_is_one_graph(
    kv: str, few: int, short: int, open_qwen: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other pages than FP8, many requests, an engine for short contexts."""
    monkeypatch.setattr(decode_file, "FEW", few)
    monkeypatch.setattr(decode_file, "SHORT", short)
    llm = open_qwen(kv)
    steps(llm, 0, 20)
    assert llm.engine.runner.graphs.captured.keys() == {(1, 64)}


def test_a_graph_for_short_streams_refuses_longer_ones(open_qwen: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where it was picked by mistake."""
    llm = open_qwen()
    steps(llm, 0, 16)
    monkeypatch.setattr(graphs, "same_shape_up_to", lambda *args: 16)
    with pytest.raises(AssertionError, match="a graph for 16 entries a stream was asked to read 17"):
        steps(llm, 16, 17)
    assert llm.manager.position("a") == 16


def test_a_step_that_is_no_graphs_is_not_replayed(llm: LLM, decode: DecodeGraphs) -> None:
    llm.manager.admit_request("a")
    try:
        assert not decode.ready(llm.manager.prepare_forward([("a", 3)]))
        assert not decode.captured
    finally:
        llm.manager.release_request("a")


def test_a_capture_that_fails_is_not_tried_again(
    llm: LLM, decode: DecodeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of memory, say: the step runs as it is, with a warning, and other sizes still may be captured."""
    tries = []

    def fails(self: DecodeGraphs, rows: int, reach: int) -> Captured:
        tries.append(rows)
        raise torch.OutOfMemoryError("no memory for the graph")

    monkeypatch.setattr(DecodeGraphs, "_capture", fails)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(llm.engine.runner, "graphs", decode)
    with pytest.warns(UserWarning, match="1 rows with up to .* run without a CUDA graph: no memory"):
        got = llm.logits(tiny_v4.token_ids(5), prefill=3)
    monkeypatch.setattr(llm.engine.runner, "graphs", None)
    assert torch.equal(got, llm.logits(tiny_v4.token_ids(5), prefill=3)) and tries == [1]


@pytest.mark.parametrize(
    ("triton", "device", "captures"), [(True, "cuda", True), (False, "cuda", False), (True, "cpu", False)]
)
def test_without_triton_or_a_gpu_nothing_is_captured(
    triton: bool, device: str, captures: bool, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "HAS_TRITON", triton)
    monkeypatch.setattr(llm.manager, "device", torch.device(device))
    assert graphs.can_capture(llm.manager) is captures
