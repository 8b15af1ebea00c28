"""Codec: how one vector of numbers is stored. Two kinds of pages are built from codecs.

PageFormat (page_layout.py)   DeepSeek-V4: values and scales of a page in one tensor of bytes
KVFormat   (kv_format.py)     full attention: values and scales in tensors of their own
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridkv.dtypes import ITEMSIZE, torch_dtype

if TYPE_CHECKING:
    import torch

KEY_AND_VALUE = ("k", "v")
SCALE_DTYPES = {4: "float32", 1: "uint8"}  # by the bytes of a scale


@dataclass(frozen=True)
class Codec:
    """One row of the table of formats."""

    code: int  # the kernels' FORMAT
    stored: str  # dtype of the stored tensor, by its name
    bits: int  # of one value (DeepSeek-V4 keeps rotary channels in BF16 beside quantised ones)
    group: int = 0  # values that share a scale; 0: the whole vector
    scale_bytes: int = 0  # of one scale; 0: no scales
    scale_align: int = 1  # the scales of a vector are padded to a multiple of this many bytes
    hadamard: bool = False  # values are transformed before they are quantised

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored tensor."""
        return torch_dtype(self.stored)

    def entry_tensors(self, head_dim: int) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """(name, shape, dtype's name) of the tensors that hold a key and a value: all values first, then all scales."""
        width = head_dim * self.bits // (8 * ITEMSIZE[self.stored])
        found: list[tuple[str, tuple[int, ...], str]] = [(name, (width,), self.stored) for name in KEY_AND_VALUE]
        if self.scale_bytes:
            shape = (-(-head_dim // self.group),) if self.group else ()
            found += [(f"{name}_scale", shape, SCALE_DTYPES[self.scale_bytes]) for name in KEY_AND_VALUE]
        return tuple(found)


F32 = Codec(0, "float32", 32)
BF16 = Codec(1, "bfloat16", 16)
FP8_ENTRY = Codec(3, "uint8", 8, scale_bytes=4)  # E4M3, one f32 scale for the whole vector
KV_CODECS = {"f32": F32, "bf16": BF16, "fp8": FP8_ENTRY}  # keys and values of full attention, by kv_dtype
