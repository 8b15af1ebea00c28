"""A rank's part of matrices that are codes with a scale for each block: its form, and how experts are cut. No torch.

Codes are cut as any matrix is, and keep the scales that they have in the whole model. A cut inside of a block makes the
part's blocks smaller, each with the scale of the block it lies in: rows at any row, columns while blocks keep 32 of
them (block_form.py). Where they do not, a matrix is dequantised, as those of a GGUF file are; experts, which are most
of a model, are dealt out whole instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hybridkv.errors import HybridKVError
from hybridkv.kernels.linear.block_form import LEAST_COLUMNS, BlockForm
from hybridkv.models.config import ModelConfig
from hybridkv.models.inventory import Has
from hybridkv.models.registry import family_of
from hybridkv.parallel.cuts import Cut, Shape, cut_of
from hybridkv.parallel.shard import Shard, sizes_that_work

Forms = Mapping[str, BlockForm]
EXPERTS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")


def part_form(form: BlockForm, cut: Cut | None, shape: Shape) -> BlockForm | None:
    """Of a part of a matrix, or of a stack of them, of this shape; None: products do not read it as codes."""
    if cut is None or cut.dim == len(shape) - 3:  # whole matrices
        return form
    if cut.dim == len(shape) - 2:
        return form.part(rows=cut.spans)
    if any(begin * form.bits % 8 or end * form.bits % 8 for begin, end in cut.spans):
        return None
    found = form.part(columns=cut.spans)
    return found if found.kept else None


def rank_forms(config: ModelConfig, shard: Shard, has: Has, forms: Forms) -> dict[str, BlockForm]:
    """Name -> form of all that a rank keeps as codes. `config`, `forms`: of the whole model."""
    found = {}
    for weight in family_of(config).weights(config, has):
        if weight.name in forms:
            cut = cut_of(config, shard, weight.name, weight.shape)
            form = part_form(forms[weight.name], cut, weight.shape)
            if form is not None:
                found[weight.name] = form
    return found


def block_shard(config: ModelConfig, shard: Shard, has: Has, forms: Forms) -> Shard:
    """How a model is cut some of whose matrices are codes: widths at borders that codes allow; experts by width where
    there are such borders, else whole ones. HybridKVError with the numbers of ranks that work where neither is so.
    """
    if not forms:
        return shard
    shard = replace(shard, block=LEAST_COLUMNS)
    how = _how(config, shard, has, forms)
    if how is not None:
        return how
    works = [n for n in sizes_that_work(config) if _how(config, replace(shard, rank=0, size=n), has, forms) is not None]
    other = f"use {', '.join(map(str, works))} or 1" if works else "use 1"
    experts, width = _experts(config)
    by_width = f"its expert width of {width} has no borders of {LEAST_COLUMNS} columns for that"
    whole = "" if shard.experts == "width" else f", and its {experts} experts are too few to be dealt out"
    raise HybridKVError(
        f"tp={shard.size} does not fit the codes of this {config.architecture} model: {by_width}{whole}; {other}"
    )


def _experts(config: ModelConfig) -> tuple[int, int]:
    """How many, and their width."""
    if config.v4 is not None:
        return config.v4.experts, config.v4.expert_width
    return (0, 0) if config.moe is None else (config.moe.experts, config.moe.intermediate)


def _how(config: ModelConfig, shard: Shard, has: Has, forms: Forms) -> Shard | None:
    """By width if all ranks keep the codes of all experts, else whole experts if there are enough; None: neither."""
    if shard.by_width(config):
        weights = (weight for weight in family_of(config).weights(config, has) if weight.name in forms)
        stacks = {(w.shape, forms[w.name]): w.name for w in weights if w.name.endswith(EXPERTS)}  # layers are alike
        parts = [
            part_form(form, cut_of(config, replace(shard, rank=rank), name, shape), shape)
            for (shape, form), name in stacks.items()
            for rank in range(shard.size)
        ]
        if None not in parts:
            return shard
    if shard.experts == "width" or _experts(config)[0] < shard.size:
        return None
    return replace(shard, experts="whole")
