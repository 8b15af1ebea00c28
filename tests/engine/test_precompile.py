"""What common steps launch is compiled beforehand: all of it, once, and nothing runs. Without a GPU: for one."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from own_process import compile_alone

from engine.driving import KINDS, alone, assert_nothing_held, prompt
from hybridkv.config import SamplingParams
from hybridkv.engine import precompile
from hybridkv.engine.engine import Engine

# An engine on CPU tensors whose ops take their kernels all the same: launchers run, and what they launch is compiled.
LAUNCHES = """
import torch
from hybridkv.kernels import backend

backend.use_triton = lambda x: True
backend.capability, backend.sm_count = (lambda device: (9, 0)), (lambda device: 132)
for name in ("is_hopper", "has_pdl", "has_gluon"):
    setattr(backend, name, lambda device: True)
torch.backends.mkldnn.is_available = lambda: False
torch.cuda.graph_pool_handle = lambda: None
import no_device
from no_device import JITFunction

JITFunction.run = no_device.run
from hybridkv.bench.standin import make_engine
from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.engine.graphs import DecodeGraphs
from hybridkv.engine.mixed_graphs import MixedGraphs
from hybridkv.engine.workspace import chunk_rows
from hybridkv.engine.precompile import _forward, go_through
from hybridkv.kernels.compiling import counted
from hybridkv.kernels.step_index import StepShape
from hybridkv.models.config import ModelConfig
from hybridkv.models.random_weights import random_decoder

config = ModelConfig.from_dict(dict(
    model_type="qwen3", vocab_size=512, hidden_size=256, num_hidden_layers=5, intermediate_size=512,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, rms_norm_eps=1e-6,
    rope_theta=1e6, tie_word_embeddings=False,
))
model = random_decoder(config, "cpu", torch.bfloat16)
engine = make_engine(model, CacheConfig(kv_dtype="bf16"), "cpu", torch.bfloat16, 8, 1024, step_tokens=512)
runner, manager = engine.runner, engine.manager
runner.graphs = engine.scheduler.graphs = DecodeGraphs(model, manager, runner.cost)
runner.mixed = engine.scheduler.mixed = MixedGraphs(model, manager, 512, runner.cost)
with counted() as before:
    assert go_through(engine)
manager.check_integrity()
assert manager.free_slots == manager.slots and not manager.slot_of
JITFunction.run = no_device.compile_only  # from here on launches are compiled one after the other, and counted
with counted() as later:
    for tokens, slots in ((40, 1), (100, 1), (512, 1), (64, 3)):
        for i in range(slots):
            manager.admit_request(i)
        step = manager.prepare_forward([(i, tokens) for i in range(slots)])
        model.forward(torch.zeros(tokens * slots, dtype=torch.int64), step.index.positions, manager.acquire(step),
                      torch.zeros(slots, dtype=torch.int64))
        for i in range(slots):
            manager.release_request(i)
    for rows in (1, 2, 4, 8):
        _forward(engine, manager.padding_step(rows, 1024), rows)
    for size, decodes in ((128, 0), (256, 8), (448, 8)):
        _forward(engine, manager.padding_of_shape(StepShape(size, decodes, chunk_rows(size))), size)
print(before.compiled + before.found, later.compiled + later.found, sorted({name for _, name in later.slowest}))
"""


@pytest.mark.slow
def test_steps_of_other_sizes_launch_what_was_compiled() -> None:
    """Prompts of all lengths, alone and together, decode steps and captured steps: nothing is left to compile."""
    pytest.importorskip("triton", minversion="3.6")
    before, later, which = compile_alone(LAUNCHES).split(maxsplit=2)
    assert int(before) > 12 and int(later) == 0, which


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder for kernels. Steps are gone through, and their kernels, of which a CPU has none, run."""
    monkeypatch.setattr(precompile, "kernel_folder", lambda: tmp_path / "kernels")
    monkeypatch.setattr(precompile, "on_gpu", lambda engine: True)
    monkeypatch.setattr(precompile, "_name", lambda engine: "such")
    return tmp_path / "kernels"


def test_it_is_done_once_for_engines_of_a_kind(
    engine_of: Callable[..., Engine], as_on_a_gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []
    monkeypatch.setattr(precompile, "go_through", lambda engine, progress: done.append(engine) or True)
    for _ in range(2):
        precompile.precompile(engine_of("llama"))
    assert len(done) == 1 and [path.name for path in as_on_a_gpu.iterdir()] == ["hybridkv-such.json"]


def test_a_pass_that_fails_is_told_and_tried_again(
    engine_of: Callable[..., Engine], as_on_a_gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> bool:
        raise torch.OutOfMemoryError("no memory for a step")

    monkeypatch.setattr(precompile, "go_through", fails)
    for _ in range(2):
        with pytest.warns(UserWarning, match="compiled when they are first needed: no memory for a step"):
            precompile.precompile(engine_of("llama"))
    assert not as_on_a_gpu.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_going_through_steps_leaves_the_engine_as_it_was(
    kind: str, engine_of: Callable[..., Engine], as_on_a_gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the ops do run, on padding and on a request that is gone afterwards."""
    params = SamplingParams(max_tokens=8, temperature=0.7, seed=3)
    want = alone(engine_of(kind), prompt(40), params).generated
    engine = engine_of(kind)
    held = engine.add(prompt(9), params, hold=True)
    while not engine.idle:
        engine.step()
    monkeypatch.setattr(precompile, "together", lambda *_: torch.inference_mode())
    precompile.precompile(engine)
    engine.manager.check_integrity()
    assert list(engine.manager.slot_of) == [held.key]
    engine.abort(held)
    assert alone(engine, prompt(40), params).generated == want
    assert_nothing_held(engine)


def test_layers_of_one_kind_are_gone_through_once(engine_of: Callable[..., Engine]) -> None:
    layers = engine_of("qwen3_5").runner.model.layers  # type: ignore[attr-defined]
    kinds = precompile._kinds(layers)
    assert len(kinds) == 3 < len(layers) and len({type(layers[i].mixer) for i in kinds[:2]}) == 2
    assert precompile._kinds([SimpleNamespace()] * 3) == [0, 2] and precompile._kinds([]) == []
