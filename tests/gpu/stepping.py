"""Steps of a model on the GPU by hand, as captured graphs and plainly."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hybridkv import LLM


def feed(llm: LLM, streams: dict[str, list[int]], begin: int, tokens: int, graph: bool) -> Tensor:
    """The next tokens of some streams as one step, replayed or computed plainly."""
    manager, runner = llm.engine.manager, llm.engine.runner
    plan = [(key, tokens) for key in streams]
    assert runner.graphs is not None
    step = manager.prepare_forward(plan, runner.graphs.rows(len(plan)) if graph else None)
    assert not graph or runner.graphs.ready(step)
    parts = [ids[begin : begin + tokens] for ids in streams.values()]
    inputs = runner.inputs(parts, [(i + 1) * tokens - 1 for i in range(len(plan))], step)
    if graph:
        out = runner.forward(inputs)
    else:
        out = runner.model.forward(inputs.tokens, step.index.positions, manager.acquire(step), inputs.rows)
    manager.commit(plan)
    return out.clone()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Cycles that earlier tests left behind are freed now, and none while memory is measured."""
    gc.collect()
    torch.cuda.synchronize()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def replay_quietly(llm: LLM, streams: dict[str, list[int]], begin: int, end: int) -> None:
    """Replays one token of each stream at a time: nothing is allocated, and the host never waits for the device."""
    with no_garbage_collection():
        for position in range(begin, end):
            replay_one_quietly(llm, streams, position)


def replay_one_quietly(llm: LLM, streams: dict[str, list[int]], position: int) -> None:
    graphs, manager = llm.engine.runner.graphs, llm.engine.manager
    assert graphs is not None
    plan = [(key, 1) for key in streams]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step = manager.prepare_forward(plan, graphs.rows(len(plan)))
        tokens = torch.zeros(len(plan), dtype=torch.int64, device="cuda")
        before = torch.cuda.memory_allocated()
        manager.acquire(step)
        graph = graphs.ready(step)
        assert graph is not None
        manager.begin(step)
        graph.replay(tokens, step)
        assert torch.cuda.memory_allocated() == before
    finally:
        torch.cuda.set_sync_debug_mode("default")
    manager.commit(plan)
    assert all(manager.position(key) == position + 1 for key in streams)


def replay_beside_hostile_rows(llm: LLM, key: str, tokens: list[int], begin: int, end: int, rows: int) -> None:
    """One request in a graph of many rows; those of padding name a real token."""
    manager, runner = llm.engine.manager, llm.engine.runner
    assert runner.graphs is not None
    for position in range(begin, end):
        step = manager.prepare_forward([(key, 1)], rows)
        inputs = runner.inputs([tokens[position : position + 1]], [0], step)
        inputs.tokens[1:] = 7
        assert runner.graphs.ready(step) and runner.forward(inputs).isfinite().all()
        manager.commit([(key, 1)])
