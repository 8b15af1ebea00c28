"""Models whose matrices stay packed as the GGUF file has them compute what they compute with the same ones dequantised.

Kernels are for GPUs: here the packed form is forced, in plain torch, or under Triton's interpreter.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_gguf
import torch
from numerics import logit_gap
from torch import Tensor

from hybridkv import LLM
from hybridkv.checkpoint.gguf_file import GgufFile
from hybridkv.cli import main
from hybridkv.errors import HybridKVError, ModelFileError
from hybridkv.kernels.linear import packed as linear_packed
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.linear.packed_linear import PackedLinear
from hybridkv.kernels.linear.packed_weights import Packed
from hybridkv.models import open_checkpoint
from hybridkv.models.config import ModelConfig
from hybridkv.planner import model_bytes

# every width that is summed over is a multiple of 256; value heads of 64 columns are no whole block
WIDE: dict[str, Any] = dict(hidden_size=256, num_attention_heads=8)
LINEAR: dict[str, Any] = dict(linear_value_head_dim=64, linear_num_value_heads=4, num_hidden_layers=4)
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {**WIDE, "intermediate_size": 256, "num_hidden_layers": 1},
    "qwen3_5": {**WIDE, **LINEAR, "intermediate_size": 256},
    "qwen3_next": {**WIDE, **LINEAR, "shared_expert_intermediate_size": 256},
}
WRITERS: dict[str, Callable[..., Path]] = {
    "llama": tiny_gguf.write_gguf_llama,
    "qwen3_5": tiny_gguf.write_gguf_qwen35,
    "qwen3_next": tiny_gguf.write_gguf_qwen3next,
}
SETTINGS: dict[str, Any] = dict(device="cpu", max_requests=1, max_context=256)


def mixed(name: str) -> str:
    """As llama.cpp mixes them in a Q4_K_M file, and Q8_0 besides."""
    if "exps" in name or "ssm_alpha" in name or "ssm_beta" in name:
        return "Q8_0"
    if "attn_v" in name or "ffn_down" in name or name == "output.weight":
        return "Q6_K"
    return "Q5_K" if "attn_qkv" in name else "Q4_K"


def only(kind: str) -> Callable[[str], str]:
    return lambda name: "Q8_0" if "exps" in name else kind


def written(kind: str, path: Path, kinds: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> Path:
    config_class, model_class, arguments = tiny.KINDS[kind]
    monkeypatch.setitem(tiny.KINDS, kind, (config_class, model_class, {**arguments, **CHANGES[kind]}))
    return WRITERS[kind](tiny.build(kind), path / "m.gguf", q8=kinds)


def linears(part: object) -> list[Linear]:
    if isinstance(part, Linear):
        return [part]
    fields = part if isinstance(part, tuple) else vars(part).values() if hasattr(part, "__dataclass_fields__") else ()
    return [found for field in fields for found in linears(field)]


def kinds_of(layer: object) -> list[int | str]:
    assert isinstance(layer, PackedLinear)
    return [part.bits if isinstance(part, Packed) else "plain" for part in layer.parts]


def typical_error(true: Tensor, got: Tensor) -> float:
    """The median over tokens of the RMS error: a router that sees a tie moves single tokens far."""
    return float((got - true).square().mean(-1).sqrt().median())


@pytest.mark.parametrize("kinds", ["Q8_0", "Q4_K", "mixed"])
@pytest.mark.parametrize("kind", WRITERS)
def test_logits_are_those_of_the_dequantised_model(
    kind: str, kinds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(kind, tmp_path, mixed if kinds == "mixed" else only(kinds), monkeypatch)
    ids = tiny.token_ids(40)
    true = LLM(path, dtype="float32", **SETTINGS).logits(ids, 30)
    plain = LLM(path, dtype="bfloat16", **SETTINGS)
    monkeypatch.setattr("hybridkv.weight_choice.keeps_packed", lambda device, dtype: True)
    llm = LLM(path, dtype="bfloat16", **SETTINGS)
    matrices = linears(llm.model)
    assert len(matrices) > 4 and all(isinstance(part, PackedLinear) for part in matrices)
    # weights that are not rounded to bf16 move the logits no more than those that are
    assert typical_error(true, llm.logits(ids, 30)) <= 1.25 * typical_error(true, plain.logits(ids, 30))
    with open_checkpoint(path) as checkpoint:
        config, packed = ModelConfig.from_dict(checkpoint.config), checkpoint.packed_bytes()
        planned = model_bytes(config, checkpoint.__contains__, torch.bfloat16, "cuda", packed=packed)
    assert planned == llm.model.nbytes - llm.model.inv_freq.nbytes  # type: ignore[attr-defined]
    whole = sum(2 * part.shape[0] * part.shape[1] for part in matrices)
    assert sum(part.nbytes for part in matrices) < (0.3 if kinds == "Q4_K" else 0.54) * whole
    for weight_dtype, exact in (("plain", False), ("fp8", False), ("auto", True)):
        llm = LLM(path, dtype="bfloat16", weight_dtype=weight_dtype, exact=exact, **SETTINGS)
        assert not any(isinstance(part, PackedLinear) for part in linears(llm.model))


def test_matrices_of_several_formats_are_kept_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.weight_choice.keeps_packed", lambda device, dtype: True)
    for kind, inputs in (("qwen3_5", [5, 4, 8]), ("qwen3_next", ["plain", 4])):  # two formats in one fused matrix
        folder = tmp_path / kind
        folder.mkdir()
        model: Any = LLM(written(kind, folder, mixed, monkeypatch), dtype="bfloat16", **SETTINGS).model
        assert kinds_of(model.layers[0].mixer.inputs) == inputs
        assert kinds_of(model.layers[0].mixer.out) == [4] and model.layers[0].mixer.out.parts[0].each == (
            64 if kind == "qwen3_5" else 256  # its value heads change places
        )
        assert kinds_of(model.layers[3].mixer.qkv) == [4, 6] and kinds_of(model.head) == [6]


@pytest.mark.parametrize("kind", WRITERS)
def test_the_plan_counts_packed_bytes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(kind, tmp_path, mixed, monkeypatch)

    def planned(*flags: str) -> dict[str, Any]:
        with pytest.raises(SystemExit):
            main(["plan", "--model", str(path), "--context", "64", "--json", *flags])
        return json.loads(capsys.readouterr().out)

    for packs, found in (
        (False, planned("--dtype", "bfloat16", "--weight-dtype", "plain")),
        (False, planned("--dtype", "bfloat16", "--exact")),
        (True, planned()),
        (True, planned("--dtype", "bfloat16", "--device", "cuda")),
    ):
        monkeypatch.setattr("hybridkv.weight_choice.keeps_packed", lambda device, dtype, packs=packs: packs)
        model: Any = LLM(path, dtype="bfloat16", **SETTINGS).model
        held = model.nbytes - model.inv_freq.nbytes
        if not packs:  # on a CPU a tied head is a second copy
            held -= model.head.nbytes if model.config.tied else 0
        assert found["weights_bytes"] == held
        assert found["dtype"] == ("packed" if packs else "bfloat16") and found["packed_on_gpu_bytes"] is None
    on_cpu = planned("--device", "cpu")
    assert on_cpu["dtype"] == "float32" and on_cpu["packed_on_gpu_bytes"] == planned()["weights_bytes"]
    for flags, said in (
        (("--device", "cpu"), "Weights packed on a GPU: "),
        ((), "what a step computes with (128.0 MiB of it to write packed weights out)"),
    ):
        with pytest.raises(SystemExit):
            main(["plan", str(path), "--memory", "1GiB", *flags])
        assert said in " ".join(capsys.readouterr().out.split())


def test_an_embedding_alone_is_no_packed_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written("llama", tmp_path, lambda name: "Q8_0" if name == "token_embd.weight" else "F16", monkeypatch)
    for device in ("cuda", "cpu"):
        with pytest.raises(SystemExit):
            main(["plan", str(path), "--dtype", "bfloat16", "--device", device, "--context", "64", "--json"])
        found = json.loads(capsys.readouterr().out)
        assert found["dtype"] == "bfloat16" and found["packed_on_gpu_bytes"] is None


def test_too_little_memory_names_the_form_and_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written("llama", tmp_path, only("Q4_K"), monkeypatch)
    monkeypatch.setattr("hybridkv.weight_choice.keeps_packed", lambda device, dtype: dtype == torch.bfloat16)
    for dtype, weight_dtype, message in (
        ("bfloat16", "auto", r"KiB packed, .*; use a smaller model"),
        ("bfloat16", "plain", r"KiB in bfloat16, .*; use weight_dtype='auto', a smaller"),
        ("float32", "auto", r"iB in float32, .*; use dtype='bfloat16', a smaller"),
    ):
        with pytest.raises(HybridKVError, match=message):
            LLM(path, dtype=dtype, weight_dtype=weight_dtype, memory="20KiB", **SETTINGS)


def test_the_kernels_run_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the interpreter: one token, and more than a kernel takes."""
    pytest.importorskip("triton")
    path = written("llama", tmp_path, mixed, monkeypatch)
    ids = tiny.token_ids(6)
    monkeypatch.setattr("hybridkv.weight_choice.keeps_packed", lambda device, dtype: True)
    llm = LLM(path, dtype="bfloat16", **SETTINGS)
    want = llm.logits(ids, 5)
    monkeypatch.setattr(linear_packed, "use_triton", lambda x: True)
    monkeypatch.setattr(linear_packed, "FEW_ROWS", dict.fromkeys(linear_packed.FEW_ROWS, 4))
    assert logit_gap(want, llm.logits(ids, 5)) < 0.03  # bf16 activations, weights rounded to bf16 for many rows


def test_a_damaged_scale_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written("llama", tmp_path, only("Q4_K"), monkeypatch)
    with GgufFile(path) as file:
        at = file.tensors["blk.0.ffn_up.weight"].offset
    damaged = bytearray(path.read_bytes())
    damaged[at : at + 2] = b"\x00\x7c"  # infinity
    path.write_bytes(damaged)
    monkeypatch.setattr("hybridkv.weight_choice.keeps_packed", lambda device, dtype: True)
    with pytest.raises(ModelFileError, match="up_proj.weight' holds NaN or infinity"):
        LLM(path, dtype="bfloat16", **SETTINGS)
