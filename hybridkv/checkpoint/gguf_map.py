"""From a GGUF file's tensors to Hugging Face tensors, for the architectures we run.

Each architecture is a table of rows: stored name, canonical name, shape, and what undoes the converter's change. The
table is held against the file at once: a tensor that is missing, has another shape, or that no row explains is an
error, so that nothing is loaded by halves. No values are read here but `rope_freqs.weight`, a part of the config.

What llama.cpp's converter does, and these rows undo:
    llama      rows of q and k re-ordered inside each head for interleaved RoPE pairs
    qwen*      norm weights stored as 1 + w (not linear_attn.norm); ssm_a = -exp(A_log); conv1d [C, 1, W] -> [C, W]
    qwen35*    V heads grouped by K head (g*R + j) -> tiled (j*Hk + g), where Hk K heads serve R = Hv/Hk V heads each
    qwen3next  in_proj_qkvz, interleaved per K head, split into attn_qkv and attn_gate (older files: kept, as ssm_in)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridkv.checkpoint.gguf_config import gguf_config
from hybridkv.checkpoint.gguf_file import DEQUANTISED, KEPT, GgufFile
from hybridkv.errors import ModelFileError, UnsupportedModel


@dataclass(frozen=True)
class Recipe:
    """How one canonical tensor is made from stored ones."""

    parts: tuple[str, ...]  # stored names, in the order `make` takes them
    shape: tuple[int, ...]  # of the result
    make: Callable[..., Tensor] | None = None  # None: the only part as it is
    experts: int = 0  # E > 0: the rows of all parts, one after the other for each expert, make [E, rows, columns]


@dataclass(frozen=True)
class GgufModel:
    config: dict[str, Any]
    recipes: dict[str, Recipe]  # canonical name -> how to make it
    set_aside: dict[str, int]


# --- undoing the converter ------------------------------------------------------------------------------------------


def unpermute(w: Tensor, heads: int) -> Tensor:
    """Interleaved RoPE rows (2i, 2i+1) of each head -> half-split rows (i, i + D/2). w: [heads*D, ...]"""
    return w.reshape(heads, -1, 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape)


def group_heads(w: Tensor, k_heads: int, v_heads: int, dim: int = 0, skip: int = 0) -> Tensor:
    """V heads tiled -> grouped along `dim`, leaving the first `skip` entries (the q and k channels) where they are."""
    if k_heads == v_heads:
        return w
    fixed, heads = w.split([skip, w.shape[dim] - skip], dim)
    tiled = heads.unflatten(dim, (v_heads // k_heads, k_heads, -1))  # [.., R, Hk, D, ..]
    return torch.cat([fixed, tiled.transpose(dim, dim + 1).reshape(heads.shape)], dim)


def less_one(w: Tensor) -> Tensor:
    return w.float() - 1


def log_decay(ssm_a: Tensor) -> Tensor:
    return torch.log(-ssm_a.float())


def interleave_qkvz(qkv: Tensor, z: Tensor, k_heads: int, k_dim: int, v_dim: int) -> Tensor:
    """q|k|v rows and z rows -> per K head its q, k, and the v and z of its V heads. k_dim, v_dim: of all heads."""
    parts = [*qkv.split([k_dim, k_dim, v_dim]), z]
    return torch.cat([part.unflatten(0, (k_heads, -1)) for part in parts], dim=1).flatten(0, 1)


MOVES = (unpermute, group_heads, interleave_qkvz)  # rows or columns change places, and nothing else


def moved_heads(recipe: Recipe) -> int | None:
    """In how many equal parts a matrix's columns change places: 1, they stay; None: more is done than that."""
    if recipe.experts or len(recipe.shape) != 2:
        return None
    if recipe.make is None:
        return 1
    if not isinstance(recipe.make, partial) or recipe.make.func not in MOVES:
        return None
    known = recipe.make.keywords
    return known["v_heads"] if known.get("dim") == 1 and known["k_heads"] != known["v_heads"] else 1


def orders(recipe: Recipe, rows: list[int]) -> tuple[Tensor | None, Tensor | None]:
    """Which of the parts' rows, and which of the columns' heads, stands at each place; None: they stay."""
    heads, make = moved_heads(recipe), recipe.make
    assert heads is not None
    if make is None:
        return None, None
    if heads > 1:
        return None, make(torch.arange(heads), dim=0)
    return make(*torch.arange(sum(rows)).split(rows)), None


# --- tensors --------------------------------------------------------------------------------------------------------

# stored name, canonical name, its shape in the letters of _sizes (a 1 is not stored), and what undoes the converter
Row = tuple[str, str, str] | tuple[str, str, str, Callable[[Tensor], Tensor]]


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    sizes = {
        "1": 1,
        "H": config["hidden_size"],
        "V": config["vocab_size"],
        "D": config["head_dim"],
        "D/2": config["head_dim"] // 2,
        "Q": config["num_attention_heads"] * config["head_dim"],
        "K": config["num_key_value_heads"] * config["head_dim"],
        "F": config.get("intermediate_size", 0),
    }
    sizes["2Q"] = 2 * sizes["Q"]
    if "layer_types" in config:
        gk = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        gv = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        sizes |= {"N": config["linear_num_value_heads"], "2N": 2 * config["linear_num_value_heads"]}
        sizes |= {"Z": gv, "C": 2 * gk + gv, "P": 2 * gk + 2 * gv, "d": config["linear_value_head_dim"]}
        sizes["W"] = config["linear_conv_kernel_dim"]
    if "num_experts" in config:
        sizes |= {"E": config["num_experts"], "I": config["moe_intermediate_size"]}
        sizes |= {"2I": 2 * config["moe_intermediate_size"], "S": config["shared_expert_intermediate_size"]}
    return sizes


_DENSE: list[Row] = [
    ("ffn_gate.weight", "mlp.gate_proj.weight", "F H"),
    ("ffn_up.weight", "mlp.up_proj.weight", "F H"),
    ("ffn_down.weight", "mlp.down_proj.weight", "H F"),
]


def _llama_rows(config: Mapping[str, Any], stored: set[str]) -> list[Row]:
    q = partial(unpermute, heads=config["num_attention_heads"])
    k = partial(unpermute, heads=config["num_key_value_heads"])
    rows: list[Row] = [
        ("attn_norm.weight", "input_layernorm.weight", "H"),
        ("ffn_norm.weight", "post_attention_layernorm.weight", "H"),
        ("attn_q.weight", "self_attn.q_proj.weight", "Q H", q),
        ("attn_k.weight", "self_attn.k_proj.weight", "K H", k),
        ("attn_v.weight", "self_attn.v_proj.weight", "K H"),
        ("attn_output.weight", "self_attn.o_proj.weight", "H Q"),
        *_DENSE,
    ]
    biases: list[Row] = [
        ("attn_q.bias", "self_attn.q_proj.bias", "Q", q),
        ("attn_k.bias", "self_attn.k_proj.bias", "K", k),
        ("attn_v.bias", "self_attn.v_proj.bias", "K"),
        ("attn_output.bias", "self_attn.o_proj.bias", "H"),
        ("ffn_gate.bias", "mlp.gate_proj.bias", "F"),
        ("ffn_up.bias", "mlp.up_proj.bias", "F"),
        ("ffn_down.bias", "mlp.down_proj.bias", "H"),
    ]
    return rows + [row for row in biases if row[0] in stored]


def _qwen_rows(config: Mapping[str, Any], layer: int) -> list[Row]:
    rows: list[Row] = [
        ("attn_norm.weight", "input_layernorm.weight", "H", less_one),
        ("post_attention_norm.weight", "post_attention_layernorm.weight", "H", less_one),
    ]
    if "num_experts" in config:
        rows += [
            ("ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight", "S H"),
            ("ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight", "S H"),
            ("ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight", "H S"),
            ("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", "1 H"),
            ("ffn_gate_inp.weight", "mlp.gate.weight", "E H"),
            ("ffn_down_exps.weight", "mlp.experts.down_proj", "E H I"),
        ]
    else:
        rows += _DENSE
    if config["layer_types"][layer] == "full_attention":
        return rows + [
            ("attn_q.weight", "self_attn.q_proj.weight", "2Q H"),
            ("attn_k.weight", "self_attn.k_proj.weight", "K H"),
            ("attn_v.weight", "self_attn.v_proj.weight", "K H"),
            ("attn_output.weight", "self_attn.o_proj.weight", "H Q"),
            ("attn_q_norm.weight", "self_attn.q_norm.weight", "D", less_one),
            ("attn_k_norm.weight", "self_attn.k_norm.weight", "D", less_one),
        ]
    k_heads, v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    # tiled V heads are qwen35's; with k_heads = v_heads the re-ordering is the identity
    group = partial(group_heads, k_heads=k_heads if config["model_type"] != "qwen3_next" else v_heads, v_heads=v_heads)
    channels = partial(group, skip=2 * k_heads * config["linear_key_head_dim"])
    rows += [
        ("ssm_conv1d.weight", "linear_attn.conv1d.weight", "C 1 W", channels),
        ("ssm_dt.bias", "linear_attn.dt_bias", "N", group),
        ("ssm_a", "linear_attn.A_log", "N", lambda w: log_decay(group(w))),
        ("ssm_norm.weight", "linear_attn.norm.weight", "d"),
        ("ssm_out.weight", "linear_attn.out_proj.weight", "H Z", partial(group, dim=1)),
    ]
    if config["model_type"] == "qwen3_next":
        return rows + [("ssm_ba.weight", "linear_attn.in_proj_ba.weight", "2N H")]
    return rows + [
        ("attn_qkv.weight", "linear_attn.in_proj_qkv.weight", "C H", channels),
        ("attn_gate.weight", "linear_attn.in_proj_z.weight", "Z H", group),
        ("ssm_alpha.weight", "linear_attn.in_proj_a.weight", "N H", group),
        ("ssm_beta.weight", "linear_attn.in_proj_b.weight", "N H", group),
    ]


class _Table:
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

    def add(self, prefix: str, target: str, row: Row) -> None:
        stored, canonical, letters, *undo = row
        parts = (self.part(prefix + stored, letters),)
        self.recipes[target + canonical] = Recipe(parts, self.shape(letters), undo[0] if undo else None)


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without leading ones: GGUF does not tell [H] from [1, H]."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


def map_gguf(file: GgufFile) -> GgufModel:
    config, blocks = gguf_config(file)
    llama, next_ = (config["model_type"] == name for name in ("llama", "qwen3_next"))
    trunk = config["num_hidden_layers"]
    table = _Table(file, _sizes(config))
    norm: Row = ("output_norm.weight", "model.norm.weight", "H")
    norm_less_one: Row = ("output_norm.weight", "model.norm.weight", "H", less_one)
    table.add("", "", ("token_embd.weight", "model.embed_tokens.weight", "V H"))
    table.add("", "", norm if llama else norm_less_one)
    if not config["tie_word_embeddings"]:
        table.add("", "", ("output.weight", "lm_head.weight", "V H"))
    biases = [name for name in file.tensors if name.endswith(".bias")]
    for layer in range(trunk):
        prefix, target = f"blk.{layer}.", f"model.layers.{layer}."
        if llama:
            rows = _llama_rows(config, {name.removeprefix(prefix) for name in biases if name.startswith(prefix)})
        else:
            rows = _qwen_rows(config, layer)
        for row in rows:
            table.add(prefix, target, row)
        if "num_experts" in config:
            _add_experts(table, prefix, target + "mlp.experts.gate_up_proj")
        if next_ and config["layer_types"][layer] == "linear_attention":
            _add_qkvz(table, config, prefix, target + "linear_attn.in_proj_qkvz.weight")
    return GgufModel(config, table.recipes, _set_aside(table, config, blocks))


def _add_experts(table: _Table, prefix: str, canonical: str) -> None:
    """gate_up_proj [E, 2I, H], from one stored tensor or from two."""
    if (fused := prefix + "ffn_gate_up_exps.weight") in table.file.tensors:
        table.add("", "", (fused, canonical, "E 2I H"))
        return
    parts = tuple(table.part(f"{prefix}ffn_{name}_exps.weight", "E I H") for name in ("gate", "up"))
    table.recipes[canonical] = Recipe(parts, table.shape("E 2I H"), experts=table.sizes["E"])


def _add_qkvz(table: _Table, config: Mapping[str, Any], prefix: str, canonical: str) -> None:
    """qwen3next: the projection as Hugging Face has it, whole (ssm_in) or put together again."""
    if (whole := prefix + "ssm_in.weight") in table.file.tensors:
        table.add("", "", (whole, canonical, "P H"))
        return
    parts = (table.part(prefix + "attn_qkv.weight", "C H"), table.part(prefix + "attn_gate.weight", "Z H"))
    k_heads = config["linear_num_key_heads"]
    k_dim = k_heads * config["linear_key_head_dim"]
    make = partial(interleave_qkvz, k_heads=k_heads, k_dim=k_dim, v_dim=table.sizes["Z"])
    table.recipes[canonical] = Recipe(parts, table.shape("P H"), make)


def _rope_factors(table: _Table) -> list[float]:
    """What the frequencies of llama-3 RoPE are divided by, one for each pair of dimensions."""
    factors = table.file.dequantise(table.file.tensors[table.part("rope_freqs.weight", "D/2")]).float()
    if not bool(torch.isfinite(factors).all() and (factors > 0).all()):
        raise ModelFileError(f"{table.where}: rope_freqs.weight holds a value that is not a positive number")
    return factors.flatten().tolist()


def _set_aside(table: _Table, config: dict[str, Any], blocks: int) -> dict[str, int]:
    """Account for the tensors no recipe uses; one that nothing explains is an error."""
    aside: dict[str, int] = {}
    spare = tuple(f"blk.{layer}." for layer in range(config["num_hidden_layers"], blocks))
    for name in table.file.tensors:
        if name in table.used:
            continue
        if spare and name.startswith(spare):
            aside["mtp"] = aside.get("mtp", 0) + 1
        elif name == "rope_freqs.weight" and config["model_type"] == "llama":
            config["rope_parameters"]["freq_factors"] = _rope_factors(table)
        elif name.endswith((".attn_rot_embd.weight", ".rope_freqs.weight")):
            aside["rotary"] = aside.get("rotary", 0) + 1
        else:
            raise ModelFileError(f"{table.where}: the tensor {name!r} is not part of a {config['model_type']} model")
    return aside
