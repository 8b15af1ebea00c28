"""The streaming layer is transformers' DeepSeek-V4 attention module: what the cache is tested against is the model."""

import pytest
import tiny_v4
import torch
from numerics import logit_gap
from torch import Tensor
from transformers.masking_utils import create_sliding_window_causal_mask
from v4_stream import CompressorWeights, LayerWeights, Shape, StreamLayer, frequencies

KINDS = {"sliding_attention": "window", "compressed_sparse_attention": "csa", "heavily_compressed_attention": "hca"}
YARN = (16, 65536, 32, 1)


def weights_of(module: torch.nn.Module, config: tiny_v4.DeepseekV4Config, kind: str) -> LayerWeights:
    w = {name: x.double() for name, x in module.state_dict().items()}
    shape = Shape(
        config.hidden_size, config.num_attention_heads, config.head_dim, 8, config.q_lora_rank, config.index_n_heads,
        config.index_head_dim, config.index_topk, config.sliding_window, 4,
        config.compress_rates["heavily_compressed_attention"],
    )  # fmt: skip

    def compressor(name: str) -> CompressorWeights | None:
        if f"{name}.position_bias" not in w:
            return None
        parts = ("kv_proj.weight", "gate_proj.weight", "position_bias", "kv_norm.weight")
        return CompressorWeights(*(w[f"{name}.{part}"] for part in parts))

    plain, scaled = frequencies(8, 1e4), frequencies(8, 1.6e5, YARN)
    common = ("q_a_proj.weight", "q_a_norm.weight", "q_b_proj.weight", "kv_proj.weight", "kv_norm.weight", "sinks")
    return LayerWeights(
        kind, shape, *((plain, scaled) if kind == "window" else (scaled, plain)), *(w[name] for name in common),
        compressor("compressor"), compressor("compressor.indexer"), w.get("compressor.indexer.q_b_proj.weight"),
        w.get("compressor.indexer.scorer.weights_proj.weight"),
    )  # fmt: skip


@torch.no_grad()
def module_output(model: torch.nn.Module, layer: int, x: Tensor) -> Tensor:
    """The attention module alone on x [T, hidden], called as the model does."""
    at, x = torch.arange(len(x))[None], x[None]
    given = dict(config=model.config, inputs_embeds=x, attention_mask=None, past_key_values=None, position_ids=at)
    angles = {name: model.model.rotary_emb(x, position_ids=at, layer_type=name) for name in ("main", "compress")}
    mask = create_sliding_window_causal_mask(**given)
    attention = model.model.layers[layer].self_attn
    return attention(x, position_embeddings=angles, position_ids=at, attention_mask=mask)[0][0]


@pytest.mark.parametrize(("kind", "T"), (("mini", 80), ("select", 140)))
@pytest.mark.parametrize("layer", (0, 1, 2))
def test_the_stream_is_the_attention_module(kind: str, T: int, layer: int) -> None:
    """To float32 rounding, of which the module does some in float64 too."""
    model = tiny_v4.build(kind, scale=12.0).double()
    attention, config = model.model.layers[layer].self_attn, model.config
    x = torch.randn(T, config.hidden_size, dtype=torch.float64)
    stream = StreamLayer(weights_of(attention, config, KINDS[config.layer_types[layer]]))
    heads = stream.run(x).view(T, config.o_groups, -1)
    low = torch.einsum("tgi,gri->tgr", heads, attention.o_a_proj.weight.view(config.o_groups, config.o_lora_rank, -1))
    got = low.flatten(1) @ attention.o_b_proj.weight.T
    assert logit_gap(module_output(model, layer, x), got.detach()) <= 2e-6
    if stream.index is not None:
        assert any(c != [*range(len(c))] for c in stream.chosen)  # something was left out
