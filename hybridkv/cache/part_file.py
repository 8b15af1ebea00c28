"""One part of a saved cache: an immutable file of tensors, named by the SHA-256 of its bytes.

    safetensors: 8 bytes (length of the header) | header, JSON, padded with spaces to 8 bytes | tensors, in order

Which tensors a part has, in which order, dtype and shape, is known before it is read. So its header is known, too, byte
for byte: a reader compares it and parses nothing that a file says.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from hybridkv.dtypes import ITEMSIZE, torch_dtype
from hybridkv.errors import HybridKVError

CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
TEMPORARY = ".new-"  # what the name of a file begins with while it is written
SUFFIX = ".safetensors"


class Damaged(HybridKVError):
    """A part that is missing, or whose bytes are not those that its name says."""


@dataclass(frozen=True)
class TensorForm:
    """A tensor of a part."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of its numbers."""
        return prod(self.shape) * ITEMSIZE[self.dtype]


def as_bytes(data: Tensor) -> memoryview:
    """The bytes of a tensor [n] of them, which is on the host."""
    found: Any = data.numpy()
    return memoryview(found)


def header_of(forms: Sequence[TensorForm]) -> bytes:
    """The beginning of a part with these tensors."""
    listed, at = {}, 0
    for form in forms:
        end = at + form.nbytes
        listed[form.name] = {"dtype": CODES[form.dtype], "shape": list(form.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(listed, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def size_of(forms: Sequence[TensorForm]) -> int:
    """Bytes of a part with these tensors."""
    return len(header_of(forms)) + sum(form.nbytes for form in forms)


def bytes_of(forms: Sequence[TensorForm], tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """A part as pieces of bytes; the tensors are on the host, and of these forms."""
    pieces = [memoryview(header_of(forms))]
    for form in forms:
        tensor = tensors[form.name]
        if tuple(tensor.shape) != form.shape or tensor.dtype != torch_dtype(form.dtype):
            raise ValueError(f"tensor '{form.name}' is {list(tensor.shape)} {tensor.dtype}, not {form}")
        if tensor.numel():
            pieces.append(as_bytes(tensor.contiguous().view(-1).view(torch.uint8)))
    return pieces


def digest_of(pieces: Sequence[memoryview]) -> str:
    """The name of a part."""
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


def write_new(folder: int, name: str, pieces: Sequence[memoryview]) -> None:
    """Write a file into an open folder: under a temporary name, to the disk, then under its own. Mode 0600."""
    temporary = f"{TEMPORARY}{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        try:
            os.fchmod(file, 0o600)
            for piece in pieces:
                while len(piece):
                    piece = piece[os.write(file, piece) :]
            os.fdatasync(file)
        finally:
            os.close(file)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def size_on_disk(folder: int, name: str) -> int | None:
    """Bytes of a plain file in an open folder; None: there is none, or it is a link or something else."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except (OSError, ValueError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def read_whole(folder: int, name: str, size: int) -> Tensor:
    """Bytes [size] of a plain file that has exactly so many, or OSError or Damaged. No link is followed."""
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            raise Damaged(f"it has {found.st_size} bytes, not {size}")
        data = torch.empty(size, dtype=torch.uint8)
        view, at = as_bytes(data), 0
        while at < size:
            count = os.readv(file, [view[at : at + (64 << 20)]])
            if not count:
                raise Damaged(f"it ends after {at} of {size} bytes")
            at += count
        return data
    finally:
        os.close(file)


def read_part(folder: int, digest: str, forms: Sequence[TensorForm]) -> dict[str, Tensor]:
    """Tensors of a part, or Damaged: what is wrong with it."""
    data = read_checked(folder, digest, size_of(forms))
    header = header_of(forms)
    if as_bytes(data[: len(header)]) != header:
        raise Damaged("it does not hold the tensors that it should")
    found, at = {}, len(header)
    for form in forms:
        found[form.name] = data[at : at + form.nbytes].view(torch_dtype(form.dtype)).view(form.shape)
        at += form.nbytes
    return found


def read_checked(folder: int, digest: str, size: int) -> Tensor:
    """The bytes of a part, if they are those that its name says, or Damaged."""
    try:
        data = read_whole(folder, digest + SUFFIX, size)
    except OSError as problem:
        raise Damaged(f"it cannot be read: {problem.strerror or problem}") from None
    if hashlib.sha256(as_bytes(data)).hexdigest() != digest:
        raise Damaged("its bytes are not those that were written: the checksum does not agree")
    return data
