"""Checkpoints in folders: whatever the names, what is read is what the Hugging Face model has."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import (
    LLAMA_KEYS,
    Tensors,
    assert_same,
    llama,
    write_gguf,
)
from safetensors.torch import save_file

from hybridkv.errors import ModelFileError
from hybridkv.models import open_checkpoint


def write_folder(folder: Path, tensors: Tensors, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} if config is None else config))
    save_file({name: w.clone().contiguous() for name, w in tensors.items()}, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, shards: dict[str, Tensors], index: dict[str, str] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    for shard, tensors in shards.items():
        save_file(tensors, folder / shard)
    listed = {name: shard for shard, tensors in shards.items() for name in tensors} if index is None else index
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    return folder


def test_a_folder_is_read_with_its_dtypes(tmp_path: Path) -> None:
    dtypes = {"model.norm.weight": torch.float32, "lm_head.weight": torch.bfloat16, "model.x": torch.float16}
    tensors = {name: torch.randn(3, 5).to(dtype) for name, dtype in dtypes.items()}
    config = {"model_type": "llama", "hidden_size": 5, "text_config": {"a": [1]}}
    with open_checkpoint(write_folder(tmp_path / "m", tensors, config)) as checkpoint:
        assert_same(checkpoint, tensors)
        assert checkpoint.config == config and checkpoint.kind == "safetensors" and checkpoint.metadata == {}
        assert checkpoint.nbytes == 15 * 8
        got = checkpoint.read("model.x")
    got += 1  # it owns its memory
    with pytest.raises(ModelFileError, match="no tensor 'nope'"):
        checkpoint.read("nope")
    with pytest.raises(ModelFileError, match="closed"):
        checkpoint.read("model.x")


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("norm.weight", "model.norm.weight"),
        ("something.else", "something.else"),
    ],
)
def test_names_are_brought_to_one_form(stored: str, canonical: str, tmp_path: Path) -> None:
    with open_checkpoint(write_folder(tmp_path / "m", {stored: torch.ones(2, 2)})) as checkpoint:
        assert checkpoint.names() == [canonical] and torch.equal(checkpoint.read(canonical), torch.ones(2, 2))


def test_what_is_not_the_text_model_is_set_aside_and_counted(tmp_path: Path) -> None:
    tensors = {"model.language_model.norm.weight": torch.ones(2), "lm_head.weight": torch.ones(2, 2)}
    tensors |= {f"{p}.fc.weight": torch.ones(2) for p in ("mtp", "model.mtp", "model.language_model.mtp")}
    tensors |= {f"{p}.weight": torch.ones(2) for p in ("visual.a", "model.visual.b", "vision_tower.c")}
    tensors |= {"visual.position_ids": torch.arange(4), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    config = {"text_config": {"tie_word_embeddings": True}}
    with open_checkpoint(write_folder(tmp_path / "m", tensors, config)) as checkpoint:
        assert checkpoint.names() == ["model.norm.weight"]
        assert checkpoint.set_aside == {"mtp": 3, "vision": 4, "rotary": 1, "tied": 1}
        assert checkpoint.nbytes == 8


def expert_tensors(count: int = 12) -> tuple[Tensors, Tensors]:
    """(per expert, fused): more than ten, so that the order of the names as text is not the order of the numbers."""
    at = "model.layers.0.mlp.experts"
    gate_up, down = torch.randn(count, 10, 4).bfloat16(), torch.randn(count, 4, 5).bfloat16()
    single: Tensors = {}
    for e in range(count):
        single[f"{at}.{e}.gate_proj.weight"], single[f"{at}.{e}.up_proj.weight"] = gate_up[e, :5], gate_up[e, 5:]
        single[f"{at}.{e}.down_proj.weight"] = down[e]
    return single, {f"{at}.gate_up_proj": gate_up, f"{at}.down_proj": down}


def test_experts_stored_one_by_one_are_presented_fused(tmp_path: Path) -> None:
    single, fused = expert_tensors()
    with open_checkpoint(write_folder(tmp_path / "m", single)) as checkpoint:
        assert_same(checkpoint, fused)
        assert checkpoint.nbytes == sum(2 * w.numel() for w in fused.values())


def test_experts_with_gaps_or_of_two_kinds_are_refused(tmp_path: Path) -> None:
    single, fused = expert_tensors()
    name = "model.layers.0.mlp.experts.4.up_proj.weight"
    cases: list[tuple[Tensors, str]] = [
        ({n: w for n, w in single.items() if n != name}, "4.up_proj.weight' is missing"),
        (single | {"model.layers.0.mlp.experts.999999.up_proj.weight": torch.ones(5, 4)}, "is missing, of 1000000"),
        (single | {name: torch.ones(6, 4).bfloat16()}, "differ in shape"),
        (single | fused, "two tensors stand for"),
    ]
    for tensors, message in cases:
        with pytest.raises(ModelFileError, match=message):
            open_checkpoint(write_folder(tmp_path / "m", tensors))


def test_two_names_for_one_tensor_are_refused(tmp_path: Path) -> None:
    tensors = {"model.norm.weight": torch.ones(2), "model.language_model.norm.weight": torch.ones(2)}
    with pytest.raises(ModelFileError, match="two tensors stand for 'model.norm.weight'"):
        open_checkpoint(write_folder(tmp_path / "m", tensors))


def test_shards_are_read_through_links_as_in_a_hub_cache(tmp_path: Path) -> None:
    shards: dict[str, Tensors] = {
        "model-1-of-2.safetensors": {"model.a": torch.ones(2), "model.b": torch.zeros(3)},
        "model-2-of-2.safetensors": {"lm_head.weight": torch.ones(2, 2)},
    }
    folder = write_shards(tmp_path / "m", shards)
    blob = tmp_path / "blob"
    (folder / "model-1-of-2.safetensors").rename(blob)
    (folder / "model-1-of-2.safetensors").symlink_to(blob)
    with open_checkpoint(folder) as checkpoint:
        assert_same(checkpoint, {name: w for tensors in shards.values() for name, w in tensors.items()})


def test_nan_in_the_weights_is_never_silent(tmp_path: Path) -> None:
    tensors = {"model.a": torch.tensor([1.0, float("nan")]), "model.b": torch.tensor([-float("inf"), 0]).bfloat16()}
    folder = write_folder(tmp_path / "m", tensors)
    with open_checkpoint(folder) as checkpoint:
        for name in tensors:
            with pytest.raises(ModelFileError, match=f"'{name}' holds NaN or infinity.*download"):
                checkpoint.read(name)


def test_a_folder_with_one_gguf_and_no_config_opens(tmp_path: Path) -> None:
    hf, stored = llama()
    write_gguf(tmp_path / "m.gguf", "llama", LLAMA_KEYS, stored)
    with open_checkpoint(str(tmp_path)) as checkpoint:
        assert (
            checkpoint.kind == "gguf" and checkpoint.path == tmp_path / "m.gguf" and len(checkpoint.names()) == len(hf)
        )
    (tmp_path / "n.gguf").write_bytes(b"")
    with pytest.raises(ModelFileError, match="2 .gguf files"):
        open_checkpoint(tmp_path)
