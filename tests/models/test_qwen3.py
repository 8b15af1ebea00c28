"""Qwen3: what is its own beside the parity that every kind has: head norms, what is refused, eviction, exact mode."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_gguf
import torch
from exactness import Models, differing, drive
from numerics import logit_gap, rel_rms

from eviction.harness import Run, masked_logits
from hybridkv.config import CacheConfig
from hybridkv.errors import ModelFileError, UnsupportedModel
from hybridkv.models import open_checkpoint
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Decoder
from hybridkv.models.known import KNOWN
from hybridkv.planner import model_bytes, planned_tensors

CONFIG: dict[str, Any] = {**tiny.LLAMA, "model_type": "qwen3"}


def without(model: Decoder, name: str) -> Decoder:
    """The same model, one of the two head norms left out."""
    layers = tuple(replace(layer, mixer=replace(layer.mixer, **{name: None})) for layer in model.layers)  # type: ignore[type-var]
    return replace(model, layers=layers)


@pytest.mark.parametrize("name", ("q_norm", "k_norm"))
def test_a_missing_head_norm_would_be_seen(name: str, oracle: Callable, open_llm: Callable) -> None:
    """Negative control of the parity tests."""
    found = oracle("qwen3")
    run = Run(without(open_llm(found.folder).model, name), CacheConfig("f32", 16))
    run.admit()
    assert logit_gap(found.logits[:100], run.feed(found.ids[:100], 64)) > 100 * found.bound


def test_decode_after_eviction_is_that_of_transformers_with_the_evicted_entries_masked(
    oracle: Callable, open_llm: Callable
) -> None:
    found = oracle("qwen3")
    ids = found.ids[:180]
    run = Run(open_llm(found.folder).model, CacheConfig("f32", 16, budget=48, window=16, recent=8))
    run.admit()
    first = run.feed(ids[:150], 64)
    run.evict(ids[:150])
    assert run.manager.lengths("r")["attention"].mean() == 48
    got = torch.cat((first, run.feed(ids[150:], 1)))
    assert logit_gap(masked_logits(found, ids, run.drops["r"]), got) < found.bound
    assert logit_gap(found.logits[150:180], got[150:]) > 1e-3, "the evicted entries did not matter"


def test_an_fp8_cache_is_as_close_as_llamas(oracle: Callable, open_llm: Callable) -> None:
    """The rounding is the same: it moves the logits by about as much (seen 5.8e-2, Llama 1.1e-1)."""

    def error(kind: str) -> float:
        found = oracle(kind)
        got = open_llm(found.folder, kv_dtype="fp8").logits(found.ids[:150], prefill=140, chunk=64)
        return rel_rms(found.logits[:150], got)

    assert 1e-3 < error("qwen3") < 1.5 * error("llama")


@pytest.mark.parametrize(("dtype", "kv", "budget"), [("float32", "f32", 96), ("bfloat16", "fp8", None)])
def test_exact_mode_gives_the_same_bits_for_any_chunks_and_neighbours(
    dtype: str, kv: str, budget: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, ids = Models(tmp_path, "cpu").open("qwen3", dtype, kv, budget), tiny.token_ids(150)
    whole = drive(llm, ids, [150], monkeypatch)
    for cuts, company in (([87, 150], False), ([1, 18, 140, 141, 150], True)):
        assert differing(whole, drive(llm, ids, cuts, monkeypatch, company)) == []


def test_exact_and_fast_mode_agree(oracle: Callable, open_llm: Callable) -> None:
    found = oracle("qwen3")
    got = open_llm(found.folder, exact=True).logits(found.ids[:150], prefill=140, chunk=64)
    assert logit_gap(found.logits[:150], got) < found.bound


@pytest.mark.parametrize(
    ("changes", "words"),
    (
        ({"attention_bias": True}, "attention_bias is not supported for qwen3"),
        ({"use_sliding_window": True}, "sliding windows"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding windows"),
        ({"layer_types": 3}, "sliding windows"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "part of the head"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
    ),
)
def test_what_it_does_not_compute_is_refused(changes: dict[str, Any], words: str) -> None:
    assert ModelConfig.from_dict(CONFIG).architecture == "qwen3"
    with pytest.raises(UnsupportedModel, match=words):
        ModelConfig.from_dict({**copy.deepcopy(CONFIG), **changes})


def test_a_gguf_file_without_head_norms_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, oracle: Callable
) -> None:
    original = tiny_gguf._parameters
    monkeypatch.setattr(
        tiny_gguf, "_parameters", lambda model: (p for p in original(model) if "1.self_attn.q_norm" not in p[0])
    )
    path = tiny_gguf.write_gguf_qwen3(oracle("qwen3").model, tmp_path / "m.gguf")
    with pytest.raises(ModelFileError, match="'blk.1.attn_q_norm.weight' is missing"):
        open_checkpoint(path)


@pytest.mark.parametrize(("name", "parameters"), (("Qwen3-8B", 8_190_735_360), ("Qwen3-32B", 32_762_123_264)))
def test_known_shapes_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    config = ModelConfig.from_dict(KNOWN[name])
    norms = config.layers * 2 * (config.hidden + config.head_dim) + config.hidden  # in f32, all else in bf16
    found = model_bytes(config, planned_tensors(config, KNOWN[name]), torch.bfloat16, "cuda")
    assert found == 2 * parameters + 2 * norms
