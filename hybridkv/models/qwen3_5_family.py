"""Qwen3.5 (dense and mixture of experts) and Qwen3-Next: their configs, caches, weights and files.

The generations compute the same and differ in how the DeltaNet projections are stored (qwen3_5.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from hybridkv.checkpoint.layouts import FolderLayout
from hybridkv.checkpoint.quantisation import stored_as, weight_name
from hybridkv.models import inventory
from hybridkv.models.config import ModelConfig
from hybridkv.models.family import NO_INDEX, Family
from hybridkv.models.inventory import Has, Weight, linear, vector
from hybridkv.models.qwen3_5_config import NEXT_QUANTISED, QUANTISED, parse_qwen3_5
from hybridkv.models.qwen3_5_gguf import QWEN3_NEXT, QWEN35, QWEN35_MOE
from hybridkv.models.schemas import gdn_schema

if TYPE_CHECKING:
    from hybridkv.checkpoint.safetensors_file import SafetensorsFile
    from hybridkv.checkpoint.safetensors_store import SafetensorsStore


def weights(config: ModelConfig, has: Has) -> Iterator[Weight]:
    """Every tensor that is loaded."""
    attention = set(config.attention_layers)
    for i in range(config.layers):
        name = f"model.layers.{i}"
        yield from inventory.layer_norms(config, name)
        if i in attention:
            yield from inventory.attention(config, has, f"{name}.self_attn", normed=True, gated=True)
        else:
            yield from _deltanet(config, has, f"{name}.linear_attn")
        yield from _feed_forward(config, has, f"{name}.mlp", i)
    yield from inventory.ends(config, has)


def _deltanet(config: ModelConfig, has: Has, name: str) -> Iterator[Weight]:
    d, hidden = config.gdn, config.hidden
    assert d is not None
    values = d.value_heads * d.value_dim
    yield vector(f"{name}.conv1d.weight", d.channels, 1, d.kernel_width)
    yield vector(f"{name}.A_log", d.value_heads)
    yield vector(f"{name}.dt_bias", d.value_heads)
    yield vector(f"{name}.norm.weight", d.value_dim)
    parts: list[tuple[str, int]] = []
    if has(f"{name}.in_proj_qkvz.weight"):
        parts += [(f"{name}.in_proj_qkvz", d.channels + values)]
    else:
        parts += [(f"{name}.in_proj_qkv", d.channels), (f"{name}.in_proj_z", values)]
    if has(f"{name}.in_proj_ba.weight"):
        parts += [(f"{name}.in_proj_ba", 2 * d.value_heads)]
    else:
        parts += [(f"{name}.in_proj_b", d.value_heads), (f"{name}.in_proj_a", d.value_heads)]
    yield from linear(has, hidden, *parts)
    tiled = config.architecture != "qwen3_next" and d.key_heads != d.value_heads  # V heads, by llama.cpp's converter
    yield from linear(has, values, (f"{name}.out_proj", hidden), column_heads=d.value_heads if tiled else 1)


def _feed_forward(config: ModelConfig, has: Has, name: str, layer: int) -> Iterator[Weight]:
    moe, hidden = config.moe, config.hidden
    if moe is None or layer in moe.dense_layers:
        yield from inventory.gated_mlp(has, name, hidden, config.intermediate)
        return
    yield Weight(f"{name}.gate.weight", (moe.experts, hidden), "plain", widened=True)
    yield Weight(f"{name}.experts.gate_up_proj", (moe.experts, 2 * moe.intermediate, hidden), "experts")
    yield Weight(f"{name}.experts.down_proj", (moe.experts, hidden, moe.intermediate), "experts")
    yield from inventory.gated_mlp(has, f"{name}.shared_expert", hidden, moe.shared_intermediate)
    yield Weight(f"{name}.shared_expert_gate.weight", (1, hidden), "plain", widened=True)


def _rename(name: str) -> str:
    from hybridkv.checkpoint.checkpoint import hugging_face_name

    return hugging_face_name(weight_name(name))


def _open_store(
    files: list[SafetensorsFile], quantised: object, methods: Sequence[str] = QUANTISED
) -> SafetensorsStore:
    """A folder as Hugging Face writes it, or one whose matrices are codes with block scales."""
    from hybridkv.checkpoint.deepseek_quant import QuantisedStore
    from hybridkv.checkpoint.safetensors_store import SafetensorsStore

    return QuantisedStore(files, stored_as(quantised, methods)) if quantised else SafetensorsStore(files)


DENSE = Family(
    name="qwen3_5",
    model_types=("qwen3_5", "qwen3_5_text"),
    parse=partial(parse_qwen3_5, architecture="qwen3_5", has_experts=False),
    cache_schema=gdn_schema,
    weights=weights,
    module="hybridkv.models.qwen3_5",
    gguf=(QWEN35,),
    folder=FolderLayout(_rename, _open_store),
    refuses={"index_dtype": NO_INDEX},
)
MOE = Family(
    name="qwen3_5_moe",
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    parse=partial(parse_qwen3_5, architecture="qwen3_5_moe", has_experts=True),
    cache_schema=gdn_schema,
    weights=weights,
    module="hybridkv.models.qwen3_5",
    gguf=(QWEN35_MOE,),
    folder=FolderLayout(_rename, _open_store),
    refuses={"index_dtype": NO_INDEX},
)
NEXT = Family(
    name="qwen3_next",
    model_types=("qwen3_next",),
    parse=partial(parse_qwen3_5, architecture="qwen3_next", has_experts=True),
    cache_schema=gdn_schema,
    weights=weights,
    module="hybridkv.models.qwen3_5",
    gguf=(QWEN3_NEXT,),
    folder=FolderLayout(_rename, partial(_open_store, methods=NEXT_QUANTISED)),
    refuses={"index_dtype": NO_INDEX},
)
