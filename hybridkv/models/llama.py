"""Llama: full attention in every layer. What its configs and files say is in llama_family.py."""

from __future__ import annotations

from hybridkv.checkpoint.loader import Loader
from hybridkv.models.attention import load_attention
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Decoder, DecoderLayer, assemble, gated_mlp, layer_norm


def load(config: ModelConfig, loader: Loader) -> Decoder:
    """The model, its weights read."""
    layers = tuple(_layer(config, loader, f"model.layers.{i}") for i in range(config.layers))
    return assemble(config, loader, layers)


def _layer(config: ModelConfig, loader: Loader, name: str) -> DecoderLayer:
    return DecoderLayer(
        mixer_norm=layer_norm(config, loader, f"{name}.input_layernorm"),
        mixer=load_attention(config, loader, f"{name}.self_attn"),
        feed_norm=layer_norm(config, loader, f"{name}.post_attention_layernorm"),
        feed=gated_mlp(loader, f"{name}.mlp", config.hidden, config.intermediate),
    )
