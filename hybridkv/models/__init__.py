"""Models: a config, a declaration of what is cached, and a forward pass, for each architecture."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import torch

from hybridkv.cache import CacheSchema, StateSchema, TensorSpec
from hybridkv.checkpoint.checkpoint import Checkpoint
from hybridkv.checkpoint.loader import Loader, Progress
from hybridkv.config import KV_DTYPES, CacheConfig
from hybridkv.errors import HybridKVError
from hybridkv.models import deepseek_v4, llama, qwen3_5
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Model

FAMILIES: dict[str, ModuleType] = {
    "llama": llama,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5,
    "qwen3_next": qwen3_5,
    "deepseek_v4": deepseek_v4,
}


def cache_schema(config: ModelConfig, cache: CacheConfig, model_dtype: torch.dtype) -> CacheSchema:
    """What a model stores for a request, in the precision asked for."""
    if cache.state_dtype != "f32" and config.gdn is None:
        raise HybridKVError(f"state_dtype is for recurrent state, which {config.architecture} does not have")
    if config.v4 is not None:
        if cache.budget is not None:
            raise HybridKVError(
                "budget is not for deepseek_v4: it compresses its cache itself and never evicts, so there is nothing "
                "to choose or to show"
            )
        return deepseek_v4.cache_schema(config, cache, model_dtype)
    if cache.index_dtype != "auto":
        raise HybridKVError(f"index_dtype is for deepseek_v4: {config.architecture} has no index keys")
    kv_dtype = model_dtype if cache.kv_dtype == "auto" else getattr(torch, KV_DTYPES[cache.kv_dtype])
    schema: CacheSchema = FAMILIES[config.architecture].cache_schema(config, model_dtype, kv_dtype, cache.page_size)
    if cache.state_dtype == "bf16":
        schema = replace(schema, states=tuple(with_bf16_state(s) for s in schema.states))
    if cache.budget is None or not config.attention_layers:
        return schema
    # who evicts needs the last queries of every attention layer, and what their softmax summed to
    ring = (
        TensorSpec("queries", (cache.window, config.heads, config.head_dim), model_dtype),
        TensorSpec("lse", (cache.window, config.heads), torch.float32),
    )
    return replace(schema, states=(*schema.states, StateSchema("queries", config.attention_layers, ring, lent=True)))


def with_bf16_state(state: StateSchema) -> StateSchema:
    """Its recurrent tensor in bf16; convolution tails stay as they are, in the dtype of the activations."""
    tensors = (replace(t, dtype=torch.bfloat16) if t.name == "recurrent" else t for t in state.tensors)
    return replace(state, tensors=tuple(tensors))


def check_exact(config: ModelConfig, exact: bool, state_dtype: str = "f32") -> None:
    """Whether the model has the mode that was asked for, or HybridKVError."""
    if exact and state_dtype != "f32":
        raise HybridKVError("exact mode keeps recurrent state in f32: leave out state_dtype='bf16', or exact")
    if exact and config.v4 is not None:
        raise HybridKVError("exact mode is not available for deepseek_v4: leave it out (exact=False, no --exact)")


def check_fp8(config: ModelConfig, fp8: bool) -> None:
    """Whether the model takes its matrices in FP8, or HybridKVError."""
    if fp8 and config.v4 is not None:
        raise HybridKVError("weight_dtype='fp8' is not available for deepseek_v4: leave it out (auto)")


def load_model(
    config: ModelConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
    exact: bool = False,
    fp8: bool = False,
    packed: bool = False,  # keep what a GGUF file has packed
) -> Model:
    check_exact(config, exact)
    check_fp8(config, fp8)
    if config.v4 is not None:
        deepseek_v4.check_schedule(config, checkpoint.__contains__)
    loader = Loader(checkpoint, device, dtype, progress, exact, fp8, packed)
    model: Model = FAMILIES[config.architecture].load(config, loader)
    loader.finish()
    return model
