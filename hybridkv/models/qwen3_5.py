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
from hybridkv.checkpoint.loader import Loader, Part
from hybridkv.kernels.gdn.weights import DeltaNet
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.row_ops import RowOps
from hybridkv.models.config import GdnConfig, ModelConfig
from hybridkv.models.decoder import Angles, Decoder, DecoderLayer, FeedForward, GatedMlp, Norm, attention_streams
from hybridkv.models.llama import assemble, gated_mlp


def cache_schema(config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int) -> CacheSchema:
    gdn = config.gdn
    assert gdn is not None
    state = (
        TensorSpec("conv", (gdn.taps - 1, gdn.channels), dtype),  # inputs, as the projection gave them
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

    def __call__(
        self, x: Tensor, angles: Angles, handle: LayerHandle, rows: Tensor | None, h: Tensor | None
    ) -> Tensor | None:
        c, T, x = self.config, len(x), self.qkv(x)
        both, kv = x.split([2 * c.heads * c.head_dim, 2 * c.kv_heads * c.head_dim], -1)
        q, gate = both.view(T, c.heads, 2 * c.head_dim).chunk(2, -1)
        if not self.ops.exact:
            norms = self.q_norm.weight, self.k_norm.weight
            q = handle.store(x, angles, c.heads, c.head_dim, True, norms, c.eps)
        else:
            k, v = kv.view(T, 2, c.kv_heads, c.head_dim).unbind(1)
            q, k = self.ops.rope(self.q_norm(q), *angles), self.ops.rope(self.k_norm(k), *angles)
            handle.append(k, v)
            handle.capture(q)
        mixed = handle.attend(q, c.head_dim**-0.5, rows is not None, gate).flatten(1)
        return self.out.add_to(h, mixed if rows is None else mixed[rows])


@dataclass(frozen=True)
class GatedDeltaNet:
    inputs: Linear  # [channels + Hv V + 2 Hv, hidden]: q | k | v, z, b, a
    net: DeltaNet
    out: Linear  # [hidden, Hv V]
    ops: RowOps

    def __call__(
        self, x: Tensor, angles: Angles, handle: LayerHandle, rows: Tensor | None, h: Tensor | None
    ) -> Tensor | None:
        x = self.inputs(x)
        mixed = self._exact(x, handle) if self.ops.exact else handle.delta_net(x, self.net)
        return self.out.add_to(h, mixed if rows is None else mixed[rows])

    def _exact(self, x: Tensor, handle: LayerHandle) -> Tensor:
        d, ops, T = self.net, self.ops, len(x)
        keys, values = d.key_heads * d.key_dim, d.value_heads * d.value_dim
        mixed, z, b, a = x.split(d.columns, -1)
        q, k, v = handle.convolve_exact(mixed, d.conv).split([keys, keys, values], -1)
        group = d.value_heads // d.key_heads
        q, k = (ops.l2_norm(t.view(T, d.key_heads, d.key_dim)).repeat_interleave(group, 1) for t in (q, k))
        v, z = (t.view(T, d.value_heads, d.value_dim) for t in (v, z))
        g = -d.decay * ops.softplus(a.float() + d.dt_bias)
        o = handle.delta_rule_exact(q * d.key_dim**-0.5, k, v, g, ops.sigmoid(b.float()))
        return ops.gated_rms_norm(o, z, d.norm, d.eps).reshape(T, -1).to(x.dtype)


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

    def __call__(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        """The result; it is not added to `h`."""
        ops = self.ops
        weights, chosen = ops.route(ops.linear(x, self.router), self.per_token, self.renormalise)  # [T, k]
        routed = ops.run_experts(x, weights, chosen, self.gate_up, self.down)
        shared = self.shared.product(x)
        return ops.add_shared(routed, shared, x, self.shared_gate)


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
    net = DeltaNet(
        key_heads=d.key_heads,
        value_heads=d.value_heads,
        key_dim=d.key_dim,
        value_dim=d.value_dim,
        conv=loader.vector(f"{name}.conv1d.weight", d.channels, 1, d.taps).squeeze(1),
        decay=loader.vector(f"{name}.A_log", d.value_heads).exp(),
        dt_bias=loader.vector(f"{name}.dt_bias", d.value_heads),
        norm=loader.vector(f"{name}.norm.weight", d.value_dim),
        eps=config.eps,
    )
    inputs = _inputs(d, hidden, loader, name)
    out = loader.linear(d.value_heads * d.value_dim, (f"{name}.out_proj", hidden))
    return GatedDeltaNet(inputs, net, out, loader.ops)


def _inputs(d: GdnConfig, hidden: int, loader: Loader, name: str) -> Linear:
    """All input projections in one matrix: q | k | v, z, b, a."""
    values, group = d.value_heads * d.value_dim, d.value_heads // d.key_heads
    parts: list[Part] = []
    if loader.has(f"{name}.in_proj_qkvz.weight"):
        # for each key head: its query, its key, then the values and the gates of its value heads
        sizes = [d.key_dim, d.key_dim, group * d.value_dim, group * d.value_dim]
        parts += [(f"{name}.in_proj_qkvz", _taken_apart(d.key_heads, sizes))]
    else:
        parts += [(f"{name}.in_proj_qkv", d.channels), (f"{name}.in_proj_z", values)]
    if loader.has(f"{name}.in_proj_ba.weight"):
        parts += [(f"{name}.in_proj_ba", _taken_apart(d.key_heads, [group, group]))]
    else:
        parts += [(f"{name}.in_proj_b", d.value_heads), (f"{name}.in_proj_a", d.value_heads)]
    return loader.linear(hidden, *parts)


def _taken_apart(heads: int, sizes: list[int]) -> Tensor:
    """Rows that lie head by head, so many of each kind: which one stands at each place if they are to lie by kind."""
    rows = torch.arange(heads * sum(sizes)).view(heads, -1)
    return torch.cat([part.flatten() for part in rows.split(sizes, 1)])


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
