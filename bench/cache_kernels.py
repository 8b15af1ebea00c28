"""Kernels of the cache on a GPU beside their plain-torch forms: append, compaction, window scores; Qwen3.5-27B heads.

A time is the median of replays of a CUDA graph that runs the op several times over different buffers, larger together
than the chip's cache (but for T = 1, which touches too little). "torch" is the reference, op by op in such a graph; of
append the reference without its look for padding, which a graph cannot hold.

Prints a line per case, and one JSON line last.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from hybridkv.kernels.append import append_triton
from hybridkv.kernels.compact import compact_ref, compact_triton
from hybridkv.kernels.quant import Fp8Pages, fp8_encode_ref
from hybridkv.kernels.score import ScoreBlocks, window_scores_ref, window_scores_triton

H, G, D, P, LAYERS = 24, 4, 256, 64, 16
# what score.py chooses from; its choice is the first of each
CORES_TRIED = [ScoreBlocks(*c) for c in ((64, 256, 4), (128, 256, 8), (128, 256, 4))]
PLAIN_TRIED = [
    ScoreBlocks(*c)
    for c in ((128, 32, 4), (128, 32, 8), (64, 32, 4), (64, 32, 8), (64, 16, 4), (128, 16, 8), (32, 32, 4), (64, 64, 4))
]
Op = Callable[[Any], object]
rows: list[dict[str, object]] = []


def median_us(op: Op, buffers: Sequence[Any], repeats: int = 30) -> float:
    for b in buffers:
        op(b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for b in buffers:
            op(b)
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / len(buffers))
    return statistics.median(times)


def case(op: str, form: str, what: str, run: Op, buffers: Sequence[Any]) -> None:
    us = median_us(run, buffers)
    rows.append(dict(op=op, form=form, case=what, us=round(us, 2)))
    print(f"{op:8} {what:34} {form:44} {us:10.2f} us", flush=True)


def pages(kind: str, N: int) -> Any:
    if kind == "fp8":
        return Fp8Pages(*fp8_encode_ref(torch.randn(N, P, D)))
    return torch.randn(N, P, D).to(torch.float32 if kind == "f32" else torch.bfloat16)


def append_torch(k_pool: Any, v_pool: Any, k: Tensor, v: Tensor, index: Tensor) -> None:
    for pool, new in ((k_pool, k.transpose(0, 1)), (v_pool, v.transpose(0, 1))):
        if isinstance(pool, Fp8Pages):
            codes, scale = fp8_encode_ref(new)
            pool.codes.view(-1, D)[index] = codes
            pool.scale.view(-1)[index] = scale
        else:
            pool.view(-1, D)[index] = new.to(pool.dtype)


def bench_append(T: int, kind: str, copies: int) -> None:
    N = -(-T // P) * G + 1
    buffers = []
    for _ in range(copies):
        qkv = torch.randn(T, H + 2 * G, D).to(torch.bfloat16)
        index = torch.randperm(N * P)[: T * G].view(G, T)
        buffers.append((pages(kind, N), pages(kind, N), qkv[:, H : H + G], qkv[:, H + G :], index))
    what = f"T={T} {kind}"
    case("append", "triton", what, lambda b: append_triton(*b), buffers)
    case("append", "torch", what, lambda b: append_torch(*b), buffers)


def bench_compact(L: int, keep: int, kind: str) -> None:
    """All layers: keys and values of every stream."""
    layers: list[list[Tensor]] = []
    for _ in range(LAYERS):
        pair = pages(kind, G * L // P), pages(kind, G * L // P)
        layers.append([*pair[0], *pair[1]] if kind == "fp8" else list(pair))
    order, source, target = torch.randperm(G * L // P).view(G, -1), [], []
    for g in range(G):
        e, front = torch.randperm(L)[:keep].sort().values, torch.arange(keep)
        source.append(order[g][e // P] * P + e % P)
        target.append(order[g][front // P] * P + front % P)
    moves = torch.cat(source), torch.cat(target)

    def run(form: Callable[[Tensor, Tensor, Tensor], None]) -> Op:
        return lambda _: [form(t, *moves) for layer in layers for t in layer]

    what = f"{LAYERS} layers, keep {keep} of {L}, {kind}"
    case("compact", "triton", what, run(compact_triton), [0])
    case("compact", "torch", what, run(compact_ref), [0])


def bench_scores(L: int, W: int, kind: str, copies: int) -> None:
    buffers = []
    for _ in range(copies):
        q = torch.randn(W, H, D).to(torch.float32 if kind == "f32" else torch.bfloat16)
        table = torch.randperm(G * L // P).view(G, -1).int()
        positions = torch.arange(L).repeat(G, 1)
        buffers.append((q, torch.arange(L - W, L), pages(kind, G * L // P), table, positions, D**-0.5))
    what = f"L={L} W={W} {kind}"
    for config in PLAIN_TRIED if kind == "f32" else CORES_TRIED:
        run = lambda b, c=config: window_scores_triton(*b, config=c)  # noqa: E731
        case("scores", f"triton, {tuple(config)} keys, dims, warps", what, run, buffers)
    case("scores", "torch", what, lambda b: window_scores_ref(*b), buffers)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    versions = f"torch {torch.__version__}, triton {triton.__version__}, CUDA {torch.version.cuda}"
    print(f"{datetime.date.today()}, {torch.cuda.get_device_name()}, {versions}")
    for (T, copies), kind in itertools.product(((1, 256), (64, 256), (4096, 8)), ("f32", "bf16", "fp8")):
        bench_append(T, kind, copies)
    for kind in ("bf16", "fp8"):
        bench_compact(16384, 2048, kind)
    for L, kind in itertools.product((16384, 32768), ("bf16", "fp8", "f32")):
        bench_scores(L, 64, kind, 4)
    print(json.dumps(dict(bench="cache_kernels", gpu=torch.cuda.get_device_name(), results=rows)))


if __name__ == "__main__":
    main()
