"""PageFormat: how the vectors of a DeepSeek-V4 cache lie in a page.

A page holds P entries. Plain formats are P rows of numbers. In the others a page is bytes, values first, scales after:

    | value row 0 | value row 1 | ... | value row P-1 | scale row 0 | ... | scale row P-1 |

    window rows and compressed entries: D channels, the last R of them rotary             bytes at D = 512, R = 64
    fp8        D-R E4M3, R BF16 | E8M0 for each 64 channels, row padded to 8 bytes        576 + 8 = 584  (FlashMLA's)
    fp8_entry  D-R E4M3, R BF16 | one f32: largest magnitude / 448                        576 + 4 = 580
    index keys: D channels                                                                bytes at D = 128
    fp8        D E4M3 | one f32, a power of two                                           128 + 4 = 132
    mxfp4      Hadamard transform, then E2M1 | E8M0 for each 32 channels                   64 + 4 =  68
    nvfp4      E2M1 | E4M3 for each 16 channels                                            64 + 8 =  72
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridkv.errors import HybridKVError
from hybridkv.kernels.formats.codec import BF16, F32, FP8_ENTRY, Codec

if TYPE_CHECKING:
    import torch

ENTRY_CODECS = {
    "f32": F32,
    "bf16": BF16,
    "fp8": Codec(2, "uint8", 8, group=64, scale_bytes=1, scale_align=8),
    "fp8_entry": FP8_ENTRY,
}
INDEX_CODECS = {
    "f32": F32,
    "bf16": BF16,
    "fp8": Codec(4, "uint8", 8, scale_bytes=4),
    "mxfp4": Codec(5, "uint8", 4, group=32, scale_bytes=1, hadamard=True),
    "nvfp4": Codec(6, "uint8", 4, group=16, scale_bytes=1),
}
CODECS = {c.code: c for table in (ENTRY_CODECS, INDEX_CODECS) for c in table.values()}


@dataclass(frozen=True)
class PageFormat:
    """How vectors of `dim` channels lie in a page of P entries: a tensor [N, P, width] of `dtype`."""

    name: str
    dim: int
    rope: int  # the last channels, which fp8 and fp8_entry keep in BF16
    codec: Codec

    @property
    def code(self) -> int:
        return self.codec.code

    @property
    def dtype(self) -> torch.dtype:
        return self.codec.dtype

    @property
    def hadamard(self) -> bool:
        return self.codec.hadamard

    @property
    def plain(self) -> bool:
        return not self.codec.scale_bytes

    @property
    def group(self) -> int:
        """Channels for each scale."""
        return self.codec.group or self.dim - self.rope

    @property
    def groups(self) -> int:
        return 0 if self.plain else -(-(self.dim - self.rope) // self.group)

    @property
    def value_bytes(self) -> int:
        if self.plain:
            return self.dim * self.codec.bits // 8
        return (self.dim - self.rope) * self.codec.bits // 8 + 2 * self.rope

    @property
    def scale_bytes(self) -> int:
        align = self.codec.scale_align
        return -(-self.groups * self.codec.scale_bytes // align) * align

    @property
    def nbytes(self) -> int:
        return self.value_bytes + self.scale_bytes

    @property
    def width(self) -> int:
        return self.dim if self.plain else self.nbytes


def entry_format(name: str, dim: int, rope: int) -> PageFormat:
    """The format of window rows and compressed entries."""
    return _format("kv", ENTRY_CODECS, name, dim, rope)


def index_format(name: str, dim: int) -> PageFormat:
    """The format of index keys."""
    return _format("index", INDEX_CODECS, name, dim, 0)


def _format(what: str, table: dict[str, Codec], name: str, dim: int, rope: int) -> PageFormat:
    if name not in table:
        raise HybridKVError(f"no {what} format '{name}'; choose one of {', '.join(table)}")
    fmt = PageFormat(name, dim, rope, table[name])
    if dim < 1 or not 0 <= rope <= dim:
        raise HybridKVError(f"{what} format '{name}': {rope} rotary of {dim} channels is no vector")
    if not fmt.plain and (dim % 4 or rope % 4 or rope == dim):
        raise HybridKVError(
            f"{what} format '{name}' needs channels and rotary channels in fours, not all rotary; "
            f"there are {dim} and {rope}: take bf16"
        )
    if fmt.hadamard and dim & (dim - 1):
        raise HybridKVError(f"{what} format '{name}' transforms powers of two, not {dim} channels: take nvfp4 or fp8")
    return fmt
