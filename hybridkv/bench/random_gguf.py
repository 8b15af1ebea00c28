"""A GGUF file of any model that has them, with random weights: its projections in one format, all else plain.

It is made to be loaded and run, not to say anything sensible: blocks are random bytes with small scales, and the same
few megabytes of them are written again and again, so that tens of gigabytes take as long as the disk does. Names and
shapes come from the family's own table of its GGUF files, read the other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES

from hybridkv.checkpoint.gguf_architecture import GgufArchitecture
from hybridkv.checkpoint.gguf_map import Table, common_sizes
from hybridkv.errors import HybridKVError
from hybridkv.models.config import ModelConfig
from hybridkv.models.registry import BY_MODEL_TYPE

Type = GGMLQuantizationType
FORMATS = {"q8_0": Type.Q8_0, "q6_k": Type.Q6_K, "q5_k": Type.Q5_K, "q4_k": Type.Q4_K}
# what llama.cpp stores where rows are not whole blocks
NARROW = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}
F16_AT = {Type.Q8_0: (0,), Type.Q6_K: (208,), Type.Q5_K: (0, 2), Type.Q4_K: (0, 2), Type.Q5_0: (0,), Type.Q5_1: (0, 2)}
CHUNK = 16 << 20  # bytes that are made once and repeated
SCALE = 1e-4  # of a block's scales: activations stay small whatever the depth


@dataclass(frozen=True)
class Stored:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        per_block, size = GGML_QUANT_SIZES[self.type]
        return prod(self.shape) // per_block * size


class _Wanted(Table):
    """A family's table that finds every tensor it looks for, and writes it down."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes, self.recipes, self.used = sizes, {}, set()
        self.shapes: dict[str, tuple[int, ...]] = {}

    def part(self, stored: str, letters: str) -> str:
        self.shapes[stored] = self.shape(" ".join(letter for letter in letters.split() if letter != "1"))
        return stored

    def has(self, layer: int, stored: str) -> bool:
        return False  # no biases, and projections as newer files have them


def write_random_gguf(raw: dict[str, Any], path: Path, form: str, seed: int = 0) -> list[Stored]:
    """Write the model of a Hugging Face config; `form`: q8_0, q6_k, q5_k or q4_k. The tensors of the file come back."""
    family = BY_MODEL_TYPE.get(str(raw.get("model_type")))
    if family is None or not family.gguf or form not in FORMATS:
        raise HybridKVError(f"no GGUF file of {raw.get('model_type')!r} in {form!r} can be made")
    [arch] = family.gguf
    config = ModelConfig.from_dict(raw)
    tensors = list_tensors(raw, config, arch, FORMATS[form])
    writer = GGUFWriter(path, arch.name, use_temp_file=False)
    add_keys(writer, raw, config)
    for tensor in tensors:
        per_block, size = GGML_QUANT_SIZES[tensor.type]
        stored = (*tensor.shape[:-1], tensor.shape[-1] // per_block * size)
        writer.add_tensor_info(tensor.name, stored, np.dtype(np.uint8), tensor.nbytes, raw_dtype=tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    [out] = writer.fout
    out.write(bytes(-out.tell() % writer.data_alignment))
    rng = np.random.default_rng(seed)
    chunks = {kind: random_blocks(kind, rng) for kind in {t.type for t in tensors} if kind in F16_AT}
    for tensor in tensors:
        if tensor.type in chunks:
            repeat(out.write, chunks[tensor.type], tensor.nbytes)
        elif tensor.type is Type.BF16:  # the embedding
            repeat(out.write, (rng.standard_normal(CHUNK // 4, np.float32) * 0.02).view(np.uint16)[1::2], tensor.nbytes)
        else:
            out.write(plain_values(tensor, rng).tobytes())
        out.write(bytes(-tensor.nbytes % writer.data_alignment))
    writer.close()
    return tensors


def list_tensors(
    raw: dict[str, Any], config: ModelConfig, arch: GgufArchitecture, kind: GGMLQuantizationType
) -> list[Stored]:
    """Every tensor of the file: what the engine keeps packed in `kind`, the embedding in BF16, all else in F32."""
    attention = set(config.attention_layers)
    words: dict[str, Any] = dict(raw) | {
        "head_dim": config.head_dim,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.intermediate,
        "layer_types": ["full_attention" if i in attention else "linear_attention" for i in range(config.layers)],
    }
    table = _Wanted(common_sizes(words) | arch.sizes(words))
    table.add(("token_embd.weight", "model.embed_tokens.weight", "V H"))
    table.add(("output_norm.weight", "model.norm.weight", "H"))
    if not config.tied:
        table.add(("output.weight", "lm_head.weight", "V H"))
    for layer in range(config.layers):
        arch.add_layer(table, words, layer)

    def type_of(name: str, shape: tuple[int, ...]) -> GGMLQuantizationType:
        if name == "token_embd.weight":
            return Type.BF16
        if len(shape) < 2 or "conv1d" in name or "ffn_gate_inp" in name:
            return Type.F32
        narrow = shape[-1] % GGML_QUANT_SIZES[kind][0]
        found = NARROW.get(kind, Type.F32) if narrow else kind
        return found if shape[-1] % GGML_QUANT_SIZES[found][0] == 0 else Type.F32

    return [Stored(name, shape, type_of(name, shape)) for name, shape in table.shapes.items()]


def add_keys(writer: GGUFWriter, raw: dict[str, Any], config: ModelConfig) -> None:
    """The keys that a reader needs."""
    writer.add_name("random weights")
    writer.add_block_count(config.layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_rope_freq_base(config.rotation.theta)
    writer.add_rope_dimension_count(config.rotation.channels)
    writer.add_vocab_size(config.vocab)
    if config.moe is None:
        writer.add_feed_forward_length(config.intermediate)
    else:
        writer.add_expert_count(config.moe.experts)
        writer.add_expert_used_count(config.moe.per_token)
        writer.add_expert_feed_forward_length(config.moe.intermediate)
        writer.add_expert_shared_feed_forward_length(config.moe.shared_intermediate)
    if config.gdn is not None:
        writer.add_full_attention_interval(int(raw.get("full_attention_interval", 4)))
        writer.add_ssm_conv_kernel(config.gdn.kernel_width)
        writer.add_ssm_state_size(config.gdn.key_dim)
        writer.add_ssm_group_count(config.gdn.key_heads)
        writer.add_ssm_time_step_rank(config.gdn.value_heads)
        writer.add_ssm_inner_size(config.gdn.value_heads * config.gdn.value_dim)


def random_blocks(kind: GGMLQuantizationType, rng: np.random.Generator) -> np.ndarray:
    """u8: whole blocks of random codes, about CHUNK bytes of them, whose scales are small and of either sign."""
    size = GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (CHUNK // size, size), dtype=np.uint8)
    for at in F16_AT[kind]:
        scales = (rng.standard_normal(len(blocks)) * SCALE).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(-1)


def repeat(write: Callable[[Any], Any], chunk: np.ndarray, nbytes: int) -> None:
    """Write `nbytes` bytes, the chunk again and again."""
    view = memoryview(chunk.tobytes())
    for at in range(0, nbytes, len(view)):
        write(view[: min(len(view), nbytes - at)])


def plain_values(tensor: Stored, rng: np.random.Generator) -> np.ndarray:
    """f32: ones for norms, a decay that is one, small numbers for the rest."""
    if tensor.name.endswith("norm.weight"):
        return np.ones(tensor.shape, np.float32)
    if tensor.name.endswith("ssm_a"):
        return np.full(tensor.shape, -0.5, np.float32)
    return (rng.standard_normal(tensor.shape) * 0.02).astype(np.float32)
