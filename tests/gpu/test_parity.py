"""The whole path on a CUDA device: the same logits and tokens as transformers on the CPU."""

from pathlib import Path

import pytest
import tiny
import torch
from numerics import logit_gap

from hybridkv import LLM, CacheConfig, SamplingParams

pytestmark = pytest.mark.gpu

KINDS = ("llama", "qwen3_5", "qwen3_5_moe", "qwen3_next")
LENGTHS = (1, 3, 63, 64, 65, 129, 300)


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, torch.Tensor]:
    """(kind, folder, transformers' logits of 300 tokens)."""
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny.save(request.param, folder)
    return request.param, folder, tiny.reference_logits(model, tiny.token_ids(300))


def test_float32_logits_agree_with_transformers(pair: tuple[str, Path, torch.Tensor]) -> None:
    kind, folder, reference = pair
    llm = LLM(
        folder, device="cuda", dtype="float32", cache=CacheConfig(kv_dtype="f32"), max_requests=2, max_context=512
    )
    assert llm.manager.device.type == "cuda"
    bound = 1e-3 if tiny.is_moe(kind) else 1e-4
    ids = tiny.token_ids(300)
    for n in LENGTHS:
        for prefill, chunk in ((n, None), (n, 37), (max(1, n - 9), None)):
            got = llm.logits(ids[:n], prefill=prefill, chunk=chunk)
            assert got.device.type == "cuda"
            assert logit_gap(reference[:n], got.cpu()) < bound, (kind, n, prefill, chunk)


def test_a_batch_gives_the_tokens_of_each_request_alone(pair: tuple[str, Path, torch.Tensor]) -> None:
    _, folder, _ = pair
    llm = LLM(
        folder, device="cuda", dtype="float32", cache=CacheConfig(kv_dtype="f32"), max_requests=8, max_context=512
    )
    prompts = [tiny.token_ids(n, seed=n) for n in (1, 5, 64, 65, 100, 130, 200, 257)]
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    together = [out.token_ids for out in llm.generate(prompts, params)]
    assert together == [llm.generate([p], params)[0].token_ids for p in prompts]


def test_bfloat16_runs(pair: tuple[str, Path, torch.Tensor]) -> None:
    _, folder, _ = pair
    llm = LLM(folder, device="cuda", dtype="bfloat16", max_requests=2, max_context=512)
    assert llm.manager.tables["attention"].pool.tensors["k"].dtype == torch.bfloat16
    assert llm.logits(tiny.token_ids(130), prefill=120).isfinite().all()
