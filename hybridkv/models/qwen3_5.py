"""Qwen3.5 (dense and mixture of experts) and Qwen3-Next: three Gated DeltaNet layers, then one of gated full attention.

The generations compute the same and differ in how the DeltaNet projections are stored: Qwen3-Next fuses them and
interleaves by key head (in_proj_qkvz, in_proj_ba); they are taken apart when they are loaded.
Norm weights are stored zero-centred, except that of the DeltaNet output. Configs and files: qwen3_5_family.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridkv.checkpoint.loader import Loader, Part
from hybridkv.kernels.gdn.weights import DeltaNet
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.moe.block_experts import Stack
from hybridkv.kernels.row_ops import RowOps
from hybridkv.models.attention import load_attention
from hybridkv.models.config import GdnConfig, ModelConfig
from hybridkv.models.decoder import Decoder, DecoderLayer, FeedForward, GatedMlp, assemble, gated_mlp, layer_norm
from hybridkv.models.deltanet import ExactGatedDeltaNet, GatedDeltaNet


@dataclass(frozen=True)
class SparseMoe:
    """A weighted sum of each token's best experts, and one gated expert that all tokens share."""

    router: Tensor  # [E, hidden]
    gate_up: Stack  # [E, 2 I, hidden]
    down: Stack  # [E, hidden, I]
    shared: GatedMlp
    shared_gate: Tensor  # [1, hidden]
    per_token: int
    renormalise: bool
    ops: RowOps

    def __call__(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        """The result [T, hidden]; it is never added to `h`."""
        ops = self.ops
        weights, chosen = ops.route(ops.linear(x, self.router), self.per_token, self.renormalise)  # [T, k]
        routed = ops.run_experts(x, weights, chosen, self.gate_up, self.down)
        shared = self.shared.product(x)
        return ops.add_shared(routed, shared, x, self.shared_gate)


def load(config: ModelConfig, loader: Loader) -> Decoder:
    """The model, its weights read."""
    layers = tuple(_layer(config, loader, i) for i in range(config.layers))
    return assemble(config, loader, layers, norm_plus=1.0)


def _layer(config: ModelConfig, loader: Loader, i: int) -> DecoderLayer:
    name = f"model.layers.{i}"
    if i in config.attention_layers:
        mixer = load_attention(config, loader, f"{name}.self_attn", normed=True, gated=True, norm_plus=1.0)
    else:
        mixer = _deltanet(config, loader, f"{name}.linear_attn")
    return DecoderLayer(
        mixer_norm=layer_norm(config, loader, f"{name}.input_layernorm", plus=1.0),
        mixer=mixer,
        feed_norm=layer_norm(config, loader, f"{name}.post_attention_layernorm", plus=1.0),
        feed=_feed_forward(config, loader, f"{name}.mlp", i),
    )


def _deltanet(config: ModelConfig, loader: Loader, name: str) -> GatedDeltaNet:
    d, hidden = config.gdn, config.hidden
    assert d is not None
    net = DeltaNet(
        key_heads=d.key_heads,
        value_heads=d.value_heads,
        key_dim=d.key_dim,
        value_dim=d.value_dim,
        conv=loader.vector(f"{name}.conv1d.weight", d.channels, 1, d.kernel_width).squeeze(1),
        decay=loader.vector(f"{name}.A_log", d.value_heads).exp(),
        dt_bias=loader.vector(f"{name}.dt_bias", d.value_heads),
        norm=loader.vector(f"{name}.norm.weight", d.value_dim),
        eps=config.eps,
    )
    inputs = _inputs(d, hidden, loader, name)
    out = loader.linear(d.value_heads * d.value_dim, (f"{name}.out_proj", hidden))
    kind = ExactGatedDeltaNet if loader.exact else GatedDeltaNet
    return kind(inputs, net, out)


def _inputs(d: GdnConfig, hidden: int, loader: Loader, name: str) -> Linear:
    """All input projections in one matrix: q | k | v, z, b, a."""
    values, group = d.value_heads * d.value_dim, d.value_heads // d.key_heads
    parts: list[Part] = []
    if loader.has(f"{name}.in_proj_qkvz.weight"):
        # for each key head: its query, its key, then the values and the gates of its value heads
        sizes = [d.key_dim, d.key_dim, group * d.value_dim, group * d.value_dim]
        parts += [(f"{name}.in_proj_qkvz", _by_kind(d.key_heads, sizes))]
    else:
        parts += [(f"{name}.in_proj_qkv", d.channels), (f"{name}.in_proj_z", values)]
    if loader.has(f"{name}.in_proj_ba.weight"):
        parts += [(f"{name}.in_proj_ba", _by_kind(d.key_heads, [group, group]))]
    else:
        parts += [(f"{name}.in_proj_b", d.value_heads), (f"{name}.in_proj_a", d.value_heads)]
    return loader.linear(hidden, *parts)


def _by_kind(heads: int, sizes: list[int]) -> Tensor:
    """Row permutation from head-major (q, k, v, z of each key head) to kind-major (all q, all k, ...).

    `sizes`: rows of each kind that a head has.
    """
    rows = torch.arange(heads * sum(sizes)).view(heads, -1)
    return torch.cat([part.flatten() for part in rows.split(sizes, 1)])


def _feed_forward(config: ModelConfig, loader: Loader, name: str, layer: int) -> FeedForward:
    moe, hidden = config.moe, config.hidden
    if moe is None or layer in moe.dense_layers:
        return gated_mlp(loader, name, hidden, config.intermediate)
    return SparseMoe(
        router=loader.weight(f"{name}.gate.weight", moe.experts, hidden),
        gate_up=loader.experts(f"{name}.experts.gate_up_proj", moe.experts, 2 * moe.intermediate, hidden),
        down=loader.experts(f"{name}.experts.down_proj", moe.experts, hidden, moe.intermediate),
        shared=gated_mlp(loader, f"{name}.shared_expert", hidden, moe.shared_intermediate),
        shared_gate=loader.weight(f"{name}.shared_expert_gate.weight", 1, hidden),
        per_token=moe.per_token,
        renormalise=moe.renormalise,
        ops=loader.ops,
    )
