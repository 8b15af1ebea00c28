"""DeepSeek-V4 at Flash widths, end to end on one GPU, beside the same model in transformers.

    python bench/deepseek_model.py [--layers 8] [--experts 16] [--prefill 16384 65536] [--skip-transformers]

Random weights, bf16, the same in both. Prefill: a prompt in chunks, seconds (ours after a first pass over the same
prompt, which compiles) and peak memory beyond the weights, caches included. Decode: one token of one request after the
prompt, by a forward of transformers and by a step of the engine (graph replay, sampling and bookkeeping included), and
the graph's own time. transformers reads all prompts, too, and after the first one the logits of both for 1024 tokens
are compared; --skip-transformers leaves out both. While the models are made, a process for each kind of cache compiles
on a cut of four layers. What matters most comes first; no row begins after --limit seconds. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from hybridkv import CacheConfig, SamplingParams
from hybridkv.bench.report import heading
from hybridkv.bench.timing import GIB, Meter, free_memory
from hybridkv.cache import KVCacheManager
from hybridkv.checkpoint.in_memory import InMemory
from hybridkv.checkpoint.loader import Loader
from hybridkv.engine.engine import Engine
from hybridkv.models import FAMILIES, cache_schema
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Model
from hybridkv.models.known import KNOWN
from hybridkv.models.random_weights import random_decoder

COMPILING = 45.0  # seconds at the most, beside the building of models
YARN = {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536}


def build(layers: int, experts: int) -> Any:
    """A transformers model with Flash's widths and schedule, cut short; what it starts at zero is drawn too."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    ratios = ([0, 0] + [4, 128] * layers)[:layers]
    config = DeepseekV4Config(
        num_hidden_layers=layers, n_routed_experts=experts, compress_ratios=ratios, rope_scaling=YARN,
        max_position_embeddings=1 << 20,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = DeepseekV4ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("sinks", "position_bias")):
            p.data.normal_()
        elif name.endswith(("base", "e_score_correction_bias")):
            p.data.normal_(0, 0.3)
        elif name.endswith("tid2eid"):
            p.data.copy_(torch.rand(p.shape[0], experts, device="cuda").topk(p.shape[1]).indices)
        elif p.ndim >= 2 and p.is_floating_point():
            p.data.mul_(2.0)  # the start of 0.02 leaves every softmax flat
    return model


def ours_of(hf: Any) -> Model:
    """Our model on the same weights."""
    config = ModelConfig.from_dict(hf.config.to_dict())
    loader = Loader(InMemory(hf.state_dict()), torch.device("cuda"), torch.bfloat16)
    return FAMILIES[config.architecture].load(config, loader)


def engine_for(model: Model, kv: str, context: int, chunk: int) -> Engine:
    """For one request."""
    schema = cache_schema(model.config, CacheConfig(kv_dtype=kv), torch.bfloat16)
    return Engine(model, KVCacheManager(schema, schema.pool_pages(1, context), 1, context, "cuda"), step_tokens=chunk)


def compile_alone(kv: str, prompts: list[int], chunk: int, experts: int) -> None:
    """Every kernel that the rows of this kind run, on fewer layers; they end in Triton's cache on disk."""
    cut = dict(num_hidden_layers=4, compress_ratios=[0, 0, 4, 128], n_routed_experts=experts)
    model = random_decoder(ModelConfig.from_dict(KNOWN["DeepSeek-V4-Flash"] | cut), "cuda", torch.bfloat16)
    for length in prompts:
        run_ours(engine_for(model, kv, length + 64, chunk), torch.randint(0, 1000, (length,)), 2)


@torch.inference_mode()
def run_transformers(model: Any, tokens: Tensor, chunk: int, steps: int) -> tuple[Meter, float]:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with Meter("cuda") as prefill:
        for a in range(0, len(tokens), chunk):
            out = model(input_ids=tokens[None, a : a + chunk], past_key_values=cache, logits_to_keep=1)
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        out = model(input_ids=out.logits[:, -1:].argmax(-1), past_key_values=cache)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return prefill, sorted(times)[len(times) // 2]


def run_ours(engine: Engine, tokens: Tensor, steps: int) -> tuple[Meter, float]:
    engine.add(tokens.tolist(), SamplingParams(max_tokens=steps + 4, ignore_eos=True))
    with Meter("cuda") as prefill:
        while not engine.step():
            pass
    for _ in range(2):
        engine.step()  # captures the graph
    times = []
    while not engine.idle:
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    return prefill, sorted(times)[len(times) // 2]


@torch.inference_mode()
def agreement(hf: Any, model: Model) -> float:
    """Relative RMS between both models' logits after 1024 tokens; of two bf16 models with other orders of sums."""
    tokens = torch.randint(0, hf.config.vocab_size, (1024,), device="cuda")
    want = hf(input_ids=tokens[None], use_cache=False, logits_to_keep=1).logits[0, -1].float()
    got = engine_for(model, "bf16", 1088, 1024).score(tokens.tolist())[-1]
    return ((got - want).norm() / want.norm()).item()


def graph_ms(engine: Engine) -> float:
    graphs = engine.runner.graphs
    assert graphs is not None and graphs.captured, "the decode step was not captured"
    found = graphs.captured[min(graphs.captured)]
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before = torch.cuda.memory_allocated()
    start.record()
    for _ in range(20):
        found.graph.replay()
    stop.record()
    stop.synchronize()
    assert torch.cuda.memory_allocated() == before, "a replay moved the allocator"
    return start.elapsed_time(stop) / 20


def main() -> None:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--prefill", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kv", nargs="+", default=["fp8", "bf16"])
    parser.add_argument("--skip-transformers", action="store_true", help="also not compared with it")
    parser.add_argument("--peer-steps", type=int, default=5)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no new row begins")
    parser.add_argument("--compile", action="store_true", help="do nothing but compile for the first --kv")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.compile:
        compile_alone(args.kv[0], args.prefill, args.chunk, args.experts)
        return
    given = ["--chunk", str(args.chunk), "--experts", str(args.experts), "--prefill", *map(str, args.prefill)]
    compilers = [
        subprocess.Popen([sys.executable, __file__, "--compile", "--kv", kv, *given], stdout=subprocess.DEVNULL)
        for kv in args.kv
    ]
    print(heading())
    hf = build(args.layers, args.experts)
    model = ours_of(hf)
    weights = sum(p.numel() * p.element_size() for p in hf.parameters()) / GIB
    print(f"{args.layers} layers, {args.experts} experts, weights {weights:.1f} GiB; chunks of {args.chunk}")
    print(f"models are made after {time.monotonic() - begin:.0f} s", flush=True)
    for each in compilers:
        try:
            each.wait(max(0.1, begin + COMPILING - time.monotonic()))
        except subprocess.TimeoutExpired:
            each.kill()
            each.wait()
    said = ", ".join("ended" if each.returncode == 0 else f"exit {each.returncode}" for each in compilers)
    print(f"kernels are compiled after {time.monotonic() - begin:.0f} s ({said})")
    print("form             prompt   prefill s   peak GiB   decode ms   graph ms   after s", flush=True)
    result: list[dict[str, Any]] = []

    def report(form: str, prompt: int, meter: Meter, step: float, graph: float | None) -> None:
        row = {"prefill_s": meter.seconds, "peak_gib": meter.peak, "decode_ms": step * 1e3, "graph_ms": graph}
        result.append({"form": form, "prompt": prompt, **row})
        last = f"{graph:10.2f}" if graph is not None else " " * 10
        times = f"{meter.seconds:11.2f} {meter.peak:10.2f} {step * 1e3:11.2f} {last}"
        print(f"{form:14} {prompt:8} {times} {time.monotonic() - begin:9.0f}", flush=True)

    def ours(tokens: Tensor, kv: str) -> None:
        engine = engine_for(model, kv, len(tokens) + 64, args.chunk)
        run_ours(engine, tokens, 2)  # compiles what is not
        meter, step = run_ours(engine, tokens, args.steps)
        meter.peak += engine.manager.memory_bytes() / GIB
        report(f"hybridkv {kv}", len(tokens), meter, step, graph_ms(engine))

    def theirs(tokens: Tensor) -> None:
        run_transformers(hf, tokens[: args.chunk], args.chunk, 1)  # warms up
        report("transformers", len(tokens), *run_transformers(hf, tokens, args.chunk, args.peer_steps), None)

    def agree() -> None:
        print(f"last logits of 1024 tokens against transformers, relative RMS: {agreement(hf, model):.1e}", flush=True)

    rows: list[Any] = []
    for i, length in enumerate(args.prefill):
        tokens = torch.randint(0, hf.config.vocab_size, (length,), device="cuda")
        rows += [lambda t=tokens, kv=kv: ours(t, kv) for kv in args.kv]
        if not args.skip_transformers:
            rows += [lambda t=tokens: theirs(t), agree] if i == 0 else [lambda t=tokens: theirs(t)]
    left_out = 0
    with suppress(KeyboardInterrupt):  # what there is counts
        for row in rows:
            free_memory("cuda")
            if time.monotonic() - begin < args.limit:
                row()
            else:
                left_out += 1
    about = {"bench": "deepseek_model", "gpu": torch.cuda.get_device_name(), "left_out": left_out}
    print(json.dumps(about | {"rows": result}))


if __name__ == "__main__":
    main()
