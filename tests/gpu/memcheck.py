"""Every kernel of a small Qwen3.5 and a small DeepSeek-V4 once, for a memory checker. Not a test: run it under one.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/memcheck.py [0 1 2 3 4: which of RUNS, or 4]

Qwen3.5: prompts in chunks, eviction, decode steps through graphs with rows of padding, in bf16 and FP8, and FP8
weights. DeepSeek-V4: the same without eviction, through window, compressed entries, index and choice, sparse attention
and experts. Head widths are the real ones, so that the kernels are those of large models. 4: products that small
models do not reach, those of many requests with large matrices and with packed ones.
"""

import sys
from typing import Any

import torch

from hybridkv.cache import KVCacheManager
from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.eviction import Evictor
from hybridkv.kernels.linear.packed import linear_packed
from hybridkv.kernels.linear.packed_linear import ROWS
from hybridkv.kernels.linear.packed_planes import BLOCK, BLOCK_BYTES, GROUP
from hybridkv.kernels.linear.packed_weights import pack
from hybridkv.kernels.linear.skinny import linear_rows
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
    evictor = Evictor.make(cache, manager, scale=config.attention_scale)
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


def large_products(device: str = "cuda") -> None:
    x = torch.randn(64, 5120, dtype=torch.bfloat16, device=device)
    w = torch.randn(17000, 5120, dtype=torch.bfloat16, device=device)  # no whole number of tiles
    for T, gated in ((9, False), (33, False), (64, False), (64, True)):
        assert linear_rows(x[:T], w, gated=gated).isfinite().all()
    for bits, size in BLOCK_BYTES.items():
        columns = 5120 // (GROUP if bits == 8 else BLOCK) * size
        blocks = torch.randint(0, 60, (528, columns), dtype=torch.uint8, device=device)  # numbers that are finite
        for T in (1, 16, 64):
            assert linear_packed(x[:T], pack(blocks, bits).laid(ROWS)).isfinite().all()
    print("large and packed products", flush=True)


if __name__ == "__main__":
    for i in map(int, sys.argv[1:] or range(len(RUNS) + 1)):
        if i == len(RUNS):
            large_products()
        else:
            run(*RUNS[i])
    print("done")
