"""Bytes of the weights that a rank holds, from the list of weights and the table of cuts, and whether it keeps what was
read for others. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from hybridkv.checkpoint.gguf_planes import columns_fit
from hybridkv.config import CacheConfig, ReuseConfig
from hybridkv.eviction.sizes import spread_of
from hybridkv.kernels.linear.packed_planes import plane_bytes
from hybridkv.models.config import ModelConfig
from hybridkv.models.inventory import Has
from hybridkv.models.registry import family_of
from hybridkv.parallel.block_parts import Forms, rank_forms
from hybridkv.parallel.cuts import cut_of, share_of
from hybridkv.parallel.shard import Shard
from hybridkv.planner import model_bytes

PackedCuts = Mapping[str, tuple[tuple[int, int], int]]  # gguf_planes.column_steps


def rank_packed_bytes(config: ModelConfig, shard: Shard, has: Has, cuts: PackedCuts) -> dict[str, int]:
    """Name -> bytes of the planes of a rank's part, for all matrices of a GGUF file that can stay packed there."""
    found = {}
    for weight in family_of(config).weights(config, has):
        if weight.kind != "matrix" or weight.name not in cuts:
            continue
        (bits, each), step = cuts[weight.name]
        cut = cut_of(config, shard, weight.name, weight.shape)
        if cut is not None and cut.columns is not None and not columns_fit((bits, each), step, *cut.columns):
            continue
        rows, columns = weight.shape if cut is None else cut.shape(weight.shape)
        found[weight.name] = rows * sum(plane_bytes(bits, columns, each))
    return found


def rank_model_bytes(
    config: ModelConfig,
    shard: Shard,
    has: Has,
    dtype: str,
    device: str,
    fp8: bool = False,
    cuts: PackedCuts | None = None,  # of a GGUF file whose matrices stay packed
    half: bool = False,
    exact: bool = False,
    blocks: Forms | None = None,  # of a checkpoint whose matrices stay codes
) -> int:
    """`planner.model_bytes` of one rank. `config`, `blocks`: of the whole model."""
    packed = None if cuts is None else rank_packed_bytes(config, shard, has, cuts)
    share = partial(share_of, config, shard, exact=exact)
    coded = None if blocks is None else rank_forms(config, shard, has, blocks)
    return model_bytes(config, has, dtype, device, fp8, packed, half, share=share, blocks=coded)


def block_of(cuts: PackedCuts) -> int:
    """Columns at whose multiples every packed feed-forward matrix can be cut: `Shard.block`."""
    return max((step for name, (_, step) in cuts.items() if name.endswith("mlp.down_proj.weight")), default=1)


def reuse_over_ranks(reuse: ReuseConfig | None, cache: CacheConfig) -> ReuseConfig | None:
    """What is kept for others: nothing where heads share the budget of all requests, since ranks then give up unlike
    numbers of pages.
    """
    shared = cache.eviction is not None and spread_of(cache.policy) == "heads" and cache.scope == "head"
    return None if shared or cache.keep_turns is not None else reuse
