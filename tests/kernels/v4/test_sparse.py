"""attention_sparse: the torch form, and the Triton form in the interpreter (compiled where there is a CUDA device).

The oracle knows nothing of rings, pages or tiles: it has each request's rows and entries in lists, and the formula in
float64. Every byte that belongs to nobody is 0xFF, which is NaN in every format.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes, rel_rms
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.attention.tile import TileShape
from hybridkv.kernels.formats.page_format import fake_quantise, store_entries_ref
from hybridkv.kernels.formats.page_layout import PageFormat, entry_format
from hybridkv.kernels.step_index import StepIndex
from hybridkv.kernels.v4.sparse import (
    Entries,
    attention_sparse,
    attention_sparse_ref,
    attention_sparse_triton,
    sparse_shape,
)

pytest.importorskip("triton")

F32, BF16 = torch.float32, torch.bfloat16
# relative RMS. f32: sums of some dozen f32 products. bf16: weights, result and (fp8_entry) keys are rounded to bf16,
# 2^-9 at most and 1.1e-3 RMS each
BOUND = {F32: 2e-6, BF16: 4e-3}
HOSTILE = (-1, -(2**31), 2**31 - 1, 10**6)
SMALL = TileShape(16, 16, 4, 1)


@dataclass
class Case:
    """Requests at some positions, their rows in a ring and their entries in pages."""

    q: Tensor
    ring: Tensor
    fmt: PageFormat
    rows: Tensor
    window: int
    sink: Tensor
    scale: float
    cos: Tensor
    sin: Tensor
    index: StepIndex
    entries: Entries | None
    raw: list[Tensor] = field(default_factory=list)  # of each request: rows [end, D] f64
    pooled: list[Tensor] = field(default_factory=list)  # entries [end // ratio, D] f64

    @property
    def args(self) -> tuple[Any, ...]:
        return (
            self.q, self.ring, self.fmt, self.rows, self.window, self.sink, self.scale, self.cos, self.sin,
            self.index, self.entries,
        )  # fmt: skip

    def run(self, shape: TileShape = SMALL, splits: int = 1) -> Tensor:
        return attention_sparse_triton(*self.args, shape=shape, splits=splits)


def poisoned(fmt: PageFormat, count: int, P: int) -> Tensor:
    size = count, P, fmt.width * fmt.dtype.itemsize
    return torch.full(size, 255, dtype=torch.uint8, device=DEVICE).view(fmt.dtype)


def build(
    kind: str = "f32",
    requests: tuple[tuple[int, int], ...] = ((0, 1), (3, 1), (40, 1), (5, 7)),  # positions before, new tokens
    H: int = 4,
    D: int = 32,
    rope: int = 8,
    window: int = 8,
    R: int = 15,
    ratio: int | None = 4,
    P: int = 4,
    chosen: int | None = None,
    dtype: torch.dtype = F32,
    workspace: bool = False,  # ring pages that are not the slots
) -> Case:
    fmt, B = entry_format(kind, D, rope), len(requests)
    slots = (torch.randperm(B + 2)[:B]).tolist()
    index = StepIndex.make(slots, [n for n, _ in requests], [n for _, n in requests], DEVICE)
    rows = torch.randperm(B + 3)[:B] if workspace else torch.tensor(slots)
    ring = poisoned(fmt, B + 3, R)
    raw, pooled, ends = [], [], [n + more for n, more in requests]

    def vectors(n: int) -> Tensor:
        x = torch.randn(n, D, device=DEVICE) * 1.5
        x[::5] *= 2
        return x

    for row, end in zip(rows.tolist(), ends):
        x, at = vectors(end), torch.arange(max(0, end - R), end, device=DEVICE)
        store_entries_ref(ring, fmt, row * R + at % R, x[at])
        raw.append(fake_quantise(fmt, x).double())
    entries = None
    if ratio is not None:
        need = [-(-(end // ratio) // P) for end in ends]
        free = torch.randperm(sum(need) + 2).tolist()
        table = torch.full((B + 2, max(need) + 2), -1, dtype=torch.int32)
        pages = poisoned(fmt, len(free), P)
        for slot, end, n in zip(slots, ends, need):
            table[slot, :n] = torch.tensor([free.pop() for _ in range(n)])
            x, at = vectors(end // ratio), torch.arange(end // ratio)
            flat = table[slot, at // P].long() * P + at % P
            store_entries_ref(pages, fmt, flat.to(DEVICE), x)
            pooled.append(fake_quantise(fmt, x).double())
        picked = None
        if chosen is not None:
            picked = torch.stack([pick(int(t + 1) // ratio, chosen) for t in index.positions])
        entries = Entries(pages, table.to(DEVICE), ratio, None if picked is None else picked.to(DEVICE))
    T = len(index.token_to_req)
    q = torch.randn(T, H + 2, D, device=DEVICE).to(dtype)[:, 1 : 1 + H]  # a slice of a wider projection
    angle = index.positions[:, None].float() * 10.0 ** -torch.arange(rope // 2, device=DEVICE)
    sink = torch.randn(H, device=DEVICE)
    rows = rows.to(DEVICE)
    return Case(
        q, ring, fmt, rows, window, sink, D**-0.5, angle.cos(), angle.sin(), index, entries, raw, pooled
    )  # fmt: skip


def pick(visible: int, K: int) -> Tensor:
    """Some of the visible entries, ascending, -1 after them."""
    some = torch.randperm(visible)[:K].sort().values.int()
    return torch.cat((some, torch.full((K - len(some),), -1, dtype=torch.int32)))


def oracle(case: Case, sink: bool = True, turn: bool = True) -> Tensor:
    out = torch.zeros(case.q.shape, dtype=torch.float64, device=DEVICE)
    for i, (b, t) in enumerate(zip(case.index.token_to_req.tolist(), case.index.positions.tolist())):
        keys = case.raw[b][max(0, t - case.window + 1) : t + 1]
        if case.entries is not None:
            visible = range((t + 1) // case.entries.ratio)
            if case.entries.chosen is not None:
                visible = [j for j in case.entries.chosen[i].tolist() if j in visible]
            keys = torch.cat((keys, case.pooled[b][list(visible)]))
        logits = case.q[i].double() @ keys.T * case.scale  # [H, keys]
        extra = case.sink.double()[:, None]
        top = torch.maximum(logits.amax(1, keepdim=True), extra if sink else logits[:, :1])
        weights = (logits - top).exp()
        o = weights / (weights.sum(1, keepdim=True) + ((extra - top).exp() if sink else 0)) @ keys
        if turn:
            kept = case.fmt.dim - case.fmt.rope
            pairs = torch.view_as_complex(o[:, kept:].reshape(len(o), -1, 2).contiguous())
            pairs = pairs * torch.complex(case.cos[i].double(), -case.sin[i].double())
            o = torch.cat((o[:, :kept], torch.view_as_real(pairs).flatten(1)), 1)
        out[i] = o
    return out


def triton_split(*args: Any) -> Tensor:
    return attention_sparse_triton(*args, shape=SMALL, splits=3)


def triton_whole(*args: Any) -> Tensor:
    return attention_sparse_triton(*args, shape=SMALL, splits=1)


FORMS = pytest.mark.parametrize("form", (attention_sparse_ref, triton_whole, triton_split))
Form = Callable[..., Tensor]


@FORMS
@pytest.mark.parametrize("kind", ("f32", "bf16", "fp8", "fp8_entry"))
@pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32-q", "bf16-q"))
@pytest.mark.parametrize("chosen", (None, 6), ids=("all", "chosen"))
def test_softmax_over_window_and_entries(form: Form, kind: str, dtype: torch.dtype, chosen: int | None) -> None:
    case = build(kind, requests=((2, 1), (40, 1), (13, 2)), H=3, chosen=chosen, dtype=dtype)
    got = form(*case.args)
    assert got.dtype == dtype and got.shape == case.q.shape
    assert_close_rms("float64", oracle(case), got, BOUND[dtype])


@FORMS
def test_a_window_layer_has_no_entries(form: Form) -> None:
    """Positions 0 to 3, where the window is not yet full, and a ring that has wrapped several times."""
    case = build(requests=((0, 4), (60, 1), (9, 1)), ratio=None)
    assert_close_rms("float64", oracle(case), form(*case.args), BOUND[F32])


@FORMS
@pytest.mark.parametrize(("window", "R"), ((8, 8), (8, 20), (40, 53), (1, 1)))
def test_any_window_and_ring(form: Form, window: int, R: int) -> None:
    case = build(requests=((2, 1), (R, 1), (2 * R + 3, 1), (16, 1)), window=window, R=R, chosen=3)
    assert_close_rms("float64", oracle(case), form(*case.args), BOUND[F32])


@FORMS
@pytest.mark.parametrize("chosen", (None, 4), ids=("all", "chosen"))
def test_a_chunk_reads_the_workspace_ring(form: Form, chosen: int | None) -> None:
    """The ring holds the chunk and the window before it; its page is not the slot."""
    case = build("fp8", requests=((9, 4), (0, 3), (30, 1)), H=2, R=19, chosen=chosen, workspace=True)
    assert_close_rms("float64", oracle(case), form(*case.args), BOUND[F32])
    swapped = replace(case, rows=case.rows.flip(0))
    assert not rel_rms(oracle(case), form(*swapped.args)) < 0.1


@FORMS
def test_all_visible_entries_at_any_count(form: Form) -> None:
    """0, 0, 1, 1, 2, 2 and 17."""
    ends = (1, 15, 16, 31, 32, 47, 272)
    case = build(requests=tuple((end - 1, 1) for end in ends), H=2, ratio=16, P=1)
    assert_close_rms("float64", oracle(case), form(*case.args), BOUND[F32])


@FORMS
@pytest.mark.parametrize("chosen", (False, True), ids=("all", "chosen"))
def test_an_entry_is_seen_from_its_last_token_on(form: Form, chosen: bool) -> None:
    """Tokens 10, 11 and 12; entry 2 (of tokens 8 to 11) is seen by the last two. To the first it may be NaN."""
    case = build(requests=((10, 3),))
    assert case.entries is not None
    if chosen:
        both = torch.tensor([[1, 2]] * 3, dtype=torch.int32, device=DEVICE)
        case = replace(case, entries=replace(case.entries, chosen=both))
    assert_close_rms("float64", oracle(case), form(*case.args), BOUND[F32])
    assert case.entries is not None
    page = int(case.entries.table[case.index.slots[0], 0])
    case.entries.pages[page, 2] = torch.nan
    got = form(*case.args)
    assert got[0].isfinite().all() and got[1].isnan().all() and got[2].isnan().all()


@FORMS
def test_hostile_choices_are_skipped(form: Form) -> None:
    case = build(requests=((40, 1), (21, 3)), chosen=9)
    assert case.entries is not None and case.entries.chosen is not None
    chosen = case.entries.chosen
    chosen[:, 2], chosen[:, 4], chosen[:, 0] = HOSTILE[1], HOSTILE[2], HOSTILE[3]
    chosen[0, 5], chosen[1, 5] = 11, 5  # visible would be 0..9, 0..4
    assert_close_rms("float64", oracle(case), form(*case.args), BOUND[F32])


@FORMS
def test_an_entry_whose_page_is_missing_is_skipped(form: Form) -> None:
    case = build(requests=((40, 1),))
    assert case.entries is not None
    case.entries.table[case.index.slots[0], 1] = -1
    kept = torch.tensor([[0, 1, 2, 3, 8, 9]], dtype=torch.int32, device=DEVICE)
    want = oracle(replace(case, entries=replace(case.entries, chosen=kept)))
    assert_close_rms("float64", want, form(*case.args), BOUND[F32])


@FORMS
def test_no_valid_choice_leaves_the_window(form: Form) -> None:
    case = build(requests=((40, 1), (7, 1)), chosen=5)
    assert case.entries is not None and case.entries.chosen is not None
    case.entries.chosen.fill_(-1)
    assert_close_rms("float64", oracle(replace(case, entries=None)), form(*case.args), BOUND[F32])


@FORMS
def test_sinks_of_any_size(form: Form) -> None:
    case = build(H=6)
    case.sink[:] = torch.tensor([-1e30, -200.0, 0.0, 80.0, 1e4, -torch.inf])
    want, got = oracle(case), form(*case.args)
    assert_close_rms("float64", want[:, :3], got[:, :3], BOUND[F32])
    assert_close_rms("float64", want[:, 3], got[:, 3], 1e-5)  # e^-80: the error of the logit counts
    assert (got[:, 4] == 0).all()  # all the weight is the sink's
    assert_close_rms("no sink", oracle(case, sink=False)[:, 5], got[:, 5], BOUND[F32])


@FORMS
def test_the_bounds_would_see_a_missing_sink_or_rotation(form: Form) -> None:
    case = build(requests=((9, 4), (40, 1)), dtype=BF16, kind="bf16")
    case.sink[:] = 2.0  # large enough to be seen whatever else was drawn
    got = form(*case.args)
    assert rel_rms(oracle(case, sink=False), got) > 5 * BOUND[BF16]
    assert rel_rms(oracle(case, turn=False), got) > 5 * BOUND[BF16]
    assert rel_rms(oracle(replace(case, window=7)), got) > 5 * BOUND[BF16]
    assert rel_rms(oracle(replace(case, entries=None)), got) > 5 * BOUND[BF16]


@FORMS
@pytest.mark.parametrize("chosen", (None, 6), ids=("all", "chosen"))
def test_padding_gives_zeros_and_reads_nothing(form: Form, chosen: int | None) -> None:
    case = build(requests=((20, 1), (30, 1), (40, 1), (13, 2)), chosen=chosen)
    want = oracle(case)
    case.index.slots[0], case.index.num_computed[0], case.index.positions[0] = -1, 2**40, 2**40
    case.rows[2] = -1
    for row in (0, 2):
        case.q[row], case.cos[row], case.sin[row] = torch.nan, torch.nan, torch.nan
    got = form(*case.args)
    assert (got[[0, 2]] == 0).all()
    assert_close_rms("float64", want[[1, 3, 4]], got[[1, 3, 4]], BOUND[F32])


@pytest.mark.parametrize("H", (1, 4, 16, 24, 64, 128))
@pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
def test_any_number_of_heads(H: int, dtype: torch.dtype) -> None:
    case = build("f32" if dtype == F32 else "fp8", requests=((40, 1),), H=H, chosen=6, dtype=dtype)
    for splits in (1, 2) if H < 128 else (1,):
        got = case.run(sparse_shape(H, 32, dtype), splits)
        assert_close_rms("float64", oracle(case), got, BOUND[dtype])


@pytest.mark.parametrize(("kind", "H", "P"), (("bf16", 8, 1), ("fp8", 64, 32), ("fp8", 8, 1), ("fp8_entry", 8, 32)))
def test_the_released_width(kind: str, H: int, P: int) -> None:
    case = build(kind, ((139, 1),), H, 512, 64, window=128, R=136, P=P, chosen=40, dtype=BF16)
    assert_close_rms("torch form", oracle(case), attention_sparse_ref(*case.args), BOUND[BF16])
    for splits in (1, 3):
        got = attention_sparse_triton(*case.args, splits=splits)
        assert_close_rms("float64", oracle(case), got, BOUND[BF16])


@pytest.mark.parametrize("D, rope", ((20, 4), (60, 60), (24, 0), (48, 16)))
def test_odd_widths(D: int, rope: int) -> None:
    case = build("bf16", requests=((40, 1), (2, 3)), D=D, rope=rope)
    want = oracle(case) if rope else oracle(case, turn=False)
    assert_close_rms("whole", want, case.run(), BOUND[F32])
    assert_close_rms("split", want, case.run(splits=2), BOUND[F32])


@pytest.mark.parametrize("chosen", (None, 33), ids=("all", "chosen"))
def test_splits_change_nothing(chosen: int | None) -> None:
    """One split, some, and more splits than tiles (of which the longest has 4 or 5)."""
    case = build(requests=((200, 1), (0, 1), (66, 1)), H=2, chosen=chosen)
    want = oracle(case)
    for splits in (1, 2, 5, 19):
        assert_close_rms(f"{splits} splits", want, case.run(splits=splits), BOUND[F32])


def test_a_token_has_the_same_bits_in_a_chunk_and_alone() -> None:
    """With the same splits; a chunk and a step of one token differ in nothing else."""
    case = build("fp8", requests=((9, 5),), R=20, chosen=3, dtype=BF16)
    assert case.entries is not None and case.entries.chosen is not None
    whole = case.run(splits=2)
    for i in range(5):
        index = StepIndex.make(case.index.slots.tolist(), [9 + i], [1], DEVICE)
        entries = replace(case.entries, chosen=case.entries.chosen[i : i + 1])
        part = slice(i, i + 1)
        alone = replace(
            case, q=case.q[part], cos=case.cos[part], sin=case.sin[part], index=index, entries=entries
        )  # fmt: skip
        assert_same_bytes(alone.run(splits=2), whole[part])


@FORMS
@pytest.mark.parametrize("kind", ("bf16", "fp8", "fp8_entry"))
def test_a_nan_that_was_stored_is_seen(form: Form, kind: str) -> None:
    case = build(kind, requests=((40, 1), (40, 1)), dtype=BF16)
    assert case.entries is not None
    page = int(case.entries.table[case.index.slots[0], 1])
    x = torch.zeros(1, 32, device=DEVICE)
    x[0, 3] = torch.nan
    store_entries_ref(case.entries.pages, case.fmt, torch.tensor([page * 4 + 1], device=DEVICE), x)
    got = form(*case.args)
    assert got[0].isnan().any() and got[1].isfinite().all()


@FORMS
def test_table_and_choices_may_be_slices(form: Form) -> None:
    case = build(requests=((40, 1), (22, 2)), chosen=6)
    assert case.entries is not None and case.entries.chosen is not None
    e = case.entries
    wide = torch.full((len(e.table), e.table.shape[1] + 5), 10**6, dtype=torch.int32, device=DEVICE)
    wide[:, 2 : 2 + e.table.shape[1]] = e.table
    more = torch.zeros(3, 9, dtype=torch.int32, device=DEVICE)
    more[:, 1:7] = e.chosen
    sliced = replace(e, table=wide[:, 2 : 2 + e.table.shape[1]], chosen=more[:, 1:7])
    assert_same_bytes(form(*case.args), form(*replace(case, entries=sliced).args))


@FORMS
def test_no_tokens(form: Form) -> None:
    case = build(requests=((5, 0),), chosen=None)
    assert form(*case.args).shape == (0, 4, 32)


def test_long_keys_are_read_in_blocks_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    case = build(requests=((9, 5), (40, 1)))
    want = attention_sparse_ref(*case.args)
    monkeypatch.setattr("hybridkv.kernels.v4.sparse.BLOCK_VALUES", 1)
    assert_close_rms("one by one", want, attention_sparse_ref(*case.args), 1e-6)


def test_the_public_function_picks_by_device() -> None:
    case = build()
    form = attention_sparse_ref if DEVICE == "cpu" else attention_sparse_triton
    assert_same_bytes(attention_sparse(*case.args), form(*case.args))
