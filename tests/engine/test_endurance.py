"""An engine that has served hundreds of requests holds what it held after the first few: tests/gpu serves 10,000."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from crowd import engine_over
from endurance import EVICTION, Census, serve
from long_form import LONG

from engine.driving import KINDS
from hybridkv import LLM, CacheConfig
from hybridkv.engine import sampler
from hybridkv.engine.engine import Engine
from hybridkv.engine.scheduler import Scheduler
from hybridkv.request import Request

WARM, MORE = (60, 240) if LONG else (40, 120)


@pytest.fixture
def engine(oracle: Callable) -> Callable[[str], Engine]:
    def build(kind: str) -> Engine:
        cache = CacheConfig("f32", 16, **EVICTION)  # type: ignore[arg-type]
        llm = LLM(str(oracle(kind).folder), "cpu", "float32", cache=cache, max_requests=1, max_context=128)
        return engine_over(llm, pool=256, slots=6, context=128, step_tokens=128)

    return build


def growth(engine: Engine, warm: int = WARM, more: int = MORE) -> tuple[list[str], Counter[str]]:
    """What has grown, and how the requests ended."""
    engine.launches_ahead = True
    serve(engine, warm, seed=0, at_once=8)
    first = Census.of(engine)
    before = Census.of(engine)  # beside one census, as the last one is
    del first
    ended = serve(engine, more, seed=1, at_once=8)
    return Census.of(engine).growth(before, more), ended


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_grows(kind: str, engine: Callable) -> None:
    grown, ended = growth(engine(kind))
    assert ended["length"] > MORE // 2 and ended["evicted"] > MORE // 10 and ended["preempted"] > 0
    assert ended["cancelled"] > 4 and ended["refused"] and ended["error"], ended
    assert grown == []


def keep_requests(kept: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that have ended stay in a list."""
    finish = Scheduler.finish
    monkeypatch.setattr(Scheduler, "finish", lambda self, request: (kept.append(request), finish(self, request)))


def keep_numbers(kept: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler takes note of whom it has ended: numbers, which are no objects of the collector's."""
    finish = Scheduler.finish

    def noted(self: Scheduler, request: Request) -> None:
        self.__dict__.setdefault("noted", []).append(request.order)
        finish(self, request)

    monkeypatch.setattr(Scheduler, "finish", noted)


def keep_tensors(kept: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tokens of penalised requests were counted in is never dropped."""
    plain = sampler.seen_tokens

    def counted(*args: object) -> torch.Tensor:
        kept.append(plain(*args))  # type: ignore[arg-type]
        return kept[-1]

    monkeypatch.setattr(sampler, "seen_tokens", counted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leak", "found"),
    [
        (keep_requests, "more hybridkv.request.Request"),
        (keep_numbers, "entries of containers"),
        (keep_tensors, "Tensor"),
    ],
)
def test_a_leak_is_found(leak: Callable, found: str, engine: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    leak([], monkeypatch)
    assert any(found in text for text in growth(engine("llama"), warm=10, more=90)[0])


def test_a_lost_page_is_found(engine: Callable) -> None:
    """In an engine that comes to rest, counts of pages are looked at."""
    one = engine("llama")
    release = one.scheduler.finish

    def loses(request: Request) -> None:
        release(request)
        next(iter(one.manager.tables.values())).allocator.acquire(1)

    one.scheduler.finish = loses
    with pytest.raises(AssertionError, match="pages held and pages named in tables differ"):
        serve(one, 3, seed=0, at_once=8)
