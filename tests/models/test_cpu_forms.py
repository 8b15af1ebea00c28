"""Models on a CPU with matrices in f16, or in 4 bits beside that: who gets which, their bytes, and their logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_gguf
import tiny_v4
import torch
from numerics import logit_gap

from hybridkv import LLM
from hybridkv.cli import main
from hybridkv.errors import HybridKVError
from hybridkv.kernels.linear.half import HalfLinear, has_half
from hybridkv.kernels.linear.int4 import Int4Linear
from hybridkv.kernels.linear.linear import Linear
from hybridkv.models.fingerprint import model_fingerprint

pytestmark = pytest.mark.skipif(not has_half(), reason="this build of torch has no f16 products on a CPU")

# every width that is summed over is 512 or more but for the attention's output, 256 wide, which stays f32
CHANGES: dict[str, dict[str, Any]] = {
    "llama": dict(hidden_size=512, intermediate_size=576, num_hidden_layers=2, head_dim=32, num_attention_heads=8),
    "qwen3_5": dict(hidden_size=512, intermediate_size=576, num_hidden_layers=4),
}
WRITERS = {"llama": tiny_gguf.write_gguf_llama, "qwen3_5": tiny_gguf.write_gguf_qwen35}
SETTINGS: dict[str, Any] = dict(device="cpu", max_requests=1, max_context=128)


@pytest.fixture(params=WRITERS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    config_class, model_class, arguments = tiny.KINDS[request.param]
    monkeypatch.setitem(tiny.KINDS, request.param, (config_class, model_class, {**arguments, **CHANGES[request.param]}))
    return request.param


def written(kind: str, path: Path, form: str | None = "Q4_1") -> Path:
    return WRITERS[kind](tiny.build(kind), path / "m.gguf", q8=(lambda name: form) if form else False)


def test_who_gets_which_form(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(kind, tmp_path)
    for pays, expected in ((False, HalfLinear), (True, Int4Linear)):
        monkeypatch.setattr("hybridkv.weight_choice.int4_pays", lambda pays=pays: pays)
        model: Any = LLM(path, **SETTINGS).model
        assert type(model.layers[0].feed.gate_up) is expected
        for plain in (dict(dtype="float32"), dict(weight_dtype="plain"), dict(exact=True)):
            left: Any = LLM(path, **SETTINGS, **plain).model
            assert type(left.layers[0].feed.gate_up) is Linear
    # files of f32 are not rounded unless that is asked for
    path.unlink()
    stored: Any = LLM(written(kind, tmp_path, None), **SETTINGS).model
    assert type(stored.layers[0].feed.gate_up) is Linear
    asked: Any = LLM(path, weight_dtype="f16", **SETTINGS).model
    assert type(asked.layers[0].feed.gate_up) is HalfLinear
    with pytest.raises(HybridKVError, match="takes the 4-bit codes of a GGUF file .* and m.gguf has none"):
        LLM(path, weight_dtype="int4", **SETTINGS)


def test_logits_are_those_of_the_f32_model(kind: str, tmp_path: Path) -> None:
    path, tokens = written(kind, tmp_path), tiny.token_ids(24)
    want = LLM(path, dtype="float32", **SETTINGS).logits(tokens)
    for form, bound in (
        ("f16", 2e-3),
        ("int4", 3e-2),
    ):  # weights rounded to 2^-11; inputs and results of products to 2^-9
        llm = LLM(path, dtype="float32", weight_dtype=form, **SETTINGS)
        for prefill in (None, 10):
            assert logit_gap(want, llm.logits(tokens, prefill=prefill)) < bound, (form, prefill)


def test_bytes_are_planned_exactly(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(kind, tmp_path)
    sizes = {}
    for form in ("plain", "f16", "int4"):
        model: Any = LLM(path, dtype="float32", weight_dtype=form, **SETTINGS).model
        sizes[form] = model.nbytes - model.inv_freq.nbytes
        with pytest.raises(SystemExit):
            options = ["--dtype", "float32", "--weight-dtype", form, "--device", "cpu", "--context", "64", "--json"]
            main(["plan", "--model", str(path), *options])
        planned = json.loads(capsys.readouterr().out)
        assert planned["weights_bytes"] == sizes[form]
        assert planned["weights_form"] == {"plain": "f32"}.get(form, form)
    assert sizes["f16"] < sizes["int4"] < sizes["plain"]


def test_a_fingerprint_is_of_values_and_not_of_addresses(kind: str, tmp_path: Path) -> None:
    path = written(kind, tmp_path)
    found = {
        form: {model_fingerprint(LLM(path, dtype="float32", weight_dtype=form, **SETTINGS).model) for _ in range(2)}
        for form in ("plain", "f16", "int4")
    }
    assert all(len(each) == 1 for each in found.values())
    assert (
        found["f16"] == found["int4"] != found["plain"]
    )  # a cache may move to a CPU that multiplies by codes, and back


def test_what_cannot_be_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(kind, tmp_path)
    for form, more in (("f16", dict(dtype="bfloat16")), ("int4", dict(exact=True))):
        with pytest.raises(HybridKVError, match=f"weight_dtype='{form}' is for device='cpu', dtype='float32'"):
            LLM(path, weight_dtype=form, **SETTINGS, **more)
    folder = tmp_path / "plain"
    tiny.save("llama", folder)
    with pytest.raises(HybridKVError, match="takes the 4-bit codes of a GGUF file"):
        LLM(folder, weight_dtype="int4", **SETTINGS)
    monkeypatch.setattr("hybridkv.devices.keeps_half", lambda device, dtype: False)
    with pytest.raises(HybridKVError, match="has no f16 products on this CPU; use weight_dtype='plain'"):
        LLM(path, weight_dtype="f16", **SETTINGS)
    left: Any = LLM(path, **SETTINGS).model
    assert type(left.layers[0].feed.gate_up) is Linear
    assert torch.isfinite(left.embedding).all()


@pytest.mark.parametrize("form", ("f16", "int4"))
def test_a_model_without_these_forms_refuses_them(form: str, tmp_path: Path) -> None:
    folder = tiny_v4.Oracle("mini", tmp_path).folder
    with pytest.raises(
        HybridKVError, match=f"weight_dtype='{form}' is not there for DeepSeek-V4; use 'released', 'plain'"
    ):
        LLM(folder, weight_dtype=form, **SETTINGS)
