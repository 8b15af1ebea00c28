"""Page formats: the bytes of an independent encoder, the bounds of each format, kernels that do the same."""

import math

import numpy as np
import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor
from triton_interpreter import DEVICE
from v4_encoder import E2M1, E4M3, page_bytes

from hybridkv.errors import HybridKVError
from hybridkv.kernels.backend import tl, triton
from hybridkv.kernels.formats.page_format import (
    fake_quantise,
    hadamard,
    hadamard_tile,
    load_entries_ref,
    load_tile,
    mxfp4_round_tile,
    store_entries_ref,
    store_rows,
)
from hybridkv.kernels.formats.page_layout import ENTRY_CODECS, INDEX_CODECS, PageFormat, entry_format, index_format

pytest.importorskip("triton")

ENTRIES = [entry_format(n, D, R) for n in ENTRY_CODECS for D, R in ((32, 8), (200, 12), (512, 64))]
KEYS = [index_format(n, D) for n in INDEX_CODECS for D in (16, 128)] + [index_format(n, 40) for n in ("fp8", "nvfp4")]
FORMATS = ENTRIES + KEYS
BYTES = [f for f in FORMATS if not f.plain]
BOUNDLESS = [-1, -(2**31), 2**31 - 1, -(2**63), 2**63 - 1]


def label(fmt: PageFormat) -> str:
    return f"{'key' if fmt in KEYS else 'entry'}-{fmt.name}-{fmt.dim}"


every_format = pytest.mark.parametrize("fmt", FORMATS, ids=label)
every_byte_format = pytest.mark.parametrize("fmt", BYTES, ids=label)


@triton.jit
def store_kernel(
    pages, flat, x, M, entries, P: tl.constexpr,
    D: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    o_m, o_d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BD)
    o_e = tl.load(flat + o_m, mask=o_m < M, other=-1)
    b_x = tl.load(x + o_m[:, None] * D + o_d, mask=(o_m < M)[:, None] & (o_d < D), other=0.0)
    m_e = (o_e >= 0) & (o_e < entries)
    store_rows(pages, o_e // P, o_e % P, m_e, o_d, b_x, P, D, ROPE, FORMAT)


@triton.jit
def load_kernel(
    pages, flat, out, M, entries, P,
    D: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    o_m, o_d = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BD + tl.arange(0, BD)
    o_e = tl.load(flat + o_m, mask=o_m < M, other=-1)
    b_x = load_tile(pages, o_e, (o_e >= 0) & (o_e < entries), o_d, P, D, ROPE, FORMAT)
    tl.store(out + o_m[:, None] * D + o_d, b_x, mask=(o_m < M)[:, None] & (o_d < D))


def store_triton(pages: Tensor, fmt: PageFormat, flat: Tensor, x: Tensor) -> None:
    (N, P, _), M = pages.shape, len(flat)
    shape = dict(D=fmt.dim, ROPE=fmt.rope, FORMAT=fmt.code, BM=4, BD=triton.next_power_of_2(fmt.dim))
    store_kernel[(triton.cdiv(M, 4),)](pages, flat, x, M, N * P, P, **shape)


def load_triton(pages: Tensor, fmt: PageFormat, flat: Tensor, columns: int = 0) -> Tensor:
    (N, P, _), M = pages.shape, len(flat)
    columns = columns or triton.next_power_of_2(fmt.dim)
    out = torch.full((M, fmt.dim), 7.0, device=pages.device)
    shape = dict(D=fmt.dim, ROPE=fmt.rope, FORMAT=fmt.code, BM=4, BD=columns)
    load_kernel[(triton.cdiv(M, 4), triton.cdiv(fmt.dim, columns))](pages, flat, out, M, N * P, P, **shape)
    return out


def random_pages(fmt: PageFormat, N: int, P: int) -> Tensor:
    """Bits that arithmetic would not keep."""
    return torch.randint(0, 256, (N, P, fmt.nbytes), dtype=torch.uint8).view(fmt.dtype)


def on_a_grid(M: int, D: int) -> Tensor:
    """Rows of 12 bits, more than BF16 has, whose sums of D are exact in f32."""
    return torch.randint(-2048, 2049, (M, D)) * 2.0 ** torch.randint(-12, 3, (M, 1))


def awkward(fmt: PageFormat) -> Tensor:
    """Every kind of row: zeros, denormals, huge, NaN and infinities, powers of two at the borders of scales."""
    D, x = fmt.dim, on_a_grid(22, fmt.dim)
    x[1], x[2], x[3], x[4] = 0, 1e-40, -0.0, 1e30
    x[5, 0], x[5, -1] = torch.nan, -torch.nan
    x[6, 0], x[6, 1] = torch.inf, 3.0
    x[7, 1], x[7, -1] = -torch.inf, torch.inf
    x[8] = torch.nan
    for row, top in enumerate((448.0, 448.0 * 2**-9, 6.0, 6 * 2**-9, 1e-4, 2**-7), 9):
        x[row], x[row, 1::2] = top, -top
        x[row + 6] = x[row] * (1 + 2**-7)  # the next BF16 number: one scale up
    x[21] = 2.0 ** (torch.arange(D) % 16 - 8)
    in_bf16 = 0 if fmt.name == "bf16" else D - fmt.rope
    x[:, in_bf16:].nan_to_num_(1.0, torch.inf, -torch.inf)  # which NaN a cast to BF16 gives differs between machines
    return x


def same_numbers(a: Tensor, b: Tensor) -> None:
    """Bit for bit, but every NaN is the same."""
    assert torch.equal(a.isnan(), b.isnan())
    assert_same_bytes(a.nan_to_num(0.5, torch.inf, -torch.inf), b.nan_to_num(0.5, torch.inf, -torch.inf))


@pytest.mark.parametrize(
    ("fmt", "value", "scale"),
    (
        (entry_format("f32", 512, 64), 2048, 0),
        (entry_format("bf16", 512, 64), 1024, 0),
        (entry_format("fp8", 512, 64), 576, 8),
        (entry_format("fp8_entry", 512, 64), 576, 4),
        (index_format("fp8", 128), 128, 4),
        (index_format("mxfp4", 128), 64, 4),
        (index_format("nvfp4", 128), 64, 8),
        (index_format("bf16", 128), 256, 0),
    ),
    ids=lambda v: label(v) if isinstance(v, PageFormat) else None,
)
def test_bytes_of_the_released_widths(fmt: PageFormat, value: int, scale: int) -> None:
    assert (fmt.value_bytes, fmt.scale_bytes, fmt.nbytes) == (value, scale, value + scale)
    assert fmt.width * fmt.dtype.itemsize == fmt.nbytes


def test_what_cannot_be_is_refused_in_words() -> None:
    with pytest.raises(HybridKVError, match="'int4'; choose one of f32, bf16, fp8, fp8_entry"):
        entry_format("int4", 512, 64)
    with pytest.raises(HybridKVError, match="'fp8_entry'; choose one of f32, bf16, fp8, mxfp4, nvfp4"):
        index_format("fp8_entry", 128)
    for dim, rope in ((0, 0), (8, 12), (8, -4)):
        with pytest.raises(HybridKVError, match="is no vector"):
            entry_format("bf16", dim, rope)
    for dim, rope in ((30, 8), (32, 6), (8, 8)):
        with pytest.raises(HybridKVError, match="in fours"):
            entry_format("fp8", dim, rope)
    with pytest.raises(HybridKVError, match="powers of two"):
        index_format("mxfp4", 96)


@every_byte_format
def test_pages_hold_the_bytes_of_the_independent_encoder(fmt: PageFormat) -> None:
    x = awkward(fmt)
    if fmt.hadamard:  # infinities have a test of their own, and -0 + 0 depends on the order of sums
        x = x[[i for i in range(22) if i not in (3, 6, 7)]]
    P = len(x)
    pages = torch.zeros(2, P, fmt.width, dtype=torch.uint8)
    store_entries_ref(pages, fmt, P + torch.arange(P), x)
    want = page_bytes("index" if fmt in KEYS else "entry", fmt.name, fmt.rope, x.numpy())
    assert_same_bytes(torch.from_numpy(want), pages[1].flatten())
    assert not pages[0].any()


@every_format
def test_kernels_store_the_reference_bytes_and_nothing_else(fmt: PageFormat) -> None:
    N, P, x = 4, 7, torch.cat((awkward(fmt), torch.randn(6, fmt.dim)))
    flat = torch.cat((torch.randperm(N * P)[:22], torch.tensor([*BOUNDLESS, N * P])))
    before = random_pages(fmt, N, P)
    want, got = before.clone(), before.to(DEVICE, copy=True)
    store_entries_ref(want, fmt, flat, x)
    store_triton(got, fmt, flat.to(DEVICE), x.to(DEVICE))
    assert_same_bytes(want.view(torch.uint8), got.view(torch.uint8))
    for number in set(range(N * P)) - set(flat.tolist()):
        (page, row), value, scale = divmod(number, P), fmt.value_bytes, fmt.scale_bytes
        old, new = (p.view(torch.uint8).view(N, -1)[page] for p in (before, want))
        for part in (
            slice(row * value, (row + 1) * value),
            slice(P * value + row * scale, P * value + (row + 1) * scale),
        ):
            assert_same_bytes(old[part], new[part])


@every_format
def test_kernels_load_what_the_reference_loads_and_zeros_for_what_is_no_entry(fmt: PageFormat) -> None:
    N, P = 3, 7
    pages = random_pages(fmt, N, P)  # every code and every scale, NaN among them
    flat = torch.cat((torch.randperm(N * P), torch.tensor([*BOUNDLESS, N * P])))
    want = load_entries_ref(pages, fmt, flat)
    assert (want[-6:] == 0).all() and (want[:-6] != 0).any()
    same_numbers(want, load_triton(pages.to(DEVICE), fmt, flat.to(DEVICE)).cpu())
    same_numbers(want, load_triton(pages.to(DEVICE), fmt, flat.to(DEVICE), columns=16 if fmt.dim < 512 else 64).cpu())


@every_format
def test_a_load_gives_what_was_stored_as_fake_quantise_says(fmt: PageFormat) -> None:
    x = torch.randn(10, fmt.dim) * torch.logspace(-3, 3, 10)[:, None]
    pages = random_pages(fmt, 4, 3)
    flat = torch.randperm(12)[:10]
    store_entries_ref(pages, fmt, flat, x)
    want = fake_quantise(fmt, x)
    assert_same_bytes(want, load_entries_ref(pages, fmt, flat))
    assert_same_bytes(want.view(2, 5, -1), fake_quantise(fmt, x.view(2, 5, -1)))
    if fmt.name not in ("mxfp4", "nvfp4", "fp8_entry"):  # values that a format holds are held
        assert_same_bytes(want, fake_quantise(fmt, want))


@pytest.mark.parametrize("fmt", [f for f in ENTRIES if f.name.startswith("fp8")], ids=label)
def test_rotary_channels_are_their_bf16_bits(fmt: PageFormat) -> None:
    x = torch.randint(-(2**31), 2**31, (50, fmt.dim)).to(torch.int32).view(torch.float32)
    x[0, -4:] = torch.tensor([torch.nan, torch.inf, -0.0, 1e-42])
    kept = fmt.dim - fmt.rope
    same_numbers(x[:, kept:].to(torch.bfloat16).float(), fake_quantise(fmt, x)[:, kept:])


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.codec.bits == 8], ids=label)
def test_e4m3_errors_stay_in_the_bounds_of_the_format(fmt: PageFormat) -> None:
    kept = fmt.dim - fmt.rope
    x = torch.randn(400, fmt.dim) * torch.logspace(-1.5, 6, 400)[:, None]  # no group under 1e-4
    x = x.to(torch.bfloat16).float()  # the other rounding that some of these do
    error = (fake_quantise(fmt, x) - x)[:, :kept].double().abs()
    pad = -kept % fmt.group
    error, size = (torch.nn.functional.pad(v, (0, pad)).unflatten(-1, (-1, fmt.group)) for v in (error, x[:, :kept]))
    largest = size.double().abs().amax(-1)
    # half the step at the top, 16: of 448, where a f32 scale puts the largest, give or take its rounding; of 272 under
    # a power of two, the least value that can be off so far. Both are under 1/16.
    worst = 16 / 448 * (1 + 1e-6) if fmt.name == "fp8_entry" else 16 / 272
    assert (error <= largest[..., None] * worst).all()
    relative = (fake_quantise(fmt, x) - x)[:, :kept].norm(dim=-1) / x[:, :kept].norm(dim=-1)
    if fmt.dim >= 128:
        assert relative.max() < 0.04 and relative.mean() < 0.03  # E4M3 of Gaussian rows: 2.5 to 2.7%


@pytest.mark.parametrize("fmt", [f for f in KEYS if f.codec.bits == 4], ids=label)
def test_e2m1_errors_stay_in_the_bounds_of_the_format(fmt: PageFormat) -> None:
    x = torch.randn(400, fmt.dim) * torch.logspace(-1, 2, 400)[:, None]
    exact = hadamard(x) if fmt.hadamard else x
    error = (fake_quantise(fmt, x) - exact).abs()
    pad = -fmt.dim % fmt.group
    error, size = (torch.nn.functional.pad(v, (0, pad)).unflatten(-1, (-1, fmt.group)) for v in (error, exact))
    # half a step of 2 under a scale of at most a / 3 (the next power of two) or a / 6 x 17 / 16 (rounded to E4M3)
    worst = 1 / 3 if fmt.hadamard else 17 / 96
    assert (error <= size.abs().amax(-1, keepdim=True) * worst * (1 + 1e-6)).all()
    assert (fake_quantise(fmt, x) - exact).norm() / exact.norm() < 0.14  # Gaussian rows: 9 to 12%


@pytest.mark.parametrize("name", ("mxfp4", "nvfp4"))
def test_all_codes_of_e2m1(name: str) -> None:
    fmt = index_format(name, 32)
    codes = torch.arange(16).repeat(2).to(torch.uint8)
    pages = torch.zeros(1, 1, fmt.width, dtype=torch.uint8)
    pages[0, 0, :16] = torch.arange(0, 16, 2).repeat(2) + 16 * torch.arange(1, 17, 2).repeat(
        2
    )  # low half: even channel
    pages[0, 0, 16:] = 128 if name == "mxfp4" else 0x40  # both: 2
    signed = torch.from_numpy(np.concatenate((E2M1, -E2M1))).float()
    want = 2 * signed[codes.long()]
    assert_same_bytes(want, load_entries_ref(pages, fmt, torch.tensor(0)))
    assert_same_bytes(want[None], load_triton(pages.to(DEVICE), fmt, torch.tensor([0]).to(DEVICE)).cpu())
    if name == "nvfp4":  # each of them is held: 12 / 6 is the scale
        assert_same_bytes(want, fake_quantise(fmt, want))


def test_halves_of_e2m1_go_to_the_even_code() -> None:
    fmt = index_format("nvfp4", 16)
    x = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -6.0])
    want = torch.tensor([6, 0, 1, 1, 2, 2, 4, 4, -0.0, -1, -1, -2, -2, -4, -4, -6.0])
    assert_same_bytes(want, fake_quantise(fmt, x))


@pytest.mark.parametrize("k", (-20, -3, 0, 7, 60))
def test_scales_step_exactly_at_their_borders(k: int) -> None:
    """448 x 2^k is the last magnitude under scale 2^k; the next number of BF16 takes the next scale."""
    fmt = entry_format("fp8", 68, 4)
    for top, want in ((448.0, k), (448.0 * (1 - 2**-8), k), (448.0 * (1 + 2**-7), k + 1), (224.0, k - 1)):
        pages = torch.zeros(1, 1, fmt.width, dtype=torch.uint8)
        store_entries_ref(pages, fmt, torch.tensor([0]), torch.full((1, 68), math.ldexp(top, k)))
        assert pages[0, 0, fmt.value_bytes].item() == want + 127
    x = torch.full((1, 68), math.ldexp(448.0, k))
    assert_same_bytes(x, fake_quantise(fmt, x))


@every_byte_format
def test_nan_is_never_a_number_and_infinity_saturates(fmt: PageFormat) -> None:
    kept = fmt.dim - fmt.rope
    x = torch.ones(3, fmt.dim)
    x[0, 2] = torch.nan
    x[1, 2], x[1, 3] = torch.inf, -torch.inf
    x[2] = 1e30
    y = fake_quantise(fmt, x)
    hit = fake_quantise(fmt, x)[0].isnan()
    if fmt.codec.bits == 8:
        assert hit[2] and hit.sum() == 1
    else:  # the group; the transform has brought it to every group
        assert hit[: fmt.group].all() and hit.sum() == (fmt.dim if fmt.hadamard else fmt.group)
    assert y[1].isfinite().all()
    if fmt.hadamard:
        assert y[1].abs().max() > 2.0**100
    else:
        assert y[1, 2] == -y[1, 3] and y[1, 2] >= y[1, 4:kept].max() > 0.9
    if fmt.name == "nvfp4":
        assert (y[2] == 6 * 448).all()  # as far as its scales go
    else:
        assert_close_rms("1e30", hadamard(x[2]) if fmt.hadamard else x[2], y[2], 0.25)


def test_every_e4m3_code_loads_as_its_value() -> None:
    fmt = index_format("fp8", 256)
    pages = torch.arange(260).to(torch.uint8).view(1, 1, 260)
    pages[0, 0, 256:] = torch.tensor([0.5]).view(torch.uint8)
    values = np.concatenate((E4M3, [np.nan], -E4M3, [np.nan])) / 2
    same_numbers(torch.from_numpy(values).float(), load_entries_ref(pages, fmt, torch.tensor(0)))


@triton.jit
def transform_kernel(x, plain, rounded, BM: tl.constexpr, D: tl.constexpr):
    o_x = tl.arange(0, BM)[:, None] * D + tl.arange(0, D)
    b_x = tl.load(x + o_x)
    tl.store(plain + o_x, hadamard_tile(b_x))
    tl.store(rounded + o_x, mxfp4_round_tile(b_x))


@pytest.mark.parametrize("D", (16, 128))
def test_the_transform_is_the_matrix_of_signs_and_the_kernel_has_its_bits(D: int) -> None:
    x = torch.randn(16, D)
    signs = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(D)] for i in range(D)], dtype=torch.float64)
    assert_close_rms("transform", x.double() @ signs * D**-0.5, hadamard(x), 1e-6)  # f32 sums of D
    assert_close_rms("its inverse", x, hadamard(hadamard(x)), 1e-6)
    plain, rounded = torch.empty(16, D, device=DEVICE), torch.empty(16, D, device=DEVICE)
    transform_kernel[(1,)](x.to(DEVICE), plain, rounded, BM=16, D=D)
    assert_same_bytes(hadamard(x), plain)
    assert_same_bytes(fake_quantise(index_format("mxfp4", D), x), rounded)


def test_the_transform_keeps_products_that_plain_e2m1_loses() -> None:
    """One channel six times the others: what the transform is for."""
    fmt = index_format("mxfp4", 128)
    q, k = torch.randn(200, 128), torch.randn(200, 128)
    q[:, 5] *= 6
    k[:, 5] *= 6
    got = (fake_quantise(fmt, q) * fake_quantise(fmt, k)).sum(-1)
    want = (q * k).sum(-1)
    plain = (fake_quantise(fmt, hadamard(q)) * fake_quantise(fmt, hadamard(k))).sum(-1)  # transformed back: not at all
    error, without = (got - want).norm() / want.norm(), (plain - want).norm() / want.norm()
    assert error < 0.6 * without, (error, without)


@pytest.mark.parametrize(
    "fmt", (entry_format("fp8", 32, 8), index_format("mxfp4", 32), index_format("bf16", 6)), ids=label
)
def test_nothing_to_store_or_load(fmt: PageFormat) -> None:
    pages = random_pages(fmt, 2, 3)
    before, none = pages.clone(), torch.empty(0, dtype=torch.int64)
    store_entries_ref(pages, fmt, none, torch.empty(0, fmt.dim))
    assert_same_bytes(before, pages)
    assert load_entries_ref(pages, fmt, none.view(3, 0)).shape == (3, 0, fmt.dim)
    assert fake_quantise(fmt, torch.empty(0, fmt.dim)).shape == (0, fmt.dim)
    lone = torch.tensor(4)  # no dimension at all
    assert_same_bytes(load_entries_ref(pages, fmt, lone), load_entries_ref(pages, fmt, lone[None])[0])
