"""Kernels compiled before the first request: nothing has run, and requests then find what they launch."""

from pathlib import Path

import pytest
import torch
from random_model import engine_for, random_decoder

from engine.driving import assert_nothing_held, run
from hybridkv import CacheConfig, SamplingParams
from hybridkv.engine import precompile as precompile_file
from hybridkv.engine.engine import Engine
from hybridkv.engine.precompile import go_through, precompile
from hybridkv.kernels.compiling import counted
from hybridkv.models.config import ModelConfig
from hybridkv.models.known import KNOWN

pytestmark = pytest.mark.gpu


def answers(engine: Engine) -> list[list[int]]:
    asked = [
        engine.add(
            [(7 * i + j) % 4000 for j in range(n)], SamplingParams(max_tokens=12, temperature=0.8 * (i % 2), seed=i)
        )
        for i, n in enumerate((5, 40, 64, 500, 900, 33))
    ]
    run(engine)
    assert not any(request.error for request in asked)
    return [request.generated for request in asked]


@pytest.mark.parametrize("kv", ("bf16", "fp8"))
@pytest.mark.parametrize("name", ("Qwen3.5-0.8B", "Qwen3-0.6B"))
def test_what_requests_launch_is_there_and_answers_are_the_same(name: str, kv: str) -> None:
    config = ModelConfig.from_dict(KNOWN[name] | {"num_hidden_layers": 4, "vocab_size": 4096})
    model = random_decoder(config, "cuda", torch.bfloat16)

    def fresh() -> Engine:
        return engine_for(model, CacheConfig(kv), "cuda", torch.bfloat16, pool=4096, slots=8, context=1024)

    engine = fresh()
    assert go_through(engine)
    with counted() as later:
        got = answers(engine)
    assert later.compiled + later.found <= 4, f"left to compile: {sorted(name for _, name in later.slowest)}"
    assert_nothing_held(engine)
    assert got == answers(fresh())


def test_a_second_engine_of_the_kind_is_not_gone_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    config = ModelConfig.from_dict(KNOWN["Qwen3-0.6B"] | {"num_hidden_layers": 2, "vocab_size": 4096})
    model, gone = random_decoder(config, "cuda", torch.bfloat16), []
    plain = precompile_file.go_through
    monkeypatch.setattr(precompile_file, "go_through", lambda *a: gone.append(1) or plain(*a))
    for done in (1, 1):
        engine = engine_for(model, CacheConfig("bf16"), "cuda", torch.bfloat16, pool=2048, slots=4, context=512)
        precompile(engine)
        assert len(gone) == done
    assert len(list(tmp_path.glob("hybridkv-*.json"))) == 1
