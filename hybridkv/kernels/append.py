"""append: this step's keys and values into their pages.

Every new entry has a flat index `page * P + offset`, worked out once a step for all layers. Storage rounding happens
here (round to nearest even into the pool's dtype), so attention always reads what was stored.
"""

from __future__ import annotations

from torch import Tensor


def append_ref(
    k_pool: Tensor,  # [N, P, D]
    v_pool: Tensor,  # [N, P, D]
    k: Tensor,  # [T, G, D]
    v: Tensor,  # [T, G, D]
    entry_index: Tensor,  # [G, T] int64, all different
) -> None:
    for pool, new in ((k_pool, k), (v_pool, v)):
        pool.view(-1, pool.shape[-1])[entry_index] = new.transpose(0, 1).to(pool.dtype)


append = append_ref
