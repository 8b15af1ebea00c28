"""The shape of Qwen3.5-27B on a GPU: a 16,384-token prompt at budget 2048 gives seven eighths of its pages back.

All 64 layers with their real attention and DeltaNet widths; the feed-forward parts, which store nothing, are thin.
"""

from typing import Any

import pytest
import torch
from random_model import engine_for, random_decoder

from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Decoder
from hybridkv.models.known import KNOWN

pytestmark = pytest.mark.gpu

PROMPT, BUDGET, MIB = 16384, 2048, 1 << 20
FULL = {"f32": 2048, "bf16": 1024, "fp8": 520}  # MiB of KV for the whole prompt; FP8 with its scales


@pytest.fixture(scope="module")
def model() -> Decoder:
    config = ModelConfig.from_dict(KNOWN["Qwen3.5-27B"] | {"intermediate_size": 64, "vocab_size": 4096})
    return random_decoder(config, "cuda", torch.bfloat16)


@pytest.mark.parametrize("kv_dtype", FULL)
def test_what_a_long_prompt_gives_up_another_request_can_use(
    model: Decoder, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CacheConfig(kv_dtype, budget=BUDGET, policy="snapkv:pooling=none")  # even: an eighth, to the page
    engine = engine_for(model, cache, "cuda", torch.bfloat16, pool=PROMPT + 256, slots=2, context=PROMPT + 512)
    manager, table = engine.manager, engine.manager.tables["attention"]
    prompt = torch.randint(0, 4096, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    ask = SamplingParams(max_tokens=64, ignore_eos=True)
    first = engine.add(prompt, ask)
    second = engine.add(prompt[: PROMPT - BUDGET - 256], ask)  # fits only into what the first gives back
    before, start = [], manager.start_compaction

    def counted(*args: Any) -> Any:
        before.append(table.allocator.held)
        return start(*args)

    monkeypatch.setattr(manager, "start_compaction", counted)
    while not first.evictions:
        assert second in engine.scheduler.waiting
        engine.step()
    page = table.schema.page_bytes
    assert before[0] * page == FULL[kv_dtype] * MIB  # the whole prompt was there
    # and an eighth of it is left, beside pages for tokens that came since
    since = manager.position(first.key) - PROMPT
    more = -(-since // table.schema.entries_per_page) * table.schema.streams * page
    assert since <= 2 and (manager.used_bytes(first.key) - more) * 8 == FULL[kv_dtype] * MIB
    assert set(table.lengths[manager.slot_of[first.key]].tolist()) == {BUDGET + since}
    while not second.evictions:
        engine.step()
    assert len(before) == 2, "both were left to the device"
    assert not first.preemptions and not second.preemptions  # both are resident at once
    while not engine.idle:
        engine.step()
    for request in (first, second):
        assert request.finish_reason == "length" and request.error is None
        assert len(set(request.generated)) >= 2  # decoding goes on well-formed
    assert table.allocator.held == 0


def test_the_first_token_is_the_same_with_and_without_eviction(model: Decoder) -> None:
    prompt = torch.randint(0, 4096, (4096,), generator=torch.Generator().manual_seed(2)).tolist()
    tokens = []
    for budget in (None, 1024):
        cache = CacheConfig("bf16", budget=budget)
        engine = engine_for(model, cache, "cuda", torch.bfloat16, pool=4352, slots=1, context=4608)
        request = engine.add(prompt, SamplingParams(max_tokens=8, ignore_eos=True))
        while not engine.idle:
            engine.step()
        assert bool(request.evictions) == (budget is not None)
        tokens.append(request.generated)
    assert tokens[0][0] == tokens[1][0]
