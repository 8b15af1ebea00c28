"""DeepSeek-V4 checkpoints: whatever the names and formats, the tensors are those of the transformers model.

Quantised files are made here from random codes and scales, and decoded here bit field by bit field.
"""

import json
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from hybridkv import LLM
from hybridkv.errors import HybridKVError, ModelFileError, UnsupportedModel
from hybridkv.models.config import ModelConfig
from hybridkv.models.deepseek_names import check_schedule
from hybridkv.models.deepseek_quant import QuantisedStore, block_size
from hybridkv.models.loader import Loader
from hybridkv.models.weights import Checkpoint, open_checkpoint

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


# --- what is read ---


@pytest.fixture(scope="module")
def released() -> Made:
    return Made()


def test_the_released_names_and_formats(tmp_path: Path, released: Made) -> None:
    with open_checkpoint(write(tmp_path, released.stored)) as checkpoint:
        assert_holds(checkpoint, released.values)
        assert checkpoint.nbytes == sum(t.nbytes for t in released.stored.values())
        for name in ("self_attn.q_b_proj.weight", "mlp.experts.down_proj"):
            assert checkpoint.read(f"model.layers.1.{name}").dtype == torch.bfloat16  # holds them exactly
        assert checkpoint.read("model.layers.0.mlp.gate.tid2eid").dtype == torch.int64
        assert checkpoint.read("model.layers.1.mlp.gate.e_score_correction_bias").dtype == torch.float32
        check_schedule(ModelConfig.from_dict(checkpoint.config), checkpoint.__contains__)


def test_base_models_have_fp8_experts_and_f32_scales(tmp_path: Path) -> None:
    made = Made(base=True)
    with open_checkpoint(write(tmp_path, made.stored)) as checkpoint:
        assert_holds(checkpoint, made.values)
        assert checkpoint.read("model.layers.1.mlp.experts.gate_up_proj").dtype == torch.float32


def test_other_spellings_of_the_same_bytes(tmp_path: Path, released: Made) -> None:
    """Scales as U8, experts as U8 and F4, indices as I32, names with a prefix."""
    stored: Tensors = {}
    for name, tensor in released.stored.items():
        if tensor.dtype == torch.float8_e8m0fnu:
            tensor = tensor.view(torch.uint8)
        elif tensor.dtype == torch.int8:
            tensor = tensor.view(torch.uint8 if ".w1." in name else torch.float4_e2m1fn_x2)
        elif name.endswith("tid2eid"):
            tensor = tensor.int()
        stored[f"model.{name}" if name.startswith("layers.") else name] = tensor
    with open_checkpoint(write(tmp_path, stored)) as checkpoint:
        assert_holds(checkpoint, released.values)


def test_transformers_names_with_fp8_scales(tmp_path: Path) -> None:
    made = Made(base=True)
    stored = {name: value for name, value in made.values.items() if ".experts." not in name}
    names = dict(made.matrices)
    for name in made.stored:
        if match := re.fullmatch(r"(layers\.\d)\.ffn(\.experts\.\d\.)(w\d)\.weight", name):
            matrix = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}[match[3]]
            names[name.removesuffix(".weight")] = f"model.{match[1]}.mlp{match[2]}{matrix}"
    for old, new in names.items():
        stored |= {f"{new}.weight": made.stored[f"{old}.weight"]}
        stored |= {f"{new}.weight_scale_inv": made.stored[f"{old}.scale"]}
    with open_checkpoint(write(tmp_path, stored)) as checkpoint:
        assert_holds(checkpoint, made.values)


@pytest.fixture(scope="module")
def tiny_hf() -> DeepseekV4ForCausalLM:
    return DeepseekV4ForCausalLM(DeepseekV4Config(**{k: v for k, v in CONFIG.items() if k != "model_type"}))


def test_what_transformers_saves(tmp_path: Path, tiny_hf: DeepseekV4ForCausalLM) -> None:
    tiny_hf.save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, tiny_hf.state_dict())
        check_schedule(ModelConfig.from_dict(checkpoint.config), checkpoint.__contains__)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_the_state_dict_of_transformers(tmp_path: Path, tiny_hf: DeepseekV4ForCausalLM, prefix: str) -> None:
    state = tiny_hf.state_dict()
    stored = {name.removeprefix("model.") if not prefix else name: tensor for name, tensor in state.items()}
    with open_checkpoint(write(tmp_path, stored, {"dtype": "float32"})) as checkpoint:
        assert_holds(checkpoint, state)


def test_either_form_is_the_same_model(tmp_path: Path, released: Made) -> None:
    ids = torch.randint(0, VOCAB, (20,)).tolist()
    folders = write(tmp_path / "released", released.stored), write(tmp_path / "plain", released.values, {"tie": False})
    one, other = (LLM(f, device="cpu", dtype="float32", max_requests=1, max_context=64).logits(ids) for f in folders)
    assert one.isfinite().all() and torch.equal(one, other)


def test_draft_layers_are_set_aside_and_counted(tmp_path: Path, released: Made) -> None:
    drafts = {f"mtp.0{name[8:]}": t.clone() for name, t in released.stored.items() if name.startswith("layers.0.")}
    extra = {
        "mtp.0.e_proj.weight": fp8(4, 4)[0],
        "mtp.0.e_proj.scale": fp8(4, 4)[1],
        "mtp.0.enorm.weight": torch.ones(4),
    }
    with open_checkpoint(write(tmp_path, released.stored | drafts | extra)) as checkpoint:
        assert sorted(checkpoint.names()) == sorted(released.values)
        assert checkpoint.set_aside == {"mtp": len(drafts) + 3}


def test_experts_are_loaded_one_by_one(tmp_path: Path, released: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref] = []
    most = 0
    read = QuantisedStore.read

    def watched(self: QuantisedStore, name: str) -> Tensor:
        nonlocal most
        tensor = read(self, name)
        alive.append(weakref.ref(tensor))
        most = max(most, sum(ref() is not None for ref in alive))
        return tensor

    monkeypatch.setattr(QuantisedStore, "read", watched)
    with open_checkpoint(write(tmp_path, released.stored)) as checkpoint:
        loader = Loader(checkpoint, torch.device("cpu"), torch.float32)
        name = "model.layers.1.mlp.experts.gate_up_proj"
        found = loader.weight(name, EXPERTS, 2 * WIDTH, HIDDEN)
    assert found.dtype == torch.float32 and torch.equal(found, released.values[name])
    assert len(alive) == 2 * EXPERTS and most <= 2  # the one in use, and the one before while it is let go


def test_a_table_of_indices_is_kept_and_checked(tmp_path: Path, released: Made) -> None:
    name = "model.layers.0.mlp.gate.tid2eid"
    with open_checkpoint(write(tmp_path, released.stored)) as checkpoint:
        loader = Loader(checkpoint, torch.device("cpu"), torch.bfloat16)
        found = loader.indices(name, VOCAB, CHOSEN, below=EXPERTS)
        assert found.dtype == torch.int64 and torch.equal(found, released.values[name])
        with pytest.raises(ModelFileError, match="from 0 to 1"):
            loader.indices(name, VOCAB, CHOSEN, below=EXPERTS - 1)
        with pytest.raises(ModelFileError, match="asks for"):
            loader.indices(name, VOCAB, 3, below=EXPERTS)
        with pytest.raises(ModelFileError, match="whole numbers"):
            loader.indices("model.layers.1.mlp.gate.e_score_correction_bias", EXPERTS, below=EXPERTS)


# --- what is refused ---

WQ, W1 = "layers.1.attn.wq_b", "layers.1.ffn.experts.1.w1"


def without(*names: str) -> Callable[[Tensors], None]:
    def change(stored: Tensors) -> None:
        for name in names:
            del stored[name]

    return change


def put(name: str, make: Callable[[Tensor], Tensor], source: str | None = None) -> Callable[[Tensors], None]:
    def change(stored: Tensors) -> None:
        stored[name] = make(stored[source or name])

    return change


def nan_scale(scale: Tensor) -> Tensor:
    return torch.full(scale.shape, 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def nan_code(weight: Tensor) -> Tensor:
    codes = weight.view(torch.uint8).clone()
    codes[3, 5] = 0x7F
    return codes.view(torch.float8_e4m3fn)


AT_ONCE = {
    "no scale": (without(f"{WQ}.scale"), ModelFileError, "wq_b.weight' is F8_E4M3 and its scales are missing"),
    "no expert scale": (without(f"{W1}.scale"), ModelFileError, "w1.weight' is I8 and its scales are missing"),
    "scale alone": (without(f"{WQ}.weight"), ModelFileError, "wq_b.scale' are the scales of a tensor that is missing"),
    "scale of a norm": (
        put("layers.1.attn.q_norm.scale", torch.clone, f"{WQ}.scale"), ModelFileError, "q_norm.weight' is F32 and has",
    ),
    "two scales": (put(f"{WQ}.weight_scale_inv", torch.clone, f"{WQ}.scale"), ModelFileError, "two tensors of scales"),
    "scale shape": (
        put(f"{WQ}.scale", lambda s: s.repeat(2, 1)), ModelFileError,
        r"wq_b.weight' of \[64, 24\] needs scales of \[1, 1\], not \[2, 1\]",
    ),
    "expert scale shape": (
        put(f"{W1}.scale", lambda s: s[:, :2]), ModelFileError,
        r"of \[40, 144\] needs scales of \[40, 5\], not \[40, 2\]",
    ),
    "scale dtype": (put(f"{WQ}.scale", lambda s: s.float().bfloat16()), ModelFileError, "has scales in BF16"),
    "scaled vector": (
        put(f"{WQ}.weight", lambda w: w.flatten()), ModelFileError, r"shape \[1536\]; with scales it must be a matrix",
    ),
    "weight dtype": (put("norm.weight", torch.Tensor.double), UnsupportedModel, "norm.weight' is F64"),
    "integer weight": (put("norm.weight", torch.Tensor.long), UnsupportedModel, "norm.weight' is I64"),
    "float indices": (
        put("layers.0.ffn.gate.tid2eid", torch.Tensor.float), ModelFileError, "tid2eid' is F32; it must be I64 or I32",
    ),
    "no expert": (
        without(f"{W1}.weight", f"{W1}.scale"), ModelFileError,
        "mlp.experts.1.gate_proj.weight' is missing, of 3 experts",
    ),
    "twice": (
        put("model.layers.1.self_attn.kv_norm.weight", torch.clone, "layers.1.attn.kv_norm.weight"), ModelFileError,
        "two tensors stand for 'model.layers.1.self_attn.kv_norm.weight'",
    ),
}  # fmt: skip


def test_a_head_that_is_missing_is_not_the_embedding(tmp_path: Path, released: Made) -> None:
    stored = dict(released.stored)
    del stored["head.weight"]
    with pytest.raises(ModelFileError, match="lm_head.weight is missing"):
        LLM(str(write(tmp_path, stored)), "cpu", "float32", max_context=64)


@pytest.mark.parametrize("case", AT_ONCE)
def test_a_bad_file_is_refused_at_once(tmp_path: Path, released: Made, case: str) -> None:
    change, error, words = AT_ONCE[case]
    stored = dict(released.stored)
    change(stored)
    with pytest.raises(error, match=words):
        open_checkpoint(write(tmp_path, stored))


@pytest.mark.parametrize(
    ("stored_name", "make", "name"),
    [
        (f"{WQ}.scale", nan_scale, "model.layers.1.self_attn.q_b_proj.weight"),
        (f"{WQ}.weight", nan_code, "model.layers.1.self_attn.q_b_proj.weight"),
        (f"{W1}.scale", nan_scale, "model.layers.1.mlp.experts.gate_up_proj"),
    ],
)
def test_what_is_not_a_number_is_refused(
    tmp_path: Path, released: Made, stored_name: str, make: Callable[[Tensor], Tensor], name: str
) -> None:
    stored = {**released.stored, stored_name: make(released.stored[stored_name])}
    with open_checkpoint(write(tmp_path, stored)) as checkpoint, pytest.raises(ModelFileError, match="holds NaN"):
        checkpoint.read(name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(compress_ratios=[0, 128, 128]), "layer 1 is HCA by the config .* but has the weights of CSA"),
        (dict(compress_ratios=[0, 4, 4]), "layer 2 is CSA by the config .* but has the weights of HCA"),
        (dict(compress_ratios=[0, 0, 128]), "layer 1 is WINDOW by the config .* but has the weights of CSA"),
        (dict(compress_ratios=[4, 4, 128]), "layer 0 is CSA by the config .* but has the weights of WINDOW"),
        (dict(num_hash_layers=0), r"layer 0 needs mlp.gate.e_score_correction_bias"),
        (dict(num_hash_layers=2), r"layer 1 needs mlp.gate.tid2eid"),
    ],
)
def test_a_schedule_that_is_not_the_checkpoints(released: Made, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFileError, match=words):
        check_schedule(ModelConfig.from_dict(CONFIG | changes), released.values.__contains__)


@pytest.mark.parametrize(
    ("quantised", "words"),
    [
        ({"quant_method": "gptq"}, "quant_method 'gptq'; only fp8"),
        ("fp8", "only fp8"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size"),
    ],
)
def test_a_quantisation_that_is_not_read(tmp_path: Path, released: Made, quantised: object, words: str) -> None:
    with pytest.raises(HybridKVError, match=words):
        open_checkpoint(write(tmp_path, released.stored, {"quantization_config": quantised}))


def test_the_block_size_is_the_configs() -> None:
    assert block_size(None) == block_size(QUANTISED) == (128, 128)
    assert block_size({"quant_method": "fp8", "weight_block_size": [32, 64]}) == (32, 64)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(1)
    yield
