"""Prompts that begin with what others have read, beside the same prompts read cold: all that comes of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tiny
import torch
from torch import Tensor

from engine.driving import run
from hybridkv.config import SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.request import Request

ASK = SamplingParams(max_tokens=4, logprobs=tiny.VOCAB, ignore_eos=True)  # log probabilities of every token


def logprobs(request: Request) -> Tensor:
    """[tokens of the answer, vocabulary]"""
    return torch.tensor([[each.top[i] for i in sorted(each.top)] for each in request.logprobs], dtype=torch.float64)


def ask(engine: Engine, tokens: Sequence[int], params: SamplingParams = ASK, **how: Any) -> Request:
    """One request to its end, with every count looked at afterwards."""
    request = ask_only(engine, tokens, params, **how)
    check(engine)
    return request


def ask_only(engine: Engine, tokens: Sequence[int], params: SamplingParams = ASK, **how: Any) -> Request:
    """One request to its end."""
    request = engine.add(tokens, params, **how)
    run(engine)
    assert request.error is None, request.error
    return request


def check(engine: Engine) -> None:
    """All counts are true."""
    engine.manager.check_integrity()
    if engine.manager.reuse is not None:
        engine.manager.reuse.check()


def same(one: Request, other: Request) -> bool:
    """Whether tokens and every log probability are the same, bit by bit."""
    return one.generated == other.generated and torch.equal(logprobs(one), logprobs(other))


def apart(one: Request, other: Request) -> float:
    """The largest difference of log probabilities after the prompt, as a part of the largest one."""
    a, b = logprobs(one)[0], logprobs(other)[0]
    return float((a - b).abs().max() / b.abs().max())


def poison(engine: Engine) -> None:
    """Whatever nobody holds is hostile: state of free slots and free rows, pages without an owner."""
    manager = engine.manager
    reuse = manager.reuse
    free = [slot for slot in range(manager.slots) if slot not in manager.slot_of.values()]
    if reuse is not None:
        free += [
            row
            for row in range(manager.slots, manager.slots + reuse.checkpoints.rows)
            if row not in reuse.checkpoints.all and row not in reuse.checkpoints.reserved
        ]
    for row in free:
        for state in manager.state.rows(row).values():
            state.fill_(float("nan"))
    for table in manager.tables.values():
        nobodys = (table.allocator.refs == 0).nonzero()[0]
        for pool in table.pool.tensors.values():
            pool.view(torch.uint8)[:, nobodys] = 255


def drive_out(engine: Engine) -> None:
    """Every row and page that is not in use is needed by somebody, and hostile afterwards."""
    reuse, rows = engine.manager.reuse, []
    assert reuse is not None
    while (row := reuse.checkpoints.reserve()) is not None:
        rows.append(row)
    for row in rows:
        reuse.checkpoints.give_back(row)
    for table in engine.manager.tables.values():
        table.allocator.release(table.allocator.acquire(table.allocator.free + table.allocator.reclaimable))
    assert all(column.pages is None for column in reuse.columns), "something stayed"
    poison(engine)
    check(engine)


class Cold:
    """Answers of an engine that reuses nothing, each computed once."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        self.build, self.engine = build, build()
        self.known: dict[tuple, Request] = {}

    def __call__(self, tokens: Sequence[int], params: SamplingParams = ASK, **how: Any) -> Request:
        key = (*tokens, params.max_tokens, params.seed, *how.items())
        if key not in self.known:
            self.known[key] = ask(self.engine, tokens, params, **how)
        return self.known[key]
