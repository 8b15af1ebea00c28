"""From a GGUF file's tensors to Hugging Face tensors.

An architecture is a table of rows: stored name, canonical name, shape, and what undoes the converter's change. The rows
are the family's (`GgufArchitecture.add_layer`); this file has the machinery and the changes that can be undone. The
table is compared with the file at once: a tensor that is missing, has another shape, or that no row explains is an
error, so that a model is never loaded in part. The only values read here are those of `rope_freqs.weight`, which belong
to the config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hybridkv.checkpoint.gguf_architecture import Config, GgufArchitecture
from hybridkv.checkpoint.gguf_config import Keys, find_architecture, gguf_config
from hybridkv.checkpoint.gguf_file import DEQUANTISED, KEPT, GgufFile
from hybridkv.checkpoint.recipe import Recipe
from hybridkv.errors import ModelFileError, UnsupportedModel

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class GgufModel:
    config: Config
    recipes: dict[str, Recipe]  # canonical name -> how to make it
    set_aside: dict[str, int]  # why -> how many tensors are recognised and not loaded


# --- undoing the converter ------------------------------------------------------------------------------------------


def unpermute(w: Tensor, heads: int) -> Tensor:
    """Interleaved RoPE rows (2i, 2i+1) of each head -> half-split rows (i, i + D/2). w: [heads*D, ...]"""
    return w.reshape(heads, -1, 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape)


def group_heads(w: Tensor, k_heads: int, v_heads: int, dim: int = 0, skip: int = 0) -> Tensor:
    """V heads tiled -> grouped along `dim`, leaving the first `skip` entries (the q and k channels) where they are."""
    if k_heads == v_heads:
        return w
    import torch

    fixed, heads = w.split([skip, w.shape[dim] - skip], dim)
    tiled = heads.unflatten(dim, (v_heads // k_heads, k_heads, -1))  # [.., R, Hk, D, ..]
    return torch.cat([fixed, tiled.transpose(dim, dim + 1).reshape(heads.shape)], dim)


def less_one(w: Tensor) -> Tensor:
    return w.float() - 1


def log_decay(ssm_a: Tensor) -> Tensor:
    return (-ssm_a.float()).log()


def interleave_qkvz(qkv: Tensor, z: Tensor, k_heads: int, k_dim: int, v_dim: int) -> Tensor:
    """q|k|v rows and z rows -> per K head its q, k, and the v and z of its V heads. k_dim, v_dim: of all heads."""
    import torch

    parts = [*qkv.split([k_dim, k_dim, v_dim]), z]
    return torch.cat([part.unflatten(0, (k_heads, -1)) for part in parts], dim=1).flatten(0, 1)


MOVES = (unpermute, group_heads, interleave_qkvz)  # rows or columns change places, and nothing else


def moved_heads(recipe: Recipe) -> int | None:
    """Into how many equal parts a matrix's columns are divided to change places. 1: they stay; None: the recipe does
    more than change places.
    """
    if recipe.experts or len(recipe.shape) != 2:
        return None
    if recipe.make is None:
        return 1
    if not isinstance(recipe.make, partial) or recipe.make.func not in MOVES:
        return None
    known = recipe.make.keywords
    return known["v_heads"] if known.get("dim") == 1 and known["k_heads"] != known["v_heads"] else 1


def orders(recipe: Recipe, rows: list[int]) -> tuple[Tensor | None, Tensor | None]:
    """Permutations of the parts' rows and of the heads among the columns; None: they stay."""
    import torch

    heads, make = moved_heads(recipe), recipe.make
    assert heads is not None
    if make is None:
        return None, None
    if heads > 1:
        return None, make(torch.arange(heads), dim=0)
    return make(*torch.arange(sum(rows)).split(rows)), None


# --- tensors --------------------------------------------------------------------------------------------------------

# stored name, canonical name, its shape in letters (a 1 is not stored), and what undoes the converter
Row = tuple[str, str, str] | tuple[str, str, str, Callable[["torch.Tensor"], "torch.Tensor"]]

GATED_MLP: tuple[Row, ...] = (
    ("ffn_gate.weight", "mlp.gate_proj.weight", "F H"),
    ("ffn_up.weight", "mlp.up_proj.weight", "F H"),
    ("ffn_down.weight", "mlp.down_proj.weight", "H F"),
)


def common_sizes(config: Config) -> dict[str, int]:
    """The letters of every decoder's shapes."""
    queries = config["num_attention_heads"] * config["head_dim"]
    return {
        "1": 1,
        "H": config["hidden_size"],
        "V": config["vocab_size"],
        "D": config["head_dim"],
        "D/2": config["head_dim"] // 2,
        "Q": queries,
        "2Q": 2 * queries,
        "K": config["num_key_value_heads"] * config["head_dim"],
        "F": config.get("intermediate_size", 0),
    }


class Table:
    """The recipes of one file, each part of them looked up and measured as it is added."""

    def __init__(self, file: GgufFile, sizes: dict[str, int]) -> None:
        self.file, self.sizes, self.where = file, sizes, repr(str(file.path))
        self.recipes: dict[str, Recipe] = {}
        self.used: set[str] = set()

    def shape(self, letters: str) -> tuple[int, ...]:
        return tuple(self.sizes[letter] for letter in letters.split())

    def part(self, stored: str, letters: str) -> str:
        tensor = self.file.tensors.get(stored)
        if tensor is None:
            raise ModelFileError(f"{self.where}: the tensor {stored!r} is missing")
        expected = self.shape(" ".join(letter for letter in letters.split() if letter != "1"))
        if _plain(tensor.shape) != _plain(expected):
            raise ModelFileError(
                f"{self.where}: tensor {stored!r} has shape {list(tensor.shape)}, the keys ask for {list(expected)}"
            )
        if tensor.type not in KEPT and tensor.type not in DEQUANTISED:
            raise UnsupportedModel(f"{self.where}: tensor {stored!r} is of type {tensor.type.name}, which is not read")
        self.used.add(stored)
        return stored

    def add(self, row: Row, layer: int | None = None) -> None:
        """A tensor outside the layers or, with names relative to it, of one layer."""
        stored, canonical, letters, *undo = row
        if layer is not None:
            stored, canonical = f"blk.{layer}.{stored}", f"model.layers.{layer}.{canonical}"
        parts = (self.part(stored, letters),)
        self.recipes[canonical] = Recipe(parts, self.shape(letters), undo[0] if undo else None)

    def add_rows(self, layer: int, rows: Sequence[Row]) -> None:
        for row in rows:
            self.add(row, layer)

    def has(self, layer: int, stored: str) -> bool:
        return f"blk.{layer}.{stored}" in self.file.tensors


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without leading ones: GGUF does not tell [H] from [1, H]."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


def map_gguf(file: GgufFile, known: Mapping[str, GgufArchitecture]) -> GgufModel:
    arch = find_architecture(file, known)
    keys = Keys(file, arch.name)
    config = gguf_config(keys, arch)
    table = Table(file, common_sizes(config) | arch.sizes(config))
    table.add(("token_embd.weight", "model.embed_tokens.weight", "V H"))
    if arch.undo_norm is None:
        table.add(("output_norm.weight", "model.norm.weight", "H"))
    else:
        table.add(("output_norm.weight", "model.norm.weight", "H", arch.undo_norm))
    if not config["tie_word_embeddings"]:
        table.add(("output.weight", "lm_head.weight", "V H"))
    for layer in range(keys.layers):
        arch.add_layer(table, config, layer)
    if arch.rope_factors and "rope_freqs.weight" in file.tensors:
        config["rope_parameters"]["freq_factors"] = _rope_factors(table)
    return GgufModel(config, table.recipes, _set_aside(table, config["model_type"], keys))


def _rope_factors(table: Table) -> list[float]:
    """What the frequencies of llama-3 RoPE are divided by, one for each pair of dimensions."""
    factors = table.file.numbers(table.file.tensors[table.part("rope_freqs.weight", "D/2")])
    if not bool(np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelFileError(f"{table.where}: rope_freqs.weight holds a value that is not a positive number")
    return factors.flatten().tolist()


def _set_aside(table: Table, model_type: str, keys: Keys) -> dict[str, int]:
    """Account for the tensors that no recipe uses; one that nothing explains is an error."""
    aside: dict[str, int] = {}
    spare = tuple(f"blk.{block}." for block in range(keys.layers, keys.blocks))
    for name in table.file.tensors:
        if name in table.used:
            continue
        if spare and name.startswith(spare):
            why = "mtp"
        elif name.endswith((".attn_rot_embd.weight", ".rope_freqs.weight")):
            why = "rotary"
        else:
            raise ModelFileError(f"{table.where}: the tensor {name!r} is not part of a {model_type} model")
        aside[why] = aside.get(why, 0) + 1
    return aside
