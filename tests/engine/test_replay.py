"""Replay: scores are the attention of a model that repeats its text, and reading again leaves nothing behind."""

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from engine.driving import KINDS, assert_nothing_held, prompt, run
from hybridkv import LLM, CacheConfig, SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.engine.replay import ReplayPart
from hybridkv.errors import RequestError
from hybridkv.request import Request

ONE = SamplingParams(max_tokens=1)
TEXT = 150  # tokens


@pytest.fixture(scope="module")
def model(oracle: Callable[[str], tiny.Oracle]) -> Callable[..., LLM]:
    """`model("llama", exact=True)`: opened once for each; steps of 64 tokens, so that a part takes several."""
    opened: dict[Any, LLM] = {}

    def build(kind: str, **more: Any) -> LLM:
        key = (kind, *sorted(more.items()))
        if key not in opened:
            kv = more.pop("kv_dtype", "f32")
            config = CacheConfig(kv_dtype=kv, page_size=8)
            settings: dict[str, Any] = {"max_requests": 3, "max_context": 512, "step_tokens": 64, **more}
            opened[key] = LLM(oracle(kind).folder, device="cpu", dtype="float32", cache=config, **settings)
        return opened[key]

    return build


def read(engine: Engine, tokens: list[int]) -> Request:
    """A held request that has read these tokens."""
    request = engine.add(tokens, ONE, hold=True, eviction=None)
    run(engine)
    assert engine.manager.position(request.key) == len(tokens)
    return request


def parts(tokens: list[int], size: int = 70) -> list[ReplayPart]:
    return [ReplayPart(prompt(9, seed=i), tokens[i : i + size]) for i in range(0, len(tokens), size)]


def replayed(engine: Engine, request: Request, pieces: list[ReplayPart]) -> list[Tensor]:
    scores: list[Tensor] | None = None
    for part in pieces:
        scores = engine.replay(request, part, scores)
    assert scores is not None
    return scores


@torch.no_grad()
def weights_of(oracle: tiny.Oracle, tokens: list[int], pieces: list[ReplayPart]) -> list[Tensor]:
    """[G, L] of each full-attention layer, from the attention matrices of transformers."""
    found: list[Tensor] = []
    for part in pieces:
        ids = torch.tensor([[*tokens, *part.prompt, *part.text]])
        layers = oracle.model(ids, use_cache=False, output_attentions=True).attentions
        first = len(tokens) + len(part.prompt) - 1  # the token after which the text is to be said
        peaks = [w[0, :, first:, : len(tokens)].amax(1) for w in layers if w is not None]  # [H, L]
        heads = oracle.model.config.num_key_value_heads
        peaks = [w.view(heads, -1, len(tokens)).amax(1) for w in peaks]
        found = peaks if not found else [torch.maximum(a, b) for a, b in zip(found, peaks, strict=True)]
    return found


@pytest.mark.parametrize("exact", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_the_attention_of_a_model_that_repeats_the_text(
    kind: str, exact: bool, model: Callable[..., LLM], oracle: Callable[[str], tiny.Oracle]
) -> None:
    engine, tokens = model(kind, exact=exact).engine, prompt(TEXT)
    request, pieces = read(engine, tokens), parts(prompt(TEXT))
    scores, want = replayed(engine, request, pieces), weights_of(oracle(kind), tokens, pieces)
    assert len(scores) == len(want) == len(engine.manager.tables["attention"].schema.layers)
    for mine, theirs in zip(scores, want, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-3)
    engine.abort(request)
    assert_nothing_held(engine)
