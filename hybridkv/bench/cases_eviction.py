"""Cases of eviction: the window's scores, who survives, and moving them together."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from hybridkv.bench.cases import PAGE, Case, Listed, Setup, entry_bytes
from hybridkv.bench.report import check
from hybridkv.bench.timing import copies
from hybridkv.kernels.attention.tile import read_pages
from hybridkv.kernels.eviction.compact import compact, compact_ref
from hybridkv.kernels.eviction.score import window_scores, window_scores_ref
from hybridkv.kernels.formats.kv_format import Pages

WINDOW = 64
CHECKED = 2048  # a multiple of PAGE
TORCH_MOST = 16 << 10  # entries up to which the torch form is timed
SCORES_BOUND = 1e-2  # products in bf16 on the tensor cores, sums in f32


def eviction_cases(s: Setup) -> Iterator[Listed]:
    layers = len(s.shape.config.attention_layers)
    for kind in s.kv_dtypes:
        for L in s.some((16 << 10, 32 << 10, 128 << 10), (16 << 10,), (192,)):
            yield Listed("window_scores", f"{kind} W={WINDOW} L={L}", partial(scores_case, s, kind, L))
        L, few = s.some((16 << 10,), (16 << 10,), (192,))[0], s.some((layers,), (layers,), (3,))[0]
        yield Listed(
            "window_scores", f"{kind} W={WINDOW} L={L} {few} layers", partial(scores_case, s, kind, L, layers=few)
        )
        name = f"{kind} W={WINDOW} L={L} sums unknown"
        yield Listed("window_scores", name, partial(scores_case, s, kind, L, known=False))
    rows, L, keep = s.some([(64, 16 << 10, 2048)], [(64, 16 << 10, 2048)], [(4, 192, 128)])[0]
    yield Listed("select_entries", f"{rows} rows keep {keep} of {L}", partial(select_case, s, rows, L, keep))
    for kind in s.kv_dtypes:
        for fresh in (True, False):
            name = f"{kind} {layers} layers keep {keep} of {L}" + ("" if fresh else " in place")
            yield Listed("compact", name, partial(compact_case, s, kind, L, keep, fresh))


def scores_case(s: Setup, kind: str, L: int, known: bool = True, layers: int = 1) -> Case:
    """`known`: attention has left the log-sum-exp of the window's queries, so one pass is enough. `layers`: in one
    launch, as eviction does.
    """
    c = s.shape.config
    H, G, D, scale = c.heads * layers, c.kv_heads * layers, c.head_dim, c.head_dim**-0.5
    flops, moved = 2 * WINDOW * H * D * L, G * L * entry_bytes(kind, D) + 4 * H * L
    when, at = torch.arange(L - WINDOW, L, device=s.device), torch.arange(L, device=s.device).repeat(G, 1)
    inputs, sums = [], []
    for _ in range(min(4, copies(moved, s.device))):
        pages, table, q = s.pages(kind, G * L // PAGE, D), s.table(G, pages=L // PAGE), s.randn(WINDOW, H, D)
        sums.append(log_sums(q, pages, table, L, scale))
        inputs.append((q, when, pages, table, at, scale, *(sums[-1:] if known else ())))

    def verify() -> float:
        """The first and the last entries: with the sums known, each score stands for itself."""
        (q, when, pages, table, at, scale, *_), errors = inputs[0], []
        got, few = window_scores(*inputs[0]), min(L, CHECKED)
        for begin in (0, L - few):
            part = table[:, begin // PAGE : (begin + few) // PAGE], at[:, begin : begin + few]
            want = window_scores_ref(q, when, pages, *part, scale, sums[0])
            errors.append(check(f"window_scores L={L}", got[:, begin : begin + few], want, SCORES_BOUND))
        return max(errors)

    torch_form = (lambda x: window_scores_ref(*x)) if L * layers <= TORCH_MOST else None
    return Case(lambda x: window_scores(*x), inputs, verify, moved, flops, torch_form)


def log_sums(q: Tensor, pages: Pages, table: Tensor, L: int, scale: float) -> Tensor:
    """[W, H] f32: logarithms of the sums of exp(q . k * scale) over the keys that each query sees."""
    W, H, D = q.shape
    rows, parts = q.float().view(W, len(table), -1, D), []
    later = torch.arange(L, device=q.device) > torch.arange(L - W, L, device=q.device)[:, None]
    for g in range(len(table)):
        keys = read_pages(pages, table[g : g + 1], 0, L)[0].float()
        logits = (rows[:, g] @ keys.t() * scale).masked_fill(later[:, None], -torch.inf)  # [W, H/G, L]
        parts.append(logits.logsumexp(-1))
    return torch.stack(parts, 1).view(W, H)


def select_case(s: Setup, rows: int, L: int, keep: int) -> Case:
    """Streams of one length; the last WINDOW entries stay whatever their score."""
    from hybridkv.kernels.eviction.select import select_entries, select_entries_ref

    moved = 4 * rows * (L + keep)
    full = torch.full((rows,), L, device=s.device)
    shared = full - WINDOW // 2, full * 0 + keep - WINDOW // 2, full, keep
    inputs = [(torch.rand(rows, L, device=s.device) ** 4, *shared) for _ in range(copies(moved, s.device))]

    def verify() -> float:
        return check("select_entries", select_entries(*inputs[0]), select_entries_ref(*inputs[0]), 0)

    return Case(
        lambda x: select_entries(*x), inputs, verify, moved, torch=lambda x: select_entries_ref(*x)
    )  # fmt: skip


def compact_case(s: Setup, kind: str, L: int, keep: int, fresh: bool) -> Case:
    """Keys and values of all streams of all layers. `fresh`: into pages that were free, else to the streams' fronts,
    where other survivors may lie.
    """
    c = s.shape.config
    D, streams = c.head_dim, c.kv_heads * len(c.attention_layers)
    order = s.table(streams, pages=(L + keep) // PAGE).long()  # the last ones of each are the fresh ones
    pools = [s.pages(kind, order.numel(), D) for _ in range(2)]
    tensors = [t for p in pools for t in ((p,) if isinstance(p, Tensor) else p)]
    front = torch.arange(keep, device=s.device).repeat(streams, 1) + (L if fresh else 0)
    chosen = torch.stack([torch.randperm(L, device=s.device)[:keep].sort().values for _ in range(streams)])
    source, target = ((order.gather(1, x // PAGE) * PAGE + x % PAGE).flatten() for x in (chosen, front))
    moved = 4 * streams * keep * entry_bytes(kind, D)

    def verify() -> float:
        got, want = ([t.clone() for t in tensors] for _ in range(2))
        compact(got, source, target, fresh)
        for a, b in zip(got, want, strict=True):
            compact_ref(b, source, target)
            check("compact", a.view(torch.uint8), b.view(torch.uint8), 0)
        return 0.0

    return Case(
        lambda _: compact(tensors, source, target, fresh), [None], verify, moved,
        torch=lambda _: [compact_ref(t, source, target) for t in tensors],
    )  # fmt: skip
