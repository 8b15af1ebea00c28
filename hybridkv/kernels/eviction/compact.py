"""compact: entries of pools from one place to another, byte for byte, any dtype.

Where sources and targets may overlap, the kernel runs twice, through a buffer: all entries are gathered, then all are
written, so the order of the programs does not matter. Where they lie apart it runs once. Two tensors whose entries have
the same size share a launch, so the buffer holds the moved entries of two tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
BLOCK_WORDS = 2048  # words that a program moves, in a tile of rows x columns
MAX_COLUMNS = 256


def compact_ref(pool: Tensor, source: Tensor, target: Tensor) -> None:
    flat = pool.view(-1, *pool.shape[2:])
    moved = target >= 0
    flat[target[moved]] = flat[source[moved]]  # the right side is gathered whole before anything is written


@triton.jit(do_not_specialize=["n"])
def move_kernel(
    a, a_to, b, b_to, source, target, n,
    E: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Rows of E words of a and of b: row source[i] (GATHER; else row i) to row target[i] (SCATTER; else row i)."""
    o_n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    o_e = tl.program_id(1) * BE + tl.arange(0, BE)
    if tl.program_id(2) == 1:
        a, a_to = b, b_to
    m_n = o_n < n
    b_to = tl.load(target + o_n, mask=m_n, other=-1)
    m_n = b_to >= 0
    o_from = tl.load(source + o_n, mask=m_n, other=0) if GATHER else o_n
    o_to = b_to if SCATTER else o_n
    m_x = m_n[:, None] & (o_e < E)
    b_x = tl.load(a + o_from[:, None] * E + o_e, mask=m_x)
    tl.store(a_to + o_to[:, None] * E + o_e, b_x, mask=m_x)


def as_words(pool: Tensor) -> tuple[Tensor, int]:
    """The pool as a flat tensor of words, and the words of an entry.

    Words are as wide as the size of an entry and the pool's address allow.
    """
    size = math.prod(pool.shape[2:]) * pool.element_size()
    width = next(w for w in WORDS if size % w == 0 and pool.data_ptr() % w == 0)
    return pool.view(-1).view(torch.uint8).view(WORDS[width]), size // width


def compact_triton(pools: Sequence[Tensor], source: Tensor, target: Tensor, apart: bool = False) -> None:
    n = len(source)
    alike: dict[tuple[torch.dtype, int], list[Tensor]] = {}  # (type of a word, words of an entry) -> pools
    for words, E in (as_words(pool) for pool in pools if n and pool.numel()):
        alike.setdefault((words.dtype, E), []).append(words)
    index = (source.contiguous(), target.contiguous(), n)
    for (_, E), found in alike.items():
        columns = min(MAX_COLUMNS, triton.next_power_of_2(E))
        rows = BLOCK_WORDS // columns
        tile = dict(E=E, BN=rows, BE=columns)
        for a, b in zip(found[::2], found[1::2] + found[-1:], strict=False):
            grid = (triton.cdiv(n, rows), triton.cdiv(E, columns), 1 if a is b else 2)
            if apart:
                move_kernel[grid](a, a, b, b, *index, GATHER=True, SCATTER=True, **tile)
                continue
            x = a.new_empty(n * E)
            y = x if a is b else b.new_empty(n * E)
            move_kernel[grid](a, x, b, y, *index, GATHER=True, SCATTER=False, **tile)
            move_kernel[grid](x, a, y, b, *index, GATHER=False, SCATTER=True, **tile)


def compact(
    pools: Sequence[Tensor],  # [N, P, ...] each
    source: Tensor,  # [n] int64 flat entries page * P + offset
    target: Tensor,  # [n] int64, all different; below 0: the entry stays where it is
    apart: bool = False,  # no place is both a source and a target
) -> None:
    """Move entries of every pool from their places `source` to `target`."""
    if pools and use_triton(pools[0]):
        compact_triton(pools, source, target, apart)
        return
    for pool in pools:
        compact_ref(pool, source, target)
