"""Codec: how one vector of numbers is stored. Two kinds of pages are built from codecs.

PageFormat (page_layout.py)   DeepSeek-V4: values and scales of a page in one tensor of bytes
KVFormat   (kv_format.py)     full attention: values and scales in tensors of their own
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Codec:
    """One row of the table of formats."""

    code: int  # the kernels' FORMAT
    dtype: torch.dtype  # of the stored tensor
    bits: int  # of one value (DeepSeek-V4 keeps rotary channels in BF16 beside quantised ones)
    group: int = 0  # values that share a scale; 0: the whole vector
    scale_bytes: int = 0  # of one scale; 0: no scales
    scale_align: int = 1  # the scales of a vector are padded to a multiple of this many bytes
    hadamard: bool = False  # values are transformed before they are quantised


F32 = Codec(0, torch.float32, 32)
BF16 = Codec(1, torch.bfloat16, 16)
FP8_ENTRY = Codec(3, torch.uint8, 8, scale_bytes=4)  # E4M3, one f32 scale for the whole vector
