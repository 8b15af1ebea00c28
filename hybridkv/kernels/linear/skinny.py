"""linear_rows: x W^T + b for the 9 to 64 rows of a decode step of many requests, at the speed at which W can be read.

On Hopper GPUs alone (linear_rows_hopper.py), in bf16; elsewhere linear.py takes the library's product. A program for
each multiprocessor takes tiles of 128 rows of W over all columns. Tiles that are left when each has the same number of
them are shared: the columns of one are dealt out to several programs, which then add up what they have. So programs
wait for each other, and all launches on a device have to follow one another: on one stream, as an engine's do.

GATED: the rows of W are N gates, then N ups, and the result is silu(gate) * up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridkv.kernels.backend import has_gluon, sm_count
from hybridkv.kernels.linear.gemv import linear_vector_ref

LEAST_ROWS, MOST_ROWS = 9, 64  # of x
FEW_ROWS = 32  # up to so many, faster than the library's product only where no program has a second whole tile
TILE, STEP = 128, 64  # rows of W; columns that are multiplied at once
BUSY = 0.9  # of the multiprocessors' time: with less, the library's product is faster
LARGE = 1 << 26  # elements of W: smaller ones are left to the library


class Division(NamedTuple):
    programs: int
    whole: int  # tiles of each program
    shared: int  # tiles that several programs have
    sharers: int  # programs for each of those

    def busy(self, processors: int) -> float:
        """Share of the multiprocessors' time in which they have work."""
        each = self.whole + (1 / self.sharers if self.shared else 0)
        return (self.whole * self.programs + self.shared) / (each * processors)


def divide(tiles: int, steps: int, processors: int) -> Division:
    """`steps`: of a tile's columns, that can be dealt out."""
    whole, left = divmod(tiles, processors)
    sharers = min(processors // left, steps) if left else 1
    if whole == 0 and sharers == 1:
        return Division(tiles, 1, 0, 1)
    return Division(processors if whole else left * sharers, whole, left, sharers)


def suits_rows(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel is faster than the library's product for these shapes, as measured on an H200."""
    N, K = weight.shape
    if not LEAST_ROWS <= len(x) <= MOST_ROWS or not x.dtype == weight.dtype == torch.bfloat16:
        return False
    if not has_gluon(x.device):
        return False
    if weight.numel() < LARGE or not weight.is_contiguous() or K % 8 or (x.stride(0) % 8, x.stride(1)) != (0, 1):
        return False  # copies begin at every 16 bytes
    processors = sm_count(x.device)
    division = divide(-(-N // TILE), -(-K // STEP), processors)
    if division.whole == 0:  # all tiles are shared: faster where the library adds up parts, too
        fast = K > 2 * N
    else:
        fast = division.whole == 1 or len(x) > FEW_ROWS
    return fast and division.busy(processors) >= BUSY and x.data_ptr() % 16 == weight.data_ptr() % 16 == 0


def linear_rows(
    x: Tensor,  # [T, K], T <= MOST_ROWS
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,  # [N]
    gated: bool = False,  # weight [2 N, K]: silu(first half) * second half
) -> Tensor:  # [T, N]
    if not has_gluon(x.device):
        return linear_vector_ref(x, weight, None, bias, gated)
    from hybridkv.kernels.linear.skinny_hopper import linear_rows_hopper  # Gluon, which not every Triton has

    return linear_rows_hopper(x, weight, bias, gated)
