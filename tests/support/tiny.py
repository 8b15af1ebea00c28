"""Tiny random models of every kind we run, made with transformers, which is the oracle of the parity tests.

Weights are drawn again after construction: transformers' own start values give near-uniform attention, a decay near
one and norm weights of exactly zero or one, with which many mistakes are invisible. Sizes differ wherever they may (the
query width is not the hidden width, key and value heads of the linear layers differ in number and in width), so that a
mixed-up dimension is a crash or a large error. `tiny_gguf.py` writes the same models as GGUF files.
"""

import copy
import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB, TOKENS = 97, 300

LLAMA: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=96, intermediate_size=160, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
# a short "original" context puts some of the frequencies into each of the three bands of the llama3 scaling
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

# two layers of each kind, in turns
QWEN: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=64, num_hidden_layers=4, full_attention_interval=2, num_attention_heads=6,
    num_key_value_heads=2, head_dim=32, linear_key_head_dim=16, linear_value_head_dim=32, linear_num_key_heads=2,
    linear_num_value_heads=6, linear_conv_kernel_dim=4, max_position_embeddings=4096, bos_token_id=None,
    eos_token_id=2,
)  # fmt: skip
# three linear layers in a row, as in published models, and one at the end
NEXT = {**QWEN, "num_hidden_layers": 5, "full_attention_interval": 4}
QWEN_ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
MROPE = {**QWEN_ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
MOE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=64)

# kind -> (config class, model class, arguments)
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {**LLAMA, "tie_word_embeddings": False}),
    "llama_tied": (LlamaConfig, LlamaForCausalLM, {**LLAMA, "tie_word_embeddings": True}),
    "llama3_rope": (LlamaConfig, LlamaForCausalLM, {**LLAMA, "rope_parameters": LLAMA3_ROPE}),
    "llama_bias": (LlamaConfig, LlamaForCausalLM, {**LLAMA, "attention_bias": True, "head_dim": 20}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {**LLAMA, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, {**QWEN, "intermediate_size": 96, "rope_parameters": MROPE}),
    "qwen3_5_tied": (
        Qwen3_5TextConfig,
        Qwen3_5ForCausalLM,
        {**QWEN, "intermediate_size": 96, "rope_parameters": MROPE, "tie_word_embeddings": True},
    ),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, {**QWEN, **MOE, "rope_parameters": MROPE}),
    "qwen3_next": (
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        {**NEXT, **MOE, "intermediate_size": 96, "rope_parameters": QWEN_ROPE, "norm_topk_prob": True},
    ),
}


def is_moe(kind: str) -> bool:
    return "num_experts" in KINDS[kind][2]


def build(kind: str, seed: int = 0) -> PreTrainedModel:
    """The model in float32 on the CPU, eager attention and experts."""
    config_class, model_class, arguments = KINDS[kind]
    model = model_class(config_class(**copy.deepcopy(arguments)))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.data = _draw(name, parameter, generator)
    model.tie_weights()
    model.set_attn_implementation("eager")
    if is_moe(kind):
        model.set_experts_implementation("eager")
    return model.eval()


def _draw(name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(parameter.shape, generator=generator)
    if name.endswith("A_log"):  # decay rates exp(A_log) between e^-2 and 1
        return torch.rand(parameter.shape, generator=generator) * 2 - 2
    if name.endswith("dt_bias"):
        return noise
    if "embed_tokens" in name:
        # small, so that the layers' outputs and not the token itself decide, also with tied weights
        return 0.3 * noise
    if name.endswith(".bias") or "conv1d" in name:
        return 0.5 * noise
    if "norm" in name:
        return parameter.data + 0.1 * noise
    return noise * 1.5 / parameter.shape[-1] ** 0.5


@torch.no_grad()
def reference_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """[T, vocab] float32: one forward over all ids, no cache."""
    return model(torch.tensor([ids]), use_cache=False).logits[0].float()


def token_ids(count: int, seed: int = 7) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def save(kind: str, folder: Path, dtype: torch.dtype = torch.float32, shard_size: str = "5GB") -> PreTrainedModel:
    """Writes the model as a Hugging Face folder; returns it in float32 with the weights as stored."""
    model = build(kind)
    copy.deepcopy(model).to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    return model


def _is_tied_head(model: PreTrainedModel, name: str) -> bool:
    return name == "lm_head.weight" and bool(model.config.tie_word_embeddings)


def save_vision_language(kind: str, folder: Path) -> PreTrainedModel:
    """The weights as a vision-language checkpoint: renamed, experts fused, config nested, vision and MTP added."""
    model = save(kind, folder)
    weights = {name: tensor for name, tensor in model.state_dict().items() if not _is_tied_head(model, name)}
    renamed = {re.sub(r"^model\.", "model.language_model.", name): tensor for name, tensor in weights.items()}
    hidden = model.config.hidden_size
    junk = {
        "model.visual.patch_embed.proj.weight": torch.randn(16, 3, 2, 4, 4),
        "model.visual.blocks.0.attn.qkv.weight": torch.randn(48, 16),
        "model.visual.merger.norm.weight": torch.randn(16),
        "mtp.fc.weight": torch.randn(hidden, 2 * hidden),
        "mtp.norm.weight": torch.randn(hidden),
        "mtp.layers.0.self_attn.k_proj.weight": torch.randn(64, hidden),
        "mtp.layers.0.mlp.gate_proj.weight": torch.randn(96, hidden),
    }
    save_file({**renamed, **junk}, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    outer = text["model_type"].removesuffix("_text")
    config = {
        "architectures": [text["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")],
        "model_type": outer,
        "text_config": text,
        "vision_config": {
            "model_type": outer,
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "out_hidden_size": hidden,
        },
        "image_token_id": 90,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return model


class Oracle:
    """One kind with all that a comparison needs; the folder is written, and the reference run, when first asked for."""

    def __init__(self, kind: str, place: Path) -> None:
        self.kind, self.place = kind, place
        self.ids = token_ids(TOKENS)
        # float32 noise of a few layers is near 1e-5 of the scale; a router near a tie turns it into more
        self.bound = 1e-3 if is_moe(kind) else 1e-4

    @cached_property
    def model(self) -> PreTrainedModel:
        return build(self.kind)

    @cached_property
    def folder(self) -> Path:
        save(self.kind, self.place / "f32")
        return self.place / "f32"

    @cached_property
    def logits(self) -> Tensor:
        """[TOKENS, vocab]; causal, so the first n rows are the logits of the first n ids."""
        return reference_logits(self.model, self.ids)
