"""How attention_decode is launched: by head width, dtype, batch size and what the longest stream may hold.

The numbers are those that were fastest on an H200.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class DecodeShape(NamedTuple):
    """How the first kernel is launched."""

    keys: int  # in a tile
    warps: int
    stages: int
    programs: int  # on each multiprocessor
    least: int = 1  # tiles of a program at least
    # maxnreg: so that `programs` of them and programs of the join kernel fit on a multiprocessor together
    registers: int | None = None


class JoinShape(NamedTuple):
    """How the second kernel, which joins the parts of each stream, is launched."""

    channels: int  # that a program computes
    parts: int  # read at once
    warps: int


FEW = 4  # requests: up to here a stream has many parts, and a program little work
SHORT = 12288  # keys of all requests together: up to here FP8 is faster with one program on each multiprocessor


def decode_shape(
    B: int,  # requests
    D: int,
    dot: torch.dtype,  # factors of the products
    pairs: bool,  # FP8 values are read two at a time
    keys: int,  # that a stream may hold
    group: int = 1,  # query heads that share a KV head
    room: bool = True,  # whether a program may have the shared memory of a data-centre GPU
) -> DecodeShape:
    """The fastest on an H200 at D = 256; smaller without `room` or with many query heads."""
    shape = _fastest_shape(B, D, dot, pairs, keys)
    if group > 32:
        return DecodeShape(32, 4, 1, 1)
    return shape if room else shape._replace(stages=min(shape.stages, 2))


def _fastest_shape(B: int, D: int, dot: torch.dtype, pairs: bool, keys: int) -> DecodeShape:
    if dot == torch.float32:
        return DecodeShape(32, 8 if D > 64 else 4, 1, 2)
    if D > 256:
        return DecodeShape(32, 4, 3, 1)
    if pairs and B > FEW:
        return DecodeShape(64, 4, 2, 3, registers=168)
    if pairs:
        return DecodeShape(64, 8, 2, 1) if B * keys <= SHORT else DecodeShape(32, 4, 3, 3, registers=168)
    return DecodeShape(64, 4, 3, 1) if B <= FEW else DecodeShape(64, 4, 2, 2)


def same_shape_up_to(B: int, keys: int, max_keys: int, quantised: bool) -> int:
    """The largest number of keys of a stream, up to `max_keys`, that is launched as `keys` are."""
    return SHORT // B if quantised and B <= FEW and B * keys <= SHORT < B * max_keys else max_keys


def join_shape(B: int, BD: int, parts: int) -> JoinShape:
    """`parts`: how many a stream has, about."""
    return JoinShape(min(BD, 64), 64 if parts > 16 else 32, 2) if B <= FEW else JoinShape(BD, 4, 2)
