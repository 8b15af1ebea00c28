"""FP8 and FP4 weights with block scales: a store that pairs each with its scales and gives the values, or both as they
are. DeepSeek-V4's files, and those of Qwen3.5 in FP8.

    FP8   weight F8_E4M3 [rows, columns]          one scale for each block of 128 x 128, ragged at the edges
    FP4   weight I8, U8 or F4 [rows, columns / 2]  two E2M1 values in a byte, the even column in the low half;
                                                  one scale for 32 columns of a row

A weight `x.weight` has its scales in `x.scale` or `x.weight_scale_inv`: powers of two (F8_E8M0, or the same byte as
U8), or F32 in DeepSeek's base models, or BF16 in Qwen's, which is kept as F32. value = quantised value * scale, which
is exact in bfloat16 if the scale is a power of two.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from hybridkv.checkpoint.safetensors_file import SafetensorsFile
from hybridkv.checkpoint.safetensors_store import SafetensorsStore
from hybridkv.config import shown
from hybridkv.errors import ModelFileError, UnsupportedModel
from hybridkv.kernels.linear.block_form import FP4_BLOCK, BlockForm, Span
from hybridkv.kernels.linear.block_form import FP8_BLOCK as BLOCK
from hybridkv.kernels.linear.block_scaled import BlockScaled, dequantise_ref

FP4 = ("I8", "U8", "F4")
POWERS = ("F8_E8M0", "U8")  # scales that are a power of two
FLOATS = ("F32", "BF16")
INDICES = ("I32", "I64")
_SCALE = re.compile(r"(?P<of>.+)\.(scale|weight_scale_inv)")
_NO_SCALE = re.compile(r"(.+\.)?(attn_hc|ffn_hc)\.scale|(model\.)?mtp\..+")  # parameters; and draft layers


def block_size(quantised: object) -> tuple[int, int]:
    """Rows and columns of an FP8 block, from a config's quantization_config."""
    if not quantised:
        return BLOCK
    if not isinstance(quantised, dict) or quantised.get("quant_method") != "fp8":
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise UnsupportedModel(f"config: quantization_config has quant_method {shown(method)}; only fp8 is read")
    if quantised.get("fmt", "e4m3") != "e4m3":
        raise UnsupportedModel(f"config: quantization_config has fmt {shown(quantised['fmt'])}; only e4m3 is read")
    size = quantised.get("weight_block_size", list(BLOCK))
    good = isinstance(size, list | tuple) and len(size) == 2 and all(type(n) is int and 1 <= n <= 1 << 20 for n in size)
    if not good:
        raise ModelFileError(f"config: weight_block_size must be two whole numbers, not {shown(size)}")
    return size[0], size[1]


class QuantisedStore(SafetensorsStore):
    """A SafetensorsStore that hides the scales: a weight that has them is read as its values."""

    def __init__(self, files: list[SafetensorsFile], block: tuple[int, int]) -> None:
        super().__init__(files)
        self.block = block
        self.scales: dict[str, str] = {}  # weight -> its scales
        for name in self.home:
            match = _SCALE.fullmatch(name)
            if match is None or _NO_SCALE.fullmatch(name):
                continue
            weight = f"{match['of']}.weight"
            if weight not in self.home:
                raise ModelFileError(f"{self.where(name)}: {name[:200]!r} are the scales of a tensor that is missing")
            if weight in self.scales:
                raise ModelFileError(f"{self.where(name)}: {weight[:200]!r} has two tensors of scales")
            self.scales[weight] = name
        for weight in self.scales:
            self._check(weight)

    def names(self) -> list[str]:
        return sorted(self.home.keys() - set(self.scales.values()))

    def shape(self, name: str) -> tuple[int, ...]:
        """The dtype of the values."""
        shape = super().shape(name)
        packed = name in self.scales and self.stored(name).dtype in ("I8", "U8")
        return (*shape[:-1], 2 * shape[-1]) if packed else shape

    def dtype(self, name: str) -> torch.dtype:
        if name in self.scales:
            return torch.bfloat16 if self.stored(self.scales[name]).dtype in POWERS else torch.float32
        stored = self.stored(name).dtype
        if name.endswith(".tid2eid"):
            if stored not in INDICES:
                raise ModelFileError(f"{self.where(name)}: tensor {name[:200]!r} is {stored}; it must be I64 or I32")
            return torch.int64 if stored == "I64" else torch.int32
        if stored == "F8_E4M3" or stored in FP4:
            raise ModelFileError(f"{self.where(name)}: tensor {name[:200]!r} is {stored} and its scales are missing")
        return super().dtype(name)

    def nbytes(self, name: str) -> int:
        return super().nbytes(name) + (super().nbytes(self.scales[name]) if name in self.scales else 0)

    def block_form(self, name: str) -> BlockForm | None:
        if name not in self.scales:
            return None
        bits, block = (8, self.block) if self.stored(name).dtype == "F8_E4M3" else (4, FP4_BLOCK)
        return BlockForm(bits, *block, 1 if self.stored(self.scales[name]).dtype in POWERS else 4)

    def read_blocks(self, name: str, rows: Span | None = None) -> BlockScaled:
        """Codes and scales of a weight that has them, as they are stored."""
        form = self.block_form(name)
        assert form is not None
        blocks = None if rows is None else (rows[0] // form.rows, -(-rows[1] // form.rows))
        scale = self.read_rows(self.scales[name], blocks)
        scale = scale.view(torch.uint8) if scale.element_size() == 1 else scale.float()
        return BlockScaled(self.read_rows(name, rows).view(torch.uint8), scale, form)

    def read(self, name: str) -> Tensor:
        return dequantise_ref(self.read_blocks(name), self.dtype(name)) if name in self.scales else super().read(name)

    def _check(self, weight: str) -> None:
        """Formats and shapes of a weight and its scales go together."""
        stored, scale = self.stored(weight), self.stored(self.scales[weight])
        what = f"{self.where(weight)}: tensor {weight[:200]!r}"
        if stored.dtype != "F8_E4M3" and stored.dtype not in FP4:
            raise ModelFileError(f"{what} is {stored.dtype} and has scales; F8_E4M3 and packed FP4 (I8, U8, F4) do")
        if scale.dtype not in (*POWERS, *FLOATS):
            raise ModelFileError(f"{what} has scales in {scale.dtype}; they must be F8_E8M0, U8, F32 or BF16")
        shape = self.shape(weight)
        if len(shape) != 2 or 0 in shape:
            raise ModelFileError(f"{what} has shape {list(shape)}; with scales it must be a matrix")
        form = self.block_form(weight)
        assert form is not None
        wanted = form.scale_shape(shape[0], shape[1])
        if scale.shape != wanted:
            raise ModelFileError(f"{what} of {list(shape)} needs scales of {list(wanted)}, not {list(scale.shape)}")
