"""append_window and copy_window: rows where their positions say, normed and rotated, and no other byte of the ring."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor
from triton_interpreter import DEVICE
from v4_encoder import page_bytes

from hybridkv.kernels.formats.page_format import fake_quantise, load_entries_ref
from hybridkv.kernels.formats.page_layout import PageFormat, entry_format
from hybridkv.kernels.step_index import StepIndex
from hybridkv.kernels.v4.window_ring import (
    append_window,
    append_window_ref,
    append_window_triton,
    copy_window,
    copy_window_ref,
    copy_window_triton,
)

pytest.importorskip("triton")
EPS = 1e-6
NAMES = ("f32", "bf16", "fp8", "fp8_entry")
every_name = pytest.mark.parametrize("name", NAMES)
both_forms = pytest.mark.parametrize("form", ("ref", "triton"))


def on(index: StepIndex, device: str) -> StepIndex:
    return StepIndex(*(getattr(index, field.name).to(device) for field in fields(index)))


def random_ring(fmt: PageFormat, S: int, R: int) -> Tensor:
    """Bits that arithmetic would not keep."""
    return torch.randint(0, 256, (S, R, fmt.nbytes), dtype=torch.uint8).view(fmt.dtype)


def angles(index: StepIndex, rope: int) -> tuple[Tensor, Tensor]:
    angle = index.positions.float()[:, None] * 10_000 ** (-torch.arange(0, rope, 2) / rope)
    return angle.cos(), angle.sin()


def exact_step(fmt: PageFormat, index: StepIndex) -> tuple[Any, ...]:
    """x, weight, cos, sin for which norm and rotation round nothing: magnitudes 1 and quarter turns."""
    T, D = len(index.token_to_req), fmt.dim
    x = torch.randint(0, 2, (T, D)) * 2.0 - 1
    weight = torch.randint(-64, 65, (D,)) / 16
    turns = torch.randint(0, 4, (T, fmt.rope // 2))
    cos, sin = torch.tensor([1.0, 0, -1, 0])[turns], torch.tensor([0, 1.0, 0, -1])[turns]
    return x, weight, cos, sin


def run(
    form: str, ring: Tensor, fmt: PageFormat, step: tuple[Any, ...], index: StepIndex, rows: Tensor | None = None
) -> Tensor:
    """The ring after the step, on the CPU; eps 0 keeps magnitudes of 1 exact. Pages before and after it are guarded."""
    device = DEVICE if form == "triton" else "cpu"
    guard = random_ring(fmt, 2, ring.shape[1])
    memory = torch.cat((guard[:1], ring, guard[1:])).to(device)
    x, weight, cos, sin = (t.to(device) for t in step)
    call = append_window_triton if form == "triton" else append_window
    call(memory[1:-1], fmt, x, weight, 0.0, cos, sin, on(index, device), None if rows is None else rows.to(device))
    assert_same_bytes(guard.view(torch.uint8), memory[[0, -1]].view(torch.uint8))
    return memory[1:-1].cpu()


def plainly(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """The row in f64, as the formulas say."""
    x, cos, sin = x.double(), cos.double(), sin.double()
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    rope = 2 * cos.shape[1]
    for i in range(rope // 2):
        a, b = y[:, -rope + 2 * i].clone(), y[:, -rope + 2 * i + 1].clone()
        y[:, -rope + 2 * i] = a * cos[:, i] - b * sin[:, i]
        y[:, -rope + 2 * i + 1] = a * sin[:, i] + b * cos[:, i]
    return y


def expected_places(index: StepIndex, page_of: list[int], R: int) -> dict[int, int]:
    """Flat place -> token, one token after the other: what a ring holds after a step."""
    places = {}
    for t, (b, u) in enumerate(zip(index.token_to_req.tolist(), index.positions.tolist())):
        if page_of[b] >= 0:
            places[page_of[b] * R + u % R] = t
    return places


@both_forms
@every_name
@pytest.mark.parametrize(("D", "rope"), ((32, 8), (512, 64)))
def test_rows_are_normed_rotated_and_at_their_positions(form: str, name: str, D: int, rope: int) -> None:
    fmt, R = entry_format(name, D, rope), 8
    index = StepIndex.make([2, 0, 3], [5, 0, 123_456], [1, 5, 2])
    x, weight, (cos, sin) = torch.randn(8, D) * 3, torch.rand(D) + 0.5, angles(index, rope)
    ring = run(form, random_ring(fmt, 4, R), fmt, (x, weight, cos, sin), index)
    at = expected_places(index, [2, 0, 3], R)
    assert len(at) == 8
    got = load_entries_ref(ring, fmt, torch.tensor(list(at)))
    want = plainly(x, weight, 0.0, cos, sin)[list(at.values())]
    kept = D - rope
    # f32 sums; bf16 rounds by 2^-8 at most; E4M3 of Gaussian rows by 2.7 % RMS, of some dozen numbers by a little more
    bound = {"f32": 1e-6, "bf16": 2**-8}.get(name, 0.035)
    assert_close_rms("values", want[:, :kept], got[:, :kept], bound)
    assert_close_rms("rotary", want[:, kept:], got[:, kept:], min(bound, 2**-8))


@both_forms
@every_name
def test_bytes_are_those_of_the_independent_encoder_and_every_other_byte_stays(form: str, name: str) -> None:
    fmt, S, R = entry_format(name, 200, 12), 5, 4
    index = StepIndex.make([3, -1, 0, 1], [2, 7, 10, 0], [1, 2, 3, 9])  # the last one is longer than the ring
    step = exact_step(fmt, index)
    step[0][index.token_to_req == 1] = torch.nan
    before = random_ring(fmt, S, R)
    after = run(form, before, fmt, step, index)
    rows = plainly(*step[:2], 0.0, *step[2:]).float()
    want = before.clone().view(torch.uint8).view(S, -1).numpy()
    value = fmt.value_bytes
    for place, t in expected_places(index, [3, -1, 0, 1], R).items():
        page, offset = divmod(place, R)
        if fmt.plain:
            entry = rows[t].to(fmt.dtype).view(torch.uint8).numpy()
            scales = np.empty(0, np.uint8)
        else:
            whole = page_bytes("entry", name, fmt.rope, rows[t][None].numpy())
            entry, scales = whole[:value], whole[value:]
        want[page, offset * value : (offset + 1) * value] = entry
        begin = R * value + offset * fmt.scale_bytes
        want[page, begin : begin + len(scales)] = scales
    assert_same_bytes(torch.from_numpy(want), after.view(torch.uint8).view(S, -1))


@every_name
def test_the_kernel_stores_the_bytes_of_the_reference_for_exact_rows(name: str) -> None:
    fmt, R = entry_format(name, 512, 64), 16
    index = StepIndex.make([1, -1, 2, 0], [3, 0, 100, 15], [20, 3, 1, 5])
    step, before = exact_step(fmt, index), random_ring(fmt, 3, R)
    step[0][20:23] = torch.nan
    rows = torch.tensor([-1, 1, 0, 2])  # of a ring of its own: not the slots
    for given in (None, rows):
        want, got = (run(form, before, fmt, step, index, given) for form in ("ref", "triton"))
        assert_same_bytes(want.view(torch.uint8), got.view(torch.uint8))
        assert not torch.equal(want.view(torch.uint8), before.view(torch.uint8))


@every_name
def test_the_kernel_differs_from_the_reference_by_rare_neighbouring_codes(name: str) -> None:
    """Sums in another order move the last f32 bit of a norm: a value halfway between two codes may go to the other."""
    fmt = entry_format(name, 200, 12)
    index = StepIndex.make([0, 1], [0, 7], [9, 4])
    step = (torch.randn(13, 200), torch.rand(200) + 0.5, *angles(index, 12))
    zero = torch.zeros(2, 16, fmt.width, dtype=fmt.dtype)
    want, got = (load_entries_ref(run(f, zero, fmt, step, index), fmt, torch.arange(32)) for f in ("ref", "triton"))
    apart = (want - got).abs()
    assert (apart > 1e-6 * want.abs() + 1e-7).float().mean() < 0.01
    step_size = {"f32": 1e-6, "bf16": 2**-7}.get(name, 2**-3)  # one code, of a value's size
    assert (apart <= step_size * want.abs() + 1e-6).all()


@both_forms
def test_a_chunk_longer_than_the_ring_leaves_its_last_tokens(form: str) -> None:
    fmt, R = entry_format("f32", 8, 4), 5
    for count in (4, 5, 6, 10, 13):
        index = StepIndex.make([0, 1], [3, 0], [count, 2])
        step = exact_step(fmt, index)
        ring = run(form, random_ring(fmt, 2, R), fmt, step, index)
        rows = plainly(*step[:2], 0.0, *step[2:]).float()
        for u in range(3 + count - min(count, R), 3 + count):
            assert torch.equal(ring[0, u % R], rows[u - 3]), (count, u)


@both_forms
def test_tokens_before_the_last_of_a_ring_are_not_stored_at_all(form: str) -> None:
    """Positions that no request has: the first two tokens name a row that the last four leave alone."""
    fmt = entry_format("fp8", 32, 8)
    index = replace(StepIndex.make([0], [0], [6]), positions=torch.tensor([1, 1, 4, 2, 3, 0]))
    before = random_ring(fmt, 1, 4)
    got = load_entries_ref(run(form, before, fmt, exact_step(fmt, index), index), fmt, torch.tensor([1]))
    assert_same_bytes(load_entries_ref(before, fmt, torch.tensor([1])), got)


@both_forms
def test_tokens_in_one_step_or_in_many_leave_the_same_bytes(form: str) -> None:
    fmt, R = entry_format("fp8", 32, 8), 6
    whole = StepIndex.make([1, 0], [0, 4], [9, 9])
    step, ring = exact_step(fmt, whole), random_ring(fmt, 2, R)
    want = run(form, ring, fmt, step, whole)
    for begin in range(0, 9, 3):
        picked = torch.cat((torch.arange(begin, begin + 3), 9 + torch.arange(begin, begin + 3)))
        index = StepIndex.make([1, 0], [begin, 4 + begin], [3, 3])
        ring = run(form, ring, fmt, (step[0][picked], step[1], step[2][picked], step[3][picked]), index)
    assert_same_bytes(want, ring)
    assert_same_bytes(want, run(form, want, fmt, step, whole))  # storing again changes nothing


@both_forms
def test_requests_do_not_touch_each_other_and_hostile_pages_are_skipped(form: str) -> None:
    fmt, R = entry_format("fp8", 32, 8), 4
    before = random_ring(fmt, 4, R)
    index = StepIndex.make([1, 3], [6, 0], [2, 3])
    step = exact_step(fmt, index)
    after = run(form, before, fmt, step, index)
    for slot in (0, 2):
        assert_same_bytes(before[slot], after[slot])
    alone = StepIndex.make([1], [6], [2])
    assert_same_bytes(after[1], run(form, before, fmt, (step[0][:2], step[1], step[2][:2], step[3][:2]), alone)[1])
    for rows in ([-1, -1], [4, 2**31 - 1], [-(2**31), 2**40]):
        assert_same_bytes(before, run(form, before, fmt, step, index, torch.tensor(rows)))


@both_forms
@every_name
def test_padding_is_not_stored_whatever_it_holds(form: str, name: str) -> None:
    fmt = entry_format(name, 32, 8)
    before = random_ring(fmt, 3, 4)
    index = StepIndex.make([-1, -1, -1], [0, 2**40, 3], [1, 2, 1])
    x, weight, cos, sin = exact_step(fmt, index)
    for poison in (torch.nan, torch.inf):
        step = (torch.full_like(x, poison), weight, torch.full_like(cos, poison), torch.full_like(sin, poison))
        assert_same_bytes(before.view(torch.uint8), run(form, before, fmt, step, index).view(torch.uint8))


def test_rows_of_a_wider_projection_and_bf16_inputs() -> None:
    fmt = entry_format("bf16", 32, 8)
    index = StepIndex.make([0, 1], [0, 9], [4, 1])
    x, weight, cos, sin = exact_step(fmt, index)
    wide = torch.cat((torch.randn(5, 3), x, torch.randn(5, 2)), 1).to(torch.bfloat16)
    angle, before = torch.cat((cos, sin), 1), random_ring(fmt, 2, 8)
    want = run("ref", before, fmt, (x, weight, cos, sin), index)
    for call, device in ((append_window, "cpu"), (append_window_triton, DEVICE)):
        got, rows, turns = before.to(device, copy=True), wide.to(device)[:, 3:35], angle.to(device)
        call(got, fmt, rows, weight.to(device), 0.0, turns[:, :4], turns[:, 4:], on(index, device))
        assert_same_bytes(want, got)


def test_a_nan_row_stays_nan_and_an_infinity_does_not_spread_by_rotation() -> None:
    fmt = entry_format("fp8", 32, 8)
    index = StepIndex.make([0], [0], [2])
    x, weight, cos, sin = exact_step(fmt, index)
    x[0, 3] = torch.nan
    weight[2] = weight[5] = torch.inf  # one of a pair of either order
    for form in ("ref", "triton"):
        ring = run(form, torch.zeros(1, 4, fmt.width, dtype=torch.uint8), fmt, (x, weight, cos, sin), index)
        first, second = load_entries_ref(ring, fmt, torch.tensor([0, 1]))
        assert first.isnan().all()  # its norm is NaN
        assert second.isfinite().all() and second[2].abs() >= second[:24].abs().max()


def test_no_token_and_no_rotary_channel() -> None:
    fmt = entry_format("bf16", 6, 0)
    before = random_ring(fmt, 2, 3)
    none, one = StepIndex.make([0], [4], [0]), StepIndex.make([0], [4], [1])
    for form in ("ref", "triton"):
        assert_same_bytes(before, run(form, before, fmt, exact_step(fmt, none), none))
        step = exact_step(fmt, one)
        row = run(form, before, fmt, step, one)[0, 1]
        assert torch.equal(row, fake_quantise(fmt, step[0] * step[1]).to(torch.bfloat16)[0])


@every_name
@pytest.mark.parametrize(("R", "R_to", "count"), ((8, 20, 7), (16, 6, 5), (8, 8, 8), (5, 31, 0)))
def test_copied_rows_are_the_bytes_of_their_positions(name: str, R: int, R_to: int, count: int) -> None:
    fmt = entry_format(name, 32, 8)
    source, before = random_ring(fmt, 4, R), random_ring(fmt, 5, R_to)
    index = StepIndex.make([2, 0, -1, 3, 1], [3, 100, 50, 0, 9], [2, 1, 4, 3, 1])
    rows = torch.tensor([4, 0, 1, 2, -1])
    at = []  # (from, to), flat
    for slot, row, begin in zip(index.slots.tolist(), rows.tolist(), index.num_computed.tolist()):
        if slot >= 0 and row >= 0:
            at += [(slot * R + u % R, row * R_to + u % R_to) for u in range(max(0, begin - count), begin)]
    value, want = fmt.value_bytes, before.view(torch.uint8).clone().view(5, -1)
    for a, b in at:
        (page, i), (page_to, j) = divmod(a, R), divmod(b, R_to)
        from_bytes = source.view(torch.uint8).view(4, -1)[page]
        want[page_to, j * value : (j + 1) * value] = from_bytes[i * value : (i + 1) * value]
        scale, begin, begin_to = fmt.scale_bytes, R * value, R_to * value
        want[page_to, begin_to + j * scale : begin_to + (j + 1) * scale] = from_bytes[
            begin + i * scale : begin + (i + 1) * scale
        ]
    plain, moved = before.clone(), before.to(DEVICE, copy=True)
    copy_window_ref(source, plain, fmt, index, rows, count)
    copy_window_triton(source.to(DEVICE), moved, fmt, on(index, DEVICE), rows.to(DEVICE), count)
    for got in (plain, moved):
        assert_same_bytes(want, got.view(torch.uint8).view(5, -1))


def test_a_chunk_in_a_ring_of_its_own_sees_past_and_present() -> None:
    """copy_window, then append_window with rows: every position of the window and of the chunk is there."""
    fmt, R, count, window = entry_format("fp8", 32, 8), 4, 6, 4
    past, now = StepIndex.make([1], [0], [5]), StepIndex.make([1], [5], [count])
    ring = torch.zeros(2, R, fmt.width, dtype=torch.uint8)
    first, second = exact_step(fmt, past), exact_step(fmt, now)
    second = (second[0], first[1], *second[2:])
    append_window(ring, fmt, *first[:2], 0.0, *first[2:], past)
    longer, rows = torch.zeros(1, window - 1 + count, fmt.width, dtype=torch.uint8), torch.tensor([0])
    copy_window(ring, longer, fmt, now, rows, window - 1)
    append_window(longer, fmt, *second[:2], 0.0, *second[2:], now, rows)
    tokens = torch.cat((plainly(*first[:2], 0.0, *first[2:]), plainly(*second[:2], 0.0, *second[2:]))).float()
    seen = torch.arange(5 - window + 1, 5 + count)
    got = load_entries_ref(longer, fmt, seen % longer.shape[1])
    assert_same_bytes(fake_quantise(fmt, tokens)[seen], got)


def test_the_reference_is_the_public_form_on_the_cpu() -> None:
    fmt = entry_format("fp8", 32, 8)
    index = StepIndex.make([0], [1], [3])
    step = (torch.randn(3, 32), torch.rand(32), *angles(index, 8))
    rings = [torch.zeros(1, 4, fmt.width, dtype=torch.uint8) for _ in range(2)]
    for form, ring in zip((append_window, append_window_ref), rings):
        form(ring, fmt, step[0], step[1], EPS, *step[2:], index)
    assert rings[0].any()
    assert_same_bytes(*rings)
