"""Every kernel of a small Qwen3.5 once, for a memory checker. Not a test: run it under one.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/memcheck.py

Prompts in chunks, eviction, decode steps through graphs with rows of padding, in bf16 and FP8, and FP8 weights. Head
widths are the real ones, so that the kernels are those of large models.
"""

import torch

from hybridkv.cache import KVCacheManager
from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.eviction import Evictor
from hybridkv.models import cache_schema
from hybridkv.models.config import ModelConfig
from hybridkv.models.known import KNOWN
from hybridkv.models.random_weights import random_decoder

SMALL = dict(
    hidden_size=512, num_hidden_layers=4, intermediate_size=1024, vocab_size=1000, num_attention_heads=12,
    num_key_value_heads=2, linear_num_key_heads=2, linear_num_value_heads=6,
)  # fmt: skip


def run(kv: str, fp8_weights: bool) -> None:
    config = ModelConfig.from_dict(KNOWN["Qwen3.5-27B"] | SMALL)
    model = random_decoder(config, "cuda", torch.bfloat16, fp8_weights)
    cache = CacheConfig(kv, budget=128)
    schema = cache_schema(config, cache, torch.bfloat16)
    manager = KVCacheManager(schema, schema.pool_pages(3, 700), 3, 700, "cuda")
    engine = Engine(model, manager, step_tokens=256, evictor=Evictor.make(cache, manager, config.head_dim))
    lengths = (3, 257, 600)
    asked = [engine.add([(7 * i + n) % 1000 for i in range(n)], SamplingParams(max_tokens=6)) for n in lengths]
    while not engine.idle:
        engine.step()
    torch.cuda.synchronize()
    assert all(r.finish_reason == "length" and r.error is None for r in asked), [r.error for r in asked]
    assert engine.runner.graphs is not None and engine.runner.graphs.captured and asked[2].evictions
    print(f"{kv} KV, {'FP8' if fp8_weights else 'bf16'} weights: {[r.generated for r in asked]}", flush=True)


if __name__ == "__main__":
    run("bf16", False)
    run("fp8", True)
    print("done")
