"""What tests of single kernels on the GPU share."""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from hybridkv import opening


@pytest.fixture(autouse=True, scope="session")
def compiled_when_needed() -> Iterator[None]:
    """A test needs few of the kernels that are compiled when a model is opened; test_precompile has them all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "precompile", lambda *_: 0)
        yield


@pytest.fixture
def on_the_gpu() -> Iterator[None]:
    """New tensors are on the GPU."""
    with torch.device("cuda"):
        yield


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType, str], list[str]]:
    """`count(file, name)`: a list that grows with every call of that function."""

    def watch(file: ModuleType, name: str) -> list[str]:
        calls, kernel = [], getattr(file, name)

        def counted(*args: Any, **more: Any) -> Any:
            calls.append(name)
            return kernel(*args, **more)

        monkeypatch.setattr(file, name, counted)
        return calls

    return watch
