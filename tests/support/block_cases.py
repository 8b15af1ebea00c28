"""Matrices in codes with a scale for each block, and their values decoded one by one by v4_files' tables."""

import torch
from torch import Tensor
from v4_files import FP4_VALUES, FP8_VALUES

from hybridkv.kernels.formats.small_floats import e2m1_code, pack_pairs
from hybridkv.kernels.linear.block_form import BlockForm
from hybridkv.kernels.linear.block_scaled import BlockScaled

FP8, BASE, FP4 = BlockForm(8, 128, 128, 1), BlockForm(8, 128, 128, 4), BlockForm(4, 1, 32, 1)
SMALL = BlockForm(8, 8, 32, 1)  # blocks that begin and end inside of a tile
FORMS = {"fp8": FP8, "base": BASE, "fp4": FP4, "small": SMALL}


def guarded(x: Tensor, byte: int) -> Tensor:
    """The same numbers in the middle of memory that is full of a byte: what is read past an end shows."""
    whole = torch.full((x.nbytes + 8192,), byte, dtype=torch.uint8)
    whole[4096 : 4096 + x.nbytes] = x.contiguous().flatten().view(torch.uint8)
    return whole[4096 : 4096 + x.nbytes].view(x.dtype).view(x.shape)


def values(codes: Tensor, scales: Tensor, form: BlockForm) -> Tensor:
    """[N, K] f32 of one matrix of plain codes 0..255 or 0..15."""
    numbers = (FP8_VALUES if form.bits == 8 else FP4_VALUES)[codes.long()]
    powers = scales if scales.dtype == torch.float32 else 2.0 ** (scales.float() - 127)
    n, k = torch.arange(codes.shape[0]) // form.rows, torch.arange(codes.shape[1]) // form.columns
    return numbers * powers[n][:, k]


def random_blocks(form: BlockForm, N: int, K: int) -> tuple[BlockScaled, Tensor]:
    """A matrix between bytes of NaN, and its values."""
    codes = torch.randint(0, 256 if form.bits == 8 else 16, (N, K), dtype=torch.uint8)
    if form.bits == 8:
        codes[codes & 127 == 127] = 0  # NaN
    shape = form.scale_shape(N, K)
    scales = torch.rand(shape) / 64 if form.scale_bytes == 4 else torch.randint(114, 124, shape, dtype=torch.uint8)
    held = codes if form.bits == 8 else pack_pairs(codes)
    return BlockScaled(guarded(held, 0x7F), guarded(scales, 0xFF), form), values(codes, scales, form)


def random_stack(form: BlockForm, E: int, N: int, K: int) -> tuple[BlockScaled, Tensor]:
    made = [random_blocks(form, N, K) for _ in range(E)]
    codes, scales = (torch.stack([getattr(m, part) for m, _ in made]) for part in ("codes", "scales"))
    return BlockScaled(guarded(codes, 0x7F), guarded(scales, 0xFF), form), torch.stack([v for _, v in made])


def encode(x: Tensor, form: BlockForm) -> BlockScaled:
    """True values rounded to a form, scales powers of two."""
    (N, K), limit = x.shape, 448.0 if form.bits == 8 else 6.0
    rows, columns = form.scale_shape(N, K)
    padded = torch.nn.functional.pad(x, (0, columns * form.columns - K, 0, rows * form.rows - N))
    blocks = padded.view(rows, form.rows, columns, form.columns)
    exponent = (blocks.abs().amax((1, 3)) / limit).log2().ceil()
    scaled = (blocks / (2.0**exponent)[:, None, :, None]).view(padded.shape)[:N, :K]
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8) if form.bits == 8 else pack_pairs(e2m1_code(scaled))
    return BlockScaled(codes, (exponent + 127).to(torch.uint8), form)
