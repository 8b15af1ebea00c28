"""10,000 requests through one engine on the GPU: memory, pages, slots and graphs are what they were after the first
2,000.
"""

from collections.abc import Callable

import pytest
from crowd import engine_over
from endurance import EVICTION, Census, serve

from hybridkv import LLM, CacheConfig
from hybridkv.engine import mixed_graphs

pytestmark = pytest.mark.gpu
WARM, MORE, PARTS = 2000, 8000, 4


def test_nothing_grows_in_ten_thousand_requests(oracle: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_graphs, "ASKED", 1)  # shapes that are rare are captured in the warm-up, too
    cache = CacheConfig("bf16", 16, **EVICTION)  # type: ignore[arg-type]
    llm = LLM(str(oracle("qwen3_5").folder), "cuda", "bfloat16", cache=cache, max_requests=1, max_context=128)
    engine = engine_over(llm, pool=1024, slots=32, context=128, step_tokens=256)
    serve(engine, WARM, seed=0, at_once=40)
    now = Census.of(engine)
    first = Census.of(engine)  # beside one census, as the last one is
    print(f"\n{WARM:6} requests: {describe(first)}", flush=True)
    assert first.kept["mixed graphs"] > 3 and first.kept["graphs"] > 3
    for part in range(1, PARTS + 1):
        ended = serve(engine, MORE // PARTS, seed=part, at_once=40)
        now = Census.of(engine)
        print(f"{WARM + part * MORE // PARTS:6} requests: {describe(now)}, {dict(ended)}", flush=True)
        assert ended["evicted"] > 100 and ended["preempted"] > 0 and ended["cancelled"] > 10 and ended["error"]
    assert now.growth(first, MORE) == []
    assert now.device[0] - first.device[0] <= 1 << 20, "memory in use"
    assert now.device[1] - first.device[1] <= 32 << 20, "what the allocator keeps, in pieces of 2 and 20 MiB"
    assert now.resident - first.resident <= 64 << 20, "memory of the process"


def describe(census: Census) -> str:
    allocated, reserved = census.device
    return (
        f"{allocated / 2**20:.2f} MiB allocated, {reserved / 2**20:.0f} reserved, {census.resident / 2**20:.0f} of the "
        f"process, {sum(census.objects.values())} objects, {census.contents} entries, {census.kept}"
    )
