"""Every kernel of a small Qwen3.5 and a small DeepSeek-V4 once, for a memory checker. Not a test: run it under one.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/memcheck.py [0 1 2 ...: which of RUNS]

Each run: prompts in chunks, alone and beside requests that decode, steps of both kinds as graphs with padding; greedy,
every filter and penalty, seeds, siblings, logprobs and a logits hook. Qwen3.5: in bf16 and FP8, in exact mode, with FP8
and packed weights; evictions left to the device, of heads, of layers and of all streams. DeepSeek-V4: window,
compressed entries, index and choice, sparse attention and experts, in bf16 and as codes. Head widths are the real ones,
so that the kernels are those of large models. The last run: products that small models do not reach, those of many
requests with large matrices and with packed ones.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybridkv.cache import KVCacheManager
from hybridkv.checkpoint.loader import Part, count
from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.engine import mixed_graphs
from hybridkv.engine.engine import Engine
from hybridkv.eviction import Evictor
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.linear.packed import BESIDE, linear_packed
from hybridkv.kernels.linear.packed_linear import PackedLinear
from hybridkv.kernels.linear.packed_planes import BLOCK, BLOCK_BYTES, GROUP
from hybridkv.kernels.linear.packed_weights import Packed, pack
from hybridkv.kernels.linear.skinny import linear_rows
from hybridkv.models import FAMILIES, cache_schema
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Model
from hybridkv.models.known import KNOWN
from hybridkv.models.random_weights import RandomLoader, RandomReleasedLoader
from hybridkv.request import Request

VOCAB = 2000
QWEN = KNOWN["Qwen3.5-27B"] | dict(
    hidden_size=512, num_hidden_layers=4, intermediate_size=1024, vocab_size=VOCAB, num_attention_heads=12,
    num_key_value_heads=2, linear_num_key_heads=2, linear_num_value_heads=6,
)  # fmt: skip
DEEPSEEK = KNOWN["DeepSeek-V4-Flash"] | dict(
    hidden_size=512, num_hidden_layers=3, compress_ratios=[0, 4, 128], num_hash_layers=1, vocab_size=VOCAB,
    q_lora_rank=256, o_groups=2, o_lora_rank=128, index_topk=64, n_routed_experts=8, moe_intermediate_size=256,
)  # fmt: skip
SLOTS, CONTEXT = 5, 700
LONG = 600  # tokens; of these 150 entries, of which 64 are picked
ASKED: list[tuple[int, dict[str, Any]]] = [
    (3, {}),
    (257, dict(
        temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3, logprobs=3,
        frequency_penalty=0.2, logit_bias={5: 1.0, VOCAB - 1: -2.0}, min_tokens=3, stop_token_ids=range(40), n=2,
    )),
    (LONG, dict(temperature=1.0, top_p=0.95, seed=(1 << 63) - 1)),
    (90, dict(temperature=1.0, top_k=1100, top_p=0.9, seed=3, prompt_logprobs=2)),  # too many for a list
    (40, dict(temperature=0.7, min_p=0.1, logits_hook=lambda tokens, logits: None)),
]  # fmt: skip


@dataclass(frozen=True)
class Run:
    raw: dict[str, Any]
    caches: Sequence[CacheConfig]  # one engine after the other
    weights: str = "bf16"  # fp8 | packed | released
    exact: bool = False


class PackedLoader(RandomLoader):
    """Matrices in one packed format after the other."""

    def linear(self, inputs: int, *parts: Part) -> Linear:
        found = []
        for name, rows in parts:
            self.used.add(name)
            bits = list(BLOCK_BYTES)[len(self.used) % len(BLOCK_BYTES)]
            found.append(random_packed(count(rows), inputs, bits, str(self.device)))
        return PackedLinear(found)


def random_packed(rows: int, inputs: int, bits: int, device: str) -> Packed:
    columns = inputs // (GROUP if bits == 8 else BLOCK) * BLOCK_BYTES[bits]
    return pack(torch.randint(0, 60, (rows, columns), dtype=torch.uint8, device=device), bits)  # numbers are finite


def model_of(run: Run, config: ModelConfig, device: str) -> Model:
    if run.weights == "released":
        return FAMILIES[config.architecture].load(config, RandomReleasedLoader(config, device, torch.bfloat16))
    kind = PackedLoader if run.weights == "packed" else RandomLoader
    loader = kind(device, torch.bfloat16, fp8=run.weights == "fp8", exact=run.exact)
    return FAMILIES[config.architecture].load(config, loader)


def run(this: Run, device: str = "cuda") -> None:
    config = ModelConfig.from_dict(this.raw)
    model, mixed_graphs.ASKED = model_of(this, config, device), 1  # every step with prompts is captured
    for i, cache in enumerate(this.caches):
        schema = cache_schema(config, cache, torch.bfloat16)
        manager = KVCacheManager(schema, schema.pool_pages(SLOTS, CONTEXT), SLOTS, CONTEXT, device, this.exact)
        evictor = Evictor.make(cache, manager, scale=config.attention_scale)
        engine = Engine(model, manager, step_tokens=256, evictor=evictor)
        asked = serve(engine, [ASKED[0], ASKED[2]] if i else ASKED)
        assert evictor is None or any(request.evictions for request in asked)
        if device == "cuda":
            torch.cuda.synchronize()
            check_graphs(engine)
        what = f"{this.raw['model_type']}, {cache.kv_dtype} KV, {this.weights} weights, scope {cache.scope}"
        print(f"{what}{', exact' * this.exact}: {[r.generated for r in asked]}", flush=True)


def serve(engine: Engine, wishes: Sequence[tuple[int, dict[str, Any]]]) -> list[Request]:
    """One request after the other, each while those before it decode."""
    asked: list[Request] = []
    for n, more in wishes:
        params = SamplingParams(max_tokens=8, **more)
        asked.append(engine.add([(7 * i + n) % 1000 for i in range(n)], params))
        for _ in range(2):
            engine.step()
    while not engine.idle:
        engine.step()
    assert all(r.finish_reason in ("length", "stop") and r.error is None for r in asked), [r.error for r in asked]
    assert all(s.answer_tokens for r in asked for s in r.siblings)
    return asked


def check_graphs(engine: Engine) -> None:
    graphs, mixed = engine.runner.graphs, engine.runner.mixed
    if engine.manager.exact and graphs is None:
        return
    assert graphs is not None and graphs.captured and not graphs.failed
    assert mixed is not None and not mixed.failed
    assert not mixed.sizes or any(shape.decodes for shape in mixed.captured), "no step with prompts was captured"


SCOPES = [dict(budget=128), dict(budget=128, scope="layer"), dict(budget=128, scope="global", policy="snapkv")]
RUNS = [
    Run(QWEN, [CacheConfig("bf16", **scope) for scope in SCOPES]),  # type: ignore[arg-type]
    Run(DEEPSEEK, [CacheConfig("fp8")]),
    Run(QWEN, [CacheConfig("fp8", budget=128)], "fp8"),
    Run(DEEPSEEK, [CacheConfig("bf16")]),
    Run(QWEN, [CacheConfig("bf16", budget=128)], exact=True),
    Run(QWEN, [CacheConfig("bf16")], "packed"),
    Run(DEEPSEEK, [CacheConfig("fp8")], "released"),
]


def large_products(device: str = "cuda") -> None:
    x = torch.randn(64, 5120, dtype=torch.bfloat16, device=device)
    w = torch.randn(17000, 5120, dtype=torch.bfloat16, device=device)  # no whole number of tiles
    for T, gated in ((9, False), (33, False), (64, False), (64, True)):
        assert linear_rows(x[:T], w, gated=gated).isfinite().all()
    for bits in BLOCK_BYTES:
        weight = random_packed(528, 5120, bits, device).laid(BESIDE)
        for T in (1, 16, 64):
            assert linear_packed(x[:T], weight).isfinite().all()
    print("large and packed products", flush=True)


if __name__ == "__main__":
    for i in map(int, sys.argv[1:] or range(len(RUNS) + 1)):
        if i == len(RUNS):
            large_products()
        else:
            run(RUNS[i])
    print("done")
