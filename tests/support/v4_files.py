"""DeepSeek-V4 checkpoints, made from random codes and scales and decoded here bit field by bit field."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hybridkv.checkpoint.checkpoint import Checkpoint

Tensors = dict[str, Tensor]

# odd on purpose: neither blocks of 128 nor groups of 32 come out even
HIDDEN, HEADS, HEAD, Q_RANK, GROUPS, O_RANK, VOCAB = 144, 2, 32, 24, 2, 8, 50
INDEX_HEADS, INDEX, EXPERTS, CHOSEN, WIDTH, STREAMS = 2, 16, 3, 2, 40, 4
CONFIG: dict[str, Any] = dict(
    model_type="deepseek_v4", vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=3, num_attention_heads=HEADS,
    head_dim=HEAD, qk_rope_head_dim=8, q_lora_rank=Q_RANK, o_groups=GROUPS, o_lora_rank=O_RANK, sliding_window=8,
    index_n_heads=INDEX_HEADS, index_head_dim=INDEX, index_topk=3, n_routed_experts=EXPERTS,
    num_experts_per_tok=CHOSEN, moe_intermediate_size=WIDTH, routed_scaling_factor=1.5, num_hash_layers=1,
    compress_ratios=[0, 4, 128, 0], max_position_embeddings=1024, eos_token_id=1,
)  # fmt: skip
QUANTISED = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


# --- formats, decoded one value at a time ---


def e4m3(code: int) -> float:
    sign, exponent, mantissa = -1 if code & 128 else 1, code >> 3 & 15, code & 7
    return sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def e2m1(code: int) -> float:
    sign, exponent, mantissa = -1 if code & 8 else 1, code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


FP8_VALUES = torch.tensor([e4m3(code) if code & 127 != 127 else torch.nan for code in range(256)])
FP4_VALUES = torch.tensor([e2m1(code) for code in range(16)])


def exponents(*shape: int) -> Tensor:
    return torch.randint(118, 124, shape, dtype=torch.uint8)


def fp8(rows: int, columns: int, base: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """(stored weight, stored scales, values)"""
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    codes[codes & 127 == 127] = 0  # NaN
    size = -(-rows // 128), -(-columns // 128)
    byte = exponents(*size)
    scale = torch.rand(size) / 64 if base else 2.0 ** (byte.float() - 127)
    values = FP8_VALUES[codes.long()]
    for row in range(rows):
        for block in range(size[1]):
            values[row, block * 128 : block * 128 + 128] *= scale[row // 128, block]
    return codes.view(torch.float8_e4m3fn), scale if base else byte.view(torch.float8_e8m0fnu), values


def fp4(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    byte = exponents(rows, -(-columns // 32))
    values = FP4_VALUES[codes.long()] * torch.stack(
        [2.0 ** (byte[:, i // 32].float() - 127) for i in range(columns)], 1
    )
    return (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8), byte.view(torch.float8_e8m0fnu), values


# --- a tiny model: what is stored under the released names, and what it stands for ---


class Made:
    def __init__(self, base: bool = False) -> None:
        """base: FP8 experts and f32 scales; else FP4 experts and powers of two."""
        torch.manual_seed(0)
        self.base = base
        self.stored: Tensors = {}
        self.values: Tensors = {}
        self.matrices: dict[str, str] = {}  # names of quantised matrices outside of experts: stored -> canonical
        self.plain("embed.weight", "model.embed_tokens.weight", VOCAB, HIDDEN, dtype=torch.bfloat16)
        self.plain("head.weight", "lm_head.weight", VOCAB, HIDDEN, dtype=torch.bfloat16)
        self.plain("norm.weight", "model.norm.weight", HIDDEN, dtype=torch.bfloat16)
        for part, shape in (("fn", (STREAMS, STREAMS * HIDDEN)), ("base", (STREAMS,)), ("scale", (1,))):
            self.plain(f"hc_head_{part}", f"model.hc_head.hc_{part}", *shape)
        for layer, kind in enumerate(("window", "csa", "hca")):
            self.layer(f"layers.{layer}", kind, hashed=layer == 0)

    def plain(self, name: str, target: str, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        self.stored[name] = self.values[target] = torch.randn(shape).to(dtype)

    def matrix(self, name: str, target: str, rows: int, columns: int) -> None:
        weight, scale, values = fp8(rows, columns, self.base)
        self.stored |= {f"{name}.weight": weight, f"{name}.scale": scale}
        self.values[f"{target}.weight"] = values
        self.matrices[name] = target

    def layer(self, old: str, kind: str, hashed: bool) -> None:
        new = f"model.{old}"
        self.plain(f"{old}.attn_norm.weight", f"{new}.input_layernorm.weight", HIDDEN)
        self.plain(f"{old}.ffn_norm.weight", f"{new}.post_attention_layernorm.weight", HIDDEN)
        for sub in ("attn", "ffn"):
            for part, shape in (("fn", (24, STREAMS * HIDDEN)), ("base", (24,)), ("scale", (3,))):
                self.plain(f"{old}.hc_{sub}_{part}", f"{new}.{sub}_hc.{part}", *shape)
        a, s = f"{old}.attn", f"{new}.self_attn"
        self.matrix(f"{a}.wq_a", f"{s}.q_a_proj", Q_RANK, HIDDEN)
        self.matrix(f"{a}.wq_b", f"{s}.q_b_proj", HEADS * HEAD, Q_RANK)
        self.matrix(f"{a}.wkv", f"{s}.kv_proj", HEAD, HIDDEN)
        self.matrix(f"{a}.wo_a", f"{s}.o_a_proj", GROUPS * O_RANK, HEADS * HEAD // GROUPS)
        self.matrix(f"{a}.wo_b", f"{s}.o_b_proj", HIDDEN, GROUPS * O_RANK)
        self.plain(f"{a}.q_norm.weight", f"{s}.q_a_norm.weight", Q_RANK)
        self.plain(f"{a}.kv_norm.weight", f"{s}.kv_norm.weight", HEAD)
        self.plain(f"{a}.attn_sink", f"{s}.sinks", HEADS)
        if kind == "csa":
            self.compressor(f"{a}.compressor", f"{s}.compressor", 4, 2 * HEAD, HEAD)
            self.compressor(f"{a}.indexer.compressor", f"{s}.compressor.indexer", 4, 2 * INDEX, INDEX)
            indexer = f"{s}.compressor.indexer"
            self.matrix(f"{a}.indexer.wq_b", f"{indexer}.q_b_proj", INDEX_HEADS * INDEX, Q_RANK)
            self.plain(f"{a}.indexer.weights_proj.weight", f"{indexer}.scorer.weights_proj.weight", INDEX_HEADS, HIDDEN)
        if kind == "hca":
            self.compressor(f"{a}.compressor", f"{s}.compressor", 128, HEAD, HEAD)
        self.experts(f"{old}.ffn", f"{new}.mlp", hashed)

    def compressor(self, old: str, new: str, ratio: int, wide: int, width: int) -> None:
        self.plain(f"{old}.wkv.weight", f"{new}.kv_proj.weight", wide, HIDDEN, dtype=torch.bfloat16)
        self.plain(f"{old}.wgate.weight", f"{new}.gate_proj.weight", wide, HIDDEN, dtype=torch.bfloat16)
        self.plain(f"{old}.ape", f"{new}.position_bias", ratio, wide)
        self.plain(f"{old}.norm.weight", f"{new}.kv_norm.weight", width)

    def experts(self, f: str, m: str, hashed: bool) -> None:
        self.plain(f"{f}.gate.weight", f"{m}.gate.weight", EXPERTS, HIDDEN, dtype=torch.bfloat16)
        if hashed:
            table = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(VOCAB)])
            self.stored[f"{f}.gate.tid2eid"] = self.values[f"{m}.gate.tid2eid"] = table
        else:
            self.plain(f"{f}.gate.bias", f"{m}.gate.e_score_correction_bias", EXPERTS)
        gate_up, down = torch.empty(EXPERTS, 2 * WIDTH, HIDDEN), torch.empty(EXPERTS, HIDDEN, WIDTH)
        for expert in range(EXPERTS):
            targets = {"w1": gate_up[expert, :WIDTH], "w3": gate_up[expert, WIDTH:], "w2": down[expert]}
            for name, target in targets.items():
                weight, scale, values = fp8(*target.shape, base=True) if self.base else fp4(*target.shape)
                target.copy_(values)
                self.stored |= {
                    f"{f}.experts.{expert}.{name}.{k}": v for k, v in (("weight", weight), ("scale", scale))
                }
        self.values |= {f"{m}.experts.gate_up_proj": gate_up, f"{m}.experts.down_proj": down}
        for old, new, rows, columns in (
            ("w1", "gate", WIDTH, HIDDEN), ("w2", "down", HIDDEN, WIDTH), ("w3", "up", WIDTH, HIDDEN),
        ):  # fmt: skip
            self.matrix(f"{f}.shared_experts.{old}", f"{m}.shared_experts.{new}_proj", rows, columns)


def write(folder: Path, stored: Tensors, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {"quantization_config": QUANTISED})))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    return folder


def assert_holds(checkpoint: Checkpoint, wanted: Tensors) -> None:
    assert sorted(checkpoint.names()) == sorted(wanted)
    for name, value in wanted.items():
        found = checkpoint.read(name)
        assert checkpoint.shape(name) == tuple(found.shape) == tuple(value.shape), name
        assert found.is_floating_point() == value.is_floating_point(), name
        assert torch.equal(found.double(), value.double()), name
