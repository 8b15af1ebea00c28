"""The plan of DeepSeek-V4: published bytes from a config alone, and what is predicted is what gets allocated."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_v4
import torch
from v4_files import Made, write

from hybridkv import LLM, CacheConfig
from hybridkv.cache import CacheSchema, KVCacheManager
from hybridkv.cli import main
from hybridkv.commands.plan_estimate import Estimate
from hybridkv.errors import HybridKVError
from hybridkv.models import cache_schema, open_checkpoint
from hybridkv.models.config import ModelConfig
from hybridkv.models.known import KNOWN
from hybridkv.models.weight_forms import released_forms
from hybridkv.planner import model_bytes, plan_cache, planned_tensors

FLASH, PRO = "DeepSeek-V4-Flash", "DeepSeek-V4-Pro"
MILLION, GIB = 1 << 20, 1 << 30
# (model, KV, index keys) -> bytes a token, GiB of pages and windows at 2^20 tokens
PUBLISHED = {
    (FLASH, "bf16", "bf16"): (6880.00, 6.724),
    (FLASH, "fp8", "fp8"): (3850.25, 3.763),
    (FLASH, "fp8", "mxfp4"): (3514.25, 3.435),
    (PRO, "bf16", "bf16"): (9848.00, 9.625),
    (PRO, "fp8", "fp8"): (5511.44, 5.387),
    (PRO, "fp8", "mxfp4"): (5031.44, 4.918),
}


def schema_of(model: str, kv: str, index: str = "auto", dtype: torch.dtype = torch.bfloat16) -> CacheSchema:
    return cache_schema(ModelConfig.from_dict(KNOWN[model]), CacheConfig(kv, index_dtype=index), dtype)


def weights_of(raw: dict[str, Any], dtype: torch.dtype, device: str) -> int:
    config = ModelConfig.from_dict(raw)
    return model_bytes(config, planned_tensors(config, raw), dtype, device)


def plan(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as leaving:
        main(["plan", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert leaving.value.code == 0, err
    return out


@pytest.mark.parametrize(("model", "kv", "index"), PUBLISHED)
def test_the_published_bytes(model: str, kv: str, index: str, capsys: pytest.CaptureFixture[str]) -> None:
    token, total = PUBLISHED[model, kv, index]
    schema = schema_of(model, kv, index)
    per_block = sum(s.page_bytes * s.pages(128) for s in schema.streams)
    assert round(per_block / 128, 2) == token and schema.kv_bytes(MILLION) == per_block * MILLION // 128
    window = next(s.slot_bytes for s in schema.states if s.name == "window")
    assert round((schema.kv_bytes(MILLION) + window) / GIB, 3) == total
    found = json.loads(plan(capsys, "-m", model, "--kv-dtype", kv, "--index-dtype", index, "--json"))
    [choice] = found["choices"]
    assert found["context"] == MILLION and round(choice["token_bytes"], 2) == token
    assert choice["index_dtype"] == index and choice["kv_bytes"] == schema.kv_bytes(MILLION)
    state = {s["name"]: s["bytes"] for s in choice["states"]}
    assert round((choice["kv_bytes"] + state["window"]) / GIB, 3) == total
    assert choice["table_bytes"] == 2 * MILLION // 128 * 4  # an id for each page of both kinds
    assert choice["cache_bytes"] == choice["kv_bytes"] + sum(state.values()) + choice["table_bytes"]


def test_bytes_of_one_block_and_of_one_request() -> None:
    assert schema_of(FLASH, "fp8").kv_bytes(128) == 449_824 and schema_of(PRO, "fp8").kv_bytes(128) == 644_024
    assert schema_of(FLASH, "fp8").kv_bytes(3) == 0  # no entry yet
    for model, window, csa, hca in ((FLASH, 43, 21, 20), (PRO, 61, 30, 31)):
        sizes = [s.slot_bytes for s in schema_of(model, "fp8").states]
        # 8 rows of content and gate, both streams, main and index; three numbers a channel instead of 128 rows
        assert sizes == [window * 128 * 584, csa * 8 * 4 * (512 + 128) * 4, hca * 3 * 512 * 4]


@pytest.mark.parametrize("model", [FLASH, PRO])
def test_weights_are_the_published_number_of_parameters(model: str) -> None:
    billions = weights_of(KNOWN[model], torch.bfloat16, "cuda") / 2e9
    assert abs(billions / {FLASH: 284, PRO: 1600}[model] - 1) < 0.02  # published as 284B and 1.6T


def test_index_keys_follow_the_kv_dtype() -> None:
    config = ModelConfig.from_dict(KNOWN[FLASH])
    for cache, dtype, wanted in (
        (CacheConfig("f32"), torch.bfloat16, "f32"),
        (CacheConfig("bf16"), torch.float32, "bf16"),
        (CacheConfig("fp8"), torch.float32, "mxfp4"),
        (CacheConfig(), torch.float32, "f32"),
        (CacheConfig(), torch.bfloat16, "bf16"),
        (CacheConfig("f32", index_dtype="nvfp4"), torch.float32, "nvfp4"),
    ):
        found = {layer.index.name for layer in cache_schema(config, cache, dtype).compressed if layer.index}
        assert found == {wanted}


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [" ".join(line.split()) for line in plan(capsys, "-m", FLASH, "--dtype", "bfloat16").splitlines()]
    assert "csa pages 21 1 262144 8192 13.1 GiB 6.6 GiB 3.3 GiB" in rows
    assert "hca pages 20 1 8192 8192 320.0 MiB 160.0 MiB 91.2 MiB" in rows
    assert "window state 43 10.8 MiB 5.4 MiB 3.1 MiB" in rows
    assert "index keys f32 bf16 mxfp4" in rows
    assert "bytes a token 13,760.00 6,880.00 3,514.25" in rows
    assert "cache 13.4 GiB 6.7 GiB 3.4 GiB" in rows


def test_a_config_alone_is_enough_and_memory_is_shared_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KNOWN[PRO]))
    arguments = ("--kv-dtype", "fp8", "--context", 131072, "--requests", 3, "--dtype", "bfloat16", "--json")
    found = json.loads(plan(capsys, "-m", tmp_path, "--memory", "4TiB", *arguments))
    [choice] = found["choices"]
    schema = schema_of(PRO, "fp8")
    each = schema.kv_bytes(131072) + schema.slot_bytes + 2 * 131072 // 128 * 4
    assert choice["cache_bytes"] == 3 * each
    assert choice["fits"] is True and choice["longest_context"] == MILLION and found["buys"] == []
    room, beside = 4 * 1024**4 - found["weights_bytes"], choice["workspace_bytes"]
    kept = choice["checkpoint_bytes"] + choice["staging_bytes"]  # for others
    assert choice["total_bytes"] == found["weights_bytes"] + 3 * each + beside + kept
    assert beside > 4 << 26 and kept > 0  # index scores
    estimate = Estimate(ModelConfig.from_dict(KNOWN[PRO]), CacheConfig("fp8"), "bfloat16", gpu=True)
    most = choice["most_requests"]
    assert estimate.need(most, 131072).nbytes <= room < estimate.need(most + 1, 131072).nbytes
    text = plan(capsys, "-m", tmp_path, "--memory", "4TiB", *arguments[:-1])
    assert "requests of 131072" in text and "What a dtype and a budget buy" not in text


def test_a_budget_is_refused() -> None:
    with pytest.raises(HybridKVError, match="budget is not for deepseek_v4"):
        cache_schema(ModelConfig.from_dict(KNOWN[FLASH]), CacheConfig("fp8", budget=2048), torch.bfloat16)


def test_index_keys_are_deepseeks_alone() -> None:
    with pytest.raises(HybridKVError, match="qwen3_5 has no index keys"):
        cache_schema(ModelConfig.from_dict(KNOWN["Qwen3.5-9B"]), CacheConfig(index_dtype="fp8"), torch.bfloat16)


@pytest.mark.parametrize("kv", ["f32", "bf16", "fp8"])
def test_the_plan_is_what_the_manager_allocates(kv: str) -> None:
    found = plan_cache(schema_of(FLASH, kv), 2, 5000, None)
    manager = KVCacheManager(found.schema, found.pages, found.slots, found.max_tokens, "meta")
    assert manager.memory_bytes() == found.nbytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_v4.Oracle("mini", tmp_path_factory.mktemp("v4")).folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tiny_model_takes_what_was_planned(folder: Path, dtype: str) -> None:
    raw = json.loads((folder / "config.json").read_text())
    kind = getattr(torch, dtype)
    llm = LLM(folder, device="cpu", dtype=dtype, max_requests=2, max_context=300, reuse=None)
    found = plan_cache(cache_schema(ModelConfig.from_dict(raw), CacheConfig(), kind), 2, 300, None)
    assert llm.manager.memory_bytes() == found.nbytes
    tables = sum(t.nbytes for t in (llm.model.window_freq, llm.model.compress_freq))
    assert weights_of(raw, kind, "cpu") == llm.model.nbytes - tables


def test_the_released_form_is_the_size_of_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    """156 GB instead of 569. The published file of V4-Flash-0731, 166.9 GB, has three draft stages beside that."""
    found = json.loads(plan(capsys, FLASH, "--weights", "released", "--kv-dtype", "fp8", "--json"))
    assert found["weights_bytes"] == 156_016_590_300 and found["weights_form"] == "released"
    one_more_layer = 256 * 3 * 4096 * 2048 * 17 // 32  # FP4 experts of one draft layer
    assert found["weights_bytes"] + 3 * one_more_layer < 166_878_536_440 < found["weights_bytes"] + 4 * one_more_layer
    same = json.loads(plan(capsys, FLASH, "--weight-dtype", "released", "--kv-dtype", "fp8", "--json"))
    assert same["weights_bytes"] == found["weights_bytes"] and same["choices"] == found["choices"]
    assert any(
        "Over 1, 2, 4, 8 cards (--tp) they are 145.3 GiB, 73.3 GiB, 37.2 GiB, 19.2 GiB" in note
        for note in same["notes"]
    )


def test_a_card_that_holds_the_released_form(capsys: pytest.CaptureFixture[str]) -> None:
    """One H200 does not, two cards' memory does; what is printed is what is counted."""
    arguments = ("--weights", "released", "--kv-dtype", "fp8", "--context", 131072, "--json")
    fits = [
        json.loads(plan(capsys, FLASH, "--memory", m, *arguments))["choices"][0]["fits"] for m in ("130GiB", "260GiB")
    ]
    assert fits == [False, True]


def test_models_that_are_released_in_values_have_no_such_form(capsys: pytest.CaptureFixture[str]) -> None:
    for asked in (("--weights", "released"), ("--weight-dtype", "released")):
        with pytest.raises(SystemExit) as leaving:
            main(["plan", "Qwen3.5-27B", *asked])
        assert leaving.value.code != 0 and "Qwen3.5-27B is not released so" in " ".join(capsys.readouterr().err.split())


def test_forms_by_name_are_those_of_the_files(tmp_path: Path) -> None:
    """What a plan without files counts is what a checkpoint in the released formats has."""
    with open_checkpoint(write(tmp_path, Made().stored)) as checkpoint:
        config = ModelConfig.from_dict(checkpoint.config)
        assert released_forms(config, checkpoint.__contains__) == checkpoint.block_forms()
