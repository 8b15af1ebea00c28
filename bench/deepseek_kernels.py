"""DeepSeek-V4's ops on a GPU, one layer each: our Triton kernels beside their plain-torch forms and the floor.

    python bench/deepseek_kernels.py [--only attention]

One KV vector of 512 (448 + 64 rotated), 64 or 128 query heads, 64 index heads of 128; pages of 128 tokens in random
order. Times are medians of CUDA-graph replays in microseconds (torch form: of plain calls). Results are compared with
the torch form before they are timed (of prompt chunks the first tokens). Small cases fit the L2 cache and stay there.
The floor is the bytes that must move at this card's own copy rate, or the products at its own matmul rate. Chunks are
timed as the engine runs them: entries widened to bf16 first (`widen`), then attention over those.
Prints a table and one JSON line last.
"""
# ruff: noqa: B023  (every closure is called before its loop goes on)

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from hybridkv.bench.report import heading
from hybridkv.bench.timing import copy_tb_s, matmul_tflop_s, median_us
from hybridkv.kernels import topk
from hybridkv.kernels.formats.page_format import store_entries_ref
from hybridkv.kernels.formats.page_layout import PageFormat, entry_format, index_format
from hybridkv.kernels.step_index import StepIndex
from hybridkv.kernels.v4 import flush_csa, flush_hca, gather, indexer, sparse
from hybridkv.kernels.v4 import window_ring as window

D, R, W = 512, 64, 128
ENTRY_BYTES, SCALE = 584, 512**-0.5
rows: list[dict[str, Any]] = []
ceiling: dict[str, float] = {}


def report(op: str, case: str, ours: float, torch_us: float | None, floor: float, error: float) -> None:
    rows.append({"op": op, "case": case, "us": ours, "torch_us": torch_us, "floor_us": floor, "error": error})
    other = f"{torch_us:11.1f}" if torch_us is not None else "          -"
    print(f"{op:22} {case:34} {ours:9.2f} {other} {floor:9.2f} {floor / ours:6.0%}  {error:8.1e}", flush=True)


def compared(got: Tensor, ref: Tensor) -> float:
    got, ref = got.double(), ref.double()
    error = ((got - ref).norm() / ref.norm().clamp(min=1e-30)).item()
    assert error < 2e-2, f"relative error {error}"
    return error


def filled(pages: int, P: int, fmt: PageFormat) -> Tensor:
    """A pool of random entries."""
    out = torch.empty(pages, P, fmt.width, dtype=fmt.dtype, device="cuda")
    for a in range(0, pages * P, 1 << 16):
        at = torch.arange(a, min(a + (1 << 16), pages * P), device="cuda")
        store_entries_ref(out, fmt, at, torch.randn(len(at), fmt.dim, device="cuda"))
    return out


def table_of(B: int, pages: int) -> Tensor:
    return torch.randperm(B * pages, device="cuda").view(B, pages).to(torch.int32)


def angles(T: int) -> tuple[Tensor, Tensor]:
    turn = torch.rand(T, R // 2, device="cuda") * 6
    return turn.cos(), turn.sin()


def decode_index(B: int, position: int) -> StepIndex:
    return StepIndex.make(list(range(B)), [position] * B, [1] * B, "cuda")


def bench_append() -> None:
    fmt = entry_format("fp8", D, R)
    weight = torch.rand(D, device="cuda") + 0.5
    for T, B in ((64, 64), (4096, 1), (16384, 1)):
        index = StepIndex.make(list(range(B)), [1000] * B, [T // B] * B, "cuda")
        ring = torch.zeros(B, max(W, T // B), fmt.width, dtype=fmt.dtype, device="cuda")
        x, (cos, sin) = torch.randn(T, D, device="cuda", dtype=torch.bfloat16), angles(T)
        args = (fmt, x, weight, 1e-6, cos, sin, index)
        window.append_window_triton(ring, *args)
        want = torch.zeros_like(ring)
        window.append_window_ref(want, *args)
        error = (ring != want).double().mean().item()  # bytes that differ: a last bit of the norm may flip a code
        assert error < 1e-3
        ours = median_us(lambda _: window.append_window_triton(ring, *args), [None])
        plain = median_us(lambda _: window.append_window_ref(want, *args), [None], graph=False)
        report("append fp8", f"T={T}", ours, plain, T * (2 * D + ENTRY_BYTES) / ceiling["tb_s"] / 1e6, error)


def bench_flush() -> None:
    fmt, keys, B = entry_format("fp8", D, R), index_format("mxfp4", 128), 64
    cos, sin = angles(B)
    for name, c, form in (("csa main", 512, fmt), ("csa index", 128, keys)):
        rotated = (cos, sin)
        index = decode_index(B, 4 * 1000 + 3)
        pages = torch.zeros(B, 32, form.width, dtype=form.dtype, device="cuda")
        at = torch.arange(B, device="cuda") * 32
        p, z = torch.randn(B, 2 * c, device="cuda"), torch.randn(B, 2 * c, device="cuda")
        row_p, row_z = torch.randn(B, 8, 2 * c, device="cuda"), torch.randn(B, 8, 2 * c, device="cuda")
        bias, weight = torch.randn(4, 2 * c, device="cuda"), torch.rand(c, device="cuda") + 0.5
        args = (form, at, p, z, row_p, row_z, bias, weight, 1e-6, *rotated, index, 4, 1)
        flush_csa.flush_csa_triton(pages, *args)
        want = torch.zeros_like(pages)
        flush_csa.flush_csa_ref(want, *args)
        error = (pages != want).double().mean().item()
        assert error < 2e-3
        ours = median_us(lambda _: flush_csa.flush_csa_triton(pages, *args), [None])
        plain = median_us(lambda _, a=args, w=want: flush_csa.flush_csa_ref(w, *a), [None], graph=False)
        floor = B * (8 * 2 * c * 4 + 2 * 2 * c * 4 * 2 + form.nbytes) / ceiling["tb_s"] / 1e6
        report(f"flush {name}", "64 requests, all flush", ours, plain, floor, error)
    index = decode_index(B, 128 * 20 + 127)
    pages = torch.zeros(B, 1, fmt.width, dtype=fmt.dtype, device="cuda")
    at = torch.arange(B, device="cuda")
    p, z = torch.randn(B, D, device="cuda"), torch.randn(B, D, device="cuda")
    state = tuple(torch.rand(B, 1, D, device="cuda") + 1 for _ in range(3))
    bias, weight = torch.randn(128, D, device="cuda"), torch.rand(D, device="cuda") + 0.5
    args = (fmt, at, p, z, *state, bias, weight, 1e-6, cos, sin, index, 128)
    flush_hca.flush_hca_triton(pages, *args)
    want = torch.zeros_like(pages)
    flush_hca.flush_hca_ref(want, *args)
    error = (pages != want).double().mean().item()
    assert error < 2e-3

    def hca(_: object) -> None:
        flush_hca.flush_hca_triton(pages, *args)
        flush_hca.save_running_triton(*state, p, z, bias, index, 128)

    ours = median_us(hca, [None])
    floor = B * (9 * D * 4 + ENTRY_BYTES) / ceiling["tb_s"] / 1e6
    report("flush hca", "64 requests, all flush", ours, None, floor, error)


def bench_gather() -> None:
    fmt, B = entry_format("fp8", D, R), 64
    for K, N in ((512, 8192), (1024, 1024)):
        pages = filled(B * N // 32 // 4, 32, fmt)
        flat = [torch.randint(0, pages.shape[0] * 32, (B, K), device="cuda") for _ in range(4)]
        got = gather.gather_entries_triton(pages, fmt, flat[0], torch.bfloat16)
        error = compared(got, gather.gather_entries_ref(pages, fmt, flat[0], torch.bfloat16))
        ours = median_us(lambda at: gather.gather_entries_triton(pages, fmt, at, torch.bfloat16), flat)
        plain = median_us(lambda at: gather.gather_entries_ref(pages, fmt, at, torch.bfloat16), flat, graph=False)
        report("gather fp8", f"{K} x {B}", ours, plain, B * K * (ENTRY_BYTES + 2 * D) / ceiling["tb_s"] / 1e6, error)


def bench_indexer() -> None:
    for name in ("fp8", "mxfp4"):
        fmt = index_format(name, 128)
        for T, B, N in ((1, 1, 262144), (64, 64, 32768), (4096, 1, 16384)):
            pages = filled(B * N // 32, 32, fmt)
            table = table_of(B, N // 32)
            index = StepIndex.make(list(range(B)), [4 * N - T // B] * B, [T // B] * B, "cuda")
            q = torch.randn(T, 64, 128, device="cuda", dtype=torch.bfloat16)
            weights = torch.randn(T, 64, device="cuda") / 90
            args = (q, weights, pages, fmt, table, index, 4, N, 512)
            got = indexer.index_logits_triton(*args)
            some = slice(0, min(T, 8))
            part = index.part(0, some.stop)
            want = indexer.index_logits_ref(q[some], weights[some], pages, fmt, table, part, 4, N, 512)
            seen = want.isfinite()
            error = compared(got[some][seen], want[seen])
            ours = median_us(lambda _, a=args: indexer.index_logits_triton(*a), [None])
            floor = max(B * N * fmt.nbytes / ceiling["tb_s"] / 1e6, 2 * T * 64 * 128 * N / ceiling["tflop_s"] / 1e6)
            report(f"index logits {name}", f"T={T} B={B} N={N}", ours, None, floor, error)


def bench_topk() -> None:
    for T, N, k in ((1, 262144, 512), (64, 65536, 512), (64, 65536, 1024), (1024, 16384, 512)):
        logits = torch.randn(T, N, device="cuda")
        visible = torch.full((T,), N, dtype=torch.int64, device="cuda")
        got = topk.top_entries_triton(logits, visible, k)
        want = logits.topk(k).indices.sort(-1).values
        assert torch.equal(got.long(), want), "top-k differs from torch"
        ours = median_us(lambda _: topk.top_entries_triton(logits, visible, k), [None])
        plain = median_us(lambda _: logits.topk(k), [None])
        report(f"top-{k}", f"T={T} N={N}", ours, plain, T * N * 4 / ceiling["tb_s"] / 1e6, 0.0)


def attention_case(kind: str, H: int, K: int, B: int, n: int, name: str) -> None:
    """B requests of n tokens each; `name`: the format of ring and entries."""
    fmt, ratio, T = entry_format(name, D, R), 4 if kind == "csa" else 128, B * n
    N, P = (8192, 32) if kind == "csa" else (K, 1)
    P = P if n == 1 else 128
    pages, table = filled(B * N // P, P, fmt), table_of(B, N // P)
    position = N * ratio - n
    index = StepIndex.make(list(range(B)), [position] * B, [n] * B, "cuda")
    ring = filled(B, W if n == 1 else 8192, fmt)
    q, (cos, sin) = torch.randn(T, H, D, device="cuda", dtype=torch.bfloat16), angles(T)
    sink, held = torch.randn(H, device="cuda"), torch.arange(B, device="cuda")
    chosen = None
    if kind == "csa":
        picks = torch.rand(T, (position + 1) // ratio, device="cuda").topk(K, -1).indices
        chosen = picks.sort(-1).values.to(torch.int32)
    args = (q, ring, fmt, held, W, sink, SCALE, cos, sin, index, sparse.Entries(pages, table, ratio, chosen))
    got, some = sparse.attention_sparse_triton(*args), min(T, 128)
    first = sparse.Entries(pages, table, ratio, None if chosen is None else chosen[:some])
    part = (cos[:some], sin[:some], index.part(0, some), first)
    want = sparse.attention_sparse_ref(q[:some], ring, fmt, held, W, sink, SCALE, *part)
    error = compared(got[:some], want)
    ours = median_us(lambda _: sparse.attention_sparse_triton(*args), [None], repeats=20 if n == 1 else 3)
    keys = W + (K if kind == "csa" else (position + 1) // ratio)
    moved = B * keys * fmt.nbytes / ceiling["tb_s"] / 1e6 if n == 1 else 0.0
    floor = max(moved, 4 * T * H * D * keys / ceiling["tflop_s"] / 1e6)
    report(f"attention {kind} {name}", f"H={H} keys={keys} B={B} tokens={n}", ours, None, floor, error)


def bench_attention() -> None:
    cases = [("csa", H, K, B, 1) for H, K, bs in ((64, 512, (1, 8, 64, 128)), (128, 1024, (1, 64, 128))) for B in bs]
    for case in [*cases, *(("hca", 128, 8192, B, 1) for B in (1, 16))]:
        attention_case(*case, "fp8")
    for kind in ("csa", "hca"):
        attention_case(kind, 64, 512, 1, 4096, "bf16")
    fmt = entry_format("fp8", D, R)
    pages, flat = filled(512, 32, fmt), torch.randperm(16384, device="cuda").view(-1, 128)
    us = median_us(lambda _: gather.gather_entries_triton(pages, fmt, flat, torch.bfloat16), [None])
    report("widen fp8", "16384 entries", us, None, 16384 * (ENTRY_BYTES + 2 * D) / ceiling["tb_s"] / 1e6, 0.0)


BENCHES: dict[str, Callable[[], None]] = {
    "append": bench_append,
    "flush": bench_flush,
    "gather": bench_gather,
    "indexer": bench_indexer,
    "topk": bench_topk,
    "attention": bench_attention,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=BENCHES)
    only = parser.parse_args().only
    torch.manual_seed(0)
    ceiling.update(tb_s=copy_tb_s(), tflop_s=matmul_tflop_s())
    print(heading())
    print(f"ceilings here: copy {ceiling['tb_s']:.2f} TB/s, bf16 matmul {ceiling['tflop_s']:.0f} TFLOP/s")
    print("op                     case                               triton us    torch us  floor us  share     error")
    with suppress(KeyboardInterrupt):  # what there is counts
        for name, bench in BENCHES.items():
            if only in (None, name):
                bench()
                torch.cuda.empty_cache()
    print(json.dumps({"bench": "deepseek_kernels", "gpu": torch.cuda.get_device_name(), **ceiling, "rows": rows}))


if __name__ == "__main__":
    main()
