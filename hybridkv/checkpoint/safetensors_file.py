"""One .safetensors file: its header checked before the `safetensors` library maps the file, and its tensors.

    u64 header length, JSON {name: {dtype, shape, data_offsets: [begin, end]}}, then the data, without holes or a rest

The names' meaning and the choice of files are left to `weights.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hybridkv.errors import ModelFileError, UnsupportedModel
from hybridkv.files import OpenFile, parse_json

HEADER_LIMIT = 100_000_000  # bytes, the limit of the safetensors package
TOUCHED_LIMIT = 64 << 20  # bytes of a mapping that are read before it is made anew
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16}
_BITS |= {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
_BITS |= {"I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # of weights as they are
# parts of quantised weights, and tables of indices
PACKED = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_READ = DTYPES | PACKED


@dataclass(frozen=True)
class StoredTensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class SafetensorsFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: Any = None
        self._touched = 0  # bytes read since the file was mapped
        self._lock = Lock()
        self._file = OpenFile(path)
        try:
            self.tensors = _read_header(self._file)
        except BaseException:
            self._file.close()
            raise

    def read(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """The tensor, or some of its rows, in memory of its own, in the dtype it is stored in; F4 as bytes that hold
        two values.
        """
        stored = self.tensors[name]
        if stored.dtype not in _READ:
            raise UnsupportedModel(f"{str(self.path)!r}: tensor {name[:200]!r} is {stored.dtype}, which is not loaded")
        self._file.check_unchanged()
        taken = stored.nbytes if rows is None else stored.nbytes * (rows[1] - rows[0]) // stored.shape[0]
        try:
            with self._lock:  # of the mapping; what is mapped is then copied by several threads at once
                self._touched += taken
                if self._touched > TOUCHED_LIMIT:  # mapped pages count as ours until they are unmapped
                    self._handle, self._touched = None, taken
                if self._handle is None:
                    self._handle = safe_open(self.path, framework="pt", device="cpu")
                tensor = self._handle.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise ModelFileError(f"{str(self.path)!r}: tensor {name[:200]!r} cannot be read: {error}") from None
        is_f4 = stored.dtype == "F4"
        shape = (*tensor.shape[:-1], 2 * tensor.shape[-1]) if is_f4 else tensor.shape
        if tuple(shape) != stored.shape or tensor.dtype != _READ[stored.dtype]:
            raise ModelFileError(f"{str(self.path)!r} changed while it was in use; open the model again")
        tensor = tensor.view(torch.uint8) if is_f4 else tensor
        return (tensor if rows is None else tensor[rows[0] : rows[1]]).clone()

    def close(self) -> None:
        self._handle = None  # unmaps
        self._file.close()


def _read_header(file: OpenFile) -> dict[str, StoredTensor]:
    where = repr(str(file.path))
    if file.size < 10:
        raise ModelFileError(
            f"{where}: has {file.size} bytes, too few for a safetensors file; is the download complete?"
        )
    begin = file.read_at(0, 9)
    length = int.from_bytes(begin[:8], "little")
    if begin[:4] in (b"PK\x03\x04", b"PK\x05\x06") or (begin[0] == 0x80 and begin[8:] != b"{"):
        raise ModelFileError(f"{where}: is a pickle or zip file under another name; hybridkv never loads pickle")
    if begin[8:] != b"{":
        raise ModelFileError(f"{where}: is not a safetensors file: its header begins with {begin[8:]!r}")
    if length > HEADER_LIMIT or 8 + length > file.size:
        raise ModelFileError(
            f"{where}: claims a header of {length} bytes; the file has {file.size}, and at most {HEADER_LIMIT} are read"
        )
    header = parse_json(file.read_at(8, length), where)
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        raise ModelFileError(f"{where}: __metadata__ must map strings to strings")

    tensors: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        dtype, shape, begin_at, end = _entry(entry, f"{where}: tensor {name[:200]!r}")
        tensors[name] = StoredTensor(name, dtype, shape, end - begin_at)
        spans.append((begin_at, end, name))
    at = 0
    for begin_at, end, name in sorted(spans):
        if begin_at != at:
            what = "overlaps the one before it" if begin_at < at else "leaves a hole before it"
            raise ModelFileError(f"{where}: tensor {name[:200]!r} at {begin_at} {what} (expected {at})")
        at = end
    if 8 + length + at != file.size:
        raise ModelFileError(
            f"{where}: header and tensors need {8 + length + at} bytes, the file has {file.size}; is it complete?"
        )
    return tensors


def _entry(entry: object, what: str) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ModelFileError(f"{what}: expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ModelFileError(f"{what}: unknown dtype {str(dtype)[:40]!r}")
    for value, name in ((shape, "shape"), (offsets, "data_offsets")):
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 2**63 for item in value):
            raise ModelFileError(f"{what}: {name} must be a list of whole numbers that are not negative")
    if len(offsets) != 2 or offsets[1] < offsets[0] or len(shape) > 8:
        raise ModelFileError(f"{what}: data_offsets {offsets[:3]} and shape {shape[:9]} make no tensor")
    if math.prod(shape) * _BITS[dtype] != (offsets[1] - offsets[0]) * 8:
        raise ModelFileError(f"{what}: {dtype} {shape} does not fill its {offsets[1] - offsets[0]} bytes")
    return dtype, tuple(shape), offsets[0], offsets[1]
