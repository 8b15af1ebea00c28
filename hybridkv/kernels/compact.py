"""compact: entries of a pool from one place to another, byte for byte, any dtype. Sources and targets may overlap."""

from __future__ import annotations

from torch import Tensor


def compact_ref(
    pool: Tensor,  # [N, P, ...]
    source: Tensor,  # [n] int64 flat entries page * P + offset
    target: Tensor,  # [n] int64, all different
) -> None:
    flat = pool.view(-1, *pool.shape[2:])
    flat[target] = flat[source]  # the right side is gathered whole before anything is written


compact = compact_ref
