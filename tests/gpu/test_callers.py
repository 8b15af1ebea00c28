"""Threads and tasks on a GPU: the engine's own thread captures graphs, launches ahead, and serves everybody."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny

from engine.driving import assert_nothing_held, prompt
from hybridkv import LLM, AsyncLLM, SamplingParams

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
@pytest.mark.parametrize("exact", [True, False])
def test_threads_tasks_and_logits_at_once(kind: str, exact: bool, tmp_path: Path) -> None:
    tiny.save(kind, tmp_path)
    with LLM(tmp_path, device="cuda", dtype="float32", exact=exact, max_requests=4, max_context=512) as llm:
        ask = [(prompt(5 + 9 * i, i), SamplingParams(max_tokens=20 + i, ignore_eos=True)) for i in range(6)]
        alone = [llm.generate(ids, params)[0].token_ids for ids, params in ask]

        def work(i: int) -> None:
            ids, params = ask[i % 6]
            if i % 5 == 4:
                assert llm.logits(ids).shape[0] == len(ids)
            if i % 7 == 6:
                stream = llm.stream(ids, params)
                next(stream.steps())
                stream.close()
            found = llm.generate(ids, params)[0].token_ids
            assert len(found) == len(alone[i % 6])
            assert found == alone[i % 6] or not exact

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(60)))

        async def tasks() -> None:
            served = AsyncLLM(llm)
            asked = [asyncio.create_task(served.generate(*ask[i % 6])) for i in range(24)]
            await asyncio.sleep(0.01)
            for task in asked[::3]:
                task.cancel()
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert sum(isinstance(each, list) for each in found) >= 16

        asyncio.run(tasks())
        llm.owner.run(lambda engine: engine.drain(), drained=True)
        assert_nothing_held(llm.engine)
