"""Short kernels overlap: one starts while the kernel before it drains, reads what is constant, and waits for the rest.

It lets the kernel after it start at once, which does the same if it was launched so, and waits for its end otherwise.
Kernels beside products overlap in steps of up to MANY_TOKENS tokens: with more, products run in the library's kernels,
beside which a waiting kernel gains nothing. Others do up to MOST_TOKENS. Short kernels of DeepSeek-V4, and the DeltaNet
step of many requests (gdn_step_hopper.py), overlap with any number of rows.

A launch has `OVERLAP=overlap, launch_pdl=overlap` with `overlap = can_overlap(x)`, or with another number of rows.
"""

from __future__ import annotations

from torch import Tensor

from hybridkv.kernels.backend import has_pdl, tl, triton

MOST_TOKENS = 8
MANY_TOKENS = 64  # linear_rows takes so many


def can_overlap(x: Tensor, max_tokens: int | None = MOST_TOKENS) -> bool:
    """Whether a kernel on x [T, ...] is launched with PDL: up to `max_tokens` tokens; None: with any number."""
    return (max_tokens is None or len(x) <= max_tokens) and has_pdl(x.device)


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Before this, a kernel reads nothing that the step computes, and writes nothing."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
