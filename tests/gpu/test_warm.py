"""Next turns that are read before they come, on the GPU: whoever begins with one has the bits of a cold run."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from exactness import Models

from engine.driving import assert_nothing_held
from engine.reusing import ask, poison, same
from engine.test_warm import SALT, read, reuse_of
from hybridkv.engine.warm import WarmReader

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder: Path = tmp_path_factory.mktemp("warm")
    return Models(folder, "cuda")


@pytest.mark.parametrize("stops", [0, 1])
@pytest.mark.parametrize(("dtype", "kv"), [("float32", "f32"), ("bfloat16", "bf16"), ("bfloat16", "fp8")])
@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "qwen3_next"])
def test_a_view_that_was_read_ahead_gives_the_bits_of_a_cold_run(
    models: Models, kind: str, dtype: str, kv: str, stops: int
) -> None:
    llm = models.open(kind, dtype, kv, None, context=1024)
    engine = llm.engine
    assert engine.launches_ahead
    said = tiny.token_ids(300, seed=1)
    view = [*said[:150], *tiny.token_ids(400, seed=2)[150:]]
    ask(engine, said, salt=SALT)
    read(engine, WarmReader(0), said, view, stops)
    poison(engine)
    asked = [*view, *tiny.token_ids(9, seed=3)]
    cold = ask(engine, asked, salt=b"other", cache=False)
    found = ask(engine, asked, salt=SALT)
    torch.cuda.synchronize()
    assert found.cached_tokens == len(view) // reuse_of(engine).q * reuse_of(engine).q and same(found, cold)
    assert_nothing_held(engine)
