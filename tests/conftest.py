"""What every test gets: one thread, a fixed seed, poisoned fresh memory; and the tiny models, built once per process.

Poison: torch's deterministic mode fills uninitialised memory (`empty`, `empty_like`, `new_empty`, `empty_strided`) with
NaN, or with the largest value for integers. An output that some path never writes is then seen at once
(`test_poison.py`). `warn_only` keeps operations without a deterministic form usable.
"""

# ruff: noqa: E402  what is set here must be set before those imports
import gc
import os
import sys

gc.disable()  # until all tests are collected: a third of that time would be spent on walking what stays anyway
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported; several test processes share the cores

import triton_interpreter  # before anything that imports triton

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("USE_HUB_KERNELS", "0")
sys.modules.setdefault("fla", None)  # type: ignore[arg-type]  # transformers would run its GPU kernels on a CPU

import random
import signal
import subprocess
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from browser import browser, chromium  # noqa: F401  # fixtures
from hypothesis import settings

if TYPE_CHECKING:
    import tiny

    from hybridkv import LLM

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # `make test &` in a script: processes inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
triton_interpreter.install()
settings.register_profile("fixed", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("fixed")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Where pytest-timeout is not installed, its settings in pyproject.toml are known and have no effect."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds that a test may take")
        parser.addini("timeout_method", "how it is ended")


def pytest_report_header() -> str:
    return f"CPU instructions used by torch: {torch.backends.cpu.get_cpu_capability()}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the collector of garbage looks from here on at what came later alone."""
    gc.collect()
    gc.freeze()
    gc.enable()


def poison_fresh_memory() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(scope="session", autouse=True)
def poison_before_session_fixtures() -> None:
    poison_fresh_memory()


@pytest.fixture(autouse=True)
def fixed_surroundings(request: pytest.FixtureRequest) -> Iterator[None]:
    """A seed of the test's own, so that order, selection and the file's place change nothing; poison on again."""
    seed = zlib.crc32((request.node.name + os.environ.get("HYBRIDKV_TEST_SEED", "")).encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 0.5 ms: without a GPU it notes who called it
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    poison_fresh_memory()
    yield


@pytest.fixture(scope="module")
def weights_measured_once() -> Iterator[None]:
    """How much each stream copies is measured once for a model and a schema, not by every engine over them."""
    from hybridkv.engine import engine

    plain, found = engine.copying_weights, {}

    def remembered(model: Any, manager: Any, tokens: list[int], ranks: None) -> torch.Tensor:
        key = id(model), manager.schema, manager.exact, manager.device, tuple(tokens)
        if key not in found:
            found[key] = model, plain(model, manager, tokens, ranks)  # the model lives on: no other gets its id
        return found[key][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "copying_weights", remembered)
        yield


@pytest.fixture(scope="module")
def found_by_workers() -> Iterator[None]:
    """Ranks that a model starts import the package that is tested, and do not interpret kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        patch.delenv("TRITON_INTERPRET", raising=False)
        yield


@pytest.fixture(scope="module")
def ready_ranks(found_by_workers: None) -> Iterator[None]:
    """The same, and they need not import torch first: for tests that ask what ranks do, not how they are started."""
    import ready_ranks

    from hybridkv.parallel import launch

    plain = SimpleNamespace(PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired, Popen=ready_ranks.popen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "subprocess", plain)
        yield


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> "Callable[[str], tiny.Oracle]":
    """`oracle(kind)`: a tiny model, its folder, token ids and the logits transformers gives for them."""
    import tiny  # here: it imports transformers, which takes seconds, and xdist's own process needs none of it

    return cache(lambda kind: tiny.Oracle(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="session")
def open_llm() -> Callable[..., "LLM"]:
    """`open_llm(path, dtype="float32", kv_dtype="f32")`: an LLM on the CPU, kept for the session."""

    @cache
    def build(path: Path, dtype: str = "float32", kv_dtype: str = "f32", **more: Any) -> "LLM":
        from hybridkv import LLM, CacheConfig

        more = {"max_requests": 2, "max_context": 512, **more}
        return LLM(model=str(path), device="cpu", dtype=dtype, cache=CacheConfig(kv_dtype=kv_dtype), **more)

    return build
