"""transformers, where it is installed, on the same widths and the same weights in the same run.

Nothing else in the package imports it.
"""

from __future__ import annotations

import inspect
import logging
import os
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from hybridkv.bench.options import BenchOptions
from hybridkv.bench.report import Report, check, installed, rounding
from hybridkv.bench.shapes import Shape
from hybridkv.bench.timing import Meter, at_most, free_memory, sync
from hybridkv.checkpoint.in_memory import InMemory
from hybridkv.checkpoint.loader import Loader
from hybridkv.config import CacheConfig
from hybridkv.models import FAMILIES

PROMPT = 192  # tokens before the first step: a step's time is the host's and the weights', hardly the context's
WARM, STEPS = 3, 8
CPU_BLOCKS, CPU_TOKENS = 64, 64  # sizes that continuous batching finds by itself on a GPU alone
SECONDS = {"transformers": 40.0, "transformers compiled": 75.0}  # a form that takes longer is left out


@contextmanager
def plain_prompt(hf: Any) -> Iterator[None]:
    """The prompt's delta rule by transformers' own torch code: compiling and tuning fla's kernels for a prompt takes
    most of a minute, and a decode step runs none of them.
    """
    module, name = sys.modules[type(hf).__module__], "torch_chunk_gated_delta_rule"
    usual = getattr(module, name)
    setattr(module, name, inspect.unwrap(usual))
    try:
        yield
    finally:
        setattr(module, name, usual)


@contextmanager
def tuned_together() -> Iterator[None]:
    """fla tunes each kernel of a prompt over dozens of configurations. Here as well, but all of one kernel are compiled
    at the same time, and each runs for a fifth of the usual time.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner
        from triton.testing import do_bench
    except ImportError:
        yield
        return
    prune, usual = Autotuner.prune_configs, Autotuner.__dict__["do_bench"]

    def compiled(self: Any, kwargs: dict[str, Any]) -> Any:
        configs = prune(self, kwargs)
        with AsyncCompileMode(pool, ignore_errors=True):  # what fails fails again where the tuner sees it
            for config in configs:
                self.fn.run(*self.nargs.values(), **(kwargs | config.all_kwargs() | {"warmup": True}))
        return configs

    Autotuner.prune_configs = compiled
    Autotuner.do_bench = property(lambda _: partial(do_bench, warmup=5, rep=20))  # type: ignore[assignment]
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            yield
    finally:
        Autotuner.prune_configs, Autotuner.do_bench = prune, usual


def available(shape: Shape, report: Report) -> bool:
    if not installed("transformers"):
        report.note("transformers is not installed: no peer of the whole model")
        return False
    if shape.config.architecture != "qwen3_5":
        report.note(f"no peer for {shape.config.architecture}")
        return False
    return True


def build(shape: Shape) -> Any:
    """A transformers model of the shape with its own random start, weights doubled: softmaxes are then not flat."""
    import transformers

    transformers.logging.set_verbosity_error()
    rope = shape.raw["rope_parameters"] | {"mrope_section": mrope(shape), "mrope_interleaved": True}
    config = transformers.Qwen3_5TextConfig(**shape.raw | {"rope_parameters": rope})
    before = torch.get_default_dtype()
    torch.set_default_dtype(shape.dtype)
    try:
        with torch.device(shape.device):
            model = transformers.Qwen3_5ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    for p in model.parameters():
        if p.ndim == 2:
            p.data.normal_(0, p.shape[-1] ** -0.5)
    return model


def build_dense(shape: Shape) -> Any:
    """A transformers model of a family without recurrent layers, random weights of the usual size."""
    import transformers

    transformers.logging.set_verbosity_error()
    raw = {name: value for name, value in shape.raw.items() if name not in ("model_type", "dtype")}
    config = transformers.AutoConfig.for_model(shape.raw["model_type"], **raw)
    before = torch.get_default_dtype()
    torch.set_default_dtype(shape.dtype)
    try:
        with torch.device(shape.device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=shape.dtype).eval()
    finally:
        torch.set_default_dtype(before)
    for p in model.parameters():
        if p.ndim == 2:
            p.data.normal_(0, p.shape[-1] ** -0.5)
    return model


def continuous_batching(hf: Any) -> Any:
    """A context manager with transformers' continuous batching, warmed up and started."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    sizes: dict[str, Any] = {"num_blocks": CPU_BLOCKS, "max_batch_tokens": CPU_TOKENS}
    if hf.device.type != "cpu":
        sizes = {}
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1)
    return hf.continuous_batching_context_manager(
        generation_config=greedy, timeout=10, continuous_batching_config=ContinuousBatchingConfig(**sizes)
    )


def mrope(shape: Shape) -> list[int]:
    """How rotated pairs are dealt to time, height and width; for text all three are the same."""
    pairs = len(shape.config.inv_freq)
    side = pairs // 3
    return [pairs - 2 * side, side, side]


def same_model(shape: Shape, hf: Any) -> Any:
    """Our model on the peer's weights."""
    loader = Loader(InMemory(hf.state_dict()), torch.device(shape.device), shape.dtype)
    return FAMILIES[shape.config.architecture].load(shape.config, loader)


def decode_peers(shape: Shape, options: BenchOptions, report: Report) -> None:
    """One request: ours, transformers step by step, and transformers compiled into CUDA graphs (fewer layers)."""
    if not available(shape, report):
        return
    layers = min(options.peer_layers, shape.config.layers)
    if shape.device == "cuda":
        wake_compilers()
    report.doing(f"building transformers, {layers} layers")
    hf = build(shape.cut(layers))
    beside(shape.cut(layers), hf, report, "transformers", eager_ms)
    if shape.device == "cpu":
        report.note("transformers compiled: CUDA graphs need a GPU")
        return
    whole = hf.model.layers, hf.config.layer_types
    for few in sorted({min(n, layers) for n in options.compiled_layers}):
        hf.model.layers, hf.config.layer_types = (part[:few] for part in whole)
        hf.config.num_hidden_layers = few
        beside(shape.cut(few), hf, report, "transformers compiled", compiled_ms)


def wake_compilers() -> None:
    """torch.compile's worker processes start while models are built."""
    try:
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.wakeup()
    except Exception:  # a version that starts them in another way
        return


def beside(shape: Shape, hf: Any, report: Report, name: str, form: Any) -> None:
    """A row of ours and one of theirs on the same weights; before, both models' logits are compared."""
    from hybridkv.bench.decode import ANSWER, DecodeBench

    layers, limit = f" {shape.config.layers} layers", SECONDS[name]
    report.doing(f"our model on the same weights,{layers}")
    bench = DecodeBench(shape, same_model(shape, hf), report, CacheConfig(kv_dtype="auto"))
    tokens = torch.randint(0, shape.config.vocab, (PROMPT,), generator=torch.Generator().manual_seed(0))
    got = bench.engine(1, PROMPT + 64).score(tokens.tolist())[-1]
    row = bench.measure(bench.engine(1, PROMPT + ANSWER), "decode beside peers", 1, PROMPT, layers)
    del bench
    free_memory(shape.device)
    if report.deadline is not None:
        limit = min(limit, report.deadline - time.monotonic())
    report.doing(name + layers)
    try:
        with at_most(limit), plain_prompt(hf):
            want, ms = form(hf, tokens[None].to(shape.device))
    except Exception as problem:  # no end, no room, or a version that cannot
        report.note(f"{name}{layers} skipped: {type(problem).__name__}: {str(problem).splitlines()[0][:100]}")
        return
    finally:
        torch._dynamo.reset()
        free_memory(shape.device)
    error = check(f"logits against {name}", got, want[0, -1].float(), rounding(shape.config.layers))
    report.add(f"decode {name}", f"B=1 context {PROMPT}{layers}", ms=ms, tok_s=1e3 / ms, batch=1, context=PROMPT)
    times = f", {ms / row['ms']:.2f} times ours" if row else ""
    report.note(f"{name}{layers}, context {PROMPT}: {ms:.2f} ms{times}; logits apart by {error:.0e}")


@torch.no_grad()
def eager_ms(hf: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, float]:
    """A prompt's last logits, then a step of one request by plain calls."""
    from transformers import DynamicCache

    cache = DynamicCache(config=hf.config)
    out = hf(input_ids=tokens, past_key_values=cache, logits_to_keep=1)
    return out.logits, steps_ms(lambda token, _: hf(input_ids=token, past_key_values=cache).logits, out.logits)


@torch.no_grad()
def compiled_ms(hf: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The same with a cache of fixed size, steps compiled into CUDA graphs."""
    from transformers import StaticCache

    cache = StaticCache(config=hf.config, max_cache_len=PROMPT + 64)
    out = hf(input_ids=tokens, past_key_values=cache, logits_to_keep=1)
    forward = torch.compile(hf.forward, mode="reduce-overhead", dynamic=False)

    def step(token: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return forward(input_ids=token, past_key_values=cache, position_ids=at[None]).logits

    return out.logits, steps_ms(step, out.logits)


def steps_ms(step: Any, logits: torch.Tensor) -> float:
    times, device = [], logits.device
    for i in range(WARM + STEPS):
        token, at = logits[:, -1:].argmax(-1), torch.tensor([PROMPT + i], device=device)
        sync(device.type)
        begin = time.perf_counter()
        logits = step(token, at).clone()
        sync(device.type)
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[WARM:])


class PrefillPeers:
    """Whole prompts in one forward pass each, all layers. The model is built when the first one is read."""

    def __init__(self, shape: Shape, report: Report) -> None:
        self.shape, self.report = shape, report
        self.usable = available(shape, report)
        self.hf: Any = None

    @torch.no_grad()
    def read(self, length: int) -> None:
        from transformers import DynamicCache

        if not self.usable:
            return
        shape, report = self.shape, self.report
        tokens = torch.randint(0, shape.config.vocab, (1, length), device=shape.device)
        try:
            if self.hf is None:
                report.doing("building transformers")
                self.hf = build(shape)
            with tuned_together():
                for part in (min(length, 4096), length, length):  # some kernels are tuned again for a longer prompt
                    report.doing(f"transformers, prompt of {part}")
                    cache = DynamicCache(config=self.hf.config)
                    with Meter(shape.device) as meter:
                        self.hf(input_ids=tokens[:, :part], past_key_values=cache, logits_to_keep=1)
                    del cache
        except torch.OutOfMemoryError:
            report.note(f"transformers runs out of memory at {length} tokens")
            return
        found = {"s": meter.seconds, "tok_s": length / meter.seconds, "peak_gib": meter.peak, "tokens": length}
        report.add("prefill transformers", f"T={length}", **found)
        ours = next((r["s"] for r in report.rows if r["op"] == "prefill" and r["tokens"] == length), None)
        if ours is not None:
            report.note(f"{length} tokens: transformers takes {meter.seconds / ours:.2f} times as long")
