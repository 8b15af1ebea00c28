"""Whole models on a CUDA device with KV pages in bf16 and FP8, beside the same settings on the CPU.

CPU and GPU add in other orders, so a key that lies between two storable numbers may be rounded the other way: one step
of the format in that value. The device must not cost more than such flips. What the format itself costs (a fifth of the
largest logit for FP8 in the tiny llama, on either device) is not judged here.
"""

from pathlib import Path

import pytest
import tiny
import torch
from numerics import logit_gap

from hybridkv import LLM, CacheConfig

pytestmark = pytest.mark.gpu

BOUND = {"bf16": 5e-3, "fp8": 5e-2}  # beside the CPU, over the largest logit


@pytest.fixture(scope="module", params=("llama", "qwen3_5"))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny.save(request.param, folder)
    return folder, tiny.reference_logits(model, tiny.token_ids(300))


@pytest.mark.parametrize("kv_dtype", ("bf16", "fp8"))
def test_logits_agree_with_the_cpu(pair: tuple[Path, torch.Tensor], kv_dtype: str) -> None:
    folder, reference = pair
    ids = tiny.token_ids(300)
    cpu, gpu = (
        LLM(folder, device=d, dtype="float32", cache=CacheConfig(kv_dtype=kv_dtype), max_requests=2, max_context=512)
        for d in ("cpu", "cuda")
    )
    for prefill, chunk in ((300, None), (300, 37), (291, None)):
        want, got = (llm.logits(ids, prefill=prefill, chunk=chunk).cpu() for llm in (cpu, gpu))
        beside = logit_gap(want, got)
        of_cpu, of_gpu = logit_gap(reference, want), logit_gap(reference, got)
        print(f"{kv_dtype} {prefill} {chunk}: {beside:.2e} beside the CPU; beside f32 keys {of_cpu:.2e}, {of_gpu:.2e}")
        assert beside < BOUND[kv_dtype]
        assert of_gpu > 1e-4  # the dtype took effect


@pytest.mark.parametrize("kv_dtype", ("f32", "bf16", "fp8"))
def test_a_bfloat16_model_runs_with_every_kv_dtype(pair: tuple[Path, torch.Tensor], kv_dtype: str) -> None:
    folder, reference = pair
    llm = LLM(
        folder, device="cuda", dtype="bfloat16", cache=CacheConfig(kv_dtype=kv_dtype), max_requests=2, max_context=512
    )
    got = llm.logits(tiny.token_ids(300), prefill=290)
    gap = logit_gap(reference, got.float().cpu())
    print(f"bfloat16 model, {kv_dtype} pages: {gap:.2e}")
    assert gap < 0.25  # bf16 weights and activations through all layers
