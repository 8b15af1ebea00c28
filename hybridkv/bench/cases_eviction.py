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
POOLED = 15  # neighbours of which the largest counts
SMALL_HEADS = (9, 3, 64)  # query heads, KV heads and head width of SmolLM2-135M


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
        name = f"{kind} W={WINDOW} L={L}"
        long = s.some((2048,), (2048,), (128,))[0]  # a text that is read again
        yield Listed("peak_scores", name, partial(scores_case, s, kind, L, peak=True))
        yield Listed("peak_scores", f"{name} {few} layers", partial(scores_case, s, kind, L, layers=few, peak=True))
        yield Listed("peak_scores", f"{name} sums unknown", partial(scores_case, s, kind, L, known=False, peak=True))
        yield Listed("peak_scores", f"{kind} W={long} L={L}", partial(scores_case, s, kind, L, window=long, peak=True))
        small = partial(scores_case, s, kind, L, heads=SMALL_HEADS, peak=True)
        yield Listed("peak_scores", f"{name} heads of 64", small)
        yield Listed("value_norms", f"{kind} {few} layers L={L}", partial(norms_case, s, kind, L, few))
        yield Listed("key_differences", f"{kind} {few} layers L={L}", partial(differences_case, s, kind, L, few))
    rows, L, keep = s.some([(64, 16 << 10, 2048)], [(64, 16 << 10, 2048)], [(4, 192, 128)])[0]
    yield Listed("pool_peaks", f"{rows} rows of {L}, {POOLED} neighbours", partial(pool_case, s, rows, L))
    yield Listed("standings", f"{rows} rows of {L}", partial(standings_case, s, rows, L))
    yield Listed("select_entries", f"{rows} rows keep {keep} of {L}", partial(select_case, s, rows, L, keep))
    for groups in (1, max(2, rows // 4)):
        name = f"{rows} rows in {groups} groups keep {keep} of {L}"
        yield Listed("select_shared", name, partial(shared_case, s, rows, L, keep, groups))
    for kind in s.kv_dtypes:
        for fresh in (True, False):
            name = f"{kind} {layers} layers keep {keep} of {L}" + ("" if fresh else " in place")
            yield Listed("compact", name, partial(compact_case, s, kind, L, keep, fresh))
        name = f"{kind} {layers} layers keep {keep} of {L}"
        yield Listed("to_front", name, partial(front_case, s, kind, L, keep))
    yield Listed("mix_peaks", f"{rows} rows of {L}", partial(mix_case, s, rows, L))


def scores_case(
    s: Setup,
    kind: str,
    L: int,
    known: bool = True,  # attention has left the log-sum-exp of the window's queries, so one pass is enough
    layers: int = 1,  # in one launch, as eviction does
    window: int = WINDOW,
    peak: bool = False,  # the largest weights instead of their sums
    heads: tuple[int, int, int] | None = None,  # others than the model's
) -> Case:
    c, op, form, reference = s.shape.config, "window_scores", window_scores, window_scores_ref
    if peak:
        from hybridkv.kernels.eviction.peak import peak_scores, peak_scores_ref

        op, form, reference = "peak_scores", peak_scores, peak_scores_ref
    H, G, D = heads or (c.heads, c.kv_heads, c.head_dim)
    H, G, scale = H * layers, G * layers, D**-0.5
    flops, moved = 2 * window * H * D * L, G * L * entry_bytes(kind, D) + 4 * (G if peak else H) * L
    when, at = torch.arange(L - window, L, device=s.device), torch.arange(L, device=s.device).repeat(G, 1)
    inputs, sums = [], []
    for _ in range(min(4, copies(moved, s.device))):
        pages, table, q = s.pages(kind, G * L // PAGE, D), s.table(G, pages=L // PAGE), s.randn(window, H, D)
        sums.append(log_sums(q, pages, table, L, scale))
        inputs.append((q, when, pages, table, at, scale, *(sums[-1:] if known else ())))

    def verify() -> float:
        """The first and the last entries: with the sums known, each score stands for itself."""
        (q, when, pages, table, at, scale, *_), errors = inputs[0], []
        got, few = form(*inputs[0]), min(L, CHECKED)
        for begin in (0, L - few):
            part = table[:, begin // PAGE : (begin + few) // PAGE], at[:, begin : begin + few]
            want = reference(q, when, pages, *part, scale, sums[0])
            errors.append(check(f"{op} L={L}", got[:, begin : begin + few], want, SCORES_BOUND))
        return max(errors)

    torch_form = (lambda x: reference(*x)) if L * layers <= TORCH_MOST and window == WINDOW else None
    return Case(lambda x: form(*x), inputs, verify, moved, flops, torch_form)


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


def norms_case(s: Setup, kind: str, L: int, layers: int) -> Case:
    """Values of all streams of all layers."""
    from hybridkv.kernels.eviction.value_norms import value_norms, value_norms_ref

    c = s.shape.config
    D, G = c.head_dim, c.kv_heads * layers
    moved = G * L * (entry_bytes(kind, D) + 4)
    lengths = torch.full((G,), L, device=s.device)
    pages, table = s.pages(kind, G * L // PAGE, D), s.table(G, pages=L // PAGE)
    inputs = [(pages, table, lengths, L)]

    def verify() -> float:
        few = (pages, table[:2], lengths[:2], L)
        return check("value_norms", value_norms(*few), value_norms_ref(*few), 1e-5)

    return Case(lambda x: value_norms(*x), inputs, verify, moved)


def differences_case(s: Setup, kind: str, L: int, layers: int) -> Case:
    """Keys of all streams of all layers, which are read twice."""
    from hybridkv.kernels.eviction.key_difference import key_differences, key_differences_ref

    c = s.shape.config
    D, G = c.head_dim, c.kv_heads * layers
    moved = G * L * (2 * entry_bytes(kind, D) + 4)
    lengths = torch.full((G,), L, device=s.device)
    pages, table = s.pages(kind, G * L // PAGE, D), s.table(G, pages=L // PAGE)
    inputs = [(pages, table, lengths, L)]

    def verify() -> float:
        few = (pages, table[:2], lengths[:2], L)
        return check("key_differences", key_differences(*few), key_differences_ref(*few), 2e-5)

    return Case(lambda x: key_differences(*x), inputs, verify, moved)


def standings_case(s: Setup, rows: int, L: int) -> Case:
    """Differences that nearly agree, as keys do."""
    from hybridkv.kernels.eviction.standing import standings, standings_ref

    moved = 3 * 4 * rows * L
    lengths = torch.full((rows,), L, device=s.device)
    inputs = [(torch.rand(rows, L, device=s.device) ** 2 - 1, lengths) for _ in range(copies(moved, s.device))]

    def verify() -> float:
        return check("standings", standings(*inputs[0]), standings_ref(*inputs[0]), 0)

    return Case(lambda x: standings(*x), inputs, verify, moved, torch=lambda x: standings_ref(*x))


def pool_case(s: Setup, rows: int, L: int) -> Case:
    """Floored at the mean and weighted by norms: a sum over the scores, and then all of it."""
    from hybridkv.kernels.eviction.peak_pool import pool_peaks, pool_peaks_ref

    moved = 3 * 4 * rows * L
    lengths = torch.full((rows,), L, device=s.device)
    count = copies(moved, s.device)
    inputs = [
        (torch.rand(rows, L, device=s.device), lengths, WINDOW, POOLED, True, torch.rand(rows, L, device=s.device))
        for _ in range(count)
    ]  # fmt: skip

    def verify() -> float:
        return check("pool_peaks", pool_peaks(*inputs[0]), pool_peaks_ref(*inputs[0]), 1e-5)

    return Case(lambda x: pool_peaks(*x), inputs, verify, moved, torch=lambda x: pool_peaks_ref(*x))


def shared_case(s: Setup, rows: int, L: int, keep: int, groups: int) -> Case:
    """Streams that keep `keep` entries on average and a fifth of that at the least; some have larger scores."""
    from hybridkv.kernels.eviction.select_shared import select_shared, select_shared_ref

    moved = 2 * 4 * rows * L
    full = torch.full((rows,), L, device=s.device)
    chosen = keep - WINDOW // 2
    least, room = full * 0 + chosen // 5, full[:groups] * 0 + rows // groups * (chosen - chosen // 5)
    strength = torch.rand(rows, 1, device=s.device)
    inputs = [
        (strength * torch.rand(rows, L, device=s.device) ** 4, full - WINDOW // 2, least, full, groups, room)
        for _ in range(copies(moved, s.device))
    ]  # fmt: skip

    def verify() -> float:
        for got, want in zip(select_shared(*inputs[0]), select_shared_ref(*inputs[0]), strict=True):
            check("select_shared", got, want, 0)
        return 0.0

    return Case(lambda x: select_shared(*x), inputs, verify, moved, torch=lambda x: select_shared_ref(*x))


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


def front_case(s: Setup, kind: str, L: int, keep: int) -> Case:
    """Keys and values of all streams of all layers, from lists on the device to the streams' fronts."""
    from hybridkv.kernels.eviction.to_front import to_front, to_front_ref

    c = s.shape.config
    D, streams = c.head_dim, c.kv_heads * len(c.attention_layers)
    table = s.table(streams, pages=L // PAGE)
    pools = [s.pages(kind, table.numel(), D) for _ in range(2)]
    tensors = [t for p in pools for t in ((p,) if isinstance(p, Tensor) else p)]
    entries = torch.stack([torch.randperm(L, device=s.device)[:keep].sort().values for _ in range(streams)]).int()
    counts, flags = torch.full((streams,), keep, device=s.device), entries.new_zeros(len(c.attention_layers))
    report = entries.new_zeros(streams + len(flags) + streams * keep)
    lists = (table, entries, counts, flags)
    moved = 4 * streams * keep * entry_bytes(kind, D)

    def verify() -> float:
        got, want = ([t.clone() for t in tensors] for _ in range(2))
        told = report.clone()
        to_front(got, *lists, report)
        to_front_ref(want, *lists, told)
        check("to_front", report, told, 0)
        for a, b in zip(got, want, strict=True):
            check("to_front", a.view(torch.uint8), b.view(torch.uint8), 0)
        return 0.0

    return Case(lambda _: to_front(tensors, *lists, report), [None], verify, moved)


def mix_case(s: Setup, rows: int, L: int) -> Case:
    """Peaks, standings and norms of all streams in one score."""
    from hybridkv.kernels.eviction.peak_mix import mix_peaks, mix_peaks_ref

    moved, count = 4 * 4 * rows * L, copies(4 * 4 * rows * L, s.device)
    lengths, weights = torch.full((rows,), L, device=s.device), torch.rand(rows, device=s.device)
    at, looked_at = torch.arange(L, device=s.device).expand(rows, -1), torch.rand(L, device=s.device)

    def three() -> list[Tensor]:
        return [torch.rand(rows, L, device=s.device) for _ in range(3)]

    inputs = [
        (a, at, looked_at, b, 5.0, c, lengths, weights < 0.05, weights) for a, b, c in (three() for _ in range(count))
    ]

    def verify() -> float:
        return check("mix_peaks", mix_peaks(*inputs[0]), mix_peaks_ref(*inputs[0]), 1e-5)

    return Case(lambda x: mix_peaks(*x), inputs, verify, moved, torch=lambda x: mix_peaks_ref(*x))
