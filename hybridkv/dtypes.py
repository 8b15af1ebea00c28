"""Dtypes by torch's names for them, and their sizes: what memory is counted with where torch is not imported.

Importing torch takes seconds. Who only counts bytes (`hybridkv plan`) uses names; who makes a tensor asks
`torch_dtype`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ITEMSIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


def dtype_name(dtype: str | torch.dtype) -> str:
    """A dtype, or its name, as a name: torch.float32 -> 'float32'."""
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise ValueError(f"{dtype!r} is not a dtype that can be counted; known are {', '.join(ITEMSIZE)}")
    return name


def itemsize(dtype: str | torch.dtype) -> int:
    """Bytes of one number."""
    return ITEMSIZE[dtype_name(dtype)]


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of this name."""
    import torch

    return getattr(torch, name)
