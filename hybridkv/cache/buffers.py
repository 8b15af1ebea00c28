"""Buffers: a snapshot or a session without a file, ready to be sent: a head of plain JSON, and bytes.

    head    format and version, kind, meta (what the file's metadata holds: fingerprints of schema and model, position,
            the request), tensors [[name, dtype, shape], ...], and, once sealed, sha256 of each tensor's bytes
    parts   the bytes of each tensor, in order: [n] uint8 on the host, pinned where they came from a GPU

The head says how many bytes follow, so a receiver knows all sizes before it takes memory (`check_head`). Sealing binds
them: who knows the digest of a sealed head knows that all of it is what was sent. It takes time (SHA-256, 1 GB/s a
thread), so what stays in one process is not sealed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hybridkv.cache.manifest import DIGEST
from hybridkv.cache.part_file import CODES, TensorForm, as_bytes
from hybridkv.cache.snapshot_file import NotWellFormed
from hybridkv.dtypes import dtype_name, torch_dtype
from hybridkv.errors import HybridKVError
from hybridkv.files import parse_json

FORMAT, VERSION = "hybridkv-buffers", 1
HEAD_BYTES = 16 << 20  # that are read
MOST_TENSORS = 1 << 16
MOST_BYTES = 1 << 48
THREADS = 4  # that hash


@dataclass(frozen=True)
class Buffers:
    """Something that can be sent.

    Args:
        head: plain JSON values.
        parts: bytes of each tensor that the head names.
    """

    head: dict[str, Any]
    parts: list[Tensor]

    @cached_property
    def head_bytes(self) -> bytes:
        """The head as it is sent."""
        return json.dumps(self.head, allow_nan=False, sort_keys=True, separators=(",", ":")).encode()

    @property
    def nbytes(self) -> int:
        """Of head and parts."""
        return len(self.head_bytes) + sum(part.nbytes for part in self.parts)

    @property
    def digest(self) -> str:
        """SHA-256 of the head; of a sealed one, a name for all of it."""
        return hashlib.sha256(self.head_bytes).hexdigest()

    @property
    def sealed(self) -> bool:
        """Whether the head has the digests of the parts."""
        return "sha256" in self.head

    def seal(self) -> Buffers:
        """The same, with the digests of its parts in the head."""
        return self if self.sealed else Buffers(self.head | {"sha256": _digests(self.parts)}, self.parts)


def pack(kind: str, tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> Buffers:
    """Buffers of tensors on the host, which are not copied, and of the metadata that a file of them would have."""
    listed = [[name, dtype_name(t.dtype), list(t.shape)] for name, t in tensors.items()]
    head = {"format": FORMAT, "version": VERSION, "kind": kind, "meta": dict(meta), "tensors": listed}
    return Buffers(head, [_flat(t) for t in tensors.values()])


def _flat(t: Tensor) -> Tensor:
    """The bytes of a tensor. One of nothing may come from numpy with a stride of 0, which no view takes."""
    return t.contiguous().view(-1).view(torch.uint8) if t.numel() else torch.empty(0, dtype=torch.uint8)


def parse_head(data: bytes) -> dict[str, Any]:
    """A head as it was sent, or HybridKVError."""
    if len(data) > HEAD_BYTES:
        raise HybridKVError(f"what was sent has a head of {len(data)} bytes; at most {HEAD_BYTES} are read")
    return parse_json(data, "the head of what was sent")


def check_head(head: Mapping[str, Any], room: int | None = None) -> list[TensorForm]:
    """The tensors that a head names, or HybridKVError: it is not ours, of a newer version, damaged, or names more than
    `room` bytes. Takes no memory.
    """
    if head.get("format") != FORMAT:
        raise HybridKVError(f"these are no buffers of a cache: their format is not {FORMAT}")
    version = head.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise HybridKVError(
            f"the buffers are of version {str(version)[:20]!r}; this program reads up to {VERSION}: update it"
        )
    try:
        forms = _forms(head)
    except NotWellFormed as problem:
        raise HybridKVError(f"the buffers are not well-formed: {problem}") from None
    total = sum(form.nbytes for form in forms)
    if total > (MOST_BYTES if room is None else room):
        raise HybridKVError(f"the buffers have {total} bytes, and no more than {room} can belong to a request here")
    return forms


def _forms(head: Mapping[str, Any]) -> list[TensorForm]:
    meta, listed, digests = head.get("meta"), head.get("tensors"), head.get("sha256")
    if not isinstance(meta, dict) or not all(isinstance(v, str) for v in meta.values()):
        raise NotWellFormed("the metadata is no object of texts")
    if not isinstance(head.get("kind"), str) or not isinstance(listed, list) or len(listed) > MOST_TENSORS:
        raise NotWellFormed("they do not say what they hold")
    forms = [_form(each) for each in listed]
    if len({form.name for form in forms}) != len(forms):
        raise NotWellFormed("two tensors have the same name")
    if digests is not None:
        good = isinstance(digests, list) and all(isinstance(d, str) and DIGEST.match(d) for d in digests)
        if not good or len(digests) != len(forms):
            raise NotWellFormed("the digests are not those of the tensors")
    return forms


def _form(listed: Any) -> TensorForm:
    name, dtype, shape = listed if isinstance(listed, list) and len(listed) == 3 else (None, None, None)
    if not isinstance(name, str) or len(name) > 256 or dtype not in CODES:
        raise NotWellFormed("a tensor has no name, or a dtype that is not known")
    if not isinstance(shape, list) or len(shape) > 8:
        raise NotWellFormed(f"tensor '{name[:80]}' has no shape")
    size = 1
    for n in shape:  # a product that cannot grow past what any memory holds, whatever the numbers are
        if type(n) is not int or not 0 <= n <= MOST_BYTES or (size := size * n) > MOST_BYTES:
            raise NotWellFormed(f"tensor '{name[:80]}' is too large, or its shape is not one")
    return TensorForm(name, dtype, tuple(shape))


def unpack(
    buffers: Buffers,
    kind: str,
    check: Callable[[dict[str, str]], None] | None = None,
    room: int | None = None,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata, which share the memory of the buffers; or HybridKVError.

    `check` refuses metadata, and `room` says how many bytes may come, before any byte is looked at.
    """
    forms, head = check_head(buffers.head, room), buffers.head
    if head["kind"] != kind:
        raise HybridKVError(f"the buffers hold a {str(head['kind'])[:40]}, not a {kind}")
    if check is not None:
        check(head["meta"])
    found = [part.nbytes if part.dtype == torch.uint8 and part.dim() == 1 else -1 for part in buffers.parts]
    if found != [form.nbytes for form in forms]:
        raise HybridKVError("the buffers are damaged: they are not as long as their head says, or some are missing")
    if buffers.sealed and _digests(buffers.parts) != head["sha256"]:
        raise HybridKVError("the buffers are damaged: a checksum does not agree; send them again")
    return {form.name: _as(form, part) for form, part in zip(forms, buffers.parts, strict=True)}, dict(head["meta"])


def _as(form: TensorForm, part: Tensor) -> Tensor:
    if part.data_ptr() % 8:  # inside another buffer
        part = part.clone()
    return part.view(torch_dtype(form.dtype)).view(form.shape)


def _digests(parts: Sequence[Tensor]) -> list[str]:
    with ThreadPoolExecutor(THREADS, "hybridkv-hash") as pool:  # it lets other threads run meanwhile
        return list(pool.map(lambda part: hashlib.sha256(as_bytes(part)).hexdigest(), parts))
