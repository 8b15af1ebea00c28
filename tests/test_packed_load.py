"""bench/packed_load.py on a tiny shape on a CPU: the file can be read, and what is held is what was planned."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hybridkv.checkpoint.gguf_file import GgufFile
from hybridkv.models.known import KNOWN

SCRIPT = Path(__file__).parents[1] / "bench" / "packed_load.py"
SMALL: dict[str, Any] = dict(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    max_position_embeddings=1024,
)  # fmt: skip
GDN: dict[str, Any] = dict(
    num_hidden_layers=4, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64,
    linear_value_head_dim=64,
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256, shared_expert_intermediate_size=256
)
SHAPES = {
    "llama": KNOWN["Llama-3.1-8B"] | SMALL | {"num_hidden_layers": 2, "rope_scaling": None},
    "qwen3": KNOWN["Qwen3-8B"] | SMALL | {"num_hidden_layers": 2},
    "qwen3_5": KNOWN["Qwen3.5-27B"] | SMALL | GDN,
    "qwen3_5_moe": KNOWN["Qwen3.5-35B-A3B"] | SMALL | GDN | EXPERTS,
    "qwen3_next": KNOWN["Qwen3-Next-80B-A3B"] | SMALL | GDN | EXPERTS,
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("packed_load", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(
    script: ModuleType, kind: str, form: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any], str]:
    (folder / "config.json").write_text(json.dumps(SHAPES[kind]))
    settings = ["--device", "cpu", "--card", "8GB", "--context", "200", "--requests", "2", "--folder", str(folder)]
    code = script.main(["--model", str(folder / "config.json"), "--form", form, *settings])
    out, err = capsys.readouterr()
    assert not list(folder.glob("packed_load_*")), "the file is left behind"
    return code, json.loads(out.splitlines()[-1]), err


@pytest.mark.parametrize("form", ["q4_k", "q6_k"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_5"])
def test_what_is_planned_is_held_packed_and_dequantised(
    script: ModuleType, kind: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    code, found, table = run(script, kind, form, tmp_path, capsys)
    assert code == 0 and found["ok"] and found["weights_form"] in ("f32", "f16", "int4") and found["generated"] == 16
    assert table.count("the same") == 2
    monkeypatch.setattr("hybridkv.weight_choice.keeps_packed", lambda device, dtype: True)
    monkeypatch.setattr("hybridkv.opening.resolve_dtype", lambda *_: script.torch.bfloat16)  # no f16 there
    code, found, _ = run(script, kind, form, tmp_path, capsys)
    assert found["weights_form"] == form.upper() and found["planned_weights"] == found["held_weights"]
    assert code == 0 and found["ok"] and found["planned_cache"] == found["held_cache"]


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_next"])
def test_models_with_experts_are_written_and_run(
    script: ModuleType, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found, _ = run(script, kind, "q8_0", tmp_path, capsys)
    assert code == 0 and found["ok"] and found["held_weights"] == found["planned_weights"]


def test_a_difference_is_an_error(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr("hybridkv.cache.manager.KVCacheManager.memory_bytes", lambda manager: 17)
    code, found, table = run(script, "llama", "q4_k", tmp_path, capsys)
    assert code == 1 and not found["ok"] and table.count("the same") == 1


def test_the_file_is_of_the_form_that_the_plan_assumes(tmp_path: Path) -> None:
    from hybridkv.bench.random_gguf import write_random_gguf

    path = tmp_path / "m.gguf"
    tensors = write_random_gguf(SHAPES["qwen3_5"], path, "q5_k")
    with GgufFile(path) as file:
        assert {t.name: (t.shape, t.type) for t in tensors} == {
            t.name: (t.shape, t.type) for t in file.tensors.values()
        }
        kinds = {name: tensor.type.name for name, tensor in file.tensors.items()}
    assert kinds["output.weight"] == kinds["blk.0.ssm_out.weight"] == kinds["blk.3.attn_v.weight"] == "Q5_K"
    assert (
        kinds["token_embd.weight"] == "BF16"
        and kinds["blk.0.ssm_conv1d.weight"] == kinds["output_norm.weight"] == "F32"
    )
