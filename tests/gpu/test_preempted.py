"""Requests that make room and come back from pinned memory, whatever is late, while others decode in graphs with steps
launched ahead: the bits of each alone.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny
import torch
from exactness import Models

from engine.driving import assert_nothing_held, run
from engine.preempting import params
from engine.reusing import check, poison, same
from gpu.test_reuse_host import late  # noqa: F401
from hybridkv import LLM
from hybridkv.request import Request

pytestmark = pytest.mark.gpu

LENGTHS = (300, 120, 450, 64, 200)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("preempted"), "cuda")


def crowd(llm: LLM, preempts: bool) -> list[Request]:
    """All at once; now and then the youngest makes room, and what it held is hostile at once."""
    engine = llm.engine
    asked = [engine.add(tiny.token_ids(n, seed=50 + i), params(i), cache=False) for i, n in enumerate(LENGTHS)]

    def look(step: int) -> None:
        if preempts and step % 5 == 4 and len(engine.scheduler.running) > 1:
            engine.drain()
            if len(engine.scheduler.running) > 1:
                engine.scheduler.preempt(max(engine.scheduler.running, key=lambda r: r.order))
                poison(engine)
                check(engine)

    run(engine, look)
    assert [r.error for r in asked] == [None] * len(asked)
    return asked


@pytest.mark.parametrize("budget", [None, 64])
@pytest.mark.parametrize(("dtype", "kv"), [("float32", "f32"), ("bfloat16", "bf16"), ("bfloat16", "fp8")])
@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "qwen3_next"])
def test_what_comes_back_gives_the_bits_of_a_request_that_never_left(
    models: Models,
    kind: str,
    dtype: str,
    kv: str,
    budget: int | None,
    late: Callable[[LLM], None],  # noqa: F811
) -> None:
    llm = models.open(kind, dtype, kv, budget, context=1024)
    engine = llm.engine
    assert engine.launches_ahead and llm.manager.host.pages
    llm.manager.host.preempted = True
    want = crowd(llm, preempts=False)
    late(llm)
    before, failed = engine.scheduler.counts["came_back"], llm.manager.host.failed
    found = crowd(llm, preempts=True)
    assert engine.scheduler.counts["came_back"] - before == sum(r.restored for r in found) > 2
    assert all(same(mine, its) for mine, its in zip(found, want, strict=True))
    assert llm.manager.host.failed == failed and not llm.manager.away and not llm.manager.arriving
    torch.cuda.synchronize()
    assert_nothing_held(engine)


def test_others_decode_while_it_is_on_its_way(models: Models, late: Callable[[LLM], None]) -> None:  # noqa: F811
    """Copies take longer than steps: nobody is held up by them, and nobody reads too early."""
    llm = models.open("qwen3_5", "float32", "f32", None, context=1024)
    llm.manager.host.preempted = True
    engine = llm.engine
    first = engine.add(tiny.token_ids(200, seed=4), params(4, 90), cache=False)
    while first.answer_tokens < 20:  # steps of one request are captured now: a capture takes longer than the copies
        engine.step()
    second = engine.add(tiny.token_ids(200, seed=5), params(5, 60), cache=False)
    while second.answer_tokens < 4:
        engine.step()
    engine.drain()
    late(llm)
    engine.scheduler.preempt(second)
    poison(engine)
    alone = 0
    while not second.finished and alone < 1000:
        before = len(first.tokens), len(second.tokens)
        engine.step()
        alone += (len(first.tokens) - before[0], len(second.tokens) - before[1]) == (1, 0)
    run(engine)
    assert second.restored == 1 and alone > 1 and first.error is second.error is None
    assert_nothing_held(engine)
