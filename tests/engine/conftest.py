"""Engines of any size over the tiny models, whose weights are loaded once."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import tiny
import torch

from engine.ascii_tokenizer import write_tokenizer
from hybridkv.cache import KVCacheManager
from hybridkv.cache.reuse import Reuse
from hybridkv.cache.rounded_states import with_checkpoint_dtype
from hybridkv.cache.tiers import HostTier
from hybridkv.config import CacheConfig
from hybridkv.engine.engine import Engine
from hybridkv.engine.mixed_graphs import CapturedMixed, MixedGraphs
from hybridkv.eviction import Evictor
from hybridkv.kernels.step_index import StepShape
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
        rows: int | None = None,  # of state for checkpoints; None: nothing is reused
        kv: str = "f32",
        eviction: CacheConfig | None = None,
        folder: Path | None = None,  # of another model than the kind's
        host: HostTier | None = None,  # None: as a CPU has it, where pages do not go there
        checkpoints: str = "auto",  # their dtype
    ) -> Engine:
        llm = open_llm(oracle(kind).folder if folder is None else folder, **({"exact": True} if exact else {}))
        config = CacheConfig(kv, 16) if eviction is None else eviction
        schema = with_checkpoint_dtype(cache_schema(llm.config, config, torch.float32), checkpoints)
        manager = KVCacheManager(
            schema, schema.pool_pages(1, pool), slots, context, exact=exact, checkpoints=rows, host=host,
        )  # fmt: skip
        if rows is not None:
            Reuse(manager)
        evictor = None if eviction is None else Evictor.make(config, manager, scale=llm.config.attention_scale)
        return Engine(llm.model, manager, tokenizer, step_tokens, eos, evictor)

    return build


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a hybrid with one layer of each kind, for tests of a thousand requests."""
    config, model, settings = tiny.KINDS["qwen3_5"]
    settings = {**settings, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    settings |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("two_layers")
    model(config(**settings)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def ascii_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    found = Tokenizer.from_folder(folder)
    assert found is not None
    return found


class Replayed:
    """Runs on what lies in the static buffers, as a graph does."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[StepShape]:
    """A capture makes a call of the model on the same buffers; the list grows with every replay."""
    found: list[StepShape] = []

    def capture(self: MixedGraphs, shape: StepShape) -> CapturedMixed:
        step = self.manager.padding_of_shape(shape)
        tokens = torch.zeros(shape.tokens, dtype=torch.int64)
        rows = torch.zeros(shape.decodes + shape.chunks, dtype=torch.int64)
        hidden = torch.empty(len(rows), self.model.config.hidden)

        def forward() -> None:
            own = step.again()
            assert own.any_length and all(view.lengths is None for view in own.streams.values())
            hidden.copy_(self.model.hidden(tokens, own.index.positions, self.manager.acquire(own), rows))

        def replay() -> None:
            found.append(shape)
            forward()

        forward()
        assert hidden.isfinite().all(), "padding gives what is no number"
        return CapturedMixed(Replayed(replay), tokens, rows, step.packed, hidden)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(MixedGraphs, "_capture", capture)
    return found
