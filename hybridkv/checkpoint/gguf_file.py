"""GGUF v2/v3: the header (metadata and tensor table) and the tensors of one file, as stored.

    "GGUF" u32 version  u64 tensors  u64 keys
    keys x    { string key, u32 type, value }      string = u64 length, UTF-8 bytes; array = u32 type, u64 count, items
    tensors x { string name, u32 n_dims, u64 dims[n_dims] (innermost first), u32 ggml type, u64 offset into the data }
    padding up to general.alignment (32), then the data

Every count and size is a Python int and is held against what is left of the file before anything is allocated. What
keys and names mean is left to `gguf_map.py`. The dequantisers are the `gguf` package's; its reader is slow.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from hybridkv.errors import ModelFileError, UnsupportedModel
from hybridkv.files import OpenFile

if TYPE_CHECKING:
    import torch

HEADER_LIMIT = 128 << 20  # bytes; a vocabulary of 250 000 tokens with its merges needs about 10 MiB
MAX_KEY = 65535  # bytes, by the GGUF specification
MAX_NAME = 63  # bytes, as in llama.cpp
MAX_ENTRIES = 100_000  # keys, and tensors; the largest models have a few thousand
MAX_LIST = 4096  # numbers of one array that are made Python objects, of up to 40 bytes each: one for each layer
MAX_LISTED = 1 << 20  # numbers of all such arrays
MAX_DIMS = 4
MAX_DIM = 2**31 - 1

_STRING, _ARRAY, _BOOL, _UINT32 = 8, 9, 7, 4
_SCALARS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "u1", 10: "u8", 11: "i8", 12: "f8"}
_CODES = {"u1": "B", "i1": "b", "u2": "H", "i2": "h", "u4": "I", "i4": "i", "u8": "Q", "i8": "q", "f4": "f", "f8": "d"}
_TYPES = {number: np.dtype("<" + code) for number, code in _SCALARS.items()}
_u32 = struct.Struct("<I").unpack_from
_u64 = struct.Struct("<Q").unpack_from

Type = GGMLQuantizationType
KEPT = {Type.F32: "float32", Type.F16: "float16", Type.BF16: "bfloat16"}  # read as they are, in torch's dtypes
DEQUANTISED = frozenset(
    {Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K}
    | {Type.TQ1_0, Type.TQ2_0, Type.MXFP4, Type.NVFP4, Type.IQ4_NL, Type.IQ4_XS, Type.IQ1_S, Type.IQ1_M}
    | {Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S}
)
_CHUNK = 1 << 17  # weights dequantised at a time: the temporaries stay in the processor's cache


@dataclass(frozen=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]  # row-major, as numpy and torch have it: the stored order reversed
    type: GGMLQuantizationType
    offset: int  # from the beginning of the file
    nbytes: int

    @property
    def n_rows(self) -> int:
        return math.prod(self.shape[:-1])


class GgufFile:
    """One GGUF file: `metadata`, `tensors`, and the tensors' values. The values are read when they are asked for."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = OpenFile(self.path)
        try:
            if self._file.size < 24:
                self._bad(f"has {self._file.size} bytes, fewer than a GGUF header")
            self._map = mmap.mmap(self._file.fd, 0, access=mmap.ACCESS_READ)
            head = _Cursor(self._map, self._file.size, repr(str(self.path)))
            self.metadata, self.tensors = _read_header(head, self._file.size)
        except BaseException:
            self.close()
            raise

    def _bad(self, fact: str) -> None:
        raise ModelFileError(f"{str(self.path)!r}: {fact}")

    def raw(self, tensor: GgufTensor) -> np.ndarray:
        """The stored bytes, [rows, bytes per row]: a view of the mapping, valid until `close`."""
        self._file.check_unchanged()
        flat = np.frombuffer(self._map, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)
        return flat.reshape(tensor.n_rows, -1)

    def rows(self, tensor: GgufTensor, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of the tensor seen as [rows, columns]: F32, F16 and BF16 as stored, all else float32."""
        import torch

        stored = self.raw(tensor)[start:stop]
        n_rows, columns = stored.shape[0], tensor.shape[-1]
        if tensor.type in KEPT:
            out = torch.empty(n_rows, columns, dtype=getattr(torch, KEPT[tensor.type]))
            out.view(torch.uint8).numpy()[...] = stored
            return out
        if tensor.type not in DEQUANTISED:
            raise UnsupportedModel(
                f"{str(self.path)!r}: tensor {tensor.name!r} is {tensor.type.name}; that is not read"
            )
        out = torch.empty(n_rows, columns, dtype=torch.float32)
        per_block, block_bytes = GGML_QUANT_SIZES[tensor.type]
        blocks = stored.reshape(-1, block_bytes)
        values = out.numpy().reshape(-1, per_block)
        step = max(1, _CHUNK // per_block)
        for at in range(0, len(blocks), step):
            part = blocks[at : at + step]  # blocks stand alone, so any grouping gives the same values
            values[at : at + step] = dequantize(part.reshape(1, -1), tensor.type).reshape(-1, per_block)
        return out

    def numbers(self, tensor: GgufTensor) -> np.ndarray:
        """All values of a small tensor in f32, without torch."""
        if tensor.type not in KEPT and tensor.type not in DEQUANTISED:
            raise UnsupportedModel(
                f"{str(self.path)!r}: tensor {tensor.name!r} is {tensor.type.name}; that is not read"
            )
        return np.array(dequantize(self.raw(tensor), tensor.type), dtype=np.float32)

    def dequantise(self, tensor: GgufTensor) -> torch.Tensor:
        out = self.rows(tensor, 0, tensor.n_rows).reshape(tensor.shape)
        self._forget(tensor)
        return out

    def blocks(self, tensor: GgufTensor) -> torch.Tensor:
        """u8 [rows, bytes per row]: a copy of what is stored."""
        import torch

        out = torch.empty(tensor.n_rows, tensor.nbytes // tensor.n_rows, dtype=torch.uint8)
        out.numpy()[...] = self.raw(tensor)
        self._forget(tensor)
        return out

    def _forget(self, tensor: GgufTensor) -> None:
        if tensor.nbytes > 1 << 20 and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)  # pages that were read would count as ours until the file is closed

    def close(self) -> None:
        if hasattr(self, "_map"):
            with contextlib.suppress(BufferError):  # a view given out by `raw` is still alive: the last one unmaps
                self._map.close()
        self._file.close()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Cursor:
    """A position in the header that never passes its end."""

    def __init__(self, data: mmap.mmap, size: int, where: str) -> None:
        self.data, self.end, self.pos, self.where = data, min(size, HEADER_LIMIT), 0, where
        self.listed = 0  # numbers in lists
        self.limit = "the end of the file" if size <= HEADER_LIMIT else f"the header limit of {HEADER_LIMIT} bytes"

    def bad(self, fact: str) -> ModelFileError:
        return ModelFileError(f"{self.where}: {fact}")

    def need(self, count: int, what: str) -> int:
        """Step over `count` bytes and return where they begin."""
        start = self.pos
        if count > self.end - start:
            raise self.bad(f"{what} needs {count} bytes at byte {start}, but {self.limit} is at byte {self.end}")
        self.pos = start + count
        return start

    def u32(self, what: str) -> int:
        return _u32(self.data, self.need(4, what))[0]

    def u64(self, what: str) -> int:
        return _u64(self.data, self.need(8, what))[0]

    def string(self, what: str, longest: int = HEADER_LIMIT) -> str:
        length = self.u64(f"the length of {what}")
        if length > longest:
            raise self.bad(f"{what} has a length of {length} bytes, at most {longest} are allowed")
        start = self.need(length, what)
        try:
            return self.data[start : self.pos].decode()
        except UnicodeDecodeError:
            raise self.bad(f"{what} at byte {start} is not UTF-8") from None

    def strings(self, count: int, what: str) -> list[str]:
        if count * 8 > self.end - self.pos:
            raise self.bad(f"{what} has {count} strings, more than {self.limit} leaves room for")
        data, pos, end, start, out = self.data, self.pos, self.end, self.pos, []
        try:
            for _ in range(count):  # the one hot loop of the header: 100 000 strings in a small model
                start = pos + 8
                pos = start + _u64(data, pos)[0]
                if pos > end:
                    raise self.bad(f"{what} holds a string of {pos - start} bytes at byte {start}, past {self.limit}")
                out.append(data[start:pos].decode())
        except struct.error:
            raise self.bad(f"{what} runs past {self.limit}") from None
        except UnicodeDecodeError:
            raise self.bad(f"{what} holds a string at byte {start} that is not UTF-8") from None
        self.pos = pos
        return out

    def numbers(self, kind: int, count: int, what: str) -> list[Any] | array[Any]:
        """Numbers as a list or, if there are very many (one for each token), as an array that takes no more memory."""
        dtype = _TYPES[kind]
        start = self.need(count * dtype.itemsize, what)
        values = np.frombuffer(self.data, dtype=dtype, count=count, offset=start)
        if kind == _BOOL and count and values.max() > 1:
            raise self.bad(f"{what} is a boolean that is neither 0 nor 1")
        if count > MAX_LIST:
            return array(_CODES[_SCALARS[kind]], values.astype(dtype.newbyteorder("=")).tobytes())
        self.listed += count
        if self.listed > MAX_LISTED:
            raise self.bad(f"{what} brings the numbers in short arrays above {MAX_LISTED}")
        return values.astype(bool).tolist() if kind == _BOOL else values.tolist()

    def value(self, kind: int, key: str) -> Any:
        what = f"the value of key {key!r}"
        if kind == _STRING:
            return self.string(what)
        if kind in _TYPES:
            return self.numbers(kind, 1, what)[0]
        if kind != _ARRAY:
            raise self.bad(f"key {key!r} has the unknown value type {kind}")
        kind, count = self.u32(what), self.u64(what)
        if kind == _STRING:
            return self.strings(count, what)
        if kind in _TYPES:
            return self.numbers(kind, count, what)
        raise self.bad(f"key {key!r} is an array of {'arrays' if kind == _ARRAY else f'the unknown type {kind}'}")


def _read_header(head: _Cursor, file_size: int) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    magic = head.data[:4]
    if magic != b"GGUF":
        raise head.bad(f"begins with {magic!r}, not with b'GGUF'; this is not a GGUF file")
    head.pos = 4
    version = head.u32("the version")
    if version not in (2, 3):
        big = int.from_bytes(version.to_bytes(4, "little"), "big")
        what = f"is big-endian GGUF v{big}" if 1 <= big <= 3 else f"is GGUF version {version}"
        raise head.bad(f"{what}; versions 2 and 3, little-endian, are read: convert the model again")
    n_tensors, n_keys = head.u64("the number of tensors"), head.u64("the number of keys")
    # the smallest entries there can be: key of 1 byte and value of 1; name of 1 byte and one dimension
    for count, smallest, what in ((n_keys, 14, "keys"), (n_tensors, 33, "tensors")):
        if count * smallest > head.end - head.pos or count > MAX_ENTRIES:
            raise head.bad(f"claims {count} {what}; its {file_size} bytes cannot hold them, or they pass {MAX_ENTRIES}")

    metadata: dict[str, Any] = {}
    alignment = 32
    for _ in range(n_keys):
        key = head.string("a key", MAX_KEY)
        if not key:
            raise head.bad("has a key of no characters")
        if key in metadata:
            raise head.bad(f"key {key!r} stands there twice")
        kind = head.u32(f"the type of key {key!r}")
        metadata[key] = head.value(kind, key)
        if key == "general.alignment":
            alignment = metadata[key]
            if kind != _UINT32 or alignment == 0 or alignment & (alignment - 1):
                raise head.bad(f"general.alignment is {alignment!r} of type {kind}, expected a uint32 power of two")

    table = [_read_tensor(head) for _ in range(n_tensors)]
    data = -(-head.pos // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in table:
        if name in tensors:
            raise head.bad(f"tensor {name!r} stands there twice")
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        nbytes = math.prod(shape) // per_block * block_bytes
        if offset % alignment:
            raise head.bad(f"tensor {name!r} has offset {offset}, not a multiple of the alignment {alignment}")
        if data + offset + nbytes > file_size:
            raise head.bad(
                f"tensor {name!r} {list(shape)} {kind.name} needs {nbytes} bytes at byte {data + offset}, "
                f"but the file has {file_size} bytes; is the download complete?"
            )
        tensors[name] = GgufTensor(name, shape, kind, data + offset, nbytes)
    last = None
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        if last is not None and tensor.offset < last.offset + last.nbytes:
            raise head.bad(f"tensors {last.name!r} and {tensor.name!r} overlap at byte {tensor.offset}")
        last = tensor
    return metadata, tensors


def _read_tensor(head: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = head.string("a tensor name", MAX_NAME)
    if not name:
        raise head.bad("has a tensor with no name")
    what = f"tensor {name!r}"
    n_dims = head.u32(what)
    if not 1 <= n_dims <= MAX_DIMS:
        raise head.bad(f"{what} has {n_dims} dimensions, expected 1 to {MAX_DIMS}")
    shape = tuple(head.u64(what) for _ in range(n_dims))[::-1]
    if not all(1 <= dim <= MAX_DIM for dim in shape):
        raise head.bad(f"{what} has the shape {list(shape)}; each dimension must be 1 to {MAX_DIM}")
    number, offset = head.u32(what), head.u64(what)
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise head.bad(f"{what} has the unknown ggml type {number}") from None
    per_block = GGML_QUANT_SIZES[kind][0]
    if shape[-1] % per_block:
        raise head.bad(f"{what} has {shape[-1]} columns, not a multiple of {kind.name}'s block of {per_block}")
    return name, shape, kind, offset
