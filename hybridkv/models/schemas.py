"""What full attention and recurrent layers store for a request, as a cache schema. Needs no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hybridkv.cache.heads import HeadCounts
from hybridkv.cache.schema import CacheSchema, StateSchema, StreamSchema, TensorSpec
from hybridkv.config import KV_DTYPES, CacheConfig
from hybridkv.dtypes import dtype_name
from hybridkv.errors import HybridKVError
from hybridkv.kernels.formats.codec import KV_CODECS
from hybridkv.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

_KV_NAMES = {name: kv for kv, name in KV_DTYPES.items()}  # float32 -> f32


def attention_streams(config: ModelConfig, kv_dtype: str, page_size: int) -> StreamSchema:
    """Full attention: one stream for each layer and KV head. An entry is a key and a value in the format's tensors."""
    entry = tuple(TensorSpec(*tensor) for tensor in KV_CODECS[kv_dtype].entry_tensors(config.head_dim))
    return StreamSchema("attention", config.attention_layers, entry, page_size, heads=config.kv_heads)


def attention_schema(
    config: ModelConfig, cache: CacheConfig, model_dtype: str | torch.dtype, states: tuple[StateSchema, ...] = ()
) -> CacheSchema:
    """Keys and values of the attention layers, and the states of other layers."""
    if not config.attention_layers:
        return CacheSchema(states=states)
    name = dtype_name(model_dtype)
    if cache.kv_dtype == "auto" and name not in _KV_NAMES:
        raise HybridKVError(f"keys and values cannot be stored as {name}; take {', '.join(_KV_NAMES)}")
    kv_dtype = _KV_NAMES[name] if cache.kv_dtype == "auto" else cache.kv_dtype
    schema = CacheSchema(streams=(attention_streams(config, kv_dtype, cache.page_size),), states=states)
    if cache.budget is None and not cache.query_buffers:
        return schema
    # eviction scores the cache by the last queries of every attention layer and what their softmax summed to
    buffers = (
        TensorSpec("queries", (cache.window, config.heads, config.head_dim), name),
        TensorSpec("lse", (cache.window, config.heads), "float32"),
    )
    return replace(schema, states=(*states, StateSchema("queries", config.attention_layers, buffers, lent=True)))


def head_counts(config: ModelConfig) -> HeadCounts:
    """By what the cache of a model is dealt out to ranks."""
    gdn = config.gdn
    if gdn is None:
        return HeadCounts(config.heads, config.kv_heads)
    return HeadCounts(config.heads, config.kv_heads, gdn.key_heads, gdn.value_heads, gdn.key_dim, gdn.value_dim)


def gdn_schema(config: ModelConfig, cache: CacheConfig, model_dtype: str | torch.dtype) -> CacheSchema:
    """Full attention, and the convolution's inputs and recurrent state of the Gated DeltaNet layers."""
    gdn = config.gdn
    assert gdn is not None
    if not config.gdn_layers:
        return attention_schema(config, cache, model_dtype)
    recurrent = "bfloat16" if cache.state_dtype == "bf16" else "float32"
    tensors = (
        # inputs, as the projection gave them
        TensorSpec("conv", (gdn.kernel_width - 1, gdn.channels), dtype_name(model_dtype)),
        TensorSpec("recurrent", (gdn.value_heads, gdn.key_dim, gdn.value_dim), recurrent),
    )
    return attention_schema(config, cache, model_dtype, (StateSchema("gdn", config.gdn_layers, tensors),))
