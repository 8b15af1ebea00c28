"""FP8 and FP4 weights with block scales: a store that pairs each with its scales and gives the values, or both as they
are. DeepSeek-V4's files, and those of Qwen3.5 and Qwen3-Next in FP8 or MXFP4.

    FP8   weight F8_E4M3 [rows, columns]          one scale for each block of 128 x 128, ragged at the edges
    FP4   weight I8, U8 or F4 [rows, columns / 2]  two E2M1 values in a byte, the even column in the low half;
                                                  one scale for 32 columns of a row

Under which names a weight and its scales are stored says the writer (quantisation.py). Scales are powers of two
(F8_E8M0, or the same byte as U8), or F32 in DeepSeek's base models, or BF16 in Qwen's FP8, which is kept as F32.
value = quantised value * scale, which is exact in bfloat16 if the scale is a power of two.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from hybridkv.checkpoint.quantisation import Stored
from hybridkv.checkpoint.safetensors_file import SafetensorsFile
from hybridkv.checkpoint.safetensors_store import SafetensorsStore
from hybridkv.errors import ModelFileError
from hybridkv.kernels.linear.block_form import FP4_BLOCK, BlockForm, Span
from hybridkv.kernels.linear.block_scaled import BlockScaled, dequantise_ref

FP4 = ("I8", "U8", "F4")
POWERS = ("F8_E8M0", "U8")  # scales that are a power of two
FLOATS = ("F32", "BF16")
INDICES = ("I32", "I64")
_NO_SCALE = re.compile(r"(.+\.)?(attn_hc|ffn_hc)\.scale|(model\.)?mtp\..+")  # parameters; and draft layers


class QuantisedStore(SafetensorsStore):
    """A SafetensorsStore that hides the scales: a weight that has them is read as its values."""

    def __init__(self, files: list[SafetensorsFile], form: Stored) -> None:
        super().__init__(files)
        self.form = form
        self.scales: dict[str, str] = {}  # weight -> its scales
        for name in self.home:
            of, _, last = name.rpartition(".")
            if not of or last not in form.scales or _NO_SCALE.fullmatch(name):
                continue
            weight = f"{of}.{form.codes}"
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
        eight = self.form.block if self.stored(name).dtype == "F8_E4M3" else None
        bits, block = (4, FP4_BLOCK) if eight is None else (8, eight)
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
        mxfp4 = self.form.block is None
        if stored.dtype not in FP4 and (mxfp4 or stored.dtype != "F8_E4M3"):
            read = "packed FP4 (I8, U8, F4) does" if mxfp4 else "F8_E4M3 and packed FP4 (I8, U8, F4) do"
            raise ModelFileError(f"{what} is {stored.dtype} and has scales; {read}")
        if scale.dtype not in (POWERS if mxfp4 else (*POWERS, *FLOATS)):
            read = "F8_E8M0 or U8" if mxfp4 else "F8_E8M0, U8, F32 or BF16"
            raise ModelFileError(f"{what} has scales in {scale.dtype}; they must be {read}")
        shape = self.shape(weight)
        if len(shape) != 2 or 0 in shape:
            raise ModelFileError(f"{what} has shape {list(shape)}; with scales it must be a matrix")
        form = self.block_form(weight)
        assert form is not None
        wanted = form.scale_shape(shape[0], shape[1])
        if scale.shape != wanted:
            raise ModelFileError(f"{what} of {list(shape)} needs scales of {list(wanted)}, not {list(scale.shape)}")
