"""DeepSeek-V4's tensor names: the released checkpoints', transformers' own, and the mixture that it saves.

    released       layers.3.attn.wq_a.weight                 layers.3.ffn.experts.7.w1.weight
    transformers   model.layers.3.self_attn.q_a_proj.weight  model.layers.3.mlp.experts.gate_up_proj [E, 2 * width, D]
    as it saves    model.layers.3.attn.wq_a.weight           model.layers.3.ffn.experts.7.w1.weight

Transformers' names are the canonical ones. An expert's matrices get the names gate_proj, up_proj and down_proj, which
are stacked as everyone's are.
"""

from __future__ import annotations

import re

_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    **{f"hc_head_{part}": f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")},
}
_COMPRESSOR = {
    "wkv.weight": "kv_proj.weight",
    "wgate.weight": "gate_proj.weight",
    "ape": "position_bias",
    "norm.weight": "kv_norm.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{f"hc_{sub}_{part}": f"{sub}_hc.{part}" for sub in ("attn", "ffn") for part in ("fn", "base", "scale")},
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.norm.weight": "self_attn.kv_norm.weight",  # so transformers saves it
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.attn_sink": "self_attn.sinks",
    **{f"attn.compressor.{old}": f"self_attn.compressor.{new}" for old, new in _COMPRESSOR.items()},
    **{f"attn.indexer.compressor.{old}": f"self_attn.compressor.indexer.{new}" for old, new in _COMPRESSOR.items()},
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
}
_EXPERT = re.compile(r"ffn\.experts\.(\d{1,6})\.w([123])\.weight")
_MATRIX = {"1": "gate", "2": "down", "3": "up"}
_IN_LAYER = re.compile(r"layers\.(\d{1,6})\.(.+)")


def deepseek_name(name: str) -> str:
    """The canonical name of a stored tensor. One that DeepSeek-V4 does not have keeps its name, and finds no place."""
    bare = name.removeprefix("model.")
    found = _IN_LAYER.fullmatch(bare)
    if found is None:
        return _TOP.get(bare, f"model.{name}" if name.startswith(("embed_tokens.", "hc_head.")) else name)
    leaf = found[2]
    if expert := _EXPERT.fullmatch(leaf):
        leaf = f"mlp.experts.{expert[1]}.{_MATRIX[expert[2]]}_proj.weight"
    return f"model.layers.{found[1]}.{_LAYER.get(leaf, leaf)}"
