"""DeepSeek-V4: its configs, cache, weights and files. The forward pass is in deepseek_v4.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hybridkv.cache.compressed_schema import CompressedSpec, compressed_schema
from hybridkv.cache.schema import CacheSchema
from hybridkv.checkpoint.config_reader import Reader
from hybridkv.checkpoint.deepseek_names import deepseek_name
from hybridkv.checkpoint.layouts import FolderLayout
from hybridkv.checkpoint.quantisation import FP8, stored_as
from hybridkv.config import CacheConfig
from hybridkv.dtypes import dtype_name
from hybridkv.errors import ModelFileError
from hybridkv.kernels.linear.block_form import RELEASED_FP4, RELEASED_FP8, BlockForm
from hybridkv.models.config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, ModelConfig, token_ids
from hybridkv.models.deepseek_config import DeepseekV4Config, parse_deepseek_v4
from hybridkv.models.family import NO_STATE, Family
from hybridkv.models.inventory import Has, Weight, linear, vector

if TYPE_CHECKING:
    import torch

    from hybridkv.checkpoint.deepseek_quant import QuantisedStore
    from hybridkv.checkpoint.safetensors_file import SafetensorsFile

_RELEASED_FP8 = re.compile(
    r".+\.(self_attn\.(q_a|q_b|kv|o_a|o_b)_proj|compressor\.indexer\.q_b_proj|shared_experts\.\w+_proj)\.weight"
)
INDEX_BESIDE = {"f32": "f32", "bf16": "bf16"}  # format of index keys by that of entries; others: mxfp4, as trained


def parse(read: Reader) -> ModelConfig:
    """A `config.json` of this family, checked."""
    layers = read.size("num_hidden_layers", limit=MAX_LAYERS)
    heads, head_dim = read.size("num_attention_heads"), read.size("head_dim", limit=MAX_HEAD_DIM)
    rotation, v4 = parse_deepseek_v4(read, layers, heads, head_dim)
    return ModelConfig(
        architecture="deepseek_v4",
        vocab=read.size("vocab_size"),
        hidden=read.size("hidden_size"),
        intermediate=v4.expert_width,
        layers=layers,
        heads=heads,
        kv_heads=1,  # one vector serves all heads as key and value
        head_dim=head_dim,
        eps=read.number("rms_norm_eps", 1e-6, high=1.0),
        max_positions=read.size("max_position_embeddings", limit=MAX_POSITIONS),
        tied=read.flag("tie_word_embeddings", False),
        attention_layers=(),
        rotation=rotation,
        eos_ids=token_ids(read.raw.get("eos_token_id")),
        v4=v4,
    )


def cache_schema(config: ModelConfig, cache: CacheConfig, model_dtype: str | torch.dtype) -> CacheSchema:
    """What the layers store, in the precision asked for."""
    v = config.v4
    assert v is not None
    spec = CompressedSpec(
        kinds=v.kinds,
        heads=config.heads,
        head_dim=config.head_dim,
        rope=v.rope,
        index_dim=v.index_dim,
        window=v.window,
        csa_ratio=v.csa_ratio,
        hca_ratio=v.hca_ratio,
    )
    kv = cache.kv_dtype
    if kv == "auto":
        kv = "f32" if dtype_name(model_dtype) == "float32" else "bf16"
    index = INDEX_BESIDE.get(kv, "mxfp4") if cache.index_dtype == "auto" else cache.index_dtype
    return compressed_schema(spec, kv, index, cache.block)


def weights(config: ModelConfig, has: Has) -> Iterator[Weight]:
    """Every tensor that is loaded."""
    v = config.v4
    assert v is not None
    mapped = v.streams * (v.streams + 2)
    for i in range(config.layers):
        name = f"model.layers.{i}"
        yield from _hyper(config, v, f"{name}.attn_hc.", f"{name}.input_layernorm.weight", mapped, 3)
        yield from _attention(config, v, has, f"{name}.self_attn", v.kinds[i])
        yield from _hyper(config, v, f"{name}.ffn_hc.", f"{name}.post_attention_layernorm.weight", mapped, 3)
        yield from _experts(config, v, f"{name}.mlp", i in v.hash_layers)
    yield Weight("model.embed_tokens.weight", (config.vocab, config.hidden), "plain")
    yield from _hyper(config, v, "model.hc_head.hc_", "model.norm.weight", v.streams, 1)
    if not config.tied:
        yield from linear(has, config.hidden, ("lm_head", config.vocab))


def _hyper(config: ModelConfig, v: DeepseekV4Config, name: str, norm: str, rows: int, scales: int) -> Iterator[Weight]:
    yield vector(f"{name}fn", rows, v.streams * config.hidden)
    yield vector(f"{name}base", rows)
    yield vector(f"{name}scale", scales)
    yield vector(norm, config.hidden)


def _wide(inputs: int, *parts: tuple[str, int]) -> Iterator[Weight]:
    for name, rows in parts:
        yield Weight(f"{name}.weight", (rows, inputs), "wide")


def _compressor(name: str, ratio: int, channels: int, width: int) -> Iterator[Weight]:
    yield vector(f"{name}.position_bias", ratio, channels)
    yield vector(f"{name}.kv_norm.weight", width)


def _attention(config: ModelConfig, v: DeepseekV4Config, has: Has, name: str, kind: str) -> Iterator[Weight]:
    main, index, D, Di = f"{name}.compressor", f"{name}.compressor.indexer", config.head_dim, v.index_dim
    yield from _wide(config.hidden, (f"{name}.q_a_proj", v.q_rank), (f"{name}.kv_proj", D))
    queries = [(f"{name}.q_b_proj", config.heads * D)]
    if kind == "hca":
        yield from _wide(config.hidden, (f"{main}.kv_proj", D), (f"{main}.gate_proj", D))
        yield from _compressor(main, v.hca_ratio, D, D)
    if kind == "csa":
        yield from _wide(config.hidden, (f"{main}.kv_proj", 2 * D), (f"{main}.gate_proj", 2 * D))
        yield from _wide(config.hidden, (f"{index}.kv_proj", 2 * Di), (f"{index}.gate_proj", 2 * Di))
        yield from _wide(config.hidden, (f"{index}.scorer.weights_proj", v.index_heads))
        yield from _compressor(main, v.csa_ratio, 2 * D, D)
        yield from _compressor(index, v.csa_ratio, 2 * Di, Di)
        queries += [(f"{index}.q_b_proj", v.index_heads * Di)]
    yield vector(f"{name}.q_a_norm.weight", v.q_rank)
    yield vector(f"{name}.kv_norm.weight", D)
    yield from linear(has, v.q_rank, *queries)
    yield vector(f"{name}.sinks", config.heads)
    yield Weight(f"{name}.o_a_proj.weight", (v.o_groups * v.o_rank, config.heads * D // v.o_groups), "plain")
    yield from linear(has, v.o_groups * v.o_rank, (f"{name}.o_b_proj", config.hidden))


def _experts(config: ModelConfig, v: DeepseekV4Config, name: str, hashed: bool) -> Iterator[Weight]:
    E, I, D = v.experts, v.expert_width, config.hidden
    shared = f"{name}.shared_experts"
    yield Weight(f"{name}.experts.gate_up_proj", (E, 2 * I, D), "experts")
    joined = tuple((f"{shared}.{part}_proj.weight", I) for part in ("gate", "up"))  # with the routed experts, if plain
    for part, _ in joined:
        yield Weight(part, (I, D), "plain", joined=joined)
    yield Weight(f"{name}.experts.down_proj", (E, D, I), "experts")
    yield Weight(f"{shared}.down_proj.weight", (D, I), "plain")
    if hashed:
        yield Weight(f"{name}.gate.tid2eid", (config.vocab, v.per_token), "indices")
    else:
        yield vector(f"{name}.gate.e_score_correction_bias", E)
    yield from _wide(D, (f"{name}.gate", E))


def check_schedule(config: ModelConfig, has: Callable[[str], bool]) -> None:
    """Whether the weights are those of the layers that the config names. Without this check a wrong schedule would be
    reported as a missing tensor.
    """
    assert config.v4 is not None
    for layer, kind in enumerate(config.v4.kinds):
        of = f"model.layers.{layer}."
        found = "window"
        if has(f"{of}self_attn.compressor.kv_proj.weight"):
            found = "csa" if has(f"{of}self_attn.compressor.indexer.kv_proj.weight") else "hca"
        if found != kind:
            raise ModelFileError(
                f"layer {layer} is {kind.upper()} by the config (layer_types, compress_ratios), but has the weights of "
                f"{found.upper()}: the config is not this checkpoint's, or a download is incomplete"
            )
        by_table, routed = has(f"{of}mlp.gate.tid2eid"), has(f"{of}mlp.gate.e_score_correction_bias")
        hashed = layer in config.v4.hash_layers
        if by_table != hashed or routed == hashed:
            wanted, other = ("tid2eid", "a bias") if hashed else ("e_score_correction_bias", "tid2eid")
            raise ModelFileError(
                f"layer {layer} needs mlp.gate.{wanted} by the config (num_hash_layers, mlp_layer_types), and must "
                f"not have {other}: the config is not this checkpoint's, or a download is incomplete"
            )


def released_form(weight: Weight) -> BlockForm | None:
    """How the released checkpoints store a tensor, where it is codes: experts in FP4, attention and the shared experts
    in FP8. Base models differ: all of it is FP8 with f32 scales.
    """
    if weight.kind == "experts":
        return RELEASED_FP4
    return RELEASED_FP8 if _RELEASED_FP8.fullmatch(weight.name) else None


def _open_store(files: list[SafetensorsFile], quantised: object) -> QuantisedStore:
    from hybridkv.checkpoint.deepseek_quant import QuantisedStore

    return QuantisedStore(files, stored_as(quantised, ("fp8",)) if quantised else FP8)


FAMILY = Family(
    name="deepseek_v4",
    model_types=("deepseek_v4",),
    parse=parse,
    cache_schema=cache_schema,
    weights=weights,
    module="hybridkv.models.deepseek_v4",
    check_weights=check_schedule,
    folder=FolderLayout(deepseek_name, _open_store),
    released=released_form,
    refuses={
        "exact": "exact mode is not available for deepseek_v4: leave it out (exact=False, no --exact)",
        "fp8": "weight_dtype='fp8' is not available for deepseek_v4: leave it out (auto), or keep the codes of "
        "the files (released)",
        "budget": "budget is not for deepseek_v4: it compresses its cache itself and never evicts, so there is nothing "
        "to choose or to show",
        "state_dtype": NO_STATE,
    },
)
