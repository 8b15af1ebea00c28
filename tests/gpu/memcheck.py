"""Every kernel of a small Qwen3.5 and a small DeepSeek-V4 once, for a memory checker. Not a test: run it under one.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/memcheck.py [0 1 2 3: which of RUNS]

Qwen3.5: prompts in chunks, eviction, decode steps through graphs with rows of padding, in bf16 and FP8, and FP8
weights. DeepSeek-V4: the same without eviction, through window, compressed entries, index and choice, sparse attention
and experts. Head widths are the real ones, so that the kernels are those of large models.
"""

import sys
from typing import Any

import torch

from hybridkv.cache import KVCacheManager
from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.eviction import Evictor
from hybridkv.models import cache_schema
from hybridkv.models.config import ModelConfig
from hybridkv.models.known import KNOWN
from hybridkv.models.random_weights import random_decoder

QWEN = KNOWN["Qwen3.5-27B"] | dict(
    hidden_size=512, num_hidden_layers=4, intermediate_size=1024, vocab_size=1000, num_attention_heads=12,
    num_key_value_heads=2, linear_num_key_heads=2, linear_num_value_heads=6,
)  # fmt: skip
DEEPSEEK = KNOWN["DeepSeek-V4-Flash"] | dict(
    hidden_size=512, num_hidden_layers=3, compress_ratios=[0, 4, 128], num_hash_layers=1, vocab_size=1000,
    q_lora_rank=256, o_groups=2, o_lora_rank=128, index_topk=64, n_routed_experts=8, moe_intermediate_size=256,
)  # fmt: skip
LENGTHS = (3, 257, 600)  # of 600 tokens 150 entries, of which 64 are picked


def run(raw: dict[str, Any], cache: CacheConfig, fp8_weights: bool = False, device: str = "cuda") -> None:
    config = ModelConfig.from_dict(raw)
    model = random_decoder(config, device, torch.bfloat16, fp8_weights)
    schema = cache_schema(config, cache, torch.bfloat16)
    manager = KVCacheManager(schema, schema.pool_pages(3, 700), 3, 700, device)
    evictor = Evictor.make(cache, manager, config.head_dim)
    engine = Engine(model, manager, step_tokens=256, evictor=evictor)
    asked = [engine.add([(7 * i + n) % 1000 for i in range(n)], SamplingParams(max_tokens=6)) for n in LENGTHS]
    while not engine.idle:
        engine.step()
    assert all(r.finish_reason == "length" and r.error is None for r in asked), [r.error for r in asked]
    assert evictor is None or asked[-1].evictions
    if device == "cuda":
        torch.cuda.synchronize()
        assert engine.runner.graphs is not None and engine.runner.graphs.captured
    weights = "FP8" if fp8_weights else "bf16"
    print(f"{raw['model_type']}, {cache.kv_dtype} KV, {weights} weights: {[r.generated for r in asked]}", flush=True)


RUNS: list[tuple[dict[str, Any], CacheConfig, bool]] = [
    (QWEN, CacheConfig("bf16", budget=128), False),
    (DEEPSEEK, CacheConfig("fp8"), False),
    (QWEN, CacheConfig("fp8", budget=128), True),
    (DEEPSEEK, CacheConfig("bf16"), False),
]

if __name__ == "__main__":
    for i in map(int, sys.argv[1:] or range(len(RUNS))):
        run(*RUNS[i])
    print("done")
