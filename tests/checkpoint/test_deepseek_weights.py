"""DeepSeek-V4 checkpoints: whatever the names and formats, the tensors are those of the transformers model."""

import re
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from v4_files import CHOSEN, CONFIG, EXPERTS, HIDDEN, VOCAB, WIDTH, Made, Tensors, assert_holds, fp8, write

from hybridkv import LLM
from hybridkv.checkpoint.deepseek_quant import QuantisedStore
from hybridkv.checkpoint.loader import Loader
from hybridkv.errors import ModelFileError
from hybridkv.models import open_checkpoint
from hybridkv.models.config import ModelConfig
from hybridkv.models.deepseek_family import check_schedule


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


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(1)
    yield
