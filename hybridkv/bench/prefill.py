"""Whole prompts through a model with random weights: seconds until the first token, and the peak of memory.

Prompts are random tokens, read in chunks by `engine.step()`, once to compile (two chunks at the most) and once by the
clock. Before, a short prompt is read in one piece and in several, and its logits compared. Peak memory is what the
prompt adds to the weights: cache and workspace. With a budget the cache is cut when the prompt has been read: what that
adds is eviction's share.
"""

from __future__ import annotations

import torch

from hybridkv.bench.decode import AGREE, matrix_elements
from hybridkv.bench.options import BenchOptions
from hybridkv.bench.report import Column, Report, check
from hybridkv.bench.shapes import Shape
from hybridkv.bench.standin import make_engine
from hybridkv.bench.timing import GIB, Ceilings, Meter, free_memory
from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.kernels.gdn import CHUNK
from hybridkv.models.config import ModelConfig
from hybridkv.models.random_weights import random_decoder

CHECKED = 3 * 64 + 5  # tokens
COLUMNS = (
    Column("s", "seconds", 9, ".3f"),
    Column("tok_s", "tok/s", 9, ".0f"),
    Column("tflop_s", "TFLOP/s", 8, ".0f"),
    Column("share", "of matmul", 9, "%"),
    Column("peak_gib", "peak GiB", 9, ".2f"),
)


def run(shape: Shape, options: BenchOptions, ceilings: Ceilings) -> Report:
    kinds = options.kv_dtypes or (("bf16",) if shape.device == "cuda" else ("f32",))
    lengths = options.contexts or ((96, 192) if shape.tiny else (4096,) if options.quick else (2048, 16384, 65536))
    chunk = 64 if shape.tiny else options.chunk
    budget = 64 if shape.tiny else options.budget
    about = {"model": shape.name, "layers": shape.config.layers, "chunk": chunk, "weights": options.weight_dtype}
    report = Report("prefill", "s", COLUMNS, shape.device, ceilings, about, deadline=options.deadline)
    report.start()
    report.doing("making weights")
    model = random_decoder(shape.config, shape.device, shape.dtype, options.weight_dtype == "fp8")
    for kind in kinds:
        seconds: dict[int, float] = {}
        for keep in (None, budget):
            cache = CacheConfig(kv_dtype=kind, budget=keep, recent=min(64, budget), window=min(64, budget))
            engine = make_engine(
                model, cache, shape.device, shape.dtype, 1, max(*lengths, CHECKED) + 8, step_tokens=chunk
            )
            if keep is None:
                error = report.attempt("prefill", f"{kind}, cut in two ways", lambda e=engine: agreement(e))
                if error is None:
                    break  # what is wrong is not timed
                report.note(f"{kind} KV: two ways to cut a prompt agree to {error:.0e} of the logits")
            for length in lengths:
                name = f"{kind} T={length}" + ("" if keep is None else f" budget {keep}")
                if keep is None or length == lengths[0]:
                    report.attempt("compiling", name, lambda e=engine, n=length: read(e, min(n, 2 * chunk)))
                meter = report.attempt("prefill", name, lambda e=engine, n=length: read(e, n))
                if meter is None:
                    continue
                flops, rate = prefill_flops(shape.config, length), length / meter.seconds
                cache_gib = engine.manager.schema.kv_bytes(length) / GIB
                report.add(
                    "prefill", name, s=meter.seconds, tok_s=rate, tflop_s=flops / meter.seconds / 1e12,
                    share=flops / meter.seconds / 1e12 / ceilings.tflop_s, floor_s=ceilings.floor_us(0, flops) / 1e6,
                    peak_gib=meter.peak + cache_gib, flops=flops, tokens=length, kv_dtype=kind, budget=keep,
                    evict_s=meter.seconds - seconds[length] if keep is not None and length in seconds else None,
                )  # fmt: skip
                seconds.setdefault(length, meter.seconds)
            if options.trace is not None and keep is None:
                from hybridkv.bench.trace import trace_prefill

                def traced(engine: Engine = engine) -> None:
                    trace_prefill(engine, str(options.trace), min(lengths), shape.device)

                report.attempt("trace", "prefill chunk", traced)
            del engine
            free_memory(shape.device)
    if not options.skip_peers:
        del model
        free_memory(shape.device)
        from hybridkv.bench.peers import prefill_peers

        report.attempt("prefill", "beside peers", lambda: prefill_peers(shape, options, report, lengths))
    return report


def agreement(engine: Engine) -> float:
    """The same prompt in one piece and in several: another order of sums, the same logits."""
    tokens = random_tokens(engine.vocab, CHECKED)
    want, got = engine.score(tokens)[-1], engine.score(tokens, chunk=64)[-1]
    return check("a prompt in chunks", got, want, AGREE)


def random_tokens(vocab: int, count: int) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(count)).tolist()


def read(engine: Engine, length: int) -> Meter:
    """Until the first token is there."""
    request = engine.add(random_tokens(engine.vocab, length), SamplingParams(max_tokens=1, ignore_eos=True))
    with Meter(engine.manager.device.type) as meter:
        while not request.finished:
            engine.step()
    if request.error is not None:
        raise RuntimeError(request.error)
    return meter


def prefill_flops(config: ModelConfig, T: int) -> float:
    """Products of the projections (the head for one token only), of causal attention, and of the delta rule."""
    head = config.vocab * config.hidden
    total = 2 * T * (matrix_elements(config) - head) + 2 * head
    total += 4 * len(config.attention_layers) * config.heads * config.head_dim * T * (T + 1) / 2
    if config.gdn is not None:
        K, V = config.gdn.key_dim, config.gdn.value_dim
        total += len(config.gdn_layers) * T * config.gdn.value_heads * (2 * CHUNK * (3 * K + 2 * V) + 6 * K * V)
    return total
