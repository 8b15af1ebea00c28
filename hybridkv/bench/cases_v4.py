"""Cases of DeepSeek-V4's ops: window, compressors, gather, indexer, top-k, sparse attention.

One KV vector of 512 (448 + 64 rotated), 64 or 128 query heads, 64 index heads of 128; pages in random order. Prompt
chunks are timed as the engine runs them: entries dequantised to bf16 first (`dequantise`), then attention over those.
Of prompt chunks the first tokens are compared with the torch form. Small cases fit the L2 cache and stay there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from hybridkv.bench.cases import Case, Listed, Setup
from hybridkv.bench.report import WrongResult, check
from hybridkv.kernels.formats.page_format import store_entries_ref
from hybridkv.kernels.formats.page_layout import PageFormat, entry_format, index_format
from hybridkv.kernels.step_index import StepIndex
from hybridkv.kernels.topk import top_entries
from hybridkv.kernels.v4.flush_csa import flush_csa, flush_csa_ref
from hybridkv.kernels.v4.flush_hca import flush_hca, flush_hca_ref
from hybridkv.kernels.v4.gather import gather_entries, gather_entries_ref
from hybridkv.kernels.v4.indexer import index_logits, index_logits_ref
from hybridkv.kernels.v4.running_pool import save_running
from hybridkv.kernels.v4.sparse import Entries, attention_sparse, attention_sparse_ref
from hybridkv.kernels.v4.window_ring import append_window, append_window_ref

D, R, W = 512, 64, 128  # a KV vector, its rotated part, the window
CSA_RATIO, HCA_RATIO = 4, 128  # tokens of an entry
INDEX_HEADS, INDEX_DIM = 64, 128
SCALE = D**-0.5
EPS = 1e-6
BOUND = 2e-2  # relative RMS


def v4_cases(s: Setup) -> Iterator[Listed]:
    yield from append_cases(s)
    yield from flush_cases(s)
    yield from gather_cases(s)
    yield from indexer_cases(s)
    yield from topk_cases(s)
    yield from attention_cases(s)


# ---- inputs


def filled(s: Setup, pages: int, P: int, fmt: PageFormat) -> Tensor:
    """A pool [pages, P, width] of random entries."""
    out = torch.empty(pages, P, fmt.width, dtype=fmt.dtype, device=s.device)
    for a in range(0, pages * P, 1 << 16):
        at = torch.arange(a, min(a + (1 << 16), pages * P), device=s.device)
        store_entries_ref(out, fmt, at, s.randn(len(at), fmt.dim, dtype=torch.float32))
    return out


def angles(s: Setup, T: int) -> tuple[Tensor, Tensor]:
    """cos and sin [T, R / 2]."""
    angle = torch.rand(T, R // 2, device=s.device) * 6
    return angle.cos(), angle.sin()


def step_index(s: Setup, B: int, position: int, tokens: int = 1) -> StepIndex:
    """B requests of `tokens` new tokens each."""
    return StepIndex.make(list(range(B)), [position] * B, [tokens] * B, s.device)


def norm_weight(s: Setup, width: int) -> Tensor:
    return torch.rand(width, device=s.device) + 0.5


def same_bytes(what: str, got: Tensor, want: Tensor, bound: float) -> float:
    """The share of bytes that differ: a last bit of the norm may change a quantised value."""
    share = (got != want).double().mean().item()
    if not share < bound:
        raise WrongResult(f"{what}: {share:.1e} of the bytes differ from the reference's, more than {bound:.0e}")
    return share


# ---- what tokens leave in the cache


def append_cases(s: Setup) -> Iterator[Listed]:
    for T, B in s.some(((64, 64), (4096, 1), (16384, 1)), ((64, 64), (4096, 1)), ((4, 2),)):
        yield Listed("append fp8", f"T={T}", partial(append_case, s, T, B))


def append_case(s: Setup, T: int, B: int) -> Case:
    fmt = entry_format("fp8", D, R)
    ring = torch.zeros(B, max(W, T // B), fmt.width, dtype=fmt.dtype, device=s.device)
    want = torch.zeros_like(ring)
    args = (fmt, s.randn(T, D), norm_weight(s, D), EPS, *angles(s, T), step_index(s, B, 1000, T // B))

    def verify() -> float:
        append_window(ring, *args)
        append_window_ref(want, *args)
        return same_bytes("append", ring, want, 1e-3)

    return Case(
        lambda _: append_window(ring, *args), [None], verify, T * (2 * D + fmt.nbytes),
        torch=lambda _: append_window_ref(want, *args),
    )  # fmt: skip


def flush_cases(s: Setup) -> Iterator[Listed]:
    B = 2 if s.shape.tiny else 64
    case = f"{B} requests, all flush"
    yield Listed("flush csa main", case, partial(flush_csa_case, s, B, entry_format("fp8", D, R)))
    yield Listed("flush csa index", case, partial(flush_csa_case, s, B, index_format("mxfp4", INDEX_DIM)))
    yield Listed("flush hca", case, partial(flush_hca_case, s, B))


def flush_csa_case(s: Setup, B: int, fmt: PageFormat) -> Case:
    c, f32 = fmt.dim, torch.float32
    pages = torch.zeros(B, 32, fmt.width, dtype=fmt.dtype, device=s.device)
    want = torch.zeros_like(pages)
    at = torch.arange(B, device=s.device) * 32
    p, z = s.randn(B, 2 * c, dtype=f32), s.randn(B, 2 * c, dtype=f32)
    row_p, row_z = s.randn(B, 8, 2 * c, dtype=f32), s.randn(B, 8, 2 * c, dtype=f32)
    bias = s.randn(4, 2 * c, dtype=f32)
    index = step_index(s, B, 4 * 1000 + 3)
    args = (fmt, at, p, z, row_p, row_z, bias, norm_weight(s, c), EPS, *angles(s, B), index, 4, 1)

    def verify() -> float:
        flush_csa(pages, *args)
        flush_csa_ref(want, *args)
        return same_bytes("flush csa", pages, want, 2e-3)

    nbytes = B * (8 * 2 * c * 4 + 2 * 2 * c * 4 * 2 + fmt.nbytes)
    return Case(lambda _: flush_csa(pages, *args), [None], verify, nbytes, torch=lambda _: flush_csa_ref(want, *args))


def flush_hca_case(s: Setup, B: int) -> Case:
    fmt, f32 = entry_format("fp8", D, R), torch.float32
    pages = torch.zeros(B, 1, fmt.width, dtype=fmt.dtype, device=s.device)
    want = torch.zeros_like(pages)
    at = torch.arange(B, device=s.device)
    p, z, bias = s.randn(B, D, dtype=f32), s.randn(B, D, dtype=f32), s.randn(128, D, dtype=f32)
    top, total, mixed = (torch.rand(B, 1, D, device=s.device) + 1 for _ in range(3))
    index = step_index(s, B, 128 * 20 + 127)
    args = (fmt, at, p, z, top, total, mixed, bias, norm_weight(s, D), EPS, *angles(s, B), index, 128)

    def run(_: object) -> None:
        flush_hca(pages, *args)
        save_running(top, total, mixed, p, z, bias, index, 128)

    def verify() -> float:
        flush_hca(pages, *args)
        flush_hca_ref(want, *args)
        return same_bytes("flush hca", pages, want, 2e-3)

    return Case(run, [None], verify, B * (9 * D * 4 + fmt.nbytes))


# ---- what tokens read


def gather_cases(s: Setup) -> Iterator[Listed]:
    B = 2 if s.shape.tiny else 64
    for K, N in s.some(((512, 8192), (1024, 1024)), ((512, 8192),), ((16, 64),)):
        yield Listed("gather fp8", f"{K} x {B}", partial(gather_case, s, B, K, B * N // 32 // 4))
    entries = 64 if s.shape.tiny else 16384
    yield Listed("dequantise fp8", f"{entries} entries", partial(dequantise_case, s, entries))


def gather_case(s: Setup, B: int, K: int, pages: int) -> Case:
    fmt = entry_format("fp8", D, R)
    pool = filled(s, pages, 32, fmt)
    flat = [torch.randint(0, pages * 32, (B, K), device=s.device) for _ in range(4)]
    return _gather(fmt, pool, flat, B * K)


def dequantise_case(s: Setup, entries: int) -> Case:
    """All entries of some pages, as a prompt chunk needs them."""
    fmt = entry_format("fp8", D, R)
    flat = torch.randperm(entries, device=s.device).view(-1, min(128, entries))
    return _gather(fmt, filled(s, entries // 32, 32, fmt), [flat], entries)


def _gather(fmt: PageFormat, pool: Tensor, flat: list[Tensor], entries: int) -> Case:
    def verify() -> float:
        got = gather_entries(pool, fmt, flat[0], torch.bfloat16)
        return check("gather", got, gather_entries_ref(pool, fmt, flat[0], torch.bfloat16), BOUND)

    return Case(
        lambda at: gather_entries(pool, fmt, at, torch.bfloat16), flat, verify, entries * (fmt.nbytes + 2 * D),
        torch=lambda at: gather_entries_ref(pool, fmt, at, torch.bfloat16),
    )  # fmt: skip


def indexer_cases(s: Setup) -> Iterator[Listed]:
    sizes = ((1, 1, 262144), (64, 64, 32768), (4096, 1, 16384))  # tokens, requests, entries of each
    for name in ("fp8", "mxfp4"):
        for T, B, N in s.some(sizes, sizes[:1], ((2, 2, 64),)):
            yield Listed(f"index logits {name}", f"T={T} B={B} N={N}", partial(indexer_case, s, name, T, B, N))


def indexer_case(s: Setup, name: str, T: int, B: int, N: int) -> Case:
    fmt = index_format(name, INDEX_DIM)
    pages, table = filled(s, B * N // 32, 32, fmt), s.table(B, pages=N // 32)
    index = step_index(s, B, 4 * N - T // B, T // B)
    q, weights = s.randn(T, INDEX_HEADS, INDEX_DIM), s.randn(T, INDEX_HEADS, dtype=torch.float32) / 90
    some, skip = min(T, 8), min(512, N // 4)

    def verify() -> float:
        got = index_logits(q, weights, pages, fmt, table, index, 4, N, skip)[:some]
        part = index.part(0, some)
        want = index_logits_ref(q[:some], weights[:some], pages, fmt, table, part, 4, N, skip)
        seen = want.isfinite()
        return check("index logits", got[seen], want[seen], BOUND)

    return Case(
        lambda _: index_logits(q, weights, pages, fmt, table, index, 4, N, skip), [None], verify,
        B * N * fmt.nbytes, 2 * T * INDEX_HEADS * INDEX_DIM * N,
    )  # fmt: skip


def topk_cases(s: Setup) -> Iterator[Listed]:
    sizes = ((1, 262144, 512), (64, 65536, 512), (64, 65536, 1024), (1024, 16384, 512))
    for T, N, k in s.some(sizes, sizes[:2], ((2, 256, 16),)):
        yield Listed(f"top-{k}", f"T={T} N={N}", partial(topk_case, s, T, N, k))


def topk_case(s: Setup, T: int, N: int, k: int) -> Case:
    logits = s.randn(T, N, dtype=torch.float32)
    visible = torch.full((T,), N, dtype=torch.int64, device=s.device)

    def verify() -> float:
        want = logits.topk(k).indices.sort(-1).values
        return check("top-k", top_entries(logits, visible, k).long(), want, 0)

    return Case(lambda _: top_entries(logits, visible, k), [None], verify, T * N * 4, torch=lambda _: logits.topk(k))


def attention_cases(s: Setup) -> Iterator[Listed]:
    """(kind, heads, entries read, requests, tokens of each, format)"""
    steps = [("csa", 64, 512, B, 1, "fp8") for B in (1, 8, 64, 128)]
    steps += [("csa", 128, 1024, B, 1, "fp8") for B in (1, 64, 128)]
    steps += [("hca", 128, 8192, B, 1, "fp8") for B in (1, 16)]
    chunks = [(kind, 64, 512, 1, 4096, "bf16") for kind in ("csa", "hca")]
    tiny = [("csa", 4, 8, 2, 1, "fp8"), ("hca", 4, 8, 2, 1, "fp8"), ("csa", 4, 8, 1, 16, "bf16")]
    for kind, H, K, B, n, name in s.some([*steps, *chunks], [steps[0], steps[2], *chunks], tiny):
        case = f"H={H} keys={keys_seen(s, kind, K, n)} B={B} tokens={n}"
        yield Listed(f"attention {kind} {name}", case, partial(attention_case, s, kind, H, K, B, n, name))


def entry_count(s: Setup, kind: str, K: int) -> int:
    """Entries that a request has: CSA reads K of them, HCA all."""
    if s.shape.tiny:
        return 64
    return 8192 if kind == "csa" else K


def keys_seen(s: Setup, kind: str, K: int, n: int) -> int:
    """Keys that the first of a request's n tokens sees."""
    if kind == "csa":
        return W + K
    return W + (entry_count(s, kind, K) * HCA_RATIO - n + 1) // HCA_RATIO


def attention_case(s: Setup, kind: str, H: int, K: int, B: int, n: int, name: str) -> Case:
    """`name`: the format of ring and entries."""
    fmt, T = entry_format(name, D, R), B * n
    ratio, P = (CSA_RATIO, 32) if kind == "csa" else (HCA_RATIO, 1)
    N = entry_count(s, kind, K)
    if s.shape.tiny:
        P = 1
    elif n > 1:
        P = 128
    position = N * ratio - n
    pages, table = filled(s, B * N // P, P, fmt), s.table(B, pages=N // P)
    ring = filled(s, B, W if n == 1 else 8192, fmt)
    index = step_index(s, B, position, n)
    q, (cos, sin) = s.randn(T, H, D), angles(s, T)
    sink, held = s.randn(H, dtype=torch.float32), torch.arange(B, device=s.device)
    chosen = None
    if kind == "csa":
        picks = torch.rand(T, (position + 1) // ratio, device=s.device).topk(K, -1).indices
        chosen = picks.sort(-1).values.to(torch.int32)
    args = (q, ring, fmt, held, W, sink, SCALE, cos, sin, index, Entries(pages, table, ratio, chosen))
    some = min(T, 128)

    def verify() -> float:
        first = Entries(pages, table, ratio, None if chosen is None else chosen[:some])
        part = (cos[:some], sin[:some], index.part(0, some), first)
        want = attention_sparse_ref(q[:some], ring, fmt, held, W, sink, SCALE, *part)
        return check("sparse attention", attention_sparse(*args)[:some], want, BOUND)

    keys = keys_seen(s, kind, K, n)
    moved = B * keys * fmt.nbytes if n == 1 else 0.0
    return Case(lambda _: attention_sparse(*args), [None], verify, moved, 4 * T * H * D * keys)
