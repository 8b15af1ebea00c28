"""Llama: the degenerate hybrid, full attention in every layer. Also SmolLM2 and whatever else says model_type llama."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridkv.cache import CacheSchema, LayerHandle
from hybridkv.checkpoint.loader import Loader
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.row_ops import RowOps
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Angles, Decoder, DecoderLayer, GatedMlp, Norm, attention_streams


def cache_schema(config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int) -> CacheSchema:
    return CacheSchema(streams=(attention_streams(config, kv_dtype, page_size),))


@dataclass(frozen=True)
class Attention:
    config: ModelConfig
    qkv: Linear  # [(H + 2 G) D, hidden]
    out: Linear  # [hidden, H D]
    ops: RowOps

    def __call__(
        self, x: Tensor, angles: Angles, handle: LayerHandle, rows: Tensor | None, h: Tensor | None
    ) -> Tensor | None:
        c, x = self.config, self.qkv(x)
        if not self.ops.exact:
            q = handle.store(x, angles, c.heads, c.head_dim)
        else:
            heads = x.view(len(x), c.heads + 2 * c.kv_heads, c.head_dim)
            turned = self.ops.rope(heads[:, : c.heads + c.kv_heads], *angles)  # queries and keys alike
            q = turned[:, : c.heads]
            handle.append(turned[:, c.heads :], heads[:, c.heads + c.kv_heads :])
            handle.capture(q)
        mixed = handle.attend(q, c.head_dim**-0.5, rows is not None).flatten(1)
        return self.out.add_to(h, mixed if rows is None else mixed[rows])


def load(config: ModelConfig, loader: Loader) -> Decoder:
    layers = tuple(_layer(config, loader, f"model.layers.{i}") for i in range(config.layers))
    return assemble(config, loader, layers, norm_plus=0.0)


def assemble(config: ModelConfig, loader: Loader, layers: tuple[DecoderLayer, ...], norm_plus: float) -> Decoder:
    """Embedding, final norm and head round the layers."""
    embedding = loader.weight("model.embed_tokens.weight", config.vocab, config.hidden)
    tied = config.tied or not loader.has("lm_head.weight")
    if tied and loader.has("lm_head.weight"):
        loader.used.add("lm_head.weight")  # some writers store the tied matrix twice
    head = (
        loader.make_linear(embedding, shared=True) if tied else loader.linear(config.hidden, ("lm_head", config.vocab))
    )
    norm = Norm(loader.vector("model.norm.weight", config.hidden, plus=norm_plus), config.eps, loader.ops)
    inv_freq = torch.tensor(config.inv_freq, dtype=torch.float32, device=loader.device)
    return Decoder(config, embedding, layers, norm, head, inv_freq)


def gated_mlp(loader: Loader, name: str, hidden: int, intermediate: int) -> GatedMlp:
    gate_up = loader.linear(hidden, (f"{name}.gate_proj", intermediate), (f"{name}.up_proj", intermediate))
    return GatedMlp(gate_up, loader.linear(intermediate, (f"{name}.down_proj", hidden)))


def _layer(config: ModelConfig, loader: Loader, name: str) -> DecoderLayer:
    c, attn = config, f"{name}.self_attn"
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    qkv = loader.linear(c.hidden, (f"{attn}.q_proj", q), (f"{attn}.k_proj", kv), (f"{attn}.v_proj", kv))
    return DecoderLayer(
        mixer_norm=Norm(loader.vector(f"{name}.input_layernorm.weight", c.hidden), c.eps, loader.ops),
        mixer=Attention(c, qkv, loader.linear(q, (f"{attn}.o_proj", c.hidden)), loader.ops),
        feed_norm=Norm(loader.vector(f"{name}.post_attention_layernorm.weight", c.hidden), c.eps, loader.ops),
        feed=gated_mlp(loader, f"{name}.mlp", c.hidden, c.intermediate),
    )
