"""transformers, where it is installed, on the same widths and the same weights in the same run.

Nothing else in the package imports it.
"""

from __future__ import annotations

import signal
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hybridkv.bench.options import BenchOptions
from hybridkv.bench.report import Report, check, installed
from hybridkv.bench.shapes import Shape
from hybridkv.bench.timing import Meter, free_memory, sync
from hybridkv.config import CacheConfig
from hybridkv.models import FAMILIES
from hybridkv.models.in_memory import InMemory
from hybridkv.models.loader import Loader

AGREE = 0.25  # of two bf16 models whose sums run in another order, through all layers
STEPS = 8
COMPILE_SECONDS = 50.0  # a peer that takes longer to get ready is left out


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """TimeoutError if what is inside takes longer. In the main thread alone."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not ready after {seconds:.0f} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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


def mrope(shape: Shape) -> list[int]:
    """How rotated pairs are dealt to time, height and width; for text all three are the same."""
    pairs = len(shape.config.inv_freq)
    side = pairs // 3
    return [pairs - 2 * side, side, side]


def same_model(shape: Shape, hf: Any) -> Any:
    """Our model on the peer's weights."""
    loader = Loader(InMemory(hf.state_dict()), torch.device(shape.device), shape.dtype)
    return FAMILIES[shape.config.architecture].load(shape.config, loader)


def decode_peers(shape: Shape, options: BenchOptions, report: Report, context: int) -> None:
    """One request: ours, transformers step by step, and transformers compiled into CUDA graphs, all at fewer layers."""
    from hybridkv.bench.decode import ANSWER, DecodeBench

    if not available(shape, report):
        return
    layers = min(options.peer_layers, shape.config.layers)
    cut = shape.cut(layers)
    report.doing(f"transformers, {layers} layers")
    hf = build(cut)
    bench = DecodeBench(cut, same_model(cut, hf), report, CacheConfig(kv_dtype="auto"))
    agreement(cut, hf, bench)
    peers: dict[str, float] = {}
    for name, form in (("transformers", eager_ms), ("transformers compiled", compiled_ms)):
        if name.endswith("compiled") and shape.device == "cpu":
            report.note("transformers compiled: CUDA graphs need a GPU")
            continue
        report.doing(name)
        try:
            with at_most(COMPILE_SECONDS):
                peers[name] = form(hf, context)
        except Exception as problem:  # a version that cannot, no room, or no end
            report.note(f"{name} skipped: {type(problem).__name__}: {str(problem).splitlines()[0][:100]}")
        torch._dynamo.reset()
        free_memory(shape.device)
    hf = None
    engine = bench.engine(1, context + ANSWER)
    row = bench.measure(engine, "decode beside peers", 1, context, f" {layers} layers")
    if row is None:
        return
    report.rows[-1]["peers"] = peers
    for name, ms in peers.items():
        report.note(f"{layers} layers, context {context}: {name} {ms:.2f} ms, {ms / row['ms']:.2f} times ours")


def agreement(shape: Shape, hf: Any, bench: Any) -> None:
    tokens = torch.randint(0, shape.config.vocab, (192,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        want = hf(input_ids=tokens[None].to(shape.device), use_cache=False, logits_to_keep=1).logits[0, -1].float()
    got = bench.engine(1, 256).score(tokens.tolist())[-1]
    error = check("logits against transformers", got, want, AGREE)
    bench.report.note(f"logits after 192 tokens against transformers: {error:.0e}")


def prompt(hf: Any, tokens: int) -> torch.Tensor:
    return torch.randint(0, hf.config.vocab_size, (1, tokens), device=hf.device)


@torch.inference_mode()
def eager_ms(hf: Any, context: int) -> float:
    """A step of one request by plain calls, prompt read before."""
    from transformers import DynamicCache

    cache = DynamicCache(config=hf.config)
    out = hf(input_ids=prompt(hf, context), past_key_values=cache, logits_to_keep=1)
    return steps_ms(lambda token, _: hf(input_ids=token, past_key_values=cache).logits, out.logits, context, hf)


@torch.inference_mode()
def compiled_ms(hf: Any, context: int) -> float:
    """The same with a cache of fixed size, compiled into CUDA graphs."""
    from transformers import StaticCache

    cache = StaticCache(config=hf.config, max_cache_len=context + 64)
    out = hf(input_ids=prompt(hf, context), past_key_values=cache, logits_to_keep=1)
    forward = torch.compile(hf.forward, mode="reduce-overhead", fullgraph=False)

    def step(token: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return forward(input_ids=token, past_key_values=cache, cache_position=at, position_ids=at[None]).logits

    return steps_ms(step, out.logits, context, hf, warm=6)


def steps_ms(step: Any, logits: torch.Tensor, context: int, hf: Any, warm: int = 3) -> float:
    times, device = [], hf.device.type
    for i in range(warm + STEPS):
        token, at = logits[:, -1:].argmax(-1), torch.tensor([context + i], device=hf.device)
        sync(device)
        begin = time.perf_counter()
        logits = step(token, at).clone()
        sync(device)
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[warm:])


@torch.inference_mode()
def prefill_peers(shape: Shape, options: BenchOptions, report: Report, lengths: tuple[int, ...]) -> None:
    """Whole prompts in one forward pass each, all layers."""
    if not available(shape, report):
        return
    from transformers import DynamicCache

    report.doing("transformers")
    hf = build(shape)
    for length in lengths:
        if report.deadline is not None and time.monotonic() > report.deadline:
            report.note("time is up: the rest is left out")
            return
        tokens = prompt(hf, length)
        try:
            for part in (min(length, 4096), length):  # the first one compiles
                cache = DynamicCache(config=hf.config)
                with Meter(shape.device) as meter:
                    hf(input_ids=tokens[:, :part], past_key_values=cache, logits_to_keep=1)
        except torch.OutOfMemoryError:
            report.note(f"transformers runs out of memory at {length} tokens")
            break
        found = {"s": meter.seconds, "tok_s": length / meter.seconds, "peak_gib": meter.peak, "tokens": length}
        report.add("prefill transformers", f"T={length}", **found)
        ours = next((r["s"] for r in report.rows if r["tokens"] == length and r.get("budget") is None), None)
        if ours is not None:
            report.note(f"{length} tokens: transformers takes {meter.seconds / ours:.2f} times as long")
