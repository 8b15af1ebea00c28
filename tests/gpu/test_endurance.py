"""10,000 requests through one engine on the GPU: memory, pages, slots and graphs are what they were after the first
2,000.
"""

from collections.abc import Callable

import pytest
from crowd import engine_over
from endurance import EVICTION, Census, serve

from hybridkv import LLM, CacheConfig, SamplingParams
from hybridkv.engine import mixed_graphs
from hybridkv.engine.workspace import graph_sizes

pytestmark = pytest.mark.gpu
WARM, MORE, PARTS = 2000, 8000, 4


def test_nothing_grows_in_ten_thousand_requests(oracle: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_graphs, "ASKED", 1)  # shapes that are rare are captured in the warm-up, too
    cache = CacheConfig("bf16", 16, **EVICTION)  # type: ignore[arg-type]
    llm = LLM(str(oracle("qwen3_5").folder), "cuda", "bfloat16", cache=cache, max_requests=1, max_context=128)
    engine = engine_over(llm, pool=1024, slots=32, context=128, step_tokens=256)
    for together in graph_sizes(32):  # a graph of decoding requests for each
        for i in range(together):
            engine.add([i], SamplingParams(max_tokens=4, ignore_eos=True))
        while not engine.idle:
            engine.step()
    serve(engine, WARM, seed=0, at_once=40)
    now = Census.of(engine)
    first = Census.of(engine)  # beside one census, as the last one is
    print(f"\n{WARM:6} requests: {describe(first)}", flush=True)
    assert first.kept["mixed graphs"] > 3 and first.kept["graphs"] == len(graph_sizes(32))
    for part in range(1, PARTS + 1):
        ended = serve(engine, MORE // PARTS, seed=part, at_once=40)
        del now  # a census takes some 2,000 blocks of memory itself
        now = Census.of(engine)
        print(f"{WARM + part * MORE // PARTS:6} requests: {describe(now)}, {dict(ended)}", flush=True)
        assert ended["evicted"] > 100 and ended["preempted"] > 0 and ended["cancelled"] > 10 and ended["error"]
    assert now.growth(first, MORE) == []
    assert now.device[0] - first.device[0] <= 1 << 20, "memory in use"
    assert now.device[1] - first.device[1] <= 32 << 20, "what the allocator keeps, in pieces of 2 and 20 MiB"
    assert now.resident - first.resident <= 64 << 20, "memory of the process"


def describe(census: Census) -> str:
    allocated, reserved, resident = (n / 2**20 for n in (*census.device, census.resident))
    return (
        f"{allocated:.2f} MiB allocated, {reserved:.0f} reserved, {resident:.0f} of the process; "
        f"{sum(census.objects.values())} objects, {census.contents} entries, {census.blocks} blocks; {census.kept}"
    )
