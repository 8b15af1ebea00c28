"""KVFormat: how the keys and values of full attention are stored. `KV_FORMATS` has one row for each `kv_dtype`.

An entry is one key or one value of `head_dim` numbers. A pool has a tensor of values for keys and one for values, and
a quantised format has a tensor of scales for each:

    name      shape of a pool    f32, bf16          fp8
    k, v      [N, P, D]          the numbers        E4M3, as uint8
    *_scale   [N, P]             -                  f32, one for each entry

Ops take keys or values as `Pages`: the tensor itself, or values and scales together. `format_of` gives the format of
either. docs/add_a_kv_format.md lists what a new row needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridkv.dtypes import torch_dtype
from hybridkv.errors import HybridKVError
from hybridkv.kernels.backend import HAS_TRITON, capability
from hybridkv.kernels.formats.codec import BF16, F32, FP8_ENTRY, SCALE_DTYPES, Codec
from hybridkv.kernels.formats.fp8 import Fp8Pages, ScaledPages, fp8_decode, fp8_encode_ref

Pages = Tensor | ScaledPages  # a pool of keys or of values


@dataclass(frozen=True)
class KVFormat:
    """One row of the table of formats."""

    name: str  # CacheConfig.kv_dtype
    dtype: torch.dtype  # torch's own dtype of these numbers; the stored tensor may have another
    codec: Codec
    dot_dtype: torch.dtype  # the narrowest dtype of a product that holds every stored value, without its scale
    encode: Callable[[Tensor], tuple[Tensor, ...]]  # [..., D] -> what is stored: values, then scales if there are any
    decode: Callable[..., Tensor]  # the inverse; quantised values come back as f32
    pages_type: type[ScaledPages] | None = None  # None: a pool of keys or values is a plain tensor
    capability: tuple[int, int] = (0, 0)  # the least compute capability of a GPU whose kernels know the format
    cards: str = ""  # what has it, for messages

    @property
    def quantised(self) -> bool:
        """Whether values have scales."""
        return self.codec.scale_bytes > 0

    def tensors(self, head_dim: int) -> tuple[tuple[str, tuple[int, ...], torch.dtype], ...]:
        """(name, shape, dtype) of the tensors that hold one entry: all values first, then all scales."""
        return tuple((name, shape, torch_dtype(dtype)) for name, shape, dtype in self.codec.entry_tensors(head_dim))

    def check_device(self, device: torch.device) -> None:
        """HybridKVError if the device's kernels do not know the format. Without a GPU torch computes every format."""
        if HAS_TRITON and (0, 0) < capability(device) < self.capability:
            needed, found = (".".join(map(str, pair)) for pair in (self.capability, capability(device)))
            raise HybridKVError(
                f"kv_dtype='{self.name}' needs a GPU with {self.name.upper()} (compute capability {needed} or higher: "
                f"{self.cards}), this one has {found}; use kv_dtype='bf16'"
            )


def _plain(name: str, codec: Codec) -> KVFormat:
    dtype = codec.dtype

    def encode(x: Tensor) -> tuple[Tensor, ...]:
        return (x if x.dtype == dtype else x.to(dtype),)

    return KVFormat(name, dtype, codec, dtype, encode, lambda values: values)


KV_FORMATS = {
    fmt.name: fmt
    for fmt in (
        _plain("f32", F32),
        _plain("bf16", BF16),
        KVFormat(
            name="fp8",
            dtype=torch.float8_e4m3fn,
            codec=FP8_ENTRY,
            dot_dtype=torch.bfloat16,
            encode=fp8_encode_ref,
            decode=fp8_decode,
            pages_type=Fp8Pages,
            capability=(8, 9),
            cards="RTX 40, H100 and later",
        ),
    )
}


def _scale_dtype(fmt: KVFormat) -> torch.dtype | None:
    return torch_dtype(SCALE_DTYPES[fmt.codec.scale_bytes]) if fmt.quantised else None


_BY_DTYPE = {fmt.dtype: fmt for fmt in KV_FORMATS.values()}
_BY_TYPE = {fmt.pages_type: fmt for fmt in KV_FORMATS.values() if fmt.pages_type is not None}
_BY_TENSORS = {  # dtypes of the stored values and of their scales
    (fmt.codec.dtype, _scale_dtype(fmt)): fmt for fmt in KV_FORMATS.values()
}

_SCALED_TYPES = {key: fmt.pages_type for key, fmt in _BY_TENSORS.items() if fmt.pages_type is not None}


def kv_format(dtype: torch.dtype) -> KVFormat:
    """The format of keys and values of this dtype."""
    if dtype not in _BY_DTYPE:
        known = ", ".join(str(each).removeprefix("torch.") for each in _BY_DTYPE)
        raise HybridKVError(f"keys and values cannot be stored as {str(dtype).removeprefix('torch.')}; take {known}")
    return _BY_DTYPE[dtype]


def format_of(pages: Pages) -> KVFormat:
    """The format of a pool of keys or values."""
    return kv_format(pages.dtype) if isinstance(pages, Tensor) else _BY_TYPE[type(pages)]


def pool_format(tensors: Mapping[str, Tensor]) -> KVFormat | None:
    """The format of a pool, by its tensors; None: they are not keys and values of full attention."""
    if "k" not in tensors:
        return None
    scale = tensors.get("k_scale")
    return _BY_TENSORS.get((tensors["k"].dtype, None if scale is None else scale.dtype))


def pages_of(tensors: Mapping[str, Tensor], name: str) -> Pages:
    """The pool of keys ("k") or values ("v") out of the tensors [N, P, ...] of a pool of full attention."""
    values = tensors[name]
    scale = tensors.get(f"{name}_scale")
    if scale is None:
        return values
    return _SCALED_TYPES[values.dtype, scale.dtype](values, scale)


def page_tensors(pages: Pages) -> tuple[Tensor, ...]:
    """All tensors of a pool of keys or values, in the order of `encode`."""
    return (pages,) if isinstance(pages, Tensor) else pages


def stored_tensors(pages: Pages) -> tuple[Tensor, Tensor | None]:
    """Values [N, P, ...] and scales [N, P, ...], or None where the format has none."""
    return (pages, None) if isinstance(pages, Tensor) else (pages.values, pages.scale)


def stored_values(pages: Pages) -> Tensor:
    """The tensor of values [N, P, ...]."""
    return pages if isinstance(pages, Tensor) else pages.values
