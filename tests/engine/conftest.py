"""Engines of any size over the tiny models, whose weights are loaded once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.ascii_tokenizer import write_tokenizer
from hybridkv.cache import KVCacheManager
from hybridkv.config import CacheConfig
from hybridkv.engine.engine import Engine
from hybridkv.models import cache_schema
from hybridkv.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def engine_of(oracle: Callable, open_llm: Callable) -> Callable[..., Engine]:
    """`engine_of("llama", pool=400)`: float32, pages of 16 entries, room for `pool` tokens, no end token."""

    def build(
        kind: str,
        pool: int = 4096,
        slots: int = 8,
        context: int = 512,
        step_tokens: int = 512,
        eos: frozenset[int] = frozenset(),
        tokenizer: Tokenizer | None = None,
        exact: bool = False,
    ) -> Engine:
        llm = open_llm(oracle(kind).folder, **({"exact": True} if exact else {}))
        schema = cache_schema(llm.config, CacheConfig("f32", 16), torch.float32)
        manager = KVCacheManager(schema, schema.pool_pages(1, pool), slots, context, exact=exact)
        return Engine(llm.model, manager, tokenizer, step_tokens, eos)

    return build


@pytest.fixture(scope="session")
def ascii_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    found = Tokenizer.from_folder(folder)
    assert found is not None
    return found
