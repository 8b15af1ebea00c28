"""Requests that move on a GPU: to pinned memory in the middle of an answer, and into another engine, beside others."""

from pathlib import Path

import pytest
import tiny
import torch

from engine.ascii_tokenizer import write_tokenizer
from engine.driving import assert_nothing_held, prompt
from hybridkv import LLM, CacheConfig, SamplingParams
from hybridkv.cache.buffers import Buffers, parse_head
from hybridkv.cache.session import Session
from hybridkv.engine.engine import Engine
from hybridkv.request import Request

pytestmark = pytest.mark.gpu
ASK = SamplingParams(max_tokens=24, temperature=1.2, seed=11, ignore_eos=True)


def step_until(engine: Engine, request: Request, answer: int) -> None:
    for _ in range(200):
        if request.answer_tokens >= answer:
            return
        engine.step()
    raise AssertionError("no answer came")


def arrived(session: Session, pinned: bool) -> Session:
    """As another process gets it, in memory of its own."""
    buffers = session.to_buffers().seal()
    parts = [part.clone() for part in buffers.parts]
    parts = [part.pin_memory() for part in parts] if pinned else parts
    return Session.from_buffers(Buffers(parse_head(buffers.head_bytes), parts))


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("budget", [None, 24])
@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_an_answer_goes_on_in_another_engine(kind: str, budget: int | None, pinned: bool, tmp_path: Path) -> None:
    """Twice into the same engine, so that blocks of the host are written again while copies out of them may run."""
    tiny.save(kind, tmp_path)
    write_tokenizer(tmp_path)
    cache = CacheConfig("f32", 16, budget=budget, window=8, recent=8)
    how = dict(device="cuda", dtype="float32", exact=True, cache=cache, max_requests=4, max_context=512, reuse=None)
    with LLM(tmp_path, **how) as here, LLM(tmp_path, **how) as there:
        a, b = here.engine, there.engine
        request = a.add(prompt(150, 150), ASK)
        step_until(a, request, 7)
        a.drain()
        session = a.export(request)
        assert session.snapshot is not None and bool(request.evictions) == bool(budget)
        held = [*session.snapshot.entries.values(), *session.snapshot.states.values()]
        assert held and all(t.is_pinned() for t in held)
        other = b.add(prompt(90, 90), SamplingParams(max_tokens=200, ignore_eos=True))
        step_until(b, other, 3)
        moved = []
        for _ in range(2):
            moved.append(b.resume(arrived(session, pinned)))
            b.step()
        for engine, first in ((a, [request]), (b, moved)):
            while not all(each.finished for each in first):
                engine.step()
        for each in moved:
            assert each.error is None and each.tokens == request.tokens and each.cached_tokens == 150
        b.abort(other)
        for engine in (a, b):
            engine.drain()
            assert_nothing_held(engine)
            engine.manager.check_integrity()
            torch.cuda.synchronize()
