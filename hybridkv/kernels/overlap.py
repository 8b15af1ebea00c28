"""Short kernels overlap by programmatic dependent launch (PDL): one starts while the kernel before it is still ending.

A kernel that is launched with PDL reads what is constant, then waits (`gdc_wait`) for the kernel before it to complete.
It signals `launch_dependents` at once: a successor that is launched with PDL overlaps it too, any other waits for its
completion.

Kernels between products use PDL in steps of up to MANY_TOKENS tokens. With more tokens, products run in cuBLAS, beside
which a waiting kernel gains nothing. Others use it up to FEW_TOKENS. Short kernels of DeepSeek-V4, and the DeltaNet
step of many requests (gdn/step_hopper.py), use it with any number of rows.

A launch has `OVERLAP=overlap, launch_pdl=overlap` with `overlap = can_overlap(x)`, or with another number of tokens.
"""

from __future__ import annotations

from torch import Tensor

from hybridkv.kernels.backend import has_pdl, tl, triton

FEW_TOKENS = 8
MANY_TOKENS = 64  # as many as linear_rows takes


def can_overlap(x: Tensor, max_tokens: int | None = FEW_TOKENS) -> bool:
    """Whether a kernel on x [T, ...] is launched with PDL: up to `max_tokens` tokens; None: with any number."""
    return (max_tokens is None or len(x) <= max_tokens) and has_pdl(x.device)


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Before this call a kernel reads nothing that the step computes, and writes nothing."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
