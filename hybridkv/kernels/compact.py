"""compact: entries of a pool from one place to another, byte for byte, any dtype. Sources and targets may overlap.

The kernel runs twice, through a buffer: all entries are gathered, then all are written, so no order of the programs
can matter. The buffer holds the moved entries of one tensor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybridkv.kernels.backend import tl, triton, use_triton

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
BLOCK_WORDS = 1024  # a program moves so many, in tiles of rows x columns
MAX_COLUMNS = 256


def compact_ref(
    pool: Tensor,  # [N, P, ...]
    source: Tensor,  # [n] int64 flat entries page * P + offset
    target: Tensor,  # [n] int64, all different
) -> None:
    flat = pool.view(-1, *pool.shape[2:])
    flat[target] = flat[source]  # the right side is gathered whole before anything is written


@triton.jit(do_not_specialize=["n"])
def move_kernel(
    source, target, index, n, E: tl.constexpr, GATHER: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr
):  # fmt: skip
    """Rows of E words: target[i] = source[index[i]] (GATHER), or target[index[i]] = source[i]."""
    o_n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    o_e = tl.program_id(1) * BE + tl.arange(0, BE)
    m_n = o_n < n
    m_x = m_n[:, None] & (o_e < E)
    o_i = tl.load(index + o_n, mask=m_n, other=0)
    o_from = o_i if GATHER else o_n
    o_to = o_n if GATHER else o_i
    b_x = tl.load(source + o_from[:, None] * E + o_e, mask=m_x)
    tl.store(target + o_to[:, None] * E + o_e, b_x, mask=m_x)


def as_words(pool: Tensor) -> tuple[Tensor, int]:
    """The pool as a flat tensor of the widest words that an entry and the pool's address are multiples of, and how many
    an entry has.
    """
    size = math.prod(pool.shape[2:]) * pool.element_size()
    width = next(w for w in WORDS if size % w == 0 and pool.data_ptr() % w == 0)
    return pool.view(-1).view(torch.uint8).view(WORDS[width]), size // width


def compact_triton(pool: Tensor, source: Tensor, target: Tensor) -> None:
    n = len(source)
    if not n or not pool.numel():
        return
    words, E = as_words(pool)
    columns = min(MAX_COLUMNS, triton.next_power_of_2(E))
    rows = BLOCK_WORDS // columns
    buffer = words.new_empty(n * E)
    grid = (triton.cdiv(n, rows), triton.cdiv(E, columns))
    move_kernel[grid](words, buffer, source.contiguous(), n, E=E, GATHER=True, BN=rows, BE=columns)
    move_kernel[grid](buffer, words, target.contiguous(), n, E=E, GATHER=False, BN=rows, BE=columns)


def compact(pool: Tensor, source: Tensor, target: Tensor) -> None:
    """Entries `source` [n] of pool [N, P, ...] to places `target` [n]: flat numbers page * P + offset."""
    form = compact_triton if use_triton(pool) else compact_ref
    form(pool, source, target)
