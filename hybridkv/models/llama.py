"""Llama: the degenerate hybrid, full attention in every layer. Also SmolLM2 and whatever else says model_type llama."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.cache import CacheSchema, LayerHandle
from hybridkv.kernels.rope import rope
from hybridkv.models.config import ModelConfig
from hybridkv.models.layers import Angles, Decoder, DecoderLayer, GatedMlp, Norm, attention_streams
from hybridkv.models.loader import Loader


def cache_schema(config: ModelConfig, kv_dtype: torch.dtype, page_size: int) -> CacheSchema:
    return CacheSchema(streams=(attention_streams(config, kv_dtype, page_size),))


@dataclass(frozen=True)
class Attention:
    config: ModelConfig
    qkv: Tensor  # [(H + 2 G) D, hidden]
    out: Tensor  # [hidden, H D]
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None

    def __call__(self, x: Tensor, angles: Angles, handle: LayerHandle) -> Tensor:
        c = self.config
        heads = F.linear(x, self.qkv, self.qkv_bias).view(len(x), c.heads + 2 * c.kv_heads, c.head_dim)
        turned = rope(heads[:, : c.heads + c.kv_heads], *angles)  # queries and keys alike
        handle.append(turned[:, c.heads :], heads[:, c.heads + c.kv_heads :])
        mixed = handle.attend(turned[:, : c.heads], c.head_dim**-0.5)
        return F.linear(mixed.reshape(len(x), -1), self.out, self.out_bias)


def load(config: ModelConfig, loader: Loader) -> Decoder:
    layers = tuple(_layer(config, loader, f"model.layers.{i}") for i in range(config.layers))
    return assemble(config, loader, layers, norm_plus=0.0)


def assemble(config: ModelConfig, loader: Loader, layers: tuple[DecoderLayer, ...], norm_plus: float) -> Decoder:
    """Embedding, final norm and head round the layers."""
    embedding = loader.weight("model.embed_tokens.weight", config.vocab, config.hidden)
    tied = config.tied or not loader.has("lm_head.weight")
    if tied and loader.has("lm_head.weight"):
        loader.used.add("lm_head.weight")  # some writers store the tied matrix twice
    head = embedding if tied else loader.weight("lm_head.weight", config.vocab, config.hidden)
    norm = Norm(loader.vector("model.norm.weight", config.hidden, plus=norm_plus), config.eps)
    inv_freq = torch.tensor(config.inv_freq, dtype=torch.float32, device=loader.device)
    return Decoder(config, embedding, layers, norm, head, inv_freq)


def gated_mlp(loader: Loader, name: str, hidden: int, intermediate: int) -> GatedMlp:
    gate_up = loader.joined(hidden, (f"{name}.gate_proj.weight", intermediate), (f"{name}.up_proj.weight", intermediate))
    down = loader.weight(f"{name}.down_proj.weight", hidden, intermediate)
    if not loader.has(f"{name}.gate_proj.bias"):
        return GatedMlp(gate_up, down)
    biases = [loader.raw(f"{name}.{part}_proj.bias", intermediate) for part in ("gate", "up")]
    return GatedMlp(gate_up, down, loader.place(torch.cat(biases)), loader.weight(f"{name}.down_proj.bias", hidden))


def _layer(config: ModelConfig, loader: Loader, name: str) -> DecoderLayer:
    c, attn = config, f"{name}.self_attn"
    rows = {"q": c.heads * c.head_dim, "k": c.kv_heads * c.head_dim, "v": c.kv_heads * c.head_dim}
    qkv = loader.joined(c.hidden, *((f"{attn}.{p}_proj.weight", n) for p, n in rows.items()))
    out = loader.weight(f"{attn}.o_proj.weight", c.hidden, c.heads * c.head_dim)
    qkv_bias = out_bias = None
    if loader.has(f"{attn}.q_proj.bias"):
        qkv_bias = loader.place(torch.cat([loader.raw(f"{attn}.{p}_proj.bias", n) for p, n in rows.items()]))
    if loader.has(f"{attn}.o_proj.bias"):
        out_bias = loader.weight(f"{attn}.o_proj.bias", c.hidden)
    return DecoderLayer(
        mixer_norm=Norm(loader.vector(f"{name}.input_layernorm.weight", c.hidden), c.eps),
        mixer=Attention(c, qkv, out, qkv_bias, out_bias),
        feed_norm=Norm(loader.vector(f"{name}.post_attention_layernorm.weight", c.hidden), c.eps),
        feed=gated_mlp(loader, f"{name}.mlp", c.hidden, c.intermediate),
    )
