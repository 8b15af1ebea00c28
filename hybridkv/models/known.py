"""Shapes of published models, in the words of a Hugging Face config.json, so that a plan needs no files.

Only what memory depends on is here. Nothing is loaded from these configs: a model that runs brings its own.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any

_QWEN: dict[str, Any] = dict(
    head_dim=256, full_attention_interval=4, linear_conv_kernel_dim=4, linear_key_head_dim=128,
    linear_value_head_dim=128, linear_num_key_heads=16, max_position_embeddings=262144, rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
)  # fmt: skip


def _llama3(hidden: int, layers: int, ffn: int, heads: int, head_dim: int, factor: float, tied: bool) -> dict[str, Any]:
    """Llama 3.1 and later, whose rotation is scaled."""
    rope = dict(rope_type="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=8192)  # fmt: skip
    return dict(
        model_type="llama", dtype="bfloat16", vocab_size=128256, hidden_size=hidden, num_hidden_layers=layers,
        intermediate_size=ffn, num_attention_heads=heads, num_key_value_heads=8, head_dim=head_dim,
        max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=rope,
        tie_word_embeddings=tied,
    )  # fmt: skip


_LLAMA_3_0: dict[str, Any] = dict(max_position_embeddings=8192, rope_scaling=None)


def _qwen3(hidden: int, layers: int, ffn: int, heads: int, tied: bool = False) -> dict[str, Any]:
    return dict(
        model_type="qwen3", dtype="bfloat16", vocab_size=151936, hidden_size=hidden, num_hidden_layers=layers,
        intermediate_size=ffn, num_attention_heads=heads, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=tied,
    )  # fmt: skip


def _dense(hidden: int, layers: int, ffn: int, heads: int, kv_heads: int, values: int, tied: bool) -> dict[str, Any]:
    return _QWEN | dict(
        model_type="qwen3_5_text", dtype="bfloat16", vocab_size=248320, hidden_size=hidden, num_hidden_layers=layers,
        intermediate_size=ffn, num_attention_heads=heads, num_key_value_heads=kv_heads,
        linear_num_value_heads=values, tie_word_embeddings=tied,
    )  # fmt: skip


def _moe(
    hidden: int, layers: int, heads: int, values: int, expert: int, experts: int, chosen: int,
    kind: str = "qwen3_5_moe_text", vocab: int = 248320,
) -> dict[str, Any]:  # fmt: skip
    return _QWEN | dict(
        model_type=kind, dtype="bfloat16", vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=2, linear_num_value_heads=values, num_experts=experts,
        num_experts_per_tok=chosen, moe_intermediate_size=expert, shared_expert_intermediate_size=expert,
        tie_word_embeddings=False,
    )  # fmt: skip


def _deepseek_v4(
    hidden: int, heads: int, q_rank: int, groups: int, topk: int, experts: int, expert: int, scaling: float,
    ratios: list[int],
) -> dict[str, Any]:  # fmt: skip
    return dict(
        model_type="deepseek_v4", dtype="bfloat16", vocab_size=129280, hidden_size=hidden,
        num_hidden_layers=len(ratios), num_attention_heads=heads, head_dim=512, qk_rope_head_dim=64,
        q_lora_rank=q_rank, o_groups=groups, o_lora_rank=1024, sliding_window=128, index_n_heads=64,
        index_head_dim=128, index_topk=topk, n_routed_experts=experts, num_experts_per_tok=6,
        moe_intermediate_size=expert, routed_scaling_factor=scaling, num_hash_layers=3, compress_ratios=ratios,
        max_position_embeddings=1 << 20, rms_norm_eps=1e-6, rope_theta=10000, compress_rope_theta=160000,
        rope_scaling=dict(
            type="yarn", factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536
        ),
    )  # fmt: skip


KNOWN: dict[str, dict[str, Any]] = {
    "SmolLM2-135M-Instruct": dict(
        model_type="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5,
        rope_theta=100000.0, tie_word_embeddings=True,
    ),
    "Llama-3-8B": _llama3(4096, 32, 14336, 32, 128, 1.0, False) | _LLAMA_3_0,
    "Llama-3-70B": _llama3(8192, 80, 28672, 64, 128, 1.0, False) | _LLAMA_3_0,
    "Llama-3.1-8B": _llama3(4096, 32, 14336, 32, 128, 8.0, False),
    "Llama-3.1-70B": _llama3(8192, 80, 28672, 64, 128, 8.0, False),
    "Llama-3.2-1B": _llama3(2048, 16, 8192, 32, 64, 32.0, True),
    "Llama-3.2-3B": _llama3(3072, 28, 8192, 24, 128, 32.0, True),
    "Llama-3.3-70B": _llama3(8192, 80, 28672, 64, 128, 8.0, False),
    "Qwen3-0.6B": _qwen3(1024, 28, 3072, 16, True),
    "Qwen3-1.7B": _qwen3(2048, 28, 6144, 16, True),
    "Qwen3-4B": _qwen3(2560, 36, 9728, 32, True),
    "Qwen3-8B": _qwen3(4096, 36, 12288, 32),
    "Qwen3-14B": _qwen3(5120, 40, 17408, 40),
    "Qwen3-32B": _qwen3(5120, 64, 25600, 64),
    "Qwen3.5-0.8B": _dense(1024, 24, 3584, 8, 2, 16, True),
    "Qwen3.5-4B": _dense(2560, 32, 9216, 16, 4, 32, True),
    "Qwen3.5-9B": _dense(4096, 32, 12288, 16, 4, 32, False),
    "Qwen3.5-27B": _dense(5120, 64, 17408, 24, 4, 48, False),
    "Qwen3.5-35B-A3B": _moe(2048, 40, 16, 32, 512, 256, 8),
    "Qwen3.5-122B-A10B": _moe(3072, 48, 32, 64, 1024, 256, 8),
    "Qwen3.5-397B-A17B": _moe(4096, 60, 32, 64, 1024, 512, 10),
    "Qwen3.6-27B": _dense(5120, 64, 17408, 24, 4, 48, False),
    "Qwen3.6-35B-A3B": _moe(2048, 40, 16, 32, 512, 256, 8),
    "Qwen3.8-27B": _dense(5120, 64, 17408, 24, 4, 48, False),
    "Qwen3-Next-80B-A3B": _moe(2048, 48, 16, 32, 512, 512, 10, "qwen3_next", 151936),
    "DeepSeek-V4-Flash": _deepseek_v4(4096, 64, 1024, 8, 512, 256, 2048, 1.5, [0, 0, *[4, 128] * 20, 4]),
    "DeepSeek-V4-Pro": _deepseek_v4(7168, 128, 1536, 16, 1024, 384, 3072, 2.5, [128, 128, *[4, 128] * 29, 4]),
}  # fmt: skip


NOT_RUN = {"Qwen3-30B-A3B": "qwen3_moe", "Qwen3-235B-A22B": "qwen3_moe"}  # published, of a family that is not run
_ENDINGS = ("-instruct", "-thinking", "-base", "-bf16")


def known_config(name: str) -> tuple[str, dict[str, Any]] | None:
    """(name, config) of a known model. Case, an organisation's prefix and endings such as -Instruct do not matter."""
    wanted = name.rsplit("/", 1)[-1].lower().removeprefix("meta-")
    spelled = {known.lower(): known for known in KNOWN}
    for ending in ("", *_ENDINGS):
        if wanted.endswith(ending) and wanted.removesuffix(ending) in spelled:
            found = spelled[wanted.removesuffix(ending)]
            return found, KNOWN[found]
    return None


def unknown_model(name: str) -> str:
    """What to say to who asks for a model that is not known: whether it is one that is not run, and what is near."""
    wanted = name.rsplit("/", 1)[-1].lower().removeprefix("meta-")
    for known, family in NOT_RUN.items():
        if wanted.startswith(known.lower()):
            return f"{known} is a model of the family {family}, which hybridkv does not run"
    spelled = {known.lower(): known for known in KNOWN}
    wanted = re.sub(r"(\.gguf|[-.](gguf|fp8|awq|gptq|i?q\d\w*|instruct|thinking|base|\d{4}))+$", "", wanted)
    near = (
        [spelled[wanted]]
        if wanted in spelled
        else [spelled[match] for match in get_close_matches(wanted, spelled, n=3, cutoff=0.6)]
    )
    meant = f"did you mean {' or '.join(near)}? Or " if near else ""
    return (
        f"there is no model at {name[:200]!r}; {meant}give a folder with a config.json, a .gguf file, or one of "
        f"{', '.join(KNOWN)}"
    )
