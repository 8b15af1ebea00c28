"""Cases of what a full-attention layer runs: storing entries, paged decode, paged prefill, and its exact form."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hybridkv.bench.cases import PAGE, Case, Listed, Peers, Setup, clone, entry_bytes, flat_bytes
from hybridkv.bench.report import check
from hybridkv.bench.timing import copies
from hybridkv.kernels.attention.append import append, append_ref
from hybridkv.kernels.attention.decode import attention_decode, attention_decode_torch
from hybridkv.kernels.attention.prefill import attention_prefill, attention_prefill_torch
from hybridkv.kernels.attention.tile import read_pages
from hybridkv.kernels.formats.kv_format import Pages

# bf16 results of f32 sums in another order: two roundings of 2^-9 each at the worst, and P rounded to bf16 in between
ROUNDING = 1e-2
WINDOW = 64
CHECKED = 8  # of a prompt's first and of its last tokens
TORCH_MOST = 4096  # entries up to which the torch form, a loop over tiles, is cheap enough to be timed
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attention_cases(s: Setup) -> Iterator[Listed]:
    full = [(1, 512)] + [(1, n << 10) for n in (2, 16, 32, 128, 256)] + [(8, 32 << 10), (64, 2 << 10), (64, 16 << 10)]
    for kind in s.kv_dtypes:
        for B, L in s.some(full, [(1, 2 << 10), (1, 32 << 10), (64, 2 << 10)], [(1, 128), (3, 192)]):
            yield Listed("attention_decode", f"{kind} B={B} L={L}", partial(decode_case, s, kind, B, L))
    for kind in s.kv_dtypes:
        for L in s.some((4 << 10, 16 << 10, 64 << 10) if kind != "fp8" else (16 << 10,), (4 << 10,), (128,)):
            yield Listed("attention_prefill", f"{kind} T={L}", partial(prefill_case, s, kind, L))


def append_cases(s: Setup) -> Iterator[Listed]:
    for kind in s.kv_dtypes:
        for T in s.some((1, 4096), (1,), (3,)):
            yield Listed("append", f"{kind} T={T}", partial(append_case, s, kind, T))


def inputs_cases(s: Setup) -> Iterator[Listed]:
    for kind in s.kv_dtypes:
        for T, kept in s.some(((1, False), (1, True), (4096, True)), ((1, True),), ((3, False), (3, True))):
            name = f"{kind} T={T}" + (" window kept" if kept else "")
            yield Listed("attention_inputs", name, partial(inputs_case, s, kind, T, kept))


def exact_cases(s: Setup) -> Iterator[Listed]:
    kind = s.kv_dtypes[0]
    for L in s.some((4 << 10, 16 << 10), (4 << 10,), (128,)):
        yield Listed("attention_exact", f"{kind} T={L}", partial(prefill_case, s, kind, L, exact=True))
    for B, L in s.some([(1, 16 << 10), (1, 128 << 10), (64, 2 << 10), (64, 16 << 10)], [(1, 16 << 10)], [(2, 128)]):
        yield Listed("attention_exact", f"{kind} B={B} L={L}", partial(decode_case, s, kind, B, L, exact=True))


def append_case(s: Setup, kind: str, T: int) -> Case:
    c = s.shape.config
    G, D, H = c.kv_heads, c.head_dim, c.heads
    pages = -(-T // PAGE) * G + 1
    moved = 2 * T * G * (D * s.shape.dtype.itemsize + entry_bytes(kind, D))
    inputs: list[Any] = []
    for _ in range(copies(moved, s.device)):
        qkv = s.randn(T, H + 2 * G, D)  # keys and values are columns of a projection
        index = torch.randperm(pages * PAGE, device=s.device)[: T * G].view(G, T)
        inputs.append((s.pages(kind, pages, D), s.pages(kind, pages, D), qkv[:, H : H + G], qkv[:, H + G :], index))

    def verify() -> float:
        k, v, *new = inputs[0]
        got, want = (clone(k), clone(v)), (clone(k), clone(v))
        append(*got, *new)
        append_ref(*want, *new)
        for a, b in zip(got, want, strict=True):
            check("append", flat_bytes(a), flat_bytes(b), 0)
        return 0.0

    return Case(lambda x: append(*x), inputs, verify, moved, torch=lambda x: append_ref(*x))


def inputs_case(s: Setup, kind: str, T: int, kept: bool) -> Case:
    """Norms, rotation and storing. `kept`: the last queries also go to where eviction finds them."""
    from hybridkv.kernels.attention.inputs import attention_inputs, attention_inputs_ref

    c = s.shape.config
    H, G, D, R = c.heads, c.kv_heads, c.head_dim, len(c.inv_freq)
    pages, gated = -(-T // PAGE) * G + 1, c.gdn is not None
    width = (H * (2 if gated else 1) + 2 * G) * D
    size = s.shape.dtype.itemsize
    moved = T * (width * size + H * D * size + 2 * G * entry_bytes(kind, D))
    weight = torch.rand(D, device=s.device) + 0.5
    ring: dict[str, Tensor] = {}
    if kept:
        last = torch.arange(T, device=s.device)
        ring = {"query_buffer": s.randn(WINDOW, H, D), "query_rows": torch.where(last >= T - WINDOW, last % WINDOW, -1)}
    inputs: list[Any] = []
    for _ in range(copies(moved, s.device)):
        angle = torch.rand(T, 1, R, device=s.device) * 6
        index = torch.randperm(pages * PAGE, device=s.device)[: T * G].view(G, T)
        pools = s.pages(kind, pages, D), s.pages(kind, pages, D)
        inputs.append(
            (s.randn(T, width), angle.cos(), angle.sin(), *pools, index, H, G, D, gated, weight, weight, c.eps)
        )

    def verify() -> float:
        x, cos, sin, k, v, *more = inputs[0]
        got, want = (clone(k), clone(v)), (clone(k), clone(v))
        q = attention_inputs(x, cos, sin, *got, *more, **ring)
        ref = attention_inputs_ref(x, cos, sin, *want, *more, **ring)
        return check("attention_inputs", q, ref, ROUNDING)

    return Case(
        lambda x: attention_inputs(*x, **ring), inputs, verify, moved, torch=lambda x: attention_inputs_ref(*x, **ring)
    )  # fmt: skip


def decode_case(s: Setup, kind: str, B: int, L: int, exact: bool = False) -> Case:
    """`exact`: the form whose results do not depend on the other requests, with the fast one beside it."""
    from hybridkv.kernels.attention.exact import attention_exact

    c = s.shape.config
    H, G, D = c.heads, c.kv_heads, c.head_dim
    scale, count = D**-0.5, B * G * L // PAGE
    moved = 2 * B * G * L * entry_bytes(kind, D) + 2 * B * H * D * s.shape.dtype.itemsize
    table = s.table(B, G, pages=L // PAGE)
    lengths = np.full((B, G), L, np.int64)
    ends, q, rows = torch.from_numpy(lengths).to(s.device), s.randn(B, H, D), torch.arange(B, device=s.device)
    inputs: list[Any] = [(s.pages(kind, count, D), s.pages(kind, count, D)) for _ in range(copies(moved, s.device))]

    def fast(x: Any) -> Tensor:
        return attention_decode(q, x[0], x[1], table, lengths, scale, ends)

    def by_row(x: Any) -> Tensor:
        return attention_exact(q, x[0], x[1], table, ends, [*range(B + 1)], scale, rows, L)

    def verify() -> float:
        k, v = inputs[0]
        got = (by_row if exact else fast)(inputs[0])
        some = [0, B - 1] if B > 1 else [0]
        want = torch.cat([attended(q[b : b + 1], k, v, table[b], L, scale) for b in some])
        return check(f"attention of {kind} B={B} L={L}", got[some], want, ROUNDING)

    def torch_form(x: Any) -> Tensor:
        return attention_decode_torch(q, x[0], x[1], table, lengths, scale, ends)

    flops = 4 * B * H * D * L
    if exact:
        return Case(by_row, inputs, verify, moved, flops, peers={"fast": (fast, inputs)})
    peers: Peers = {}
    if kind == "bf16" and s.device == "cuda":
        held = [(k.view(B, G, L, D), v.view(B, G, L, D)) for k, v in inputs]
        peers = sdpa(q.unsqueeze(2), held, causal=False)
    return Case(fast, inputs, verify, moved, flops, torch_form if B * L <= TORCH_MOST else None, peers)


def attended(q: Tensor, k: Pages, v: Pages, table: Tensor, length: int, scale: float) -> Tensor:
    """The definition in f32, all keys at once: the last queries [n, H, D] of `length` entries of streams [G, pages]."""
    (n, H, D), G = q.shape, len(table)
    seen = torch.arange(length, device=q.device) <= torch.arange(length - n, length, device=q.device)[:, None]
    parts = []
    for g in range(G):
        keys, values = (read_pages(pool, table[g], 0, length).float() for pool in (k, v))
        logits = q.float().view(n, G, H // G, D)[:, g] @ keys.t() * scale  # [n, H/G, L]
        parts.append(logits.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ values)
    return torch.stack(parts, 1).view(n, H, D)


def prefill_case(s: Setup, kind: str, L: int, exact: bool = False) -> Case:
    """`exact`: the form whose results do not depend on a prompt's chunks, with the fast one beside it."""
    from hybridkv.kernels.attention.exact import attention_exact

    c = s.shape.config
    H, G, D = c.heads, c.kv_heads, c.head_dim
    scale, count = D**-0.5, G * L // PAGE
    table, lengths = s.table(1, G, pages=L // PAGE), np.full((1, G), L, np.int64)
    ends, q, rows = torch.from_numpy(lengths).to(s.device), s.randn(L, H, D), torch.arange(1, device=s.device)
    pools = s.pages(kind, count, D), s.pages(kind, count, D)
    flops = 4 * H * D * L * (L + 1) / 2
    moved = 2 * G * L * entry_bytes(kind, D) + 2 * q.nbytes

    def fast(x: Any) -> Tensor:
        return attention_prefill(q, x[0], x[1], table, lengths, [0, L], scale, ends)

    def plain(x: Any) -> Tensor:
        return attention_prefill_torch(q, x[0], x[1], table, lengths, [0, L], scale)

    def by_row(x: Any) -> Tensor:
        return attention_exact(q, x[0], x[1], table, ends, [0, L], scale, rows, L)

    def verify() -> float:
        got, some = (by_row if exact else fast)(pools), CHECKED
        want = [attended(part, *pools, table[0], n, scale) for part, n in ((q[:some], some), (q[-some:], L))]
        return check(f"prompt {kind} T={L}", torch.cat((got[:some], got[-some:])), torch.cat(want), ROUNDING)

    if exact:
        return Case(by_row, [pools], verify, moved, flops, peers={"fast": (fast, [pools])})
    peers: Peers = {}
    if kind == "bf16" and s.device == "cuda":
        heads, *held = (s.randn(1, n, L, D) for n in (H, G, G))
        peers = sdpa(heads, [tuple(held)], causal=True)
    return Case(fast, [pools], verify, moved, flops, plain if L <= TORCH_MOST else None, peers)


def sdpa(q: Tensor, held: list[Any], causal: bool) -> Peers:
    """Torch's own backends, over contiguous keys and values [B, G, L, D]."""

    def attend(backend: SDPBackend, x: tuple[Tensor, Tensor]) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, *x, is_causal=causal, enable_gqa=True)

    return {f"SDPA {name}": (partial(attend, backend), held) for name, backend in BACKENDS.items()}
