"""Short kernels overlap: one starts while the kernel before it drains, reads what is constant, and waits for the rest.

It lets the kernel after it start at once, which does the same if it was launched so, and waits for its end otherwise.
Only steps of few tokens gain: with more, products run in the library's kernels, beside which a waiting kernel costs
time, and large kernels take each other's room.

A launch has `OVERLAP=overlap, launch_pdl=overlap` with `overlap = can_overlap(x)`.
"""

from __future__ import annotations

import os

from torch import Tensor

from hybridkv.kernels.backend import HAS_TRITON, capability, tl, triton

MOST_TOKENS = 8


def can_overlap(x: Tensor) -> bool:
    """Whether a kernel on x [T, ...] is launched before the one before it ends."""
    compiled = HAS_TRITON and x.is_cuda and os.environ.get("TRITON_INTERPRET", "0") != "1"
    return compiled and len(x) <= MOST_TOKENS and capability(x.device) >= (9, 0)


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Before this, a kernel reads nothing that the step computes, and writes nothing."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
