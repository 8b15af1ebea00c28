"""index_logits: the reference and the kernels against a loop in float64, on keys in random pages of every format."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from long_form import few
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.formats.page_format import fake_quantise, store_entries_ref
from hybridkv.kernels.formats.page_layout import PageFormat, index_format
from hybridkv.kernels.step_index import StepIndex
from hybridkv.kernels.v4.indexer import SHAPES, IndexerShape, index_logits_ref, index_logits_triton

NAMES = ("f32", "bf16", "fp8", "mxfp4", "nvfp4")
BOUND = 5e-6  # f32 sums of at most 128 channels and 64 heads: a few 2^-24, of a single logit whose heads cancel tenfold
# Against keys before rounding: relative RMS of a rounded product of Gaussian vectors, 2^-9 / sqrt(3) for bf16, 2.7% for
# E4M3, 10% for E2M1 (which mxfp4 meets twice, in keys and queries). relu halves signal and error alike; of signed
# weights the signal loses what is common to the heads, at most a factor 1.5.
LOOSE = {"f32": 1e-6, "bf16": 2.5e-3, "fp8": 0.045, "mxfp4": 0.25, "nvfp4": 0.16}
FORMS = {"reference": index_logits_ref, "kernel": index_logits_triton}


@dataclass
class Case:
    q: Tensor  # [T, H, D]
    weights: Tensor  # [T, H]
    pages: Tensor
    fmt: PageFormat
    table: Tensor
    index: StepIndex
    ratio: int
    width: int
    skip: int
    keys: list[Tensor]  # of each request [n, D], before they were stored

    def run(self, form: Callable[..., Tensor], **more: IndexerShape) -> Tensor:
        index = StepIndex(*(x.to(DEVICE) for x in vars(self.index).values()))
        on = (x.to(DEVICE) for x in (self.q, self.weights, self.pages))
        return form(*on, self.fmt, self.table.to(DEVICE), index, self.ratio, self.width, self.skip, **more).cpu()

    @property
    def visible(self) -> Tensor:
        """[T] entries; 0 for rows that may be left out."""
        n = (self.index.positions + 1) // self.ratio
        return n.masked_fill((self.index.token_slots < 0) | (n <= self.skip), 0)

    def truth(self, exact: bool = False) -> Tensor:
        """[T, width] f64 on the stored keys, or on the exact ones; 0 where there is nothing to compare."""
        out = torch.zeros(len(self.q), self.width, dtype=torch.float64)
        for t, (b, n) in enumerate(zip(self.index.token_to_req.tolist(), self.visible.tolist())):
            q, k = self.q[t].float(), self.keys[b][:n]
            if not exact:
                q, k = (fake_quantise(self.fmt, q) if self.fmt.hadamard else q), fake_quantise(self.fmt, k)
            out[t, :n] = self.weights[t].double() @ (q.double() @ k.double().T).relu()
        return out

    def seen(self, got: Tensor) -> Tensor:
        return got.where(torch.arange(self.width) < self.visible[:, None], 0.0)


def make(
    name: str,
    requests: list[tuple[int, int]],  # tokens before and tokens of the step
    H: int = 16,
    D: int = 32,
    P: int = 8,
    ratio: int = 4,
    skip: int = 0,
    padding: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """Requests in random slots, their keys in random pages; every other byte of the pages is hostile."""
    begins, counts = (list(x) for x in zip(*requests))
    entries = [(begin + count) // ratio for begin, count in requests]
    held = [-(-n // P) for n in entries]
    fmt = index_format(name, D)
    B = len(requests)
    pages = torch.full((sum(held) + 3, P, fmt.width), torch.nan if fmt.plain else 255, dtype=fmt.dtype)
    table = torch.full((B + 3, max(held) + 2), -1, dtype=torch.int32)
    slots = torch.randperm(B + 3)[:B].tolist()
    free, keys = torch.randperm(len(pages)).tolist(), []
    for slot, n, count in zip(slots, entries, held):
        own = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int64)
        table[slot, :count] = own.int()
        k = torch.randn(n, D) * torch.exp2(torch.randint(-3, 3, (n, 1)).float())
        store_entries_ref(pages, fmt, own.repeat_interleave(P)[:n] * P + torch.arange(n) % P, k)
        keys.append(k)
    for _ in range(padding):  # rows of a captured graph that no request uses
        slots, begins, counts, keys = [*slots, -1], [*begins, 2**40], [*counts, 1], [*keys, torch.empty(0, D)]
    index = StepIndex.make(slots, begins, counts)
    T = len(index.token_to_req)
    q = torch.randn(T, H + 2, D).to(dtype)[:, 1 : 1 + H]  # a slice of a wider row, as a fused projection gives it
    weights = torch.randn(T, H + 5)[:, :H] * H**-0.5
    q[index.token_slots < 0] = torch.nan
    return Case(q, weights, pages, fmt, table, index, ratio, max(*entries, 1) + 3, skip, keys)


CASES = {
    "one token, one entry": dict(requests=[(3, 1)], D=16),
    "a token without entries": dict(requests=[(2, 1), (40, 1)]),
    "decoding": dict(requests=[(700, 1), (3, 1), (131, 1)], padding=2),
    "odd heads": dict(requests=[(70, 1)], H=24, D=64, P=3),
    "real widths": dict(requests=[(60, 1)], H=64, D=128, P=32),
    "a prompt from its first token": dict(requests=[(0, 70)], P=5),
    "chunks and single tokens": dict(requests=[(9, 1), (130, 37), (0, 5), (63, 1)], H=16, P=16, ratio=2, padding=1),
}


@pytest.mark.long
@few("case, name", [*CASES], NAMES)
def test_logits_equal_their_definition(case: str, name: str) -> None:
    c = make(name, **CASES[case])  # type: ignore[arg-type]
    for what, form in FORMS.items():
        got = c.run(form)
        assert got.shape == (len(c.q), c.width) and got.dtype == torch.float32
        assert_close_rms(what, c.truth(), c.seen(got), BOUND)
    hidden = torch.arange(c.width) >= c.visible[:, None]
    assert (c.run(index_logits_ref)[hidden] == -torch.inf).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS)
def test_f32_queries(form: str, name: str) -> None:
    c = make(name, [(90, 3), (30, 1)], H=24, D=64, dtype=torch.float32)
    assert_close_rms(form, c.truth(), c.seen(c.run(FORMS[form])), BOUND)


@pytest.mark.parametrize("name", ("bf16", "fp8", "mxfp4"))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_launch_configuration_agrees(shape: IndexerShape, name: str) -> None:
    c = make(name, [(260, 9), (1100, 1), (20, 21)], P=8, padding=1)
    assert_close_rms(str(shape), c.truth(), c.seen(c.run(index_logits_triton, shape=shape)), BOUND)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_position_sees_what_is_complete_and_no_more(shape: IndexerShape) -> None:
    """Poisoned fresh memory stays where nothing is visible; what is visible is finite."""
    c = make("bf16", [(0, 41)], P=2)
    got = c.run(index_logits_triton, shape=shape)
    for t, n in enumerate(c.visible.tolist()):
        assert n == (t + 1) // 4
        assert got[t, :n].isfinite().all() and got[t, n:].isnan().all(), f"position {t}"


@pytest.mark.parametrize("shape", (None, *SHAPES), ids=str)
def test_rows_that_see_no_more_than_skip_are_left_out(shape: IndexerShape | None) -> None:
    c = make("bf16", [(0, 50), (24, 4), (39, 1)], skip=7)
    got = c.run(index_logits_triton, shape=shape)
    assert_close_rms("logits", c.truth(), c.seen(got), BOUND)
    assert got[c.visible == 0].isnan().all() and (c.visible == 0).sum() == 31 + 4
    f32 = replace(c, q=c.q.float())
    assert f32.run(index_logits_triton)[c.visible == 0].isnan().all()


@pytest.mark.parametrize("name", NAMES)
def test_page_order_changes_no_bit(name: str) -> None:
    c = make(name, [(150, 6), (77, 1)], P=4)
    order = torch.randperm(len(c.pages))
    moved = torch.empty_like(c.pages)
    moved[order] = c.pages
    table = torch.where(c.table < 0, -1, order[c.table.long()].int())
    for form in FORMS.values():
        assert_same_bytes(c.seen(c.run(form)), c.seen(replace(c, pages=moved, table=table).run(form)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS)
def test_a_key_that_is_nan_is_not_hidden(form: str, name: str) -> None:
    c = make(name, [(40, 1)], P=4)
    page = int(c.table[int(c.index.slots[0]), 1])
    c.pages[page] = torch.nan if c.fmt.plain else 255
    got = c.run(FORMS[form])[0]
    assert got[4:8].isnan().all() and got[:4].isfinite().all() and got[8:10].isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_relu_and_signed_weights(form: str) -> None:
    """One head each of weight 2, -3; keys that agree with them, or not."""
    c = make("f32", [(11, 1)], H=2, D=16, dtype=torch.float32)
    c.q, c.weights = torch.zeros(1, 2, 16), torch.tensor([[2.0, -3.0]])
    c.q[0, 0, 0], c.q[0, 1, 1] = 1.0, 1.0
    k = torch.zeros(3, 16)
    k[:, :2] = torch.tensor([[1.0, -1.0], [1.0, 1.0], [-1.0, 5.0]])
    page = int(c.table[int(c.index.slots[0]), 0])
    store_entries_ref(c.pages, c.fmt, page * 8 + torch.arange(3), k)
    assert c.run(FORMS[form])[0, :3].tolist() == [2.0, -1.0, -15.0]


@pytest.mark.parametrize("name", NAMES)
def test_rounding_costs_what_the_format_says(name: str) -> None:
    c = make(name, [(1600, 1)], H=64, D=128, P=32)
    assert_close_rms(name, c.truth(exact=True), c.seen(c.run(index_logits_triton)), LOOSE[name])


@pytest.mark.parametrize("T, width", ((0, 5), (2, 0)))
def test_nothing_to_do(T: int, width: int) -> None:
    fmt = index_format("bf16", 16)
    index = StepIndex.make([0], [0], [T], DEVICE)
    q, w = torch.randn(T, 4, 16, device=DEVICE).bfloat16(), torch.randn(T, 4, device=DEVICE)
    pages, table = torch.zeros(1, 2, 16, device=DEVICE).bfloat16(), torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    for form in FORMS.values():
        assert form(q, w, pages, fmt, table, index, 4, width, 0).shape == (T, width)
