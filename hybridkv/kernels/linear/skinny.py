"""linear_rows: x W^T + b for the 9 to 64 rows of a decode step of many requests, at the speed at which W can be read.

On Hopper GPUs alone (skinny_hopper.py), in bf16; elsewhere linear.py takes the BLAS library's product. A program for
each multiprocessor takes tiles of 128 rows of W over all columns. Tiles that are left when each has the same number of
them are shared: the columns of one are dealt out to several programs, which then add up their parts. No program needs
another one to run beside it, so launches on different streams, or of other processes, cannot block each other.

GATED: the rows of W are N gates, then N ups, and the result is silu(gate) * up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridkv.kernels.backend import has_gluon, sm_count, triton
from hybridkv.kernels.counters import counters
from hybridkv.kernels.gluon import TensorDescriptor, gl
from hybridkv.kernels.linear.gemv import linear_vector_ref

MIN_ROWS, MAX_ROWS = 9, 64  # of x
FEW_ROWS = 32  # up to this many, faster than cuBLAS only where no program has a second whole tile
TILE, STEP = 128, 64  # rows of W; columns that are multiplied at once
HALF = TILE // 2
BUSY = 0.9  # of the multiprocessors' time: with less, cuBLAS is faster
LARGE = 1 << 26  # elements of W: smaller ones are left to cuBLAS
MAX_SHARERS = 255  # what a tile's word can count
FEW_SHARERS = 16  # with more, a tile's parts are read for longer than cuBLAS takes
LOOKS = 32  # how often a program looks for the parts of others, at about a microsecond each, before it gives up
# rows of x, padded: stages of the ring, registers of a thread. As deep a ring as fits, and registers left for the
# kernels before and after
RINGS = {16: (12, 96), 32: (11, 112), 64: (9, 128)}


class Division(NamedTuple):
    programs: int
    whole: int  # tiles of each program
    shared: int  # tiles that several programs have
    sharers: int  # programs for each of those

    def busy(self, sms: int) -> float:
        """Share of the multiprocessors' time in which they have work."""
        each = self.whole + (1 / self.sharers if self.shared else 0)
        return (self.whole * self.programs + self.shared) / (each * sms)


def divide(tiles: int, steps: int, sms: int) -> Division:
    """Deal out `tiles` of `steps` column steps each to one program for each multiprocessor."""
    whole, left = divmod(tiles, sms)
    sharers = min(sms // left, steps, MAX_SHARERS) if left else 1
    if whole == 0 and sharers == 1:
        return Division(tiles, 1, 0, 1)
    return Division(sms if whole else left * sharers, whole, left, sharers)


def suits_rows(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel is faster than cuBLAS for these shapes, as measured on an H200."""
    N, K = weight.shape
    if not MIN_ROWS <= len(x) <= MAX_ROWS or not x.dtype == weight.dtype == torch.bfloat16:
        return False
    if not has_gluon(x.device):
        return False
    if weight.numel() < LARGE or not weight.is_contiguous() or K % 8 or (x.stride(0) % 8, x.stride(1)) != (0, 1):
        return False  # copies begin at every 16 bytes
    sms = sm_count(x.device)
    division = divide(triton.cdiv(N, TILE), triton.cdiv(K, STEP), sms)
    if division.whole == 0:  # all tiles are shared: faster where cuBLAS adds up parts, too
        fast = K > 2 * N
    else:
        fast = division.whole == 1 or len(x) > FEW_ROWS
    fast = fast and division.sharers <= FEW_SHARERS
    return fast and division.busy(sms) >= BUSY and x.data_ptr() % 16 == weight.data_ptr() % 16 == 0


def boxes(x: Tensor, rows: int) -> Any:
    """x as a matrix that the copy engine reads in boxes of `rows` rows and STEP columns."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, STEP], gl.bfloat16)
    return TensorDescriptor.from_tensor(x, [rows, STEP], layout)


def linear_rows_hopper(x: Tensor, weight: Tensor, bias: Tensor | None = None, gated: bool = False) -> Tensor:
    """Arguments as linear_rows'; rows of x and of W begin at 16 bytes."""
    from hybridkv.kernels.linear.skinny_hopper import linear_rows_hopper_kernel

    T, K = x.shape
    N = len(weight) // 2 if gated else len(weight)
    sms = sm_count(x.device)
    BT = max(16, triton.next_power_of_2(T))
    stages, registers = RINGS[BT]
    steps = triton.cdiv(K, STEP)
    programs, whole, tiles, sharers = divide(triton.cdiv(N, HALF if gated else TILE), steps, sms)
    if tiles:
        at_once = 4 if sharers <= 4 else 8
    else:
        at_once = 0
    y = torch.empty((T, N), dtype=x.dtype, device=x.device)
    parts = torch.empty((programs, TILE, BT) if tiles else (1,), dtype=torch.float32, device=x.device)
    linear_rows_hopper_kernel[(programs,)](
        boxes(x, BT), boxes(weight, HALF), y if bias is None else bias, y, parts,
        counters(sms, x.device) if tiles else parts, T, N, steps, whole, tiles, sharers, GATED=gated,
        BIAS=bias is not None, BT=BT, S=stages, AT_ONCE=at_once, LOOKS=LOOKS, num_warps=4, maxnreg=registers,
        launch_pdl=True,
    )  # fmt: skip
    return y


def linear_rows(
    x: Tensor,  # [T, K], T <= MAX_ROWS
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,  # [N]
    gated: bool = False,  # weight [2 N, K]: silu(first half) * second half
) -> Tensor:  # [T, N]
    if has_gluon(x.device):
        return linear_rows_hopper(x, weight, bias, gated)
    return linear_vector_ref(x, weight, None, bias, gated)
