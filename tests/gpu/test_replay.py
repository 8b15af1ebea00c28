"""Replay and documents on a GPU: the same scores as on a CPU, in every form of keys, beside requests that run ahead."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from engine.driving import assert_nothing_held, prompt
from hybridkv import LLM, CacheConfig, SamplingParams
from hybridkv.engine.replay import ReplayPart

pytestmark = pytest.mark.gpu
TEXT = 700  # tokens


def open_on(device: str, folder: Path, **more: Any) -> LLM:
    cache = CacheConfig(kv_dtype=more.pop("kv_dtype", "f32"))
    return LLM(folder, device=device, cache=cache, max_requests=4, max_context=2048, **more)


def replayed(llm: LLM, tokens: list[int]) -> list[torch.Tensor]:
    """Scores of two parts, the second of them in several steps where steps are short."""
    parts = [ReplayPart(prompt(9, seed=1), tokens[:1]), ReplayPart(prompt(30, seed=2), tokens)]
    with llm.engine.owned():
        request = llm.engine.add(tokens, SamplingParams(max_tokens=1), hold=True, eviction=None)
        while not llm.engine.idle:
            llm.engine.step()
        llm.engine.drain()
        scores = None
        for part in parts:
            scores = llm.engine.replay(request, part, scores)
        llm.engine.abort(request)
    assert scores is not None
    assert_nothing_held(llm.engine)
    return [each.cpu() for each in scores]


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "exact", "bound"),
    (("float32", "f32", False, 1e-4), ("float32", "f32", True, 1e-4), ("bfloat16", "bf16", False, 0.15),
     ("bfloat16", "fp8", False, 0.3)),
)  # fmt: skip
@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_scores_are_those_of_a_cpu(
    kind: str, dtype: str, kv_dtype: str, exact: bool, bound: float, tmp_path: Path
) -> None:
    tiny.save(kind, tmp_path)
    tokens = prompt(TEXT)
    with open_on("cpu", tmp_path, dtype="float32", step_tokens=256) as llm:
        want = replayed(llm, tokens)
    for steps in (256, 4096):
        with open_on("cuda", tmp_path, dtype=dtype, kv_dtype=kv_dtype, exact=exact, step_tokens=steps) as llm:
            found = replayed(llm, tokens)
        for mine, theirs in zip(found, want, strict=True):
            assert mine.shape == theirs.shape and not mine.isnan().any()
            assert float((mine - theirs).abs().mean() / theirs.mean()) < bound


@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_a_document_answers_beside_requests_that_run_ahead(kind: str, tmp_path: Path) -> None:
    tiny.save(kind, tmp_path)
    with open_on("cuda", tmp_path, dtype="float32", exact=True) as llm:
        tokens, greedy = prompt(TEXT), SamplingParams(max_tokens=20, ignore_eos=True)
        with llm.compress(tokens, ratio=4) as document:
            alone = document.generate([prompt(5, seed=i) for i in range(3)], greedy)
            stream = llm.stream(prompt(40, seed=9), SamplingParams(max_tokens=400, ignore_eos=True))
            next(stream.steps())
            with llm.compress(tokens, ratio=4) as other:  # read, replayed and cut while the other one decodes
                beside = other.generate([prompt(5, seed=i) for i in range(2)], greedy)
            stream.close()
            assert [each.token_ids for each in beside] == [each.token_ids for each in alone[:2]]
            document.save(tmp_path / "doc.kv")
            with llm.load_document(tmp_path / "doc.kv") as loaded:
                again = loaded.generate([prompt(5, seed=2)], greedy)
            assert again[0].token_ids == alone[2].token_ids
        llm.owner.run(lambda engine: engine.drain(), drained=True)
        assert_nothing_held(llm.engine)
