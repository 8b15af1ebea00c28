"""Qwen3.5 (dense and mixture of experts) and Qwen3-Next: three Gated DeltaNet layers, then one of gated full attention.

The two generations compute the same and differ in how the DeltaNet projections are stored: Qwen3-Next fuses them and
interleaves by key head (in_proj_qkvz, in_proj_ba); they are taken apart when they are loaded.
Norm weights are stored zero-centred, except that of the DeltaNet output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridkv.cache import CacheSchema, LayerHandle, StateSchema, TensorSpec
from hybridkv.kernels.linear import Linear
from hybridkv.kernels.rows import RowOps
from hybridkv.models.config import GdnConfig, ModelConfig
from hybridkv.models.layers import Angles, Decoder, DecoderLayer, FeedForward, GatedMlp, Norm, attention_streams
from hybridkv.models.llama import assemble, gated_mlp
from hybridkv.models.loader import Loader


def cache_schema(config: ModelConfig, kv_dtype: torch.dtype, page_size: int) -> CacheSchema:
    gdn = config.gdn
    assert gdn is not None
    state = (
        TensorSpec("conv", (gdn.taps - 1, gdn.channels), torch.float32),
        TensorSpec("recurrent", (gdn.value_heads, gdn.key_dim, gdn.value_dim), torch.float32),
    )
    return CacheSchema(
        streams=(attention_streams(config, kv_dtype, page_size),) if config.attention_layers else (),
        states=(StateSchema("gdn", config.gdn_layers, state),) if config.gdn_layers else (),
    )


@dataclass(frozen=True)
class GatedAttention:
    """Full attention with normed queries and keys, partial rotation, and a sigmoid gate on the output."""

    config: ModelConfig
    qkv: Linear  # [(2 H + 2 G) D, hidden]: (query | gate) head by head, keys, values
    out: Linear  # [hidden, H D]
    q_norm: Norm
    k_norm: Norm
    ops: RowOps

    def __call__(self, x: Tensor, angles: Angles, handle: LayerHandle) -> Tensor:
        c, T = self.config, len(x)
        both, k, v = self.qkv(x).split([2 * c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim], -1)
        q, gate = both.view(T, c.heads, 2 * c.head_dim).chunk(2, -1)
        q = self.ops.rope(self.q_norm(q), *angles)
        k = self.ops.rope(self.k_norm(k.view(T, c.kv_heads, c.head_dim)), *angles)
        handle.append(k, v.view(T, c.kv_heads, c.head_dim))
        mixed = handle.attend(q, c.head_dim**-0.5) * self.ops.sigmoid(gate)
        return self.out(mixed.reshape(T, -1))


@dataclass(frozen=True)
class GatedDeltaNet:
    gdn: GdnConfig
    eps: float
    inputs: Linear  # [channels + Hv V + 2 Hv, hidden]: q | k | v, z, b, a
    conv: Tensor  # [channels, taps] f32
    decay: Tensor  # [Hv] f32, exp(A_log)
    dt_bias: Tensor  # [Hv] f32
    norm: Tensor  # [V] f32
    out: Linear  # [hidden, Hv V]
    ops: RowOps

    def __call__(self, x: Tensor, angles: Angles, handle: LayerHandle) -> Tensor:
        d, ops, T = self.gdn, self.ops, len(x)
        keys, values = d.key_heads * d.key_dim, d.value_heads * d.value_dim
        mixed, z, b, a = self.inputs(x).split([d.channels, values, d.value_heads, d.value_heads], -1)
        q, k, v = handle.convolve(mixed, self.conv).split([keys, keys, values], -1)
        group = d.value_heads // d.key_heads  # value heads that share a key head are neighbours
        q, k = (ops.l2_norm(t.view(T, d.key_heads, d.key_dim)).repeat_interleave(group, 1) for t in (q, k))
        g = -self.decay * ops.softplus(a.float() + self.dt_bias)
        o = handle.delta_rule(q * d.key_dim**-0.5, k, v.view(T, d.value_heads, d.value_dim), g, ops.sigmoid(b.float()))
        o = ops.gated_rms_norm(o, z.view(T, d.value_heads, d.value_dim), self.norm, self.eps)
        return self.out(o.reshape(T, -1).to(x.dtype))


@dataclass(frozen=True)
class SparseMoe:
    """The best experts of each token, weighted, and one expert that all tokens share behind a gate."""

    router: Tensor  # [E, hidden]
    gate_up: Tensor  # [E, 2 I, hidden]
    down: Tensor  # [E, hidden, I]
    shared: GatedMlp
    shared_gate: Tensor  # [1, hidden]
    per_token: int
    renormalise: bool
    ops: RowOps

    def __call__(self, x: Tensor) -> Tensor:
        ops = self.ops
        weights, chosen = ops.best_experts(ops.linear(x, self.router), self.per_token)  # [T, k]
        if self.renormalise:
            weights = weights / ops.total(weights)
        # (token, choice) pairs sorted by expert: each expert runs once over its own tokens
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.router)).tolist()
        pairs = x[order // self.per_token]
        done = torch.empty_like(pairs)
        at = 0
        for expert, n in enumerate(counts):
            if n:
                part = slice(at, at + n)
                gate, up = ops.linear(pairs[part], self.gate_up[expert]).chunk(2, -1)
                done[part] = ops.linear(ops.silu(gate).mul_(up), self.down[expert])
                at += n
        by_token = torch.empty_like(done)
        by_token[order] = done
        routed = ops.weighted_sum(by_token.view(len(x), self.per_token, -1), weights).to(x.dtype)
        return routed + self.shared(x) * ops.sigmoid(ops.linear(x, self.shared_gate))


def load(config: ModelConfig, loader: Loader) -> Decoder:
    layers = tuple(_layer(config, loader, i) for i in range(config.layers))
    return assemble(config, loader, layers, norm_plus=1.0)


def _layer(config: ModelConfig, loader: Loader, i: int) -> DecoderLayer:
    name = f"model.layers.{i}"
    attention = i in config.attention_layers
    return DecoderLayer(
        mixer_norm=_norm(config, loader, f"{name}.input_layernorm.weight", config.hidden),
        mixer=_attention(config, loader, f"{name}.self_attn")
        if attention
        else _deltanet(config, loader, f"{name}.linear_attn"),
        feed_norm=_norm(config, loader, f"{name}.post_attention_layernorm.weight", config.hidden),
        feed=_feed_forward(config, loader, f"{name}.mlp", i),
    )


def _norm(config: ModelConfig, loader: Loader, name: str, width: int) -> Norm:
    return Norm(loader.vector(name, width, plus=1.0), config.eps, loader.ops)


def _attention(config: ModelConfig, loader: Loader, name: str) -> GatedAttention:
    c, kv = config, config.kv_heads * config.head_dim
    rows = ((f"{name}.q_proj", 2 * c.heads * c.head_dim), (f"{name}.k_proj", kv), (f"{name}.v_proj", kv))
    return GatedAttention(
        config=c,
        qkv=loader.linear(c.hidden, *rows),
        out=loader.linear(c.heads * c.head_dim, (f"{name}.o_proj", c.hidden)),
        q_norm=_norm(c, loader, f"{name}.q_norm.weight", c.head_dim),
        k_norm=_norm(c, loader, f"{name}.k_norm.weight", c.head_dim),
        ops=loader.ops,
    )


def _deltanet(config: ModelConfig, loader: Loader, name: str) -> GatedDeltaNet:
    d, hidden = config.gdn, config.hidden
    assert d is not None
    return GatedDeltaNet(
        gdn=d,
        eps=config.eps,
        inputs=loader.make_linear(_input_rows(d, hidden, loader, name)),
        conv=loader.vector(f"{name}.conv1d.weight", d.channels, 1, d.taps).squeeze(1),
        decay=loader.vector(f"{name}.A_log", d.value_heads).exp(),
        dt_bias=loader.vector(f"{name}.dt_bias", d.value_heads),
        norm=loader.vector(f"{name}.norm.weight", d.value_dim),
        out=loader.linear(d.value_heads * d.value_dim, (f"{name}.out_proj", hidden)),
        ops=loader.ops,
    )


def _input_rows(d: GdnConfig, hidden: int, loader: Loader, name: str) -> Tensor:
    """All input projections in one matrix: q | k | v, z, b, a."""
    values = d.value_heads * d.value_dim
    out = torch.empty(d.channels + values + 2 * d.value_heads, hidden, dtype=loader.dtype, device=loader.device)
    qkv, z, b, a = out.split([d.channels, values, d.value_heads, d.value_heads])
    group = d.value_heads // d.key_heads
    if loader.has(f"{name}.in_proj_qkvz.weight"):
        # for each key head: its query, its key, then the values and the gates of its value heads
        sizes = [d.key_dim, d.key_dim, group * d.value_dim, group * d.value_dim]
        fused = loader.raw(f"{name}.in_proj_qkvz.weight", d.channels + values, hidden)
        parts = [p.flatten(0, 1) for p in fused.view(d.key_heads, sum(sizes), hidden).split(sizes, 1)]
        qkv.copy_(torch.cat(parts[:3]))
        z.copy_(parts[3])
    else:
        qkv.copy_(loader.raw(f"{name}.in_proj_qkv.weight", d.channels, hidden))
        z.copy_(loader.raw(f"{name}.in_proj_z.weight", values, hidden))
    if loader.has(f"{name}.in_proj_ba.weight"):
        fused = loader.raw(f"{name}.in_proj_ba.weight", 2 * d.value_heads, hidden)
        for target, part in zip((b, a), fused.view(d.key_heads, 2 * group, hidden).split(group, 1), strict=True):
            target.copy_(part.flatten(0, 1))
    else:
        b.copy_(loader.raw(f"{name}.in_proj_b.weight", d.value_heads, hidden))
        a.copy_(loader.raw(f"{name}.in_proj_a.weight", d.value_heads, hidden))
    return out


def _feed_forward(config: ModelConfig, loader: Loader, name: str, layer: int) -> FeedForward:
    moe, hidden = config.moe, config.hidden
    if moe is None or layer in moe.dense_layers:
        return gated_mlp(loader, name, hidden, config.intermediate)
    return SparseMoe(
        router=loader.weight(f"{name}.gate.weight", moe.experts, hidden),
        gate_up=loader.weight(f"{name}.experts.gate_up_proj", moe.experts, 2 * moe.intermediate, hidden),
        down=loader.weight(f"{name}.experts.down_proj", moe.experts, hidden, moe.intermediate),
        shared=gated_mlp(loader, f"{name}.shared_expert", hidden, moe.shared_intermediate),
        shared_gate=loader.weight(f"{name}.shared_expert_gate.weight", 1, hidden),
        per_token=moe.per_token,
        renormalise=moe.renormalise,
        ops=loader.ops,
    )
