"""append: this step's keys and values into their pages.

Every new entry has a flat index `page * P + offset`, worked out once a step for all layers. Storage rounding happens
here (round to nearest even into the pool's dtype), so attention always reads what was stored.
"""

from __future__ import annotations

from torch import Tensor

from hybridkv.kernels.quant import Fp8Pages, Pages, fp8_encode


def append_ref(
    k_pool: Pages,  # [N, P, D]
    v_pool: Pages,  # [N, P, D]
    k: Tensor,  # [T, G, D]
    v: Tensor,  # [T, G, D]
    entry_index: Tensor,  # [G, T] int64, all different
) -> None:
    for pool, new in ((k_pool, k.transpose(0, 1)), (v_pool, v.transpose(0, 1))):  # [G, T, D]
        if isinstance(pool, Fp8Pages):
            codes, scale = fp8_encode(new)
            pool.codes.view(-1, pool.codes.shape[-1])[entry_index] = codes
            pool.scale.view(-1)[entry_index] = scale
        else:
            pool.view(-1, pool.shape[-1])[entry_index] = new.to(pool.dtype)


append = append_ref
