"""Products with codes that have a scale for each block: reference and kernel, on the values and on true ones."""

import weakref
from typing import Any

import pytest
import torch
from block_cases import BASE, FORMS, FP4, FP8, SMALL, encode, random_blocks
from long_form import few, more
from numerics import assert_close_rms, assert_same_bytes, rel_rms
from own_process import compile_alone
from triton_interpreter import DEVICE

from hybridkv.kernels.linear import block_linear, block_scaled
from hybridkv.kernels.linear.block_form import RELEASED_FP4, RELEASED_FP8, BlockForm
from hybridkv.kernels.linear.block_linear import BlockLinear, linear_blocks_ref
from hybridkv.kernels.linear.block_scaled import BlockScaled, dequantise_ref, empty_blocks, put_blocks
from hybridkv.kernels.linear.linear import Linear

F32, BF16 = torch.float32, torch.bfloat16
# against float64 on the values in x's dtype. f32: sums of a few hundred products. bf16: the result is rounded, by 2^-8
# of it at most, which a single one may reach.
BOUND = {F32: 2e-6, BF16: 4e-3}
ROUNDED = 4e-3  # scales in f32: values are rounded to bf16 where they are written out, and nowhere else
SHAPES = ((1, 1, 32), (3, 37, 40), (17, 70, 144), (5, 16, 2), (0, 8, 32), (2, 0, 32), (19, 34, 144))


def put(weight: BlockScaled) -> BlockScaled:
    return BlockScaled(weight.codes.to(DEVICE), weight.scales.to(DEVICE), weight.form)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_values_are_codes_times_scales(form: BlockForm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_scaled, "TILE", 1000)  # several tiles, which begin inside of blocks
    weight, values = random_blocks(form, 150, 200)
    assert weight.shape == (150, 200) and weight.nbytes == form.nbytes(150, 200) and weight.finite()
    assert_same_bytes(dequantise_ref(weight, F32), values)
    assert_same_bytes(dequantise_ref(weight, BF16), values.to(BF16))


def test_all_codes_and_the_ends_of_the_scales() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[127, 255]] = 0
    for byte in (0, 1, 127, block_scaled.LARGEST_SCALE[8]):
        scales = torch.full((8, 1), byte, dtype=torch.uint8)
        weight = BlockScaled(codes.view(8, 32), scales, BlockForm(8, 1, 32, 1))
        want = codes.view(torch.float8_e4m3fn).double() * 2.0 ** (byte - 127)
        assert weight.finite() and dequantise_ref(weight, F32).isfinite().all()
        if byte > 0:  # f32 has fewer digits below 2^-126
            assert torch.equal(dequantise_ref(weight, F32).double().flatten(), want)


def test_what_is_not_finite_is_seen() -> None:
    for form in FORMS.values():
        weight, _ = random_blocks(form, 20, 64)
        scales = weight.scales.clone()
        scales.view(-1)[-1] = torch.nan if form.scale_bytes == 4 else 255
        assert weight.finite() and not BlockScaled(weight.codes, scales, form).finite()
        largest = block_scaled.LARGEST_SCALE[form.bits]
        for byte in (largest, largest + 1):
            scales.view(-1)[-1] = 2.0 ** (byte - 127) if form.scale_bytes == 4 else byte
            assert BlockScaled(weight.codes, scales, form).finite() == (byte == largest)
        codes = weight.codes.clone()
        codes[3, 5] = 0xFF
        assert BlockScaled(codes, weight.scales, form).finite() == (form.bits == 4)


def test_the_reference_dequantises_a_tile_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_scaled, "TILE", 64 * 10)
    sizes, made = [], block_linear.dequantise_rows
    monkeypatch.setattr(block_linear, "dequantise_rows", lambda w, a, b, d: sizes.append(b - a) or made(w, a, b, d))
    weight, values = random_blocks(FP8, 45, 64)
    x = torch.randn(3, 64)
    assert_close_rms("in tiles", x.double() @ values.double().T, linear_blocks_ref(x, weight), BOUND[F32])
    assert sizes == [10, 10, 10, 10, 5]


pytest.importorskip("triton")


@pytest.fixture(params=("reference", "kernel"))
def op(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """The public function, made to take one of its two forms."""
    monkeypatch.setattr(block_linear, "use_triton", lambda x: request.param == "kernel")
    return block_linear.linear_blocks


@pytest.mark.long
@few("dtype, shape", tuple(BOUND), SHAPES)
@pytest.mark.parametrize("form", (FP8, BASE, FP4, SMALL), ids=("fp8", "base", "fp4", "small"))
def test_products_are_those_of_the_values(op, form: BlockForm, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Rows of x lie inside of a buffer of NaN, further apart than they are long."""
    T, N, K = shape
    weight, values = random_blocks(form, N, K)
    x = torch.full((T + 2, K + 3), torch.nan, dtype=dtype)
    x[1 : T + 1, 1 : K + 1] = torch.randn(T, K).to(dtype)
    x = x.to(DEVICE)[1 : T + 1, 1 : K + 1]
    want = x.cpu().double() @ values.to(dtype).double().T
    got = op(x, put(weight))
    assert got.dtype == dtype and got.shape == (T, N)
    assert_close_rms("product", want, got, BOUND[dtype])
    wide = op(x, put(weight), dtype=F32)
    assert wide.dtype == F32
    bound = ROUNDED if form.scale_bytes == 4 and dtype == BF16 else BOUND[F32]
    assert_close_rms("f32 results", want, wide, bound)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("T", (4, 40))
def test_groups_have_inputs_of_their_own(op, T: int, dtype: torch.dtype) -> None:
    G, N, K = 3, 20, 48  # blocks of 8 rows reach over the borders of groups
    weight, values = random_blocks(SMALL, G * N, K)
    x = torch.randn(T, G * K).to(dtype)
    want = torch.einsum("tgk,gnk->tgn", x.double().view(T, G, K), values.double().view(G, N, K)).flatten(1)
    assert_close_rms("groups", want, op(x.to(DEVICE), put(weight), G), BOUND[dtype])


@pytest.mark.parametrize("T", (1, 17, 32, 33, 70))
def test_few_rows_read_codes_and_many_have_them_written_out(T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part at a time, of which one is alive, and which begins where the library's products are fast."""
    alive, most, made = weakref.WeakSet(), [], block_linear.dequantise_triton

    def spy(weight: BlockScaled, begin: int, *what: Any) -> torch.Tensor:
        alive.add(part := made(weight, begin, *what))
        most.append(len(alive))
        assert begin % 16 == 0
        return part

    monkeypatch.setattr(block_linear, "dequantise_triton", spy)
    monkeypatch.setattr(block_linear, "WRITTEN", 64 * 21)  # of 21 rows 16
    weight, values = random_blocks(FP8, 130, 64)
    x = torch.randn(T, 64).to(BF16)
    got = block_linear.linear_blocks_triton(x.to(DEVICE), put(weight))
    assert_close_rms("product", x.double() @ values.to(BF16).double().T, got, BOUND[BF16])
    assert most == ([1] * 9 if T > 32 else [])


@pytest.mark.parametrize("form", (FP4, FP8), ids=("fp4", "fp8"))
def test_rows_of_x_may_begin_anywhere(form: BlockForm) -> None:
    """At an odd number, an odd way from each other, one row of a strided matrix: a kernel reads two as one word."""
    weight, values = random_blocks(form, 20, 64)
    memory = torch.randn(400).to(DEVICE, BF16)
    for T, first, step in ((1, 1, 64), (3, 1, 64), (1, 0, 65), (2, 2, 65), (2, 3, 67), (2, 0, 66)):
        x = memory.as_strided((T, 64), (step, 1), first)
        want = x.cpu().double() @ values.double().T
        assert_close_rms(f"{T, first, step}", want, block_linear.linear_blocks_triton(x, put(weight)), BOUND[BF16])


@pytest.mark.parametrize("byte", (0, 1, block_scaled.LARGEST_SCALE[8]))
def test_the_ends_of_the_scales_in_products(op, byte: int) -> None:
    weight, _ = random_blocks(FP4, 20, 64)
    scales = torch.full_like(weight.scales, byte)
    x = torch.ones(1, 64).mul_(2.0 ** (60 if byte < 2 else -60)).to(BF16)
    want = x.double() @ dequantise_ref(BlockScaled(weight.codes, scales, FP4), F32).double().T
    got = op(x.to(DEVICE), put(BlockScaled(weight.codes, scales, FP4)))
    assert want.abs().max() > 0
    assert_close_rms("product", want, got, BOUND[BF16])


@pytest.mark.parametrize(("form", "bound"), ((FP8, 0.04), (FP4, 0.15)), ids=("fp8", "fp4"))
def test_products_are_near_those_of_the_true_values(op, form: BlockForm, bound: float) -> None:
    """A rounded normal value is off by 2.7 % RMS in E4M3 and 10 to 12 % in E2M1 with scales that are powers of two."""
    true, x = torch.randn(128, 256), torch.randn(5, 256)
    got = op(x.to(DEVICE), put(encode(true, form)))
    error = rel_rms(x.double() @ true.double().T, got)
    assert bound / 10 < error < bound


@pytest.mark.parametrize("dtype", BOUND)
def test_a_token_of_nan_stays_alone(op, dtype: torch.dtype) -> None:
    weight, _ = random_blocks(FP8, 40, 64)
    x = torch.randn(20, 64).to(dtype)
    x[7] = torch.nan
    y = op(x.to(DEVICE), put(weight))
    assert y[7].isnan().all() and y[torch.arange(20) != 7].isfinite().all()


def test_a_wrong_scale_is_seen() -> None:
    """The comparison above has teeth: one block of one row of blocks off by a factor of 2."""
    weight, values = random_blocks(FP8, 130, 144)
    scales = weight.scales.clone()
    scales[1, 1] += 1
    x = torch.randn(17, 144)
    got = linear_blocks_ref(x, BlockScaled(weight.codes, scales, FP8))
    assert rel_rms(x.double() @ values.double().T, got) > 100 * BOUND[F32]


def test_parts_in_codes_and_plain_are_one_layer() -> None:
    (a, va), (b, vb) = random_blocks(FP8, 40, 64), random_blocks(FP8, 24, 64)
    plain = torch.randn(16, 64)
    layer = BlockLinear([a, Linear(plain.clone()), b], torch.arange(80.0))
    x = torch.randn(3, 64)
    want = x.double() @ torch.cat((va, plain, vb)).double().T + torch.arange(80.0)
    assert layer.shape == (80, 64) and layer.nbytes == a.nbytes + plain.nbytes + b.nbytes + 320
    assert_close_rms("layer", want, layer(x), BOUND[F32])
    gate, up = want.chunk(2, 1)
    assert_close_rms("gated", gate.sigmoid() * gate * up, layer.gated(x), 10 * BOUND[F32])
    h = torch.zeros(3, 80)
    assert layer.add_to(h, x) is not None and not h.any()


@pytest.mark.parametrize("parts", ((40, 24), (256, 64), (128, 130), (3, 5)))
def test_joined_matrices_keep_their_scales(parts: tuple[int, ...]) -> None:
    """Where blocks would reach over a border they get fewer rows."""
    form = FP8.joined(*parts)
    out = empty_blocks(form, (sum(parts), 144), torch.device("cpu"))
    wanted, row = [], 0
    for N in parts:
        weight, values = random_blocks(FP8, N, 144)
        put_blocks(out, row, weight)
        wanted.append(values)
        row += N
    assert_same_bytes(dequantise_ref(out, F32), torch.cat(wanted))
    assert out.nbytes == form.nbytes(sum(parts), 144)
    assert form.rows == (128 if parts[0] % 128 == 0 else {40: 8, 3: 1}[parts[0]])


def test_forms_that_products_do_not_read() -> None:
    assert RELEASED_FP8.kept and RELEASED_FP4.kept and RELEASED_FP8 == FP8 and RELEASED_FP4 == FP4
    assert not any(BlockForm(8, 128, columns, 1).kept for columns in (16, 100, 256))


COMPILE = """
from long_form import few, more
from no_device import SHARED_MEMORY, built, usage
import torch
from hybridkv.kernels.linear import block_linear
from hybridkv.kernels.linear.block_form import BlockForm, RELEASED_FP4, RELEASED_FP8
from hybridkv.kernels.linear.block_scaled import empty_blocks

block_linear.has_pdl = lambda device: True
others = more((BlockForm(8, 128, 128, 4), 4096, 8192, 1), (RELEASED_FP4, 4096, 8192, 1), (RELEASED_FP8, 8192, 4096, 8))
for form, rows, K, groups in ((RELEASED_FP8, 40960, 1024, 1), (RELEASED_FP8, 4096, 8192, 1), *others):
    for T in (1, 16, 32, 4096):
        x = torch.zeros(T, groups * K, dtype=torch.bfloat16)
        block_linear.linear_blocks_triton(x, empty_blocks(form, (rows, K), torch.device("cpu")), groups)
seen = {}
for name, kernel in built:
    if kernel.hash not in seen:
        seen[kernel.hash] = usage(kernel)
    assert kernel.metadata.shared <= SHARED_MEMORY
    print(name, *seen[kernel.hash], kernel.asm["ptx"].count("st.local"))
"""


@pytest.mark.long
def test_the_released_widths_compile_for_hopper_and_nothing_spills() -> None:
    """Queries and the last product; in the long form f32 scales, a matrix of FP4, and heads to groups."""
    built = [line.split() for line in compile_alone(COMPILE).splitlines()]
    assert {name for name, *_ in built} == {"few_rows_kernel", "dequantise_blocks_kernel"}
    assert sum(name == "few_rows_kernel" for name, *_ in built) == 3 * (2 + len(more(1, 2, 3)))
    assert all(int(registers) <= 255 and spilled == local == "0" for _, registers, spilled, local in built), built
