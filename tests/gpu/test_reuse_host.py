"""Prompts that begin with what has gone to pinned memory: the bits of a cold run, whatever is late, beside others that
decode in graphs with steps launched ahead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import tiny
import tiny_v4
import torch
from exactness import Models

from engine.driving import assert_nothing_held, run
from engine.reusing import apart, check, drive_out, same
from gpu.beside import BASE, CASES, MARKS, PARAMS, parting
from gpu.beside import ask_beside as ask_beside_one
from hybridkv import LLM, CacheConfig
from hybridkv.cache.tier_sizes import BLOCK
from hybridkv.cache.tiers import HostTier
from hybridkv.request import Request

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("reuse_host"), "cuda")


ask_beside = partial(ask_beside_one, answer=40)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Callable[[LLM], None]:
    """`late(llm)`: every copy to or from the host comes milliseconds late."""

    def make(llm: LLM) -> None:
        times, tier = itertools.cycle((1, 30, 5)), llm.manager.host
        down, up = tier._down, tier._up

        def delay() -> None:
            with torch.cuda.stream(tier._side):
                torch.cuda._sleep(next(times) * 1_000_000)

        monkeypatch.setattr(tier, "_down", lambda *what: (delay(), down(*what))[1])
        monkeypatch.setattr(tier, "_up", lambda *what: (delay(), up(*what))[1])

    return make


@pytest.mark.parametrize(("dtype", "kv"), [("float32", "f32"), ("bfloat16", "bf16"), ("bfloat16", "fp8")])
@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "qwen3_next"])
def test_hits_from_the_host_give_the_bits_of_a_cold_run(
    models: Models, kind: str, dtype: str, kv: str, late: Callable[[LLM], None]
) -> None:
    """Pages and rows that were given away are hostile at once, while what was on them is still on its way."""
    llm = models.open(kind, dtype, kv, None, context=1024)
    engine = llm.engine
    assert engine.launches_ahead and llm.manager.host.pages and llm.manager.reuse is not None
    late(llm)
    llm.manager.reuse.forget()
    ask_beside(llm, [BASE], marks=MARKS)
    for i, (shared, length) in enumerate(CASES):
        drive_out(engine)
        tokens = parting(shared, length, i + 1)
        [warm], [cold] = ask_beside(llm, [tokens]), ask_beside(llm, [tokens], cache=False)
        assert warm.cached_tokens >= 128 and warm.reuse["tier"] == "host" and warm.reuse["load_ms"] > 0, warm.reuse
        assert same(warm, cold), (warm.reuse, apart(warm, cold))
    assert llm.manager.host.failed == 0
    assert_nothing_held(engine)


def test_what_comes_from_the_host_is_waited_for(
    models: Models, late: Callable[[LLM], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the wait answers are others, or no numbers: so the tests above would find it."""
    llm = models.open("qwen3_5", "float32", "f32", None, context=1024)
    assert llm.manager.reuse is not None
    llm.manager.reuse.forget()
    ask_beside(llm, [BASE], marks=MARKS)
    late(llm)

    def at_once(self: HostTier, chunk: tuple[torch.Tensor, int | None]) -> Iterator[torch.Tensor]:
        yield chunk[0]

    drive_out(llm.engine)
    torch.cuda.synchronize()
    for buffer in llm.manager.host._staging:
        buffer.fill_(1)
    with monkeypatch.context() as broken:
        broken.setattr(HostTier, "_used", at_once)
        [warm] = ask_beside(llm, [parting(640, 700)], sound=False)
    [cold] = ask_beside(llm, [parting(640, 700)], cache=False)
    assert warm.reuse["tier"] == "host" and (warm.error is not None or not same(warm, cold))
    torch.cuda.synchronize()
    llm.manager.reuse.forget()
    assert_nothing_held(llm.engine)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_many_texts_in_turn_where_there_is_room_for_few(kind: str, tmp_path: Path, late: Callable[[LLM], None]) -> None:
    tiny.save(kind, tmp_path)
    sizes = {"cache": CacheConfig("bf16", 16), "max_requests": 2, "max_context": 512}
    llm = LLM(str(tmp_path), "cuda", "bfloat16", exact=True, **sizes)  # type: ignore[arg-type]
    late(llm)
    texts, found = [tiny.token_ids(300, seed=200 + i) for i in range(9)], 0
    for turn in range(3):
        for i, text in enumerate(texts):
            tokens = [*text, *tiny.token_ids(5 + turn, seed=i)]
            [warm], [cold] = ask_beside(llm, [tokens], marks=[(256, "client")]), ask_beside(llm, [tokens], cache=False)
            assert same(warm, cold), (turn, i, warm.reuse)
            found += warm.reuse.get("tier") == "host"
            if not turn or i % 3 == 0:
                drive_out(llm.engine)
    assert found > 5 and llm.manager.reuse is not None and llm.manager.reuse.host.counts["columns stored"] > 20
    llm.manager.reuse.forget()
    assert llm.manager.host.used == 0


def test_deepseek_v4(tmp_path: Path) -> None:
    folder = tiny_v4.Oracle("mini", tmp_path).folder
    llm = LLM(str(folder), "cuda", "float32", cache=CacheConfig(kv_dtype="f32", block=16), max_context=320)
    base, other, engine = tiny_v4.token_ids(300), tiny_v4.token_ids(300, seed=5), llm.engine

    def ask(tokens: list[int], **how: object) -> Request:
        request = engine.add(tokens, PARAMS, **how)  # type: ignore[arg-type]
        run(engine)
        check(engine)
        assert request.error is None
        return request

    ask(base, marks=[(at, "client") for at in (64, 128, 192, 256)])
    for shared, length in ((256, 300), (200, 205), (133, 197)):
        tokens = [*base[:shared], *other[shared:length]]
        drive_out(engine)
        warm, cold = ask(tokens), ask(tokens, cache=False)
        assert warm.reuse["tier"] == "host" and apart(warm, cold) < 1e-4  # f32; the CPU's tests have the bound's reason


def test_copies_that_have_ended_are_forgotten_also_where_nobody_asks_for_them() -> None:
    tier = HostTier(8 * BLOCK, torch.device("cuda"))
    for _ in range(20):
        blocks = tier.put([torch.ones(BLOCK, dtype=torch.uint8, device="cuda")])
        assert blocks is not None
        torch.cuda.synchronize()
        tier.drop(blocks)
    assert len(tier._flying) == 1 and tier.in_flight == 0
