"""Paged attention on the GPU: our Triton kernels, their torch forms, and torch's SDPA on contiguous keys.

    python bench/attention.py [--sweep]

Geometry of Qwen3.5-27B: 24 query heads, 4 KV heads of 256, pages of 64 in random order. Times are medians of CUDA-graph
replays (torch form: of plain calls, it branches on the host), in microseconds. `--sweep` tries other launch shapes.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hybridkv.kernels.attention_decode import attention_decode_torch, attention_decode_triton
from hybridkv.kernels.attention_prefill import attention_prefill_torch, attention_prefill_triton
from hybridkv.kernels.attention_tile import TileShape
from hybridkv.kernels.quant import Fp8Pages, Pages, fp8_encode

H, G, D, P = 24, 4, 256, 64
SCALE = D**-0.5
DECODE = ((1, 2048), (1, 16384), (1, 131072), (8, 32768), (64, 2048))
PREFILL = (4096, 16384)


def timed(call: Callable[[], object], graph: bool = True, repeats: int = 20) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    run = call
    if graph:
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            call()
        run = recorded.replay
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20000)  # so that the launches are queued before the clock starts
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def pool(pages: int, fp8: bool) -> Pages:
    x = torch.randn(pages, P, D, device="cuda", dtype=torch.bfloat16)
    return Fp8Pages(*fp8_encode(x)) if fp8 else x


def rotating(calls: list[Callable[[], object]]) -> Callable[[], object]:
    """All of them in turn: together they read more than the L2 cache holds."""

    def run() -> None:
        for call in calls:
            call()

    return run


def best_sdpa(q: Tensor, held: list[tuple[Tensor, Tensor]], causal: bool) -> str:
    """The fastest of torch's backends that takes this shape, over as many copies of the keys as ours runs over."""
    times = {}
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        with sdpa_kernel(backend):
            try:
                attend = partial(F.scaled_dot_product_attention, q, is_causal=causal, enable_gqa=True)
                times[timed(rotating([partial(attend, k, v) for k, v in held])) / len(held)] = name
            except RuntimeError as error:
                print(f"    SDPA {name}: {str(error).splitlines()[0]}")
    return f"{min(times):.1f} ({times[min(times)]})" if times else "-"


def decode(B: int, L: int, fp8: bool, sweep: bool) -> None:
    per = B * G * L // P
    nbytes = B * G * L * D * 2 * (1 if fp8 else 2)
    copies = max(1, min(4, int(3e8 // nbytes)))
    table = torch.randperm(per, device="cuda").view(B, G, -1).to(torch.int32)
    lengths = np.full((B, G), L, np.int64)
    on_device = torch.from_numpy(lengths).cuda()
    q = torch.randn(B, H, D, device="cuda", dtype=torch.bfloat16)
    pools = [(pool(per, fp8), pool(per, fp8)) for _ in range(copies)]

    def ours(shape: TileShape | None = None, split: int | None = None) -> float:
        more = {} if split is None else {"split": split}
        calls = [
            lambda k=k, v=v: attention_decode_triton(q, k, v, table, lengths, SCALE, on_device, shape, **more)
            for k, v in pools
        ]
        return timed(rotating(calls)) / copies

    row = [ours()]
    row.append(timed(lambda: attention_decode_torch(q, *pools[0], table, lengths, SCALE, on_device), False, 5))
    sdpa = "-"
    if not fp8:
        sdpa = best_sdpa(q[:, :, None], [(k.view(B, G, L, D), v.view(B, G, L, D)) for k, v in pools], causal=False)
    floor = nbytes / 4.3e6
    kind = "fp8 " if fp8 else "bf16"
    print(f"decode  {kind} B={B:<3} L={L:<7} {row[0]:9.1f} {row[1]:11.1f} {floor:9.1f}  {sdpa}", flush=True)
    if sweep:
        for split in (128, 256):
            for shape in (
                (16, 32, 4, 3),
                (16, 64, 4, 2),
                (16, 64, 4, 3),
                (16, 64, 4, 5),
                (16, 64, 8, 3),
                (16, 128, 8, 2),
            ):
                print(f"    split {split} {shape}: {ours(TileShape(*shape), split):.1f}", flush=True)


def prefill(L: int, fp8: bool, sweep: bool) -> None:
    table = torch.randperm(G * L // P, device="cuda").view(1, G, -1).to(torch.int32)
    lengths = np.full((1, G), L, np.int64)
    on_device = torch.from_numpy(lengths).cuda()
    q = torch.randn(L, H, D, device="cuda", dtype=torch.bfloat16)
    k, v = pool(G * L // P, fp8), pool(G * L // P, fp8)

    def ours(shape: TileShape | None = None) -> float:
        return timed(
            lambda: attention_prefill_triton(q, k, v, table, lengths, [0, L], SCALE, on_device, shape), repeats=8
        )

    row = [ours(), timed(lambda: attention_prefill_torch(q, k, v, table, lengths, [0, L], SCALE), False, 2)]
    flops = 2 * 2 * H * D * L * (L + 1) / 2
    sdpa = "-"
    if not fp8:
        heads, *held = (torch.randn(1, n, L, D, device="cuda", dtype=torch.bfloat16) for n in (H, G, G))
        sdpa = best_sdpa(heads, [(held[0], held[1])], causal=True)
    kind = "fp8 " if fp8 else "bf16"
    floor = flops / 7.9e8
    print(f"prefill {kind} B=1   L={L:<7} {row[0]:9.1f} {row[1]:11.1f} {floor:9.1f}  {sdpa}", flush=True)
    if sweep:
        for shape in (
            (128, 64, 8, 2),
            (128, 64, 8, 1),
            (128, 32, 8, 3),
            (64, 64, 4, 2),
            (64, 64, 8, 2),
            (128, 64, 4, 2),
        ):
            try:
                print(f"    {shape}: {ours(TileShape(*shape)):.1f}", flush=True)
            except triton.runtime.errors.OutOfResources as error:
                print(f"    {shape}: {error}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    sweep = parser.parse_args().sweep
    print(f"date {datetime.date.today()}   command: python {' '.join(sys.argv)}")
    print(
        f"GPU {torch.cuda.get_device_name()}   torch {torch.__version__}   triton {triton.__version__}   "
        f"CUDA {torch.version.cuda}   python {platform.python_version()}"
    )
    print(f"{H} query heads, {G} KV heads of {D}, bf16 queries, pages of {P}; microseconds, one layer")
    print("op      kv   batch length       triton  torch form     floor  SDPA", flush=True)
    for B, L in DECODE:
        for fp8 in (False, True):
            decode(B, L, fp8, sweep)
    for L in PREFILL:
        for fp8 in (False, True):
            prefill(L, fp8, sweep)
    print("floor: bytes of K and V at 4.3 TB/s, or products at 790 TFLOP/s. SDPA reads contiguous keys.")


if __name__ == "__main__":
    main()
